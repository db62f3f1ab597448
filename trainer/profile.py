"""--profile N: look closely at N steps. Named ranges, a trace of every operator, the dearest ten.

The loop says which phase begins, to its clock (metrics.StepClock); a ProfilingClock makes a named
range of each. Inside of them the model's parts get ranges, too: each block, each replay of one, the
head. A model knows nothing of that: in such a run three functions give way to others, which open a
range and call them. No number changes, and after the run all is as it was.

    step 4     data | forward                 | backward                                | optimizer
                    | block 0 | block 1 | head |  recompute of block 1 | ... of block 0 |

The trace is torch.profiler's, or, when Nsight Systems watches the process, its own.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.checkpoint import noop_context_fn

from memory import policies
from model import Block, MiniGPT

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
        self.args, self.last = args, WARM_UP + args.profile
        self.path = beside(args.checkpoint_path, ".trace.json")
        on_gpu = process.device.type == "cuda"
        self.watched = on_gpu and "NSYS_PROFILING_SESSION_ID" in os.environ
        self.range: Range = torch.cuda.nvtx.range if self.watched else record_function
        self.phase_range, self.model_ranges = ExitStack(), ExitStack()
        self.seen: set[str] = set()  # phases that were recorded
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it has a line to say of each start and end
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        steps = schedule(wait=WARM_UP - 1, warmup=1, active=args.profile, repeat=1)
        # (acc_events: else some versions warn of cycles, of which there is one.)
        self.profile = profile(activities=kinds, schedule=steps, acc_events=True)

    def __enter__(self) -> StepClock:
        """There are ranges from now on; of those that nobody records nothing is left."""
        backward = lambda: self.phase == "backward"  # noqa: E731
        ranges = ranges_in(self.model, self.range, backward, self.args.compile)
        self.model_ranges.enter_context(ranges)
        if not self.watched:
            self.profile.start()
        return super().__enter__()

    def begin(self, phase: str) -> None:
        self.phase_range.close()
        super().begin(phase)
        self.phase_range.enter_context(self.range(phase))
        if WARM_UP <= self.steps < self.last:
            self.seen.add(phase)

    def end_step(self) -> None:
        super().end_step()
        with self.paused("profile"):
            if self.steps == WARM_UP and self.process.device.type != "cpu":
                torch.accelerator.synchronize()  # what is at work there belongs to steps before
            if self.steps == self.last:
                self.finish()
            elif self.steps < self.last and not self.watched:
                self.profile.step()
            elif self.steps == WARM_UP:
                torch.cuda.profiler.start()  # Nsight Systems records by itself, from here to stop

    def stop(self) -> None:
        self.phase_range.close()
        if self.watched:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        else:
            self.profile.stop()

    def finish(self) -> None:
        """Say what was found; of fewer steps, if a signal has ended the run."""
        self.stop()
        steps = max(0, self.steps - WARM_UP)
        between = " and ".join(sorted(self.seen & {"evaluate", "plan", "save"}))
        found = f"profile  {steps} step(s)" + f", with {between} between them" * bool(between)
        if not steps:
            found = "profile  nothing was recorded"
        elif self.watched:
            found += ", in the report that nsys writes"
        else:
            found += f", by operators' own time:\n{self.table()}\n{self.export()}"
        if self.steps < self.last:
            found += f" ({steps} of {self.args.profile} steps: the run ended)"
        self.process.say(found)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.phase_range.close()
        self.model_ranges.close()
        if self.steps < self.last and not any(exception):
            self.finish()
        elif self.steps < self.last:
            with suppress(RuntimeError):  # something else went wrong, and will say so
                self.stop()

    def table(self) -> str:
        """torch's, of the dearest operators; on a GPU of kernels too, by the time there, unless its
        driver told of none."""
        rows = self.profile.key_averages()
        where = "device" if any(row.self_device_time_total for row in rows) else "cpu"
        operators = type(rows)(row for row in rows if not row.is_user_annotation)  # no ranges
        return operators.table(sort_by=f"self_{where}_time_total", row_limit=SHOWN)

    def export(self) -> str:
        """Write the trace; returns the line that says where it is, or why it is not."""
        try:
            with TemporaryDirectory(prefix=".trace-", dir=self.path.parent) as folder:
                written = Path(folder, self.path.name)
                self.profile.export_chrome_trace(str(written))
                # Who writes it says nothing of a full disk.
                if not written.read_bytes().rstrip().endswith(b"}"):
                    raise OSError("not all of it could be written (disk full?)")
                os.replace(written, self.path)
        except (OSError, RuntimeError) as error:
            return f"warning  no trace, {self.path}: {error}"
        where = f"{self.path} ({format_bytes(self.path.stat().st_size)})"
        return f"profile  {where}: open it in https://ui.perfetto.dev or chrome://tracing"


# ---- Ranges in the model


@contextmanager
def ranges_in(
    model: MiniGPT, open_range: Range, in_backward: Callable[[], bool], compiled: bool
) -> Iterator[None]:
    """While this context is open: ranges around blocks, around replays, around the head."""
    numbers = {block: number for number, block in enumerate(model.blocks)}
    running: list[int | str] = []  # the block that is being called
    call, loss, torch_checkpoint = Block.__call__, model.head_loss, policies.torch_checkpoint

    def call_in_range(block: Block, *inputs: Any, **how: Any) -> Tensor:
        number = numbers.get(block, "of a plan")  # (see rescue.py)
        # Who calls a block in backward is the checkpoint around it: that is a replay.
        with open_range("recompute of " * in_backward() + f"block {number}"):
            running.append(number)
            try:  # (a checkpoint ends the replay half-way, by an exception)
                return call(block, *inputs, **how)
            finally:
                running.pop()

    def loss_in_range(*inputs: Any, **how: Any) -> Tensor:
        with open_range("head"):
            return loss(*inputs, **how)

    def checkpoint(run: Callable, *inputs: Tensor, **options: Any) -> Any:
        """torch's, inside of a block, with a range around the replay. (Outside of one the replay
        calls whole blocks, which have their ranges.)"""
        if running:
            forward, replay = options.get("context_fn", noop_context_fn)()
            new = open_range(f"recompute of block {running[-1]}")
            options["context_fn"] = lambda: (forward, one_in_another(new, replay))
        return torch_checkpoint(run, *inputs, **options)

    with ExitStack() as replaced:
        enter = replaced.enter_context
        enter(patch.object(Block, "__call__", call_in_range))
        # (With its keywords: check.py looks at them when a policy is tried.)
        enter(patch.object(model, "head_loss", partial(loss_in_range, **cast(Any, loss).keywords)))
        if not compiled:  # compiled blocks have their finer policies inside, in one piece
            enter(patch.object(policies, "torch_checkpoint", checkpoint))
        yield


@contextmanager
def one_in_another(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield
