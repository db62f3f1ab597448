"""Draw where the memory of a training step goes, and what recompute changes: three pictures.

python -m scripts.memory_timeline                                    # the demo's model: seconds
python -m scripts.memory_timeline --model gpt2 --batch-size 8 --device cuda       # a minute
python -m scripts.memory_timeline --model gpt2 --batch-size 8 --memory-budget 3GiB --device cuda
python -m scripts.memory_timeline --measure                 # and train, to see if it is so

    out/memory_timeline.png    memory over one step, a panel a policy
    out/memory_frontier.png    peak memory against FLOPs of a step; with --card, time on that card
    out/memory_made_of.png     what the peak is made of

The flags are the trainers' own and mean the same here, but for those that choose a policy: all are
drawn, as the planner predicts them. --memory-budget marks what `auto` would take; `--device cuda`
plans for a GPU wherever you are. Needs matplotlib: pip install matplotlib
"""

import argparse
import json
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import profile, record_function
from tqdm import tqdm

from model import MiniGPT
from planner import Card, Planner, StepMemory
from planner.choose import describe_recompute
from planner.step import follow
from scripts.benchmark_worker import DEVICE_TYPES, allocations, trace_events
from scripts.style import FORMATS, load_pyplot, n_parameters, relative_flops, save_picture
from studies.common import about, add_json, tool, write_json
from studies.timeline_pictures import (
    PANELS,
    Points,
    Record,
    Subject,
    choose,
    draw_frontier,
    draw_made_of,
    draw_timeline,
    flops_done,
)
from trainer import flags
from trainer.device import choose_device
from trainer.flags import UsageError, model_config, output_folder
from trainer.optimizer import make_optimizer
from trainer.plan import asked_card, make_planner, target, vocabulary
from trainer.pretrained import open_init_from
from trainer.report import describe_model


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises UsageError."""
    parser = flags.build_parser("python -m scripts.memory_timeline", "unused")
    parser.description = (
        "Draw where the memory of a training step goes. Takes the trainers' flags, which mean the "
        "same here; those of running, and those that choose a policy, have no effect."
    )
    group = parser.add_argument_group("pictures")
    add = group.add_argument
    # fmt: off
    add("--out", type=output_folder, default=Path("out"), metavar="FOLDER",
        help="where the pictures go; is made if need be (default: %(default)s)")
    add("--format", choices=tuple(FORMATS), default="png", help="(default: %(default)s)")
    add_json(group)
    add("--measure", action="store_true",
        help="also train, and draw the allocator's own record over the prediction (slow on a CPU)")
    add("--measured", type=Path, metavar="FILE",
        help="from scripts.benchmark --json: the frontier shows its times, none predicted")
    # fmt: on
    args = parser.parse_args(argv)
    args.use_activation_checkpoint = "auto"  # --memory-budget may stand beside it
    args.recompute_layers, args.recompute_rest = None, None
    args.recompute_group, args.offload_activations = 1, False
    open_init_from(args)
    flags.fill_in(args)
    args.use_activation_checkpoint = "none"
    return args


def prepare(args: argparse.Namespace) -> Planner:
    """The planner that the trainers would have with these flags. Raises UsageError, DataError."""
    kind, precision, _ = target(args)
    if args.measure:
        choose_device(kind)  # a device that is not there can be planned for, not trained on
        if kind not in DEVICE_TYPES:
            raise UsageError(f"--measure: nothing records {kind}'s allocator: try --device cpu")
    config = model_config(args, vocabulary(args))
    return make_planner(args, config, torch.device(kind), precision)


class Marks:
    """What `planner.step.follow` tells a tracker, written into a profile: here a part begins."""

    phase = ""

    def enter(self, phase: str, block: int | None = None) -> None:
        self.phase = phase
        with record_function("## part"):
            pass


def record_step(planner: Planner, step: StepMemory, args: argparse.Namespace) -> Record:
    """Do what `Planner.simulate` pretends to do, on the device, under PyTorch's profiler.

    It notes each allocation, each release and their times. To stand over the prediction, whose
    unit is no time, the record is stretched part by part; heights stay as they were noted.
    """
    device = choose_device(args.device)
    marks: Any = Marks()
    model = MiniGPT(step.config).to(device).train()
    optimizer = make_optimizer(model, args, device, planner.precision)
    ids = torch.randint(step.config.vocab_size, (2, step.batch_size, step.seq_len), device=device)
    enabled = planner.precision != torch.float32
    autocast = torch.autocast(
        device.type, planner.precision if enabled else None, enabled=enabled, cache_enabled=False
    )

    def micro_batch() -> None:
        marks.enter("forward")
        with autocast:
            loss = model(*ids)
        loss.backward()

    def update() -> None:
        marks.enter("optimizer")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    micro_batch()
    update()  # the first one makes AdamW's moments
    state = chain(*(moments.values() for moments in optimizer.state.values()))
    before = ids.nbytes + sum(tensor.nbytes for tensor in chain(model.parameters(), state))
    if device.type == "cuda":  # which rounds up, and has room to work in
        before = torch.cuda.memory_allocated(device)
    with follow(model, marks), profile(profile_memory=True) as profiler:
        if planner.accumulate:
            micro_batch()
        micro_batch()
        update()
    events = trace_events(profiler)
    parts = [operator for operator, phase, _ in step.places if phase]
    begun = [event["ts"] for event in events if event["name"] == "## part"][-len(parts) :]
    times, changes = np.array(allocations(events, device.type)).T
    flops = np.interp(times, [*begun, times[-1]], flops_done(step)[[*parts, -1]])
    this_step = times >= begun[0]
    return flops[this_step], before + changes.cumsum()[this_step]


def load_measured(file: Path, batch_size: int) -> tuple[Points, str]:
    """(name -> (seconds, bytes), where and when) of this batch size, from a benchmark's file.

    Raises UsageError.
    """
    points: Points = {}
    try:
        content = json.loads(file.read_text())
        source = f"measured on {content['device']}, torch {content['torch']}, {content['date']}"
        for row in content["rows"]:
            if row["batch_size"] == batch_size and row["peak_bytes"] is not None:
                name = " ".join(filter(None, [row.get("peer"), row.get("name", row["policy"])]))
                points[name] = float(row["step_s"]), int(row["peak_bytes"])
    except OSError as error:
        raise UsageError(f"--measured {file}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"--measured {file} is not scripts.benchmark's JSON ({reason})") from None
    if not points:
        raise UsageError(f"--measured {file} has no row with --batch-size {batch_size}")
    return points, source


def row(step: StepMemory, card: Card | None = None, compiled: bool = False) -> dict[str, Any]:
    """For the JSON file; what a benchmark's file has, too, has the same name there."""
    config = step.config
    return {
        "name": describe_recompute(config),
        "policy": config.recompute,
        "layers": config.recompute_layers,
        "rest": config.recompute_rest,
        "group": config.recompute_group,
        "loss_chunks": config.loss_chunks,
        "batch_size": step.batch_size,
        "seq_len": step.seq_len,
        "relative_flops": relative_flops(config, step.seq_len),
        "predicted_bytes": step.peak,
        "predicted_s": None if card is None else step.seconds(card, compiled),
        "where": step.where,
        "at_peak": step.at_peak,
    }


