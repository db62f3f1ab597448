"""What the sections of scripts/gpu_report.py share: the device, its clock, its memory, a run.

A section is a function that takes a `Bench` and yields its measurements, each as a name and a
function without arguments that returns the values:

    def copies(bench: Bench) -> Jobs:
        for size in bench.pick([2**20, 2**30], [2**10]):
            yield f"{size} bytes", partial(copy, bench, size)

Nothing is measured before that function is called, so all names are known from the start, and what
an earlier run has measured is left out. Units of the values: UNITS.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from model import MiniGPTConfig
from planner.step import Planner
from scripts.allocator_trace import allocations, trace_events
from scripts.benchmark import plan, utilization
from scripts.benchmark_worker import Job, config_of, cpu_allocator_peak, make_run
from scripts.peak_flops import peak_flops
from train_minimal import train_step
from trainer.device import choose_precision
from trainer.flags import build_parser, fill_in
from trainer.plan import vocabulary
from trainer.run import Run

T = TypeVar("T")
Values = dict[str, Any]
Jobs = Iterator[tuple[str, Callable[[], Values]]]

# What the four counts of CUDA's caching allocator are of: asked for by tensors; with each block
# rounded up; with blocks that another stream may still be using; with all that the cache holds.
PEAKS = ("requested", "allocated", "active", "reserved")
UNITS = {
    **dict.fromkeys((*PEAKS, "predicted", "extra", "before", "static", "memory", "L2"), "bytes"),
    **dict.fromkeys(("limit", "missing", "size", "free"), "bytes"),
    **dict.fromkeys(("ms", "ms_all", "kernels_ms", "step_ms"), "ms"),
    **dict.fromkeys(("idle", "mfu", "hfu"), "share"),
    **dict.fromkeys(("loss_error", "grad_x_error", "grad_weight_error"), "relative"),
    "difference": "relative",
    "TFLOP/s": "TFLOP/s",
    "GB/s": "GB/s",
    "tokens/s": "tokens/s",
    "took": "s",
}
REAL = "--model gpt2 --device cuda --dropout 0"  # GPT-2 small, 1,024 tokens a sequence
DRY = (
    "--n-layers 2 --n-heads 2 --d-model 16 --seq-len 16 --batch-size 2 --use-toy-data "
    "--vocab-size 64 --device cpu --amp-dtype bfloat16"
)


@dataclass(frozen=True)
class Bench:
    """Where it is measured, and how large. `dry`: everything small, on the CPU."""

    dry: bool
    out: Path  # for what is no number: traces, logs
    peer: bool = False  # also transformers' GPT-2
    nanogpt: Path | None = None  # also the GPT of this checkout

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def on_gpu(self) -> bool:
        return not self.dry

    def pick(self, real: T, dry: T) -> T:
        return dry if self.dry else real

    # ---- What is measured

    def args(self, flags: str = "") -> argparse.Namespace:
        """The trainers' flags: GPT-2 small, or something tiny, and `flags` besides."""
        words = f"{self.pick(REAL, DRY)} {flags}".split()
        args = build_parser("gpu_report", "unused.pt").parse_args(words)
        args.use_activation_checkpoint = "full"  # a Job names the policy; for fill_in, any will do
        fill_in(args)
        args.vocab_size = vocabulary(args)
        return args

    def run(self, flags: str, job: Job) -> Run:
        """What the trainers' step needs, on random tokens."""
        return make_run(self.args(flags), job, self.device)

    def planner(self, flags: str = "") -> Planner:
        return make_planner(self, flags)

    def predicted(self, flags: str, job: Job) -> int:
        """Bytes at the peak of a step, by the planner."""
        memory = asdict(config_of(self.args(flags), job))
        return self.planner(flags).step(job.batch_size, **memory).peak

    # ---- Its clock

    def mark(self) -> Any:
        """Now, as the device's own clock has it."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def times(self, call: Callable[[], object], repeats: int, warm_up: int = 2) -> list[float]:
        """Milliseconds of each of the calls. Nothing waits for the GPU between them."""
        for _ in range(warm_up):
            call()
        marks = [self.mark()]
        for _ in range(repeats):
            call()
            marks.append(self.mark())
        if not self.on_gpu:
            return [1000 * (b - a) for a, b in pairwise(marks)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(marks)]

    def milliseconds(self, call: Callable[[], object], repeats: int = 20) -> float:
        return statistics.median(self.times(call, self.pick(repeats, 2)))

    # ---- Its memory

    def clear(self) -> None:
        """Give back what the last measurement had."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def extra_bytes(self, call: Callable[[], object]) -> int:
        """The most that `call` has at a time beside what was there, by the allocator's count."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            call()
        return max(accumulate(size for _, size in allocations(trace_events(profiler), "cpu")))

    def step_peaks(self, run: Run) -> Values:
        """The peaks of the next step; a CPU's allocator has only one count."""
        if not self.on_gpu:
            return dict.fromkeys(PEAKS) | {"allocated": cpu_allocator_peak(run)}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        next_step(run)
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        return {kind: stats[f"{kind}_bytes.all.peak"] for kind in PEAKS}

    # ---- Its kernels

    def profile(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if self.on_gpu:
            activities.append(ProfilerActivity.CUDA)
        return profile(activities=activities)

    def kernels(self, events: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
        """(name, start, duration) in microseconds, from a profile's trace: what ran on the GPU, in
        order; on a CPU, operators that no other called."""
        kinds = ("kernel", "gpu_memcpy", "gpu_memset") if self.on_gpu else ("cpu_op",)
        found = [
            (event["name"], event["ts"], event["dur"])
            for event in sorted(events, key=lambda event: event.get("ts", 0))
            if event.get("cat") in kinds and "dur" in event
        ]
        if self.on_gpu:
            return found
        outer, end = [], 0.0
        for kernel in found:
            if kernel[1] >= end:
                outer.append(kernel)
                end = kernel[1] + kernel[2]
        return outer


@lru_cache
def make_planner(bench: Bench, flags: str) -> Planner:
    args = bench.args(flags)
    return plan(args, bench.device, choose_precision(args, bench.device))


def next_step(run: Run) -> Tensor:
    """As the trainers' loop does it; returns the gradients' norm ()."""
    run.step += 1
    return train_step(run)[1]


def idle_share(kernels: list[tuple[str, float, float]]) -> float | None:
    """Of the time from the first kernel's start to the last one's end, the part without any.

    None of no kernels: not every machine lets a profiler see them.
    """
    if not kernels:
        return None
    busy, end = 0.0, kernels[0][1]
    for _, start, duration in kernels:  # streams overlap: count what is new only
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return 1 - busy / max(end - kernels[0][1], 1e-9)


def measure_step(bench: Bench, flags: str, job: Job, steps: int = 10) -> Values:
    """Time of a step, and what of the card's peak it uses; then the peaks of one more step."""
    run = bench.run(flags, job)
    times = bench.times(lambda: next_step(run), bench.pick(steps, 2), warm_up=bench.pick(3, 1))
    return step_values(bench, run.args, job, times) | bench.step_peaks(run)


def step_values(bench: Bench, args: argparse.Namespace, job: Job, times: list[float]) -> Values:
    ms = statistics.median(times)
    tokens_per_s = job.batch_size * args.grad_accum_steps * args.seq_len / (ms / 1000)
    config: MiniGPTConfig = config_of(args, job)
    peak = None
    if bench.on_gpu:
        precision = choose_precision(args, bench.device)
        peak = peak_flops(torch.cuda.get_device_name(), precision, args.tf32)
    used = utilization(config, args.seq_len, tokens_per_s, peak, job.compiled)
    return {"ms": ms, "tokens/s": tokens_per_s, "mfu": used["mfu"], "ms_all": times}
