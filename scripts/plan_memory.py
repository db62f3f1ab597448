"""Predict whether a training run fits in memory, and find the cheapest change that makes it fit.

The flags are those of the trainers, and a few more that say what to plan:
    python -m scripts.plan_memory --model gpt2 --device cuda --memory-budget 8GiB
    python -m scripts.plan_memory --model gpt2 --card "RTX 4090" --all-knobs

For each recompute policy, one training step of the model is simulated on tensors that have shapes
but no memory, so that no GPU is needed, nothing is downloaded, and the plan for a model with 1.5
billion parameters takes some seconds on a laptop. `--device cuda` plans for a GPU, also on a
machine without one. With `--card`, which names a GPU, the budget is this GPU's memory, and the plan
predicts the time as well.

The recommendation leaves a margin for memory that is not tensors: the CUDA context, kernels, the
allocator's gaps. The margin is a tenth of the budget, but on a GPU at least 1 GiB, or, if the
budget is below 4 GiB, a quarter of the budget.
"""

import gc
import math
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data import MiniGPTError
from planner import Layout
from planner.cards import THIS_MACHINE
from planner.record import StepRecord
from planner.roofline import LINKS, default_link
from planner.units import format_bytes, format_sizes
from scripts import cli_main, plan_table
from scripts.plan_table import (
    SLOWER,
    STEP,
    Row,
    changed_flags,
    cost_key,
    describe_card_and_budget,
    flags_for_seq_len,
    format_time,
    longest_sequence,
    offloads,
    plan_row,
    plans_for_each_policy,
    recommended_plan,
    search_fastest_plans,
)
from scripts.plans import CommandPlan, advice, optimizer_name, plan_for_command
from scripts.style import about, write_json
from trainer.flags import AUTO, number_in_range, output_file
from trainer.plan import POLICY_FLAG
from trainer.pretrained import read_init_from
from trainer.report import describe_model
from trainer.settings import Settings, resolve, row

PROGRESS = "{n_fmt} operators simulated [{elapsed}]"  # the total is not known in advance


@dataclass(frozen=True, kw_only=True)
class PlanSettings(Settings):
    """The trainers' settings, and what to plan."""

    # fmt: off
    nproc_per_node: int | None = row(None, number_in_range(int, 1, 10**4),
        group="plan (all else as in train_minimal.py)",
        help="plan for train_ddp.py, with N processes on a machine")
    fsdp: bool = row(False, bool,
        help="with --nproc-per-node: plan for train_fsdp.py, whose processes shard one model; the "
        "prediction is for one process")
    sp: bool = row(False, bool,
        help="with --nproc-per-node: plan for train_sp.py, whose processes shard each sequence and "
        "the model; the prediction is for the first process")
    link: str | None = row(None, tuple(LINKS),
        help="with --card and --nproc-per-node: what connects the cards, for the time of "
        "communication (default: by the card)")
    longest_sequence: bool = row(False, bool,
        help="find the longest sequence that fits with each policy at this --batch-size, in "
        f"multiples of {STEP} tokens; positions grow with it, unless --max-position-embeddings is "
        "typed")
    all_knobs: bool = row(False, bool,
        help="with --card: find the settings with the most tokens/s that fit: micro-batch, "
        "accumulation, policy or mix; a step keeps its number of sequences")
    at_peak: bool = row(False, bool,
        help="list the tensors that are alive at the peak, with the policy that you type, else "
        "with the recommended policy, else without recompute")
    json: Path | None = row(None, output_file, metavar="FILE",
        help="write the plan there, in bytes")
    # fmt: on

    @property
    def layout(self) -> Layout:
        n = self.nproc_per_node
        kind = "sp" if self.sp else "fsdp" if self.fsdp else "one" if n is None else "ddp"
        return Layout(kind, world_size=n or 1, local_world_size=n or 1)

    @property
    def script(self) -> str:
        """The trainer that is planned."""
        kind = self.layout.kind
        return f"train_{'minimal' if kind == 'one' else kind}.py"


def parse(argv: list[str]) -> PlanSettings:
    """Return the settings as typed, or raise MiniGPTError if flags contradict each other."""
    typed = PlanSettings.parse(
        argv,
        "python -m scripts.plan_memory",
        "Predict the memory of a training run, for each recompute policy. Takes the trainers' "
        "flags; many of them do not change the plan.",
        first="model card memory_budget device batch_size seq_len grad_accum_steps "
        "use_activation_checkpoint nproc_per_node fsdp".split(),
        checkpoint_path=Path("unused.pt"),
    )
    sharded, alone = typed.fsdp or typed.sp, typed.nproc_per_node is None
    refused = (
        (
            typed.all_knobs and typed.card is None,
            f"--all-knobs compares times: name a --card, or --card {THIS_MACHINE}",
        ),
        (
            typed.link and (typed.card is None or alone),
            "--link is for the time of several cards: add --card, --nproc-per-node",
        ),
        (
            typed.all_knobs and typed.longest_sequence,
            "--all-knobs and --longest-sequence: ask one after the other",
        ),
        (
            typed.fsdp and typed.sp,
            "--fsdp and --sp: leave --fsdp out; train_sp.py deals the model out, too",
        ),
        (
            sharded and alone,
            f"{'--sp' if typed.sp else '--fsdp'}: over how many processes? --nproc-per-node tells",
        ),
    )
    for is_wrong, message in refused:
        if is_wrong:
            raise MiniGPTError(message)
    return typed


