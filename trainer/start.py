"""Imported by trainers and tools before everything else: what comes before `import torch`."""

import gc
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

PROCESS_START = time.perf_counter()  # `import torch` takes a second or two
# Idle OpenMP threads should soon sleep: by default they spin for long, and on a busy machine that
# takes the cores away from the threads that have work. Read when the library is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
BEFORE = gc.get_threshold()
# Was a trainer, tool or study started, by its path or by -m (more Python does not know yet)? Or
# does a test import?
ROOT, PROGRAM = Path(__file__).resolve().parents[1], Path(sys.argv[0])
STARTED = sys.argv[0] == "-m" or PROGRAM.suffix == ".py" and ROOT in PROGRAM.resolve().parents[:2]


def leave_garbage() -> None:
    """Look for it rarely, if torch is still to be imported. Nothing that it makes then is garbage,
    and to look for some takes a quarter of that time."""
    if "torch" not in sys.modules:
        gc.set_threshold(1_000_000)


def look_for_garbage() -> None:
    """As often as Python does by itself: the run is set up."""
    gc.set_threshold(*BEFORE)


def say_stopped(when: str = "") -> None:
    """The one line after Ctrl-C. (A terminal shows ^C, and the cursor stands behind it.)"""
    newline = "\n" if sys.stderr.isatty() else ""
    print(f"{newline}stopped {when}".rstrip(), file=sys.stderr, flush=True)


def interrupt(number: int, frame: FrameType | None) -> None:
    """What SIGINT does: KeyboardInterrupt, as always; but while something is imported, the end.

    Libraries written in C drop exceptions there, and fail later over what is missing then.
    """
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            say_stopped()
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if "scripts" not in sys.modules:  # (a tool knows no such moment as a run's first step)
    leave_garbage()
if STARTED and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup ignores it
    signal.signal(signal.SIGINT, interrupt)
