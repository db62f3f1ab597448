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

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile
from tqdm import tqdm

from memory import POLICY_NAMES, MemorySavingGPT
from planner.cards import CARDS, THIS_MACHINE
from planner.operators import MATMUL_DTYPES
from scripts import cli_main, out_of_memory_as, say_stopped
from scripts.plans import CommandPlan as Plan
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
from trainer.flags import check_policy_string, number_in_range, output_file
from trainer.metrics import format_bytes
from trainer.optimizer import make_optimizer
from trainer.plan import card_for, vocab_size_of
from trainer.pretrained import open_init_from
from trainer.process import OneProcess
from trainer.report import describe_model
from trainer.run import Run, make_scaler
from trainer.settings import Settings, resolve, row

Row = dict[str, Any]
# Number of steps before the timed steps. The first step compiles the model and makes AdamW's
# state; the second step uses both.
WARM_UP = 2


def refused(default: str | None, reason: str, metavar: str, group: str = "") -> Any:
    """Return the row of a flag of the trainers that this command refuses."""

    def refuse(text: str) -> None:
        raise argparse.ArgumentTypeError(reason)

    options: dict[str, Any] = {"metavar": metavar, "group": group, "nargs": "?", "const": ""}
    return row(default, refuse, f"not here: {reason}", **options)


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings(Settings):
    """The trainers' settings, and what to measure."""

    # fmt: off
    use_activation_checkpoint: str = refused("none",
        "--policies names the policies to measure", metavar="POLICY", group="memory")
    card: str | None = refused(None,
        "this machine's own device is measured; leave --card out", metavar="NAME")
    memory_budget: int | None = refused(None,
        "plan_memory names the largest batch that fits; --batch-size measures it", metavar="SIZE")
    policies: tuple[str, ...] = row(tuple(POLICY_NAMES), check_policy_string, group="benchmark",
        nargs="+", metavar="POLICY", help=f"(default: {' '.join(POLICY_NAMES)})")
    steps: int = row(5, number_in_range(int, 1, 10**6),
        help="timed steps of each policy (default: {default})")
    json: Path | None = row(None, output_file, metavar="FILE", help="write the raw numbers there")
    # The policy to measure in this process
    worker: str | None = row(None, str, argparse.SUPPRESS)
    # fmt: on


def parse(argv: list[str]) -> BenchmarkSettings:
    """Return the resolved settings, with --vocab-size. Raises MiniGPTError before anything is
    measured."""
    typed = BenchmarkSettings.parse(
        argv,
        "python -m scripts.benchmark",
        "Measure what each recompute policy costs and saves. Takes the trainers' flags. The group "
        "'running' has no effect; the group 'data' only sets the size of the vocabulary.",
    )
    settings = resolve(open_init_from(typed)[1])
    vocab_size = vocab_size_of(settings)
    for policy in settings.policies:
        settings.replace(use_activation_checkpoint=policy).model_config(vocab_size)
    return settings.replace(vocab_size=vocab_size)


def make_plan(settings: BenchmarkSettings) -> Plan:
    """Return the plan for this machine's device. A device without a data sheet is measured now, for
    some seconds."""
    device = choose_device(settings.device)
    set_matmul_precision(device, settings.tf32)
    if settings.compile:
        check_compiler(device)
    card = card_for(settings, device) or card_for(settings, device, THIS_MACHINE)
    assert settings.vocab_size
    return Plan(
        settings, settings.vocab_size, device, choose_precision(settings, device), card=card
    )


# ---- One process


