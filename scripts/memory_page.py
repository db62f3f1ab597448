"""Write an HTML page that shows the memory of a training step over time, before anything runs.

python -m scripts.memory_page                                           # the default model: seconds
python -m scripts.memory_page --model gpt2 --batch-size 8 --device cuda          # 16 s
python -m scripts.memory_page --model gpt2 --batch-size 8 --card "RTX 4090" --memory-budget 4GiB

The page opens in any browser, without a network and without other files. For each recompute policy
the page shows each storage of the step, with its name, the line that made it, why it is kept and
when it is freed. The page also lists the storages that are alive at any instant, and shows which
policies fit a budget.

The flags are those of the trainers, with the same meaning, and select the policy that the page
shows first. The horizontal axis is the progress of the step, in FLOPs or, with --card, in predicted
seconds. `--device cuda` plans for a GPU, also on a machine without a GPU.

All numbers come from the planner (planner/record.py), and are inserted here into a page of plain
HTML, CSS and JavaScript (scripts/page/).
"""

import json
import math
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from memory import POLICIES as RECOMPUTE
from memory import recompute_plan_of_config
from model import MiniGPTConfig
from planner import Card, Layout
from planner.choose import pareto_frontier, simulate_policies_fastest_first
from planner.op_recorder import Storage
from planner.record import StepRecord, group_name_and_kind, read_source_line
from planner.roofline import seconds_of_each_op
from planner.timeline import phase_intervals
from scripts import cli_main
from scripts.plans import CommandPlan, plan_for_command
from scripts.style import (
    COLORS,
    FLAGS_NOTE,
    LEGEND,
    POLICIES,
    describe_step,
    record_steps,
)
from trainer.flags import AUTO, output_file
from trainer.metrics import format_bytes
from trainer.pretrained import read_init_from
from trainer.settings import Settings, resolve, row

SOURCE = Path(__file__).parent / "page"
SCRIPTS = ("step.js", "frame.js", "chart.js", "listen.js", "page.js")
# Minimum widths of a part of forward or backward (NARROW) and of the optimizer's update (UPDATE),
# as shares of the width of a step without recompute. Otherwise parts without matrix products, which
# have no FLOPs, would be invisible.
NARROW, UPDATE = 1 / 400, 1 / 50
WORDS = {
    "plain": "every intermediate is kept, and all logits exist at once, as in most tutorials",
    **{name: policy.description for name, policy in RECOMPUTE.items()},
    "full/2": "an activation checkpoint around every two blocks",
}


@dataclass(frozen=True, kw_only=True)
class PageSettings(Settings):
    """The trainers' settings, and the file of the page."""

    # fmt: off
    out: Path = row(Path("out/memory_page.html"), output_file, group="page", metavar="FILE",
        help="the page (default: {default})")
    # fmt: on


def parse(argv: list[str] | None) -> PageSettings:
    """Return the resolved settings. Raises MiniGPTError."""
    about = "Write a page to explore the memory of a training step."
    typed = PageSettings.parse(argv, "python -m scripts.memory_page", f"{about} {FLAGS_NOTE}")
    return resolve(read_init_from(typed)[1])


class Labels:
    """Labels that describe storages, each with an index. Equal blocks have equal storages, whose
    names differ only in the index of the block. A label has "<+0>" in place of the index of the
    storage's own block, and "<+1>" in place of the next block's, so equal storages of all blocks
    share one label. A label gets the next free index when it is first looked up. (Names of
    operators and source lines have indices of the same kind.)"""

    def __init__(self) -> None:
        self.operators, self.lines, self.storages = (
            defaultdict[Any, int](count().__next__) for _ in range(3)
        )

    def of(self, storage: Storage) -> int:
        """Return the index of a storage's label; equal storages of other blocks have the same
        index."""
        texts = (
            block_numbers_to_offsets(text, storage.block_index)
            for text in (storage.name, storage.reason_alive)
        )
        shape = " x ".join(f"{n:,}" for n in storage.shape) or "one number"
        dtype, line = str(storage.dtype).removeprefix("torch."), self.lines[storage.line]
        kind, (group, _) = [*COLORS].index(storage.kind), group_name_and_kind(storage)
        label = *texts, kind, shape, dtype, storage.nbytes, line, group
        return self.storages[label]


