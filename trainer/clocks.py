"""The clocks of a run: where a step's time goes, the memory that a step takes, and --profile N.

The loop tells its clock which phase begins. A PeakMemoryClock also measures one step early in the
run, beside the prediction. A ProfilingClock also records N steps with torch.profiler, in which
phases, blocks, replays of blocks and the head are named ranges:

    step 4     data | forward                 | backward                                | optimizer
                    | block 0 | block 1 | head |  recompute of block 1 | ... of block 0 |
"""

import argparse
import os
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import profile, record_function, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import Block, MiniGPT

from .device import is_compiled
from .metrics import format_bytes
from .process import OneProcess
from .snapshot import SaveError, atomic_write, sibling_path

MEASURED_STEP = 3  # the first makes the optimizer's state, the second DDP's final buckets
# Steps before those that are profiled. In the third the profiler is at work already.
WARM_UP = 3
TABLE_ROWS = 10


class StepClock:
    """Seconds by phase, on the host's clock.

    `begin_phase(phase)` says which phase comes now: until the next one begins, time is booked to
    it. The time `with paused(phase)` is no training (evaluating, saving) and does not count. A GPU
    works on while Python runs ahead: there only the sum of the phases means something, and only
    because reading the loss waits for the GPU.
    """

    TRAINING = ("data", "forward", "backward", "optimizer", "log")

    def __init__(self) -> None:
        self.total: dict[str, float] = defaultdict(float)  # seconds by phase since the run began
        self.phase, self.since = "set up", time.perf_counter()
        self.steps = 0
        self.last_interval = 0, 0.0  # steps and seconds of training at its end

    def __enter__(self) -> "StepClock":
        """Around training."""
        return self

    def __exit__(self, *exception: object) -> None:
        self.begin_phase("end")

    def begin_phase(self, phase: str) -> None:
        self.close_phase()
        self.phase = phase

    def close_phase(self) -> None:
        """Add the time until now to the present phase."""
        now = time.perf_counter()
        self.total[self.phase] += now - self.since
        self.since = now

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        before = self.phase
        self.begin_phase(phase)
        try:
            yield
        finally:
            self.begin_phase(before)

    def discard_step(self) -> None:
        """Forget the step that has begun: it will begin again."""

    def expect_peak(self, peak: int) -> None:
        """From now on a step is predicted to take `peak` bytes."""

    def end_step(self) -> None:
        """What follows, until the next step's data, looks at the step and prints it."""
        self.begin_phase("log")
        self.steps += 1

    def end_interval(self) -> float:
        """Seconds a step took, on average, since the last call."""
        seconds = self.seconds_per_step()
        self.last_interval = self.steps, self.training_seconds()
        return seconds

    def seconds_per_step(self) -> float:
        """On average since the last `end_interval`."""
        self.close_phase()
        steps, seconds = self.last_interval
        return max(self.training_seconds() - seconds, 1e-9) / (self.steps - steps)

    def training_seconds(self) -> float:
        """Seconds of training so far, above 0."""
        return max(sum(self.total[phase] for phase in self.TRAINING), 1e-9)

    def steps_per_second(self) -> float:
        return self.steps / self.training_seconds()


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that operators take or return and that are still alive.

    Counted after each operator: memory that a kernel allocates and frees inside is not seen.
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
        """Add tensors, however they are nested."""
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


class PeakMemoryClock(StepClock):
    """Measures the peak memory of step MEASURED_STEP, and prints it beside the prediction."""

    def __init__(
        self,
        process: OneProcess,
        model: MiniGPT,
        optimizer: torch.optim.Optimizer,
        predicted: tuple[int, int] | None,
    ):
        """`predicted`: bytes at a step's peak, and without recompute; None: unknown, and nothing is
        printed."""
        super().__init__()
        self.process, self.model, self.optimizer = process, model, optimizer
        self.predicted, self.storages = predicted, LiveStorages()
        self.looking = ExitStack()

    def begin_phase(self, phase: str) -> None:
        super().begin_phase(phase)
        first = phase == "forward" and self.steps == MEASURED_STEP - 1 and not self.storages.peak
        # Compiled blocks do not run as such under a mode, and shards are gathered unseen by it.
        on_cpu, whole = self.process.device.type == "cpu", self.process.shard_degree == 1
        if first and self.predicted and on_cpu and whole and not is_compiled(self.model):
            weights = [*self.model.parameters()]
            gradients = [weight.grad for weight in weights]
            self.storages.look_at(weights, gradients, [*self.optimizer.state.values()])
            self.looking.enter_context(self.storages)

    def discard_step(self) -> None:
        self.looking.close()
        self.storages = LiveStorages()

    def expect_peak(self, peak: int) -> None:
        self.predicted = self.predicted and (peak, self.predicted[1])

    def end_step(self) -> None:
        super().end_step()
        self.looking.close()
        if self.steps != MEASURED_STEP or not self.predicted:
            return
        peak, device = self.storages.peak, self.process.device
        if device.type == "cuda":
            # The bytes asked for. (The allocator's blocks have round sizes, some percent more.)
            peak = torch.cuda.memory_stats(device).get("requested_bytes.all.peak", 0)
        if peak:
            step, plain = map(format_bytes, self.predicted)
            without = f", without recompute {plain}" if step != plain else ""
            self.process.print0(
                f"measured peak {format_bytes(peak)} of tensors; predicted {step}{without}"
            )

    def __exit__(self, *exception: object) -> None:
        self.looking.close()  # (still open if something went wrong in that step)
        super().__exit__(*exception)


