"""Measure a run: the seconds of each phase, the peak memory of a step, and --profile N.

The training loop tells its clock when a phase of a step begins (StepClock). A PeakMemoryClock also
measures the peak memory of one early step, to compare it with the prediction. With --profile it
also records N steps with torch.profiler. The trace has a named range for each phase.
"""

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import profile, record_function, schedule
from torch.utils._pytree import tree_leaves

from model import MiniGPT
from planner.op_recorder import OpRecorder
from planner.operators import tensors_in

from .device import is_compiled
from .metrics import format_bytes
from .process import OneProcess
from .settings import Settings
from .snapshot import sibling_path

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
        self.seconds: dict[str, float] = defaultdict(float)  # seconds of each phase, in total
        self.phase, self.since = "set up", time.perf_counter()
        self.steps = 0
        # Number of steps, and training seconds, at the last call of `end_interval`.
        self.last_interval = 0, 0.0

    def __enter__(self) -> "StepClock":
        """Begin training."""
        self.begin_phase("data")
        return self

    def __exit__(self, *exception: object) -> None:
        self.begin_phase("end")

    def begin_phase(self, phase: str) -> None:
        """End the current phase and begin `phase`."""
        self.count_seconds()
        self.phase = phase

    def count_seconds(self) -> None:
        """Add the seconds since the last call to those of the current phase."""
        now = time.perf_counter()
        self.seconds[self.phase] += now - self.since
        self.since = now

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Count the time in the `with` block for `phase`. Then continue the interrupted phase."""
        interrupted = self.phase
        self.begin_phase(phase)
        yield
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
        steps, seconds = self.last_interval
        return (self.training_seconds() - seconds) / (self.steps - steps)

    def training_seconds(self) -> float:
        """Return the seconds of all training phases so far."""
        self.count_seconds()
        return sum(self.seconds[phase] for phase in self.TRAINING_PHASES)


class PeakMemoryClock(StepClock):
    """Clock that measures the peak memory of step MEASURED_STEP and prints it next to the
    prediction.

    On a GPU the peak comes from torch's allocator. On a CPU the planner's recorder counts the
    storages of the real step, as it counted those of the simulated one. On other devices nothing is
    measured. (On a GPU the peaks in later log lines are those since step MEASURED_STEP, too,
    because the allocator has one peak.)
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
        self.predicted, self.recorder = predicted, OpRecorder()
        self.recording = ExitStack()
        self.profiler: profile | None = None  # of --profile
        self.phase_range = ExitStack()  # the current phase's range in the trace

    def __enter__(self) -> StepClock:
        if self.profiler:
            self.profiler.start()
        return super().__enter__()

    def begin_phase(self, phase: str) -> None:
        super().begin_phase(phase)
        if self.profiler:
            self.phase_range.close()
            self.phase_range.enter_context(record_function(phase))
        starts = phase == "data" and self.steps == MEASURED_STEP - 1 and not self.recorder.storages
        # Do not measure compiled blocks: a TorchDispatchMode would make them run eagerly. Do not
        # measure a sharded model: the mode does not see how shards are gathered.
        on_cpu, unsharded = self.process.device.type == "cpu", self.process.layout.shard_degree == 1
        if starts and self.predicted and on_cpu and unsharded and not is_compiled(self.model):
            weights = [*self.model.parameters()]
            state = [weight.grad for weight in weights], [*self.optimizer.state.values()]
            for tensor in tensors_in(tree_leaves([weights, state])):
                self.recorder.add_storage(tensor)
            self.recording.enter_context(self.recorder)

    def discard_measured_memory(self) -> None:
        self.recording.close()
        self.recorder = OpRecorder()

    def expect_peak(self, peak: int) -> None:
        self.predicted = self.predicted and (peak, self.predicted[1])

    def end_step(self) -> None:
        super().end_step()
        self.recording.close()
        device = self.process.device
        if self.steps == MEASURED_STEP - 1 and device.type == "cuda":
            # The allocator's peak is that since the process started, or since this call.
            torch.cuda.reset_peak_memory_stats(device)
        if self.steps == MEASURED_STEP and self.predicted:
            self.print_peak(self.predicted)
            self.discard_measured_memory()  # the record of a large step takes memory, too
        if self.profiler:
            with self.paused("profile"):
                self.profiler.step()

    def print_peak(self, predicted: tuple[int, int]) -> None:
        """Print the measured peak, if one was measured."""
        if self.process.device.type == "cuda":
            # Use the bytes that tensors requested. The allocated bytes are some percent more,
            # because the allocator rounds up the size of each tensor.
            stats = torch.cuda.memory_stats(self.process.device)
            peak = stats.get("requested_bytes.all.peak", 0)
        else:
            peak = peak_of(self.recorder)
        step, plain = map(format_bytes, predicted)
        without = f", without recompute {plain}" if step != plain else ""
        if peak:
            self.process.print0(
                f"measured peak {format_bytes(peak)} of tensors; predicted {step}{without}"
            )

    def __exit__(self, *exception: object) -> None:
        self.recording.close()  # the recorder is still active if the measured step failed
        super().__exit__(*exception)
        if self.profiler:
            self.phase_range.close()
            self.profiler.stop()  # prints the table if the profiler is recording
            if self.steps < STEPS_BEFORE_PROFILE:
                self.process.print0("profile  nothing was recorded: the run ended too early")