def block_numbers_to_offsets(text: str, block: int | None) -> str:
    """Replace block indices, the first numbers in names of modules, by their distance from `block`:
    "blocks.4.ln_1" in block 3 becomes "blocks.<+1>.ln_1"."""
    if block is not None:
        number = r"\b([a-z_][\w.]*?\.)(\d+)\b"
        text = re.sub(number, lambda n: f"{n[1]}<{int(n[2]) - block:+d}>", text)
    return text


def op_positions_by_flops(record: StepRecord) -> tuple[list[int], list[float]]:
    """Return two lists: the index of the first operator of each part of the step, and the position
    of this operator on the horizontal axis. The last entries are the end of the step.

    Positions begin at 0, in units of the FLOPs of a step without recompute. A part, such as the
    forward of a block, is as wide as the FLOPs of its matrix products, and its operators are spaced
    evenly.
    """
    step = record.step_memory
    work, (step_flops, _) = step.flops_and_bytes_by_op, step.needed_and_replayed_flops
    flops = np.bincount(work.at, weights=work.flops * work.times)
    starts, x = [0], [0.0]
    for phase, _, begins, end in phase_intervals(step):
        min_width = UPDATE if phase == "optimizer" else NARROW * bool(phase)
        starts.append(end)
        x.append(x[-1] + max(flops[begins[0] : end].sum() / step_flops, min_width))
    return starts, x


def op_positions_by_seconds(record: StepRecord, card: Card) -> tuple[list[int], list[float]]:
    """Return two lists: the index of each operator that takes time, and the operator's position on
    the horizontal axis in predicted seconds. The last entries are the end of the step."""
    op_work = record.step_memory.flops_and_bytes_by_op
    each = seconds_of_each_op(op_work, card) * op_work.times
    return [*op_work.at.tolist(), len(record.step_memory.timeline)], [0.0, *each.cumsum()]


def policy_and_chunk_flags(config: MiniGPTConfig) -> str:
    """Return the trainer flags that select the policy and the chunks of `config`."""
    chunks = f" --loss-chunks {config.loss_chunks}" if config.loss_chunks else ""
    if config.mlp_chunks != 1 and recompute_plan_of_config(config).supports_mlp_chunks:
        chunks += f" --mlp-chunks {config.mlp_chunks}"
    return f"--use-activation-checkpoint {config.recompute}{chunks}"


def step_data(
    record: StepRecord, name: str, words: str, flags: str, labels: Labels, card: Card | None
) -> dict[str, Any]:
    """Return the numbers of one policy in the form that scripts/page/step.js reads. `words`,
    `flags`: what the policy does, and how it is selected."""
    step = record.step_memory
    starts, x = op_positions_by_seconds(record, card) if card else op_positions_by_flops(record)
    born = [storage.born for storage in record.storages]
    ends = [-1 if s.died == math.inf else int(s.died) - s.born for s in record.storages]
    replays = np.flatnonzero(np.diff(record.replay_mask.astype(int), prepend=0, append=0))
    return {
        "name": name,
        "words": words,
        "flags": flags,
        "flops": step.relative_flops,
        "seconds": step.seconds(card) if card else None,
        "peak": step.peak,
        "where": step.peak_location,
        "operators": [labels.operators[operator] for operator in record.operator_names],
        "starts": starts,
        "x": [float(f"{at:.7g}") for at in x],
        "places": [[at, phase, block] for at, phase, block in step.phase_marks],
        "replays": replays.reshape(-1, 2).tolist(),
        "label": [labels.of(storage) for storage in record.storages],
        "block": [-1 if s.block_index is None else s.block_index for s in record.storages],
        "born": [b - a for a, b in pairwise([0, *born])],
        "life": ends,
    }


def policy_choices_data(plan: CommandPlan) -> list[list]:
    """Return [peak in bytes, cost in seconds or relative FLOPs, name, flags] of each policy that
    `auto` may choose, the cheapest first, for page.js."""
    batch_size, card = plan.settings.batch_size, plan.card
    steps = pareto_frontier(simulate_policies_fastest_first(plan.planner, batch_size, card))
    costs = [step.seconds(card) if card else step.relative_flops for step in steps]
    return [
        [step.peak, cost, step.config.recompute, policy_and_chunk_flags(step.config)]
        for step, cost in zip(steps, costs, strict=True)
    ]


