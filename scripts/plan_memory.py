"""Predict whether a training run fits in memory, and find the cheapest change that makes it fit.

The flags are those of the trainers. A few more flags say what to plan:
    python -m scripts.plan_memory --model gpt2 --device cuda --memory-budget 8GiB
    python -m scripts.plan_memory --model gpt2 --card "RTX 4090" --all-knobs

For each recompute policy, one training step of the model is simulated on tensors that have shapes
but no memory. So no GPU is needed, nothing is downloaded, and the plan for a model with 1.5 billion
parameters takes some seconds on a laptop. `--device cuda` plans for a GPU, also on a machine
without one. `--card` names a GPU: then the budget is this GPU's memory, and the plan predicts the
time as well.

The recommendation leaves a margin for memory that is not tensors: the CUDA context, kernels, the
allocator's gaps. The margin is a tenth of the budget. On a GPU it is at least 1 GiB; but if the
budget is below 4 GiB, the margin is a quarter of the budget.
"""

import gc
import math
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data import MiniGPTError
from planner import Layout
from planner.cards import THIS_MACHINE
from planner.operators import MATMUL_DTYPES
from planner.record import StepRecord
from planner.roofline import LINKS, default_link
from planner.shards import gathered_bytes
from scripts import cli_main, plan_table
from scripts.advice import advice, batch_without_recompute
from scripts.plan_table import (
    STEP,
    as_json,
    changes,
    cost,
    digits,
    fits_tightly,
    format_time,
    if_memory_runs_out,
    longest_sequence,
    offloads,
    policy_table,
    recommend,
    search_settings,
    with_length,
)
from scripts.style import about, write_json
from trainer.flags import AUTO, number_in_range, output_file
from trainer.metrics import format_bytes
from trainer.optimizer import optimizer_name
from trainer.plan import POLICY_FLAG, Plan, plan_for_command
from trainer.pretrained import open_init_from
from trainer.report import describe_model
from trainer.settings import Settings, resolve, row

PROGRESS = "{n_fmt} operators simulated [{elapsed}]"  # the total is not known in advance
DEEPER = 2  # largest number of policies that the line of `deeper_words` names


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
    """Return the settings as typed. Raises MiniGPTError if flags contradict each other."""
    typed = PlanSettings.parse(
        argv,
        "python -m scripts.plan_memory",
        "Predict the memory of a training run, for each recompute policy. Takes the trainers' "
        "flags; many of them do not change the plan.",
        checkpoint_path=Path("unused.pt"),
    )
    sharded, alone = typed.fsdp or typed.sp, typed.nproc_per_node is None
    if typed.all_knobs and typed.card is None:
        raise MiniGPTError(f"--all-knobs compares times: name a --card, or --card {THIS_MACHINE}")
    if typed.link and (typed.card is None or alone):
        raise MiniGPTError("--link is for the time of several cards: add --card, --nproc-per-node")
    if typed.all_knobs and typed.longest_sequence:
        raise MiniGPTError("--all-knobs and --longest-sequence: ask one after the other")
    if typed.fsdp and typed.sp:
        raise MiniGPTError(
            "--fsdp and --sp: leave --fsdp out; train_sp.py deals the model out, too"
        )
    if sharded and alone:
        flag = "--sp" if typed.sp else "--fsdp"
        raise MiniGPTError(f"{flag}: over how many processes? --nproc-per-node tells")
    return typed


def make_plan(typed: PlanSettings) -> tuple[Plan, float]:
    """Return the plan without recompute, from which all rows are made, and the seconds that
    measuring this machine took. Raises MiniGPTError."""
    _, settings = open_init_from(typed)
    settings = resolve(settings, typed.layout, typed.script).replace(**{POLICY_FLAG: "none"})
    start = time.perf_counter()
    plan = plan_for_command(settings, settings.layout)
    if plan.card and plan.layout.world_size > 1 and plan.device.type == "cuda":
        plan = replace(plan, link=settings.link or default_link(plan.card))
    if settings.longest_sequence and plan.memory_budget.limit_bytes is None:
        raise MiniGPTError("--longest-sequence: within what? --card or --memory-budget tells")
    return plan, time.perf_counter() - start


