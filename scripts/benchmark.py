"""Measure what each recompute policy costs and saves on this machine: time and peak memory.

Every policy on GPT-2 small:
    python -m scripts.benchmark --model gpt2 --batch-size 2

It takes minutes, on an idle machine. Ctrl-C ends it early and prints what has been measured.

Each policy runs in a process of its own, which does the trainer's own steps (train_step) on random
tokens. The table shows the median time of the steps; on a GPU their mean, because Python waits for
a GPU only once, after the last step. Peak memory is the memory of tensors: on a GPU PyTorch's
caching allocator counts it, on a CPU torch.profiler records the allocator.

Next to each time the table shows the planner's prediction (planner/roofline.py). It is based on the
data sheet of a GPU that planner.CARDS knows. Any other device is measured for three seconds before
the first run.
"""

import os
import sys

if not __package__:  # python scripts/benchmark.py: the others lie one folder up
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    import scripts  # noqa: F401

import argparse
import json
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.profiler import profile
from tqdm import tqdm

from memory import RECOMPUTE_POLICIES, BlockCalls
from model import MiniGPT, MiniGPTConfig
from planner.cards import CARDS, THIS_MACHINE, choose_card
from planner.formulas import flops_per_token
from planner.operators import PRECISIONS
from scripts import cli_main, out_of_memory_as, say_stopped
from scripts.style import about, describe_about, write_json
from train_minimal import train_step
from trainer.clocks import StepClock
from trainer.device import choose_device, choose_precision, compile_blocks, set_matmul_precision
from trainer.flags import (
    UsageError,
    flag,
    model_config,
    number_in_range,
    output_file,
    policy_string,
    resolve_defaults,
    with_flags,
)
from trainer.flags import build_parser as trainers_parser
from trainer.metrics import format_bytes
from trainer.optimizer import make_optimizer
from trainer.plan import PlanRequest, vocab_size_of
from trainer.pretrained import open_init_from
from trainer.process import OneProcess
from trainer.report import describe_model
from trainer.run import Run

Row = dict[str, Any]
ModelFactory = Callable[[MiniGPTConfig], nn.Module]  # makes a model: (ids, labels) -> loss
WARM_UP = 2  # steps: the first one compiles and makes AdamW's state; the second one has it
# The trainers' flags that this tool does not take, and why.
REFUSED = {
    "use_activation_checkpoint": "here --policies names what is measured",
    "card": "the device that is here is measured: leave it out",
    "memory_budget": "plan_memory names the largest batch that fits; --batch-size measures it",
}


def build_parser() -> argparse.ArgumentParser:
    parser = trainers_parser("python -m scripts.benchmark", "unused")
    parser.description = (
        "Measure what each recompute policy costs and saves. Takes the trainers' flags; those of "
        "running have no effect, those of data only set the size of the vocabulary."
    )
    add = parser.add_argument_group("benchmark").add_argument
    # fmt: off
    add("--policies", nargs="+", type=policy_string, default=list(RECOMPUTE_POLICIES),
        metavar="POLICY", help=f"(default: {' '.join(RECOMPUTE_POLICIES)})")
    add("--steps", type=number_in_range(int, 1, 10**6), default=5, metavar="N",
        help="timed steps of each policy (default: %(default)s)")
    add("--json", type=output_file, metavar="FILE", help="write the raw numbers there")
    add("--worker", help=argparse.SUPPRESS)  # the policy to measure in this process
    # fmt: on
    return parser


def check(args: argparse.Namespace) -> None:
    """Find mistakes before anything is measured, and fill in defaults. Raises UsageError or
    DataError."""
    for name in sorted(args.typed & REFUSED.keys()):
        raise UsageError(f"{flag(name)}: {REFUSED[name]}")
    open_init_from(args)
    resolve_defaults(args)
    args.vocab_size = vocab_size_of(args)
    for policy in args.policies:
        model_config(with_policy(args, policy), args.vocab_size)


def with_policy(args: argparse.Namespace, policy: str) -> argparse.Namespace:
    return with_flags(args, use_activation_checkpoint=policy)


def ask(args: argparse.Namespace) -> PlanRequest:
    """Make the planner's request for this machine's device. A device without a data sheet is
    measured."""
    device = choose_device(args.device)
    set_matmul_precision(device, args.tf32)
    card = choose_card(args, device) or choose_card(with_flags(args, card=THIS_MACHINE), device)
    return PlanRequest(args, args.vocab_size, device, choose_precision(args, device), card=card)


