"""The pictures of scripts/memory_timeline.py: over the step, and at the peak; and their style.

matplotlib is imported by load_pyplot alone: where it is missing, that is one line and no traceback.
"""

from typing import Any, NamedTuple

import numpy as np

from planner.step import Planner
from planner.timeline import KINDS, StepMemory
from scripts.memory_timeline_numbers import (
    BARS,
    PANELS,
    PHASES,
    POLICIES,
    Record,
    bar_batches,
    flops_done,
    n_parameters,
    n_state_bytes,
    relative_flops,
)
from trainer.flags import UsageError

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
NAMES = {"optimizer": "moments", "head": "head (logits, loss)"}  # others: the kind's own
GRAY = "#666666"
TEETH = 8  # blocks that are enlarged, at most
# Without the date and the program that made it: the same numbers make the same file.
FORMATS: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}


class Unit(NamedTuple):
    """What a picture's bytes are counted in."""

    name: str
    size: int

    @classmethod
    def of(cls, most: int) -> "Unit":
        """One in which the largest number of bytes is at least 1."""
        power = 3 if most >= 2**30 else 2 if most >= 2**20 else 1
        return cls(("KiB", "MiB", "GiB")[power - 1], 1024**power)

    def text(self, count: float) -> str:
        return f"{count / self.size:.{2 if self.name == 'GiB' else 1}f} {self.name}"


