"""A training run: what the loop and its functions share, and how it is saved; and a step that runs
out of memory is done again, with a policy that needs less."""

import argparse
import math
import re
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import IO, Any

import torch
from torch import Tensor, nn

from data import Dataset, TrainBatches, ValBatches
from model import MiniGPT
from planner import StepMemory

from .clocks import StepClock
from .flags import UsageError
from .metrics import Write, format_bytes
from .process import OneProcess
from .snapshot import State, save_snapshot

REHEARSED = 2  # steps: the second one has the optimizer's state beside it, and DDP's final buckets


@dataclass
class Run:
    """One training run: what the loop and its functions share."""

    args: argparse.Namespace
    process: OneProcess
    data: Dataset
    run_info: State  # what a snapshot says about the run: config, flags, tokenizer, data
    model: MiniGPT
    optimizer: torch.optim.Optimizer
    precision: torch.dtype
    train_batches: TrainBatches
    val_batches: ValBatches
    clock: StepClock
    held_lock: IO[str] | None = None  # keeps a second run off our files as long as this one lives
    metric_writers: list[Write] = field(default_factory=list)  # of the log: on rank 0 alone
    step: int = 0  # steps done; while one is being done, its number
    saved_step: int = 0  # the step that --checkpoint-path holds, 0 = none of this run yet
    saved_at: float = field(default_factory=lambda: monotonic())  # by that clock; or the start
    save_asked: bool = False  # of this process, by a signal; until it has saved
    stopped_by: int = 0  # the signal that ended the run before its last step
    best_val_loss: float = math.inf
    # Losses of the last steps' micro-batches, each (A,) on the device: one alone says little.
    recent_losses: deque[Tensor] = field(default_factory=lambda: deque(maxlen=50))
    # When a line of the log was said; before the first, when the run was set up.
    last_log_time: float = field(default_factory=lambda: time.perf_counter())
    # The log record of the step that was resumed from, if it has not been logged yet.
    pending_record: dict[str, Any] = field(default_factory=dict)
    # Of a policy, and of the bytes that it was seen to take, the next one that needs less; None:
    # none does, or nobody can tell.
    next_policy: Callable[..., StepMemory | None] = lambda *_: None
    check: Callable[[], None] = lambda: None  # is model.py exact with the model's policy?
    # The policies with which memory ran out, and a step began again with a deeper one.
    rescues: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.wrapped: nn.Module = self.model  # as the loop calls it: itself, or in DDP's wrapper
        device, float16 = self.process.device.type, self.precision == torch.float16
        self.scaler = torch.amp.GradScaler(device, enabled=float16)
        # It makes its tensors at its first use. In a step that could fail half-way.
        self.scaler.scale(torch.zeros((), device=self.process.device))

    @cached_property
    def token_bytes(self) -> Tensor:
        """(V,) bytes that each token id stands for."""
        return torch.from_numpy(self.data.tokenizer.byte_lengths()).to(self.process.device)

    @property
    def micro_batches(self) -> int:
        """In a step, of all processes."""
        return self.args.grad_accum_steps * self.process.replicas

    def autocast(self) -> torch.autocast:
        """Matmuls in the chosen precision; LayerNorm, softmax and loss stay in float32.

        Without the weight cache: it would hold a low-precision copy of every weight until the
        forward ends, to save casts that this model does not repeat.
        """
        enabled = self.precision != torch.float32
        dtype = self.precision if enabled else None  # float32 is no dtype of autocast's
        device_type = self.process.device.type
        return torch.autocast(device_type, dtype, enabled=enabled, cache_enabled=False)


def save(run: Run, path: Path, record: dict[str, Any]) -> None:
    """Write a snapshot of the run. All processes call it, process 0 writes."""
    newest = path == run.args.checkpoint_path
    whole = run.process.full_state_dict(run.model, run.optimizer)
    if run.process.rank == 0:
        state = {
            **run.run_info,
            **whole,
            "scaler": run.scaler.state_dict(),
            "step": run.step,
            "best_val_loss": run.best_val_loss,
            "record": record,
        }
        save_snapshot(path, state, keep_previous=newest)
    if newest:
        run.saved_step, run.saved_at, run.save_asked = run.step, monotonic(), False


def save_is_asked(run: Run) -> bool:
    """Does this process want a save: by a signal, or because --save-minutes are over?"""
    minutes = run.args.save_minutes
    return run.save_asked or 0 < 60 * minutes <= monotonic() - run.saved_at


