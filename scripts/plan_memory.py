"""Predict whether a training run fits in memory, and find the cheapest change that makes it fit.

The flags are those of the trainers. A few more flags say what to plan:
    python -m scripts.plan_memory --model gpt2 --device cuda --memory-budget 8GiB
    python -m scripts.plan_memory --model gpt2 --card "RTX 4090" --all-knobs

For each recompute policy, one training step of the model is simulated on tensors that have shapes
but no memory. So no GPU is needed, nothing is downloaded, and the plan for a model with 1.5 billion
parameters takes a quarter of a minute on a laptop. `--device cuda` plans for a GPU, also on a
machine without one. `--card` names a GPU: then the budget is this GPU's memory, and the plan
predicts the time as well.

The recommendation leaves a margin for memory that is not tensors: the CUDA context, kernels, the
allocator's gaps. The margin is a tenth of the budget. On a GPU it is at least 1 GiB; but if the
budget is below 4 GiB, the margin is a quarter of the budget.
"""

import os
import sys

from data.errors import MiniGPTError

if not __package__:  # python scripts/plan_memory.py: the packages are one folder up
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
from planner.formulas import closed_form_bytes_by_part
from planner.operators import MATMUL_DTYPES
from planner.record import StepRecord
from planner.roofline import LINKS, default_link
from planner.shards import gathered_bytes
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
from trainer.flags import as_argv, tokens_per_step
from trainer.metrics import format_bytes
from trainer.optimizer import optimizer_name
from trainer.plan import PlanRequest, make_request
from trainer.pretrained import open_init_from
from trainer.report import describe_model