def load_pyplot(program: str = "memory_timeline") -> Any:
    """matplotlib.pyplot in our style, drawing into files. Raises UsageError where it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError(f"{program} needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcdefaults()  # not the style that the reader may have at home
    style: Any = {"figure.constrained_layout.use": True, "figure.titlesize": 11, "savefig.dpi": 160}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "minigpt"}
    plt.rcParams.update(style | {"axes.titlelocation": "left", "axes.titlesize": 10})
    return plt


def describe(planner: Planner, batch: str) -> str:
    """ "124M parameters, batch of 8 x 1,024 tokens, bfloat16 on a GPU" """
    millions, precision = n_parameters(planner) / 1e6, str(planner.precision).split(".")[1]
    size = f"{millions:,.{0 if millions > 10 else 2}f}M parameters"
    device = "a CPU" if planner.on_cpu else "a GPU"
    return f"{size}, {batch}{planner.seq_len:,} tokens, {precision} on {device}"


def legend(plt: Any, *more: Any) -> dict[str, Any]:
    """A colour for each kind, in the order of the layers, and `more`."""
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=color, label=NAMES.get(kind, kind))
        for kind, color in COLORS.items()
    ]
    return {"handles": handles + [*more], "loc": "outside lower center", "ncols": 4}


def draw_timeline(plt: Any, planner: Planner, batch_size: int, records: dict[str, Record]) -> Any:
    """Memory over one step, a panel a policy, all on one scale; below, the teeth of `full`."""
    steps = {name: planner.step(batch_size, **POLICIES[name]) for name in PANELS}
    rows = [["plain", "none"], ["cheap", "full"], ["teeth", "teeth"]]
    figure, axes = plt.subplot_mosaic(rows, figsize=(8, 9), height_ratios=(3, 3, 2))
    unit = Unit.of(max(step.peak for step in steps.values()))
    top = 1.3 * max(step.peak for step in steps.values()) / unit.size
    right = 1.06 * max(flops_done(step)[-1] for step in steps.values())
    none = steps["none"]
    line = plt.Line2D([], [], color=GRAY, linewidth=0.7, label="with none")
    for name, step in steps.items():
        axis = axes[name]
        draw_layers(axis, step, records.get(name), unit)
        if step.config.recompute != "none":
            x, y = flops_done(none)[:-1], none.total[:-1] / unit.size  # until gradients go
            axis.step(x, y, where="post", color=GRAY, linewidth=0.7)
        label_phases(axis, step, top, right, unit)
        label_layers(axis, step, top, unit)
        label_peak(axis, step, max(step.peak, 0 if name == "plain" else none.peak), right, unit)
        axis.set(title=title(name, steps), xlim=(0, right), ylim=(0, top), xticks=np.arange(5) / 4)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    for name in ("plain", "cheap"):
        axes[name].set_ylabel(f"memory in use ({unit.name})")
    for name in ("cheap", "full"):
        axes[name].set_xlabel("FLOPs done (100% = a step without recompute)")
    draw_teeth(plt, axes, steps["full"], records.get("full"), unit)
    black = "\nblack: the allocator's own record" if records else ""
    about = describe(planner, f"batch of {batch_size} x ")
    figure.suptitle(f"Memory over one training step\n{about}, predicted{black}")
    figure.legend(**legend(plt, line), frameon=False)
    return figure


def title(name: str, steps: dict[str, StepMemory]) -> str:
    """What the policy does, or that it does nothing here."""
    step, before = steps[name], [*steps][: [*steps].index(name)]
    for other in before:
        if np.array_equal(step.timeline, steps[other].timeline):
            return f"{name}: here the same as {other}"
    words = f"{name}: {PANELS[name]}"
    if step.config.recompute != "none":
        words += f", {relative_flops(step) - 1:+.0%} FLOPs"
    return words


def draw_layers(axis: Any, step: StepMemory, record: Record | None, unit: Unit) -> None:
    layers = [step.timeline[:, KINDS.index(kind)] / unit.size for kind in COLORS]
    axis.stackplot(flops_done(step), layers, colors=COLORS.values(), step="post", linewidth=0)
    if record is not None:
        axis.step(record[0], record[1] / unit.size, where="post", color="black", linewidth=0.7)


def label_phases(axis: Any, step: StepMemory, top: float, right: float, unit: Unit) -> None:
    x = flops_done(step)
    for name in PHASES:
        start, end = step.phase(name).start, min(step.phase(name).stop, len(x) - 1)
        # From the layers up: their names are not crossed.
        dotted = {"color": "black", "linewidth": 0.6, "linestyle": ":"}
        axis.vlines(x[start], step.total[start] / unit.size, top, **dotted)
        if name == "optimizer":
            axis.text(x[end], 0.98 * top, f" {name}", rotation=90, va="top", fontsize=8)
            continue
        middle, width = (x[start] + x[end]) / 2, (x[end] - x[start]) / right
        turned = 90 if width < 0.012 * len(name) else 0  # too narrow for half of it
        words = {"ha": "center", "va": "top", "fontsize": 8 if turned else 9}
        axis.text(middle, 0.98 * top, name, rotation=turned, **words)


def label_layers(axis: Any, step: StepMemory, top: float, unit: Unit) -> None:
    """Those that are thick enough for their name: what is always there left of backward, where
    `full` has a frame; all else where it is highest, in the head."""
    x, head, bottom = flops_done(step), step.phase("head"), 0.0
    for kind in COLORS:
        before, height = step.timeline[[head.start, head.stop - 1], KINDS.index(kind)] / unit.size
        if min(before, height) > 0.07 * top:
            start = 0 if kind in ("parameters", "optimizer") else head.start
            place = x[[start, head.stop]].mean(), bottom + height / 2
            name = "moments" if kind == "optimizer" else kind
            axis.text(*place, name, ha="center", va="center", fontsize=8)
        bottom += height


def label_peak(axis: Any, step: StepMemory, above: int, right: float, unit: Unit) -> None:
    """A triangle at the peak; its name `above` so many bytes, where no line passes."""
    x, y = flops_done(step)[step.total.argmax()], step.peak / unit.size
    axis.plot(x, y, "v", color="black", markersize=6)
    axis.vlines(x, y, above / unit.size, color="black", linewidth=0.7)
    side = "right" if x > 0.8 * right else "left" if x < 0.2 * right else "center"
    words = {"ha": side, "textcoords": "offset points", "weight": "bold"}
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    name = f"peak {unit.text(step.peak)}"
    axis.annotate(name, (x, above / unit.size), (0, 7), bbox=box, **words)


def draw_teeth(
    plt: Any, axes: dict[str, Any], step: StepMemory, record: Record | None, unit: Unit
) -> None:
    """Backward of the last blocks, which is its beginning, enlarged; framed in the panel of `full`.

    Of what is always there only as much is shown as the teeth are high, so they can be seen
    however small a part of the step's memory they are.
    """
    axis, n_layers = axes["teeth"], step.config.n_layers
    n = min(n_layers, TEETH)
    start, end = step.phase("backward").start, step.phase("backward").stop
    for operator, phase, block in step.places:
        if phase == "backward" and block is not None and block < n_layers - n:
            end = operator
            break
    draw_layers(axis, step, record, unit)
    low, high = step.total[start:end].min() / unit.size, step.total[start:end].max() / unit.size
    x, height = flops_done(step)[[start, end]], high - low
    bottom = max(0, low - 0.5 * height)
    axis.set(xlim=x, ylim=(bottom, high + 0.05 * height), xticks=[])
    axis.set_ylabel(unit.name)
    blocks = "every block" if n == n_layers else f"the last {n} of {n_layers} blocks"
    axis.set_title(f"full, framed part enlarged: backward of {blocks}, a tooth for each")
    frame = {"width": x[1] - x[0], "height": high + 0.05 * height - bottom}
    axes["full"].add_patch(plt.Rectangle((x[0], bottom), **frame, fill=False, linewidth=0.8))


def draw_made_of(plt: Any, planner: Planner, batch_size: int) -> Any:
    """What the peak is made of: a panel a batch size, a bar a policy."""
    batches = bar_batches(batch_size)
    size, state = (8, 2.1 + 1.7 * len(batches)), n_state_bytes(planner)
    figure, grid = plt.subplots(len(batches), 1, figsize=size, sharex=True, squeeze=False)
    most = planner.step(batch_size, **POLICIES["plain"]).peak
    unit, axes = Unit.of(most), grid[:, 0]
    for axis, sequences in zip(axes, batches, strict=True):
        steps = [planner.step(sequences, **POLICIES[name]) for name in BARS]
        for row, step in enumerate(steps):
            left = 0.0
            for kind, color in COLORS.items():
                width = step.at_peak[kind] / unit.size
                axis.barh(row, width, left=left, color=color, height=0.7)
                left += width
            text = unit.text(step.peak) + compare(step.peak, steps[0].peak) * (row > 0)
            axis.text(left + 0.012 * most / unit.size, row, text, va="center", weight="bold")
        dashed = axis.axvline(state / unit.size, color="black", linewidth=1, linestyle="--")
        axis.set_yticks(range(len(BARS)), BARS)
        axis.invert_yaxis()
        axis.set_title(f"batch of {sequences} sequence" + "s" * (sequences > 1))
    dashed.set_label(f"{state / n_parameters(planner):.3g} bytes a parameter")
    xlabel = f"memory at the peak of the step ({unit.name})"
    axes[-1].set(xlim=(0, 1.3 * most / unit.size), xlabel=xlabel)
    about = describe(planner, "sequences of ")
    figure.suptitle(f"What the peak of a training step is made of\n{about}, predicted")
    figure.legend(**legend(plt, dashed), frameon=False)
    return figure


def compare(peak: int, plain: int) -> str:
    """ ", -53%" """
    return ", the same" if peak == plain else f", {peak / plain - 1:+.0%}"
