"""Measure a run: the seconds of each phase, the peak memory of a step, and --profile N.

The training loop tells its clock when a phase of a step begins (StepClock). A PeakMemoryClock also
measures the peak memory of one early step, to compare it with the prediction. A ProfilingClock also
records N steps with torch.profiler. The trace has a named range for each phase, each block, each
recompute of a block, and the head:

    step 4     data | forward                 | backward                                | optimizer
                    | block 0 | block 1 | head |  recompute of block 1 | ... of block 0 |
"""

import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import profile, record_function, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from model import MiniGPT

from .device import is_compiled
from .metrics import format_bytes
from .process import OneProcess
from .settings import Settings
from .snapshot import SaveError, sibling_path, writing_atomically

# Number of the step whose peak memory is measured. Earlier steps differ from later steps: step 1
# allocates the optimizer's state, and step 2 allocates DDP's final buckets.
MEASURED_STEP = 3
# Number of steps before the recorded steps. In the last step before them the profiler already runs,
# to warm up, but the results of this step are dropped.
STEPS_BEFORE_PROFILE = 3
TABLE_ROWS = 10  # number of rows in the profiler's table of operators


class StepClock:
    """Clock that adds up the seconds of each phase, as the CPU sees them.

    `begin_phase(phase)` begins a phase: all time until the next call counts for that phase. The
    time inside `with paused(phase)`, for an evaluation or a save, does not count as training time.

    A GPU runs kernels asynchronously: Python starts a kernel and does not wait for its end. So on a
    GPU the seconds of a single phase mean little. The sum of all phases is right, because reading
    the loss waits for the GPU.
    """

    TRAINING_PHASES = ("data", "forward", "backward", "optimizer", "log")

    def __init__(self) -> None:
        self.total: dict[str, float] = defaultdict(float)  # seconds of each phase, in total
        self.phase, self.since = "set up", time.perf_counter()
        self.steps = 0
        # Number of steps, and training seconds, at the last call of `end_interval`.
        self.last_interval = 0, 0.0

    def __enter__(self) -> "StepClock":
        """Begin training."""
        return self

    def __exit__(self, *exception: object) -> None:
        self.begin_phase("end")

    def begin_phase(self, phase: str) -> None:
        """End the current phase and begin `phase`."""
        self.close_phase()
        self.phase = phase

    def close_phase(self) -> None:
        """Add to the current phase the time since the previous call of this method."""
        now = time.perf_counter()
        self.total[self.phase] += now - self.since
        self.since = now

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Count the time in the `with` block for `phase`. Then continue the interrupted phase."""
        interrupted = self.phase
        self.begin_phase(phase)
        try:
            yield
        finally:
            self.begin_phase(interrupted)

    def discard_measured_memory(self) -> None:
        """Discard the measured memory of a step that failed and will be repeated. StepClock
        measures no memory, so it discards nothing. The seconds of the failed attempt still count.
        """

    def expect_peak(self, peak: int) -> None:
        """Set the predicted peak memory of all later steps, in bytes. StepClock ignores it."""

    def end_step(self) -> None:
        """End a step. The time until the next step begins counts for the phase "log"."""
        self.begin_phase("log")
        self.steps += 1

    def end_interval(self) -> float:
        """Return the mean training seconds per step since the last call, and begin a new
        interval."""
        seconds = self.seconds_per_step()
        self.last_interval = self.steps, self.training_seconds()
        return seconds

    def seconds_per_step(self) -> float:
        """Return the mean training seconds per step since the last call of `end_interval`."""
        self.close_phase()
        steps, seconds = self.last_interval
        return max(self.training_seconds() - seconds, 1e-9) / (self.steps - steps)

    def training_seconds(self) -> float:
        """Return the seconds of all training phases so far, at least 1e-9."""
        return max(sum(self.total[phase] for phase in self.TRAINING_PHASES), 1e-9)

    def steps_per_second(self) -> float:
        """Return the mean number of steps per second of training time so far."""
        return self.steps / self.training_seconds()


class LiveStorages(TorchDispatchMode):
    """Dispatch mode that counts the bytes of all live storages that operators read or return.

    The count is updated after each operator. So memory that one operator both allocates and frees
    is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, weakref.ref] = {}  # key: address of the storage
        self.now = self.peak = 0  # bytes that are alive now; the maximum of `now` so far

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count_tensors(args, kwargs, result)
        return result

    def count_tensors(self, *tensors: object) -> None:
        """Count the storages of all tensors in `tensors`, at any depth of lists, tuples and dicts.
        Then update the peak."""
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor):
                self.add(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed. Skip a storage that is already counted."""
        address, size = storage._cdata, storage.nbytes()
        if address in self.alive:
            return  # counted already, when an operator read or returned the same storage

        def on_free(_: weakref.ref) -> None:
            del self.alive[address]  # a later storage may get the same address
            self.now -= size

        self.alive[address] = weakref.ref(storage, on_free)
        self.now += size


class PeakMemoryClock(StepClock):
    """Clock that measures the peak memory of step MEASURED_STEP and prints it next to the
    prediction.

    On a GPU the peak comes from torch's allocator, on a CPU from LiveStorages. On other devices
    nothing is measured. (On a GPU the peaks in later log lines are those since step MEASURED_STEP,
    too, because the allocator has one peak.)
    """

    def __init__(
        self,
        process: OneProcess,
        model: MiniGPT,
        optimizer: torch.optim.Optimizer,
        predicted: tuple[int, int] | None,
    ):
        """Make the clock. It measures nothing before step MEASURED_STEP.

        `predicted`: peak bytes of a step, and of a step without recompute. None: both are unknown,
        and the clock prints nothing.
        """
        super().__init__()
        self.process, self.model, self.optimizer = process, model, optimizer
        self.predicted, self.storages = predicted, LiveStorages()
        self.looking = ExitStack()

    def begin_phase(self, phase: str) -> None:
        super().begin_phase(phase)
        measure = phase == "forward" and self.steps == MEASURED_STEP - 1 and not self.storages.peak
        # Do not measure compiled blocks: a TorchDispatchMode would make them run eagerly. Do not
        # measure a sharded model: the mode does not see how shards are gathered.
        on_cpu, unsharded = self.process.device.type == "cpu", self.process.layout.shard_degree == 1
        if measure and self.predicted and on_cpu and unsharded and not is_compiled(self.model):
            weights, states = [*self.model.parameters()], [*self.optimizer.state.values()]
            self.storages.count_tensors(weights, [weight.grad for weight in weights], states)
            self.looking.enter_context(self.storages)

    def discard_measured_memory(self) -> None:
        self.looking.close()
        self.storages = LiveStorages()

    def expect_peak(self, peak: int) -> None:
        self.predicted = self.predicted and (peak, self.predicted[1])

    def end_step(self) -> None:
        super().end_step()
        self.looking.close()
        device = self.process.device
        if self.steps == MEASURED_STEP - 1 and self.predicted and device.type == "cuda":
            # The allocator's peak is that since the process started, or since this call.
            torch.cuda.reset_peak_memory_stats(device)
        if self.steps != MEASURED_STEP or not self.predicted:
            return
        peak = self.storages.peak
        if device.type == "cuda":
            # Use the bytes that tensors requested. The allocated bytes are some percent more,
            # because the allocator rounds up the size of each tensor.
            peak = torch.cuda.memory_stats(device).get("requested_bytes.all.peak", 0)
        if peak:
            step, plain = map(format_bytes, self.predicted)
            without = f", without recompute {plain}" if step != plain else ""
            self.process.print0(
                f"measured peak {format_bytes(peak)} of tensors; predicted {step}{without}"
            )

    def __exit__(self, *exception: object) -> None:
        self.looking.close()  # LiveStorages is still active if the measured step failed
        super().__exit__(*exception)


class ProfilingClock(PeakMemoryClock):
    """Clock that records `settings.profile` steps with torch.profiler, after the first
    STEPS_BEFORE_PROFILE steps.

    Then it prints the profiler's table of operators, and writes the trace beside the snapshot.
    Until training ends, hooks of the model's modules begin and end the named ranges.
    """

    def __init__(self, settings: Settings, process: OneProcess, *measured: Any):
        super().__init__(process, *measured)
        self.asked, self.path = (
            settings.profile,
            sibling_path(settings.checkpoint_path, ".trace.json"),
        )
        self.phase_range, self.hooks = ExitStack(), ExitStack()
        # Without this setting Kineto, the library behind torch.profiler, prints lines of its own.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        # acc_events=True: without it some versions of torch warn that they do not keep events
        # across profiling cycles, although there is only one cycle here.
        self.profiler = profile(
            schedule=schedule(
                wait=STEPS_BEFORE_PROFILE - 1, warmup=1, active=settings.profile or 0, repeat=1
            ),
            on_trace_ready=self.report,
            acc_events=True,
        )

    def __enter__(self) -> StepClock:
        for i, block in enumerate(self.model.blocks):
            self.add_range(f"block {i}", block.register_forward_pre_hook, block)
        self.add_range("head", self.model.ln_f.register_forward_hook, self.model)
        self.profiler.start()
        return super().__enter__()

    def add_range(
        self, name: str, register_begin: Callable[..., RemovableHandle], module: nn.Module
    ) -> None:
        """Name a range that begins at a hook and ends when the call of `module` ends."""
        named = ExitStack()

        @torch.compiler.disable
        def begin(*_: Any) -> None:
            # In backward only an activation checkpoint calls a block, in order to recompute it.
            prefix = "recompute of " if self.phase == "backward" else ""
            named.enter_context(record_function(prefix + name))

        @torch.compiler.disable
        def end(*_: Any) -> None:
            named.close()

        self.hooks.enter_context(register_begin(begin))
        # always_call: early stop ends a recomputation by an exception.
        self.hooks.enter_context(module.register_forward_hook(end, always_call=True))

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
        self.hooks.close()
        self.profiler.stop()  # calls `self.report` if the profiler is recording
        if self.steps <= STEPS_BEFORE_PROFILE:
            self.process.print0("profile  nothing was recorded: the run ended too early")

    def report(self, profiler: profile) -> None:
        """Print a table of the operators with the longest self time, which is their time without
        the operators that they call. Write the trace to `self.path`.

        On a GPU the table is sorted by the self time on the GPU, and it also lists kernels.
        """
        if self.steps <= STEPS_BEFORE_PROFILE:  # the run ended before a profiled step was complete
            return
        rows = profiler.key_averages()
        operators = type(rows)(row for row in rows if not row.is_user_annotation)
        processor = "device" if any(row.self_device_time_total for row in rows) else "cpu"
        summary = (
            f"{self.steps - STEPS_BEFORE_PROFILE} of {self.asked} steps, by operators' own time"
        )
        table = operators.table(sort_by=f"self_{processor}_time_total", row_limit=TABLE_ROWS)
        self.process.print0(f"profile  {summary}:\n{table}")
        try:
            with writing_atomically(self.path, 0) as temporary:
                profiler.export_chrome_trace(str(temporary))
                # export_chrome_trace reports no error when the disk is full. So check that the file
                # ends with "}", as every complete trace does.
                if not temporary.read_bytes().rstrip().endswith(b"}"):
                    raise OSError("not all of it could be written (disk full?)")
        except (SaveError, RuntimeError) as error:
            return self.process.print0(f"warning  no trace: {error}")
        hint = "open it in https://ui.perfetto.dev or chrome://tracing"
        self.process.print0(f"profile  {self.path}: {hint}")


def make_clock(settings: Settings, process: OneProcess, *measured: Any) -> StepClock:
    """Return the clock of a run: on rank 0 a PeakMemoryClock or, with --profile, a ProfilingClock;
    on all other ranks a StepClock.

    `measured`: model, optimizer and predicted peaks, which are the arguments of PeakMemoryClock
    after `process`.
    """
    if process.rank > 0:
        return StepClock()
    if settings.profile is None:
        return PeakMemoryClock(process, *measured)
    return ProfilingClock(settings, process, *measured)