# ---- Out of memory in forward or backward: the same again.
#
# Before its update, a step changes gradients and nothing else. Its data and its dropout masks
# follow from (seed, number), and no policy changes a bit. So forward and backward can be given up
# and done again. The run ends with the weights of one that had the deeper policy, or the memory,
# from the start.


def retry_with_less_memory(run: Run, accumulate: Callable[..., list[Tensor]]) -> list[Tensor]:
    """Return `accumulate(run)`: a step's losses, after its forward and backward.

    When memory runs out, do it again with a deeper policy, as often as it takes. Where gradients
    travel during backward, which then cannot be done again, the first steps are rehearsed.

    Raises the error if no policy needs less, or if --on-out-of-memory says stop.
    """
    if run.args.on_out_of_memory == "stop":
        return accumulate(run)
    if run.process.reduces_in_backward and run.clock.steps < REHEARSED:
        attempt(run, lambda run: accumulate(run, average=False))
        run.process.discard_gradients(run.optimizer)
    return attempt(run, accumulate)


def attempt(run: Run, accumulate: Callable[[Run], list[Tensor]]) -> list[Tensor]:
    """`accumulate(run)`, with one policy after the other."""
    while True:
        try:
            return accumulate(run)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if not run.process.can_retry():
                run.process.remember_out_of_memory(run.model.config.recompute)
                raise
            message = str(error)
        # Only behind the `except` block: in it the traceback holds the frames, and those hold all
        # tensors of the step.
        go_deeper(run, message)


def go_deeper(run: Run, message: str) -> None:
    """Free what the failed attempt has made, and take the next policy. Raises MemoryError if there
    is none."""
    process, device, policy = run.process, run.process.device, run.model.config.recompute
    run.clock.discard_step()
    process.discard_gradients(run.optimizer)
    # A backward that failed leaves its tasks in autograd's queue, and they hold the graph
    # (pytorch#82218). The next backward clears the queue: this one.
    torch.zeros((), device=device, requires_grad=True).backward()
    seen = None
    if device.type == "cuda":
        # Offload may still copy tensors that are free by now. To unmap their memory, the allocator
        # waits for the stream that computes, and for no other one.
        torch.cuda.synchronize(device)
        seen = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)  # the next peak is that of the policy to come
        torch.cuda.empty_cache()  # whole segments, without remains of the step between
    with run.clock.paused("plan"):
        step = take_next_policy(run, seen)
    if step is None:
        process.remember_out_of_memory(policy)  # this run ends: with it all others do
        raise MemoryError(message)
    run.clock.expect_peak(step.peak)
    taken = run.run_info["config"]["recompute"] = step.config.recompute
    run.rescues.append(policy)
    same = "" if run.args.compile or run.args.mlp_chunks != 1 else ": same results"
    process.print_rank(
        f"warning  step {run.step}: out of memory with recompute {policy}; again, and from now on, "
        f"with {taken} ({format_bytes(step.peak)} predicted){same}"
    )


def take_next_policy(run: Run, seen: int | None) -> StepMemory | None:
    """Give the model the next policy that needs less, and return its step.

    `seen`: bytes that the policy before it took, if they were counted.
    None: no policy needs less, or there is no memory to plan with, either.
    """
    config, policy = run.model.config, run.model.config.recompute
    with suppress(Exception):
        while step := run.next_policy(policy, seen):
            policy, seen = step.config.recompute, None
            run.model.config = replace(config, recompute=policy)
            with suppress(UsageError):  # a changed model.py may be exact under some policies only
                run.check()
                return step
    run.model.config = config
    return None


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch's allocator for GPUs raises a class of its own, all others say so in their message.

    The buffers of cuBLAS, cuDNN and NCCL are not PyTorch's: that GPU is as full, and the same knobs
    help.
    """
    messages = (
        "allocate memory|not enough memory|out of memory|OUT_OF_MEMORY|STATUS_ALLOC_FAILED"
        "|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(Lt)?Create"  # no room for its handle
        "|Failed to CUDA [cm]alloc"  # NCCL
    )
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    # (A mistake of the user's, a ValueError, names a file, which may be called anything.)
    is_mistake = isinstance(error, ValueError)
    return known or not is_mistake and re.search(messages, str(error)) is not None
