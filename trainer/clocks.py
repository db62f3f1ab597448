"""Clocks of a run: the time of each phase of a step, the peak memory of a step, and --profile N.

The training loop tells its clock which phase begins. A PeakMemoryClock also measures one step early
in the run, to compare with the prediction. A ProfilingClock also records N steps with
torch.profiler, in which phases, blocks, replays of blocks and the head are named ranges:

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

MEASURED_STEP = 3  # step 1 makes the optimizer's state, step 2 DDP's final buckets
# Steps before the profiled ones. The profiler already works in the last of them, as its warm-up.
WARM_UP = 3
TABLE_ROWS = 10  # of the profiler's table


class StepClock:
    """Seconds by phase, on the host's clock.

    `begin_phase(phase)` begins a phase: all time until the next call counts for that phase. Time in
    `with paused(phase)` (evaluating, saving) is no training time. A GPU works on while Python runs
    ahead. So on a GPU only the sum of the phases is meaningful, and only because reading the loss
    waits for the GPU.
    """

    TRAINING = ("data", "forward", "backward", "optimizer", "log")

    def __init__(self) -> None:
        self.total: dict[str, float] = defaultdict(float)  # seconds by phase since the run began
        self.phase, self.since = "set up", time.perf_counter()
        self.steps = 0
        self.last_interval = 0, 0.0  # steps and training seconds at the last `end_interval`

    def __enter__(self) -> "StepClock":
        """Begin training."""
        return self

    def __exit__(self, *exception: object) -> None:
        self.begin_phase("end")

    def begin_phase(self, phase: str) -> None:
        """End the present phase, and begin another one."""
        self.close_phase()
        self.phase = phase

    def close_phase(self) -> None:
        """Add the time until now to the present phase."""
        now = time.perf_counter()
        self.total[self.phase] += now - self.since
        self.since = now

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Count the time inside for `phase`, then return to the phase before."""
        interrupted = self.phase
        self.begin_phase(phase)
        try:
            yield
        finally:
            self.begin_phase(interrupted)

    def discard_step(self) -> None:
        """Forget the measurements of a step that failed and will be done again."""

    def expect_peak(self, peak: int) -> None:
        """Set the predicted peak of the steps to come, in bytes."""

    def end_step(self) -> None:
        """End a step. The time until the next step's data counts as "log"."""
        self.begin_phase("log")
        self.steps += 1

    def end_interval(self) -> float:
        """Return the mean seconds of a step since the last call, and begin a new interval."""
        seconds = self.seconds_per_step()
        self.last_interval = self.steps, self.training_seconds()
        return seconds

    def seconds_per_step(self) -> float:
        """Return the mean seconds of a step since the last `end_interval`."""
        self.close_phase()
        steps, seconds = self.last_interval
        return max(self.training_seconds() - seconds, 1e-9) / (self.steps - steps)

    def training_seconds(self) -> float:
        """Return the seconds of training so far, always above 0."""
        return max(sum(self.total[phase] for phase in self.TRAINING), 1e-9)

    def steps_per_second(self) -> float:
        """Return the steps per second of training so far."""
        return self.steps / self.training_seconds()


class LiveStorages(TorchDispatchMode):
    """Count the bytes of all live storages that operators take or return.

    The count is taken after each operator: memory that a kernel allocates and frees inside is not
    seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, weakref.ref] = {}  # by address of the storage
        self.now = self.peak = 0  # bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.look_at(args, kwargs, result)
        return result

    def look_at(self, *tensors: object) -> None:
        """Add the storages of all tensors in these arguments, however nested, and update the
        peak."""
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor):
                self.add(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed; a storage that is counted already is skipped."""
        address, size = storage._cdata, storage.nbytes()
        if address in self.alive:
            return  # a view, or the result of an in-place operator

        def on_free(_: weakref.ref) -> None:
            del self.alive[address]  # another storage may get this address
            self.now -= size

        self.alive[address] = weakref.ref(storage, on_free)
        self.now += size