def make_plan(typed: PlanSettings) -> CommandPlan:
    """Return the plan without recompute, from which all rows are made, or raise MiniGPTError."""
    _, settings = read_init_from(typed)
    settings = resolve(settings, typed.layout, typed.script).replace(**{POLICY_FLAG: "none"})
    plan = plan_for_command(settings, settings.layout)
    if plan.card and plan.layout.world_size > 1 and plan.device.type == "cuda":
        plan = replace(plan, link=settings.link or default_link(plan.card))
    if settings.longest_sequence and plan.memory_budget.limit_bytes is None:
        raise MiniGPTError("--longest-sequence: within what? --card or --memory-budget tells")
    return plan


# ---- What is printed


def describe_target(plan: CommandPlan, script: str) -> str:
    """Return the lines above the table: model, batch, device, card, budget, training state."""
    settings, budget, card, kind = plan.settings, plan.memory_budget, plan.card, plan.device.type
    precision, n = str(plan.precision).removeprefix("torch."), plan.layout.world_size
    processes = f", one of {n} processes of {script}" * (n > 1)
    lines = [
        f"model    {plan.n_parameters:,} parameters: {describe_model(plan.config)}",
        f"batch    {settings.grad_accum_steps} x {settings.batch_size} sequences of "
        f"{settings.seq_len} tokens",
        f"device   {kind}, {precision}{processes}",
    ]
    lines += describe_card_and_budget(card, plan.precision, budget)
    state = f"weights, gradients, {optimizer_name(settings)}"
    each = f"{plan.state_bytes / plan.n_parameters:.3g} bytes per parameter"
    lines.append(f"always   {format_bytes(plan.state_bytes)}: {state} ({each})")
    if settings.compile:
        lines.append("note     eager code is simulated; the compiler may change time and memory")
    return "\n".join(lines)


def command_line(typed: PlanSettings, **changes: Any) -> str:
    """Return the trainer's command: the typed flags, with `changes` applied, without those that the
    plan answers."""
    start = ["python", typed.script]
    if typed.nproc_per_node:
        start = ["torchrun", f"--nproc-per-node={typed.nproc_per_node}", typed.script]
    omitted = {"memory_budget", "card", POLICY_FLAG} - changes.keys()
    return shlex.join([*start, *typed.words(**changes, **dict.fromkeys(omitted))])


def describe_recommendation(
    plan: CommandPlan, typed: PlanSettings, taken: CommandPlan | None
) -> str:
    """Return the lines before the table: what fits, the time of the whole run, the command; or why
    nothing fits, and the cheapest change with which a step fits. `taken`: the recommended plan."""
    data = whole_run_data_flags(plan, typed) if plan.card else {}
    if taken is None:
        text, change = advice(plan)
        command = command_line(typed, **data, **change) if change else ""
        return f"nothing fits; {text}\n{command}".rstrip()
    batch = f"batch {taken.settings.batch_size:,} with {taken.policy}"
    peak = " of ".join(format_sizes([taken.peak, plan.bytes_within_margin]))
    lines = [f"fits     {batch}: {peak}; at most batch {taken.largest_batch:,}"]
    run = tokens_steps_and_seconds(taken)
    if run["seconds"]:
        time = format_time(run["seconds"], 1 if offloads(taken) else SLOWER)
        words = f"{run['tokens']:,} tokens, {run['steps']:,} steps"
        without = "data, evaluation" if plan.link else "data, communication, evaluation"
        lines.append(f"run      {words}: {'more than ' * offloads(taken)}{time}; without {without}")
    return "\n".join([*lines, command_line(typed, **data, **changed_flags(taken, plan.settings))])


def whole_run_data_flags(plan: CommandPlan, typed: PlanSettings) -> dict[str, Any]:
    """Return the flags with which a command trains on the tokens of `tokens_steps_and_seconds`:
    their number and, for GPT-2's vocabulary, the user's own text, because Python's standard library
    has no billion tokens."""
    given = typed.typed.keys()
    is_default = plan.vocab_size == 50257 and not given & {"train_data", "use_toy_data"}
    text = {"train_data": "YOUR_TEXT"} if is_default else {}
    return text | ({} if given & {"num_steps", "num_tokens"} else {"num_tokens": "1B"})


