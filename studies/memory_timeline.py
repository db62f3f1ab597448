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
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.profiler import record_function
from tqdm import tqdm

from planner import StepMemory
from planner.choose import Way, all_alike, all_ways, frontier
from planner.formulas import count_parameters, step_flops
from planner.step import follow
from planner.timeline import KINDS
from scripts import benchmark_worker, style, tool
from scripts.benchmark import about, write_json
from scripts.style import COLORS, GRAY, POLICIES, WIDTH, Unit, describe, relative_flops
from studies.common import add_json
from trainer import flags
from trainer.device import choose_device
from trainer.flags import UsageError, changed, output_folder
from trainer.plan import Question, ask
from trainer.pretrained import open_init_from
from trainer.report import describe_model

PHASES = ("forward", "head", "backward", "optimizer")
PANELS = {  # of the timeline; --measure records these
    "plain": "all logits at once",
    "none": "the head in chunks of tokens",
    "cheap": "pointwise ops recomputed",
    "full": "blocks recomputed",
}
BARS = ("plain", "none", "cheap", "mlp", "full")
POINT, BEST, SHADE = "#D55E00", "#007A59", "#EEEEEE"

# Of one real step, by the allocator itself: (when, as in `flops_done`; bytes in use from then on).
Record = tuple[np.ndarray, np.ndarray]


def step_of(asked: Question, name: str, sequences: int = 0) -> StepMemory:
    """Of one of POLICIES; of the batch that was asked for, or another one."""
    return asked.planner.step(sequences or asked.args.batch_size, **POLICIES[name])


def bytes_each(asked: Question) -> str:
    return f"{asked.state / count_parameters(asked.config):.3g} bytes a parameter"


def cost(asked: Question, way: StepMemory | Way) -> float:
    """Of a step, in units of the one without recompute: seconds on a card; without one, FLOPs."""
    if asked.card is None:
        return relative_flops(way.config, asked.planner.seq_len)
    seconds = way.cost[0] if isinstance(way, Way) else way.seconds(asked.card)
    return seconds / step_of(asked, "none").seconds(asked.card)


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


def legend(plt: Any, figure: Any, more: Any) -> None:
    """A colour for each kind, in the order of the layers, and `more`."""
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=color, label=style.LEGEND[kind])
        for kind, color in COLORS.items()
    ]
    handles.append(more)
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)


# ---- Memory over one step


def draw_timeline(plt: Any, asked: Question, records: dict[str, Record]) -> Any:
    """A panel a policy, all on one scale; below, the teeth of `full`."""
    steps = {name: step_of(asked, name) for name in PANELS}
    rows = [["plain", "none"], ["cheap", "full"], ["teeth", "teeth"]]
    figure, axes = plt.subplot_mosaic(rows, figsize=(WIDTH, 8), height_ratios=(3, 3, 2))
    recorded = (int(total.max()) for _, total in records.values())
    most = max(*(step.peak for step in steps.values()), *recorded)
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
    figure.suptitle(f"Memory over one training step\n{describe(asked)}, predicted{black}")
    outline = plt.Line2D([], [], color=GRAY, linewidth=0.8, label="outline: memory with none")
    legend(plt, figure, outline)
    return figure


def title(name: str, steps: dict[str, StepMemory], unit: Unit) -> str:
    """What the policy does, or that it does nothing here; and its peak."""
    step, words = steps[name], PANELS[name]
    if name == "none" and np.array_equal(step.timeline, steps["plain"].timeline):
        words = "here the same as plain"
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
    where = {"transform": axis.get_xaxis_transform(), "rotation": 90, "va": "top"}
    for i, name in enumerate(PHASES):
        start, end = step.phase(name).start, min(step.phase(name).stop, len(x) - 1)
        if i % 2:
            axis.axvspan(x[start], x[end], color=SHADE, linewidth=0, zorder=0)
        at = max(free, x[start])
        axis.text(at + 0.1 * line, 0.99, name, **where)
        free = at + line


