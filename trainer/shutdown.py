"""End a run: because it is done, or because of a signal, NaNs, a full disk, a lack of memory or a
mistake of the user.

The exit code tells why the run ended (see `run_safely`). A printed line says how to go on.
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
from .plan import PredictedOutOfMemory, describe_memory_flags, describe_suggested_change
from .process import OneProcess
from .report import describe_result, resume_command, sample_text
from .run import Run, is_out_of_memory, save
from .setup import set_up_from_flags
from .snapshot import SaveError, SnapshotError
from .torchrun import peer_failure_message


def run_safely(
    args: argparse.Namespace,
    make_process: Callable[[argparse.Namespace], OneProcess],
    train: Callable[[Run], dict[str, Any]],
    print_error_line: Callable[[object], None] = print_error,
) -> int:
    """Set up a run and `train` it; return the exit code: 0 done, 2 bad input, 3 stopped safely, 4
    out of memory, 128 + n stopped by signal n.

    If an error is not a bug, `print_error_line` prints it as one line. Any other error is a bug,
    and is raised.
    """
    run = None
    try:
        run = set_up_from_flags(args, make_process)
        # Unlock after the run, because this process may start another run.
        with run.held_lock or nullcontext():
            try:
                code = train_and_report(run, train)
            finally:
                finish_wandb()
        process = run.process
        run = None  # frees DDP's wrapper, which must be freed before its connections close
        process.close()
        return code
    except (UsageError, SnapshotError, NotFinite, PredictedOutOfMemory) as error:
        print_error_line(error)
        return {NotFinite: 3, PredictedOutOfMemory: 4}.get(type(error), 2)
    except DataError as error:
        print_error_line(f"{error}; then {resume_hint(run)}" if run else error)
        return 3 if run or isinstance(error, DiskFull) else 2
    except SaveError as error:
        print_error_line(f"{error}; make room, then {resume_hint(run)}")
        return 3
    except KeyboardInterrupt:
        last = "the last snapshot, if there is one"
        print(f"\nstopped; --resume goes on from {last}", file=sys.stderr)
        return 130
    except Exception as error:
        if is_out_of_memory(error):
            print_error_line(f"out of memory with {suggest_after_out_of_memory(args, run)}")
            return 4
        line = peer_failure_message(error)
        if line is None:
            raise
        # Every process prints its own line at once, because torchrun will soon end all processes.
        # (`print_error_line` may wait, so it is not used.) `run` is None before the end of the
        # setup, but also after training, when there is nothing to resume. So if `run` is None,
        # print no hint.
        print_error(f"{line}; {resume_hint(run)}" if run else line)
        return 3


def train_and_report(run: Run, train: Callable[[Run], dict[str, Any]]) -> int:
    """Call `train` and print the last lines of the run. Return the exit code: 0, or 128 + signal
    number.

    If data cannot be read, save the finished steps (only with one process), and raise DataError.
    """
    args, say = run.args, run.process.print0
    if run.step >= args.num_steps and not run.unlogged_record:
        say(
            f"done     already at step {run.step:,}; raise --num-steps to go on: "
            f"{resume_command(run)} --num-steps {2 * run.step}"
        )
        return 0
    seconds_before = time.perf_counter() - PROCESS_START
    first = run.step
    try:
        record = train(run)
    except DataError:  # a data file was deleted or shortened; the weights are good
        run.step = first + run.clock.steps  # the last finished step
        if run.step > run.saved_step and run.process.world_size == 1:
            save(run, args.checkpoint_path, {})
        raise
    if run.stop_signal and run.step < args.num_steps:
        after = f"{signal.Signals(run.stop_signal).name} after step {run.step:,}"
        note = (
            " (torchrun's traceback below is no crash)"
            if "TORCHELASTIC_RUN_ID" in os.environ
            else ""
        )
        say(f"stopped  {after}: saved{note}; go on with --resume: {resume_command(run)}")
        return 128 + run.stop_signal
    text = sample_text(run)  # on all ranks, because the forward of a sharded model needs all
    seconds = time.perf_counter() - PROCESS_START
    say(describe_result(run, record, text, seconds_before, seconds))
    return 0


class Signals:
    """Context manager that handles signals during training.

    Three signals ask the run to stop: SIGINT (Ctrl-C), SIGTERM (from a cluster) and SIGHUP (from a
    closed terminal; ignored under `nohup`). SIGUSR1 asks the run to save and to go on.

    A signal may come anywhere in a step. So the handler only sets a variable, which the loop reads
    at the end of the step. The handler also prints a line, because the step may take long. A second
    Ctrl-C or SIGTERM ends the process at once, which is the default action of these signals.
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
        """Store the signal `number`, which the loop reads at the end of the step. Print a line on
        rank 0."""
        name = signal.Signals(number).name
        if name == "SIGUSR1":
            self.run.save_requested = True
            line = "saving   after this step, and going on"
        else:
            self.received = number
            is_hangup = name == "SIGHUP"  # shell and system may both send SIGHUP: ignore the second
            signal.signal(number, signal.SIG_IGN if is_hangup else signal.SIG_DFL)
            again = "" if is_hangup else "; again to stop at once"
            line = f"stopping finishing this step and saving{again}"
        if self.run.process.rank == 0:
            with suppress(OSError):  # not `print`: the signal may have interrupted a `print`
                os.write(2, f"\n{line}\n".encode())

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


