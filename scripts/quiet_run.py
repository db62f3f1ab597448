"""A training inside of a study: train_minimal.py's, without its output; the log is what is kept."""

import argparse
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from train_minimal import train
from trainer.endings import run_safely
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
