"""Imported before everything else, by the trainers: what has to come before `import torch`."""

import os
import time

PROCESS_START = time.perf_counter()  # `import torch` takes a second or two
# Idle OpenMP threads should soon sleep: by default they spin for long, and on a busy machine that
# takes the cores away from the threads that have work. Read when the library is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