class ProfilingClock(PeakMemoryClock):
    """Records `args.profile` steps after the first WARM_UP, prints torch.profiler's table of them,
    and writes their trace beside the snapshot.

    Two functions of the model give way to others that open a range and call them, until training
    ends. No number changes.
    """

    def __init__(self, args: argparse.Namespace, process: OneProcess, *measured: Any):
        super().__init__(process, *measured)
        self.asked, self.path = args.profile, sibling_path(args.checkpoint_path, ".trace.json")
        self.phase_range, self.model_ranges = ExitStack(), ExitStack()
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints lines of its own
        # (acc_events: without it some versions warn of several cycles, though there is one.)
        self.profiler = profile(
            schedule=schedule(wait=WARM_UP - 1, warmup=1, active=args.profile, repeat=1),
            on_trace_ready=self.report,
            acc_events=True,
        )

    def __enter__(self) -> StepClock:
        call, numbers = Block.__call__, {block: i for i, block in enumerate(self.model.blocks)}

        def call_in_range(block: Block, *inputs: Any, **policy: Any) -> Any:
            # In backward it is the checkpoint around a block that calls it: a replay.
            replay = "recompute of " if self.phase == "backward" else ""
            with record_function(f"{replay}block {numbers.get(block, 'of a plan')}"):
                return call(block, *inputs, **policy)

        head = cast(partial, self.model.head_loss)
        # (With its keywords: setup.py looks at them when a policy is tried.)
        head_in_range = partial(record_function("head")(head.func), **head.keywords)
        self.model_ranges.enter_context(patch.object(Block, "__call__", call_in_range))
        self.model_ranges.enter_context(patch.object(self.model, "head_loss", head_in_range))
        self.profiler.start()
        return super().__enter__()

    def begin_phase(self, phase: str) -> None:
        self.phase_range.close()
        super().begin_phase(phase)
        self.phase_range.enter_context(record_function(phase))

    def end_step(self) -> None:
        super().end_step()
        with self.paused("profile"):
            self.profiler.step()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.phase_range.close()
        self.model_ranges.close()
        self.profiler.stop()  # reports, if it is recording
        if self.steps <= WARM_UP:
            self.process.print0("profile  nothing was recorded: the run ended before")

    def report(self, profiler: profile) -> None:
        """Print the operators that took the most time themselves (on a GPU: there, kernels among
        them), and write the trace."""
        if self.steps <= WARM_UP:  # the run ended in the first of those steps
            return
        rows = profiler.key_averages()
        operators = type(rows)(row for row in rows if not row.is_user_annotation)
        where = "device" if any(row.self_device_time_total for row in rows) else "cpu"
        found = f"{self.steps - WARM_UP} of {self.asked} steps, by operators' own time"
        table = operators.table(sort_by=f"self_{where}_time_total", row_limit=TABLE_ROWS)
        self.process.print0(f"profile  {found}:\n{table}")
        try:
            with atomic_write(self.path, 0) as temporary:
                profiler.export_chrome_trace(str(temporary))
                # The function that writes it says nothing of a full disk.
                if not temporary.read_bytes().rstrip().endswith(b"}"):
                    raise OSError("not all of it could be written (disk full?)")
        except (SaveError, RuntimeError) as error:
            return self.process.print0(f"warning  no trace: {error}")
        hint = "open it in https://ui.perfetto.dev or chrome://tracing"
        self.process.print0(f"profile  {self.path}: {hint}")


def make_clock(args: argparse.Namespace, process: OneProcess, *measured: Any) -> StepClock:
    """Return the clock of a run: on rank 0 one that measures, as a PeakMemoryClock takes it
    `measured`, and with --profile one that profiles as well."""
    if process.rank > 0:
        return StepClock()
    if args.profile is None:
        return PeakMemoryClock(process, *measured)
    return ProfilingClock(args, process, *measured)
