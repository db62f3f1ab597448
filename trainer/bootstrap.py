"""Prepare a process before `import torch`; all trainers and commands import this file first.

This file should run as early as possible, so it imports little, and only from the standard library.
Before it has run, Ctrl-C has the effect that it has in every Python program, and a process does not
end when its torchrun is killed.
"""

# `_signal` is the part of the module `signal` that is written in C. Importing `signal` itself would
# take longer than all the rest of this file.
import _signal as signal  # type: ignore[import-not-found]
import os
import sys
import time
from io import TextIOWrapper

# The time of a run is measured from here, so it includes `import torch`, which takes 1 to 2 s.
PROCESS_START = time.perf_counter()
PROJECT_FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
# Folder of the script that was started.
STARTED_SCRIPT_FOLDER = os.path.dirname(os.path.realpath(sys.argv[0]))
# True if Python was started with a program of this project, by path or with -m; False if, for
# example, a test imports this file. (With -m it is True for every module, because Python does not
# know the module's path yet: sys.argv[0] is still "-m".)
IS_MAIN_PROGRAM = sys.argv[0] == "-m" or (
    sys.argv[0].endswith(".py")
    and PROJECT_FOLDER in (STARTED_SCRIPT_FOLDER, os.path.dirname(STARTED_SCRIPT_FOLDER))
)


def say_stopped() -> None:
    """Print "stopped" as one line on stderr."""
    # A terminal shows ^C without a line break behind it.
    newline = "\n" if sys.stderr.isatty() else ""
    print(f"{newline}stopped", file=sys.stderr, flush=True)


def handle_sigint(number: int, frame: "FrameType | None") -> None:
    """Handle SIGINT: raise KeyboardInterrupt, as Python's own handler does; during an import, end
    the process with exit code 130.

    Libraries written in C drop an exception that is raised while they import a module, and fail
    later, because names of that module are missing.
    """
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            say_stopped()
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if IS_MAIN_PROGRAM:
    # A standard stream that was closed before the start is None in Python. Without the null device
    # in its place, the next file that is opened, for example a snapshot, would get the number of
    # the stream, and with it everything that C code prints.
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # (`open` takes the lowest free number, which is this one)
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
    # A shell may start a background process with SIGINT ignored, which stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle_sigint)
    # Print "?" for a character that stdout's encoding does not have, instead of raising an error.
    if isinstance(sys.stdout, TextIOWrapper):  # (not in a notebook)
        sys.stdout.reconfigure(errors="replace")

# (Imported after `handle_sigint` is installed.)
from types import FrameType  # noqa: E402

# If torchrun started this process, let the kernel send SIGKILL to it when torchrun dies, even if
# `kill -9` killed torchrun (on Linux only). A process that outlives its torchrun is hard to notice:
# it keeps its GPU and the lock of its snapshots, and takes a rank in the next run on the same port.
# SIGKILL leaves no time to save, but a save would fail anyway: it needs all processes, and could
# wait forever for dead ones. (To save and stop, send SIGTERM to torchrun, which passes it on to its
# processes and leaves them 30 seconds.)
if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG of <sys/prctl.h>

# Number of loop iterations for which an idle OpenMP thread waits for work before it sleeps. With
# the default, which is much larger, idle threads take the cores of a busy machine away from threads
# with work. The OpenMP library reads the variable when it is loaded, during `import torch`.
SPIN_COUNT = "10000"
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT

# Environment variables that configure PyTorch's GPU allocator: the present name, then two older
# names. With `expandable_segments` the allocator's memory segments can grow, which leaves fewer
# gaps between tensors of different sizes.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# True if expandable segments work on this system: on Windows PyTorch warns about them, on WSL
# (pytorch#192330) and on Jetsons the driver fails, and on AMD GPUs it may hang (pytorch#192259).
CAN_EXPAND_SEGMENTS = (
    sys.platform == "linux"
    and not any(name in os.uname().release for name in ("microsoft", "tegra"))
    and not os.path.exists("/dev/kfd")  # AMD's driver
)
if CAN_EXPAND_SEGMENTS and not os.environ.keys() & set(ALLOCATOR_VARIABLES):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
