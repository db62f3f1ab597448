"""How long the whole run takes on a card: the last line but one of scripts/plan_memory.py."""

import argparse
import math
from dataclasses import dataclass
from typing import Any

from scripts.plan_knobs import Setting
from scripts.plan_table import Row, digits, recommend
from trainer.length import format_tokens, tokens_per_step


@dataclass(frozen=True)
class WholeRun:
    """What was asked; if nobody said how long, a billion tokens, by which runs are compared."""

    tokens: int
    steps: int
    asked: str
    step_seconds: float | None  # None: nobody knows
    offloaded: bool = False  # copies come on top

    @property
    def seconds(self) -> float | None:
        return None if self.step_seconds is None else self.steps * self.step_seconds

    def as_json(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "steps": self.steps, "seconds": self.seconds}


def whole_run(
    args: argparse.Namespace, processes: int, table: list[Row], settings: list[Setting]
) -> WholeRun:
    """With the step that is recommended."""
    of_step = tokens_per_step(args, processes)
    step: tuple[float | None, bool] = None, False
    if settings:
        step = settings[0].seconds, False
    elif (taken := recommend(table)) and taken.longest is None:
        # (The command of --longest-sequence has other steps than the rows.)
        step = taken.seconds, taken.offloaded
    if "num_steps" in args.typed:
        steps = args.num_steps
        return WholeRun(steps * of_step, steps, f"{steps:,} steps", *step)
    tokens = args.num_tokens or 10**9
    steps = math.ceil(tokens / of_step)
    return WholeRun(tokens, steps, f"{format_tokens(tokens)} tokens, {steps:,} steps", *step)


def describe_whole(run: WholeRun, args: argparse.Namespace) -> list[str]:
    """Lines; none if there is nothing to say."""
    lines = []
    if args.num_epochs is not None:
        words = f"how many steps --num-epochs {args.num_epochs:g} are is up to the data"
        lines.append(f"note     {words}, which are not read here")
    if run.seconds is not None:
        about = "more than" if run.offloaded else "about"
        lines.append(
            f"run      {run.asked}: {about} {format_hours(run.seconds)}; without data, "
            "communication, evaluation"
        )
    elif args.num_tokens:
        lines.append(f"run      {run.asked}; --card tells how long they take")
    return lines


def format_hours(seconds: float) -> str:
    """ "40 s", "25 min", "17 h", "5.2 days": as exact as an estimate is"""
    units = ((1, "s", 90), (60, "min", 90), (3600, "h", 100), (86400, "days", math.inf))
    size, unit = next((size, unit) for size, unit, most in units if seconds < most * size)
    return f"{digits(2, seconds / size)} {unit}"
