"""Draw where the memory of a training step goes, and what recompute changes: three pictures.

python -m scripts.memory_timeline --out scripts/results     # GPT-2 small; no GPU, two minutes
python -m scripts.memory_timeline --n-layers 24 --n-heads 16 --d-model 1024 --batch-size 4
python -m scripts.memory_timeline --measure                 # and train, to see if it is so

    memory_timeline.png    memory over one step, a panel a policy
    memory_frontier.png    peak memory against FLOPs (with --measured: time) of a step
    memory_made_of.png     what the peak is made of

What is drawn is the planner's prediction (memory.py). Needs matplotlib: pip install matplotlib
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import profile, record_function

from model import MiniGPT
from planner.formulas import step_flops
from planner.step import KINDS, Planner, StepMemory, follow
from trainer import flags
from trainer.flags import (
    UsageError,
    choose_device,
    choose_precision,
    model_config,
    output_file,
    print_error,
)
from trainer.plan import RUNGS, describe_recompute, make_planner
from trainer.run import make_optimizer

GIB = 2**30
PHASES = ("forward", "head", "backward", "optimizer")
# Bottom up, what is always there first: the same order everywhere. Okabe and Ito's colours, which
# colour-blind readers can tell apart: cold ones for the training state.
COLORS = {
    "parameters": "#0072B2",
    "optimizer": "#56B4E9",
    "gradients": "#009E73",
    "activations": "#E69F00",
    "recomputed": "#D55E00",
    "head": "#CC79A7",
    "temporaries": "#999999",
}
NAMES = {"optimizer": "AdamW's moments", "head": "head (logits, loss)"}  # others: the kind's own
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {"recompute": "none", "loss_chunks": 1},  # what every tutorial does
    **{rung["recompute"]: rung for rung in RUNGS if "recompute_group" not in rung},
    "full in groups of 2": {"recompute": "full", "recompute_group": 2},
}
PANELS = {
    "plain": "all logits at once",
    "none": "the head in chunks of tokens",
    "cheap": "pointwise ops recomputed",
    "full": "blocks recomputed",
}
MIXED = ("cheap", "mlp", "full")  # the frontier has them in a part of the blocks, too
BARS = ("plain", "none", "cheap", "mlp", "full")
BATCHES = (2, 12)  # of the bars
DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # as a profile names them (c10::DeviceType)

# ----------------------------------------------------------------------------------- the numbers


def relative_flops(step: StepMemory) -> float:
    """Of the step's matrix products, in units of those without recompute."""
    needed, replayed = step_flops(step.config, step.seq_len)
    return (needed + replayed) / needed


def flops_done(step: StepMemory) -> np.ndarray:
    """(operators + 1,) when each operator begins, in the units of `relative_flops`.

    A phase is as wide as its FLOPs are many, and its operators share the width. The optimizer has
    no matrix products; a fiftieth makes it visible.
    """
    needed, replayed = step_flops(step.config, step.seq_len)
    head = 6 * step.config.vocab_size * step.config.d_model  # forward and backward
    forward = (needed - head) / 3
    widths = np.array([forward, head, 2 * forward + replayed, needed / 50]) / needed
    starts = [step.phase(name).start for name in PHASES]
    n = len(step.timeline)
    return np.interp(np.arange(n), [*starts, n - 1], [0, *widths.cumsum()])


Points = dict[str, tuple[float, int]]  # name -> (cost of a step, bytes of its peak)
# Of one real step, by the allocator itself: (when, as in `flops_done`; bytes in use from then on).
Record = tuple[np.ndarray, np.ndarray]


