"""Hold the state of a training run and save it; repeat a step that runs out of memory."""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import IO

import torch
from torch import Tensor, nn

from data import Dataset, TrainBatches, ValBatches
from data.errors import MiniGPTError
from memory import MemorySavingGPT
from planner import PlanError

from .check_model import check_model
from .clocks import StepClock
from .metrics import Write, format_bytes
from .plan import StepPlan, plans_to_try
from .process import OneProcess
from .reproducible_sums import GradientTree
from .settings import Settings
from .snapshot import State, save_snapshot


def make_scaler(device: torch.device, precision: torch.dtype) -> torch.amp.GradScaler:
    """Return the loss scaler of a run, which acts with float16 only."""
    scaler = torch.amp.GradScaler(device.type, enabled=precision == torch.float16)
    # The scaler allocates its tensors when it is first used, which in a step could run out of
    # memory.
    scaler.scale(torch.zeros((), device=device))
    return scaler


@dataclass
class Run:
    """State of one training run, which the loop and its functions share."""

    settings: Settings
    process: OneProcess
    data: Dataset
    snapshot_metadata: State  # part of each snapshot: config, flags, tokenizer, data
    model: MemorySavingGPT
    wrapped_model: nn.Module  # what the loop calls: the model or, with DDP, its wrapper
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    precision: torch.dtype
    training_batches: TrainBatches
    val_batches: ValBatches
    clock: StepClock
    # The plan in use and, in order, the plans that the run may switch to when memory runs out: see
    # `StepPlan.deeper_plans`. Empty if the memory could not be predicted.
    plans: list[StepPlan] = field(default_factory=list)
    held_lock: IO[str] | None = None  # while open, no second run can write to the same files
    # Functions that write a log record; on rank 0 only.
    metric_writers: list[Write] = field(default_factory=list)
    step: int = 0  # number of finished steps; during a step, the number of this step
    saved_step: int = 0  # step of the snapshot at --checkpoint-path; 0: this run has not saved
    # Time of the last save, or of the start, in seconds of `time.monotonic`.
    last_save_time: float = field(default_factory=lambda: monotonic())
    received_signal: int = 0  # number of the signal that asked this process to stop, 0 = none
    stop_signal: int = 0  # number of the signal that ended the run early, 0 = none
    best_val_loss: float = math.inf
    # Number of updates that were skipped because the gradients were not finite, each a scalar on
    # the device: without a good update since, and since the last line about them.
    skipped_in_a_row: Tensor | int = 0
    skipped_updates: Tensor | int = 0
    # Losses of the last 50 steps, each (A,) on the device; A = --grad-accum-steps. At its end the
    # run prints their mean, because the loss of one step is noisy.
    recent_losses: deque[Tensor] = field(default_factory=lambda: deque(maxlen=50))
    # Time of the last log line, or of the setup, in seconds of `time.perf_counter`.
    last_log_time: float = field(default_factory=lambda: time.perf_counter())
    # Policies with which memory ran out; the step was repeated with a policy that needs less.
    policies_out_of_memory: list[str] = field(default_factory=list)

    @cached_property
    def bytes_by_token_id(self) -> Tensor:
        """Number of bytes of text of each token id, (vocab_size,) int64, on the device."""
        return torch.from_numpy(self.data.tokenizer.byte_lengths()).to(self.process.device)

    @cached_property
    def gradient_tree(self) -> GradientTree:
        """Sums gradients with --reproducible-sums; else a no-op, because autograd does so."""
        parameters = self.model.parameters() if self.settings.reproducible_sums else ()
        return GradientTree(parameters, self.settings.grad_accum_steps)

    @property
    def global_micro_batches_per_step(self) -> int:
        """Number of micro-batches in a step, over all processes."""
        return self.settings.grad_accum_steps * self.process.layout.replicas

    def autocast(self) -> torch.autocast:
        """Return a context in which matmuls run in the chosen precision, while LayerNorm, softmax
        and loss stay in float32.

        autocast's weight cache is off. It would keep a low-precision copy of every weight until the
        end of forward, for a second use of the weight, but no weight is cast twice in a forward.
        """
        enabled = self.precision != torch.float32
        dtype = self.precision if enabled else None  # autocast does not accept float32
        where = self.process.device.type
        return torch.autocast(where, dtype, enabled=enabled, cache_enabled=False)

    def first_batches_until_stop(self) -> Iterator[int]:
        """Yield the number of the first batch of each round of an evaluation, in which each replica
        evaluates one batch.

        An evaluation may take longer than the 30 s that torchrun gives its processes to stop.
        Before each round, therefore, all processes learn whether one of them received a signal to
        stop. They end in the same round, because a sharded model needs all processes.
        """
        for first in range(0, len(self.val_batches), self.process.layout.replicas):
            (self.stop_signal,) = self.process.all_reduce_max([self.received_signal])
            if self.stop_signal:
                return
            yield first


def save(run: Run, path: Path) -> None:
    """Write a snapshot of the run to `path`.

    All processes must call this together: rank 0 writes and the others wait, because torchrun ends
    all processes when one ends. Raises SaveError if the snapshot cannot be written.
    """
    newest = path == run.settings.checkpoint_path
    full_state = run.process.full_state_dicts(run.model, run.optimizer)
    state = {
        **run.snapshot_metadata,
        **full_state,
        "scaler": run.scaler.state_dict(),
        "step": run.step,
        "best_val_loss": run.best_val_loss,
    }
    run.process.broadcast_from_rank0(lambda: save_snapshot(path, state, keep_previous=newest))
    if newest:
        run.saved_step, run.last_save_time = run.step, monotonic()