# ---- One process


@dataclass(frozen=True)
class RandomTokens:
    """Random batches for train_step, equal in all runs: train_step seeds torch before it takes
    one."""

    args: argparse.Namespace
    device: torch.device

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return random inputs and labels (B, T), int64."""
        shape = self.args.batch_size, self.args.seq_len + 1
        rows = torch.randint(self.args.vocab_size, shape, device=self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def make_run(
    args: argparse.Namespace, device: torch.device, make_model: ModelFactory = MiniGPT
) -> Run:
    """Make the run that train_step needs, without data or files."""
    config, precision = model_config(args, args.vocab_size), choose_precision(args, device)
    set_matmul_precision(device, args.tf32)
    torch.manual_seed(args.seed)
    model: Any = make_model(config).to(device).train()
    if args.compile:
        compile_blocks(model) if isinstance(model, MiniGPT) else model.compile()
    tokens: Any = RandomTokens(args, device)
    unused: Any = None  # train_step does not use it
    process, optimizer = OneProcess(device), make_optimizer(model, args, device, precision)
    return Run(
        args, process, unused, unused, model, optimizer, precision, tokens, unused, StepClock()
    )


def timed_step(run: Run, n: int = 1) -> float:
    """Return the seconds of a step: the mean of the next `n` steps, with a single wait for the GPU
    after the last one."""
    start = time.perf_counter()
    for _ in range(n):
        run.step += 1
        train_step(run)
    if run.process.device.type != "cpu":
        torch.accelerator.synchronize()  # Python runs ahead of the device
    return (time.perf_counter() - start) / n


def recorded_peak(run: Run) -> int:
    """Do one more step on a CPU; return its peak in bytes, from the profiler's records of the
    allocator."""
    existing: list[Tensor] = list(run.model.parameters())
    existing += chain(*(state.values() for state in run.optimizer.state.values()))
    if isinstance(run.model, MiniGPT):  # the host buffers of +offload
        existing += cast(BlockCalls, run.model.blocks_with_recompute).offload_pool.buffers
    with profile(profile_memory=True) as profiler:
        timed_step(run)
    result: Any = profiler.profiler  # (the profiler's own tables have only sums)
    changes = [  # bytes; negative when a tensor is freed
        event
        for event in result.kineto_results.events()
        if event.name() == "[memory]" and event.device_type().name == "CPU"
    ]
    sizes = (event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
    return max(accumulate(sizes, initial=sum(tensor.nbytes for tensor in existing)))


def measure(args: argparse.Namespace, make_model: ModelFactory = MiniGPT) -> dict[str, Any]:
    """Return the seconds of each timed step (on a GPU one value, their mean), and the peak in bytes
    (None if the device does not count it)."""
    device = choose_device(args.device)
    run = make_run(args, device, make_model)
    timed_step(run, WARM_UP)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    # On a GPU, time all steps together: Python runs ahead from step to step, as in training.
    groups = [1] * args.steps if device.type == "cpu" else [args.steps]
    seconds = [timed_step(run, n) for n in groups]
    peak = recorded_peak(run) if device.type == "cpu" else None
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    return {"step_s_all": seconds, "peak_bytes": peak}


# ---- All processes


def run_worker(argv: list[str], policy: str) -> Row | None:
    """Return the result of `measure` in a process of its own; None if memory runs out there."""
    command = [sys.executable, __file__, *argv, "--worker", policy]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode in (4, -9):  # (-9: Linux has killed it for its memory)
        return None
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- Results


def make_row(request: PlanRequest, measured: Row) -> Row:
    """Return a row of the JSON file: the result of `measure` for one policy, and the prediction.

    `mfu`, `hfu`: the FLOP/s that a step needs, and the FLOP/s that it does with recompute, as
    shares of the card's peak (Chowdhery et al., 2022, section 4.1); None for a device without a
    data sheet.
    """
    args, step = request.args, request.step
    step_s = statistics.median(measured["step_s_all"])
    tokens_per_s = args.batch_size * args.grad_accum_steps * args.seq_len / step_s
    share, card = None, request.card
    if card and card.name in CARDS:  # (FLOP/s measured on a machine are not a peak)
        share = tokens_per_s / card.flops[PRECISIONS.index(request.precision)]
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
    """Return a Markdown table of the rows. Times are compared with the first row's."""
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
