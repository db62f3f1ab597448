"""Will it fit, and what is the cheapest way to make it fit? An answer before the run.

The flags are the trainers' own; add nothing but what you ask:
    python -m scripts.plan_memory --n-layers 12 --d-model 768 --n-heads 12 --seq-len 1024 \
        --batch-size 12 --tokenizer-name gpt2 --device cuda --memory-budget 8GiB

One training step of that model is simulated for each recompute policy, on tensors that have shapes
but no memory: no GPU is needed, nothing is downloaded, 1.5 billion parameters take a minute on a
laptop. `--device cuda` plans for a GPU wherever you are.
"""

import argparse
import json
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from data import DataError
from planner.choose import RUNGS, describe_recompute, pick_recompute, recompute_flags
from planner.formulas import closed_form, step_flops
from planner.step import Planner, StepMemory
from trainer.flags import (
    UsageError,
    build_parser,
    fill_in,
    model_config,
    number,
    output_file,
    print_error,
)
from trainer.metrics import format_bytes
from trainer.plan import make_planner, target, vocabulary, way_out


@dataclass(frozen=True)
class Row:
    """One way to recompute."""

    name: str
    flags: list[str]
    step: StepMemory
    replayed: float  # FLOPs done twice, in units of what the step needs
    fits: bool | None  # in the budget; None = there is none
    largest_batch: int | None

    def as_json(self) -> dict[str, Any]:
        config, step = self.step.config, self.step
        return {
            "name": self.name,
            "policy": config.recompute,
            "layers": config.n_recomputed,
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
            "largest_batch": self.largest_batch,
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
    args.recompute_layers, args.recompute_group, args.offload_activations = None, 1, False
    return fill_in(args)


def rows(planner: Planner, batch_size: int, budget: int | None) -> tuple[list[Row], StepMemory]:
    """Every policy, and what `auto` would take (it gets a row of its own if it is a mix)."""
    ways = [*RUNGS, {"recompute": "full", "offload_activations": True}]
    taken = pick_recompute(planner, batch_size, sys.maxsize if budget is None else budget)
    memory = {name: getattr(taken.config, name) for name in ("recompute", "recompute_group")}
    if taken.config.recompute_layers is not None:
        memory["recompute_layers"] = taken.config.recompute_layers
        before = [way["recompute"] for way in ways].index(taken.config.recompute)
        ways.insert(before, memory)
    needed, _ = step_flops(planner.config, planner.seq_len)
    table = []
    for way in ways:
        step = planner.step(batch_size, **way)
        largest = None if budget is None else planner.largest_batch(budget, batch_size, **way)
        table.append(
            Row(
                name=describe_recompute(step.config),
                flags=recompute_flags(step.config),
                step=step,
                replayed=step_flops(step.config, planner.seq_len)[1] / needed,
                fits=None if budget is None else step.peak <= budget,
                largest_batch=largest,
            )
        )
    return table, taken


def format_table(table: list[Row], taken: StepMemory) -> str:
    """Aligned columns; `taken` is marked."""
    lines = [
        ("", "policy", "peak", "where", "kept a block", "FLOPs twice", "fits", "largest batch")
    ]
    for row in table:
        lines.append(
            (
                ">" if row.step is taken else "",
                row.name,
                format_bytes(row.step.peak),
                row.step.where,
                format_bytes(row.step.kept_per_block),
                f"{row.replayed:.1%}",
                {True: "yes", False: "no", None: "?"}[row.fits],
                "?" if row.largest_batch is None else f"{row.largest_batch:,}",
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


def describe_target(
    args: argparse.Namespace, planner: Planner, kind: str, budget: int | None
) -> str:
    """What the table below is about."""
    config, precision = planner.config, str(planner.precision).removeprefix("torch.")
    n_parameters = sum(p.numel() for p in planner.model.parameters())
    parts = closed_form(config, args.batch_size, args.seq_len, planner.precision)
    state = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    if budget is None:
        limit = f"no {kind} here and no --memory-budget: what fits cannot be told"
    else:
        limit = format_bytes(budget) + ("" if args.memory_budget else ", 90 % of what is free")
    lines = [
        f"model    {n_parameters:,} parameters: {config.n_layers} layers x {config.d_model}, "
        f"{config.n_heads} heads, vocabulary {config.vocab_size:,}",
        f"batch    {args.grad_accum_steps} x {args.batch_size} sequences of {args.seq_len} tokens",
        f"device   {kind}, {precision}" + (", DistributedDataParallel" if planner.ddp else ""),
        f"budget   {limit}",
        f"always   {format_bytes(state)}: weights, gradients, AdamW (16 bytes a parameter)",
    ]
    if args.compile:
        lines.append("note     eager code is simulated; the compiler may keep less, or more")
    return "\n".join(lines)


def command_line(argv: list[str], args: argparse.Namespace, flags: list[str]) -> str:
    """The trainer's command: what was asked, with what was found."""
    mine = {"--json": 1, "--nproc-per-node": 1, "--memory-budget": 1, "--recompute-layers": 1}
    mine |= {"--recompute-group": 1, "--offload-activations": 0, "--use-activation-checkpoint": 0}
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


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = parse(argv)
        kind, precision, budget = target(args, args.nproc_per_node or 1)
        config = model_config(args, vocabulary(args))
        make = partial(
            make_planner,
            config=config,
            device=torch.device(kind),
            precision=precision,
            ddp=bool(args.nproc_per_node),
        )
        planner = make(args)
        table, taken = rows(planner, args.batch_size, budget)
    except (UsageError, DataError) as error:
        print_error(error)
        return 2
    print(describe_target(args, planner, kind, budget), end="\n\n")
    print(format_table(table, taken), end="\n\n")
    row = next(row for row in table if row.step is taken)
    if row.fits is False:
        print("nothing fits; " + way_out(make, args, taken, budget or 0))
    else:
        print(command_line(argv, args, row.flags))
    if args.json:
        result = {
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "command": shlex.join(["python", "-m", "scripts.plan_memory", *argv]),
            "config": asdict(config),
            "batch_size": args.batch_size,
            "seq_len": args.seq_len,
            "device": kind,
            "precision": str(precision).removeprefix("torch."),
            "budget_bytes": budget,
            "takes": None if row.fits is False else row.name,
            "closed_form": closed_form(taken.config, args.batch_size, args.seq_len, precision),
            "rows": [row.as_json() for row in table],
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
