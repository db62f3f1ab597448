"""Stop a run because of a signal, updates that are not finite, or an error, with a line that says
how to continue.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch import Tensor

from data.errors import MiniGPTError
from planner import PlanError

from .plan import POLICY_FLAG, describe_memory_flags, plan_memory_command
from .report import resume_command
from .run import Run, is_out_of_memory
from .settings import Settings
from .torchrun import peer_failure_message


@contextmanager
def stop_signals(run: Run) -> Iterator[None]:
    """Context in which SIGINT (Ctrl-C), SIGTERM (from a cluster) and SIGHUP (from a closed
    terminal) ask the run to stop, however often they come. A second Ctrl-C ends the process at
    once.

    A signal may come anywhere in a step, so the handler only sets `run.received_signal`, which the
    loop reads at the end of the step. It also prints a line, because the step may take long. A
    signal that this process ignored before stays ignored, for example SIGHUP under `nohup`.

    torchrun passes the signals that it gets on to its processes, which may have got them already
    from a terminal or a cluster. With torchrun, therefore, a second Ctrl-C asks, too, and the
    handler stays after the run: a copy of a signal must not end the process between its last step
    and its end.
    """
    with_torchrun = "TORCHELASTIC_RUN_ID" in os.environ

    def ask(number: int, frame: object) -> None:
        hint = ""
        if number == signal.SIGINT and not with_torchrun:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            hint = "; a second Ctrl-C stops at once"
        if run.process.rank == 0 and not run.received_signal:
            with suppress(OSError):  # not `print`: the signal may have interrupted a `print`
                os.write(2, f"\nstopping finishing this step and saving{hint}\n".encode())
        run.received_signal = run.received_signal or number

    numbers = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
    before = {number: signal.getsignal(number) for number in numbers if number}  # (not on Windows)
    for number in before:
        if before[number] != signal.SIG_IGN:
            signal.signal(number, ask)
    try:
        yield
    finally:
        for number in before if not with_torchrun else ():
            signal.signal(number, before[number])


def nan_grads_if_infinite(loss: Tensor) -> Tensor:
    """Return the scalar `loss` unchanged if it is finite; else return a loss whose gradients are
    all NaN.

    An infinite loss can have finite gradients (if the logit of the right token is -inf), and with
    their finite norm the update would not be skipped. The loss is therefore multiplied by loss * 0
    + 1, which is exactly 1 if the loss is finite, else NaN.
    """
    return loss * (loss.detach() * 0 + 1)


def count_skipped_update(run: Run, grad_norm: Tensor) -> None:
    """Count the update of a step as skipped if the scalar `grad_norm` is not finite. The counters
    stay on the device, because Python would have to wait for the GPU to read them."""
    skipped = ~grad_norm.isfinite()
    run.skipped_in_a_row = (run.skipped_in_a_row + 1) * skipped
    run.skipped_updates = run.skipped_updates + skipped


def check_skipped_updates(run: Run) -> int:
    """Wait for the last step, and return how many updates were skipped in a row up to it.

    Prints a warning if updates were skipped since the last call. Raises MiniGPTError after 3 skips
    in a row; with float16, after 20.

    The limit is not 1, because a single bad batch is no reason to stop. With float16 some skips are
    normal: GradScaler searches for the largest loss scale without overflow, and halves the scale
    after each overflow. Since 16 halvings reduce its first scale, 65,536, to 1, more than 16 skips
    in a row have another cause than a scale that is too large.
    """
    in_a_row, skipped, run.skipped_updates = int(run.skipped_in_a_row), int(run.skipped_updates), 0
    limit, advice, scale = 3, f"a lower --lr than {run.settings.lr:.2g}", ""
    if run.scaler.is_enabled():
        limit, advice = 20, "--amp-dtype bfloat16 or --no-amp"
        scale = f" (float16: the loss scale is now {run.scaler.get_scale():g})"
    if in_a_row >= min(limit, run.settings.num_steps):  # (the latter: no step has made an update)
        raise MiniGPTError(
            f"loss or gradients were not finite in {in_a_row} steps in a row, "
            f"{run.step - in_a_row + 1} to {run.step}: try {advice}; --detect-anomaly finds the "
            "operation"
        )
    if skipped:
        run.process.print0(
            f"warning  step {run.step}: loss or gradients were not finite, {skipped} update"
            f"{'s' * (skipped > 1)} skipped{scale}"
        )
    return in_a_row


def describe_error(error: Exception, settings: Settings, run: Run | None) -> tuple[str, int]:
    """Return the line and the exit code with which `error` ends a run; raise `error` if it is a
    bug. `run`: None if the run has not started, or has ended."""
    hint = f"; {resume_hint(run)}" if run else ""
    if isinstance(error, MiniGPTError):
        return f"{error}{hint}", 3 if run else error.exit_code
    if isinstance(error, PlanError):
        return f"--use-activation-checkpoint auto: {error}; name a policy", 2
    if is_out_of_memory(error):
        way_out = "try a smaller model (--n-layers), or less data (--max-tokens)"
        if run:
            settings = settings.replace(**{POLICY_FLAG: run.model.config.recompute})
            way_out = plan_memory_command(run.settings, run.process.layout)
        return f"out of memory with {describe_memory_flags(settings)}; {way_out}{hint}", 4
    if line := peer_failure_message(error):
        return f"{line}{hint}", 3
    raise error


def resume_hint(run: Run) -> str:
    """Return a hint, which ends with a command, how to continue after `run` has stopped."""
    if not run.saved_step:
        return "start again (nothing was saved yet)"
    return (
        f"go on from {run.settings.checkpoint_path}, step {run.saved_step}, with --resume: "
        f"{resume_command(run)}"
    )
