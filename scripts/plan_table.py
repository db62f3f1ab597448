"""The table of scripts/plan_memory.py: one row for each way to recompute, and which to take.

And how long the whole run takes then.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from typing import Any

from planner import Card, Planner, StepMemory
from planner.choose import pick_recompute, rungs
from planner.formulas import count_parameters, recompute_cost, step_flops
from scripts.style import policy_fields
from trainer.length import format_tokens, tokens_per_step
from trainer.metrics import format_bytes
from trainer.room import Room

OFFLOADED = "full+offload"


@dataclass(frozen=True)
class Clock:
    """Predicts how long a training step takes on a card, with all its micro-batches."""

    card: Card
    compiled: bool
    micro_batches: int
    processes: int
    shards: int = 1  # processes that hold the model between them; gathering is not in the time

    def seconds(self, step: StepMemory) -> float:
        """`step`: one micro-batch and the update of the weights, which all of them share."""
        one = step.seconds(self.card, self.compiled)
        # Clipping reads the gradients twice and writes them; AdamW reads weights, gradients and two
        # moments, and writes all but the gradients: ten times 4 bytes a parameter.
        moved = 40 * count_parameters(step.config) / self.shards
        update = moved / (self.card.reached_bytes * self.card.bytes_per_s)
        return self.micro_batches * one - (self.micro_batches - 1) * min(update, one)

    def tokens_per_s(self, step: StepMemory) -> float:
        """Of all processes."""
        sequences = self.processes * self.micro_batches * step.batch_size
        return sequences * step.seq_len / self.seconds(step)


@dataclass(frozen=True)
class Row:
    """One way to recompute."""

    step: StepMemory
    replayed: float  # FLOPs done twice, in units of what the step needs
    room: Room
    largest_batch: int | None  # in the budget
    safe_batch: int | None  # in the safe part of it
    clock: Clock | None
    longest: int | None = None  # sequence in the safe part, in tokens; None: nobody asked

    @property
    def name(self) -> str:
        return self.step.config.recompute

    @property
    def flags(self) -> list[str]:
        return ["--use-activation-checkpoint", self.name]

    @property
    def offloaded(self) -> bool:
        return self.step.config.expanded.offload

    @property
    def fits(self) -> bool | None:
        if self.room.budget is None:
            return None
        return self.step.peak <= self.room.budget and self.finds_host

    @property
    def safe(self) -> bool:
        return bool(self.fits) and self.step.peak <= (self.room.safe or 0)

    @property
    def finds_host(self) -> bool:
        """Has the CPU room for what it offloads, as far as anybody knows?"""
        return self.room.host is None or self.step.host <= self.room.host

    @property
    def seconds(self) -> float | None:
        return self.clock.seconds(self.step) if self.clock else None

    @property
    def cost(self) -> tuple[float, float]:
        """What is to be small: time, then memory; FLOPs where no clock tells the time."""
        if self.seconds is None:
            return recompute_cost(self.step.config, self.step.seq_len)
        return self.seconds, self.step.peak

    def as_json(self) -> dict[str, Any]:
        step = self.step
        return {
            **policy_fields(step.config),
            "flags": self.flags,
            "peak_bytes": step.peak,
            "at_peak": step.at_peak,
            "where": step.where,
            "host_bytes": step.host,
            "kept_bytes": step.kept,
            "kept_bytes_per_block": step.kept_per_block,
            "replayed": self.replayed,
            "fits": self.fits,
            "fits_safely": None if self.fits is None else self.safe,
            "largest_batch": self.largest_batch,
            "largest_batch_safely": self.safe_batch,
            "seconds": self.seconds,
            "tokens_per_s": self.clock and self.clock.tokens_per_s(step),
            "longest_sequence_safely": self.longest,
        }


def rows(
    planner: Planner, args: argparse.Namespace, room: Room, clock: Clock | None = None
) -> list[Row]:
    """Every policy, and the cheapest way that fits (a row of its own if it is a mix)."""
    ways, asked = [*rungs(planner), OFFLOADED], args.batch_size
    safe = sys.maxsize if room.safe is None else room.safe
    card = clock.card if clock else None
    taken = pick_recompute(planner, asked, safe, card, args.compile).config
    if taken.recompute not in ways:  # a mix stands before the policy that it begins with
        ways.insert(ways.index(taken.expanded.policies[0]), taken.recompute)
    needed, _ = step_flops(planner.config, planner.seq_len)
    table = []
    for way in ways:
        step = planner.step(asked, recompute=way)
        largest, safe_batch = (
            None if limit is None else planner.largest_batch(limit, asked, room.host, recompute=way)
            for limit in (room.budget, room.safe)
        )
        replayed = step_flops(step.config, planner.seq_len, args.compile)[1] / needed
        table.append(Row(step, replayed, room, largest, safe_batch, clock))
    return table


def recommend(table: list[Row]) -> Row | None:
    """The cheapest row of those that fit and leave a margin; offload, whose copies no clock tells,
    is the last."""
    safe = [row for row in table if row.safe]
    return min(safe, key=lambda row: (row.offloaded, row.cost), default=None)


def format_table(table: list[Row], taken: Row | None) -> str:
    """Aligned columns; `taken` is marked."""
    fits = {True: "tight", False: "no", None: "?"}
    columns = [
        [" <", *(">" if row is taken else "" for row in table)],
        ["policy<", *(row.name for row in table)],
        ["peak>", *(format_bytes(row.step.peak) for row in table)],
    ]
    if table[0].clock:
        columns += time_columns(table, table[0].clock)
    else:
        columns += [
            ["where<", *(row.step.where for row in table)],
            ["kept a block>", *(format_bytes(row.step.kept_per_block) for row in table)],
            ["FLOPs twice>", *(f"{row.replayed:.1%}" for row in table)],
        ]
    columns += [
        ["fits<", *("yes" if row.safe else fits[row.fits] for row in table)],
        ["largest batch>", *(format_count(row.safe_batch) for row in table)],
    ]
    if table[0].longest is not None:
        columns += [["longest sequence>", *(format_count(row.longest) for row in table)]]
    return align(columns)


def describe_host(table: list[Row], processes: int, device_type: str) -> str:
    """What the offloaded row takes of a machine's CPU memory, beside its GPUs; "": nothing."""
    row = table[-1]
    asked, largest = row.step.batch_size, row.safe_batch or 0
    if device_type == "cpu" or not row.offloaded or not row.step.host:
        return ""
    words = f"offload  pins {format_bytes(processes * row.step.host)} of CPU memory"
    words += f" in {processes} processes" * (processes > 1)
    if largest > asked:  # (it grows by the sequence, from some sequences on)
        words += f", about {format_bytes(processes * row.step.host * largest / asked)}"
        words += f" for {largest} sequences" + " in each" * (processes > 1)
    return words


