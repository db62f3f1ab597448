"""Make a step run out of memory at a chosen operator of its forward or backward."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from harness.live_storages import LiveStorages
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import train_minimal
import trainer.run
from trainer.plan import Plan
from trainer.run import Run
from trainer.shutdown import run_safely

ERROR = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"
# A place is a pair. Memory runs out at operator number place[0]: after this operator if place[1] is
# True, else before it. If place[0] is None, memory does not run out.
Place = tuple[int | None, bool]


class Shortage(LiveStorages):
    """Dispatch mode that raises `ERROR` before operator number `at` or, with `after`, after it.

    `at` None: only count operators. `counts()` returns whether the next operator counts.
    """

    def __init__(
        self, at: int | None, after: bool = False, counts: Callable[[], bool] = lambda: True
    ):
        super().__init__()
        self.at, self.after, self.counts, self.operators = at, after, counts, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls this operator for its local tensor
        if not self.counts():
            return func(*args, **(kwargs or {}))
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
    accumulate, modes = train_minimal.accumulate, [Shortage(*place) for place in places]
    left = iter(modes)

    def attempt(run: Run, *how: Any, **more: Any) -> list[torch.Tensor]:
        mode = next(left, None) if run.step == step else None
        if mode is None:
            return accumulate(run, *how, **more)
        # A failed attempt may leave dispatch modes of checkpoints open until its frames are freed.
        # `mode` must end after these modes. Otherwise torch 2.9 believes that a mode is still open,
        # and compiles nothing.
        opened.enter_context(mode)
        losses = accumulate(run, *how, **more)
        opened.close()
        return losses

    with ExitStack() as opened, patch.object(train_minimal, "accumulate", attempt):
        yield modes


@contextmanager
def running_out_again(at: int, error: Exception) -> Iterator[list[int]]:
    """Raise `error` at call number `at` of those that the trainer makes after memory ran out: until
    it repeats the step, or until the run has ended. Yield a list with the number of calls.

    Calls of Python functions and of C functions count. So this reaches each place that could run
    out of memory.
    """
    calls, switch = [0], trainer.run.free_and_switch_policy

    def on_event(frame: FrameType, event: str, function: Any) -> None:
        calls[0] += event in ("call", "c_call")
        if calls[0] == at and event in ("call", "c_call"):
            raise error  # (Python then removes this function)
        if event == "return" and frame.f_code is run_safely.__code__:
            sys.setprofile(None)

    def watched(*given: Any) -> None:
        sys.setprofile(on_event)
        switch(*given)
        sys.setprofile(None)

    with patch.object(trainer.run, "free_and_switch_policy", watched):
        yield calls


# The places where one of several processes can run out of memory in a step:
# rehearsed  in the rehearsal of the step
# data       before the first forward
# early      in a forward, or in a backward before the last backward
# last       in the last backward, in which gradients are averaged
# buckets    before the first forward of the second step, while DDP makes its final buckets
# sharded    at operator 60 of a trainer with shards, where every attempt needs all processes
PLACES = ("rehearsed", "data", "early", "last", "buckets", "sharded")


def plans_of_flags(run: Run) -> list[Plan]:
    """Return the plan of the run's flags, and its `deeper` plans."""
    where = run.process.device, run.precision
    vocab_size, layout = run.model.config.vocab_size, run.process.layout
    plan = Plan(run.settings, vocab_size, *where, layout=layout)
    return [plan, *plan.deeper()]


def strike(place: str, run: Run) -> Callable[[], None]:
    """Make the next step run out of memory once at `place`, mostly at a random operator. Return a
    function that undoes the change.

    For the places rehearsed, data and early the step begins with the policy of the flags, whatever
    policy an earlier rescue has chosen. So each step can be rescued again.
    """
    draw, left = random.Random(f"{place} {run.process.rank} {run.step}"), [place]
    real, begin, after = train_minimal.accumulate, run.clock.begin_phase, draw.random() < 0.5
    if place in ("rehearsed", "data", "early"):
        run.model.config = run.settings.model_config(run.model.config.vocab_size)
        kept: Any = run  # planned at the first strike
        kept.first_plans = getattr(run, "first_plans", None) or plans_of_flags(run)
        run.plans = kept.first_plans

    def attempt(at: int | None, average: bool) -> tuple[list[torch.Tensor], int]:
        parts = ["data"]

        def note(phase: str) -> None:
            parts.append(phase)
            begin(phase)

        def counts() -> bool:
            last = parts.count("model is done") == run.settings.grad_accum_steps
            known = {"data": "forward" not in parts, "early": not last, "last": last}
            return {**known, "buckets": parts[-1] == "forward"}.get(place, True)

        mode = Shortage(at, after, counts)
        hooks = [run.model.register_forward_pre_hook(lambda *_: parts.append("model"))]
        hooks += [run.model.register_forward_hook(lambda *_: parts.append("model is done"))]
        try:
            with patch.object(run.clock, "begin_phase", note), mode:
                return real(run, average), mode.operators
        finally:
            for hook in hooks:
                hook.remove()

    # At "buckets", operators 6 to 60 are those in which DDP's processes agree on the buckets,
    # allocate the buckets, and copy existing gradients.
    at = {"data": 2, "buckets": draw.randint(6, 60), "sharded": 60}.get(place)
    if at is None:
        for _ in range(2):  # (count the second attempt: the first may make buckets)
            _, operators = attempt(None, average=False)
        at = draw.randint(1, operators)
        run.process.free_or_zero_gradients(run.optimizer)

    def accumulate(run: Run, average: bool = True) -> list[torch.Tensor]:
        if left and average != (place in ("rehearsed", "buckets")):
            left.clear()
            return attempt(at, average)[0]
        return real(run, average)

    train_minimal.accumulate = accumulate
    return lambda: setattr(train_minimal, "accumulate", real)


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
