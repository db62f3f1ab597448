"""--profile N: look closely at N steps. Named ranges, a trace of every operator, the dearest ten.

The loop says which phase begins, to its clock (metrics.StepClock); a ProfilingClock makes a named
range of each. Inside of them the model's parts get ranges, too: each block, each replay of one, the
head. A model knows nothing of that: while steps are recorded three functions give way to others,
which open a range and call them. No number changes, and afterwards all is as it was.

    step 4     data | forward                 | backward                                | optimizer
                    | block 0 | block 1 | head |  recompute of block 1 | ... of block 0 |

The trace is torch.profiler's, or, when Nsight Systems watches the process, its own.
"""

import argparse
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import noop_context_fn

import model as minigpt
from memory import TiedEmbedding, policies
from model import MiniGPT

from .flags import UsageError
from .measured import MeasuringClock
from .metrics import StepClock, format_bytes
from .process import OneProcess
from .snapshot import Resumed, beside

# Steps before those that count. The first makes the optimizer's state, has cuDNN and compilers
# choose; after it DDP sorts its buckets anew; in the third the profiler is at work already.
WARM_UP = 3
SHOWN = 10  # operators in the table
Range = Callable[[str], AbstractContextManager[Any]]  # by its name


def make_clock(args: argparse.Namespace, process: OneProcess, *measured: Any) -> StepClock:
    """The clock of a run: one that measures a step, as a MeasuringClock gets it `measured`; with
    --profile, one that profiles as well. (Process 0 alone does.)"""
    if process.rank > 0:
        return StepClock()
    if args.profile is None:
        return MeasuringClock(process, *measured)
    return ProfilingClock(args, process, *measured)


def check_profile(args: argparse.Namespace, resumed: Resumed | None) -> None:
    """Raise UsageError if the run has too few steps left to profile --profile."""
    done = resumed.state["step"] if resumed is not None else 0
    if args.profile is None or done + WARM_UP + args.profile <= args.num_steps:
        return
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # its last steps still count
        return
    raise UsageError(
        f"--profile {args.profile}: after {WARM_UP} steps of warm-up that needs --num-steps "
        f"{done + WARM_UP + args.profile} at least, not {args.num_steps}"
    )


class ProfilingClock(MeasuringClock):
    """A clock that profiles `args.profile` steps, after the first WARM_UP."""

    def __init__(self, args: argparse.Namespace, process: OneProcess, *measured: Any):
        super().__init__(process, *measured)
        self.args = args
        path = beside(args.checkpoint_path, ".trace.json")
        watched = "NSYS_PROFILING_SESSION_ID" in os.environ and process.device.type == "cuda"
        self.tool: Nsight | TorchProfiler
        self.tool = Nsight() if watched else TorchProfiler(process.device, path)
        self.recording = self.over = False
        self.seen: set[str] = set()  # phases that were recorded
        self.phase_range, self.model_ranges = ExitStack(), ExitStack()

    def begin(self, phase: str) -> None:
        self.phase_range.close()
        super().begin(phase)
        if self.recording:
            self.seen.add(phase)
            self.phase_range.enter_context(self.tool.range(phase))

    def end_step(self) -> None:
        super().end_step()
        last = WARM_UP + self.args.profile
        due = {WARM_UP - 1: self.tool.prepare, WARM_UP: self.start, last: self.finish}
        if self.steps in due:
            with self.paused("profile"):
                due[self.steps]()

    def start(self) -> None:
        ranges = ranges_in(self.model, self.tool.range, self.in_backward, self.args.compile)
        self.model_ranges.enter_context(ranges)
        if self.process.device.type != "cpu":
            torch.accelerator.synchronize()  # what is still at work there belongs to steps before
        self.tool.start()
        self.recording = True

    def in_backward(self) -> bool:
        return self.phase == "backward"

    def stop(self) -> None:
        """Leave nothing behind."""
        self.phase_range.close()
        self.model_ranges.close()
        if self.steps >= WARM_UP - 1 and not self.over:
            self.tool.stop()
        self.recording, self.over = False, True

    def finish(self) -> None:
        """Say what was found; of fewer steps, if a signal has ended the run."""
        self.stop()
        steps = max(0, self.steps - WARM_UP)
        fewer = f" ({steps} of {self.args.profile} steps: the run ended)"
        between = " and ".join(sorted(self.seen & {"evaluate", "save"}))
        what = f"{steps} step(s), with {between} between them" if between else f"{steps} step(s)"
        found = self.tool.report(what) if steps else "profile  nothing was recorded"
        self.process.say(found + fewer * (steps < self.args.profile))

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if any(exception):
            with suppress(RuntimeError):  # something else went wrong, and will say so
                self.stop()
        elif not self.over:
            self.finish()


# ---- Ranges in the model


class InRange(nn.Module):
    """A block, as the model calls it while steps are recorded: `open_range()`, then the block.

    (A module, because offload asks for the weights in it.)
    """

    def __init__(self, block: Any, open_range: Callable[[], AbstractContextManager[Any]]):
        super().__init__()
        self.block, self.add, self.open_range = block, block.add, open_range

    def forward(self, x: Tensor, policy: str = "none") -> policies.Halves:
        # A checkpoint ends the replay half-way, by an exception: `with` ends the range as well.
        with self.open_range():
            return self.block(x, policy)


