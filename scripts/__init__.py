"""The commands for users; `python -m scripts` lists them.

Python runs this file before each command, and before `import torch`, which takes seconds. This file
therefore handles what a user may do even then: press Ctrl-C, or read only the first lines of the
output (`| head`).
"""

import atexit
import errno
import gc
import os
import sys
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path

from trainer.bootstrap import IS_MAIN_PROGRAM, say_stopped

LISTING = """\
Type NAME as python -m scripts.NAME, and NAME.py as python NAME.py.
Each command has --help. Commands that plan a run take the trainers' flags, with the same meaning.

what you type                             the question that it answers                takes

before a run
plan_memory --model gpt2 --card RTX-4090  does a run fit? how long does a step take?  seconds
plan_memory --card L4 --all-knobs         which settings give the fastest step?       seconds
plan_memory --card L4 --longest-sequence  how long may a sequence be?                 a minute
plan_model FILE.py:FUNCTION --input 4x99  does a step of my own model fit?            seconds
plan_memory --at-peak                     what is alive at the peak, by name?         seconds
memory_page                               what is alive when, and why? (a page)       seconds
memory_timeline                           where does a step's memory go? (a picture)  seconds
benchmark                                 what does each policy cost on my machine?   minutes

training
train_minimal.py --train-data book.txt    how do I train on my own text?              minutes+
train_minimal.py --init-from gpt2         how do I start from GPT-2's weights?        minutes+
train_minimal.py --profile 4              where does the time of a step go?           a minute
train_minimal.py --resume                 how do I resume? (also on other devices)    seconds
scripts/gpt2_small.sh                     how do I train GPT-2 small on one GPU?      days
scripts/gpt2_small_ddp.sh                 how do I train it on several GPUs?          days

after a run
generate --prompt "def "                  what does a trained model write?            seconds
evaluate --val-data book.txt              how good is a trained model?                minutes
plot_metrics FILE                         how did the training go? (a picture)        seconds
export_hf --out FOLDER                    how do I use a model with transformers?     seconds

to learn
lesson                                    what have I understood? (twelve exercises)  half an hour
kept_tensors                              what does one block keep for backward?      seconds
checkpoint_from_scratch                   how does an activation checkpoint work?     seconds
"""


def cli_main(do: Callable[[list[str]], int | None]) -> Callable[..., int]:
    """Turn `do`, which takes the command-line words, into `main`, which returns the exit code.

    `main` prints one line, without a traceback, for a mistake of the user, a full disk,
    out-of-memory or Ctrl-C. It prints nothing if the program behind a pipe has ended.
    """

    @wraps(do)
    def main(argv: list[str] | None = None) -> int:
        # (imported late: data and planner import torch, which takes seconds)
        from data import MiniGPTError
        from planner import PlanError
        from trainer.flags import print_error

        try:
            return do(sys.argv[1:] if argv is None else argv) or 0
        except (MiniGPTError, PlanError) as error:
            print_error(error)
            return error.exit_code if isinstance(error, MiniGPTError) else 2
        except BrokenPipeError:  # the program behind the pipe has ended: `| head`
            return 141  # 128 + SIGPIPE, as a shell reports it
        except OSError as error:
            # (If the disk is full during a write, the error names no file.)
            if error.filename is None and error.errno != errno.ENOSPC:
                raise
            print_error(f"{error.filename or 'cannot write'}: {error.strerror}")
            return 2
        except SystemExit as ended:  # raised by argparse after --help or an error
            return int(ended.code or 0)
        except KeyboardInterrupt:
            say_stopped()
            return 130  # 128 + SIGINT

    return main


@contextmanager
def exit_on_out_of_memory(hint: str) -> Iterator[None]:
    """Turn an out-of-memory error into one line, "out of memory" + `hint`, and exit code 4."""
    from data import MiniGPTError
    from trainer.run import is_out_of_memory

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MiniGPTError(f"out of memory{hint}", exit_code=4) from None


def add_snapshot_argument(parser: ArgumentParser, help_text: str) -> None:
    """Add the argument for the snapshot that a command reads: FILE or --checkpoint-path FILE."""
    add, path = parser.add_argument, Path("checkpoints/minigpt_single.pt")
    # If FILE is missing, argparse passes the default, SUPPRESS, to `type`.
    add("checkpoint_path", nargs="?", default=SUPPRESS, metavar="FILE",
        type=lambda word: word if word is SUPPRESS else Path(word),
        help=f"{help_text} (default: {path})")  # fmt: skip
    add("--checkpoint-path", type=Path, default=path, metavar="FILE",
        help="the same as FILE; if both are given, FILE counts")  # fmt: skip


def flush_and_freeze_gc() -> None:
    """Flush stdout at exit, and freeze the garbage collector.

    Python's own flush would print an error if the program behind a pipe has ended. Without the
    freeze, the garbage collector would search all of torch's objects for half a second, although
    the operating system frees all memory of a process that ends.
    """
    gc.freeze()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if IS_MAIN_PROGRAM:
    atexit.register(flush_and_freeze_gc)
