"""Measure the step time and the peak memory of each recompute policy on this machine.

Every policy on GPT-2 small:
    python -m scripts.benchmark --model gpt2 --batch-size 2

The command takes minutes on an otherwise idle machine, and prints a row of the table after each
policy.

With each policy the command runs the trainer's step (train_step) on random tokens, and takes the
median time of several steps. (On a GPU it takes the mean, because Python waits for the GPU only
after the last step and cannot time single steps.) The peak counts all tensors. On a GPU, PyTorch's
caching allocator measures it; on a CPU, the planner's recorder counts the storages of a real step
as it counts those of a simulated step. (With --compile there is no count on a CPU, because recorded
blocks would run eagerly.)

Beside each figure the table has the planner's prediction (planner/roofline.py). For a CUDA GPU that
is listed in planner.CARDS, predictions use its data sheet; any other device is measured for three
seconds before the first run.
"""

import gc
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from data.errors import MiniGPTError
from memory import POLICY_NAMES, MemorySavingGPT
from planner.cards import CARDS, THIS_MACHINE
from planner.op_recorder import OpRecorder
from planner.operators import MATMUL_DTYPES, tensors_in
from planner.timeline import live_bytes_by_op_and_kind, split_into_segments
from scripts import cli_main
from scripts.plans import CommandPlan
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
from trainer.flags import check_policy_string, flag, number_in_range, output_file
from trainer.metrics import format_bytes
from trainer.optimizer import make_optimizer
from trainer.plan import POLICY_FLAG, card_for, largest_vocab_size
from trainer.pretrained import read_init_from
from trainer.process import OneProcess
from trainer.report import describe_model
from trainer.run import Run, is_out_of_memory, make_scaler
from trainer.settings import Settings, resolve, row

Row = dict[str, Any]
# Number of steps before the timed steps. The first step compiles the model and makes AdamW's
# state; the second step uses both.
WARM_UP = 2
HEADER = """\
| policy | step | predicted | tokens/s | over the first | predicted | peak | predicted | MFU | HFU |
|---|---|---|---|---|---|---|---|---|---|"""
ANSWERED = (POLICY_FLAG, "card", "memory_budget")  # flags that have no meaning here


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings(Settings):
    """The trainers' settings, and what to measure."""

    # fmt: off
    policies: tuple[str, ...] = row(tuple(POLICY_NAMES), check_policy_string, group="benchmark",
        nargs="+", metavar="POLICY", help=f"(default: {' '.join(POLICY_NAMES)})")
    steps: int = row(5, number_in_range(int, 1, 10**6),
        help="timed steps of each policy (default: {default})")
    json: Path | None = row(None, output_file, metavar="FILE", help="write the raw numbers there")
    # fmt: on


def parse(argv: list[str]) -> BenchmarkSettings:
    """Return the resolved settings, with --vocab-size, or raise MiniGPTError before anything is
    measured."""
    typed = BenchmarkSettings.parse(
        argv,
        "python -m scripts.benchmark",
        "Measure what each recompute policy costs and saves. Takes the trainers' flags. The group "
        "'running' has no effect; the group 'data' only sets the size of the vocabulary.",
    )
    for name in typed.typed.keys() & ANSWERED:
        raise MiniGPTError(
            f"{flag(name)}: leave it out; --policies names what is measured, on this machine"
        )
    settings = resolve(read_init_from(typed)[1])
    vocab_size = largest_vocab_size(settings)
    for policy in settings.policies:
        settings.replace(use_activation_checkpoint=policy).model_config(vocab_size)
    return settings.replace(vocab_size=vocab_size)


def make_plan(settings: BenchmarkSettings) -> CommandPlan:
    """Return the plan for this machine's device, which is measured for some seconds if the planner
    has no data sheet of it."""
    device = choose_device(settings.device)
    set_matmul_precision(device, settings.tf32)
    if settings.compile:
        check_compiler(device)
    card = card_for(settings, device) or card_for(settings, device, THIS_MACHINE)
    assert settings.vocab_size
    return CommandPlan(
        settings, settings.vocab_size, device, choose_precision(settings, device), card=card
    )


# ---- Measurements


