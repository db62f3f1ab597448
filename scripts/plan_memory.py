"""Will it fit, and what is the cheapest way to make it fit? An answer before the run.

The flags are the trainers' own; add nothing but what you ask:
    python -m scripts.plan_memory --model gpt2 --device cuda --memory-budget 8GiB

One training step of that model is simulated for each recompute policy, on tensors that have shapes
but no memory: no GPU is needed, nothing is downloaded, 1.5 billion parameters take a minute on a
laptop. `--device cuda` plans for a GPU wherever you are. What is recommended leaves a margin to
what tensors are not (the CUDA context, kernels, an allocator's gaps): a tenth of the budget, on a
GPU at least 1 GiB.
"""

import sys

if not __package__:  # python scripts/plan_memory.py: the others lie one folder up
    sys.path[0] += "/.."
    import scripts  # noqa: F401

import argparse
import json
import shlex
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm import tqdm

from data import DataError
from planner.choose import RUNGS, describe_recompute, pick_recompute, recompute_flags
from planner.formulas import closed_form, count_parameters, recompute_cost, state_bytes, step_flops
from planner.step import Planner
from planner.timeline import StepMemory
from scripts import say_stopped
from trainer.flags import (
    UsageError,
    build_parser,
    fill_in,
    model_config,
    number,
    output_file,
    print_error,
)
from trainer.knobs import Knob
from trainer.metrics import format_bytes
from trainer.plan import SMALLER, Plans, target, vocabulary
from trainer.report import describe_model
from trainer.room import for_tensors

PROGRESS = "{n_fmt} steps simulated [{elapsed}]"  # how many it will be is not known


@dataclass(frozen=True)
class Room:
    """What tensors may take, in bytes; None where nobody knows."""

    budget: int | None  # all that was given
    safe: int | None  # of that, what a recommendation may take

    @classmethod
    def of(cls, args: argparse.Namespace, budget: int | None, device_type: str) -> "Room":
        if budget is None or args.memory_budget is None:
            return cls(budget, budget)  # (a share of what is free has left its margin)
        return cls(budget, for_tensors(budget, device_type))


@dataclass(frozen=True)
class Row:
    """One way to recompute."""

    name: str
    flags: list[str]
    step: StepMemory
    replayed: float  # FLOPs done twice, in units of what the step needs
    room: Room
    largest_batch: int | None  # in the budget
    safe_batch: int | None  # in the safe part of it

    @property
    def fits(self) -> bool | None:
        return None if self.room.budget is None else self.step.peak <= self.room.budget

    @property
    def safe(self) -> bool:
        return self.room.safe is not None and self.step.peak <= self.room.safe

    @property
    def cost(self) -> tuple[float, int]:
        return recompute_cost(self.step.config, self.step.seq_len)

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
            "kept_bytes": step.kept,
            "kept_bytes_per_block": step.kept_per_block,
            "replayed": self.replayed,
            "fits": self.fits,
            "fits_safely": None if self.fits is None else self.safe,
            "largest_batch": self.largest_batch,
            "largest_batch_safely": self.safe_batch,
        }


def parse(argv: list[str]) -> argparse.Namespace:
    """The trainers' flags. Those that the table is about may be there, and are left out."""
    parser = build_parser("python -m scripts.plan_memory", "unused.pt")
    parser.description = "Predict the memory of a training run, for each recompute policy."
    add = parser.add_argument_group("plan (all else as in train_minimal.py)").add_argument
    add("--nproc-per-node", type=number(int, 1, 10**4), metavar="N",
        help="plan for train_ddp.py, with N processes on a machine")  # fmt: skip
    add("--json", type=output_file, metavar="FILE", help="write the table there, in bytes")
    args = parser.parse_args(argv)
    args.use_activation_checkpoint = "auto"
    args.recompute_layers, args.recompute_rest = None, None
    args.recompute_group, args.offload_activations = 1, False
    return fill_in(args)


