"""Methods for everything in the training loop that depends on the number of processes.

OneProcess has the methods for one process. TorchrunProcess (torchrun.py) overrides those that only
need a connection to other processes; DDPProcess (train_ddp.py) and FSDPProcess (train_fsdp.py)
override those that depend on what a process holds of the model.
"""

import os
import sys
import uuid
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from data.errors import MiniGPTError
from memory import MemorySavingGPT
from model import MiniGPT, MiniGPTConfig
from planner import Layout

from .device import choose_device
from .flags import escape_controls
from .settings import ONE_PROCESS, Settings

T = TypeVar("T")


class OneProcess:
    """One process with one device; an object of a subclass is one of several processes."""

    script = "train_minimal.py"
    launcher: tuple[str, ...] = ("python",)  # what stands before the script in a command line
    failed_policy = ""  # with which memory ran out, before torchrun started the job again

    def __init__(self, device: torch.device, layout: Layout = ONE_PROCESS):
        """Set up a process that computes on `device` and shares with others what `layout` says."""
        self.device, self.layout, self.rank = device, layout, layout.rank
        # The command that started this process, without flags, and with the script as it was typed
        typed = sys.argv[0] if os.path.basename(sys.argv[0]) == self.script else self.script
        self.command = (*self.launcher, typed)
        self.run_id = uuid.uuid4().hex  # a run recognises its own snapshots by this id

    @classmethod
    def from_settings(cls, settings: Settings) -> "OneProcess":
        """Return a process with the device that --device names.

        Raises MiniGPTError if there is no such device, or if torchrun started several processes.
        """
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise MiniGPTError(
                "torchrun starts train_ddp.py, train_fsdp.py or train_sp.py; this is for one "
                f"process, but WORLD_SIZE is {os.environ['WORLD_SIZE'][:40]}"
            )
        return cls(choose_device(settings.device))

    @property
    def processes_on_device(self) -> int:
        """Number of processes that share the memory of this process's device."""
        return self.layout.local_world_size if self.device.type == "cpu" else 1

    def init_process_group(self) -> None:
        """Connect to the other processes, after the flags of this process are checked. Raises
        MiniGPTError if they cannot be reached, or if a flag does not work with several processes.
        """

    def make_model(self, config: MiniGPTConfig) -> MemorySavingGPT:
        """Return the model that this process trains, with random weights."""
        return MemorySavingGPT(config)

    def allocate_parameters(self, model: MiniGPT) -> None:
        """Allocate the memory of parameters on device "meta" (where tensors have only shapes).

        Their values are undefined until `allocate_and_fill` (build.py) or a resume fills them in;
        other parameters keep theirs.
        """
        device = self.device
        model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))

    def shard_like(self, whole: Tensor, like: Tensor) -> Tensor:
        """Return this rank's rows of the tensor `whole`, sharded like the parameter `like`: all
        rows, and thus `whole` itself, in a single process."""
        return whole

    def wrap(self, model: MiniGPT, settings: Settings) -> nn.Module:
        """Return the module that the loop calls: `model`, or a wrapper around it."""
        return model

    def own_batch_ids(self, ids: range) -> range:
        """Return those of `ids`, the ids of all batches of a step, that this process computes."""
        n = len(ids) // self.layout.replicas
        return ids[n * self.layout.replica_index :][:n]  # neighbours

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """Return the context of forward *and* backward of a micro-batch.

        If `enabled`, backward averages the gradients over all processes (with --reproducible-sums:
        sums them); otherwise each process sums its own gradients.
        """
        return nullcontext()

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], limit: float, foreach: bool | None = None
    ) -> Tensor:
        """Scale all gradients in place so that their norm is at most `limit`.

        Returns the norm before scaling, (), in the dtype of the gradients. `foreach`: process many
        tensors in one kernel; None: torch chooses by device. (The planner passes a value, because
        it simulates GPUs on a CPU, and torch would choose for the CPU.)
        """
        parameters = list(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = self.grad_norm(gradients).to(gradients[0].dtype)
        nn.utils.clip_grads_with_norm_(parameters, limit, norm, foreach=foreach)
        return norm

    def grad_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the L2 norm of all elements of all gradients, (), in float64 (on MPS float32).

        The norm of each row is in float32, and the norm of all these norms in float64, so that the
        result, rounded to float32, depends neither on the order of the rows nor on sharding.
        """
        wide = torch.float32 if self.device.type == "mps" else torch.float64  # MPS has no float64
        norms = torch.linalg.vector_norm
        rows = [norms(g.flatten(1), dim=1) if g.dim() > 1 else g.reshape(-1) for g in gradients]
        return torch.linalg.vector_norm(torch.cat(rows).to(wide))

    def clear_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Free the gradients after the update, so that the next forward can use their memory."""
        optimizer.zero_grad()

    def remember_failed_policy(self, policy: str) -> None:
        """Store `policy`, with which memory ran out, as the `failed_policy` of the processes that
        torchrun starts next. (Nothing starts a single process again.)"""

    def sum_over_replicas(self, values: list[float]) -> list[float]:
        """Return the sum of each value over all replicas (see `Layout`)."""
        return [sum(column) for column in zip(*self.all_gather_object(values), strict=True)]

    def all_reduce_max(self, values: list[int]) -> list[int]:
        """Return the maximum of each value over all processes."""
        return values

    def all_gather_object(self, mine: T) -> list[T]:
        """Return a list with the `mine` of each process, in the order of the ranks."""
        return [mine]

    def broadcast_from_rank0(self, act: Callable[[], T]) -> T:
        """Call `act` on rank 0 only; return its result, which must be picklable, on all ranks.
        Raises as `run_on_all_ranks`."""
        own = self.run_on_all_ranks(lambda: act() if self.rank == 0 else None)
        return cast(T, self.all_gather_object(own)[0])

    def run_on_all_ranks(self, act: Callable[[], T]) -> T:
        """Call `act` on every rank; return the result of this rank's call.

        If a call raises ValueError or MemoryError, every rank raises an error: its own error or, if
        it has none, the error of the lowest rank that has one, because a rank that went on would
        wait for those that have ended. (A mistake of the user is a MiniGPTError, a ValueError.)
        """
        own_error = None
        try:
            result = act()
        except (ValueError, MemoryError) as error:
            own_error = error
        if errors := [*filter(None, self.all_gather_object(own_error))]:
            raise own_error or errors[0]
        return result

    def full_state_dicts(self, model: MiniGPT, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state dicts of model and optimizer, with whole tensors, for a snapshot.

        All processes must call this together, but only rank 0 writes the result: on other ranks the
        tensors may be None.
        """
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def print0(self, line: str) -> None:
        """Print a line on rank 0 only, above the progress bar."""
        # Printing fails if the program that reads the output has ended (`| head -3`), or if the
        # disk with the log is full. That should not end hours of training: metrics.jsonl has all
        # figures, and snapshots are still written.
        if self.rank == 0:
            with suppress(OSError):
                tqdm.write(escape_controls(line))
                sys.stdout.flush()

    def showing_message(self, message: str) -> AbstractContextManager[Any]:
        """Return a context for a long task; a terminal shows `message` until the context ends."""
        hide = None if self.rank == 0 else True  # None: tqdm shows it only if stderr is a terminal
        return tqdm(desc=message, bar_format="{desc} ...", leave=False, disable=hide)
