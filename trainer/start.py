"""Imported before everything else, by the trainers: what has to come before `import torch`."""

import gc
import os
import sys
import time

PROCESS_START = time.perf_counter()  # `import torch` takes a second or two
# Idle OpenMP threads should soon sleep: by default they spin for long, and on a busy machine that
# takes the cores away from the threads that have work. Read when the library is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# Nothing that torch makes while it is imported is garbage, and to look for some takes a quarter of
# that time. From the first step on Python looks as often as ever.
BEFORE = gc.get_threshold()
if "torch" not in sys.modules:
    gc.set_threshold(1_000_000)


def look_for_garbage() -> None:
    """As often as Python does by itself: the run is set up."""
    gc.set_threshold(*BEFORE)