def rows(planner: Planner, batch_size: int, room: Room, compiled: bool = False) -> list[Row]:
    """Every policy, and the least recompute that fits (a row of its own if it is a mix)."""
    ways = [*RUNGS, OFFLOADED]
    taken = pick_recompute(planner, batch_size, sys.maxsize if room.safe is None else room.safe)
    if taken.config.recompute_layers is not None:
        memory = {name: getattr(taken.config, name) for name in MIX}
        before = [way["recompute"] for way in ways].index(taken.config.recompute)
        ways.insert(before, memory)
    needed, _ = step_flops(planner.config, planner.seq_len)
    table = []
    for way in ways:
        step = planner.step(batch_size, **way)
        largest, safe = (
            None if budget is None else planner.largest_batch(budget, batch_size, **way)
            for budget in (room.budget, room.safe)
        )
        table.append(
            Row(
                name=describe_recompute(step.config),
                flags=recompute_flags(step.config),
                step=step,
                replayed=step_flops(step.config, planner.seq_len, compiled)[1] / needed,
                room=room,
                largest_batch=largest,
                safe_batch=safe,
            )
        )
    return table


OFFLOADED: dict[str, Any] = {"recompute": "full", "offload_activations": True}
MIX = ("recompute", "recompute_group", "recompute_layers", "recompute_rest")


def recommend(table: list[Row]) -> Row | None:
    """The row that recomputes least, of those that fit and leave a margin; offload is the last."""
    safe = [row for row in table if row.safe]
    return min(safe, key=lambda row: (row.step.config.offload_activations, row.cost), default=None)