PROGRESS = "{n_fmt} steps simulated [{elapsed}]"  # the total is not known in advance
# Typed flags that the recommended command does not repeat.
ANSWERED = {"memory_budget", "card", "link", "use_activation_checkpoint"}
DEEPER = 2  # largest number of policies that the line of `deeper_words` names


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the trainers' flags and those of the plan. Raises MiniGPTError or DataError.

    The table compares all policies, so it ignores the policy that the user types. With --at-peak,
    `args.typed_policy` is the typed policy, or None if the user typed `auto` or no policy.
    """
    parser = flags.build_parser("python -m scripts.plan_memory", "unused.pt")
    does = "Predict the memory of a training run, for each recompute policy."
    parser.description = f"{does} Takes the trainers' flags; many of them do not change the plan."
    add = parser.add_argument_group("plan (all else as in train_minimal.py)").add_argument
    add("--nproc-per-node", type=flags.number_in_range(int, 1, 10**4), metavar="N",
        help="plan for train_ddp.py, with N processes on a machine")  # fmt: skip
    add("--fsdp", action="store_true",
        help="with --nproc-per-node: plan for train_fsdp.py, whose processes shard one model; the "
        "prediction is for one process")  # fmt: skip
    add("--sp", action="store_true",
        help="with --nproc-per-node: plan for train_sp.py, whose processes shard each sequence and "
        "the model; the prediction is for the first process")  # fmt: skip
    add("--link", choices=LINKS,
        help="with --card and --nproc-per-node: what connects the cards, for the time of "
        "communication (default: by the card)")  # fmt: skip
    add("--longest-sequence", action="store_true",
        help="find the longest sequence that fits with each policy at this --batch-size, in "
        f"multiples of {STEP} tokens; positions grow with it, unless --max-position-embeddings is "
        "typed")  # fmt: skip
    add("--all-knobs", action="store_true",
        help="with --card: find the settings with the most tokens/s that fit: micro-batch, "
        "accumulation, policy or mix; a step keeps its number of sequences")  # fmt: skip
    add("--at-peak", action="store_true",
        help="list the tensors that are alive at the peak, with the policy that you type, else "
        "with the recommended policy, else without recompute")  # fmt: skip
    add("--json", type=flags.output_file, metavar="FILE", help="write the plan there, in bytes")
    args = parser.parse_args(argv)
    check(args)
    typed = set(args.typed)
    open_init_from(args)
    args.implied = dict.fromkeys(args.typed - typed)  # set by --init-from: the command omits them
    args.typed_policy = None
    is_typed = "use_activation_checkpoint" in typed
    if args.at_peak and is_typed and args.use_activation_checkpoint != flags.AUTO:
        args.typed_policy = format_recompute_plan(flags.recompute_plan_of(args))
    args.use_activation_checkpoint = "none"  # the base of all rows; each row sets its policy
    flags.resolve_defaults(args, 1 if args.sp else args.nproc_per_node or 1)
    if args.sp:
        flags.check_sequence_parallel(args, args.nproc_per_node)
    args.typed -= ANSWERED | ({"compress_gradients"} if args.fsdp or args.sp else set())
    return args


def check(args: argparse.Namespace) -> None:
    """Raise MiniGPTError if flags contradict each other."""
    if args.all_knobs and args.card is None:
        raise MiniGPTError(f"--all-knobs compares times: name a --card, or --card {THIS_MACHINE}")
    if args.link and (args.card is None or args.nproc_per_node is None):
        raise MiniGPTError("--link is for the time of several cards: add --card, --nproc-per-node")
    if args.all_knobs and args.longest_sequence:
        raise MiniGPTError("--all-knobs and --longest-sequence: ask one after the other")
    if args.fsdp and args.sp:
        raise MiniGPTError(
            "--fsdp and --sp: leave --fsdp out; train_sp.py deals the model out, too"
        )
    if not (args.fsdp or args.sp):
        return
    sharded = "--sp" if args.sp else "--fsdp"
    if args.nproc_per_node is None:
        raise MiniGPTError(f"{sharded}: over how many processes? --nproc-per-node tells")
    trainer = "train_sp.py" if args.sp else "train_fsdp.py"
    flags.check_sharded(args, args.nproc_per_node, trainer)


def parse_request(argv: list[str]) -> tuple[PlanRequest, float]:
    """Return the request, and the seconds that measuring this machine took. Raises MiniGPTError or
    DataError."""
    args, start = parse(argv), time.perf_counter()
    request = make_request(args, args.nproc_per_node, args.fsdp or args.sp, args.sp)
    if request.card and request.processes > 1 and request.device.type == "cuda":
        request = replace(request, link=args.link or default_link(request.card))
    if args.longest_sequence and request.memory_budget.limit_bytes is None:
        raise MiniGPTError("--longest-sequence: within what? --card or --memory-budget tells")
    return request, time.perf_counter() - start


# ---- The target


def describe_target(request: PlanRequest, seconds: float) -> str:
    """Return the lines above the table: model, batch, device, card, budget, training state."""
    args, config, budget, card = request.args, request.config, request.memory_budget, request.card
    kind = request.device.type
    precision = str(request.precision).removeprefix("torch.")
    unknown = f"no {kind} here and no --memory-budget: what fits cannot be told"
    limit = unknown if budget.limit_bytes is None else f"tensors may take {budget}"
    lines = [
        f"model    {request.planner.n_parameters:,} parameters: {describe_model(config)}",
        f"batch    {args.grad_accum_steps} x {args.batch_size} sequences of {args.seq_len} tokens",
        f"device   {kind}, {precision}{parallel_words(request)}",
    ]
    if card:
        flops = digits(3, card.flops[MATMUL_DTYPES.index(request.precision)] / 1e12)
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
    args, planner, shards = request.args, request.planner, request.shard_degree
    gathered = gathered_bytes(planner.model, shards)
    size = (planner.state_bytes - gathered) * shards / planner.n_parameters
    dtype = f" in {args.moments_dtype}" * (args.moments_dtype != "float32")
    state = f"weights, gradients, {optimizer_name(args)}{dtype} ({size:.3g} bytes per parameter)"
    if shards == 1:
        return state
    return f"1/{shards} of {state}; and gathered token embeddings, {format_bytes(gathered)}"


# ---- The command to run


def command_line(args: argparse.Namespace, **changes: Any) -> str:
    """Return the trainer's command: the typed flags, with `changes` applied."""
    start = ["python", "train_minimal.py"]
    if args.nproc_per_node:
        ours = "train_sp.py" if args.sp else "train_fsdp.py" if args.fsdp else "train_ddp.py"
        start = ["torchrun", f"--nproc-per-node={args.nproc_per_node}", ours]
    changes = {name: None if value is False else value for name, value in changes.items()}
    return shlex.join([*start, *as_argv(args, **args.implied | changes)])


