"""Predict and draw the memory over one training step, one panel per policy.

python -m scripts.memory_timeline                                    # the default model: seconds
python -m scripts.memory_timeline --model gpt2 --batch-size 8 --device cuda       # 15 seconds
python -m scripts.memory_timeline --policies none mlp full/2 --out mine.svg

The flags are those of the trainers, with the same meaning. Flags of the group "running" have no
effect, nor do flags that choose a policy, because --policies names the panels. The horizontal axis
is the progress of the step in FLOPs, the vertical axis the predicted memory of all tensors.
`--device cuda` plans for a GPU, also on a machine without a GPU. The command needs matplotlib: pip
install matplotlib
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import MiniGPTError
from planner import Layout, StepMemory
from planner.record import StepRecord
from planner.timeline import KINDS
from scripts import cli_main
from scripts.memory_page import op_positions_by_flops
from scripts.plans import CommandPlan, plan_for_command
from scripts.style import (
    COLORS,
    FLAGS_NOTE,
    LEGEND,
    POLICIES,
    WIDTH,
    describe_step,
    load_pyplot,
    record_steps,
    save_picture,
)
from trainer.flags import check_policy_string, output_file
from trainer.metrics import format_bytes
from trainer.pretrained import read_init_from
from trainer.settings import Settings, resolve, row

PHASES = ("forward", "head", "backward")  # (the optimizer's part is too narrow for its name)
NARROW = 0.12  # share of a panel's width that a phase needs for its name
TITLES = {  # policy -> short description for a title
    "plain": "all logits at once",
    "none": "the head in chunks of tokens",
    "cheap": "pointwise ops recomputed",
    "full": "blocks recomputed",
}


def policy_or_plain(text: str) -> str:
    return text if text in POLICIES else check_policy_string(text)


@dataclass(frozen=True, kw_only=True)
class PictureSettings(Settings):
    """The trainers' settings, and the picture."""

    # fmt: off
    policies: tuple[str, ...] = row(tuple(TITLES), policy_or_plain, group="picture",
        metavar="POLICY", nargs="+",
        help="one panel each; plain: no recompute, --loss-chunks 1, as in most tutorials (default: "
        f"{' '.join(TITLES)})")
    out: Path = row(Path("out/memory_timeline.png"), output_file, metavar="FILE",
        help="file of the picture; its suffix sets the format (default: {default})")
    # fmt: on


def parse(argv: list[str]) -> PictureSettings:
    """Return the resolved settings. Raises MiniGPTError."""
    about = "Draw the memory of a step with each of --policies."
    typed = PictureSettings.parse(
        argv, "python -m scripts.memory_timeline", f"{about} {FLAGS_NOTE}"
    )
    return resolve(read_init_from(typed)[1])


def record_all(settings: PictureSettings) -> tuple[CommandPlan, dict[str, StepRecord]]:
    """Return the plan, and the record of a simulated step with each policy. Raises MiniGPTError."""
    plan = plan_for_command(settings, Layout())
    shown = {name: POLICIES.get(name, {"recompute": name}) for name in settings.policies}
    try:
        return plan, record_steps(plan, shown)
    except ValueError as error:  # the policy names more blocks than the model has
        raise MiniGPTError(f"--policies: {error}") from None


def title(name: str, step: StepMemory) -> str:
    cost = f", {step.relative_flops - 1:+.0%} FLOPs" if step.config.recompute != "none" else ""
    description = f": {TITLES[name]}" if name in TITLES else ""
    return f"{name}{description}. Peak {format_bytes(step.peak)}{cost}"


def draw(plt: Any, plan: CommandPlan, records: dict[str, StepRecord]) -> Any:
    """Draw the panels, one below the other, all with the same axes."""
    max_peak = max(record.step_memory.peak for record in records.values())
    right = max(op_positions_by_flops(record)[1][-1] for record in records.values())
    unit, size = ("GiB", 2**30) if max_peak >= 2**30 else ("MiB", 2**20)
    height = 1.4 * (len(records) + 1.2)
    figure, axes = plt.subplots(len(records), 1, figsize=(WIDTH, height), squeeze=False)
    for axis, (name, record) in zip(axes.flat, records.items(), strict=True):
        step = record.step_memory
        x = np.interp(range(len(step.bytes_after_each_op)), *op_positions_by_flops(record))
        layers = [step.timeline[:, KINDS.index(kind)] / size for kind in COLORS]
        areas = axis.stackplot(x, layers, colors=COLORS.values(), step="post", linewidth=0)
        axis.plot(
            x[step.bytes_after_each_op.argmax()], step.peak / size, "v", color="black", markersize=6
        )
        axis.set(title=title(name, step), ylabel=unit)
        axis.set(xlim=(0, right), ylim=(0, 1.15 * max_peak / size))
        label_phases(axis, x, step)
    figure.suptitle(
        f"Memory over one training step, along its FLOPs\n{describe_step(plan)}, predicted"
    )
    labels = [LEGEND[kind] for kind in COLORS]
    figure.legend(areas, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def label_phases(axis: Any, x: np.ndarray, step: StepMemory) -> None:
    """Write the name of each phase below a panel, if the phase is wide enough for it."""
    ends = {name: x[[step.phase_slice(name).start, step.phase_slice(name).stop]] for name in PHASES}
    wide = {name: at for name, at in ends.items() if np.ptp(at) > NARROW * axis.get_xlim()[1]}
    axis.set_xticks([at.mean() for at in wide.values()], [*wide])
    axis.tick_params(axis="x", length=0)


@cli_main
def main(argv: list[str]) -> None:
    settings = parse(argv)
    plt = load_pyplot("memory_timeline")
    plan, records = record_all(settings)
    peaks = "\n".join(
        f"{name}: {record.step_memory.peak:,} bytes" for name, record in records.items()
    )
    save_picture(draw(plt, plan, records), settings.out, {"Description": peaks})
    print(f"wrote {settings.out}")


if __name__ == "__main__":
    sys.exit(main())
