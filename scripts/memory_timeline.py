"""Draw memory over one training step, a panel a policy: before anything runs, on any model.

python -m scripts.memory_timeline                                    # the demo's model: seconds
python -m scripts.memory_timeline --model gpt2 --batch-size 8 --device cuda       # a quarter minute
python -m scripts.memory_timeline --policies none mlp full/2 --out mine.svg

The flags are the trainers' own and mean the same here, but for those that choose a policy:
--policies names what is drawn. Along a panel runs the step, in FLOPs; upwards stands all memory
that tensors take, as the planner predicts it. Below is the last policy's backward, enlarged.
`--device cuda` plans for a GPU wherever you are. Needs matplotlib: pip install matplotlib
"""

import os
import sys

if not __package__:  # python scripts/memory_timeline.py: the others lie one folder up
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    import scripts  # noqa: F401

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from planner import StepMemory
from planner.record import Record
from planner.timeline import KINDS
from scripts import tool
from scripts.memory_page import along_flops
from scripts.style import (
    COLORS,
    GRAY,
    LEGEND,
    POLICIES,
    WIDTH,
    Unit,
    describe,
    load_pyplot,
    relative_flops,
    save_picture,
)
from trainer import flags
from trainer.flags import UsageError, output_file, policy_string
from trainer.plan import Question, ask
from trainer.pretrained import open_init_from

PHASES = ("forward", "head", "backward")  # (the optimizer has hardly any FLOPs)
TITLES = {  # what a policy does, where a title has room for it
    "plain": "all logits at once",
    "none": "the head in chunks of tokens",
    "cheap": "pointwise ops recomputed",
    "full": "blocks recomputed",
}
SHADE = "#EEEEEE"


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises UsageError."""
    parser = flags.build_parser("python -m scripts.memory_timeline", "unused")
    parser.description = (
        "Draw where the memory of a training step goes. Takes the trainers' flags, which mean the "
        "same here; those of running, and those that choose a policy, have no effect."
    )
    add = parser.add_argument_group("picture").add_argument
    # fmt: off
    add("--policies", nargs="+", type=policy_or_plain, default=[*TITLES], metavar="POLICY",
        help="a panel for each; plain: none with --loss-chunks 1, as in most tutorials (default: "
        f"{' '.join(TITLES)})")
    add("--out", type=output_file, default=Path("out/memory_timeline.png"), metavar="FILE",
        help="the picture; its ending says which format (default: %(default)s)")
    # fmt: on
    args = parser.parse_args(argv)
    open_init_from(args)
    return flags.fill_in(args, is_run=False)


def policy_or_plain(text: str) -> str:
    return text if text in POLICIES else policy_string(text)


def record_all(args: argparse.Namespace) -> tuple[Question, dict[str, Record]]:
    """What is asked, and a simulated step of each policy. Raises UsageError or DataError."""
    asked = ask(args)
    each = tqdm(dict.fromkeys(args.policies), unit="policy", disable=None, leave=False)
    record = partial(asked.planner.record, args.batch_size)
    try:
        return asked, {name: record(**POLICIES.get(name, {"recompute": name})) for name in each}
    except ValueError as error:  # more blocks than there are
        raise UsageError(f"--policies: {error}") from None


def title(name: str, step: StepMemory) -> str:
    words = f"{name}: {TITLES[name]}" if name in TITLES else name
    replayed = relative_flops(step.config, step.seq_len) - 1
    cost = f", {replayed:+.0%} FLOPs" * (step.config.recompute != "none")
    return f"{words}. Peak {Unit.of(step.peak).text(step.peak)}{cost}"


def draw(plt: Any, asked: Question, records: dict[str, Record]) -> Any:
    """One below the other, all on one scale; around each the outline of the first."""
    steps = {name: record.step for name, record in records.items()}
    every = {
        name: np.interp(range(len(steps[name].total)), *along_flops(record))
        for name, record in records.items()
    }
    first, most = next(iter(steps)), max(step.peak for step in steps.values())
    unit, right = Unit.of(most), max(x[-1] for x in every.values())
    # Until its gradients go:
    outline = every[first][:-1], steps[first].total[:-1] / unit.size
    figure, axes = plt.subplots(len(steps) + 1, 1, figsize=(WIDTH, 1.4 * (len(steps) + 2)))
    for axis, (name, step) in zip(axes, steps.items(), strict=False):
        x = every[name]
        draw_layers(axis, x, step, unit)
        axis.step(*outline, where="post", color=GRAY, linewidth=0.8)
        axis.plot(x[step.total.argmax()], step.peak / unit.size, "v", color="black", markersize=6)
        axis.set(title=title(name, step), ylabel=unit.name)
        axis.set(xlim=(0, right), ylim=(0, 1.15 * most / unit.size))
        name_phases(axis, x, step)
    enlarge_backward(plt, axes[-1], axis, x, step, unit)
    axes[-1].set_title(f"{name}, the framed part enlarged: backward")
    figure.suptitle(f"Memory over one training step, along its FLOPs\n{describe(asked)}, predicted")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    handles.append(plt.Line2D([], [], color=GRAY, linewidth=0.8))
    words = [*(LEGEND[kind] for kind in COLORS), f"outline: {first}"]
    figure.legend(handles, words, loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_layers(axis: Any, x: np.ndarray, step: StepMemory, unit: Unit) -> None:
    layers = [step.timeline[:, KINDS.index(kind)] / unit.size for kind in COLORS]
    axis.stackplot(x, layers, colors=COLORS.values(), step="post", linewidth=0)


def name_phases(axis: Any, x: np.ndarray, step: StepMemory) -> None:
    """Below a panel, where a phase is wide enough for its name; the head is shaded."""
    middles = {}
    for name in PHASES:
        begin, end = x[step.phase(name).start], x[step.phase(name).stop]
        if end - begin > 0.12 * axis.get_xlim()[1]:
            middles[name] = (begin + end) / 2
        if name == "head":
            axis.axvspan(begin, end, color=SHADE, linewidth=0, zorder=0)
    axis.set_xticks([*middles.values()], [*middles])
    axis.tick_params(axis="x", length=0)


def enlarge_backward(
    plt: Any, axis: Any, whole: Any, x: np.ndarray, step: StepMemory, unit: Unit
) -> None:
    """Backward, framed in its panel. Of what is always there only as much is shown as the teeth are
    high, so they can be seen however small a part of the step's memory they are."""
    draw_layers(axis, x, step, unit)
    backward = step.phase("backward")
    shown = step.total[backward] / unit.size
    left, right, low, high = x[backward.start], x[backward.stop], shown.min(), shown.max()
    bottom, top = max(0, 1.5 * low - 0.5 * high), 1.05 * high - 0.05 * low
    axis.set(xlim=(left, right), ylim=(bottom, top), xticks=[])
    axis.set_ylabel(f"{unit.name}, not from 0" if bottom else unit.name)
    size = right - left, top - bottom
    whole.add_patch(plt.Rectangle((left, bottom), *size, fill=False, linewidth=0.8))


@tool
def main(argv: list[str]) -> None:
    args = parse(argv)
    plt = load_pyplot("memory_timeline")
    asked, records = record_all(args)
    args.out.parent.mkdir(exist_ok=True)  # (for the default)
    peaks = "\n".join(f"{name}: {record.step.peak:,} bytes" for name, record in records.items())
    save_picture(draw(plt, asked, records), args.out, {"Description": peaks})
    print(f"wrote {args.out}")


if __name__ == "__main__":
    sys.exit(main())
