"""How a run ends: done, stopped by a signal, by NaNs, by a full disk or memory, by a mistake.

Each has its exit code and one line that says how to go on.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from data import DataError, DiskFull

from .bootstrap import PROCESS_START
from .flags import UsageError, print_error, with_flags
from .metrics import finish_logs
from .plan import PredictedOutOfMemory, settings, suggest_change
from .process import OneProcess
from .report import describe_result, resume_command, sample_text
from .run import Run, is_out_of_memory, save
from .setup import start_run
from .snapshot import SaveError, SnapshotError
from .torchrun import peer_failure_message


def run_safely(
    args: argparse.Namespace,
    make_process: Callable[[argparse.Namespace], OneProcess],
    train: Callable[[Run], dict[str, Any]],
    complain: Callable[[object], None] = print_error,
) -> int:
    """Set up and `train`; turn what went wrong, unless it is a bug, into one line and an exit code.

    0 done, 2 bad input, 3 stopped safely, 4 out of memory, 128 + n stopped by signal n.
    """
    run = None
    try:
        run = start_run(args, make_process)
        with run.held_lock or nullcontext():  # (a process that lives on may start another run)
            try:
                code = train_and_tell(run, train)
            finally:
                finish_logs()
        process = run.process
        run = None  # and with it DDP's wrapper: it must go before its connections do. (None of
        # the lines below needs it any more.)
        process.close()
        return code
    except (UsageError, SnapshotError, NotFinite, PredictedOutOfMemory) as error:
        complain(error)
        return {NotFinite: 3, PredictedOutOfMemory: 4}.get(type(error), 2)
    except DataError as error:
        complain(f"{error}; then {resume_hint(run)}" if run else error)
        return 3 if run or isinstance(error, DiskFull) else 2
    except SaveError as error:
        complain(f"{error}; make room, then {resume_hint(run)}")
        return 3
    except KeyboardInterrupt:
        last = "the last snapshot, if there is one"
        print(f"\nstopped; --resume goes on from {last}", file=sys.stderr)
        return 130
    except Exception as error:
        if is_out_of_memory(error):
            complain(f"out of memory with {suggest_after_out_of_memory(args, run)}")
            return 4
        line = peer_failure_message(error)
        if line is None:
            raise
        # (Without a run it may be done.) Each at once: torchrun ends those that live.
        print_error(f"{line}; {resume_hint(run)}" if run else line)
        return 3


def train_and_tell(run: Run, train: Callable[[Run], dict[str, Any]]) -> int:
    """`train`, and the last lines of a run that was not in vain; returns the exit code."""
    args, say = run.args, run.process.print0
    if run.step >= args.num_steps and not run.pending_record:
        say(
            f"done     already at step {run.step:,}; raise --num-steps to go on: "
            f"{resume_command(run)} --num-steps {2 * run.step}"
        )
        return 0
    seconds_before = time.perf_counter() - PROCESS_START
    first = run.step
    try:
        record = train(run)
    except DataError:  # a file that was there is gone, or shorter: the weights are good
        run.step = first + run.clock.steps  # those that were finished
        if run.step > run.saved_step and run.process.world_size == 1:
            save(run, args.checkpoint_path, {})
        raise
    if run.stopped_by and run.step < args.num_steps:
        after = f"{signal.Signals(run.stopped_by).name} after step {run.step:,}"
        say(f"stopped  {after}: saved; go on with --resume: {resume_command(run)}")
        return 128 + run.stopped_by
    text = sample_text(run)  # by all: if the model is sharded, each forward needs all
    seconds = time.perf_counter() - PROCESS_START
    say(describe_result(run, record, text, seconds_before, seconds))
    return 0


class Signals:
    """What is asked of a run from outside: to stop, by Ctrl-C (SIGINT), a cluster's SIGTERM, or a
    terminal that is closed (SIGHUP, which `nohup` has it ignore); or to save and go on (SIGUSR1).

    A context around training. The handler only takes a note (and says so, as a step may be long):
    the signal may come anywhere in the step. A second Ctrl-C or SIGTERM does what signals do: it
    ends the process at once.
    """

    def __init__(self, run: Run):
        self.run = run

    def __enter__(self) -> "Signals":
        self.received = 0
        self.before = {}
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
            number = getattr(signal, name, None)  # Windows has the first two
            if number and not (name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN):
                self.before[number] = signal.signal(number, self.on_signal)
        return self

    def on_signal(self, number: int, frame: object) -> None:
        name = signal.Signals(number).name
        if name == "SIGUSR1":
            self.run.save_asked = True
            line = "saving   after this step, and going on"
        else:
            self.received = number
            is_hangup = name == "SIGHUP"  # shell and system may both send it
            signal.signal(number, signal.SIG_IGN if is_hangup else signal.SIG_DFL)
            again = "" if is_hangup else "; again to stop at once"
            line = f"stopping finishing this step and saving{again}"
        if self.run.process.rank == 0:
            with suppress(OSError):  # not print: the signal may have come in the middle of one
                os.write(2, f"\n{line}\n".encode())

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


class NotFinite(Exception):
    """Training cannot go on: infinities and NaNs, step after step."""


def nan_if_infinite(loss: Tensor) -> Tensor:
    """The same loss, if it is finite; else one whose gradients are all NaN.

    An infinite loss can have finite gradients (the right token's logit is -inf): nothing would be
    wrong with the gradients' norm, by which a step is skipped. inf * 0 + 1 is NaN, and so is all
    that it is multiplied with; a finite loss is multiplied by exactly 1.
    """
    return loss * (loss.detach() * 0 + 1)


class SkippedUpdates:
    """How many updates in a row the device has skipped; Python learns of each one step late.

    What decides, the gradients' norm, is in the device's memory. Reading it right away would make
    Python wait for a GPU in each step, and then the GPU for Python. So it is copied while both work
    on, and looked at when the next step is on its way, or when it has to be known (`read_last`).
    """

    def __init__(self, run: Run):
        self.run, self.in_a_row = run, 0
        self.unread: tuple[int, Tensor] | None = None  # a step, and the norm that was its own
        # (Only a GPU's copy is in the background. Elsewhere this event does nothing.)
        on_gpu = run.process.device.type == "cuda"
        self.copied = torch.cuda.Event() if on_gpu else torch.cpu.Event()

    def add(self, grad_norm: Tensor) -> None:
        """Take the norm () of the step just done; look at the one before, as `read_last` does."""
        self.read_last()
        self.unread = self.run.step, grad_norm.to("cpu", non_blocking=grad_norm.is_cuda)
        self.copied.record()

    def read_last(self) -> int:
        """How many in a row, the step just done included; waits for it. Says of each one, once,
        that it was skipped. Raises NotFinite after too many.

        A single bad batch is no reason to stop. Nor is float16, whose GradScaler looks for the
        largest scale that just does not overflow, by overflowing now and then; but from 65,536
        down to 1 it needs 16 halvings, so a longer series has another reason.
        """
        if self.unread is None:
            return self.in_a_row
        self.copied.synchronize()
        (step, norm), self.unread = self.unread, None
        self.in_a_row = 0 if norm.isfinite() else self.in_a_row + 1
        run, float16 = self.run, self.run.scaler.is_enabled()
        limit = 20 if float16 else 3
        if self.in_a_row >= limit:
            lower = f"a lower --lr than {run.args.lr:.2g}"
            flags = "--amp-dtype bfloat16 or --no-amp" if float16 else lower
            raise NotFinite(
                f"loss or gradients were not finite in {limit} steps in a row, {step - limit + 1} "
                f"to {step}: try {flags}; --detect-anomaly finds the operation; {resume_hint(run)}"
            )
        if self.in_a_row:
            what = "loss or gradients are not finite, update skipped"
            if float16:
                what += f" (float16: the loss scale is now {run.scaler.get_scale():g})"
            run.process.print0(f"warning  step {step}: {what}")
        return self.in_a_row


def suggest_after_out_of_memory(args: argparse.Namespace, run: Run | None) -> str:
    """Return the settings that memory ran out with, and the first change that could help."""
    if run is None:
        return f"{settings(args)}; try a smaller model (--n-layers), or less data (--max-tokens)"
    less = None
    policy = run.model.config.recompute
    with suppress(Exception):  # there may be no memory to plan with
        less = run.next_policy(policy)
    now = settings(with_flags(args, use_activation_checkpoint=policy))
    back = f"; {resume_hint(run)}" if run.saved_step else ""
    return f"{now}; try {suggest_change(args, run.process.device.type, less)}{back}"


def resume_hint(run: Run | None) -> str:
    """Say what to do when training had to stop, or (None) did not begin; a command stands last."""
    if run and run.saved_step:
        saved = f"{run.args.checkpoint_path}, step {run.saved_step}"
        return f"go on from {saved}, with --resume: {resume_command(run)}"
    return "start again (nothing was saved yet)" if run else "start again"
