"""Tools and studies: `python -m scripts.NAME`, or `python scripts/NAME.py`; each has its --help.

use        generate (a trained model writes), plot_metrics (its curves)
plan       plan_memory (what fits), memory_timeline (a step's memory, drawn), benchmark (measured)
learn      checkpoint_from_scratch, kept_tensors (what a block keeps), ladder (what each rung costs)
trust      reliability with reliability_endings, _conditions, faults and trainer_process (runs that
           are broken on purpose), cpu_precision (is bfloat16 worth it here)

Python runs this file before any of them, before `import torch` even, which takes seconds. So here
stands what a user may do to all of them at any time: stop them, and look at the first lines only.
"""

import atexit
import os
import sys
from types import TracebackType


def end_in_one_line(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """A sys.excepthook: Ctrl-C and a reader who is gone (`| head`) are no bugs of the program."""
    if issubclass(kind, KeyboardInterrupt):
        # A terminal shows ^C, and the cursor stands behind it.
        print("\n" * sys.stderr.isatty() + "stopped", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT, as shells count
    if issubclass(kind, BrokenPipeError):
        sys.exit(141)  # 128 + SIGPIPE
    sys.__excepthook__(kind, error, traceback)


def flush() -> None:
    """At the end: Python itself would complain about a reader who is gone."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


sys.excepthook = end_in_one_line
atexit.register(flush)
