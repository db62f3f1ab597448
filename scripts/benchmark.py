"""Measure what each recompute policy costs and saves on this machine: time and peak memory.

Every policy on GPT-2 small:
    python -m scripts.benchmark --model gpt2 --batch-size 2

The command takes minutes, and the machine should be idle. Ctrl-C ends the command early; it then
prints the results so far.

Each policy runs in a process of its own. The process runs the trainer's step (train_step) on random
tokens. The table shows the median time of the steps. On a GPU it shows their mean: Python waits for
a GPU only once, after the last step, so the times of single steps are unknown. Peak memory is the
memory of tensors. On a GPU, PyTorch's caching allocator counts it; on a CPU, torch.profiler records
each allocation.

Next to each time the table shows the planner's prediction (planner/roofline.py). For a CUDA GPU in
planner.CARDS the prediction uses the figures of its data sheet. Any other device is measured for
three seconds before the first run.
"""

import os
import sys

from data.errors import MiniGPTError

if not __package__:  # python scripts/benchmark.py: the packages are one folder up
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    import scripts  # noqa: F401

import argparse
import json
import shlex
import statistics
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile
from tqdm import tqdm

from memory import POLICY_NAMES, MemorySavingGPT
from planner.cards import CARDS, THIS_MACHINE, choose_card
from planner.formulas import flops_per_token
from planner.operators import MATMUL_DTYPES
from scripts import cli_main, out_of_memory_as, say_stopped
from scripts.style import about, describe_about, write_json
from train_minimal import train_step
from trainer.clocks import StepClock
from trainer.device import (
    check_compiler,
    choose_device,
    choose_precision,
    compile_blocks,
    set_matmul_precision,
)
from trainer.flags import build_parser as trainers_parser
from trainer.flags import (
    check_policy_string,
    flag,
    model_config,
    number_in_range,
    output_file,
    resolve_defaults,
    with_flags,
)
from trainer.metrics import format_bytes
from trainer.optimizer import make_optimizer
from trainer.plan import PlanRequest, vocab_size_of
from trainer.pretrained import open_init_from
from trainer.process import OneProcess
from trainer.report import describe_model
from trainer.run import Run

Row = dict[str, Any]
# Number of steps before the timed steps. The first step compiles the model and makes AdamW's
# state; the second step uses both.
WARM_UP = 2
# Flag of the trainers that this command refuses -> the reason
REFUSED = {
    "use_activation_checkpoint": "--policies names the policies to measure",
    "card": "this machine's own device is measured; leave --card out",
    "memory_budget": "plan_memory names the largest batch that fits; --batch-size measures it",
}


def build_parser() -> argparse.ArgumentParser:
    parser = trainers_parser("python -m scripts.benchmark", "unused")
    parser.description = (
        "Measure what each recompute policy costs and saves. Takes the trainers' flags. The group "
        "'running' has no effect; the group 'data' only sets the size of the vocabulary."
    )
    add = parser.add_argument_group("benchmark").add_argument
    # fmt: off
    add("--policies", nargs="+", type=check_policy_string, default=list(POLICY_NAMES),
        metavar="POLICY", help=f"(default: {' '.join(POLICY_NAMES)})")
    add("--steps", type=number_in_range(int, 1, 10**6), default=5, metavar="N",
        help="timed steps of each policy (default: %(default)s)")
    add("--json", type=output_file, metavar="FILE", help="write the raw numbers there")
    add("--worker", help=argparse.SUPPRESS)  # the policy to measure in this process
    # fmt: on
    return parser


def check(args: argparse.Namespace) -> None:
    """Check the flags before anything is measured, and fill in defaults. Raises MiniGPTError or
    DataError."""
    for name in sorted(args.typed & REFUSED.keys()):
        raise MiniGPTError(f"{flag(name)}: {REFUSED[name]}")
    open_init_from(args)
    resolve_defaults(args)
    args.vocab_size = vocab_size_of(args)
    for policy in args.policies:
        model_config(with_policy(args, policy), args.vocab_size)


