"""Predict, before a run, whether it fits in memory, and the cheapest way to make it fit.

The flags are those of the trainers. Some more say what to plan:
    python -m scripts.plan_memory --model gpt2 --device cuda --memory-budget 8GiB
    python -m scripts.plan_memory --model gpt2 --card "RTX 4090" --all-knobs

For each recompute policy, one training step of the model is simulated on tensors that have shapes
but no memory. So no GPU is needed, nothing is downloaded, and 1.5 billion parameters take a quarter
of a minute on a laptop. `--device cuda` plans for a GPU on any machine. `--card` plans for that
GPU's memory, and predicts the time as well. The recommendation leaves a margin for memory that is
not tensors (the CUDA context, kernels, the allocator's gaps): a tenth of the budget, on a GPU at
least 1 GiB.
"""

import os
import sys

if not __package__:  # python scripts/plan_memory.py: the others lie one folder up
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    import scripts  # noqa: F401

import argparse
import gc
import math
import shlex
import time
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import torch
from tqdm import tqdm

from memory import format_recompute_plan
from planner.cards import THIS_MACHINE
from planner.formulas import closed_form, count_parameters
from planner.operators import PRECISIONS
from planner.record import StepRecord
from planner.shards import state_bytes_per_rank
from scripts import cli_main, plan_table
from scripts.plan_table import (
    STEP,
    Candidate,
    candidate_of,
    digits,
    format_time,
    if_memory_runs_out,
    policy_table,
    recommend,
    search_settings,
    with_length,
)
from scripts.style import about, write_json
from trainer import flags
from trainer.flags import UsageError, as_argv, tokens_per_step
from trainer.metrics import format_bytes
from trainer.optimizer import optimizer_name
from trainer.plan import PlanRequest, make_request
from trainer.pretrained import open_init_from
from trainer.report import describe_model