def tokens_steps_and_seconds(plan: CommandPlan) -> dict[str, Any]:
    """Return the tokens, steps and seconds of the whole run. If the flags set no length, the run
    has a billion tokens, so that plans can be compared."""
    settings = plan.settings
    per_step = settings.tokens_per_step(plan.layout.replicas)
    by_steps = "num_steps" in settings.typed
    tokens = (settings.num_steps * per_step if by_steps else settings.num_tokens) or 10**9
    steps = math.ceil(tokens / per_step)
    seconds = plan.seconds * steps if plan.card else None
    return {"tokens": tokens, "steps": steps, "seconds": seconds}


def plan_with_longest_sequence(table: list[CommandPlan]) -> CommandPlan | None:
    """Return the plan with the longest sequence, or None if none fits. If several policies reach
    this length, it has the cheapest of those without offload, or, if all offload, the cheapest."""
    best = min(table, key=lambda row: (-(longest_sequence(row) or 0), offloads(row), cost_key(row)))
    length = longest_sequence(best)
    return best.with_flags(**flags_for_seq_len(best.settings, length)) if length else None


def print_plan(plan: CommandPlan, typed: PlanSettings, bar: tqdm) -> dict[str, Any]:
    """Print the plan and return the content of the JSON file, or raise MiniGPTError."""
    limit, taken = plan.memory_budget.limit_bytes, None
    knobs, table, rows = list[CommandPlan](), list[CommandPlan](), list[Row]()
    if limit is not None and plan.state_bytes < plan.bytes_within_margin:
        if typed.all_knobs:
            knobs = search_fastest_plans(plan)
            taken = knobs[0] if knobs else None
        elif typed.longest_sequence:
            table = plans_for_each_policy(plan, None, with_nested=True)
            taken = plan_with_longest_sequence(table)
        else:
            taken = recommended_plan(plan)
    if limit is not None:
        bar.write(describe_recommendation(plan, typed, taken) + "\n")
    if knobs:
        bar.write(plan_table.format_fastest_plans(knobs) + "\n")
    elif limit is None or plan.state_bytes < limit:
        rows = [*map(plan_row, table or plans_for_each_policy(plan, taken, with_nested=False))]
        bar.write(plan_table.format_table(rows, taken.policy if taken else None) + "\n")
        pinned = plan.layout.world_size * rows[-1]["host_bytes"]
        if pinned and plan.device.type != "cpu":
            bar.write(f"offload  pins {format_bytes(pinned)} of CPU memory\n")
    if (knobs or rows) and (note := plan.planner.inaccuracy_note):
        bar.write(f"note     {note}\n")
    record = record_step(plan, typed, taken) if typed.at_peak else None
    if record:
        bar.write(plan_table.format_peak(record, record.step_memory.config.recompute) + "\n")
    if not typed.json:
        return {}
    takes = recommended_plan(plan) if knobs else taken
    rows = rows or [*map(plan_row, plans_for_each_policy(plan, takes, with_nested=False))]
    return json_fields_of_plan(plan, taken) | {
        "takes": takes and takes.policy,
        "rows": rows,
        "all_knobs": [*map(plan_row, knobs)],
        "alive_at_peak": record and plan_table.at_peak(record),
        "alive_at_peak_of": record and record.step_memory.config.recompute,
    }


def record_step(plan: CommandPlan, typed: PlanSettings, taken: CommandPlan | None) -> StepRecord:
    """Return the record of a step with the typed policy, else with the recommended policy, else
    without recompute."""
    policy = typed.use_activation_checkpoint
    if POLICY_FLAG in typed.typed and policy != AUTO:
        taken = plan.with_policy(policy)
    taken = taken or plan
    return taken.planner.record(taken.settings.batch_size, recompute=taken.policy)


def json_fields_of_plan(plan: CommandPlan, taken: CommandPlan | None) -> dict[str, Any]:
    """Return what the JSON file has about the whole plan, with sizes in bytes."""
    return {
        "config": asdict(plan.config),
        "batch_size": plan.settings.batch_size,
        "seq_len": plan.settings.seq_len,
        "device": plan.device.type,
        "precision": str(plan.precision).removeprefix("torch."),
        "shards": plan.layout.shard_degree,
        "state_bytes": plan.state_bytes,
        "card": plan.card and plan.card.name,
        "budget_bytes": plan.memory_budget.limit_bytes,
        "safe_bytes": plan.memory_budget.bytes_within_margin,
        "run": tokens_steps_and_seconds(taken or replace(plan, card=None)),
        "optimizer": plan.settings.optimizer,
        "moments_dtype": plan.settings.moments_dtype,
    }


@cli_main
def main(argv: list[str]) -> None:
    typed = parse(argv)
    plan = make_plan(typed)  # before the progress bar: --help and errors need none
    with tqdm(bar_format=PROGRESS, disable=None, leave=False, miniters=1) as bar:
        plan = replace(plan, on_simulate=bar.update)
        bar.write(describe_target(plan, typed.script) + "\n")
        result = print_plan(plan, typed, bar)
    write_json(typed.json, about("scripts.plan_memory", argv) | result)


if __name__ == "__main__":
    gc.set_threshold(1_000_000)  # a simulation makes no reference cycles: do not search for them
    sys.exit(main())
