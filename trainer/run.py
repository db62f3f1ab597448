"""A training run: what the loop and its functions share, and how it is saved."""

import argparse
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
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
from .metrics import Write
from .process import OneProcess
from .snapshot import State, save_snapshot


@dataclass
class Run:
    """One training run: what the loop and its functions share."""

    args: argparse.Namespace
    process: OneProcess
    data: Dataset
    identity: State  # what a snapshot says about the run: config, flags, tokenizer, data
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
    last_line: float = math.inf  # when one of the log was said; before the first none is missed
    rate_before: float | None = None  # the last learning rate, if another schedule goes on from it
    # The log record of the step that was resumed from, if it has not been logged yet.
    unreported: dict[str, Any] = field(default_factory=dict)
    # Of a policy, and of the bytes that it was seen to take, the next one that needs less; None:
    # none does, or nobody can tell.
    next_policy: Callable[..., StepMemory | None] = lambda *_: None
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
    whole = run.process.gather(run.model, run.optimizer)
    if run.process.rank == 0:
        state = {
            **run.identity,
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
