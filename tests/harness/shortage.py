"""Make a step run out of memory at a chosen operator of its forward or backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from unittest.mock import patch

import torch
from harness.live_storages import LiveStorages
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import train_minimal
from trainer.run import Run

ERROR = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"
# A place is a pair. Memory runs out at operator number place[0]: after this operator if place[1] is
# True, else before it. If place[0] is None, memory does not run out.
Place = tuple[int | None, bool]


class Shortage(LiveStorages):
    """Dispatch mode that raises `ERROR` before operator number `at` or, with `after`, after it.

    `at` None: only count operators.
    """

    def __init__(self, at: int | None, after: bool = False):
        super().__init__()
        self.at, self.after, self.operators = at, after, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls this operator for its local tensor
        self.operators += 1
        if self.operators == self.at and not self.after:
            raise RuntimeError(ERROR)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.operators == self.at:
            raise RuntimeError(ERROR)
        return result


@contextmanager
def running_out(step: int, *places: Place) -> Iterator[list[Shortage]]:
    """Make the first attempts at step number `step` run out of memory: attempt i at places[i].
    Yield the dispatch modes that do so, one for each of these attempts."""
    accumulate_gradients, modes = (
        train_minimal.accumulate_gradients,
        [Shortage(*place) for place in places],
    )
    left = iter(modes)

    def attempt(run: Run) -> list[torch.Tensor]:
        with (next(left, None) if run.step == step else None) or nullcontext():
            return accumulate_gradients(run)

    with patch.object(train_minimal, "accumulate_gradients", attempt):
        yield modes


def strike(run: Run) -> None:
    """Make one of several processes run out of memory in the next step, which ends its run."""
    real = train_minimal.accumulate_gradients

    def accumulate_gradients(run: Run) -> list[torch.Tensor]:
        with Shortage(60):
            real(run)
        raise AssertionError(f"step {run.step} has fewer operators")

    train_minimal.accumulate_gradients = accumulate_gradients


def operators_of_each(run: Run, steps: int) -> list[int]:
    """Do the first `steps` steps of a run. Return for each step the number of operators in its
    forward and backward."""
    counts = []
    for run.step in range(1, steps + 1):
        with running_out(run.step, (None, False)) as (counted,):
            train_minimal.train_step(run)
        counts.append(counted.operators)
    return counts


def repeated(run: Run) -> Callable[[list[Place]], list[torch.Tensor]]:
    """Return a function that does the next step of the run. It does this step in every call, each
    time from the same state.

    The function's argument lists the places where attempts run out of memory. The function returns
    all tensors of the run after the step, or [] if no policy needs less memory.
    """
    run.step += 1
    config, plans = run.model.config, [*run.plans]
    parts = run.model, run.optimizer, run.scaler
    before = [deepcopy(part.state_dict()) for part in parts]

    def step(places: list[Place]) -> list[torch.Tensor]:
        for part, state in zip(parts, before, strict=True):
            part.load_state_dict(deepcopy(state))
        run.model.config, run.plans = config, plans
        with running_out(run.step, *places):
            try:
                found = train_minimal.train_step(run)
            except MemoryError:
                return []
        weights, moments, scale = (part.state_dict() for part in parts)
        return deepcopy(tree_leaves([found, weights, moments["state"], scale]))

    return step