@dataclass(frozen=True)
class RandomTokens:
    """Random batches for train_step. They are equal in all runs, because train_step seeds torch
    before it reads a batch."""

    settings: Settings
    device: torch.device

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return random inputs and labels, each (B, T) int64."""
        shape = self.settings.batch_size, self.settings.seq_len + 1
        rows = torch.randint(self.settings.vocab_size or 0, shape, device=self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def make_run(settings: BenchmarkSettings, device: torch.device) -> Run:
    """Return the run that train_step needs; it has neither data files nor a snapshot."""
    precision = choose_precision(settings, device)
    set_matmul_precision(device, settings.tf32)
    torch.manual_seed(settings.seed)
    model = MemorySavingGPT(settings.model_config(settings.vocab_size or 0)).to(device).train()
    if settings.compile:
        compile_blocks(model)
    unused: Any = None  # train_step does not use it
    tokens: Any = RandomTokens(settings, device)
    return Run(
        settings,
        OneProcess(device),
        data=unused,
        snapshot_metadata=unused,
        model=model,
        wrapped_model=model,
        optimizer=make_optimizer(model, settings, device, precision),
        scaler=make_scaler(device, precision),
        precision=precision,
        training_batches=tokens,
        val_batches=unused,
        clock=StepClock(),
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

    torch.profiler records each allocation, also those of compiled blocks. (trainer/clocks.py finds
    the same peak, but would make compiled blocks run eagerly.)
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


def measure(settings: BenchmarkSettings) -> dict[str, Any]:
    """Run and time the steps; return a dict with their seconds and the peak memory.

    "step_s_all": a list with the seconds of each step; on a GPU a list with one value, the mean of
    all steps. "peak_bytes": the peak in bytes; None if the device does not count it.
    """
    device = choose_device(settings.device)
    run = make_run(settings, device)
    timed_step(run, WARM_UP)
    if device.type == "cpu":
        seconds = [timed_step(run) for _ in range(settings.steps)]
        return {"step_s_all": seconds, "peak_bytes": recorded_peak(run)}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    # Time all steps together: Python runs ahead from step to step, as in training.
    seconds = [timed_step(run, settings.steps)]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"step_s_all": seconds, "peak_bytes": peak}


# ---- All processes


def run_worker(argv: list[str], policy: str) -> Row | None:
    """Run `measure` in a process of its own; return its result. None: that process ran out of
    memory."""
    command = [sys.executable, "-m", "scripts.benchmark", *argv, "--worker", policy]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode in (4, -9):  # (-9: Linux killed the process when memory ran out)
        return None
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- Results


def make_row(plan: Plan, measured: Row) -> Row:
    """Return a row of the JSON file: the result of `measure` for one policy, and the prediction.

    "mfu" (model FLOPs utilization): the FLOP/s of a step as a share of the card's peak FLOP/s,
    where recomputed FLOPs do not count. "hfu" (hardware FLOPs utilization): the same share, where
    recomputed FLOPs count, too. Both follow Chowdhery et al., 2022, section 4.1. Both are None for
    a device without a data sheet.
    """
    settings, step = plan.settings, plan.step
    step_s = statistics.median(measured["step_s_all"])
    tokens_per_s = settings.tokens_per_step(replicas=1) / step_s
    share, card = None, plan.card
    if card and card.name in CARDS:  # (measured FLOP/s of a machine are not its peak)
        share = tokens_per_s / card.flops[MATMUL_DTYPES.index(plan.precision)]
    n_tokens = step.batch_size * step.seq_len
    needed, replayed = (flops / n_tokens for flops in step.needed_and_replayed_flops)
    return {
        "policy": step.config.recompute,
        "step_s": step_s,
        "predicted_s": plan.seconds,
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


def measure_all(settings: BenchmarkSettings, argv: list[str]) -> int:
    """Measure all policies, print the table, write the JSON file; return the exit code."""
    plan = make_plan(settings)
    assert plan.card
    rows, out_of_memory, code = list[Row](), list[str](), 130
    policies = dict.fromkeys(settings.policies)
    with suppress(KeyboardInterrupt):
        for policy in tqdm(policies, unit="policy", leave=False, disable=None):
            if measured := run_worker(argv, policy):
                rows.append(make_row(plan.with_policy(policy), measured))
            else:
                out_of_memory.append(policy)
        code = 0
    metadata = about("scripts.benchmark", argv, plan.device) | {
        "model": describe_model(plan.config),
        "batch_size": settings.batch_size,
        "grad_accum_steps": settings.grad_accum_steps,
        "seq_len": settings.seq_len,
        "precision": str(plan.precision).removeprefix("torch."),
        "predicted for": plan.card.name,
        "runs": f"{len(rows) + len(out_of_memory)} of {len(policies)}",
        "out of memory": " ".join(out_of_memory) or "nothing",
    }
    if code:
        say_stopped(f"after {metadata['runs']} runs")
    if rows or not code:
        print(policy_table(rows), describe_about(metadata), sep="\n\n")
        metadata |= {"config": asdict(plan.config), "card": asdict(plan.card), "rows": rows}
        write_json(settings.json, metadata)
    return code


@cli_main
def main(argv: list[str]) -> int:
    settings = parse(argv)
    if settings.worker is None:
        return measure_all(settings, argv)
    with out_of_memory_as(f" with {settings.worker}"):
        print(json.dumps(measure(settings.replace(use_activation_checkpoint=settings.worker))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
