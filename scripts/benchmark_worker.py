"""One measurement of scripts/benchmark.py: what a step takes of time and memory, in this process.

The process is `python -m scripts.benchmark ... --worker JOB`: flags mean the same in it.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate, chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.profiler import profile

from memory import Schedule
from model import MiniGPT, MiniGPTConfig
from scripts.export_hf import their_sizes
from train_minimal import train_step
from trainer.device import (
    choose_device,
    choose_precision,
    compile_blocks,
    set_matmul_precision,
)
from trainer.flags import changed, model_config
from trainer.metrics import StepClock
from trainer.optimizer import make_optimizer
from trainer.process import OneProcess
from trainer.room import own_memory
from trainer.run import Run

GPT2 = "transformers.models.gpt2.modeling_gpt2"  # an optional dependency
WARM_UP = 2  # steps: the first one compiles and makes AdamW's state; the second finds it there


@dataclass(frozen=True)
class Job:
    """One row of a table: what a process of its own measures."""

    policy: str
    batch_size: int
    compiled: bool = False
    peer: str | None = None  # another library's model instead of ours
    largest: bool = False  # the largest batch that fits


def flags_of(args: argparse.Namespace, job: Job) -> argparse.Namespace:
    """The trainers' flags that ask for the job."""
    return changed(
        args,
        use_activation_checkpoint=job.policy,
        batch_size=job.batch_size,
        compile=job.compiled,
    )


def config_of(args: argparse.Namespace, job: Job) -> MiniGPTConfig:
    """Raises UsageError if the flags do not go with the policy."""
    return model_config(flags_of(args, job), args.vocab_size)


class RandomTokens:
    """What train_step takes batches from, after it has seeded torch: all models see the same."""

    def __init__(self, vocab_size: int, batch_size: int, seq_len: int, device: torch.device):
        self.vocab_size, self.shape, self.device = vocab_size, (batch_size, seq_len + 1), device

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(self.vocab_size, self.shape, device=self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Transformers(nn.Module):
    """Hugging Face's GPT-2 of the same shape, called as ours is: (ids, labels) -> loss."""

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        library: Any = import_module(GPT2)
        self.gpt2 = library.GPT2LMHeadModel(
            library.GPT2Config(
                **their_sizes(config),
                # The same function as its default, gelu_new, which takes an operator for each step
                # of the formula, more time and more memory: let it be at its best.
                activation_function="gelu_pytorch_tanh",
                attn_implementation="sdpa",
                use_cache=False,
                bos_token_id=None,  # (50256 may not be in the vocabulary)
                eos_token_id=None,
            )
        )
        if config.recompute == "full":
            self.gpt2.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        # Given `labels` alone it would shift them, and predict one token a sequence less than ours.
        return self.gpt2(input_ids, labels=labels, shift_labels=labels).loss


PEERS: dict[str | None, Callable[[MiniGPTConfig], nn.Module]] = {"transformers": Transformers}


def make_run(args: argparse.Namespace, job: Job, device: torch.device) -> Run:
    """What train_step needs of a run: no data, no files."""
    config, precision = config_of(args, job), choose_precision(args, device)
    set_matmul_precision(device, args.tf32)
    torch.manual_seed(args.seed)
    model: Any = PEERS.get(job.peer, MiniGPT)(config).to(device).train()
    if job.compiled:
        model.compile() if job.peer else compile_blocks(model)
    tokens: Any = RandomTokens(args.vocab_size, job.batch_size, args.seq_len, device)
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


def measure(args: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Seconds of each timed step (on a GPU their mean), and the peak in bytes."""
    device = choose_device(args.device)
    if job.peer == "transformers":
        import_module(GPT2)  # it should not count below
    before = own_memory()
    run = make_run(args, job, device)
    for _ in range(WARM_UP):
        timed_step(run)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    # Python runs ahead of a GPU from one step to the next, too, as it does in training.
    groups = [1] * args.steps if device.type == "cpu" else [args.steps]
    seconds = [timed_step(run, n) for n in groups]
    peak = kind = reserved = resident = None
    if device.type == "cuda":
        peak, kind = torch.cuda.max_memory_allocated(device), "cuda"
        reserved = torch.cuda.max_memory_reserved(device)  # with the cache's gaps
    elif device.type == "cpu":
        if before:  # (now, as the profiler takes memory of its own)
            resident = own_memory("VmHWM") - before
        peak, kind = recorded_peak(run), "cpu allocator"
    return {
        "step_s_all": seconds,
        "peak_bytes": peak,
        "peak_kind": kind,
        "reserved_bytes": reserved,
        "rss_bytes": resident,
    }
