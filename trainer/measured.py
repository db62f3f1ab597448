"""What the tensors of a step really take, beside what was predicted: one line early in a run."""

import weakref
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import MiniGPT

from .device import is_compiled
from .metrics import StepClock, format_bytes
from .process import OneProcess

STEP = 3  # the first makes the optimizer's state, the second DDP's final buckets


class LiveStorages(TorchDispatchMode):
    """The bytes of all storages that operators were given or have returned, and that still live.

    Looked at after each operator: what a kernel allocates and frees inside is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, weakref.ref] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.look_at(args, kwargs, result)
        return result

    def look_at(self, *tensors: object) -> None:
        """However they are nested."""
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor):
                self.add(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)

    def add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self.alive:
            return  # a view, or the result of an in-place operator

        def gone(_: weakref.ref) -> None:
            del self.alive[address]  # the next storage at this address is another one
            self.now -= size

        self.alive[address] = weakref.ref(storage, gone)
        self.now += size


class MeasuringClock(StepClock):
    """A clock that measures one step, and says what it took."""

    def __init__(
        self,
        process: OneProcess,
        model: MiniGPT,
        optimizer: torch.optim.Optimizer,
        predicted: tuple[int, int] | None,
    ):
        """`predicted`: bytes at a step's peak, and without recompute; None if nobody could tell,
        and then there is nothing to compare."""
        super().__init__()
        self.process, self.model, self.optimizer = process, model, optimizer
        self.predicted, self.storages = predicted, LiveStorages()
        self.looking = ExitStack()

    def begin(self, phase: str) -> None:
        super().begin(phase)
        first = phase == "forward" and self.steps == STEP - 1 and not self.storages.peak
        # Not of compiled blocks, which would not run as such under a mode; nor of shards, which are
        # gathered where no mode looks.
        on_cpu, whole = self.process.device.type == "cpu", self.process.shards == 1
        sees_all = on_cpu and whole and not is_compiled(self.model)
        if first and self.predicted and sees_all:
            weights = [*self.model.parameters()]
            there = [weight.grad for weight in weights], [*self.optimizer.state.values()]
            self.storages.look_at(weights, there)
            self.looking.enter_context(self.storages)

    def give_up(self) -> None:
        self.looking.close()
        self.storages = LiveStorages()

    def expect(self, peak: int) -> None:
        self.predicted = self.predicted and (peak, self.predicted[1])

    def end_step(self) -> None:
        super().end_step()
        self.looking.close()
        peak, device = self.storages.peak, self.process.device
        if self.steps == STEP and device.type == "cuda":
            # What was asked for. (Allocated are blocks of round sizes, some percent more.)
            peak = torch.cuda.memory_stats(device).get("requested_bytes.all.peak", 0)
        if self.steps == STEP and peak and self.predicted:
            step, plain = map(format_bytes, self.predicted)
            words = f", without recompute {plain}" * (self.predicted[0] != self.predicted[1])
            measured = f"measured peak {format_bytes(peak)} of tensors"
            self.process.say(f"{measured}; predicted {step}{words}")

    def __exit__(self, *exception: object) -> None:
        self.looking.close()  # (still open if something went wrong in that step)
        super().__exit__(*exception)
