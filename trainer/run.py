"""Hold the state of a training run, and save it; repeat a step that runs out of memory."""

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

# Number of first steps that are rehearsed. In the second step the optimizer's state and DDP's final
# buckets take memory, too.
N_REHEARSAL_STEPS = 2


@dataclass
class Run:
    """State of one training run, shared by the loop and its functions."""

    args: argparse.Namespace
    process: OneProcess
    data: Dataset
    run_info: State  # the run's part of each snapshot: config, flags, tokenizer, data
    model: MiniGPT
    optimizer: torch.optim.Optimizer
    precision: torch.dtype
    train_batches: TrainBatches
    val_batches: ValBatches
    clock: StepClock
    held_lock: IO[str] | None = None  # while it is open, no second run can write the same files
    metric_writers: list[Write] = field(default_factory=list)  # write a log record; rank 0 only
    step: int = 0  # number of steps done; during a step, its number
    saved_step: int = 0  # the step that --checkpoint-path holds, 0 = nothing saved by this run yet
    # Time of the last save, else of the start, in seconds of `time.monotonic`.
    last_save_time: float = field(default_factory=lambda: monotonic())
    save_asked: bool = False  # a signal asked this process for a save that is not done yet
    stopped_by: int = 0  # number of the signal that ended the run early, 0 = none
    best_val_loss: float = math.inf
    # Losses of the last steps, each (A,) on the device, to average: one step's loss is noisy.
    recent_losses: deque[Tensor] = field(default_factory=lambda: deque(maxlen=50))
    # Time of the last log line, else of the setup, in seconds of `time.perf_counter`.
    last_log_time: float = field(default_factory=lambda: time.perf_counter())
    # Log record of the step that the run resumed from, if that step has not been logged yet.
    resumed_record: dict[str, Any] = field(default_factory=dict)
    # `next_smaller_step(policy, peak_bytes)` returns the step with the next policy that needs less
    # memory than `policy`, whose peak was measured as `peak_bytes` (None: not measured). It returns
    # None if no policy needs less, or if the memory cannot be predicted.
    next_smaller_step: Callable[..., StepMemory | None] = lambda *_: None
    # Raises UsageError if model.py is not exact with the model's policy.
    check: Callable[[], None] = lambda: None
    # The policies with which memory ran out before the step was repeated with a deeper policy.
    rescues: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.wrapped: nn.Module = self.model  # the module that the loop calls, or DDP's wrapper
        device, float16 = self.process.device.type, self.precision == torch.float16
        self.scaler = torch.amp.GradScaler(device, enabled=float16)
        # The scaler allocates its tensors at its first use. In a step that could run out of memory.
        self.scaler.scale(torch.zeros((), device=self.process.device))

    @cached_property
    def token_bytes(self) -> Tensor:
        """Bytes of text that each token id stands for, (vocab_size,) int64, on the device."""
        return torch.from_numpy(self.data.tokenizer.byte_lengths()).to(self.process.device)

    @property
    def micro_batches_per_step(self) -> int:
        """Number of micro-batches in a step, in all processes together."""
        return self.args.grad_accum_steps * self.process.replicas

    def autocast(self) -> torch.autocast:
        """Return a context in which matmuls run in the chosen precision; LayerNorm, softmax and
        loss stay in float32.

        The weight cache is off. It would hold a low-precision copy of every weight until the end of
        forward, to save casts that this model does not repeat.
        """
        enabled = self.precision != torch.float32
        dtype = self.precision if enabled else None  # autocast accepts no float32
        device_type = self.process.device.type
        return torch.autocast(device_type, dtype, enabled=enabled, cache_enabled=False)


def save(run: Run, path: Path, record: dict[str, Any]) -> None:
    """Write a snapshot of the run to `path`. `record`: the log record of its step.

    All processes must call this together; rank 0 writes. Raises SaveError if the disk does not take
    the snapshot.
    """
    newest = path == run.args.checkpoint_path
    full_state = run.process.full_state_dict(run.model, run.optimizer)
    if run.process.rank == 0:
        state = {
            **run.run_info,
            **full_state,
            "scaler": run.scaler.state_dict(),
            "step": run.step,
            "best_val_loss": run.best_val_loss,
            "record": record,
        }
        save_snapshot(path, state, keep_previous=newest)
    if newest:
        run.saved_step, run.last_save_time, run.save_asked = run.step, monotonic(), False