# ---- The target


def describe_target(plan: Plan, seconds: float) -> str:
    """Return the lines above the table: model, batch, device, card, budget, training state."""
    settings, budget, card, kind = plan.settings, plan.memory_budget, plan.card, plan.device.type
    precision = str(plan.precision).removeprefix("torch.")
    unknown = f"no {kind} here and no --memory-budget: what fits cannot be told"
    limit = unknown if budget.limit_bytes is None else f"tensors may take {budget}"
    lines = [
        f"model    {plan.n_parameters:,} parameters: {describe_model(plan.config)}",
        f"batch    {settings.grad_accum_steps} x {settings.batch_size} sequences of "
        f"{settings.seq_len} tokens",
        f"device   {kind}, {precision}{parallel_words(plan.layout)}",
    ]
    if card:
        flops = digits(3, card.flops[MATMUL_DTYPES.index(plan.precision)] / 1e12)
        speed = f"{flops} TFLOP/s in {precision}, {digits(3, card.bytes_per_s / 1e9)} GB/s"
        how = f", measured in {seconds:.1f} s" if settings.card == THIS_MACHINE else " at most"
        lines.append(f"card     {card.name}: {speed}{how}; times are estimates")
    lines.append(f"budget   {limit}")
    lines.append(f"always   {format_bytes(plan.state_bytes)}: {state_words(plan)}")
    if settings.compile:
        lines.append("note     eager code is simulated; the compiler may change time and memory")
    return "\n".join(lines)


def parallel_words(layout: Layout) -> str:
    if layout.shard_degree > 1:
        held = f", fully_shard: {layout.shard_degree} processes hold the model between them"
        return f"{held}, and share each sequence" if layout.sp_degree > 1 else held
    return ", DistributedDataParallel" if layout.gradients_persist else ""


def state_words(plan: Plan) -> str:
    settings, shards = plan.settings, plan.layout.shard_degree
    gathered = gathered_bytes(plan.meta_model, shards)
    size = (plan.state_bytes - gathered) * shards / plan.n_parameters
    moments = settings.moments_dtype
    dtype = f" in {moments}" if moments != "float32" else ""
    kept = f"weights, gradients, {optimizer_name(settings)}{dtype}"
    state = f"{kept} ({size:.3g} bytes per parameter)"
    if shards == 1:
        return state
    return f"1/{shards} of {state}; and gathered token embeddings, {format_bytes(gathered)}"


# ---- The command to run


def command_line(typed: PlanSettings, **changes: Any) -> str:
    """Return the trainer's command: the typed flags, with `changes` applied. What the plan answers
    is left out, and so is a flag that the trainer refuses."""
    start = ["python", typed.script]
    if typed.nproc_per_node:
        start = ["torchrun", f"--nproc-per-node={typed.nproc_per_node}", typed.script]
    omitted = ["memory_budget", "card", POLICY_FLAG]
    omitted += ["compress_gradients"] if typed.fsdp or typed.sp else []
    words = typed.words(**changes, **dict.fromkeys({*omitted} - changes.keys()))
    return shlex.join([*start, *words])


def answer(plan: Plan, typed: PlanSettings, taken: Plan | None, table: list[Plan]) -> list[str]:
    """Return the lines before the table: what fits, the time of the whole run, the command; or why
    nothing fits. `taken`: the recommended plan. `table`: rows, if the answer needs them."""
    usable = format_bytes(plan.usable_bytes)
    if plan.memory_budget.limit_bytes is None:
        return []
    if plan.state_bytes >= plan.usable_bytes:
        return [f"nothing fits; {advice(plan)[0]}"]
    if any(map(longest_sequence, table)):
        return [longest_command(plan, typed, table)]
    if taken is None:
        least = plan.with_fastest_policy()
        peak = f"the smallest peak, with {least.policy}, is {format_bytes(least.peak)}"
        return [f"does not fit: {peak}, and tensors may take {usable}"]
    batch = f"batch {taken.settings.batch_size:,} with {taken.policy}"
    peak = f"{format_bytes(taken.peak)} of {usable}; at most batch {taken.largest_batch:,}"
    command = command_line(typed, **changes(taken, plan.settings))
    return [f"fits     {batch}: {peak}", *whole_run(plan, taken)[1], command]


