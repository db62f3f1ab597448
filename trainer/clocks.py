"""Measure a run: the seconds of its steps, the peak memory of one step, and --profile N.

The loop tells its clock when a step begins and ends, and when a phase of the step begins. With
--profile the trace of torch.profiler has a named range for each phase.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch.profiler import profile, record_function, schedule
from torch.utils._pytree import tree_leaves

from model import MiniGPT
from planner.op_recorder import OpRecorder
from planner.operators import tensors_in
from planner.timeline import live_bytes_by_op_and_kind, split_into_segments

from .metrics import format_bytes
from .process import OneProcess
from .settings import Settings
from .snapshot import sibling_path

# Number of the step whose peak memory is measured, because it is like all later ones: step 1
# allocates the optimizer's state, and step 2 allocates DDP's final buckets.
MEASURED_STEP = 3
# Number of steps before the recorded steps. In the last of them the profiler already runs, to warm
# up, and its results are dropped.
STEPS_BEFORE_PROFILE = 3
TABLE_ROWS = 10  # number of rows in the profiler's table of operators


class StepClock:
    """Clock of the training steps, as the CPU sees them.

    The time inside `with paused(phase)`, for an evaluation or a save, is no training time. A GPU
    runs kernels asynchronously, so the seconds of a single step mean little there, but their sum is
    right once the loss has been read, because reading it waits for the GPU.
    """

    def __init__(
        self,
        measure: Callable[["StepClock"], AbstractContextManager[None]] | None = None,
        predicted: tuple[int, int] | None = None,
        profiler: profile | None = None,
    ) -> None:
        """Make a clock.

        `measure(clock)`: context of step MEASURED_STEP (`measuring_peak`); None: it is not
        measured. `predicted`: peak bytes of a step, and of a step without recompute; None: unknown.
        """
        self.measure, self.predicted, self.profiler = measure, predicted, profiler
        self.start, self.paused_seconds = time.perf_counter(), 0.0
        self.steps, self.last_interval = 0, (0, 0.0)  # (steps, training seconds) at its end
        self.phase_range = ExitStack()  # the current phase's range in the trace

    def __enter__(self) -> "StepClock":
        """Begin training."""
        self.start, self.paused_seconds = time.perf_counter(), 0.0
        if self.profiler:
            self.profiler.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.profiler:
            self.profiler.stop()  # prints the table if the profiler is recording

    def begin_phase(self, phase: str) -> None:
        """End the current phase of the step and begin `phase`."""
        if self.profiler:
            self.phase_range.close()
            self.phase_range.enter_context(record_function(phase))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a training step."""
        measure = self.measure if self.steps == MEASURED_STEP - 1 else None
        with measure(self) if measure else nullcontext(), self.phase_range:
            yield
        self.steps += 1
        if self.profiler:
            with self.paused("profile"):
                self.profiler.step()

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Context whose time does not count as training time."""
        begun = time.perf_counter()
        with record_function(phase):
            yield
        self.paused_seconds += time.perf_counter() - begun

    def training_seconds(self) -> float:
        """Return the seconds of training so far."""
        return time.perf_counter() - self.start - self.paused_seconds

    def pop_mean_step_seconds(self) -> float:
        """Return the mean training seconds per step since the last call."""
        steps, seconds = self.last_interval
        self.last_interval = self.steps, self.training_seconds()
        return (self.last_interval[1] - seconds) / (self.steps - steps)


@contextmanager
def measuring_peak(
    clock: StepClock, process: OneProcess, model: MiniGPT, optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """Context of a step whose peak memory is measured, and printed beside the prediction.

    On a GPU the peak comes from torch's allocator, which has only one, so later log lines also
    show the peak since this step. On a CPU the planner's recorder counts the storages of the real
    step, as it counted those of the simulated one. If memory runs out in the step, the peak is that
    of two attempts, and is not printed.
    """
    predicted, recorder, on_gpu = clock.predicted, OpRecorder(), process.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(process.device)
    weights = [*model.parameters()]
    state = weights, [weight.grad for weight in weights], [*optimizer.state.values()]
    for tensor in tensors_in(tree_leaves(state)):
        recorder.add_storage(tensor)
    with nullcontext() if on_gpu else recorder:
        yield
    if on_gpu:
        # The bytes that tensors requested. The allocated bytes are some percent more, because the
        # allocator rounds up the size of each tensor.
        peak = torch.cuda.memory_stats(process.device)["requested_bytes.all.peak"]
    else:
        peak = live_bytes_by_op_and_kind(split_into_segments(recorder)).sum(axis=1).max()
    if predicted and predicted == clock.predicted:
        step, plain = map(format_bytes, predicted)
        without = f", without recompute {plain}" if step != plain else ""
        process.print0(f"measured peak {format_bytes(peak)} of tensors; predicted {step}{without}")


def make_profiler(settings: Settings, process: OneProcess) -> profile:
    """Return a profiler that records `settings.profile` steps, after STEPS_BEFORE_PROFILE steps,
    writes the trace beside the snapshot, and prints a table of operators.

    The table is sorted by self time, an operator's time without the operators that it calls. On a
    GPU it is the self time on the GPU, and the table also lists kernels.
    """
    path = sibling_path(settings.checkpoint_path, ".trace.json")
    processor = "device" if process.device.type == "cuda" else "cpu"

    def report(profiler: profile) -> None:
        rows = profiler.key_averages()
        operators = type(rows)(row for row in rows if not row.is_user_annotation)
        table = operators.table(sort_by=f"self_{processor}_time_total", row_limit=TABLE_ROWS)
        profiler.export_chrome_trace(str(path))
        process.print0(
            f"profile  by operators' own time:\n{table}\n"
            f"profile  {path}: open it in https://ui.perfetto.dev or chrome://tracing"
        )

    # Without this setting Kineto, the library behind torch.profiler, prints lines of its own.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # Without acc_events=True some versions of torch warn that they do not keep events across
    # profiling cycles, although there is only one cycle here.
    when = schedule(wait=STEPS_BEFORE_PROFILE - 1, warmup=1, active=settings.profile or 0, repeat=1)
    return profile(schedule=when, on_trace_ready=report, acc_events=True)


def make_clock(
    settings: Settings,
    process: OneProcess,
    model: MiniGPT,
    optimizer: torch.optim.Optimizer,
    predicted: tuple[int, int] | None,
) -> StepClock:
    """Return the clock of a run, which measures the peak and profiles on rank 0 only.

    Compiled blocks are not measured on a CPU, where a TorchDispatchMode would make them run
    eagerly, nor are sharded models, because the mode does not see how shards are gathered.
    """
    if process.rank > 0:
        return StepClock()
    on_cpu = not settings.compile and process.layout.shard_degree == 1
    seen = {"cpu": on_cpu, "cuda": True}.get(process.device.type, False)
    measure = partial(measuring_peak, process=process, model=model, optimizer=optimizer)
    profiler = make_profiler(settings, process) if settings.profile else None
    return StepClock(measure if seen and predicted else None, predicted, profiler)