@contextmanager
def ranges_in(
    model: MiniGPT, open_range: Range, in_backward: Callable[[], bool], compiled: bool
) -> Iterator[None]:
    """While this context is open: ranges around blocks, around replays, around the head."""
    running: list[int] = []  # the block that is being called

    @contextmanager
    def block_range(number: int) -> Iterator[None]:
        # Who calls a block in backward is the checkpoint around it: that is a replay.
        with open_range("recompute of " * in_backward() + f"block {number}"):
            running.append(number)
            try:
                yield
            finally:
                running.pop()

    def checkpoint(run: Callable, x: Tensor, **options: Any) -> Any:
        """torch's, inside of a block, with a range around the replay. (Outside of one the replay
        calls whole blocks, which have their ranges.)"""
        if running:
            contexts = options.get("context_fn", noop_context_fn)
            name = f"recompute of block {running[-1]}"
            options["context_fn"] = lambda: around_replay(open_range(name), *contexts())
        return torch_checkpoint(run, x, **options)

    def loss(head: TiedEmbedding, *inputs: Any) -> Tensor:
        with open_range("head"):
            return head_loss(head, *inputs)

    blocks = [InRange(block, partial(block_range, i)) for i, block in enumerate(model.blocks)]
    torch_checkpoint, head_loss = policies.torch_checkpoint, TiedEmbedding.loss
    schedule = minigpt.schedule
    with ExitStack() as replaced:
        enter = replaced.enter_context
        enter(replacing(minigpt, "schedule", lambda _, *options: schedule(blocks, *options)))
        enter(replacing(TiedEmbedding, "loss", loss))
        if not compiled:  # compiled blocks have their finer policies inside, in one piece
            enter(replacing(policies, "torch_checkpoint", checkpoint))
        yield


@contextmanager
def replacing(owner: Any, name: str, new: Any) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


Context = AbstractContextManager[Any]


def around_replay(new: Context, forward: Context, replay: Context) -> tuple[Context, Context]:
    """The two contexts of a checkpoint, with a `new` one around the second."""

    @contextmanager
    def both() -> Iterator[None]:
        with new, replay:
            yield

    return forward, both()


# ---- Who records


class TorchProfiler:
    """Every operator, and on a GPU every kernel, by torch.profiler; into a Chrome trace."""

    range = staticmethod(record_function)

    def __init__(self, device: torch.device, path: Path):
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it has a line to say of each start and end
        self.device_type, self.path = device.type, path
        on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        # (acc_events: else some versions warn of cycles, of which there is one.)
        self.profile = profile(activities=[ProfilerActivity.CPU, *on_gpu], acc_events=True)
        self.started = False

    def prepare(self) -> None:
        self.profile.prepare_trace()

    def start(self) -> None:
        self.profile.start_trace()
        self.started = True

    def stop(self) -> None:
        if not self.started:  # one that is only prepared would be in the way of the next
            self.start()
        self.profile.stop_trace()

    def report(self, what: str) -> str:
        device_type = self.device_type
        rows = operators(self.profile, device_type)
        if device_type == "cuda" and not sum(row.self_us for row in rows):
            device_type = "cpu (the driver told of no kernels)"
            rows = operators(self.profile, "cpu")
        lines = [f"profile  {what}, operators by their own time on {device_type}:"]
        return "\n".join([*lines, *table(rows), self.export()])

    def export(self) -> str:
        """Write the trace; returns the line that says where it is, or why it is not."""
        try:
            with TemporaryDirectory(prefix=".trace-", dir=self.path.parent) as folder:
                written = Path(folder, self.path.name)
                self.profile.export_chrome_trace(str(written))
                if not is_complete(written):  # who writes it says nothing of a full disk
                    raise OSError(errno.ENOSPC, "not all of it could be written (disk full?)")
                os.replace(written, self.path)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            return f"warning  no trace, {self.path}: {reason}"
        size = format_bytes(self.path.stat().st_size)
        return (
            f"profile  {self.path} ({size}): open it in https://ui.perfetto.dev or chrome://tracing"
        )


def is_complete(trace: Path) -> bool:
    """Does a JSON object end where the file ends?"""
    if not trace.exists():
        return False
    with open(trace, "rb") as file:
        file.seek(-min(100, trace.stat().st_size), os.SEEK_END)
        return file.read().rstrip().endswith(b"}")


class Nsight:
    """Ranges for Nsight Systems (`nsys profile`), which records by itself, from start to stop."""

    range = staticmethod(torch.cuda.nvtx.range)

    def prepare(self) -> None: ...

    def start(self) -> None:
        torch.cuda.profiler.start()

    def stop(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()

    def report(self, what: str) -> str:
        return f"profile  {what}, in the report that nsys writes"


class Operator(NamedTuple):
    name: str
    calls: int
    self_us: float  # without the operators that it calls


def operators(profiled: profile, device_type: str) -> list[Operator]:
    """What ran, the dearest first; on a GPU by the time of the kernels that it launched there."""
    field = "self_device_time_total" if device_type == "cuda" else "self_cpu_time_total"
    rows = [
        Operator(row.key, row.count, getattr(row, field))
        for row in profiled.key_averages()
        # Neither ranges, nor a second time the kernels, which have rows of their own.
        if not row.is_user_annotation and row.device_type == DeviceType.CPU
    ]
    return sorted(rows, key=lambda row: -row.self_us)


def table(rows: list[Operator]) -> list[str]:
    """The dearest ten, and one line for all others; shares are of the time of all of them."""
    total = sum(row.self_us for row in rows)
    others = rows[SHOWN:]
    shown = rows[:SHOWN]
    if others:
        calls, self_us = sum(row.calls for row in others), sum(row.self_us for row in others)
        shown.append(Operator(f"{len(others)} others", calls, self_us))
    width = min(60, max((len(row.name) for row in shown), default=0))
    lines = [f"         {'operator':{width}} {'calls':>7} {'self ms':>9} {'share':>6}"]
    for row in shown:
        share = row.self_us / max(total, 1e-9)
        lines.append(
            f"         {row.name[:width]:{width}} {row.calls:7,} {row.self_us / 1000:9.2f} "
            f"{share:6.1%}"
        )
    return lines