def is_save_overdue(run: Run) -> bool:
    """Return True if the last save is --save-minutes old."""
    return 0 < 60 * run.settings.save_minutes <= monotonic() - run.last_save_time


# ---- If memory runs out in forward or backward, repeat both.
#
# Before the update, a step changes only the gradients. Its data and dropout masks are functions of
# (seed, id of the micro-batch), and all policies give bitwise equal results, so that forward and
# backward can be discarded and repeated with a policy that needs less memory. The run ends with the
# same weights as a run that had this policy, or enough memory, from the start.
#
# One of several processes cannot repeat its part, because it has already exchanged tensors with the
# others, so the run ends. If torchrun starts it again, all processes begin with a policy that needs
# less memory.


def retry_with_deeper_policy(run: Run, accumulate: Callable[[Run], list[Tensor]]) -> list[Tensor]:
    """Call `accumulate(run)`, which runs forward and backward of a step, and return its losses.

    When memory runs out, call `accumulate` again with a policy that needs less memory, as often as
    necessary. Raises MemoryError if no policy needs less memory, and the allocator's error with
    several processes or with --on-out-of-memory stop.
    """
    while True:
        try:
            return accumulate(run)
        except Exception as error:
            if run.settings.on_out_of_memory == "stop" or not is_out_of_memory(error):
                raise
            if run.process.layout.kind != "one":
                # If torchrun starts the processes again, `plan_on_this_rank` reads this.
                run.process.remember_failed_policy(run.model.config.recompute)
                raise
        # (After the `except` block, in which the error's traceback would keep the frames of the
        # failed call alive, and with them all tensors of the step.)
        free_failed_attempt(run)
        with run.clock.paused("plan"):
            switch_policy(run)


def free_failed_attempt(run: Run) -> None:
    """Free the memory of a forward or backward that failed."""
    device = run.process.device
    run.optimizer.zero_grad()
    # A backward that failed leaves tasks in autograd's queue, which keep the graph alive
    # (pytorch#82218) until the next backward clears the queue.
    torch.zeros((), device=device, requires_grad=True).backward()
    if device.type == "cuda":
        # With offload, another stream may still be copying tensors that are already freed. Wait for
        # all streams, because the allocator waits only for the compute stream before it unmaps
        # their memory.
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)  # measure the next policy from here on
        # Return the allocator's cached segments to the GPU, because tensors of the failed attempt
        # have split them into small pieces. The next attempt then gets whole segments.
        torch.cuda.empty_cache()


def switch_policy(run: Run) -> None:
    """Switch to the first deeper policy that gives the right results, and print it. Raises
    MemoryError if no policy needs less memory, or if the memory could not be predicted."""
    failed = run.model.config
    if len(run.plans) == 0:
        raise MemoryError("no policy can be planned")
    # A run near its limit has planned all policies at its start, because a plan takes memory.
    deeper = run.plans[1:] or run.plans[0].deeper_plans()
    try:
        plans = [*plans_to_try([run.plans[0], *deeper])]
    except PlanError:
        raise MemoryError("no policy can be planned") from None
    for plan in plans:
        run.model.config = replace(failed, recompute=plan.policy)
        # If a user changed model.py, some policies may give wrong results: `check_model` raises
        # MiniGPTError, and the next policy is tried.
        with suppress(MiniGPTError):
            check_model(run.model, run.process, run.precision)
            break
    else:
        run.model.config = failed
        raise MemoryError("no policy needs less memory")
    run.plans = plans[plans.index(plan) :]
    if run.clock.predicted:
        run.clock.predicted = plan.peak, run.clock.predicted[1]
    run.snapshot_metadata["config"]["recompute"] = plan.policy
    run.policies_out_of_memory.append(failed.recompute)
    rounds = run.settings.compile or run.settings.mlp_chunks != 1
    run.process.print0(
        f"warning  step {run.step}: out of memory with recompute {failed.recompute}; again, and "
        f"from now on, with {plan.policy} ({format_bytes(plan.peak)} predicted)"
        f"{'' if rounds else ': same results'}"
    )


# Parts of messages that say that memory ran out
OUT_OF_MEMORY_PATTERN = re.compile(
    "allocate memory|not enough memory|out of memory|OUT_OF_MEMORY|STATUS_ALLOC_FAILED|bad_alloc"
    "|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(Lt)?Create"  # no memory for a handle
    "|Failed to CUDA [cm]alloc"  # NCCL
)


def is_out_of_memory(error: Exception) -> bool:
    """Return True if `error` means that memory ran out.

    PyTorch's GPU allocator raises torch.OutOfMemoryError, but all others raise general errors whose
    message alone says that memory ran out. This includes cuBLAS, cuDNN and NCCL, which allocate
    their own buffers: if that fails, the GPU's memory is full, and the same flags help.
    """
    if isinstance(error, ValueError):  # a mistake of the user; a file may have any name
        return False
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or OUT_OF_MEMORY_PATTERN.search(str(error)) is not None