class NotFinite(Exception):
    """Error: loss or gradients were infinite or NaN in several steps in a row. Training cannot go
    on."""


def nan_grads_if_infinite(loss: Tensor) -> Tensor:
    """Return the scalar `loss` unchanged if it is finite; else return a loss whose gradients are
    all NaN.

    An infinite loss can have finite gradients (if the logit of the right token is -inf). Then the
    norm of the gradients would also be finite, and the update would not be skipped. So the loss is
    multiplied by the factor loss * 0 + 1. The factor is exactly 1 if the loss is finite, else NaN.
    """
    return loss * (loss.detach() * 0 + 1)


class SkippedUpdateCounter:
    """Count the updates that the device skipped in a row. Python learns one step later whether an
    update was skipped.

    The norm of the gradients decides whether the device skips an update, and the norm is in the
    device's memory. If Python read the norm at once, Python would wait for the GPU in each step,
    and then the GPU would wait for Python. So the norm is copied to the CPU in the background, and
    read during the next step. `count_skips_in_a_row` reads the norm earlier, if the number of skips
    is needed at once.
    """

    def __init__(self, run: Run):
        self.run, self.in_a_row = run, 0
        self.unread_norm: tuple[int, Tensor] | None = None  # number and norm of the last step
        # (Only a copy from a GPU runs in the background. For other devices the event does nothing.)
        on_gpu = run.process.device.type == "cuda"
        self.copied = torch.cuda.Event() if on_gpu else torch.cpu.Event()

    def add_grad_norm(self, grad_norm: Tensor) -> None:
        """Store the scalar norm of the step that has just ended. First read the norm of the step
        before."""
        self.count_skips_in_a_row()
        self.unread_norm = self.run.step, grad_norm.to("cpu", non_blocking=grad_norm.is_cuda)
        self.copied.record()

    def count_skips_in_a_row(self) -> int:
        """Wait for the last step. Return how many updates were skipped in a row, up to that step.

        Prints one warning per skip. Raises NotFinite after 3 skips in a row; with float16, after
        20.

        The limit is not 1, because a single bad batch is no reason to stop. With float16 some skips
        are normal: GradScaler searches for the largest loss scale without overflow, so there is an
        overflow now and then. GradScaler halves the scale after each overflow. 16 halvings reduce
        its first scale, 65,536, to 1. So more than 16 skips in a row have a cause other than a
        scale that is too large.
        """
        if self.unread_norm is None:
            return self.in_a_row
        self.copied.synchronize()
        (step, norm), self.unread_norm = self.unread_norm, None
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
    """Return the settings with which memory ran out, and the first change that could help, as
    text."""
    if run is None:
        return (
            f"{describe_memory_flags(args)}; try a smaller model (--n-layers), or less data "
            "(--max-tokens)"
        )
    less = None
    policy = run.model.config.recompute
    with suppress(Exception):  # planning may run out of memory, too
        less = run.predict_step_with_less_memory(policy)
    back = f"; {resume_hint(run)}" if run.saved_step else ""
    now = describe_memory_flags(with_flags(args, use_activation_checkpoint=policy))
    change = describe_suggested_change(args, run.process.device.type, policy, less)
    return f"{now}; try {change}{back}"


def resume_hint(run: Run | None) -> str:
    """Return a hint how to continue after `run` has stopped. `run`: None if the run never started.

    If the hint contains a command to paste, the command stands at the end.
    """
    if run and run.saved_step:
        saved = f"{run.args.checkpoint_path}, step {run.saved_step}"
        return f"go on from {saved}, with --resume: {resume_command(run)}"
    return "start again (nothing was saved yet)" if run else "start again"
