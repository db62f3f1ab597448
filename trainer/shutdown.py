"""End a run: because it is done, or because of a signal, NaNs, a full disk, a lack of memory or a
mistake of the user.

The exit code tells why the run ended (see `run_safely`). A printed line says how to go on.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from data import DataError
from data.errors import MiniGPTError
from planner import PlanError

from .bootstrap import PROCESS_START
from .build import MakeProcess, set_up_from_settings
from .flags import print_error
from .metrics import finish_wandb
from .plan import POLICY_FLAG, describe_memory_flags, where_to_ask
from .report import describe_result, resume_command, sample_text
from .run import Run, is_out_of_memory
from .settings import Settings
from .snapshot import SaveError
from .torchrun import peer_failure_message


def run_safely(
    settings: Settings,
    make_process: MakeProcess,
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
        run = set_up_from_settings(settings, make_process)
        # Unlock after the run, because this process may start another run.
        with run.held_lock or nullcontext():
            try:
                code = train_and_report(run, train)
            finally:
                finish_wandb()
        process, run = run.process, None  # from here on, no hint at --resume
        process.close()
        return code
    except MiniGPTError as error:
        # --resume goes on with a run that a failed save or missing data stopped.
        stopped = isinstance(error, SaveError) or run and isinstance(error, DataError)
        print_error_line(f"{error}; then {resume_hint(run)}" if stopped else error)
        return 3 if stopped else error.exit_code
    except PlanError as error:
        print_error_line(f"--use-activation-checkpoint auto: {error}; name a policy")
        return 2
    except KeyboardInterrupt:
        print("\nstopped; --resume goes on from the last snapshot, if any", file=sys.stderr)
        return 130
    except MemoryError:
        return end_out_of_memory(settings, run, print_error_line)
    except Exception as error:
        if is_out_of_memory(error):
            return end_out_of_memory(settings, run, print_error_line)
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
    number."""
    settings, say = run.settings, run.process.print0
    if run.step >= settings.num_steps:
        say(
            f"done     already at step {run.step:,}; raise --num-steps to go on: "
            f"{resume_command(run)} --num-steps {2 * run.step}"
        )
        return 0
    seconds_before = time.perf_counter() - PROCESS_START
    record = train(run)
    if run.stop_signal and (run.step < settings.num_steps or "val_loss" not in record):
        note = (
            " (torchrun's traceback below is no crash)"
            if "TORCHELASTIC_RUN_ID" in os.environ
            else ""
        )
        say(
            f"stopped  {signal.Signals(run.stop_signal).name} after step {run.step:,}: saved{note};"
            f" go on with --resume: {resume_command(run)}"
        )
        return 128 + run.stop_signal
    if not math.isfinite(record["val_loss"]):
        raise MiniGPTError(
            f"the validation loss is not finite after the last step, {run.step}: try a lower --lr "
            f"than {settings.lr:.2g}; the weights in {settings.checkpoint_path} are of no use",
            exit_code=3,
        )
    text = sample_text(run)  # on all ranks, because the forward of a sharded model needs all
    seconds = time.perf_counter() - PROCESS_START
    say(describe_result(run, record, text, seconds_before, seconds))
    return 0


# Number of seconds after a stop signal in which further stop signals are copies of it
COPY_SECONDS = 5


