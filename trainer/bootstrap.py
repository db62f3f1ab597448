"""Prepare a process before `import torch`. All trainers and commands import this file first.

This file imports little, and only from the standard library, because it should run as early as
possible. Before it has run, Ctrl-C has the effect that it has in every Python program, and a
process does not end when its torchrun is killed.
"""

# `_signal` is the part of the module `signal` that is written in C. Importing `signal` itself would
# take longer than all the rest of this file.
import _signal as signal  # type: ignore[import-not-found]
import os
import sys
import time
from io import TextIOWrapper
from itertools import accumulate

# The time of a run is measured from here, so it includes `import torch`, which takes 1 to 2 s.
PROCESS_START = time.perf_counter()
PROJECT_FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
# Folder of the script that was started.
STARTED_SCRIPT_FOLDER = os.path.dirname(os.path.realpath(sys.argv[0]))
# True if Python was started with a program of this project, by path or with -m. (With -m,
# sys.argv[0] is still "-m" here, because Python does not know the module's path yet. So with -m
# this is True for every module.) False if, for example, a test imports this file.
IS_MAIN_PROGRAM = sys.argv[0] == "-m" or (
    sys.argv[0].endswith(".py")
    and PROJECT_FOLDER in (STARTED_SCRIPT_FOLDER, os.path.dirname(STARTED_SCRIPT_FOLDER))
)


def say_stopped(when: str = "") -> None:
    """Print "stopped" and `when` (when or why the process stopped) as one line on stderr."""
    # A terminal shows ^C without a line break behind it. So begin a new line.
    newline = "\n" if sys.stderr.isatty() else ""
    print(f"{newline}stopped {when}".rstrip(), file=sys.stderr, flush=True)


def handle_sigint(number: int, frame: "FrameType | None") -> None:
    """Handle SIGINT: raise KeyboardInterrupt, as Python's own handler does. But if the signal comes
    during an import, end the process with exit code 130.

    Libraries written in C drop an exception that is raised while they import a module. Later these
    libraries fail, because names of that module are missing.
    """
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            say_stopped()
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def set_stdout_errors() -> None:
    """Set how stdout encodes characters that its encoding cannot express.

    If stdout has UTF-8, a file name is printed with exactly the bytes that it has on disk, so that
    printed commands can be pasted into a shell. With another encoding, stdout prints a replacement
    character instead of raising an error.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        utf_8 = sys.stdout.encoding.lower() == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if utf_8 else "replace")


if IS_MAIN_PROGRAM:
    # A standard stream that was closed before the start is None in Python. Replace it by the null
    # device. Otherwise the next file that is opened, for example a snapshot, gets the number of the
    # stream, and with it everything that C code prints.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number
            setattr(sys, name, open(number, "w" if number else "r"))
    # A shell may start a background process with SIGINT ignored. Then SIGINT stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle_sigint)
    set_stdout_errors()

# (Imported after `handle_sigint` is installed.)
from collections.abc import Sequence  # noqa: E402
from types import FrameType  # noqa: E402

PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def end_with_torchrun() -> None:
    """End this process when its torchrun dies, even if `kill -9` killed torchrun. If torchrun is
    already dead, end this process at once, with exit code 1.

    A process that outlives its torchrun is hard to notice. Nothing stops or restarts it. It keeps
    its GPU and the lock of its snapshots, and it takes a rank in the next run on the same port.

    On Linux, prctl lets the kernel send SIGKILL to this process when its parent dies. SIGKILL
    leaves no time to save. A save would not work anyway: it needs all processes, and could wait
    forever for dead ones. (To save and stop, send SIGTERM to torchrun. torchrun passes SIGTERM on
    to its processes, and leaves them 30 seconds to save.)
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Check this after the call of prctl, which sends no signal if the parent is already dead.
    if not torchrun_lives():
        say_stopped("because torchrun, which had started this process, is gone")
        os._exit(1)


