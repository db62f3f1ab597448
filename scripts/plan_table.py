"""The table of scripts/plan_memory.py: one row for each way to recompute, and which to take."""

import argparse
import math
import shlex
import sys
from dataclasses import dataclass
from typing import Any

from planner import Card, Planner, StepMemory
from planner.choose import describe_recompute, pick_recompute, recompute_flags, rungs
from planner.formulas import count_parameters, recompute_cost, step_flops
from trainer.knobs import Knob
from trainer.metrics import format_bytes
from trainer.room import Room

OFFLOADED: dict[str, Any] = {"recompute": "full", "offload_activations": True}
MIX = ("recompute", "recompute_group", "recompute_layers", "recompute_rest")


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
        return describe_recompute(self.step.config)

    @property
    def flags(self) -> list[str]:
        return recompute_flags(self.step.config)

    @property
    def offloaded(self) -> bool:
        return self.step.config.offload_activations

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
        config, step = self.step.config, self.step
        return {
            "name": self.name,
            "policy": config.recompute,
            "layers": config.n_recomputed,
            "rest": config.recompute_rest,
            "group": config.recompute_group,
            "offload": config.offload_activations,
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
    ways, safe = [*rungs(planner), OFFLOADED], sys.maxsize if room.safe is None else room.safe
    card = clock.card if clock else None
    taken = pick_recompute(planner, args.batch_size, safe, card, args.compile)
    if taken.config.recompute_layers is not None:
        memory = {name: getattr(taken.config, name) for name in MIX}
        before = [way["recompute"] for way in ways].index(taken.config.recompute)
        ways.insert(before, memory)
    needed, _ = step_flops(planner.config, planner.seq_len)
    table, asked = [], args.batch_size
    for way in ways:
        step = planner.step(asked, **way)
        largest, safe_batch = (
            None if limit is None else planner.largest_batch(limit, asked, room.host, **way)
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


# The trainers' flags that change no plan.
PASSED_ON = (
    "val_data val_ratio max_tokens data_seed num_epochs lr min_lr lr_scheduler warmup_steps seed "
    "weight_decay grad_clip_norm log_interval eval_interval save_interval save_minutes log_to "
    "eval_batches checkpoint_path resume sample_tokens profile detect_anomaly"
).split()


def command_line(argv: list[str], args: argparse.Namespace, flags: list[str]) -> str:
    """The trainer's command: what was asked, with what was found."""
    mine = {"--json": 1, "--nproc-per-node": 1, "--memory-budget": 1, "--card": 1}
    mine |= {"--longest-sequence": 0, "--all-knobs": 0, "--fsdp": 0}
    mine |= {"--at-peak": 0, "--memory-viz": 1}
    mine |= {"--compress-gradients": 0} if args.fsdp else {}
    mine |= {"--recompute-layers": 1, "--recompute-rest": 1, "--recompute-group": 1}
    mine |= {"--offload-activations": 0, "--use-activation-checkpoint": 0}
    mine |= {flag: 1 for flag in flags if flag.startswith("--") and flag not in mine}
    kept, skip = [], 0
    for i, word in enumerate(argv):
        name, _, value = word.partition("=")
        if skip:
            skip -= 1
        elif name in mine:
            skip = 0 if value else mine[name]
            if name == "--use-activation-checkpoint" and not value:  # its value may be left out
                skip = int(i + 1 < len(argv) and not argv[i + 1].startswith("-"))
        else:
            kept.append(word)
    start = ["python", "train_minimal.py"]
    if args.nproc_per_node:
        trainer = "train_fsdp.py" if args.fsdp else "train_ddp.py"
        start = ["torchrun", f"--nproc-per-node={args.nproc_per_node}", trainer]
    return shlex.join([*start, *kept, *flags])


def words_of(knob: Knob) -> list[str]:
    """A knob's flags, for a command."""
    words = []
    for name, value in knob.flags.items():
        if value is not None and value is not False:  # (off is the default)
            words += ["--" + name.replace("_", "-")] + [str(value)] * (value is not True)
    return words


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
    times, speeds = (
        [f"~{format_seconds(none)}"],
        [f"~{digits(3, clock.tokens_per_s(table[0].step))}"],
    )
    for row in table[1:]:
        more = clock.seconds(row.step) / none - 1
        times.append(f"{'> ' * row.offloaded}{more:+.0%}")
        speed = digits(3, clock.tokens_per_s(row.step))
        speeds.append(f"{'<' if row.offloaded else '~'}{speed}")
    return [["time>", *times], ["tokens/s>", *speeds]]


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