def way_out(plan: Plan, typed: PlanSettings, taken: Plan | None, table: list[Plan]) -> list[str]:
    """Return the lines after the table, on changes of flags that make the run fit, or make it fit
    without offload; with the command, if the training stays the same."""
    if plan.memory_budget.limit_bytes is None:
        return ["--memory-budget 8GiB, for example, shows what fits and which policy to take"]
    answered = plan.state_bytes >= plan.usable_bytes or any(map(longest_sequence, table))
    if answered or taken and not offloads(taken):
        return []
    text, change = advice(plan)
    if taken:
        instead = change and "+offload" not in change.get(POLICY_FLAG, "")
        return [f"or, instead of offloading, {text}"] if instead else []
    tight = " with a margin" if any(map(fits_tightly, table)) else ""
    lines = [f"nothing fits{tight}; {text}"]
    return [*lines, command_line(typed, **change)] if change else lines


def longest_command(plan: Plan, typed: PlanSettings, table: list[Plan]) -> str:
    """Return the command for the longest sequence. If several policies reach this length, take the
    cheapest policy without offload; if all of them offload, take the cheapest of them."""
    fits = [row for row in table if longest_sequence(row)]
    best = min(fits, key=lambda row: (-(longest_sequence(row) or 0), offloads(row), cost(row)))
    longer = best.with_flags(**with_length(best.settings, longest_sequence(best) or 0))
    return command_line(typed, **changes(longer, plan.settings))


def deeper_words(taken: Plan | None) -> list[str]:
    """Return a list of one line: the first policies that a run falls back to when memory runs out,
    each with its peak and time. The list is empty if there is no such policy."""
    names = []
    for plan in islice(if_memory_runs_out(taken), DEEPER):
        more = "> " if offloads(plan) else ""
        time = f", {more}~{format_time(plan.seconds)}" if plan.card else ""
        names.append(f"{plan.policy} ({format_bytes(plan.peak)}{time})")
    return [f"deeper   if memory runs out: {', then '.join(names)}"] if names else []


def whole_run(plan: Plan, taken: Plan | None) -> tuple[dict[str, Any], list[str]]:
    """Return the tokens, steps and seconds that the whole run takes with the recommended step: once
    as a dict for the JSON file, and once as lines of text. If the flags set no length, the run has
    a billion tokens, so that plans can be compared."""
    settings = plan.settings
    per_step = settings.tokens_per_step(plan.layout.replicas)
    by_steps = "num_steps" in settings.typed
    tokens = (settings.num_steps * per_step if by_steps else settings.num_tokens) or 10**9
    steps = math.ceil(tokens / per_step)
    run: dict[str, Any] = {"tokens": tokens, "steps": steps, "seconds": None}
    # With --longest-sequence, the command has longer sequences than the row: the time is unknown.
    if taken is None or taken.card is None or longest_sequence(taken) is not None:
        return run, []
    run["seconds"] = seconds = taken.seconds * steps
    time = f"{'more than' if offloads(taken) else 'about'} {format_time(seconds)}"
    words = f"{tokens:,} tokens, {steps:,} steps: {time}"
    without = "data, evaluation" if plan.link else "data, communication, evaluation"
    return run, [f"run      {words}; without {without}"]


# ---- The whole plan