def format_table(table: list[Row], taken: Row | None) -> str:
    """Aligned columns; `taken` is marked."""
    lines = [
        (" ", "policy", "peak", "where", "kept a block", "FLOPs twice", "fits", "largest batch")
    ]
    for row in table:
        fits = {True: "yes" if row.safe else "tight", False: "no", None: "?"}[row.fits]
        lines.append(
            (
                ">" if row is taken else "",
                row.name,
                format_bytes(row.step.peak),
                row.step.where,
                format_bytes(row.step.kept_per_block),
                f"{row.replayed:.1%}",
                fits,
                "?" if row.safe_batch is None else f"{row.safe_batch:,}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = "<<><>><>"
    return "\n".join(
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def describe_target(args: argparse.Namespace, plans: Plans, room: Room) -> str:
    """What the table below is about."""
    config, kind = model_config(args, plans.vocab_size), plans.device.type
    if room.budget is None:
        limit = f"no {kind} here and no --memory-budget: what fits cannot be told"
    elif room.budget == room.safe:
        limit = f"{format_bytes(room.budget)}: what is free, but for a margin"
    else:
        limit = f"{format_bytes(room.budget)}, of which tensors may take "
        limit += f"{format_bytes(room.safe or 0)}: auto leaves such a margin of what is free"
    lines = [
        f"model    {count_parameters(config):,} parameters: {describe_model(config)}",
        f"batch    {args.grad_accum_steps} x {args.batch_size} sequences of {args.seq_len} tokens",
        f"device   {kind}, {str(plans.precision).removeprefix('torch.')}"
        + (", DistributedDataParallel" if plans.ddp else ""),
        f"budget   {limit}",
        f"always   {format_bytes(state_bytes(config))}: weights, gradients, AdamW "
        "(16 bytes a parameter)",
    ]
    if assumed := assumptions(args, config.vocab_size):
        lines.append(f"note     assumed, as nothing else was asked: {', '.join(assumed)}")
    if args.compile:
        lines.append("note     eager code is simulated; the compiler may keep less, or more")
    return "\n".join(lines)


def assumptions(args: argparse.Namespace, vocab_size: int) -> list[str]:
    """What stands for flags that were left out by someone who asked for a model of their own."""
    shape = {"n_layers": "layers", "d_model": "channels", "n_heads": "heads"}
    if args.model or not args.typed & (shape.keys() | {"d_ff", "seq_len", "vocab_size"}):
        return []
    assumed = [
        f"{getattr(args, name)} {noun}" for name, noun in shape.items() if name not in args.typed
    ]
    if not args.typed & {"tokenizer_name", "vocab_size", "train_data"}:
        words = f"a vocabulary of {vocab_size:,}"
        assumed.append(words + ("" if args.use_toy_data else " (--tokenizer-name gpt2: 50,257)"))
    if "seq_len" not in args.typed:
        assumed.append(f"{args.seq_len} tokens (--seq-len)")
    return assumed


def command_line(argv: list[str], args: argparse.Namespace, flags: list[str]) -> str:
    """The trainer's command: what was asked, with what was found."""
    mine = {"--json": 1, "--nproc-per-node": 1, "--memory-budget": 1, "--recompute-layers": 1}
    mine |= {"--recompute-rest": 1, "--recompute-group": 1}
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
        start = ["torchrun", f"--nproc-per-node={args.nproc_per_node}", "train_ddp.py"]
    return shlex.join([*start, *kept, *flags])


def verdict(
    argv: list[str], args: argparse.Namespace, plans: Plans, room: Room, table: list[Row]
) -> str:
    """What to run; or why nothing fits, and what would."""
    if room.safe is None:
        return "--memory-budget 8GiB, say, tells what fits, and which of them to take"
    lines, taken = [], recommend(table)
    if taken and not taken.step.config.offload_activations:
        return command_line(argv, args, taken.flags)
    why, knob = plans.way_out(args, room.safe)
    if taken:  # offloaded; there may be something cheaper than that
        if knob and "offload_activations" not in knob.flags:
            lines = [f"or, instead of offloading, {knob.command(args)} ({knob.words})"]
        return "\n".join([*lines, command_line(argv, args, taken.flags)])
    nothing = "nothing fits"
    if tight := [row for row in table if row.fits]:
        row = min(tight, key=lambda row: row.step.peak)
        left = format_bytes((room.budget or 0) - row.step.peak)
        lines.append(f"tight    {row.name} leaves {left} to kernels, the CUDA context and gaps")
        nothing += " with a margin"
    if knob is None:
        return "\n".join([*lines, f"{nothing}; {why}{SMALLER}"])
    lines.append(f"{nothing}; {why}{knob.command(args)} fits ({knob.words})")
    return "\n".join([*lines, command_line(argv, args, words_of(knob))])


def words_of(knob: Knob) -> list[str]:
    """A knob's flags, for a command."""
    words = []
    for name, value in knob.flags.items():
        if value is not None:
            words += ["--" + name.replace("_", "-")] + [str(value)] * (value is not True)
    return words


def as_json(
    argv: list[str], args: argparse.Namespace, plans: Plans, room: Room, table: list[Row]
) -> str:
    taken = recommend(table)
    config = (taken or min(table, key=lambda row: row.step.peak)).step.config
    result = {
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", "scripts.plan_memory", *argv]),
        "config": asdict(model_config(args, plans.vocab_size)),
        "batch_size": args.batch_size,
        "seq_len": args.seq_len,
        "device": plans.device.type,
        "precision": str(plans.precision).removeprefix("torch."),
        "budget_bytes": room.budget,
        "safe_bytes": room.safe,
        "takes": taken and taken.name,
        "closed_form": closed_form(config, args.batch_size, args.seq_len, plans.precision),
        "rows": [row.as_json() for row in table],
    }
    return json.dumps(result, indent=1) + "\n"


def plan(argv: list[str], bar: tqdm) -> int:
    """Print the plan. Raises UsageError or DataError."""
    args = parse(argv)
    kind, precision, budget = target(args, args.nproc_per_node or 1)
    room = Room.of(args, budget, kind)
    plans = Plans(
        vocabulary(args), torch.device(kind), precision, bool(args.nproc_per_node), bar.update
    )
    args.use_activation_checkpoint = "none"  # what the rows and the way out are changes of
    bar.write(describe_target(args, plans, room) + "\n")
    table: list[Row] = []
    if room.budget is None or plans.state(args) < room.budget:
        table = rows(plans.planner(args), args.batch_size, room, args.compile)
        bar.write(format_table(table, recommend(table)) + "\n")
    bar.write(verdict(argv, args, plans, room, table))
    if args.json:
        table = table or rows(plans.planner(args), args.batch_size, room, args.compile)
        args.json.write_text(as_json(argv, args, plans, room, table))
    return 0


def main(argv: list[str] | None = None) -> int:
    try:
        with tqdm(bar_format=PROGRESS, disable=None, leave=False) as bar:
            return plan(sys.argv[1:] if argv is None else argv, bar)
    except (UsageError, DataError) as error:
        print_error(error)
        return 2
    except KeyboardInterrupt:
        say_stopped()
        return 130


if __name__ == "__main__":
    sys.exit(main())