class Marks:
    """What `memory.follow` tells a tracker, written into a profile: here a part begins."""

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
    optimizer = make_optimizer(model, args, device)
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
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    events.sort(key=lambda event: event.get("ts", 0))
    noted = [
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event["name"] == "[memory]" and event["args"]["Device Type"] == DEVICE_TYPES[device.type]
    ]
    parts = [operator for operator, phase, _ in step.places if phase]
    begun = [event["ts"] for event in events if event["name"] == "## part"][-len(parts) :]
    times, changes = np.array(noted).T
    flops = np.interp(times, [*begun, times[-1]], flops_done(step)[[*parts, -1]])
    this_step = times >= begun[0]
    return flops[this_step], before + changes.cumsum()[this_step]


def load_measured(args: argparse.Namespace) -> tuple[Points, str]:
    """(name -> (seconds, bytes), where and when) of this batch size, from a benchmark's file.

    Raises UsageError.
    """
    points: Points = {}
    file = args.measured
    try:
        content = json.loads(file.read_text())
        about = f"measured on {content['device']}, torch {content['torch']}, {content['date']}"
        for row in content["rows"]:
            if row["batch_size"] == args.batch_size and row["peak_bytes"] is not None:
                name = " ".join(filter(None, [row.get("peer"), row.get("name", row["policy"])]))
                points[name] = float(row["step_s"]), int(row["peak_bytes"])
    except OSError as error:
        raise UsageError(f"--measured {file}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"--measured {file} is not scripts.benchmark's JSON ({reason})") from None
    if not points:
        raise UsageError(f"--measured {file} has no row with --batch-size {args.batch_size}")
    return points, about


# ---------------------------------------------------------------------------------- the pictures


def load_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UsageError("memory_timeline needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcdefaults()  # not the style that the reader may have at home
    style: Any = {"figure.constrained_layout.use": True, "figure.titlesize": 11, "savefig.dpi": 160}
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    plt.rcParams.update(style | {"axes.titlelocation": "left", "axes.titlesize": 10})
    return plt


def n_parameters(planner: Planner) -> int:
    return sum(parameter.numel() for parameter in planner.model.parameters())


def describe(planner: Planner, batch: str) -> str:
    """ "124M parameters, batch of 8 x 1,024 tokens, bfloat16" """
    millions, precision = n_parameters(planner) / 1e6, str(planner.precision).split(".")[1]
    size = f"{millions:,.{0 if millions > 10 else 2}f}M parameters"
    return f"{size}, {batch}{planner.seq_len:,} tokens, {precision}"


def legend(plt: Any, *more: Any) -> dict[str, Any]:
    """A colour for each kind, in the order of the layers, and `more`."""
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=color, label=NAMES.get(kind, kind))
        for kind, color in COLORS.items()
    ]
    return {"handles": handles + [*more], "loc": "outside lower center", "ncols": 4}


def draw_timeline(plt: Any, planner: Planner, batch_size: int, records: dict[str, Record]) -> Any:
    """Memory over one step, a panel a policy, all on one scale."""
    steps = {name: planner.step(batch_size, **POLICIES[name]) for name in PANELS}
    figure, grid = plt.subplots(2, 2, figsize=(8, 7), sharex=True, sharey=True)
    top = 1.2 * max(step.peak for step in steps.values()) / GIB
    right = 1.06 * max(flops_done(step)[-1] for step in steps.values())
    none = steps["none"]
    for axis, (name, step) in zip(grid.flat, steps.items(), strict=True):
        draw_layers(axis, step, records.get(name))
        title = f"{name}: {PANELS[name]}"
        if step.config.recompute != "none":
            title += f", {relative_flops(step) - 1:+.0%} FLOPs"
            x, y = flops_done(none), none.total / GIB
            axis.plot(x, y, color="#666666", linewidth=0.7)
            middle = x[none.phase("head")].mean()
            axis.text(middle, 1.02 * y.max(), "none", color="#666666", ha="center", va="bottom")
        label_step(axis, step, top, right)
        axis.set(title=title, xlim=(0, right), ylim=(0, top), xticks=np.arange(5) / 4)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    if steps["full"].peak / GIB < 0.35 * top:  # there is room for a magnifying glass
        enlarge_backward(grid.flat[-1], steps["full"], records.get("full"))
    for axis in grid[:, 0]:
        axis.set_ylabel("memory in use (GiB)")
    for axis in grid[1]:
        axis.set_xlabel("FLOPs done (100% = a step without recompute)")
    line = "; black: the allocator's own record" if records else ""
    about = describe(planner, f"batch of {batch_size} x ")
    figure.suptitle(f"Memory over one training step\n{about}, predicted{line}")
    figure.legend(**legend(plt), frameon=False)
    return figure