@dataclass(frozen=True)
class RandomTokens:
    """Random batches for train_step, equal in all runs, because train_step seeds torch before it
    reads a batch."""

    settings: Settings
    device: torch.device

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return random inputs and labels, each (B, T) int64."""
        shape = self.settings.batch_size, self.settings.seq_len + 1
        rows = torch.randint(self.settings.vocab_size or 0, shape, device=self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def make_run(settings: Settings, device: torch.device) -> Run:
    """Return a Run for train_step, without data files and without a snapshot."""
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


def mean_step_seconds(run: Run, n: int = 1) -> float:
    """Run the next `n` steps, and wait for the device only after the last step. Return their mean
    time in seconds."""
    start = time.perf_counter()
    for _ in range(n):
        run.step += 1
        train_step(run)
    if run.process.device.type != "cpu":
        torch.accelerator.synchronize()  # wait, because Python runs ahead of the device
    return (time.perf_counter() - start) / n


def measure_step_peak(run: Run) -> int | None:
    """Run one more step; return its peak memory in bytes, or None if this device counts no memory.

    On a GPU the peak counts the bytes requested for tensors. Allocated bytes are some percent more,
    because the allocator rounds up the size of each tensor.
    """
    recorder, device = OpRecorder(), run.process.device
    counts = device.type == "cpu" and not run.settings.compile
    weights = [*run.model.parameters()]
    state = weights, [weight.grad for weight in weights], [*run.optimizer.state.values()]
    for tensor in tensors_in(tree_leaves((state, run.model.offload_pool.buffers))):
        recorder.add_storage(tensor)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with recorder if counts else nullcontext():
        mean_step_seconds(run)
    if device.type == "cuda":
        return torch.cuda.memory_stats(device)["requested_bytes.all.peak"]
    return (
        int(live_bytes_by_op_and_kind(split_into_segments(recorder)).sum(1).max())
        if counts
        else None
    )


def measure(
    settings: Settings, steps: int, device: torch.device
) -> tuple[float, int | None] | None:
    """Return the time of a step in seconds (the median of several steps on a CPU, else their mean),
    and the peak memory in bytes (None: not counted). Return None if memory runs out."""
    gc.collect()  # frees the model of the previous policy
    if device.type == "cuda":
        torch.cuda.empty_cache()
    torch.compiler.reset()
    try:
        run = make_run(settings, device)
        mean_step_seconds(run, WARM_UP)
        # On a GPU Python runs ahead from step to step, so all steps are timed together.
        n = 1 if device.type == "cpu" else steps
        seconds = statistics.median(mean_step_seconds(run, n) for _ in range(steps // n))
        return seconds, measure_step_peak(run)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


# ---- Results


def make_row(plan: CommandPlan, step_s: float, peak_bytes: int | None) -> Row:
    """Return a row of the JSON file: what was measured for one policy, and the prediction.

    "mfu" (model FLOPs utilization): the FLOP/s of a step, without recomputed FLOPs, as a share of
    the card's peak FLOP/s. "hfu" (hardware FLOPs utilization): the same share with recomputed
    FLOPs. Both follow Chowdhery et al. (2022, section 4.1), and are None for a device without a
    data sheet.
    """
    settings, step = plan.settings, plan.step
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
        "tokens_per_s": tokens_per_s,
        "mfu": share and share * needed,
        "hfu": share and share * (needed + replayed),
        "peak_bytes": peak_bytes,
        "predicted_bytes": step.peak,
    }


def format_markdown_row(row: Row, first: Row) -> str:
    """Return `row` as a line of a Markdown table, with its time also relative to that of
    `first`."""
    cells = [
        row["policy"],
        *(f"{1000 * row[key]:,.1f} ms" for key in ("step_s", "predicted_s")),
        f"{row['tokens_per_s']:,.0f}",
        *(f"{row[key] / first[key] - 1:+.1%}" for key in ("step_s", "predicted_s")),
        format_bytes(row["peak_bytes"]) if row["peak_bytes"] else "",
        format_bytes(row["predicted_bytes"]),
        *(f"{row[key]:.1%}" if row[key] else "" for key in ("mfu", "hfu")),
    ]
    return f"| {' | '.join(cells)} |"


@cli_main
def main(argv: list[str]) -> None:
    settings = parse(argv)
    plan, rows = make_plan(settings), list[Row]()
    print(HEADER)
    for policy in dict.fromkeys(settings.policies):
        planned = plan.with_policy(policy)
        measured = measure(planned.settings, settings.steps, plan.device)
        if measured:
            rows.append(make_row(planned, *measured))
        line = (
            format_markdown_row(rows[-1], rows[0]) if measured else f"| {policy} | out of memory |"
        )
        print(line, flush=True)
    metadata = about("scripts.benchmark", argv, plan.device) | {
        "model": describe_model(plan.config),
        "batch_size": settings.batch_size,
        "grad_accum_steps": settings.grad_accum_steps,
        "seq_len": settings.seq_len,
        "precision": str(plan.precision).removeprefix("torch."),
        "predicted for": plan.card and plan.card.name,
    }
    print("", describe_about(metadata), sep="\n")
    metadata |= {"config": asdict(plan.config), "card": plan.card and asdict(plan.card)}
    write_json(settings.json, metadata | {"rows": rows})


if __name__ == "__main__":
    sys.exit(main())
