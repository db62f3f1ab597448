"""The pictures of scripts/memory_timeline.py: over the step, and at the peak; and their style.

matplotlib is imported by load_pyplot alone: where it is missing, that is one line and no traceback.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

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

# Bottom up, what is always there first: the same order everywhere. Okabe and Ito's hues, cold ones
# for the training state; some lighter or darker, for as they are a colour-blind reader takes the
# head for temporaries, and recomputed for activations.
COLORS = {
    "parameters": "#0072B2",
    "optimizer": "#56B4E9",
    "gradients": "#007A59",
    "activations": "#E69F00",
    "recomputed": "#C04A00",
    "head": "#C66A9C",
    "temporaries": "#C4C4C4",
}
DARK = ("parameters", "gradients", "recomputed")  # white words can be read there, black ones not
NAMES = {"optimizer": "moments"}  # others: the kind's own
MEANINGS = {  # in legends, of what explains itself less
    "optimizer": "the optimizer's",
    "activations": "kept for backward",
    "recomputed": "made again in backward",
    "head": "logits, loss",
    "temporaries": "soon gone",
}
GRAY = "#555555"
SHADE = "#EEEEEE"  # of every other phase
# Pages show a picture some 830 pixels wide, whatever its own width. SMALL at this WIDTH is then
# 16 pixels high, as the text around it is. Both in their usual units: inches, points.
WIDTH, SMALL = 6.4, 9
TEETH = 8  # blocks that are enlarged, at most
# Without the date and the program that made it: the same numbers make the same file.
FORMATS: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}


def in_legend(kind: str) -> str:
    """ "head: logits, loss" """
    return ": ".join([NAMES.get(kind, kind), *filter(None, [MEANINGS.get(kind)])])


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
    style: Any = {"figure.constrained_layout.use": True, "figure.titlesize": 10, "savefig.dpi": 200}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "minigpt"}
    style |= {"axes.titlelocation": "left", "axes.titlesize": 9.5, "font.size": SMALL}
    plt.rcParams.update(style)
    return plt


def save_picture(figure: Any, file: Path, metadata: Mapping[str, str | None]) -> None:
    """Raises what `savefig` does."""
    figure.savefig(file, metadata=metadata or None)  # some formats know none
    if file.suffix == ".png":
        use_few_colors(file, metadata)


def use_few_colors(file: Path, metadata: Mapping[str, str | None]) -> None:
    """256 are all that a picture has but at the edges of letters: so a PNG takes a third of the
    bytes."""
    from PIL import Image, PngImagePlugin  # matplotlib needs them, too

    about = PngImagePlugin.PngInfo()
    for key, words in metadata.items():
        if words is not None:
            about.add_text(key, words)
    with Image.open(file) as picture:
        few = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(file, optimize=True, pnginfo=about)


def describe(planner: Planner, batch: str) -> str:
    """ "124M parameters, batch of 8 x 1,024 tokens, bfloat16 on a GPU" """
    millions, precision = n_parameters(planner) / 1e6, str(planner.precision).split(".")[1]
    size = f"{millions:,.{0 if millions > 10 else 2}f}M parameters"
    device = "a CPU" if planner.on_cpu else "a GPU"
    return f"{size}, {batch}{planner.seq_len:,} tokens, {precision} on {device}"


def legend(plt: Any, *more: Any) -> dict[str, Any]:
    """A colour for each kind, in the order of the layers, and `more`."""
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=color, label=in_legend(kind))
        for kind, color in COLORS.items()
    ]
    return {"handles": handles + [*more], "loc": "outside lower center", "ncols": 2}


def draw_timeline(plt: Any, planner: Planner, batch_size: int, records: dict[str, Record]) -> Any:
    """Memory over one step, a panel a policy, all on one scale; below, the teeth of `full`."""
    steps = {name: planner.step(batch_size, **POLICIES[name]) for name in PANELS}
    rows = [["plain", "none"], ["cheap", "full"], ["teeth", "teeth"]]
    figure, axes = plt.subplot_mosaic(rows, figsize=(WIDTH, 8), height_ratios=(3, 3, 2))
    most = max(step.peak for step in steps.values())
    unit = Unit.of(most)
    right = 1.09 * max(flops_done(step)[-1] for step in steps.values())
    outline = {"where": "post", "color": GRAY, "linewidth": 0.8}
    for name, step in steps.items():
        axis = axes[name]
        draw_layers(axis, step, records.get(name), unit)
        if step.config.recompute != "none":
            x, y = none_until_gradients_go(steps["none"])
            axis.step(x, y / unit.size, **outline)
        top = 1.3 * most / unit.size
        axis.set(title=title(name, steps), xlim=(0, right), ylim=(0, top), xticks=[0, 0.5, 1])
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
        axis.tick_params(labelleft=name in ("plain", "cheap"))  # the scale is one
    for name in ("plain", "cheap"):
        axes[name].set_ylabel(f"memory in use ({unit.name})")
    for name in ("cheap", "full"):
        axes[name].set_xlabel("FLOPs done\n(100% = a step without recompute)")
    draw_teeth(plt, axes, steps["full"], records.get("full"), unit)
    black = "\nblack: the allocator's own record" if records else ""
    about = describe(planner, f"batch of {batch_size} x ")
    figure.suptitle(f"Memory over one training step\n{about}, predicted{black}")
    line = plt.Line2D([], [], color=GRAY, linewidth=0.8, label="outline: memory with none")
    figure.legend(**legend(plt, line), frameon=False)
    label_panels(figure, axes, steps, records, unit)
    return figure


def none_until_gradients_go(none: StepMemory) -> tuple[np.ndarray, np.ndarray]:
    """(when, bytes) of the outline that other policies are compared with."""
    return flops_done(none)[:-1], none.total[:-1]


def label_panels(
    figure: Any,
    axes: dict[str, Any],
    steps: dict[str, StepMemory],
    records: dict[str, Record],
    unit: Unit,
) -> None:
    """All words inside of the panels, when it is known how much room there is."""
    figure.draw_without_rendering()
    names = max(label_phases(axes[name], step) for name, step in steps.items())
    peak_label = 2.7 * SMALL * figure.dpi / 72  # with the triangle below it, and some air
    taken = (names + peak_label) / axes["plain"].get_window_extent().height
    highest = [step.peak for step in steps.values()]
    highest += [int(record[1].max()) for record in records.values()]
    top = max(highest) / unit.size / (1 - taken)
    for name in steps:
        axes[name].set_ylim(0, top)
    figure.draw_without_rendering()
    for name, step in steps.items():
        label_layers(axes[name], step, unit)
        lines = [(flops_done(step), step.total)]
        if step.config.recompute != "none":
            lines.append(none_until_gradients_go(steps["none"]))
        if name in records:
            lines.append(records[name])
        label_peak(axes[name], step, lines, unit)


def title(name: str, steps: dict[str, StepMemory]) -> str:
    """What the policy does, or that it does nothing here."""
    step, before = steps[name], [*steps][: [*steps].index(name)]
    for other in before:
        if np.array_equal(step.timeline, steps[other].timeline):
            return f"{name}: here the same as {other}"
    words = f"{name}: {PANELS[name]}"
    if step.config.recompute != "none":
        words += f"\n{relative_flops(step) - 1:+.0%} FLOPs"
    return words


def draw_layers(axis: Any, step: StepMemory, record: Record | None, unit: Unit) -> None:
    layers = [step.timeline[:, KINDS.index(kind)] / unit.size for kind in COLORS]
    axis.stackplot(flops_done(step), layers, colors=COLORS.values(), step="post", linewidth=0)
    if record is not None:
        axis.step(record[0], record[1] / unit.size, where="post", color="black", linewidth=0.7)


def label_phases(axis: Any, step: StepMemory) -> float:
    """Every other phase is shaded, and each has its name: in a row at the top, turned where it is
    too wide. The optimizer is but a line at the end; its name stands behind it, where nothing is.
    Returns how far down from the top the names come, in pixels."""
    x, frame, lowest = flops_done(step), axis.get_window_extent(), 0.0
    pixels = axis.transData.transform
    left = frame.x0  # of here the next name may begin
    for i, name in enumerate(PHASES):
        start, end = step.phase(name).start, min(step.phase(name).stop, len(x) - 1)
        if i % 2:
            axis.axvspan(x[start], x[end], color=SHADE, linewidth=0, zorder=0)
        words = {"transform": axis.get_xaxis_transform(), "in_layout": False}
        if name == "optimizer":
            words |= {"xycoords": words.pop("transform"), "textcoords": "offset points"}
            axis.annotate(name, (x[end], 0), (2, 3), rotation=90, va="bottom", **words)
            continue
        text = axis.text(x[[start, end]].mean(), 0.99, name, ha="center", va="top", **words)
        (begins, _), (ends, _) = pixels([(x[start], 0), (x[end], 0)])
        if text.get_window_extent().width > 0.98 * (ends - begins):
            text.set_rotation(90)
        box = text.get_window_extent()
        move_right(axis, text, max(0, left - box.x0))
        left, lowest = text.get_window_extent().x1 + 2, max(lowest, frame.y1 - box.y0)
    return lowest


def move_right(axis: Any, text: Any, pixels: float) -> None:
    x, y = text.get_position()
    text.set_x(x + pixels * np.diff(axis.get_xlim())[0] / axis.get_window_extent().width)


def label_layers(axis: Any, step: StepMemory, unit: Unit) -> None:
    """Each layer's name where there is most room for it, if there is any: inside of its colour."""
    x, pixel = flops_done(step), axis.get_window_extent()
    across = np.linspace(0, x[-1], 500)
    kinds = [KINDS.index(kind) for kind in COLORS]
    at = np.searchsorted(x, across, side="right") - 1
    tops = step.timeline[at][:, kinds].cumsum(axis=1).T / unit.size  # (kinds, 500)
    bottoms = np.vstack([0 * across, tops[:-1]])
    for kind, bottom, top in zip(COLORS, bottoms, tops, strict=True):
        name, color = {"optimizer": "moments"}.get(kind, kind), "white" if kind in DARK else "black"
        text = axis.text(0, 0, name, ha="center", va="center_baseline", color=color)
        text.set_in_layout(False)
        box = text.get_window_extent().padded(3)
        width = box.width / pixel.width * np.diff(axis.get_xlim())[0]
        n = min(len(across), math.ceil(width / across[1]) + 1)
        low = sliding_window_view(bottom, n).max(axis=1)
        room = sliding_window_view(top, n).min(axis=1) - low
        best = room.argmax()
        if room[best] < box.height / pixel.height * axis.get_ylim()[1]:
            text.remove()
        else:
            text.set_position((across[best : best + n].mean(), low[best] + room[best] / 2))


