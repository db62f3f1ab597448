"""What the loop asks of the world, with the answers of a single process.

A trainer for several is a class with other answers to the same questions, and nothing else:
train_ddp.py is one, train_fsdp.py another, train_sp.py a third.
"""

import argparse
import os
import sys
import uuid
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from model import MiniGPT

from .device import choose_device
from .flags import UsageError

T = TypeVar("T")


class OneProcess:
    """One process, one device."""

    script = "train_minimal.py"
    rank, world_size = 0, 1
    gradients_persist = False  # are they in memory that stays? (The planner asks.)
    has_own_policy = True  # may each process recompute in its own way?
    reduces_in_backward = (
        False  # do gradients travel during backward, which then cannot be repeated?
    )
    local_world_size = 1  # on this machine
    # Over how many are weights, gradients and moments dealt out? (The planner asks that, too.)
    shard_degree = 1
    sp_degree = 1  # processes that compute the same sequences, each some tokens of them

    def __init__(self, device: torch.device):
        self.device = device
        # What was typed to start it, but for the flags: the script by its path.
        typed = sys.argv[0] if os.path.basename(sys.argv[0]) == self.script else self.script
        self.command: tuple[str, ...] = ("python", typed)
        self.run_id = uuid.uuid4().hex  # by which a run knows its own snapshots

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "OneProcess":
        """As the flags ask for. Raises UsageError, also if torchrun has started several."""
        if os.environ.get("WORLD_SIZE", "1") != "1":
            world = f"WORLD_SIZE is {os.environ['WORLD_SIZE'][:40]}"
            starts = "torchrun starts train_ddp.py, train_fsdp.py or train_sp.py"
            raise UsageError(f"{starts}; this is for one process, but {world}")
        return cls(choose_device(args.device))

    @property
    def replicas(self) -> int:
        """Micro-batches that are computed at the same time."""
        return self.world_size // self.sp_degree

    @property
    def processes_on_device(self) -> int:
        """Those that share its memory."""
        return self.local_world_size if self.device.type == "cpu" else 1

    def init_process_group(self) -> None:
        """Meet the other processes. Called when this one's data and flags are known to be good."""

    def materialize(self, model: MiniGPT) -> None:
        """Give a model of shapes only (device "meta") its memory; the numbers in it are yet to
        come."""
        model.to_empty(device=self.device)

    def local_shard(self, whole: Tensor, like: Tensor) -> Tensor:
        """The rows of a `whole` tensor that belong to this process: those that `like` has."""
        return whole

    def wrap(self, model: MiniGPT) -> nn.Module:
        """The model that the loop calls."""
        return model

    def gradient_sync(self, now: bool) -> AbstractContextManager[Any]:
        """A context for forward *and* backward: average gradients over processes, or not yet."""
        return nullcontext()

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], limit: float, foreach: bool | None = None
    ) -> Tensor:
        """Scale all gradients so that their norm is at most `limit`; returns the norm () before.

        `foreach`: all at a time; None: where torch can. (The planner, which calls this, says it.)
        """
        parameters = list(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = self.grad_norm(gradients).to(gradients[0].dtype)
        nn.utils.clip_grads_with_norm_(parameters, limit, norm, foreach=foreach)
        return norm

    def grad_norm(self, gradients: list[Tensor]) -> Tensor:
        """Of all numbers in them, ().

        Rows in float32, what they add up to in float64: then float32's last bit does not depend on
        the order, nor on how rows are dealt out to processes.
        """
        wide = torch.float32 if self.device.type == "mps" else torch.float64  # it has no other
        rows = [torch.linalg.vector_norm(g, dim=1) if g.dim() > 1 else g for g in gradients]
        return torch.linalg.vector_norm(torch.cat(rows).to(wide))

    def clear_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """After the update: freed, they leave room for the next forward."""
        optimizer.zero_grad()

    def discard_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Those of a step that is given up, and done again. Memory that stays holds zeros then."""
        optimizer.zero_grad(set_to_none=not self.gradients_persist)

    def can_retry(self) -> bool:
        """Can this process do forward and backward again, without the others?"""
        return True

    def remember_out_of_memory(self, policy: str) -> None:
        """Tell those that are started in place of these processes: with it memory ran out."""

    def last_out_of_memory(self) -> str:
        """The policy that was remembered; "" if none."""
        return ""

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """Each value summed over all processes."""
        return [sum(of_each) for of_each in zip(*self.all_gather_object(values), strict=True)]

    def all_reduce_max(self, values: list[int]) -> list[int]:
        """Each the largest of all processes' values."""
        return values

    def all_gather_object(self, mine: T) -> list[T]:
        """What each of the processes has, by rank."""
        return [mine]

    def run_on_rank0(self, act: Callable[[], T]) -> T | None:
        """`act`, by process 0 alone: what it returns there, None elsewhere. Raises as
        `run_on_all_ranks`."""
        return self.run_on_all_ranks(act if self.rank == 0 else lambda: None)

    def run_on_all_ranks(self, act: Callable[[], T]) -> T:
        """`act`, by each process for itself: what it returns here.

        If it raises a mistake of the user's or a lack of memory in one of them, all raise the same:
        nobody waits for one that is gone.
        """
        mine = None
        try:
            result = act()
        except (ValueError, MemoryError) as error:
            mine = error
        told = next(filter(None, self.all_gather_object(mine)), None)
        if told is not None:
            raise mine or told
        return result

    def full_state_dict(self, model: MiniGPT, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Weights and moments, whole, for a snapshot. All processes call it, process 0 writes."""
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def print0(self, line: str) -> None:
        """Print a line once, however many processes there are, beside the progress bar."""
        # The reader may be gone (`| head -3`), or the disk with the log full. That ends many
        # programs, and rightly; hours of training it should not. The run goes on in silence:
        # metrics.jsonl has all the figures, and the snapshots are still written.
        with suppress(OSError):
            tqdm.write(line)
            sys.stdout.flush()

    def print_rank(self, line: str) -> None:
        """Print what concerns this process alone."""
        OneProcess.print0(self, f"{line} (rank {self.rank})" if self.world_size > 1 else line)

    def progress_message(self, words: str) -> AbstractContextManager[Any]:
        """On a terminal, say meanwhile what the silence is about."""
        hide = None if self.rank == 0 else True  # None: unless it is a terminal
        return tqdm(desc=words, bar_format="{desc} ...", leave=False, disable=hide)

    def close(self) -> None:
        """Leave the other processes."""