def with_policy(args: argparse.Namespace, policy: str) -> argparse.Namespace:
    return with_flags(args, use_activation_checkpoint=policy)


def ask(args: argparse.Namespace) -> PlanRequest:
    """Return the plan request for this machine's device. A device without a data sheet is measured
    now, for some seconds."""
    device = choose_device(args.device)
    set_matmul_precision(device, args.tf32)
    if args.compile:
        check_compiler(device)
    card = choose_card(args, device) or choose_card(with_flags(args, card=THIS_MACHINE), device)
    return PlanRequest(args, args.vocab_size, device, choose_precision(args, device), card=card)


# ---- One process


@dataclass(frozen=True)
class RandomTokens:
    """Random batches for train_step. They are equal in all runs, because train_step seeds torch
    before it reads a batch."""

    args: argparse.Namespace
    device: torch.device

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return random inputs and labels, each (B, T) int64."""
        shape = self.args.batch_size, self.args.seq_len + 1
        rows = torch.randint(self.args.vocab_size, shape, device=self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def make_run(args: argparse.Namespace, device: torch.device) -> Run:
    """Return the run that train_step needs; it has neither data files nor a snapshot."""
    config, precision = model_config(args, args.vocab_size), choose_precision(args, device)
    set_matmul_precision(device, args.tf32)
    torch.manual_seed(args.seed)
    model = MemorySavingGPT(config).to(device).train()
    if args.compile:
        compile_blocks(model)
    tokens: Any = RandomTokens(args, device)
    unused: Any = None  # train_step does not use it
    process, optimizer = OneProcess(device), make_optimizer(model, args, device, precision)
    return Run(
        args, process, unused, unused, model, optimizer, precision, tokens, unused, StepClock()
    )


def timed_step(run: Run, n: int = 1) -> float:
    """Run the next `n` steps; return their mean time in seconds. Python waits for a GPU only once,
    after the last step."""
    start = time.perf_counter()
    for _ in range(n):
        run.step += 1
        train_step(run)
    if run.process.device.type != "cpu":
        torch.accelerator.synchronize()  # wait, because Python runs ahead of the device
    return (time.perf_counter() - start) / n


def recorded_peak(run: Run) -> int:
    """Run one more step on a CPU; return its peak memory in bytes.

    torch.profiler records each allocation, also those of compiled blocks. (trainer/clocks.py's
    LiveStorages has the same peak, but makes compiled blocks run eagerly.)
    """
    existing = [
        *run.model.parameters(),
        *chain(*(state.values() for state in run.optimizer.state.values())),
        *run.model.offload_pool.buffers,  # of offload policies, on the CPU
    ]
    with profile(profile_memory=True) as profiler:
        timed_step(run)
    result: Any = profiler.profiler  # raw events, because the profiler's tables have only sums
    events = sorted(result.kineto_results.events(), key=lambda event: event.start_ns())
    sizes = (  # one event per allocation or free; nbytes() of a free is negative
        event.nbytes()
        for event in events
        if event.name() == "[memory]" and event.device_type().name == "CPU"
    )
    return max(accumulate(sizes, initial=sum(tensor.nbytes for tensor in existing)))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run and time the steps; return a dict with their seconds and the peak memory.

    "step_s_all": a list with the seconds of each step; on a GPU a list with one value, the mean of
    all steps. "peak_bytes": the peak in bytes; None if the device does not count it.
    """
    device = choose_device(args.device)
    run = make_run(args, device)
    timed_step(run, WARM_UP)
    if device.type == "cpu":
        seconds = [timed_step(run) for _ in range(args.steps)]
        return {"step_s_all": seconds, "peak_bytes": recorded_peak(run)}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    # Time all steps together: Python runs ahead from step to step, as in training.
    seconds = [timed_step(run, args.steps)]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"step_s_all": seconds, "peak_bytes": peak}


# ---- All processes


def run_worker(argv: list[str], policy: str) -> Row | None:
    """Run `measure` in a process of its own; return its result. None: that process ran out of
    memory."""
    command = [sys.executable, __file__, *argv, "--worker", policy]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode in (4, -9):  # (-9: Linux killed the process when memory ran out)
        return None
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- Results


