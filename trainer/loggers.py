"""--log-to: the log where people look at it, beside metrics.jsonl and never instead of it.

A logger is a class with `write(step, numbers)` and `close()`. It may fail, later than at the start:
a network, a disk or a service is gone. Then it says so once, and the run goes on without it.
"""

import argparse
import math
import os
import shlex
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from .flags import UsageError
from .snapshot import State, beside


class Logger(Protocol):
    def write(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Into the folder `RUN.tensorboard` beside the snapshot."""

    def __init__(self, path: Path, identity: State, step: int, say: Callable[[str], None]):
        """`path`: the snapshot. `step`: what an earlier process has written of the steps after it
        no longer counts, as they are done again."""
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = partial(leave_to_us, threading.excepthook)
        folder = beside(path, ".tensorboard")
        self.writer = SummaryWriter(str(folder), purge_step=step + 1)
        flags = (f"    {name} = {value}" for name, value in identity["args"].items())
        self.writer.add_text("flags", "\n".join(flags), step + 1)
        say(f"log      {folder}: tensorboard --logdir {path.parent} shows it")

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # (with TensorFlow installed it would wait for two minutes)

    def close(self) -> None:
        self.writer.close()


def leave_to_us(hook: Callable[[Any], object], failed: threading.ExceptHookArgs) -> None:
    """A threading.excepthook: what TensorBoard's own thread meets is raised again by the next
    `write`, and told in one line there."""
    if not type(failed.thread).__module__.startswith("tensorboard."):
        hook(failed)


class WandB:
    """To Weights & Biases; without an account, a network, or with WANDB_MODE=offline, into a folder
    `wandb` beside the snapshot, to be uploaded later."""

    def __init__(self, path: Path, identity: State, step: int, say: Callable[[str], None]):
        """The run's own id makes one run of all processes that go on with it. (Steps that are done
        again are those that wandb has already: it keeps the first.)"""
        import wandb

        start = partial(
            wandb.init,
            project=os.environ.get("WANDB_PROJECT", "minigpt"),
            name=beside(path, "").name,
            id=identity["run"],
            resume="allow",
            dir=path.parent,
            config=identity["args"],
            settings=wandb.Settings(console="off", silent=True),
        )
        # Neither end may wait for a network as long as wandb would.
        os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", "60")
        why = ""
        try:
            self.run = start()
        # No key, and nobody at a terminal to type one; or no answer.
        except (wandb.errors.UsageError, wandb.errors.CommError) as error:
            why = f" ({one_line(error)})"
            wandb.teardown()  # or the run's id would be in use
            self.run = start(mode="offline")
        where = self.run.url if not self.run.offline else None
        folder = f"{shlex.quote(str(path.parent))}/wandb/offline-run-*-{identity['run']}"
        say(f"log      wandb, {where or f'offline{why}; wandb sync {folder} uploads it'}")

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def close(self) -> None:
        self.run.finish()


# --log-to NAME: what it imports, what one installs for it, what writes.
LOGGERS: dict[str, tuple[str, str, Callable[..., Logger]]] = {
    "tensorboard": ("torch.utils.tensorboard", "tensorboard", TensorBoard),
    "wandb": ("wandb", "wandb", WandB),
}


def check_logger(name: str) -> None:
    """Raise UsageError if what that logger needs is not installed."""
    if name not in LOGGERS:
        return
    module, package, _ = LOGGERS[name]
    try:
        import_module(module)
    except Exception as error:  # a broken installation says so in many ways
        raise UsageError(
            f"--log-to {name}: import {module} failed ({type(error).__name__}: {error}); "
            f"pip install {package}, or --log-to none"
        ) from None


def one_line(message: object) -> str:
    return " ".join(str(message).split())[:200]


class Cautious:
    """A logger that gets the numbers of each record, and ends at its first failure."""

    def __init__(self, name: str, start: Callable[[], Logger], say: Callable[[str], None]):
        self.name, self.say = name, say
        self.logger: Logger | None = None
        self.attempt(lambda: setattr(self, "logger", start()))

    def write(self, record: dict[str, Any]) -> None:
        numbers = {
            name: value
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        if (logger := self.logger) is not None:
            self.attempt(lambda: logger.write(record["step"], numbers))

    def close(self) -> None:
        if self.logger is not None:
            self.attempt(self.logger.close)

    def attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self.logger = None
            reason = one_line(f"{type(error).__name__}: {error}")
            self.say(f"warning  --log-to {self.name} ended ({reason}); metrics.jsonl goes on")


def start_logger(
    args: argparse.Namespace, identity: State, step: int, say: Callable[[str], None]
) -> list[Cautious]:
    """What --log-to asks for, at `step` of the run. (None: an empty list.)"""
    if args.log_to not in LOGGERS:
        return []
    make = LOGGERS[args.log_to][-1]
    return [Cautious(args.log_to, lambda: make(args.checkpoint_path, identity, step, say), say)]