def draw_layers(axis: Any, step: StepMemory, record: Record | None) -> None:
    layers = [step.timeline[:, KINDS.index(kind)] / GIB for kind in COLORS]
    axis.stackplot(flops_done(step), layers, colors=COLORS.values(), step="post", linewidth=0)
    if record is not None:
        axis.step(record[0], record[1] / GIB, where="post", color="black", linewidth=0.7)


def label_step(axis: Any, step: StepMemory, top: float, right: float) -> None:
    """Phases, the layers that are thick enough for their name, and the peak."""
    x, bottom = flops_done(step), 0.0
    for name in PHASES:
        start, end = x[step.phase(name).start], x[min(step.phase(name).stop, len(x) - 1)]
        axis.axvline(start, color="black", linewidth=0.6, linestyle=":")
        if name == "optimizer":
            axis.text(end, 0.98 * top, f" {name}", rotation=90, va="top", fontsize=8)
        else:
            axis.text((start + end) / 2, 0.98 * top, name, ha="center", va="top", fontsize=9)
    head = step.phase("head")
    for kind in COLORS:
        height = step.timeline[head.stop - 1, KINDS.index(kind)] / GIB
        if height > 0.07 * top:
            place = x[[head.start, head.stop]].mean(), bottom + height / 2
            axis.text(*place, NAMES.get(kind, kind), ha="center", va="center", fontsize=8)
        bottom += height
    peak = x[step.total.argmax()], step.peak / GIB
    axis.plot(*peak, "v", color="black", markersize=6)
    align = {"ha": "right" if peak[0] > 0.8 * right else "center", "textcoords": "offset points"}
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    axis.annotate(f"peak {peak[1]:.2f} GiB", peak, (0, 7), weight="bold", bbox=box, **align)


def enlarge_backward(axis: Any, step: StepMemory, record: Record | None) -> None:
    """A third of it, in the empty space above, without what is always there."""
    inset = axis.inset_axes((0.44, 0.4, 0.5, 0.38))
    draw_layers(inset, step, record)
    start, end = flops_done(step)[step.phase("backward")][[0, -1]]
    low, high = step.total[0] / GIB, step.peak / GIB
    inset.set(xlim=(start, start + (end - start) / 3), ylim=(low, high + 0.05 * (high - low)))
    inset.set(xticks=[])
    inset.tick_params(labelsize=8)
    inset.set_title("a tooth for each block", fontsize=9, loc="center", pad=3)
    axis.indicate_inset_zoom(inset, edgecolor="black")