def policies_of_page(plan: CommandPlan) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the policies of the page (name -> arguments of `Planner.record`), and the name of the
    policy that is shown first."""
    config = plan.config
    if plan.settings.use_activation_checkpoint == AUTO:
        config = plan.with_fastest_policy().config
    # --loss-chunks contradicts "plain", which has one chunk; a single block makes no group of 2.
    left_out = {"plain": config.loss_chunks > 0, "full/2": config.n_layers == 1}
    settings = {name: memory for name, memory in POLICIES.items() if not left_out.get(name)}
    settings[config.recompute] = {"recompute": config.recompute, "loss_chunks": config.loss_chunks}
    return settings, config.recompute


def plan_data(plan: CommandPlan, records: dict[str, StepRecord], first: str) -> dict[str, Any]:
    """Return all numbers of the page. `first`: name of the policy that is shown first."""
    settings, card = plan.settings, plan.card
    budget, n = plan.memory_budget, settings.grad_accum_steps
    has_budget = card or settings.memory_budget
    about = [
        describe_step(
            plan, f"one of {n} micro-batches of {settings.batch_size} x " if n > 1 else ""
        ),
        f"predicted for {card.name}" if card else "predicted",
        f"tensors may take {budget}"
        if has_budget
        else "no budget given (the dashed line is an example)",
    ]
    last = [*records.values()][-1].step_memory
    if (times := int(last.flops_and_bytes_by_op.times.max())) > 1:
        about.append(f"showing three of the head's {times + 2:,} chunks")
    texts = {
        name: (
            WORDS.get(name, "as it was asked for"),
            policy_and_chunk_flags(record.step_memory.config),
        )
        for name, record in records.items()
    }
    usable = budget.bytes_within_margin if has_budget else None
    return page_data(records, texts, first, about, card, usable, policy_choices_data(plan))


def page_data(
    records: dict[str, StepRecord],
    texts: dict[str, tuple[str, str]],
    first: str,
    about: list[str],
    card: Card | None,
    budget: int | None,
    ways: list[list],
    files: Sequence[Path] = (),
) -> dict[str, Any]:
    """Return all numbers of the page, in the form that scripts/page/ reads.

    Args:
        records: name of a policy -> its step, of any model.
        texts: name of a policy -> what it does, and how it is selected.
        first: name of the policy that is shown first.
        about: parts of the sentence below the title.
        budget: bytes that tensors may take; None: the page shows an example.
        ways: see `policy_choices_data`.
        files: files outside of this project whose lines the records name.
    """
    labels = Labels()
    steps = [
        step_data(record, name, *texts[name], labels, card) for name, record in records.items()
    ]
    return {
        "about": ", ".join(about),
        "axis": "FLOPs" if card is None else "seconds",
        "budget": budget,
        "ways": ways,
        "first": [*records].index(first),
        "kinds": [[LEGEND[kind].split(":")[0], COLORS[kind], LEGEND[kind]] for kind in COLORS],
        "lines": [[line, read_source_line(line, files)] for line in labels.lines],
        "operators": [*labels.operators],
        "labels": [list(label) for label in labels.storages],
        "steps": steps,
    }


def render_page(data: dict[str, Any], command: str) -> str:
    """Return the page as the text of one file: HTML with the style, the scripts and the numbers."""
    text = json.dumps(data | {"command": command}, separators=(",", ":"))
    page, style, *script = (
        (SOURCE / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *SCRIPTS)
    )
    parts = {
        "page.css": style,
        "page.js": "".join(script),
        # Escape "<", because a "</script>" in a name would end the script.
        "numbers": "const DATA = " + text.replace("<", "\\u003c") + ";",
    }
    return re.sub(r"/\* ([\w.]+) \*/", lambda mark: parts[mark[1]], page)


def write_page(file: Path, data: dict[str, Any], module: str, argv: list[str]) -> None:
    """Write the page. `module`, `argv`: the command that it shows."""
    page = render_page(data, shlex.join(["python", "-m", module, *argv]))
    file.write_text(page, encoding="utf-8")
    print(f"wrote {file} ({format_bytes(file.stat().st_size)}): open it in a browser")


@cli_main
def main(argv: list[str]) -> None:
    settings = parse(argv)
    plan = plan_for_command(settings, Layout())
    shown, first = policies_of_page(plan)
    data = plan_data(plan, record_steps(plan, shown), first)
    settings.out.parent.mkdir(exist_ok=True)  # (makes out/ for the default)
    write_page(settings.out, data, "scripts.memory_page", argv)


if __name__ == "__main__":
    sys.exit(main())