def label_peak(
    axis: Any, step: StepMemory, lines: list[tuple[np.ndarray, np.ndarray]], unit: Unit
) -> None:
    """A triangle at the peak, and its height above all `lines` (when, bytes) that pass there."""
    x, y = flops_done(step)[step.total.argmax()], step.peak / unit.size
    name = f"peak {unit.text(step.peak)}"
    words = {"textcoords": "offset points", "weight": "bold", "in_layout": False}
    text = axis.annotate(name, (x, y), (0, 7), ha="center", va="bottom", **words)
    # Between the frame and the end of the step, behind which "optimizer" stands.
    box, frame = text.get_window_extent(), axis.get_window_extent()
    end, _ = axis.transData.transform((flops_done(step)[-1], 0))
    shift = max(0, frame.x0 + 2 - box.x0) - max(0, box.x1 - end + 4)
    text.xyann = (shift * 72 / axis.figure.dpi, 7)
    box = text.get_window_extent()
    (left, _), (right, _) = axis.transData.inverted().transform([(box.x0, 0), (box.x1, 0)])
    above = max(total[(left <= at) & (at <= right)].max(initial=0) for at, total in lines)
    above = max(step.peak, above) / unit.size
    text.xy = (x, above)
    axis.plot(x, y, "v", color="black", markersize=6)
    axis.vlines(x, y, above, color="black", linewidth=0.8)


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
    x = flops_done(step)[[start, end]]
    if record is not None:  # which may be higher
        inside = (x[0] <= record[0]) & (record[0] <= x[1])
        high = max(high, record[1][inside].max(initial=0) / unit.size)
    height = high - low
    bottom = max(0, low - 0.5 * height)
    axis.set(xlim=x, ylim=(bottom, high + 0.05 * height), xticks=[])
    axis.yaxis.set_major_locator(plt.MaxNLocator(5))
    axis.set_ylabel(f"{unit.name}, not from 0" if bottom else unit.name)
    blocks = "every block" if n == n_layers else f"the last {n} of {n_layers} blocks"
    axis.set_title(f"full, the framed part enlarged:\nbackward of {blocks}, a tooth for each")
    frame = {"width": x[1] - x[0], "height": high + 0.05 * height - bottom}
    axes["full"].add_patch(plt.Rectangle((x[0], bottom), **frame, fill=False, linewidth=0.8))