def verdict(request: PlanRequest, taken: Candidate | None, table: list[Candidate]) -> list[str]:
    """Return the command to run, as lines. If nothing fits, return the reason and, if a change of
    flags makes the run fit, the command with this change."""
    args = request.args
    if request.memory_budget.limit_bytes is None:
        return ["--memory-budget 8GiB, for example, shows what fits and which policy to take"]
    if any(row.longest for row in table):
        return [longest_command(request, table)]
    lines = [command_line(args, **taken.changes(args))] if taken else []
    if taken and not taken.offloaded:
        return lines
    change, knob = request.advice_and_change()
    if taken:  # another change may be cheaper than offloading
        if knob and "+offload" not in knob.flags.get("use_activation_checkpoint", ""):
            lines.insert(
                0, f"or, instead of offloading, {knob.flags_as_text} ({knob.cost_in_words})"
            )
        return lines
    tight = " with a margin" * any(row.fits for row in table)
    lines = [f"nothing fits{tight}; {change}"]
    return [*lines, command_line(args, **knob.flags)] if knob else lines


def longest_command(request: PlanRequest, table: list[Candidate]) -> str:
    """Return the command for the longest sequence. If several policies reach this length, take the
    cheapest policy without offload; if all of them offload, take the cheapest of them."""
    fits = [candidate for candidate in table if candidate.longest]
    best = min(
        fits, key=lambda candidate: (-(candidate.longest or 0), candidate.offloaded, candidate.cost)
    )
    longer = candidate_of(best.request.with_args(with_length(best.request.args, best.longest or 0)))
    return command_line(request.args, **longer.changes(request.args))


def deeper_words(taken: Candidate | None) -> list[str]:
    """Return a list of one line: the first policies that a run falls back to when memory runs out,
    each with its peak and time. The list is empty if there is no such policy."""
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
    """Return the tokens, steps and seconds that the whole run takes with the recommended step: once
    as a dict for the JSON file, and once as lines of text. If the flags set no length, the run has
    a billion tokens, so that plans can be compared."""
    args, of_step = request.args, tokens_per_step(request.args, request.replicas)
    typed_tokens = args.num_steps * of_step if "num_steps" in args.typed else args.num_tokens
    tokens = typed_tokens or 10**9
    steps = math.ceil(tokens / of_step)
    run: dict[str, Any] = {"tokens": tokens, "steps": steps, "seconds": None}
    # With --longest-sequence, the command has longer sequences than the row: the time is unknown.
    if taken is None or taken.seconds is None or taken.longest is not None:
        return run, []
    run["seconds"] = seconds = taken.seconds * steps
    time = f"{'more than' if taken.offloaded else 'about'} {format_time(seconds)}"
    words = f"{tokens:,} tokens, {steps:,} steps: {time}"
    without = "data, evaluation" if request.link else "data, communication, evaluation"
    return run, [f"run      {words}; without {without}"]


# ---- The whole plan


def plan(request: PlanRequest, bar: tqdm) -> dict[str, Any]:
    """Print the plan; return the content of the JSON file. Raises MiniGPTError or DataError."""
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
            and (instead := request.advise_batch_without_recompute(taken.step))
        ):
            bar.write(f"note     {instead}\n")
    if (settings or table) and (note := request.planner.inaccuracy_note):
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
    """Return the content of the JSON file without the metadata of `about`. Sizes are in bytes."""
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
        "closed_form": closed_form_bytes_by_part(config, *shape, *moments),
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
        "alive_at_peak_of": record and record.step_memory.config.recompute,
    }


@cli_main
def main(argv: list[str]) -> None:
    request, seconds = parse_request(argv)  # before the progress bar: --help and errors need none
    with tqdm(bar_format=PROGRESS, disable=None, leave=False) as bar:
        bar.write(describe_target(request, seconds) + "\n")
        result = plan(replace(request, on_simulate=bar.update), bar)
    write_json(request.args.json, about("scripts.plan_memory", argv) | result)


if __name__ == "__main__":
    gc.set_threshold(1_000_000)  # a simulation makes no reference cycles: do not search for them
    sys.exit(main())