def draw_teeth(
    plt: Any, axes: dict[str, Any], step: StepMemory, record: Record | None, unit: Unit
) -> None:
    """Backward, enlarged; framed in the panel of `full`.

    Of what is always there only as much is shown as the teeth are high, so they can be seen
    however small a part of the step's memory they are.
    """
    axis, backward = axes["teeth"], step.phase("backward")
    draw_layers(axis, step, record, unit)
    shown, left, right = step.total[backward], *flops_done(step)[[backward.start, backward.stop]]
    if record is not None:  # which may be higher
        inside = (left <= record[0]) & (record[0] <= right)
        shown = np.append(shown, record[1][inside])
    low, high = shown.min() / unit.size, shown.max() / unit.size
    bottom, top = max(0, 1.5 * low - 0.5 * high), 1.05 * high - 0.05 * low
    axis.set(xlim=(left, right), ylim=(bottom, top), xticks=[])
    axis.yaxis.set_major_locator(plt.MaxNLocator(5))
    axis.set_ylabel(f"{unit.name}, not from 0" if bottom else unit.name)
    axis.set_title("full, the framed part enlarged:\nbackward, a tooth for each block")
    frame = plt.Rectangle((left, bottom), right - left, top - bottom, fill=False, linewidth=0.8)
    axes["full"].add_patch(frame)


# ---- What the peak is made of