class Signals:
    """Context manager that handles signals during training.

    Three signals ask the run to stop: SIGINT (Ctrl-C), SIGTERM (from a cluster) and SIGHUP (from a
    closed terminal). A signal that this process ignored before stays ignored, for example SIGHUP
    under `nohup`. Threads other than the main thread cannot handle signals, so there the context
    does nothing.

    A signal may come anywhere in a step. So the handler only sets a variable, which the loop reads
    at the end of the step. The handler also prints a line, because the step may take long. A second
    Ctrl-C ends the process at once, which is the default action of the signal.

    Programs send copies of a signal. SLURM, systemd and `timeout` send SIGTERM to all processes of
    a job, and torchrun passes the SIGTERM that it gets on to its processes. So for COPY_SECONDS,
    further signals are ignored. After that they end the process. But without torchrun a Ctrl-C is
    typed by a person, so it is no copy.
    """

    def __init__(self, run: Run):
        self.run, self.received_at = run, 0.0  # seconds of `time.monotonic`
        self.with_torchrun = "TORCHELASTIC_RUN_ID" in os.environ

    def __enter__(self) -> "Signals":
        self.before = {}
        in_main_thread = threading.current_thread() is threading.main_thread()
        for name in ("SIGINT", "SIGTERM", "SIGHUP") * in_main_thread:
            number = getattr(signal, name, None)  # Windows has only the first two
            if number and signal.getsignal(number) != signal.SIG_IGN:
                self.before[number] = signal.signal(number, self.on_signal)
        return self

    def on_signal(self, number: int, frame: object) -> None:
        """Store the signal `number`, which the loop reads at the end of the step. Print a line on
        rank 0."""
        if self.run.received_signal:
            if time.monotonic() > self.received_at + COPY_SECONDS:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return  # a copy
        self.run.received_signal, self.received_at = number, time.monotonic()
        if not self.with_torchrun and signal.SIGINT in self.before:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self.run.process.rank == 0:
            with suppress(OSError):  # not `print`: the signal may have interrupted a `print`
                os.write(2, b"\nstopping finishing this step and saving; again to stop at once\n")

    def __exit__(self, *exception: object) -> None:
        # A copy from torchrun must not end the process between its last step and its end.
        ignore = self.with_torchrun and self.run.received_signal
        for number, handler in self.before.items():
            signal.signal(number, signal.SIG_IGN if ignore else handler)


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

        Prints one warning per skip. Raises MiniGPTError after 3 skips in a row; with float16,
        after 20.

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
        limit = min(20 if float16 else 3, run.settings.num_steps)  # (no step has made an update)
        if self.in_a_row >= limit:
            flags = (
                "--amp-dtype bfloat16 or --no-amp"
                if float16
                else f"a lower --lr than {run.settings.lr:.2g}"
            )
            raise MiniGPTError(
                f"loss or gradients were not finite in {limit} steps in a row, {step - limit + 1} "
                f"to {step}: try {flags}; --detect-anomaly finds the operation; {resume_hint(run)}",
                exit_code=3,
            )
        if self.in_a_row:
            message = "loss or gradients are not finite, update skipped"
            if float16:
                message += f" (float16: the loss scale is now {run.scaler.get_scale():g})"
            run.process.print0(f"warning  step {step}: {message}")
        return self.in_a_row


def end_out_of_memory(
    settings: Settings, run: Run | None, print_error_line: Callable[[object], None]
) -> int:
    """Print the settings with which memory ran out, and the command that tells what fits. Return
    exit code 4, even if memory runs out in this function, too."""
    try:
        print_error_line(f"out of memory with {describe_out_of_memory(settings, run)}")
    except Exception:
        os.write(2, b"error: out of memory\n")
    return 4


def describe_out_of_memory(settings: Settings, run: Run | None) -> str:
    """Return the settings with which memory ran out, and what to do, as text."""
    if run is None:
        return (
            f"{describe_memory_flags(settings)}; try a smaller model (--n-layers), or less data "
            "(--max-tokens)"
        )
    now = describe_memory_flags(settings.replace(**{POLICY_FLAG: run.model.config.recompute}))
    back = f"; {resume_hint(run)}" if run.saved_step else ""
    return f"{now}; {where_to_ask(run.settings, run.process.layout)}{back}"


def resume_hint(run: Run | None) -> str:
    """Return a hint how to continue after `run` has stopped. `run`: None if the run never started.

    If the hint contains a command to paste, the command stands at the end.
    """
    if run is None or not run.saved_step:
        return "start again (nothing was saved yet)" if run else "start again"
    path = run.settings.checkpoint_path
    # (Machines without rank 0 may not see the snapshot.)
    if run.process.rank == 0 and not os.path.exists(path):
        return f"start again ({path} is gone)"
    return f"go on from {path}, step {run.saved_step}, with --resume: {resume_command(run)}"
