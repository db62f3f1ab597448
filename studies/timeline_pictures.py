"""The pictures of studies/memory_timeline.py: memory over a step, at its peak, and its price."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from planner import Card, Planner
from planner.choose import describe_recompute, pick_recompute
from planner.formulas import step_flops
from planner.timeline import KINDS, StepMemory
from scripts.style import (
    COLORS,
    GRAY,
    POLICIES,
    SMALL,
    WIDTH,
    Unit,
    describe,
    in_legend,
    n_parameters,
    relative_flops,
)

PHASES = ("forward", "head", "backward", "optimizer")
PANELS = {  # of the timeline; --measure records these
    "plain": "all logits at once",
    "none": "the head in chunks of tokens",
    "cheap": "pointwise ops recomputed",
    "full": "blocks recomputed",
}
MIXED = ("cheap", "mlp", "full")  # the frontier has them in a part of the blocks, too
BARS = ("plain", "none", "cheap", "mlp", "full")
POINT, BEST, SHADE = "#D55E00", "#007A59", "#EEEEEE"
TEETH = 8  # blocks that are enlarged, at most

Points = dict[str, tuple[float, int]]  # name -> (cost of a step, bytes of its peak)
# Of one real step, by the allocator itself: (when, as in `flops_done`; bytes in use from then on).
Record = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Subject:
    """What is drawn, and what a step of it costs: seconds on a card, or, without one, FLOPs."""

    planner: Planner
    batch_size: int
    card: Card | None = None
    compiled: bool = False

    def step(self, name: str, sequences: int = 0) -> StepMemory:
        return self.planner.step(sequences or self.batch_size, **POLICIES[name])

    @property
    def state(self) -> int:
        """Bytes of weights, gradients and moments (and of AdamW's step counts)."""
        stored = self.planner.optimizer.state.values()
        moments = sum(tensor.nbytes for of_one in stored for tensor in of_one.values())
        return 8 * n_parameters(self.planner) + moments

    @property
    def bytes_each(self) -> str:
        return f"{self.state / n_parameters(self.planner):.3g} bytes a parameter"

    def cost(self, step: StepMemory) -> float:
        """In units of the step without recompute."""
        if self.card is None:
            return relative_flops(step.config, step.seq_len)
        none = self.step("none").seconds(self.card, self.compiled)
        return step.seconds(self.card, self.compiled) / none

    @property
    def cost_words(self) -> str:
        if self.card is None:
            return "FLOPs of a step, against none"
        compiled = ", compiled" * self.compiled
        return f"predicted time of a step, against none ({self.card.name}{compiled})"


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


def legend(plt: Any, *more: Any) -> dict[str, Any]:
    """A colour for each kind, in the order of the layers, and `more`."""
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=color, label=in_legend(kind))
        for kind, color in COLORS.items()
    ]
    where = {"loc": "outside lower center", "ncols": 2, "frameon": False}
    return {"handles": handles + [*more], **where}


# ---- Memory over one step


