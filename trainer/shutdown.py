"""End a run: done, or stopped by a signal, by NaNs, by a full disk or memory, or by a mistake.

Each end has its exit code, and one line that says how to go on.
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
from .metrics import finish_wandb
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
    """Set up a run and `train` it; return the exit code.

    An error that is not a bug becomes one line, printed by `complain`, and an exit code: 0 done,
    2 bad input, 3 stopped safely, 4 out of memory, 128 + n stopped by signal n. Any other error,
    which is a bug, is raised.
    """
    run = None
    try:
        run = start_run(args, make_process)
        with run.held_lock or nullcontext():  # (the process may start another run after this one)
            try:
                code = train_and_report(run, train)
            finally:
                finish_wandb()
        process = run.process
        run = None  # frees DDP's wrapper, which must end before its connections
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
        # Every process prints its own line at once, because torchrun ends the other processes soon.
        # (Without a run no hint: training may be done, as `run` is None after it, too.)
        print_error(f"{line}; {resume_hint(run)}" if run else line)
        return 3


def train_and_report(run: Run, train: Callable[[Run], dict[str, Any]]) -> int:
    """Call `train` and print the last lines of the run; return the exit code, 0 or 128 + signal.

    If data cannot be read, save the finished steps (with one process) and raise DataError.
    """
    args, say = run.args, run.process.print0
    if run.step >= args.num_steps and not run.resumed_record:
        say(
            f"done     already at step {run.step:,}; raise --num-steps to go on: "
            f"{resume_command(run)} --num-steps {2 * run.step}"
        )
        return 0
    seconds_before = time.perf_counter() - PROCESS_START
    first = run.step
    try:
        record = train(run)
    except DataError:  # a data file has disappeared or became shorter: the weights are good
        run.step = first + run.clock.steps  # the last step that was finished
        if run.step > run.saved_step and run.process.world_size == 1:
            save(run, args.checkpoint_path, {})
        raise
    if run.stopped_by and run.step < args.num_steps:
        after = f"{signal.Signals(run.stopped_by).name} after step {run.step:,}"
        say(f"stopped  {after}: saved; go on with --resume: {resume_command(run)}")
        return 128 + run.stopped_by
    text = sample_text(run)  # in all processes: the forward of a sharded model needs all
    seconds = time.perf_counter() - PROCESS_START
    say(describe_result(run, record, text, seconds_before, seconds))
    return 0


class Signals:
    """Context around training that receives signals.

    Ctrl-C (SIGINT), a cluster's SIGTERM, and a closed terminal's SIGHUP (ignored under `nohup`) ask
    the run to stop. SIGUSR1 asks it to save and go on.

    A signal may come anywhere in a step, so the handler only sets a variable, and prints a line,
    as a step may take long. A second Ctrl-C or SIGTERM ends the process at once, as it would
    without this context.
    """

    def __init__(self, run: Run):
        self.run = run

    def __enter__(self) -> "Signals":
        self.received = 0
        self.before = {}
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
            number = getattr(signal, name, None)  # Windows has only the first two
            if number and not (name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN):
                self.before[number] = signal.signal(number, self.on_signal)
        return self

    def on_signal(self, number: int, frame: object) -> None:
        """Record signal `number` for the end of this step; print a line on rank 0."""
        name = signal.Signals(number).name
        if name == "SIGUSR1":
            self.run.save_asked = True
            line = "saving   after this step, and going on"
        else:
            self.received = number
            is_hangup = name == "SIGHUP"  # ignored: shell and system may both send it
            signal.signal(number, signal.SIG_IGN if is_hangup else signal.SIG_DFL)
            again = "" if is_hangup else "; again to stop at once"
            line = f"stopping finishing this step and saving{again}"
        if self.run.process.rank == 0:
            with suppress(OSError):  # not print: the signal may have interrupted a print
                os.write(2, f"\n{line}\n".encode())

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


class NotFinite(Exception):
    """Loss or gradients were infinite or NaN in several steps in a row; training cannot go on."""


def nan_if_infinite(loss: Tensor) -> Tensor:
    """Return `loss`, (), unchanged if it is finite; else a loss whose gradients are all NaN.

    An infinite loss can have finite gradients (if the right token's logit is -inf). Then their norm
    would be finite, too, and the update would not be skipped. So the loss is multiplied by
    loss * 0 + 1: that is exactly 1 if the loss is finite, else NaN.
    """
    return loss * (loss.detach() * 0 + 1)


class SkippedUpdates:
    """Count the updates that the device skipped in a row; Python sees each one a step later.

    The gradients' norm decides whether an update is skipped, and it is in the device's memory. If
    Python read it at once, Python would wait for the GPU in each step, and then the GPU for Python.
    So the norm is copied in the background, and read during the next step, or earlier if it must be
    known (`read_last`).
    """

    def __init__(self, run: Run):
        self.run, self.in_a_row = run, 0
        self.unread: tuple[int, Tensor] | None = None  # the last step, and its norm
        # (Only a copy from a GPU runs in the background. For other devices the event does nothing.)
        on_gpu = run.process.device.type == "cuda"
        self.copied = torch.cuda.Event() if on_gpu else torch.cpu.Event()

    def add(self, grad_norm: Tensor) -> None:
        """Store the norm, (), of the step just done; read that of the step before (`read_last`)."""
        self.read_last()
        self.unread = self.run.step, grad_norm.to("cpu", non_blocking=grad_norm.is_cuda)
        self.copied.record()

    def read_last(self) -> int:
        """Return the number of updates skipped in a row, up to the last step; wait for that step.

        Prints one warning about each skip. Raises NotFinite after 3 skips in a row, with float16
        after 20.

        A single bad batch is no reason to stop. With float16 some skips are normal: GradScaler
        searches the largest scale that does not overflow, and overflows now and then. But from
        65,536 down to 1 it needs 16 halvings, so a longer series has another cause.
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
            message = "loss or gradients are not finite, update skipped"
            if float16:
                message += f" (float16: the loss scale is now {run.scaler.get_scale():g})"
            run.process.print0(f"warning  step {step}: {message}")
        return self.in_a_row


def suggest_after_out_of_memory(args: argparse.Namespace, run: Run | None) -> str:
    """Return the settings with which memory ran out, and the first change that could help."""
    if run is None:
        return f"{settings(args)}; try a smaller model (--n-layers), or less data (--max-tokens)"
    less = None
    policy = run.model.config.recompute
    with suppress(Exception):  # planning may fail for lack of memory, too
        less = run.next_smaller_step(policy)
    back = f"; {resume_hint(run)}" if run.saved_step else ""
    now = settings(with_flags(args, use_activation_checkpoint=policy))
    change = suggest_change(args, run.process.device.type, policy, less)
    return f"{now}; try {change}{back}"


def resume_hint(run: Run | None) -> str:
    """Return a hint how to continue: `run` stopped, or, if None, never began.

    A command to paste, if any, stands last.
    """
    if run and run.saved_step:
        saved = f"{run.args.checkpoint_path}, step {run.saved_step}"
        return f"go on from {saved}, with --resume: {resume_command(run)}"
    return "start again (nothing was saved yet)" if run else "start again"