def peak_of(recorder: OpRecorder) -> int:
    """Return the most bytes that the recorded storages had together, after any operator."""
    changes = Counter[float]()
    for storage in recorder.storages:
        changes[storage.born] += storage.nbytes
        changes[storage.died + 1] -= storage.nbytes
    return max(accumulate(changes[n] for n in range(recorder.n_ops + 1)))


def make_profiler(settings: Settings, clock: PeakMemoryClock) -> profile:
    """Return a profiler that records `settings.profile` steps, after STEPS_BEFORE_PROFILE steps.

    Then it prints a table of the operators with the longest self time, which is their time without
    the operators that they call, and writes the trace beside the snapshot. On a GPU the table is
    sorted by the self time on the GPU, and it also lists kernels.
    """
    path = sibling_path(settings.checkpoint_path, ".trace.json")

    def report(profiler: profile) -> None:
        rows = profiler.key_averages()
        operators = type(rows)(row for row in rows if not row.is_user_annotation)
        processor = "device" if any(row.self_device_time_total for row in rows) else "cpu"
        table = operators.table(sort_by=f"self_{processor}_time_total", row_limit=TABLE_ROWS)
        profiler.export_chrome_trace(str(path))
        clock.process.print0(
            f"profile  {clock.steps - STEPS_BEFORE_PROFILE} of {settings.profile} steps, by "
            f"operators' own time:\n{table}\n"
            f"profile  {path}: open it in https://ui.perfetto.dev or chrome://tracing"
        )

    # Without this setting Kineto, the library behind torch.profiler, prints lines of its own.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # acc_events=True: without it some versions of torch warn that they do not keep events across
    # profiling cycles, although there is only one cycle here.
    when = schedule(wait=STEPS_BEFORE_PROFILE - 1, warmup=1, active=settings.profile or 0, repeat=1)
    return profile(schedule=when, on_trace_ready=report, acc_events=True)


def make_clock(settings: Settings, process: OneProcess, *measured: Any) -> StepClock:
    """Return the clock of a run: on rank 0 a PeakMemoryClock, on all other ranks a StepClock.

    `measured`: model, optimizer and predicted peaks, which are the arguments of PeakMemoryClock
    after `process`.
    """
    if process.rank > 0:
        return StepClock()
    clock = PeakMemoryClock(process, *measured)
    if settings.profile:
        clock.profiler = make_profiler(settings, clock)
    return clock
