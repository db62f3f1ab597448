"""Imported by trainers and tools before everything else: what comes before `import torch`.

Standard library only, and little of it: before these lines have run, Ctrl-C and SIGUSR1 do what
they do to any Python program.
"""

import os
import signal
import sys
import time
from types import FrameType

PROCESS_START = time.perf_counter()  # `import torch` takes a second or two
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
PROGRAM = os.path.realpath(sys.argv[0])
# Was a trainer, tool or study started, by its path or by -m (more Python does not know yet)? Or
# does a test import?
FOLDER = os.path.dirname(PROGRAM)
STARTED = sys.argv[0] == "-m" or (
    PROGRAM.endswith(".py") and ROOT in (FOLDER, os.path.dirname(FOLDER))
)


def say_stopped(when: str = "") -> None:
    """Print the one line after Ctrl-C. (A terminal shows ^C, and the cursor stands behind it.)"""
    newline = "\n" if sys.stderr.isatty() else ""
    print(f"{newline}stopped {when}".rstrip(), file=sys.stderr, flush=True)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT: raise KeyboardInterrupt, as always; but during an import end the process.

    Libraries written in C drop exceptions there, and fail later over what is missing then.
    """
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            say_stopped()
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if STARTED:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup ignores it
        signal.signal(signal.SIGINT, interrupt)
    if hasattr(signal, "SIGUSR1"):  # it asks for a save: before training there is none to make
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

# Idle OpenMP threads should soon sleep: by default they spin for long, and on a busy machine that
# takes the cores away from the threads that have work. Read when the library is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