PROGRESS = "{n_fmt} steps simulated [{elapsed}]"  # the total is not known in advance
# Flags that the recommended command leaves out.
ANSWERED = {"memory_budget", "card", "use_activation_checkpoint"}
DEEPER = 2  # policies after an out-of-memory error that the plan names


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the trainers' flags and those of the plan. `typed_policy` gets the policy that was
    typed: the table ignores it, and --at-peak lists its step. Raises UsageError or DataError."""
    parser = flags.build_parser("python -m scripts.plan_memory", "unused.pt")
    does = "Predict the memory of a training run, for each recompute policy."
    parser.description = f"{does} Takes the trainers' flags; many change no plan."
    add = parser.add_argument_group("plan (all else as in train_minimal.py)").add_argument
    add("--nproc-per-node", type=flags.number_in_range(int, 1, 10**4), metavar="N",
        help="plan for train_ddp.py, with N processes on a machine")  # fmt: skip
    add("--fsdp", action="store_true",
        help="with --nproc-per-node: for train_fsdp.py, whose processes hold one model between "
        "them; predicted is what one of them takes")  # fmt: skip
    add("--sp", action="store_true",
        help="with --nproc-per-node: for train_sp.py, whose processes share each sequence, and the "
        "model as well; predicted is what the first of them takes")  # fmt: skip
    add("--longest-sequence", action="store_true",
        help="for each policy, the longest sequence that fits at this batch, in multiples of "
        f"{STEP} tokens; positions grow with it, unless --max-position-embeddings is "
        "typed")  # fmt: skip
    add("--all-knobs", action="store_true",
        help="with --card: the most tokens/s that fit, by micro-batch, accumulation, policy and "
        "mix; as many sequences a step as asked")  # fmt: skip
    add("--at-peak", action="store_true",
        help="list what is alive at the peak: with the --use-activation-checkpoint (...) that is "
        "typed, else with the one that is recommended, else with none")  # fmt: skip
    add("--json", type=flags.output_file, metavar="FILE", help="write the table there, in bytes")
    args = parser.parse_args(argv)
    check(args)
    typed = set(args.typed)
    open_init_from(args)
    args.implied = dict.fromkeys(args.typed - typed)  # set by --init-from: not typed in a command
    args.typed_policy = None
    is_typed = "use_activation_checkpoint" in typed
    if args.at_peak and is_typed and args.use_activation_checkpoint != flags.AUTO:
        args.typed_policy = format_recompute_plan(flags.recompute_plan_of(args))
    args.use_activation_checkpoint = "none"  # each row changes a run without recompute
    flags.resolve_defaults(args, 1 if args.sp else args.nproc_per_node or 1)
    if args.sp:
        flags.check_shared(args, args.nproc_per_node)
    args.typed -= ANSWERED | ({"compress_gradients"} if args.fsdp or args.sp else set())
    return args


def check(args: argparse.Namespace) -> None:
    """Raise UsageError if flags contradict each other."""
    if args.all_knobs and args.card is None:
        raise UsageError(f"--all-knobs compares times: name a --card, or --card {THIS_MACHINE}")
    if args.all_knobs and args.longest_sequence:
        raise UsageError("--all-knobs and --longest-sequence: ask one after the other")
    if args.fsdp and args.sp:
        raise UsageError("--fsdp and --sp: leave --fsdp out; train_sp.py deals the model out, too")
    if not (args.fsdp or args.sp):
        return
    sharded = "--sp" if args.sp else "--fsdp"
    if args.nproc_per_node is None:
        raise UsageError(f"{sharded}: over how many processes? --nproc-per-node tells")
    trainer = "train_sp.py" if args.sp else "train_fsdp.py"
    flags.check_sharded(args, args.nproc_per_node, trainer)


def parse_request(argv: list[str]) -> tuple[PlanRequest, float]:
    """Return the request, and the seconds that measuring this machine took. Raises UsageError or
    DataError."""
    args, start = parse(argv), time.perf_counter()
    request = make_request(args, args.nproc_per_node, args.fsdp or args.sp, args.sp)
    if args.longest_sequence and request.memory_budget.limit_bytes is None:
        raise UsageError("--longest-sequence: within what? --card or --memory-budget tells")
    return request, time.perf_counter() - start


# ---- The target


def describe_target(request: PlanRequest, seconds: float) -> str:
    """Describe the model, the device and the budget in lines above the table."""
    args, config, budget, card = request.args, request.config, request.memory_budget, request.card
    kind = request.device.type
    precision = str(request.precision).removeprefix("torch.")
    unknown = f"no {kind} here and no --memory-budget: what fits cannot be told"
    limit = unknown if budget.limit_bytes is None else f"tensors may take {budget}"
    lines = [
        f"model    {count_parameters(config):,} parameters: {describe_model(config)}",
        f"batch    {args.grad_accum_steps} x {args.batch_size} sequences of {args.seq_len} tokens",
        f"device   {kind}, {precision}{parallel_words(request)}",
    ]
    if card:
        flops = digits(3, card.flops[PRECISIONS.index(request.precision)] / 1e12)
        speed = f"{flops} TFLOP/s in {precision}, {digits(3, card.bytes_per_s / 1e9)} GB/s"
        how = f", measured in {seconds:.1f} s" if args.card == THIS_MACHINE else " at most"
        lines.append(f"card     {card.name}: {speed}{how}; times are estimates")
    lines.append(f"budget   {limit}")
    lines.append(f"always   {format_bytes(request.state_bytes)}: {state_words(request)}")
    if args.compile:
        lines.append("note     eager code is simulated; the compiler may change time and memory")
    return "\n".join(lines)


def parallel_words(request: PlanRequest) -> str:
    if request.shard_degree > 1:
        held = f", fully_shard: {request.shard_degree} processes hold the model between them"
        return held + ", and share each sequence" * (request.sp_degree > 1)
    return ", DistributedDataParallel" * request.ddp


def state_words(request: PlanRequest) -> str:
    args, config, shards = request.args, request.config, request.shard_degree
    size = replace(request, shard_degree=1).state_bytes / count_parameters(config)
    dtype = f" in {args.moments_dtype}" * (args.moments_dtype != "float32")
    state = f"weights, gradients, {optimizer_name(args)}{dtype} ({size:.3g} bytes a parameter)"
    if shards == 1:
        return state
    gathered = format_bytes(state_bytes_per_rank(0, config, shards))
    return f"1/{shards} of {state}; and gathered token embeddings, {gathered}"


# ---- The command to run


def command_line(args: argparse.Namespace, **changes: Any) -> str:
    """Return the trainer's command: the typed flags, with `changes`."""
    start = ["python", "train_minimal.py"]
    if args.nproc_per_node:
        ours = "train_sp.py" if args.sp else "train_fsdp.py" if args.fsdp else "train_ddp.py"
        start = ["torchrun", f"--nproc-per-node={args.nproc_per_node}", ours]
    changes = {name: None if value is False else value for name, value in changes.items()}
    return shlex.join([*start, *as_argv(args, **args.implied | changes)])


