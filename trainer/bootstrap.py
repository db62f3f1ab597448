"""Imported by trainers and tools before everything else: what comes before `import torch`.

Standard library only, and little of it: before these lines have run, Ctrl-C and SIGUSR1 do what
they do to any Python program, and a process whose torchrun was killed lives on.
"""

# In C: the module around it takes longer to import than all else here.
import _signal as signal  # type: ignore[import-not-found]
import os
import sys
import time
from io import TextIOWrapper

PROCESS_START = time.perf_counter()  # `import torch` takes a second or two
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
FOLDER = os.path.dirname(os.path.realpath(sys.argv[0]))
# Was a trainer, tool or study started, by its path or by -m (more Python does not know yet)? Or
# does a test import?
STARTED = sys.argv[0] == "-m" or (
    sys.argv[0].endswith(".py") and ROOT in (FOLDER, os.path.dirname(FOLDER))
)


def say_stopped(when: str = "") -> None:
    """Print the one line after Ctrl-C. (A terminal shows ^C, and the cursor stands behind it.)"""
    newline = "\n" if sys.stderr.isatty() else ""
    print(f"{newline}stopped {when}".rstrip(), file=sys.stderr, flush=True)


def interrupt(number: int, frame: "FrameType | None") -> None:
    """Handle SIGINT: raise KeyboardInterrupt, as always; but during an import end the process.

    Libraries written in C drop exceptions there, and fail later over what is missing then.
    """
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            say_stopped()
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def set_up_stdout() -> None:
    """Print file names as the system has them, so that commands can be pasted. A letter that stdout
    cannot spell is no reason to fail."""
    if isinstance(sys.stdout, TextIOWrapper):
        utf_8 = sys.stdout.encoding.lower() == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if utf_8 else "replace")


if STARTED:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup ignores it
        signal.signal(signal.SIGINT, interrupt)
    if hasattr(signal, "SIGUSR1"):  # it asks for a save: before training there is none to make
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    set_up_stdout()

from types import FrameType  # noqa: E402  # (what is imported here can be interrupted)

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def end_with_torchrun() -> None:
    """End this process when torchrun dies, even by `kill -9`; at once if it is dead already.

    Without torchrun no one would see, stop or restart this process, which keeps its GPU and the
    lock of its snapshots, and takes a rank of the next run on the same port. Linux sends SIGKILL
    when the parent dies: a process that tried to save first could wait for others for ever. (To
    stop and save, send SIGTERM to torchrun: it passes it on, and leaves 30 seconds for it.)
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if not torchrun_lives():  # (asked now: from here on the kernel watches)
        say_stopped("because torchrun, which had started this process, is gone")
        os._exit(1)


def torchrun_lives() -> bool:
    """Look for torchrun among the processes above this one: parent, grandparent, and so on.

    The parent may be a script that torchrun has started; torchrun may be process 1 of a container;
    and an orphan's parent may be any process that takes in orphans. So each ancestor is looked at.
    torchrun names itself "pt_elastic"; another program that starts workers with torchrun's code has
    at least loaded libtorch. (A process that /proc hides is another user's: not ours.)
    Without /proc, as on macOS, orphans are known by their parent, process 1.
    """
    pid = os.getppid()
    if pid == 0 or not os.path.exists("/proc/self/stat"):  # (0: it is outside of this container)
        return pid != 1
    while pid:
        name, _, numbers = read_or_none(f"/proc/{pid}/stat").rpartition(")")
        if name.endswith("(pt_elastic") or "libtorch" in read_or_none(f"/proc/{pid}/maps"):
            return True
        pid = int(numbers.split()[1]) if numbers else 0
    return False


def read_or_none(path: str) -> str:
    """Read a file of /proc; "" if its process has ended, or is another user's."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


if "TORCHELASTIC_RUN_ID" in os.environ:  # it was torchrun that started this process
    end_with_torchrun()

# Idle OpenMP threads should soon sleep: by default they spin for long, and on a busy machine that
# takes the cores away from the threads that have work. Read when the library is loaded.
SPIN_COUNT = "10000"
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT

# How a GPU's allocator is configured: the name, and older ones. Segments that can grow leave fewer
# gaps between tensors of different sizes.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# Windows warns of them; drivers of WSL (pytorch#192330) and of Jetsons fail, AMD's may hang
# (pytorch#192259).
HAS_SEGMENTS = (
    sys.platform == "linux"
    and not any(name in os.uname().release for name in ("microsoft", "tegra"))
    and not os.path.exists("/dev/kfd")  # AMD's driver
)
if HAS_SEGMENTS and not os.environ.keys() & set(ALLOCATOR):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