def torchrun_lives() -> bool:
    """Return True if torchrun is among the ancestors of this process: parent, grandparent, etc.

    The id of the parent alone does not decide this. The parent may be a script that torchrun
    started. Process 1 may be torchrun itself, in a container. And an orphan's new parent may be any
    process that adopts orphans, not only process 1.

    An ancestor counts as torchrun if its name is "pt_elastic", which is the name that torchrun
    gives its process. An ancestor that has loaded libtorch counts, too, because another program may
    start workers with torchrun's code. (If /proc hides a process, the process belongs to another
    user, so it is not the torchrun of this process.) Without /proc, as on macOS, the answer is
    False only for a process with parent 1.
    """
    pid = os.getppid()
    # (The parent's id is 0 if the parent is outside of this container.)
    if pid == 0 or not os.path.exists("/proc/self/stat"):
        return pid != 1
    while pid:
        name, _, numbers = read_or_empty(f"/proc/{pid}/stat").rpartition(")")
        if name.endswith("(pt_elastic") or "libtorch" in read_or_empty(f"/proc/{pid}/maps"):
            return True
        pid = int(numbers.split()[1]) if numbers else 0
    return False


def read_or_empty(path: str) -> str:
    """Return the text of a file of the kernel; "" if it cannot be read: there is no such file, or
    its process has ended or belongs to another user."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun started this process
    end_with_torchrun()

# Number of loop iterations for which an idle OpenMP thread waits for work before it sleeps. The
# default is much larger. With the default, idle threads take the cores of a busy machine away from
# threads with work. The OpenMP library reads the environment variable when it is loaded: during
# `import torch`.
SPIN_COUNT = "10000"
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def read_control_groups(controller: str, names: Sequence[str], root: str = "/") -> list[list[str]]:
    """Return the texts of the files `names` of this process's control group, and of each group
    above it, whose limits apply, too. The text of a missing file is "".

    `controller`: "cpu" or "memory". `root`: folder with the folders proc and sys. A line of
    /proc/self/cgroup is "0::/GROUP" (version 2), or "NUMBER:CONTROLLERS:/GROUP" (version 1, which
    has a tree of folders for each set of controllers). Source: man 7 cgroups.
    """
    return [
        [read_or_empty(f"{root}/sys/fs/cgroup/{tree}{folder}/{name}") for name in names]
        for line in read_or_empty(f"{root}/proc/self/cgroup").splitlines()
        for tree, group in [line.split(":", 2)[1:]]
        if tree == "" or controller in tree.split(",")
        for folder in accumulate(group.rstrip("/").split("/"), "{}/{}".format)
    ]


def cpu_quota(root: str = "/") -> float:
    """Return the number of cores whose time this process may use; infinity if it is not limited.

    A container may have a quota: 150 ms of CPU time in each period of 100 ms are 1.5 cores.
    """
    quotas = [
        words
        for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"])  # versions 2 and 1
        for texts in read_control_groups("cpu", names, root)
        if len(words := " ".join(texts).split()) == 2
    ]
    # ("max" and -1 stand for no quota.)
    return min((int(a) / int(b) for a, b in quotas if a.isdigit()), default=float("inf"))


# OpenMP starts as many threads as there are cores. With a quota, the kernel would stop all of them
# for the rest of a period as soon as they have used it up.
if cpu_quota() < (os.cpu_count() or 1):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(cpu_quota()))))

# Environment variables that configure PyTorch's GPU allocator: the present name, then two older
# names. With `expandable_segments` the allocator's memory segments can grow. This leaves fewer gaps
# between tensors of different sizes.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# True if expandable segments work on this system. On Windows PyTorch prints a warning about them.
# On WSL (pytorch#192330) and on Jetsons the driver fails. On AMD GPUs the driver may hang
# (pytorch#192259).
CAN_EXPAND_SEGMENTS = (
    sys.platform == "linux"
    and not any(name in os.uname().release for name in ("microsoft", "tegra"))
    and not os.path.exists("/dev/kfd")  # AMD's driver
)
if CAN_EXPAND_SEGMENTS and not os.environ.keys() & set(ALLOCATOR_VARIABLES):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