def draw_timeline(plt: Any, subject: Subject, records: dict[str, Record]) -> Any:
    """A panel a policy, all on one scale; below, the teeth of `full`."""
    steps = {name: subject.step(name) for name in PANELS}
    rows = [["plain", "none"], ["cheap", "full"], ["teeth", "teeth"]]
    figure, axes = plt.subplot_mosaic(rows, figsize=(WIDTH, 8), height_ratios=(3, 3, 2))
    most = max(step.peak for step in steps.values())
    most = max(most, *(int(total.max()) for _, total in records.values()), 0)
    unit, none = Unit.of(most), steps["none"]
    right = 1.09 * max(flops_done(step)[-1] for step in steps.values())
    for name, step in steps.items():
        axis = axes[name]
        axis.set(title=title(name, steps, unit), xlim=(0, right), ylim=(0, 1.65 * most / unit.size))
        draw_layers(axis, step, records.get(name), unit)
        if step.config.recompute != "none":  # until its gradients go
            outline = flops_done(none)[:-1], none.total[:-1] / unit.size
            axis.step(*outline, where="post", color=GRAY, linewidth=0.8)
        x = flops_done(step)[step.total.argmax()]
        axis.plot(x, step.peak / unit.size, "v", color="black", markersize=6)
        name_phases(axis, step)
        axis.set_xticks([0, 0.5, 1], ["0%", "50%", "100%"])
        axis.tick_params(labelleft=name in ("plain", "cheap"))  # the scale is one
    for name in ("plain", "cheap"):
        axes[name].set_ylabel(f"memory in use ({unit.name})")
    for name in ("cheap", "full"):
        axes[name].set_xlabel("FLOPs done\n(100% = a step without recompute)")
    draw_teeth(plt, axes, steps["full"], records.get("full"), unit)
    black = "\nblack: the allocator's own record" if records else ""
    about = describe(subject.planner, f"batch of {subject.batch_size} x ")
    figure.suptitle(f"Memory over one training step\n{about}, predicted{black}")
    line = plt.Line2D([], [], color=GRAY, linewidth=0.8, label="outline: memory with none")
    figure.legend(**legend(plt, line))
    return figure


def title(name: str, steps: dict[str, StepMemory], unit: Unit) -> str:
    """What the policy does, or that it does nothing here; and its peak."""
    step, words = steps[name], PANELS[name]
    for other in [*steps][: [*steps].index(name)]:
        if np.array_equal(step.timeline, steps[other].timeline):
            words = f"here the same as {other}"
    words = f"{name}: {words}\npeak {unit.text(step.peak)}"
    if step.config.recompute != "none":
        words += f", {relative_flops(step.config, step.seq_len) - 1:+.0%} FLOPs"
    return words


def draw_layers(axis: Any, step: StepMemory, record: Record | None, unit: Unit) -> None:
    layers = [step.timeline[:, KINDS.index(kind)] / unit.size for kind in COLORS]
    axis.stackplot(flops_done(step), layers, colors=COLORS.values(), step="post", linewidth=0)
    if record is not None:
        axis.step(record[0], record[1] / unit.size, where="post", color="black", linewidth=0.7)


def name_phases(axis: Any, step: StepMemory) -> None:
    """Every other phase is shaded. A name begins where its phase does, or behind the one before."""
    x, free, line = flops_done(step), 0.0, 0.06 * axis.get_xlim()[1]
    for i, name in enumerate(PHASES):
        start, end = step.phase(name).start, min(step.phase(name).stop, len(x) - 1)
        if i % 2:
            axis.axvspan(x[start], x[end], color=SHADE, linewidth=0, zorder=0)
        at = max(free, x[start])
        where = {"transform": axis.get_xaxis_transform(), "rotation": 90, "va": "top"}
        axis.text(at + 0.1 * line, 0.99, name, **where)
        free = at + line


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


# ---- What the peak is made of