def save_is_asked(run: Run) -> bool:
    """Return True if a signal asked this process for a save, or if --save-minutes are over."""
    minutes = run.args.save_minutes
    return run.save_asked or 0 < 60 * minutes <= monotonic() - run.last_save_time


# ---- Out of memory in forward or backward: repeat both.
#
# Before its update, a step changes only gradients. Its data and its dropout masks follow from
# (seed, id of the micro-batch), and no policy changes a bit of the result. So forward and backward
# can be given up and repeated. The run ends with the same weights as a run that had the deeper
# policy, or enough memory, from the start.


def retry_with_less_memory(run: Run, accumulate: Callable[..., list[Tensor]]) -> list[Tensor]:
    """Return `accumulate(run)`: a step's losses, after its forward and backward.

    When memory runs out, repeat `accumulate` with a deeper policy, as often as necessary. Where
    gradients are sent during backward (DDP), backward cannot be repeated. There the first
    N_REHEARSAL_STEPS steps are rehearsed: run once without sending gradients, to find a policy that
    fits.

    Raises MemoryError if no policy needs less memory, and the allocator's error if the step cannot
    be repeated or --on-out-of-memory is stop.
    """
    if run.args.on_out_of_memory == "stop":
        return accumulate(run)
    if run.process.rehearses_first_steps and run.clock.steps < N_REHEARSAL_STEPS:
        attempt(run, lambda run: accumulate(run, average=False))
        run.process.discard_gradients(run.optimizer)
    return attempt(run, accumulate)


def attempt(run: Run, accumulate: Callable[[Run], list[Tensor]]) -> list[Tensor]:
    """Return `accumulate(run)`; each time memory runs out, repeat it with the next policy."""
    while True:
        try:
            return accumulate(run)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if not run.process.can_retry_alone():
                run.process.remember_out_of_memory(run.model.config.recompute)
                raise
            message = str(error)
        # Call this after the `except` block: inside it the traceback holds the frames, and the
        # frames hold all tensors of the step.
        go_deeper(run, message)


def go_deeper(run: Run, message: str) -> None:
    """Free the memory of the failed attempt, and switch the model to the next policy.

    `message`: of the error. Raises MemoryError with it if no policy needs less memory.
    """
    process, device, policy = run.process, run.process.device, run.model.config.recompute
    run.clock.discard_step()
    process.discard_gradients(run.optimizer)
    # A backward that failed leaves its tasks in autograd's queue, and the tasks hold the graph
    # (pytorch#82218). The next backward, which is this one, clears the queue.
    torch.zeros((), device=device, requires_grad=True).backward()
    seen = None
    if device.type == "cuda":
        # Offload may still be copying tensors that are already free. Before it unmaps their memory,
        # the allocator waits for the compute stream only. So wait for all streams.
        torch.cuda.synchronize(device)
        seen = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)  # so the next peak is the next policy's
        torch.cuda.empty_cache()  # leaves whole free segments, not split by tensors of this step
    with run.clock.paused("plan"):
        step = take_next_policy(run, seen)
    if step is None:
        process.remember_out_of_memory(policy)  # this process ends, and with it all others
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
    """Give the model the next policy that needs less memory, and return its predicted step.

    `seen`: bytes of the failed policy's peak on the GPU; None if they were not measured. Returns
    None if no policy needs less, or if planning fails, for lack of memory, too.
    """
    config, policy = run.model.config, run.model.config.recompute
    with suppress(Exception):
        while step := run.next_smaller_step(policy, seen):
            policy, seen = step.config.recompute, None
            run.model.config = replace(config, recompute=policy)
            with suppress(UsageError):  # a changed model.py may be exact with some policies only
                run.check()
                return step
    run.model.config = config
    return None


def is_out_of_memory(error: Exception) -> bool:
    """Return True if `error` says that memory ran out.

    PyTorch's GPU allocator raises a class of its own; all other allocators only say it in their
    message. cuBLAS, cuDNN and NCCL allocate their own buffers: when those fail the GPU is just as
    full, and the same flags help.
    """
    messages = (
        "allocate memory|not enough memory|out of memory|OUT_OF_MEMORY|STATUS_ALLOC_FAILED"
        "|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(Lt)?Create"  # no room for its handle
        "|Failed to CUDA [cm]alloc"  # NCCL
    )
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    # (A ValueError is a mistake of the user. It may name a file, and a file may have any name.)
    is_mistake = isinstance(error, ValueError)
    return known or not is_mistake and re.search(messages, str(error)) is not None
