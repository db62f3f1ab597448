"""The pictures of scripts/memory_timeline.py: over the step, against its cost, at the peak.

matplotlib is imported by load_pyplot alone: where it is missing, that is one line and no traceback.
"""

from typing import Any

import numpy as np

from planner.step import KINDS, Planner, StepMemory
from scripts.memory_timeline_numbers import (
    PANELS,
    PHASES,
    POLICIES,
    Points,
    Record,
    flops_done,
    relative_flops,
)
from trainer.flags import UsageError

GIB = 2**30
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
MIXED = ("cheap", "mlp", "full")  # the frontier has them in a part of the blocks, too
BARS = ("plain", "none", "cheap", "mlp", "full")
BATCHES = (2, 12)  # of the bars


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