class PeakMemoryClock(StepClock):
    """Clock that measures the peak memory of step MEASURED_STEP and prints it next to the
    prediction.

    A GPU's peak comes from torch's allocator. On a CPU LiveStorages counts tensors.
    """

    def __init__(
        self,
        process: OneProcess,
        model: MiniGPT,
        optimizer: torch.optim.Optimizer,
        predicted: tuple[int, int] | None,
    ):
        """Set up the clock; it measures nothing yet. `predicted`: peak bytes of a step, and of a
        step without recompute; None: unknown, and nothing is printed."""
        super().__init__()
        self.process, self.model, self.optimizer = process, model, optimizer
        self.predicted, self.storages = predicted, LiveStorages()
        self.looking = ExitStack()

    def begin_phase(self, phase: str) -> None:
        super().begin_phase(phase)
        measure = phase == "forward" and self.steps == MEASURED_STEP - 1 and not self.storages.peak
        # A TorchDispatchMode makes compiled blocks run eagerly, and it does not see how shards are
        # gathered: neither is measured.
        on_cpu, unsharded = self.process.device.type == "cpu", self.process.shard_degree == 1
        if measure and self.predicted and on_cpu and unsharded and not is_compiled(self.model):
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
            # Requested bytes: the allocator rounds its blocks up, which adds some percent.
            peak = torch.cuda.memory_stats(device).get("requested_bytes.all.peak", 0)
        if peak:
            step, plain = map(format_bytes, self.predicted)
            without = f", without recompute {plain}" if step != plain else ""
            self.process.print0(
                f"measured peak {format_bytes(peak)} of tensors; predicted {step}{without}"
            )

    def __exit__(self, *exception: object) -> None:
        self.looking.close()  # still open if the measured step failed
        super().__exit__(*exception)


class ProfilingClock(PeakMemoryClock):
    """Clock that records `args.profile` steps after the first WARM_UP, prints torch.profiler's
    table of them, and writes their trace beside the snapshot.

    Until training ends, it replaces Block.__call__ and model.head_loss by functions that open a
    named range and call the original. No number changes.
    """

    def __init__(self, args: argparse.Namespace, process: OneProcess, *measured: Any):
        super().__init__(process, *measured)
        self.asked, self.path = args.profile, sibling_path(args.checkpoint_path, ".trace.json")
        self.phase_range, self.model_ranges = ExitStack(), ExitStack()
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise Kineto prints its own lines
        # acc_events: without it some versions warn of several cycles, though there is only one.
        self.profiler = profile(
            schedule=schedule(wait=WARM_UP - 1, warmup=1, active=args.profile, repeat=1),
            on_trace_ready=self.report,
            acc_events=True,
        )

    def __enter__(self) -> StepClock:
        call, indices = Block.__call__, {block: i for i, block in enumerate(self.model.blocks)}

        def call_in_range(block: Block, *inputs: Any, **policy: Any) -> Any:
            # In backward only an activation checkpoint calls a block: to recompute it.
            prefix = "recompute of " if self.phase == "backward" else ""
            with record_function(f"{prefix}block {indices.get(block, 'of a plan')}"):
                return call(block, *inputs, **policy)

        head = cast(partial, self.model.head_loss)
        # Keep the partial's keywords: setup.py reads them when it checks a policy.
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
        self.profiler.stop()  # calls `report` if it is recording
        if self.steps <= WARM_UP:
            self.process.print0("profile  nothing was recorded: the run ended before")

    def report(self, profiler: profile) -> None:
        """Print the operators that took the most time themselves, and write the trace.

        On a GPU the time on the GPU counts, and the table lists kernels, too.
        """
        if self.steps <= WARM_UP:  # the run ended before a profiled step was complete
            return
        rows = profiler.key_averages()
        operators = type(rows)(row for row in rows if not row.is_user_annotation)
        processor = "device" if any(row.self_device_time_total for row in rows) else "cpu"
        summary = f"{self.steps - WARM_UP} of {self.asked} steps, by operators' own time"
        table = operators.table(sort_by=f"self_{processor}_time_total", row_limit=TABLE_ROWS)
        self.process.print0(f"profile  {summary}:\n{table}")
        try:
            with atomic_write(self.path, 0) as temporary:
                profiler.export_chrome_trace(str(temporary))
                # export_chrome_trace reports no error when the disk is full.
                if not temporary.read_bytes().rstrip().endswith(b"}"):
                    raise OSError("not all of it could be written (disk full?)")
        except (SaveError, RuntimeError) as error:
            return self.process.print0(f"warning  no trace: {error}")
        hint = "open it in https://ui.perfetto.dev or chrome://tracing"
        self.process.print0(f"profile  {self.path}: {hint}")


def make_clock(args: argparse.Namespace, process: OneProcess, *measured: Any) -> StepClock:
    """Return the clock of a run: on rank 0 a PeakMemoryClock, with --profile a ProfilingClock; on
    other ranks a StepClock.

    `measured`: the arguments of PeakMemoryClock after `process`.
    """
    if process.rank > 0:
        return StepClock()
    if args.profile is None:
        return PeakMemoryClock(process, *measured)
    return ProfilingClock(args, process, *measured)
