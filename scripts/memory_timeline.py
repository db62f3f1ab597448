"""Draw where the memory of a training step goes, and what recompute changes: three pictures.

python -m scripts.memory_timeline --out scripts/results     # GPT-2 small; no GPU, two minutes
python -m scripts.memory_timeline --n-layers 24 --n-heads 16 --d-model 1024 --batch-size 4
python -m scripts.memory_timeline --measure                 # and train, to see if it is so

    memory_timeline.png    memory over one step, a panel a policy
    memory_frontier.png    peak memory against FLOPs (with --measured: time) of a step
    memory_made_of.png     what the peak is made of

What is drawn is the planner's prediction (planner/step.py): memory_timeline_numbers.py asks for it,
memory_timeline_pictures.py draws it. Needs matplotlib: pip install matplotlib
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from planner.choose import describe_recompute
from planner.step import Planner, StepMemory
from scripts.allocator_trace import DEVICE_TYPES
from scripts.memory_timeline_numbers import (
    PANELS,
    POLICIES,
    load_measured,
    record_step,
    relative_flops,
)
from scripts.memory_timeline_pictures import (
    draw_frontier,
    draw_made_of,
    draw_timeline,
    load_pyplot,
)
from trainer import flags
from trainer.flags import (
    UsageError,
    choose_device,
    choose_precision,
    model_config,
    output_file,
    print_error,
)
from trainer.plan import make_planner


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Raises UsageError."""
    parser = flags.build_parser("python -m scripts.memory_timeline", "unused")
    parser.description = (
        "Draw where the memory of a training step goes. Takes the trainers' flags; those of data "
        "and running, and those that choose a policy, have no effect. "
        "Defaults here: GPT-2 small, bfloat16, --vocab-size 50257."
    )
    parser.set_defaults(n_layers=12, n_heads=12, d_model=768, seq_len=1024, batch_size=8)
    add = parser.add_argument_group("pictures").add_argument
    # fmt: off
    add("--out", type=Path, default=Path(), metavar="FOLDER",
        help="where the pictures go (default: here)")
    add("--json", type=output_file, metavar="FILE", help="write the numbers there")
    add("--measure", action="store_true",
        help="also train, and draw the allocator's own record over the prediction (slow on a CPU)")
    add("--measured", type=Path, metavar="FILE",
        help="from scripts.benchmark --json: the frontier shows its times, not FLOPs")
    # fmt: on
    args = parser.parse_args(argv)
    if not (args.out.is_dir() and os.access(args.out, os.W_OK)):
        raise UsageError(f"--out: there is no folder {args.out} to write to")
    flags.fill_in(args)
    args.vocab_size = args.vocab_size or 50257
    if not args.no_amp and args.amp_dtype == "auto":
        args.amp_dtype = "bfloat16"
    args.use_activation_checkpoint, args.recompute_layers, args.recompute_group = "none", None, 1
    args.offload_activations = False
    return args


def prepare(args: argparse.Namespace) -> Planner:
    """Raises UsageError."""
    device = choose_device(args.device)
    if args.measure and device.type not in DEVICE_TYPES:
        raise UsageError(f"--measure: nothing records {device.type}'s allocator: try --device cpu")
    config = model_config(args, args.vocab_size)
    return make_planner(args, config, device, choose_precision(args, device))


def row(step: StepMemory) -> dict[str, Any]:
    """For the JSON file; what a benchmark's file has, too, has the same name there."""
    config = step.config
    return {
        "name": describe_recompute(config),
        "policy": config.recompute,
        "layers": config.recompute_layers,
        "group": config.recompute_group,
        "loss_chunks": config.loss_chunks,
        "batch_size": step.batch_size,
        "seq_len": step.seq_len,
        "relative_flops": relative_flops(step),
        "predicted_bytes": step.peak,
        "where": step.where,
        "at_peak": step.at_peak,
    }


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(argv)
        plt, planner = load_pyplot(), prepare(args)
        measured = load_measured(args) if args.measured else None
        records, size = {}, args.batch_size
        for name in PANELS if args.measure else ():
            records[name] = record_step(planner, planner.step(size, **POLICIES[name]), args)
        pictures: dict[str, Callable[[], Any]] = {
            "timeline": lambda: draw_timeline(plt, planner, size, records),
            "frontier": lambda: draw_frontier(plt, planner, size, measured),
            "made_of": lambda: draw_made_of(plt, planner),
        }
        for name, draw in pictures.items():
            file = args.out / f"memory_{name}.png"
            draw().savefig(file, metadata={"Software": None})
            print(f"wrote {file}")
    except UsageError as error:
        print_error(error)
        return 2
    words = sys.argv[1:] if argv is None else argv
    result = {
        "command": shlex.join(["python", "-m", "scripts.memory_timeline", *words]),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "recorded_bytes": {name: int(record[1].max()) for name, record in records.items()},
        "rows": [row(step) for step in planner.steps.values()],
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