def verdict(request: PlanRequest, taken: Candidate | None, table: list[Candidate]) -> list[str]:
    """Return the command to run; if nothing fits, the reason, and a change with which it fits."""
    args = request.args
    if request.memory_budget.limit_bytes is None:
        return ["--memory-budget 8GiB, say, tells what fits, and which of them to take"]
    if any(row.longest for row in table):
        return [longest_command(request, table)]
    lines = [command_line(args, **taken.changes(args))] if taken else []
    if taken and not taken.offloaded:
        return lines
    change, knob = request.fitting_change()
    if taken:  # another change may be cheaper than offloading
        if knob and "+offload" not in knob.flags.get("use_activation_checkpoint", ""):
            lines.insert(0, f"or, instead of offloading, {knob.command} ({knob.cost})")
        return lines
    tight = " with a margin" * any(row.fits for row in table)
    lines = [f"nothing fits{tight}; {change}"]
    return [*lines, command_line(args, **knob.flags)] if knob else lines


def longest_command(request: PlanRequest, table: list[Candidate]) -> str:
    """Return the command for the longest sequence. Of equally long ones take the cheapest,
    offloaded ones last."""
    fits = [candidate for candidate in table if candidate.longest]
    best = min(
        fits, key=lambda candidate: (-(candidate.longest or 0), candidate.offloaded, candidate.cost)
    )
    longer = candidate_of(best.request.with_args(with_length(best.request.args, best.longest or 0)))
    return command_line(request.args, **longer.changes(request.args))


def deeper_words(taken: Candidate | None) -> list[str]:
    """Name the first policies that a run takes after an out-of-memory error, each with peak and
    time."""
    names = []
    for candidate in islice(if_memory_runs_out(taken), DEEPER):
        time = (
            f", {'> ' * candidate.offloaded}~{format_time(candidate.seconds)}"
            if candidate.seconds
            else ""
        )
        names.append(f"{candidate.name} ({format_bytes(candidate.step.peak)}{time})")
    return [f"deeper   if memory runs out: {', then '.join(names)}"] * bool(names)


def whole_run(request: PlanRequest, taken: Candidate | None) -> tuple[dict[str, Any], list[str]]:
    """Describe the whole run that the flags ask for, with the recommended step: for the JSON file,
    and in words. If the flags set no length, it is a billion tokens, so that runs can be
    compared."""
    args, of_step = request.args, tokens_per_step(request.args, request.replicas)
    typed_tokens = args.num_steps * of_step if "num_steps" in args.typed else args.num_tokens
    tokens = typed_tokens or 10**9
    steps = math.ceil(tokens / of_step)
    run: dict[str, Any] = {"tokens": tokens, "steps": steps, "seconds": None}
    # With --longest-sequence, the step of the command is not the step of the row.
    if taken is None or taken.seconds is None or taken.longest is not None:
        return run, []
    run["seconds"] = seconds = taken.seconds * steps
    time = f"{'more than' if taken.offloaded else 'about'} {format_time(seconds)}"
    words = f"{tokens:,} tokens, {steps:,} steps: {time}"
    return run, [f"run      {words}; without data, communication, evaluation"]