def make_row(request: PlanRequest, measured: Row) -> Row:
    """Return a row of the JSON file: the result of `measure` for one policy, and the prediction.

    "mfu" (model FLOPs utilization): the FLOP/s of a step as a share of the card's peak FLOP/s,
    where recomputed FLOPs do not count. "hfu" (hardware FLOPs utilization): the same share, where
    recomputed FLOPs count, too. Both follow Chowdhery et al., 2022, section 4.1. Both are None for
    a device without a data sheet.
    """
    args, step = request.args, request.predicted_step
    step_s = statistics.median(measured["step_s_all"])
    tokens_per_s = args.batch_size * args.grad_accum_steps * args.seq_len / step_s
    share, card = None, request.card
    if card and card.name in CARDS:  # (measured FLOP/s of a machine are not its peak)
        share = tokens_per_s / card.flops[MATMUL_DTYPES.index(request.precision)]
    needed, replayed = flops_per_token(step.config, args.seq_len, args.compile)
    return {
        "policy": step.config.recompute,
        "step_s": step_s,
        "predicted_s": request.seconds(step),
        "step_s_all": measured["step_s_all"],
        "tokens_per_s": tokens_per_s,
        "mfu": share and share * needed,
        "hfu": share and share * (needed + replayed),
        "peak_bytes": measured["peak_bytes"],
        "predicted_bytes": step.peak,
    }


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    lines = [[*header], *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def policy_table(rows: list[Row]) -> str:
    """Return a Markdown table of the rows, with each time also relative to that of the first
    row."""
    if not rows:
        return "Nothing was measured."
    first = rows[0]
    cells = (
        [
            row["policy"],
            *(f"{1000 * row[key]:,.1f} ms" for key in ("step_s", "predicted_s")),
            f"{row['tokens_per_s']:,.0f}",
            *(f"{row[key] / first[key] - 1:+.1%}" for key in ("step_s", "predicted_s")),
            format_bytes(row["peak_bytes"]) if row["peak_bytes"] else "",
            format_bytes(row["predicted_bytes"]),
            *(f"{row[key]:.1%}" if row[key] else "" for key in ("mfu", "hfu")),
        ]
        for row in rows
    )
    over = f"over {first['policy']}|predicted, over {first['policy']}"
    header = f"policy|step|predicted step|tokens/s|{over}|peak|predicted peak|MFU|HFU"
    return table(header.split("|"), cells)


def measure_all(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure all policies, print the table, write the JSON file; return the exit code."""
    request = ask(args)
    assert request.card
    rows, out_of_memory, code = list[Row](), list[str](), 130
    policies = dict.fromkeys(args.policies)
    with suppress(KeyboardInterrupt):
        for policy in tqdm(policies, unit="policy", leave=False, disable=None):
            if measured := run_worker(argv, policy):
                rows.append(make_row(request.with_args(with_policy(args, policy)), measured))
            else:
                out_of_memory.append(policy)
        code = 0
    metadata = about("scripts.benchmark", argv, request.device) | {
        "model": describe_model(request.config),
        **{name: getattr(args, name) for name in ("batch_size", "grad_accum_steps", "seq_len")},
        "precision": str(request.precision).removeprefix("torch."),
        "predicted for": request.card.name,
        "runs": f"{len(rows) + len(out_of_memory)} of {len(policies)}",
        "out of memory": " ".join(out_of_memory) or "nothing",
    }
    if code:
        say_stopped(f"after {metadata['runs']} runs")
    if rows or not code:
        print(policy_table(rows), describe_about(metadata), sep="\n\n")
        metadata |= {"config": asdict(request.config), "card": asdict(request.card), "rows": rows}
        write_json(args.json, metadata)
    return code


@cli_main
def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    check(args)
    if args.worker is None:
        return measure_all(args, argv)
    with out_of_memory_as(f" with {args.worker}"):
        print(json.dumps(measure(with_policy(args, args.worker))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
