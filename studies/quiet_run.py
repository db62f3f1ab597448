"""Trainings inside of a study: as train_minimal.py's, without their output; the log is kept."""

import argparse
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from data import DataError
from scripts import say_stopped
from train_minimal import train
from trainer.endings import run_safely
from trainer.flags import UsageError, print_error
from trainer.metrics import read_metrics
from trainer.process import OneProcess
from trainer.snapshot import beside


class Stopped(Exception):
    """A run ended with an exit code, and has said why."""


def train_quietly(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of all evaluations. Raises Stopped, or KeyboardInterrupt after Ctrl-C."""
    with redirect_stdout(StringIO()):
        code = run_safely(args, OneProcess.alone, train)
    if code:
        raise KeyboardInterrupt if code == 130 else Stopped(code)
    records = read_metrics(beside(args.checkpoint_path, ".metrics.jsonl"))
    return [record for record in records if "val_loss" in record]


def run_study(study: Callable[[list[str]], None], argv: list[str] | None) -> int:
    """`study(argv)`; returns the exit code."""
    try:
        study(sys.argv[1:] if argv is None else argv)
        return 0
    except (UsageError, DataError) as error:
        print_error(error)
        return 2
    except Stopped as stopped:
        return int(stopped.args[0])
    except KeyboardInterrupt:
        say_stopped()
        return 130