def draw_made_of(plt: Any, asked: Question) -> Any:
    """A bar a policy; a panel for the batch that was asked for, and one for a quarter of it."""
    batches = sorted({max(1, asked.args.batch_size // 4), asked.args.batch_size})
    size, unit = (WIDTH, 2.4 + 1.6 * len(batches)), Unit.of(step_of(asked, "plain").peak)
    figure, grid = plt.subplots(len(batches), 1, figsize=size, sharex=True, squeeze=False)
    state = asked.state / unit.size
    for axis, sequences in zip(grid[:, 0], batches, strict=True):
        steps = {name: step_of(asked, name, sequences) for name in BARS}
        left = np.zeros(len(steps))
        for kind, color in COLORS.items():
            widths = np.array([step.at_peak[kind] for step in steps.values()]) / unit.size
            axis.barh(range(len(steps)), widths, left=left, color=color, height=0.7)
            left += widths
        for row, step in enumerate(steps.values()):
            words = unit.text(step.peak)
            words += f", {step.peak / steps['plain'].peak - 1:+.0%}" * (row > 0)
            beside = {"textcoords": "offset points", "va": "center", "weight": "bold"}
            axis.annotate(words, (max(left[row], state), row), (5, 0), **beside)
        dashed = axis.axvline(state, color="black", linewidth=1, linestyle="--")
        axis.set_yticks(range(len(steps)), steps)
        axis.invert_yaxis()
        axis.set_title(f"batch of {sequences} sequence" + "s" * (sequences > 1))
    words = f"{bytes_each(asked)}, whatever the policy"
    dashed.set_label(f"parameters, moments, all gradients:\n{words}")
    # Room for the words:
    axis.set_xlim(0, 1.6 * max(axis.dataLim.x1 for axis in grid[:, 0]))
    axis.set_xlabel(f"memory at the peak of the step ({unit.name}); percentages: against plain")
    of = describe(asked, "sequences of ")
    figure.suptitle(f"What the peak of a training step is made of\n{of}, predicted")
    legend(plt, figure, dashed)
    return figure


# ---- What each policy saves, and what it costs


def choose(asked: Question) -> tuple[StepMemory | None, str]:
    """(the policy that is marked, None where nothing fits; why). With a budget what `auto` takes.
    Without one nobody can say what memory is worth; so the policy that takes the least of it among
    those that do no FLOPs twice (give or take a hundredth: then the one that replays less)."""
    if not asked.args.memory_budget:
        steps = [step_of(asked, name) for name in POLICIES]
        free = [step for step in steps if relative_flops(step.config, step.seq_len) == 1]
        least = min(step.peak for step in free)
        step = next(step for step in free if step.peak <= 1.01 * least)
        words = "the least memory with no matmul twice (or ask with --memory-budget)"
        return step, f"{step.config.recompute}: {words}"
    limit = f"the {Unit.of(asked.budget).text(asked.budget)} that --memory-budget leaves tensors"
    step = asked.pick()
    if step.peak > asked.budget:
        return None, f"nothing fits in {limit}"
    return step, f"{step.config.recompute}:\nwhat auto takes in {limit}"


def draw_frontier(plt: Any, asked: Question) -> Any:
    """Peak memory against what a step costs: FLOPs or predicted time."""
    figure, axis = plt.subplots(figsize=(WIDTH, 5.3))
    marked, words = choose(asked)
    steps = {name: step_of(asked, name) for name in POLICIES}
    if marked:
        steps.setdefault(marked.config.recompute, marked)
    unit = Unit.of(max(step.peak for step in steps.values()))
    points = {name: (cost(asked, step), step.peak / unit.size) for name, step in steps.items()}
    x, y = zip(*points.values(), strict=True)
    always = f"parameters, moments, gradients: {bytes_each(asked)}, which no policy frees"
    band = {"color": COLORS["optimizer"], "alpha": 0.3, "linewidth": 0, "label": always}
    axis.axhspan(0, asked.state / unit.size, **band)
    axis.plot(x, y, "o", color=POINT)
    axis.set(ylabel=f"peak memory of a step ({unit.name})", ylim=(0, 1.12 * max(y)))
    mark(axis, asked, marked, words, unit)
    title = "What each policy saves, and what it costs (best: lower left)"
    figure.suptitle(f"{title}\n{describe(asked)}, predicted")
    figure.legend(loc="outside lower center", frameon=False)
    # Names in a column beside the frame, in the order of their heights; a thin line leads from each
    # to its point.
    line = {"arrowstyle": "-", "color": GRAY, "linewidth": 0.6, "shrinkB": 4, "relpos": (0, 0.5)}
    beside = {"textcoords": "axes fraction", "va": "center", "zorder": 0.5, "arrowprops": line}
    by_height = sorted(points, key=lambda name: (points[name][1], -points[name][0], name))
    for name, height in zip(by_height, np.linspace(0.2, 0.9, len(points)), strict=True):
        weight = "bold" if marked and name == marked.config.recompute else "normal"
        axis.annotate(name, points[name], (1.03, height), weight=weight, **beside)
    return figure


def mark(axis: Any, asked: Question, step: StepMemory | None, words: str, unit: Unit) -> None:
    """What is predicted: the axis, the best mixes, the budget, and a ring around `step`."""
    alike = all_alike(asked.planner, asked.args.batch_size)
    ways = frontier(all_ways(alike, asked.card))
    x, y = [cost(asked, way) for way in ways], [way.peak / unit.size for way in ways]
    mixes = "the best mixes of two policies, some blocks each"
    axis.plot(x, y, color="#999999", linewidth=1.2, zorder=1, label=mixes)
    what = "FLOPs of a step, against none"
    if asked.card:
        what = f"predicted time of a step, against none ({asked.card.name})"
    axis.set_xlabel(what)
    axis.xaxis.set_major_formatter(lambda x, _: f"{100 * (x - 1):+.3g}%" if x != 1 else "0")
    if asked.args.memory_budget and asked.budget / unit.size < axis.get_ylim()[1]:
        line = {"color": "black", "linewidth": 1, "linestyle": "--", "label": "the budget"}
        axis.axhline(asked.budget / unit.size, **line)
    if step is None:
        axis.plot([], [], linestyle="none", label=words)
    else:
        ring = {"color": BEST, "markerfacecolor": "none", "markersize": 13, "markeredgewidth": 2.5}
        axis.plot(cost(asked, step), step.peak / unit.size, "o", **ring, label=words)


# ---- What was measured


class Marks:
    """Writes into a profile where a part of the step begins: told by `planner.step.follow`, and by
    the trainer's step, whose clock it is."""

    phase = ""

    def enter(self, phase: str, block: int | None = None) -> None:
        self.phase = phase
        with record_function("## part"):
            pass

    def begin(self, phase: str) -> None:
        if phase in ("forward", "optimizer"):
            self.enter(phase)


def record_step(step: StepMemory, args: argparse.Namespace) -> Record:
    """What the planner pretends to do, done by the trainer, under PyTorch's profiler.

    It notes each allocation, each release and their times. To stand over the prediction, whose
    unit is no time, the record is stretched part by part; heights stay as they were noted.
    """
    marks: Any = Marks()
    config, job = step.config, benchmark_worker.Job(step.config.recompute, step.batch_size)
    args = changed(args, vocab_size=config.vocab_size, loss_chunks=config.loss_chunks)
    run = benchmark_worker.make_run(args, job, choose_device(args.device))
    run.clock = marks
    benchmark_worker.timed_step(run)  # the first one makes AdamW's moments
    follow(run.model.blocks, run.model.ln_f, marks)
    times, total, events = benchmark_worker.record_step(run)
    parts = [operator for operator, phase, _ in step.places if phase]
    begun = sorted(event.start_ns() for event in events if event.name() == "## part")
    begun = begun[-len(parts) :]
    flops = np.interp(times, [*begun, times[-1]], flops_done(step)[[*parts, -1]])
    this_step = times >= begun[0]
    return flops[this_step], total[this_step]


# ---- The command


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
    add("--format", choices=tuple(style.FORMATS), default="png", help="(default: %(default)s)")
    add_json(group)
    add("--measure", action="store_true",
        help="also train, and draw the allocator's own record over the prediction (slow on a CPU)")
    # fmt: on
    args = parser.parse_args(argv)
    args.use_activation_checkpoint = "none"
    open_init_from(args)
    return flags.fill_in(args, is_run=False)


def prepare(args: argparse.Namespace) -> Question:
    """With the planner that the trainers would have. Raises UsageError, DataError."""
    asked = ask(args)
    kind = asked.device.type
    if args.measure:
        choose_device(kind)  # a device that is not there can be planned for, not trained on
        if kind not in ("cpu", "cuda"):
            raise UsageError(f"--measure: nothing records {kind}'s allocator: try --device cpu")
    return asked


def row(asked: Question, step: StepMemory) -> dict[str, Any]:
    """For the JSON file; what a benchmark's file has, too, has the same name there."""
    config, card = step.config, asked.card
    return {
        **style.policy_fields(config),
        "loss_chunks": config.loss_chunks,
        "batch_size": step.batch_size,
        "seq_len": step.seq_len,
        "relative_flops": relative_flops(config, step.seq_len),
        "predicted_bytes": step.peak,
        "predicted_s": step.seconds(card) if card else None,
        "where": step.where,
        "at_peak": step.at_peak,
    }


@tool
def main(argv: list[str]) -> None:
    args = parse(argv)
    plt = style.load_pyplot("memory_timeline")
    with tqdm(unit="step", desc="simulating", disable=None, leave=False) as bar:
        asked = replace(prepare(args), watch=bar.update)
        planner, config = asked.planner, asked.config
        precision = str(planner.precision).removeprefix("torch.")
        bar.write(f"model    {count_parameters(config):,} parameters: {describe_model(config)}")
        bar.write(f"device   {'cpu' if planner.on_cpu else 'GPU'}, {precision}")
        recorded = PANELS if args.measure else ()
        records = {name: record_step(step_of(asked, name), args) for name in recorded}
        args.out.mkdir(parents=True, exist_ok=True)
        pictures = {
            "timeline": draw_timeline(plt, asked, records),
            "frontier": draw_frontier(plt, asked),
            "made_of": draw_made_of(plt, asked),
        }
        for name, figure in pictures.items():
            file = args.out / f"memory_{name}.{args.format}"
            style.save_picture(figure, file)
            bar.write(f"wrote {file}")
    peaks = {name: int(total.max()) for name, (_, total) in records.items()}
    rows = [row(asked, step) for step in planner.steps.values()]
    content = {"recorded_bytes": peaks, "rows": rows}
    write_json(args.json, about("scripts.memory_timeline", argv) | content)
    if args.json:
        print(f"wrote {args.json}")


if __name__ == "__main__":
    sys.exit(main())