def print_plan(plan: Plan, typed: PlanSettings, bar: tqdm) -> dict[str, Any]:
    """Print the plan; return the content of the JSON file. Raises MiniGPTError."""
    limit, record, longest = plan.memory_budget.limit_bytes, None, typed.longest_sequence
    can_fit = limit is not None and plan.state_bytes < plan.usable_bytes
    settings = search_settings(plan) if typed.all_knobs and can_fit else []
    taken = settings[0] if settings else recommend(plan) if can_fit else None
    table = policy_table(plan, taken, with_nested=True) if longest and can_fit else []
    if lines := answer(plan, typed, taken, table):
        bar.write("\n".join(lines) + "\n")
    if settings:
        bar.write(plan_table.format_settings(settings) + "\n")
    elif limit is None or plan.state_bytes < limit:
        table = table or policy_table(plan, taken, with_nested=longest)
        bar.write(plan_table.format_table(table, taken) + "\n")
        if host := plan_table.describe_host(table[-1]):
            bar.write(host + "\n")
        if taken and not longest and (instead := batch_without_recompute(taken)):
            bar.write(f"note     {instead}\n")
    if (settings or table) and (note := plan.planner.inaccuracy_note):
        bar.write(f"note     {note}\n")
    if typed.at_peak:
        record = record_step(plan, typed, taken)
        bar.write(plan_table.format_peak(record) + "\n")
    if lines := [*deeper_words(taken), *way_out(plan, typed, taken, table)]:
        bar.write("\n".join(lines))
    takes = recommend(plan) if settings else taken
    return results(plan, takes, table, settings, record) if typed.json else {}


def record_step(plan: Plan, typed: PlanSettings, taken: Plan | None) -> StepRecord:
    """Return the record of a step with the typed policy, else with the recommended policy, else
    without recompute."""
    policy = typed.use_activation_checkpoint
    if POLICY_FLAG in typed.typed and policy != AUTO:
        taken = plan.with_policy(policy)
    taken = taken or plan
    return taken.planner.record(taken.settings.batch_size, recompute=taken.policy)


def results(
    plan: Plan,
    taken: Plan | None,
    table: list[Plan],
    settings: list[Plan],
    record: StepRecord | None,
) -> dict[str, Any]:
    """Return the content of the JSON file without the metadata of `about`. Sizes are in bytes.
    `taken`: the recommended row."""
    flags, first = plan.settings, settings[0] if settings else taken
    table = table or policy_table(plan, taken, with_nested=False)
    return {
        "config": asdict(plan.config),
        "batch_size": flags.batch_size,
        "seq_len": flags.seq_len,
        "device": plan.device.type,
        "precision": str(plan.precision).removeprefix("torch."),
        "shards": plan.layout.shard_degree,
        "state_bytes": plan.state_bytes,
        "card": plan.card and plan.card.name,
        "budget_bytes": plan.memory_budget.limit_bytes,
        "safe_bytes": plan.memory_budget.usable_bytes,
        "takes": taken and taken.policy,
        "run": whole_run(plan, first)[0],
        "optimizer": flags.optimizer,
        "moments_dtype": flags.moments_dtype,
        "rows": [as_json(row, flags) for row in table],
        "if_out_of_memory": [
            {
                "policy": deeper.policy,
                "peak_bytes": deeper.peak,
                "seconds": deeper.seconds if deeper.card else None,
            }
            for deeper in if_memory_runs_out(first)
        ],
        "all_knobs": [as_json(row, flags) for row in settings],
        "alive_at_peak": record and plan_table.at_peak(record),
        "alive_at_peak_of": record and record.step_memory.config.recompute,
    }


@cli_main
def main(argv: list[str]) -> None:
    typed = parse(argv)
    plan, seconds = make_plan(typed)  # before the progress bar: --help and errors need none
    with tqdm(bar_format=PROGRESS, disable=None, leave=False, miniters=1) as bar:
        plan = replace(plan, on_simulate=bar.update)
        bar.write(describe_target(plan, seconds) + "\n")
        result = print_plan(plan, typed, bar)
    write_json(typed.json, about("scripts.plan_memory", argv) | result)


if __name__ == "__main__":
    gc.set_threshold(1_000_000)  # a simulation makes no reference cycles: do not search for them
    sys.exit(main())
