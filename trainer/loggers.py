"""--log-to: the log where people look at it, beside metrics.jsonl and never instead of it.

A network, a disk or a service may be gone, at the start or later. The run says so once, and goes on
without it. How long a service may take to answer is that service's own setting.
"""

import argparse
import math
import os
import shlex
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from .flags import UsageError
from .snapshot import State, beside

NEEDS = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}  # what they import
Say = Callable[[str], None]
Sink = tuple[Callable[[dict[str, float], int], object], Callable[[], object]]  # write, close


def check_logger(name: str) -> None:
    """Raise UsageError if what that logger needs is not installed."""
    try:
        if name in NEEDS:
            import_module(NEEDS[name])
    except Exception as error:  # a broken installation says so in many ways
        raise UsageError(
            f"--log-to {name}: import {NEEDS[name]} failed ({type(error).__name__}: {error}); "
            f"pip install {name}, or --log-to none"
        ) from None


def to_tensorboard(path: Path, identity: State, step: int, say: Say) -> Sink:
    """Into the folder `RUN.tensorboard` beside the snapshot."""
    from torch.utils.tensorboard import SummaryWriter

    folder = beside(path, ".tensorboard")
    # What an earlier process has written of later steps no longer counts: they are done again.
    writer = SummaryWriter(str(folder), purge_step=step + 1)
    flags = (f"    {name} = {value}" for name, value in identity["args"].items())
    writer.add_text("flags", "\n".join(flags), step + 1)
    say(f"log      {folder}: tensorboard --logdir {path.parent} shows it")

    def write(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # (with TensorFlow installed it would wait for two minutes)

    return write, writer.close


def to_wandb(path: Path, identity: State, step: int, say: Say) -> Sink:
    """To Weights & Biases; with WANDB_MODE=offline into a folder `wandb` beside the snapshot, to be
    uploaded later.

    The run's own id makes one run of all processes that go on with it. (Of steps that are done
    again wandb keeps the first.)
    """
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "minigpt"),
        name=beside(path, "").name,
        id=identity["run"],
        resume="allow",
        dir=path.parent,
        config=identity["args"],
        settings=wandb.Settings(console="off", silent=True),
    )
    where = run.url
    if run.offline:
        folder = f"{shlex.quote(str(path.parent))}/wandb/offline-run-*-{identity['run']}"
        where = f"offline; wandb sync {folder} uploads it"
    say(f"log      wandb, {where}")
    return run.log, run.finish


LOGGERS = {"tensorboard": to_tensorboard, "wandb": to_wandb}


class Logger:
    """What --log-to asks for, from `step` of the run on: it gets the finite numbers of each record,
    and ends at its first failure."""

    def __init__(self, args: argparse.Namespace, identity: State, step: int, say: Say):
        self.name, self.say, start = args.log_to, say, LOGGERS[args.log_to]
        self.sink: Sink | None = self.attempt(start, args.checkpoint_path, identity, step, say)

    def write(self, record: dict[str, Any]) -> None:
        numbers = {
            name: value
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        if self.sink is not None:
            self.attempt(self.sink[0], numbers, record["step"])

    def close(self) -> None:
        if self.sink is not None:
            self.attempt(self.sink[1])

    def attempt(self, act: Callable, *args: object) -> Any:
        try:
            return act(*args)
        except Exception as error:
            self.sink = None
            reason = one_line(f"{type(error).__name__}: {error}")
            self.say(f"warning  --log-to {self.name} ended ({reason}); metrics.jsonl goes on")


def one_line(message: object) -> str:
    return " ".join(str(message).split())[:200]