def time_columns(table: list[Row], clock: Clock) -> list[list[str]]:
    """Estimates, shown as such. Of offloaded rows the clock knows all but the copies."""
    none = clock.seconds(table[0].step)
    times, speeds = [], []
    for i, row in enumerate(table):
        more = f"{clock.seconds(row.step) / none - 1:+.0%}"
        times.append(f"{'> ' * row.offloaded}{more}" if i else f"~{format_seconds(none)}")
        speed = digits(3, clock.tokens_per_s(row.step))
        speeds.append(f"{'<' if row.offloaded else '~'}{speed}")
    return [["time>", *times], ["tokens/s>", *speeds]]


# ---- the whole run


@dataclass(frozen=True)
class WholeRun:
    """What was asked; if nobody said how long, a billion tokens, by which runs are compared."""

    tokens: int
    steps: int
    asked: str
    seconds: float | None  # None: nobody knows
    offloaded: bool  # copies come on top

    def as_json(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "steps": self.steps, "seconds": self.seconds}


def whole_run(
    args: argparse.Namespace, processes: int, table: list[Row], fastest: float | None
) -> WholeRun:
    """With the step that is recommended. `fastest`: seconds of that of --all-knobs, if there is."""
    of_step = tokens_per_step(args, processes)
    seconds, offloaded = fastest, False
    if fastest is None and (taken := recommend(table)) and taken.longest is None:
        # (The command of --longest-sequence has other steps than the rows.)
        seconds, offloaded = taken.seconds, taken.offloaded
    if "num_steps" in args.typed:
        steps = args.num_steps
        tokens, asked = steps * of_step, f"{steps:,} steps"
    else:
        tokens = args.num_tokens or 10**9
        steps = math.ceil(tokens / of_step)
        asked = f"{format_tokens(tokens)} tokens, {steps:,} steps"
    return WholeRun(tokens, steps, asked, seconds and steps * seconds, offloaded)


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


# ---- words


def align(columns: list[list[str]]) -> str:
    """The first cell of a column is its name, and "<" or ">": flush left, or right."""
    for column in columns:
        side, column[0] = column[0][-1], column[0][:-1]
        width = max(map(len, column))
        column[:] = [f"{cell:{side}{width}}" for cell in column]
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def format_count(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def format_seconds(seconds: float) -> str:
    """ "54 ms", "1.2 s": as exact as an estimate is"""
    return f"{digits(2, 1000 * seconds)} ms" if seconds < 1 else f"{digits(2, seconds)} s"


def digits(n: int, x: float) -> str:
    """Rounded to n digits: "54", "6.1", "358,000"."""
    rounded = float(f"{x:.{n - 1}e}")
    return f"{rounded:,.{max(0, n - 1 - math.floor(math.log10(rounded)))}f}"


def format_hours(seconds: float) -> str:
    """ "40 s", "25 min", "17 h", "5.2 days": as exact as an estimate is"""
    units = ((1, "s", 90), (60, "min", 90), (3600, "h", 100), (86400, "days", math.inf))
    size, unit = next((size, unit) for size, unit, most in units if seconds < most * size)
    return f"{digits(2, seconds / size)} {unit}"