def draw_made_of(plt: Any, planner: Planner, batch_size: int) -> Any:
    """What the peak is made of: a panel a batch size, a bar a policy."""
    batches = bar_batches(batch_size)
    size, state = (WIDTH, 2.4 + 1.6 * len(batches)), n_state_bytes(planner)
    figure, grid = plt.subplots(len(batches), 1, figsize=size, sharex=True, squeeze=False)
    unit, axes = Unit.of(planner.step(batch_size, **POLICIES["plain"]).peak), grid[:, 0]
    for axis, sequences in zip(axes, batches, strict=True):
        steps = [planner.step(sequences, **POLICIES[name]) for name in BARS]
        for row, step in enumerate(steps):
            left = 0.0
            for kind, color in COLORS.items():
                width = step.at_peak[kind] / unit.size
                axis.barh(row, width, left=left, color=color, height=0.7)
                left += width
            text = unit.text(step.peak) + compare(step.peak, steps[0].peak) * (row > 0)
            words = {"textcoords": "offset points", "va": "center", "weight": "bold"}
            axis.annotate(text, (left, row), (5, 0), in_layout=False, **words)
        dashed = axis.axvline(state / unit.size, color="black", linewidth=1, linestyle="--")
        axis.set_yticks(range(len(BARS)), BARS)
        axis.invert_yaxis()
        axis.set_title(f"batch of {sequences} sequence" + "s" * (sequences > 1))
    each = f"{state / n_parameters(planner):.3g} bytes a parameter"
    dashed.set_label(f"parameters, moments, all gradients:\n{each}, whatever the policy")
    xlabel = f"memory at the peak of the step ({unit.name}); percentages: against plain"
    axes[-1].set_xlabel(xlabel)
    about = describe(planner, "sequences of ")
    figure.suptitle(f"What the peak of a training step is made of\n{about}, predicted")
    figure.legend(**legend(plt, dashed), frameon=False)
    figure.draw_without_rendering()  # now widths are known: each bar has room for its words
    frame = axes[0].get_window_extent().width
    labels = [label for axis in axes for label in axis.texts]
    room = [frame - label.get_window_extent().width - 10 * figure.dpi / 72 for label in labels]
    ends = zip((label.xy[0] for label in labels), room, strict=True)
    axes[-1].set_xlim(0, max(end * frame / max(pixels, frame / 3) for end, pixels in ends))
    return figure


def compare(peak: int, plain: int) -> str:
    """ ", 53% less" """
    share = f"{abs(peak / plain - 1):.0%}"
    return ", the same" if share == "0%" else f", {share} {'less' if peak < plain else 'more'}"