# ---- The whole plan


def plan(request: PlanRequest, bar: tqdm) -> dict[str, Any]:
    """Print the plan; return the content of the JSON file. Raises UsageError or DataError."""
    args, settings, table, record = request.args, list[Candidate](), list[Candidate](), None
    if (
        request.memory_budget.limit_bytes is None
        or request.state_bytes < request.memory_budget.limit_bytes
    ):
        settings = search_settings(request) if args.all_knobs else []
        table = [] if settings else policy_table(request)
    taken = settings[0] if settings else recommend(table)
    if settings:
        bar.write(plan_table.format_settings(settings) + "\n")
    if table:
        bar.write(plan_table.format_table(table, taken) + "\n")
        if host := plan_table.describe_host(table[-1]):
            bar.write(host + "\n")
        if (
            taken
            and taken.longest is None
            and (instead := request.describe_smaller_batches(taken.step))
        ):
            bar.write(f"note     {instead}\n")
    if (settings or table) and (note := request.planner.note):
        bar.write(f"note     {note}\n")
    if args.at_peak:
        record = plan_table.record_step(request, taken)
        bar.write(plan_table.format_peak(record) + "\n")
    run, words = whole_run(request, taken)
    bar.write("\n".join([*deeper_words(taken), *words, *verdict(request, taken, table)]))
    return as_json(request, table, settings, run, record) if args.json else {}


def as_json(
    request: PlanRequest,
    table: list[Candidate],
    settings: list[Candidate],
    run: dict[str, Any],
    record: StepRecord | None,
) -> dict[str, Any]:
    """Return the content of the JSON file but for its first lines; all sizes are in bytes."""
    args, table = request.args, table or policy_table(request)
    taken = recommend(table)
    shape = args.batch_size, args.seq_len, request.precision
    moments = args.optimizer, getattr(torch, args.moments_dtype)
    config = (taken or min(table, key=lambda candidate: candidate.step.peak)).step.config
    return {
        "config": asdict(request.config),
        "batch_size": args.batch_size,
        "seq_len": args.seq_len,
        "device": request.device.type,
        "precision": str(request.precision).removeprefix("torch."),
        "shards": request.shard_degree,
        "state_bytes": request.state_bytes,
        "card": request.card and request.card.name,
        "budget_bytes": request.memory_budget.limit_bytes,
        "safe_bytes": request.memory_budget.usable_bytes,
        "takes": taken and taken.name,
        "run": run,
        "optimizer": args.optimizer,
        "moments_dtype": args.moments_dtype,
        "closed_form": closed_form(config, *shape, *moments),
        "rows": [candidate.as_json(args) for candidate in table],
        "if_out_of_memory": [
            {
                "policy": candidate.name,
                "peak_bytes": candidate.step.peak,
                "seconds": candidate.seconds,
            }
            for candidate in if_memory_runs_out(settings[0] if settings else taken)
        ],
        "all_knobs": [candidate.as_json(args) for candidate in settings],
        "alive_at_peak": record and plan_table.at_peak(record),
        "alive_at_peak_of": record and record.step.config.recompute,
    }


@cli_main
def main(argv: list[str]) -> None:
    request, seconds = parse_request(argv)  # before the bar: --help and errors have none
    with tqdm(bar_format=PROGRESS, disable=None, leave=False) as bar:
        bar.write(describe_target(request, seconds) + "\n")
        result = plan(replace(request, on_simulate=bar.update), bar)
    write_json(request.args.json, about("scripts.plan_memory", argv) | result)


if __name__ == "__main__":
    gc.set_threshold(1_000_000)  # a simulated step makes no garbage, and looking for it takes time
    sys.exit(main())
