"""What people type: `python -m scripts.NAME`, or `python scripts/NAME.py`; each has its --help.

command                  the question that it answers                         takes
generate                 what does a trained model write?                     seconds
evaluate                 how good is it?                                      seconds to minutes
export_hf                how do I use it with transformers?                   seconds
plot_metrics             how did the training go?                             seconds
plan_memory              what fits, how fast is it, which flags are best?     seconds to minutes
memory_page              what is alive at the peak, and why? (in a browser)   seconds
memory_timeline          where does a step's memory go? (three pictures)      half a minute
benchmark                what does each policy cost on this machine?          minutes
kept_tensors             which tensors does a block keep for backward?        seconds
checkpoint_from_scratch  how does an activation checkpoint work?              seconds
lesson                   have I understood it? (eleven exercises)             half an hour
gpt2_small.sh            how do I train GPT-2 small on one GPU?               days
gpt2_small_ddp.sh        and on all GPUs of a machine?                        days

Python runs this file before any of them, before `import torch` even, which takes seconds. So here
stands what a user may do to all of them at any time: stop them, and look at the first lines only.
"""

import atexit
import errno
import gc
import os
import sys
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable
from functools import wraps
from io import TextIOWrapper
from pathlib import Path

from trainer.start import STARTED, say_stopped


def tool(do: Callable[[list[str]], int | None]) -> Callable[..., int]:
    """Makes a `main` of what does something with the command line: it returns the exit code, and a
    mistake of the user, a full disk, Ctrl-C and a reader who is gone are no bugs of the program."""

    @wraps(do)
    def main(argv: list[str] | None = None) -> int:
        from data import DataError  # (and torch, which takes seconds)
        from trainer.flags import UsageError, print_error
        from trainer.plan import TooLarge
        from trainer.snapshot import SaveError, SnapshotError

        try:
            return do(sys.argv[1:] if argv is None else argv) or 0
        except (UsageError, DataError, SnapshotError, SaveError, TooLarge) as error:
            print_error(error)
            return {SaveError: 3, TooLarge: 4}.get(type(error), 2)
        except BrokenPipeError:  # `| head`
            return 141  # 128 + SIGPIPE, as shells count
        except OSError as error:
            # (Who finds the disk full while he writes is told no name.)
            if error.filename is None and error.errno != errno.ENOSPC:
                raise
            print_error(f"{error.filename or 'cannot write'}: {error.strerror}")
            return 2
        except SystemExit as ended:  # argparse; or a run of a study, which has said why
            return int(ended.code or 0)
        except KeyboardInterrupt:
            say_stopped()
            return 130  # 128 + SIGINT

    return main


def add_snapshot(parser: ArgumentParser, what: str) -> None:
    """The snapshot that a command reads, FILE or --checkpoint-path FILE; `what`: its help."""
    add, path = parser.add_argument, Path("checkpoints/minigpt_single.pt")
    # (argparse hands SUPPRESS itself to the type where no FILE is typed.)
    add("checkpoint_path", nargs="?", default=SUPPRESS, metavar="FILE",
        type=lambda word: word if word is SUPPRESS else Path(word),
        help=f"{what} (default: {path})")  # fmt: skip
    add("--checkpoint-path", type=Path, default=path, metavar="FILE", help="the same")


def flush() -> None:
    """At the end: Python itself would complain about a reader who is gone; and look for garbage in
    all that torch is made of, for half a second. The system takes it back sooner."""
    gc.freeze()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if STARTED:
    atexit.register(flush)
    if isinstance(sys.stdout, TextIOWrapper):  # a letter that it cannot spell is no reason to crash
        sys.stdout.reconfigure(errors="replace")