def draw_made_of(plt: Any, subject: Subject) -> Any:
    """A bar a policy; a panel for the batch that was asked for, and one for a quarter of it."""
    batches = sorted({max(1, subject.batch_size // 4), subject.batch_size})
    size, state = (WIDTH, 2.4 + 1.6 * len(batches)), subject.state
    figure, grid = plt.subplots(len(batches), 1, figsize=size, sharex=True, squeeze=False)
    unit, axes = Unit.of(subject.step("plain").peak), grid[:, 0]
    for axis, sequences in zip(axes, batches, strict=True):
        plain = subject.step("plain", sequences).peak
        for row, step in enumerate(subject.step(name, sequences) for name in BARS):
            left = 0.0
            for kind, color in COLORS.items():
                width = step.at_peak[kind] / unit.size
                axis.barh(row, width, left=left, color=color, height=0.7)
                left += width
            words = {"textcoords": "offset points", "va": "center", "weight": "bold"}
            text = unit.text(step.peak) + compare(step.peak, plain) * (row > 0)
            axis.annotate(text, (max(left, state / unit.size), row), (5, 0), **words)
        dashed = axis.axvline(state / unit.size, color="black", linewidth=1, linestyle="--")
        axis.set_yticks(range(len(BARS)), BARS)
        axis.invert_yaxis()
        axis.set_title(f"batch of {sequences} sequence" + "s" * (sequences > 1))
    dashed.set_label(
        f"parameters, moments, all gradients:\n{subject.bytes_each}, whatever the policy"
    )
    axes[-1].set_xlim(0, 1.6 * max(axis.dataLim.x1 for axis in axes))  # room for the words
    xlabel = f"memory at the peak of the step ({unit.name}); percentages: against plain"
    axes[-1].set_xlabel(xlabel)
    about = describe(subject.planner, "sequences of ")
    figure.suptitle(f"What the peak of a training step is made of\n{about}, predicted")
    figure.legend(**legend(plt, dashed))
    return figure


def compare(peak: int, plain: int) -> str:
    """ ", 53% less" """
    share = f"{abs(peak / plain - 1):.0%}"
    return ", the same" if share == "0%" else f", {share} {'less' if peak < plain else 'more'}"


# ---- What each policy saves, and what it costs


class Choice(NamedTuple):
    """The policy that is marked."""

    step: StepMemory | None  # None: nothing fits
    words: str
    budget: int | None = None


def choose(subject: Subject, budget: int | None) -> Choice:
    """With a budget what `auto` takes. Without one nobody can say what memory is worth; so the
    policy that takes the least of it among those that do no FLOPs twice (give or take a hundredth:
    then the one that replays less)."""
    if budget is None:
        steps = [subject.step(name) for name in POLICIES]
        free = [step for step in steps if relative_flops(step.config, step.seq_len) == 1]
        least = min(step.peak for step in free)
        step = next(step for step in free if step.peak <= 1.01 * least)
        words = "the least memory with no matmul twice (or ask with --memory-budget)"
        return Choice(step, f"{describe_recompute(step.config)}: {words}")
    limit = f"the {Unit.of(budget).text(budget)} that --memory-budget leaves tensors"
    if subject.state < budget:  # else no recompute helps
        asked = subject.planner, subject.batch_size, budget, subject.card, subject.compiled
        step = pick_recompute(*asked)
        if step.peak <= budget:
            words = f"{describe_recompute(step.config)}:\nwhat auto takes in {limit}"
            return Choice(step, words, budget)
    return Choice(None, f"nothing fits in {limit}", budget)


def predicted(subject: Subject, choice: Choice) -> Points:
    """Each policy, and the choice if it is none of them."""
    steps = {name: subject.step(name) for name in POLICIES}
    if choice.step and choice.step not in steps.values():
        steps[describe_recompute(choice.step.config)] = choice.step
    return {name: (subject.cost(step), step.peak) for name, step in steps.items()}


def draw_frontier(
    plt: Any, subject: Subject, choice: Choice, measured: tuple[Points, str] | None
) -> Any:
    """Peak memory against what a step costs: FLOPs, predicted time, or time that was measured."""
    figure, axis = plt.subplots(figsize=(WIDTH, 5.3))
    points, source = measured or (predicted(subject, choice), "predicted")
    unit = Unit.of(max(peak for _, peak in points.values()))
    state, top = subject.state / unit.size, 1.12 * max(peak for _, peak in points.values())
    words = f"parameters, moments, gradients: {subject.bytes_each}, which no policy frees"
    axis.axhspan(0, state, color=COLORS["optimizer"], alpha=0.3, linewidth=0, label=words)
    if measured is None:
        draw_mixes(axis, subject, unit)
    cost = "FLOPs" if measured is None and subject.card is None else "time"
    for place in points.values():
        others = (other for other in points.values() if other != place)
        hollow = any(cheaper <= place[0] and less <= place[1] for cheaper, less in others)
        words = f"hollow: another needs no more memory and no more {cost}"
        fill = {"markerfacecolor": "white", "label": words} if hollow else {}
        axis.plot(place[0], place[1] / unit.size, "o", color=POINT, **fill)
    best = mark(axis, subject, choice, unit, top) if measured is None else None
    axis.set_xlabel("time of a step (s)" if measured else subject.cost_words)
    axis.set_ylabel(f"peak memory of a step ({unit.name})")
    axis.set_ylim(0, top / unit.size)
    if measured is None:
        axis.xaxis.set_major_formatter(lambda x, _: f"{100 * (x - 1):+.3g}%" if x != 1 else "0")
    about = describe(subject.planner, f"batch of {subject.batch_size} x ")
    about += f"\n{source}" if measured else f", {source}"
    figure.suptitle(f"What each policy saves, and what it costs (best: lower left)\n{about}")
    handles, labels = axis.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    figure.legend(once.values(), once, loc="outside lower center", frameon=False)
    figure.draw_without_rendering()  # now the frame's height is known
    name_points(axis, {name: (x, y / unit.size) for name, (x, y) in points.items()}, best)
    return figure


def draw_mixes(axis: Any, subject: Subject, unit: Unit) -> None:
    """Policies in only a part of the blocks: from `none` to all of them, by quarters."""
    quarters = {subject.planner.config.n_layers * i // 4 for i in (1, 2, 3)} - {0}
    for name in MIXED:
        parts = [{"recompute": name, "recompute_layers": n} for n in sorted(quarters)]
        mixes = (subject.planner.step(subject.batch_size, **memory) for memory in parts)
        steps = [subject.step("none"), *mixes, subject.step(name)]
        x, y = [subject.cost(step) for step in steps], [step.peak / unit.size for step in steps]
        words = "a policy in only a part of the blocks"
        axis.plot(x, y, color="#999999", linewidth=1.2, zorder=1, label=words)


def mark(
    axis: Any, subject: Subject, choice: Choice, unit: Unit, top: float
) -> tuple[float, float] | None:
    """A ring around the choice, which the legend explains, and the budget; where the ring is."""
    ring = {"color": BEST, "markerfacecolor": "none", "markersize": 13, "markeredgewidth": 2.5}
    if choice.budget and choice.budget < top:
        line = {"color": "black", "linewidth": 1, "linestyle": "--", "label": "the budget"}
        axis.axhline(choice.budget / unit.size, **line)
    if choice.step is None:
        axis.plot([], [], linestyle="none", label=choice.words)
        return None
    place = subject.cost(choice.step), choice.step.peak / unit.size
    axis.plot(*place, "o", **ring, label=choice.words)
    return place


def name_points(
    axis: Any, points: dict[str, tuple[float, float]], best: tuple[float, float] | None
) -> None:
    """In a column beside the frame, as high as the points where there is room; a thin line leads
    from each name to its point."""
    names = sorted(points, key=lambda name: (points[name][1], -points[name][0]))
    top = axis.get_ylim()[1]
    row = 1.5 * SMALL / 72 * axis.figure.dpi / axis.get_window_extent().height * top
    heights, lowest = [], 0.0
    for name in names:
        heights.append(max(lowest, points[name][1]))
        lowest = heights[-1] + row
    for i in reversed(range(len(names))):  # not above the frame
        heights[i] = min(heights[i], top - row * (len(names) - 1 - i))
    line = {"arrowstyle": "-", "color": GRAY, "linewidth": 0.6, "shrinkB": 4, "relpos": (0, 0.5)}
    beside = {"textcoords": axis.get_yaxis_transform(), "va": "center", "zorder": 0.5}
    for name, height in zip(names, heights, strict=True):
        bold = {"weight": "bold"} if points[name] == best else {}
        axis.annotate(name, points[name], (1.03, height), arrowprops=line, **beside, **bold)
