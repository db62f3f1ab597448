"""One measurement of scripts/benchmark.py: the time and the memory of a step, in this process.

The process is `python -m scripts.benchmark ... --worker POLICY`: flags mean the same in it.
"""

import argparse
import time
from collections.abc import Callable
from itertools import accumulate, chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.profiler import profile

from memory import Schedule
from model import MiniGPT, MiniGPTConfig
from train_minimal import train_step
from trainer.device import (
    choose_device,
    choose_precision,
    compile_blocks,
    set_matmul_precision,
)
from trainer.flags import model_config
from trainer.metrics import StepClock
from trainer.optimizer import make_optimizer
from trainer.process import OneProcess
from trainer.run import Run

ModelFactory = Callable[[MiniGPTConfig], nn.Module]  # of a model (ids, labels) -> loss
WARM_UP = 2  # steps: the first one compiles and makes AdamW's state; the second finds it there


class RandomTokens:
    """Random batches for train_step, which seeds torch before it takes one: equal in all runs."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.vocab_size, self.device = args.vocab_size, device
        self.shape = args.batch_size, args.seq_len + 1

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(self.vocab_size, self.shape, device=self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def make_run(
    args: argparse.Namespace, device: torch.device, make_model: ModelFactory = MiniGPT
) -> Run:
    """The run that train_step needs, without data or files."""
    config, precision = model_config(args, args.vocab_size), choose_precision(args, device)
    set_matmul_precision(device, args.tf32)
    torch.manual_seed(args.seed)
    model: Any = make_model(config).to(device).train()
    if args.compile:
        compile_blocks(model) if isinstance(model, MiniGPT) else model.compile()
    tokens: Any = RandomTokens(args, device)
    unused: Any = None  # by train_step
    process, optimizer = OneProcess(device), make_optimizer(model, args, device, precision)
    return Run(
        args, process, unused, unused, model, optimizer, precision, tokens, unused, StepClock()
    )


def timed_step(run: Run, n: int = 1) -> float:
    """Seconds of a step: the mean of the next `n`, on a GPU with a single wait after the last."""
    start = time.perf_counter()
    for _ in range(n):
        run.step += 1
        train_step(run)
    if run.process.device.type != "cpu":
        torch.accelerator.synchronize()  # Python runs ahead of it
    return (time.perf_counter() - start) / n


def recorded_peak(run: Run) -> int:
    """One more step on a CPU: the most bytes that tensors take, as its allocator notes them."""
    there: list[Tensor] = list(run.model.parameters())
    there += chain(*(state.values() for state in run.optimizer.state.values()))
    if isinstance(run.model, MiniGPT):  # the blocks of +offload
        there += cast(Schedule, run.model.schedule).host.made
    with profile(profile_memory=True) as profiler:
        timed_step(run)
    result: Any = profiler.profiler  # (tables that it makes itself have sums only)
    changes = [  # with a minus, when a tensor goes
        event
        for event in result.kineto_results.events()
        if event.name() == "[memory]" and event.device_type().name == "CPU"
    ]
    sizes = (event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
    return max(accumulate(sizes, initial=sum(tensor.nbytes for tensor in there)))


def measure(args: argparse.Namespace, make_model: ModelFactory = MiniGPT) -> dict[str, Any]:
    """Seconds of each timed step (on a GPU one value, their mean), and the peak in bytes (None on
    a device that counts none)."""
    device = choose_device(args.device)
    run = make_run(args, device, make_model)
    timed_step(run, WARM_UP)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    # Python runs ahead of a GPU from one step to the next, too, as it does in training.
    groups = [1] * args.steps if device.type == "cpu" else [args.steps]
    seconds = [timed_step(run, n) for n in groups]
    peak = recorded_peak(run) if device.type == "cpu" else None
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    return {"step_s_all": seconds, "peak_bytes": peak}