def draw_all(args: argparse.Namespace) -> dict[str, Any]:
    """Draws and writes the pictures; what the JSON file says. Raises UsageError, DataError."""
    plt = load_pyplot("memory_timeline")
    measured = load_measured(args.measured, args.batch_size) if args.measured else None
    with tqdm(unit="step", desc="simulating", disable=None, leave=False) as bar:
        planner, card = prepare(args), asked_card(args)
        precision = str(planner.precision).removeprefix("torch.")
        bar.write(
            f"model    {n_parameters(planner):,} parameters: {describe_model(planner.config)}"
        )
        bar.write(f"device   {'cpu' if planner.on_cpu else 'GPU'}, {precision}")
        planner.watch = bar.update
        subject = Subject(planner, args.batch_size, card, args.compile)
        records = {
            name: record_step(planner, subject.step(name), args)
            for name in (PANELS if args.measure else ())
        }
        choice = choose(subject, args.memory_budget and target(args)[2].safe)
        pictures: dict[str, Callable[[], Any]] = {
            "timeline": lambda: draw_timeline(plt, subject, records),
            "frontier": lambda: draw_frontier(plt, subject, choice, measured),
            "made_of": lambda: draw_made_of(plt, subject),
        }
        args.out.mkdir(parents=True, exist_ok=True)
        for name, draw in pictures.items():
            file = args.out / f"memory_{name}.{args.format}"
            save_picture(draw(), file)
            bar.write(f"wrote {file}")
    return {
        "recorded_bytes": {name: int(record[1].max()) for name, record in records.items()},
        "rows": [row(step, card, args.compile) for step in planner.steps.values()],
    }


@tool
def main(argv: list[str]) -> None:
    args = parse(argv)
    write_json(args.json, about("scripts.memory_timeline", argv) | draw_all(args))
    if args.json:
        print(f"wrote {args.json}")


if __name__ == "__main__":
    sys.exit(main())