def draw_frontier(
    plt: Any, planner: Planner, batch_size: int, measured: tuple[Points, str] | None
) -> Any:
    """Peak memory against what a step costs: FLOPs, or the time that was measured."""
    figure, axis = plt.subplots(figsize=(8, 5))
    state = 16 * n_parameters(planner) / GIB
    axis.axhspan(0, state, color=COLORS["optimizer"], alpha=0.3, linewidth=0)
    words = "parameters, gradients, AdamW's moments: 16 bytes a parameter, which no policy frees"
    place = {"ha": "center", "va": "center", "transform": axis.get_yaxis_transform()}
    axis.text(0.5, state / 2, words, **place)

    def point(**memory: Any) -> tuple[float, int]:
        step = planner.step(batch_size, **memory)
        return relative_flops(step), step.peak

    if measured is None:
        points, source = {}, "predicted"
        for name, memory in POLICIES.items():
            words = f": {PANELS[name]}" if memory["recompute"] == "none" else ""
            points[name + words] = point(**memory)
        quarters = sorted({planner.config.n_layers * i // 4 for i in (1, 2, 3)} - {0})
        for name in MIXED:
            mixes = ({"recompute": name, "recompute_layers": n} for n in quarters)
            ways = [POLICIES["none"], *mixes, POLICIES[name]]
            line = np.array([point(**memory) for memory in ways])
            axis.plot(line[:, 0], line[:, 1] / GIB, color="#999999", linewidth=1.2, zorder=1)
        axis.lines[0].set_label("a policy in only a part of the blocks")
        axis.legend(loc="upper right", frameon=False)
    else:
        points, source = measured
    for cost, peak in points.values():
        axis.plot(cost, peak / GIB, "o", color="#D55E00")
    axis.set_xlabel("FLOPs of a step (none = 1)" if measured is None else "time of a step (s)")
    axis.set_ylabel("peak memory of a step (GiB)")
    axis.margins(x=0.2, y=0.1)
    axis.set_ylim(0, None)
    axis.grid(alpha=0.3)
    about = describe(planner, f"batch of {batch_size} x ")
    figure.suptitle(f"What each policy saves, and what it costs\n{about}, {source}")
    figure.draw_without_rendering()  # now places are known
    label_points(axis, points)
    return figure


def label_points(axis: Any, points: Points) -> None:
    """Each point's name, at the first place around it that is free."""
    taken: list[Any] = []
    for name, (cost, peak) in points.items():
        for dx, dy in ((8, 0), (8, 8), (8, -8), (-8, 0), (0, 10), (0, -10), (-8, 8), (-8, -8)):
            align = {"ha": {8: "left", 0: "center", -8: "right"}[dx], "va": "center"}
            place = {"xytext": (dx, dy), "textcoords": "offset points"}
            text = axis.annotate(name, (cost, peak / GIB), **place, **align)
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                break
            text.set_visible(False)
        text.set_visible(True)
        taken.append(box)


def draw_made_of(plt: Any, planner: Planner) -> Any:
    """What the peak is made of: a panel a batch size, a bar a policy."""
    figure, axes = plt.subplots(len(BATCHES), 1, figsize=(8, 5.5), sharex=True)
    right = 1.2 * planner.step(max(BATCHES), **POLICIES["plain"]).peak / GIB
    for axis, batch_size in zip(axes, BATCHES, strict=True):
        steps = [planner.step(batch_size, **POLICIES[name]) for name in BARS]
        for row, step in enumerate(steps):
            left = 0.0
            for kind, color in COLORS.items():
                axis.barh(row, step.at_peak[kind] / GIB, left=left, color=color, height=0.7)
                left += step.at_peak[kind] / GIB
            less = f", {step.peak / steps[0].peak - 1:+.0%}" if row else ""
            text = f"{step.peak / GIB:.2f} GiB{less}"
            axis.text(left + 0.01 * right, row, text, va="center", weight="bold")
        dashed = axis.axvline(
            16 * n_parameters(planner) / GIB, color="black", linewidth=1, linestyle="--"
        )
        axis.set_yticks(range(len(BARS)), BARS)
        axis.invert_yaxis()
        axis.set_title(f"batch of {batch_size} sequences")
    dashed.set_label("16 bytes a parameter")
    axes[-1].set(xlim=(0, right), xlabel="memory at the peak of the step (GiB)")
    about = describe(planner, "sequences of ")
    figure.suptitle(f"What the peak of a training step is made of\n{about}, predicted")
    figure.legend(**legend(plt, dashed), frameon=False)
    return figure


# ------------------------------------------------------------------------------------------ main


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
    return make_planner(
        args,
        model_config(args, args.vocab_size),
        device_type=device.type,
        precision=choose_precision(args, device),
        make_optimizer=lambda model: make_optimizer(model, args, device),
        ddp=False,
    )


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
