"""Prepare a process before `import torch`; trainers and tools import this file first.

It imports little, and only from the standard library. Until its lines have run, Ctrl-C and SIGUSR1
do what they do to any Python program, and a process whose torchrun was killed lives on.
"""

# `_signal` is in C. The module `signal` around it takes longer to import than all else here.
import _signal as signal  # type: ignore[import-not-found]
import os
import sys
import time
from io import TextIOWrapper

PROCESS_START = time.perf_counter()  # `import torch` takes a second or two
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
FOLDER = os.path.dirname(os.path.realpath(sys.argv[0]))
# True if a trainer, tool or study was started, by its path or by -m (Python does not know the
# module's name yet, so any module counts). False if, for example, a test imports this file.
STARTED = sys.argv[0] == "-m" or (
    sys.argv[0].endswith(".py") and ROOT in (FOLDER, os.path.dirname(FOLDER))
)


def say_stopped(when: str = "") -> None:
    """Print the one line after Ctrl-C."""
    # A terminal shows ^C, and the cursor stands behind it: start a new line.
    newline = "\n" if sys.stderr.isatty() else ""
    print(f"{newline}stopped {when}".rstrip(), file=sys.stderr, flush=True)


def interrupt(number: int, frame: "FrameType | None") -> None:
    """Handle SIGINT: raise KeyboardInterrupt as usual, but end the process during an import.

    Libraries written in C drop exceptions during an import, and fail later because names are
    missing.
    """
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            say_stopped()
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def set_up_stdout() -> None:
    """Print file names with the bytes that they have on disk, so that printed commands can be
    pasted. Replace a letter that stdout cannot encode, instead of failing."""
    if isinstance(sys.stdout, TextIOWrapper):
        utf_8 = sys.stdout.encoding.lower() == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if utf_8 else "replace")


if STARTED:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup ignores it
        signal.signal(signal.SIGINT, interrupt)
    if hasattr(signal, "SIGUSR1"):  # it asks for a save; before training there is none to make
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    set_up_stdout()

from types import FrameType  # noqa: E402  # (late: from here on an import can be interrupted)

PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def end_with_torchrun() -> None:
    """End this process when torchrun dies, even by `kill -9`; at once if torchrun is already dead.

    Without torchrun this process would be unseen: it could not be stopped or restarted, would keep
    its GPU and the lock of its snapshots, and would take a rank of the next run on the same port.
    On Linux the kernel sends SIGKILL when the parent dies. SIGKILL leaves no time to save; a
    process that tried to save could wait forever for the others. (To save and stop, send SIGTERM to
    torchrun: it passes SIGTERM on, and leaves 30 seconds for the save.)
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if not torchrun_lives():  # (after prctl, so that no death of torchrun is missed)
        say_stopped("because torchrun, which had started this process, is gone")
        os._exit(1)


def torchrun_lives() -> bool:
    """Return True if torchrun is among the ancestors of this process: parent, grandparent, etc.

    The parent alone does not tell. It may be a script that torchrun started; torchrun may be
    process 1 of a container; and an orphan's new parent may be any process that adopts orphans.

    torchrun names its process "pt_elastic". Another program that starts workers with torchrun's
    code has at least loaded libtorch. (A process that /proc hides belongs to another user, so it is
    not this process's torchrun.) Without /proc, as on macOS, an orphan is recognised by its parent,
    process 1.
    """
    pid = os.getppid()
    if pid == 0 or not os.path.exists("/proc/self/stat"):  # (0: the parent is outside a container)
        return pid != 1
    while pid:
        name, _, numbers = read_or_none(f"/proc/{pid}/stat").rpartition(")")
        if name.endswith("(pt_elastic") or "libtorch" in read_or_none(f"/proc/{pid}/maps"):
            return True
        pid = int(numbers.split()[1]) if numbers else 0
    return False


def read_or_none(path: str) -> str:
    """Return the text of a file in /proc; "" if its process has ended or is another user's."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun started this process
    end_with_torchrun()

# Number of turns that an idle OpenMP thread waits for work before it sleeps. By default it is many:
# on a busy machine idle threads take the cores away from threads with work. The OpenMP library
# reads the variable when it is loaded.
SPIN_COUNT = "10000"
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT

# Variables that configure PyTorch's GPU allocator: today's name, then older names. Segments that
# can grow (`expandable_segments`) leave fewer gaps between tensors of different sizes.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# Expandable segments work here. On Windows PyTorch warns of them, the drivers of WSL
# (pytorch#192330) and of Jetsons fail, and AMD's may hang (pytorch#192259).
HAS_SEGMENTS = (
    sys.platform == "linux"
    and not any(name in os.uname().release for name in ("microsoft", "tegra"))
    and not os.path.exists("/dev/kfd")  # AMD's driver
)
if HAS_SEGMENTS and not os.environ.keys() & set(ALLOCATOR):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
