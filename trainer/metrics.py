"""Compute perplexity and peak memory; write log records to metrics.jsonl and to the logger of
--log-to; format the log line for the user."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from data.errors import MiniGPTError
from planner.units import format_bytes

from .settings import Settings
from .snapshot import SaveError, State, describe_save_error, sibling_path, writing_atomically


def perplexity(loss: float) -> float:
    """Return the perplexity exp(loss) for a loss in nats: the number of equally likely tokens that
    would give the same loss. From 710 nats on the result is infinite."""
    return math.inf if loss > 709.78 else math.exp(loss)


def peak_memory_fields(device: torch.device) -> dict[str, Any]:
    """Return the peak memory of this process so far, as fields of a log record.

    peak_memory_kind: "cuda" for a GPU, else "rss".
    peak_memory_bytes: peak in bytes. For "cuda" it is the memory of tensors, as PyTorch's
        allocator counts it. For "rss" it is the resident memory of the whole process, with
        Python and libraries (None on Windows).
    peak_memory_share: only for "cuda": the peak as a share of the GPU's memory, 0 to 1.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        share = peak / torch.cuda.get_device_properties(device).total_memory
        return {"peak_memory_bytes": peak, "peak_memory_share": share, "peak_memory_kind": "cuda"}
    if sys.platform == "win32":
        return {"peak_memory_bytes": None, "peak_memory_kind": "rss"}
    import resource  # Windows has none

    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_memory_bytes": peak, "peak_memory_kind": "rss"}


# ---- Writers. A writer is a function that writes one log record.

LogRecord = dict[str, Any]
Write = Callable[[LogRecord], object]
Say = Callable[[str], None]  # prints a line


def open_metrics(path: Path, resumed_step: int) -> Write:
    """Return the writer of metrics.jsonl (one JSON object per line), which passes each line to
    the operating system before it returns.

    A new run (`resumed_step` 0) begins a new file; a resumed run continues the file without the
    lines of steps after `resumed_step`, because those steps will be repeated. Both this function
    and the writer raise SaveError if they cannot write.
    """
    records = read_metrics(path) if resumed_step and path.exists() else []
    kept = [r for r in records if r["step"] <= resumed_step]
    text = "".join(json.dumps(r) + "\n" for r in kept)
    with writing_atomically(path, len(text)) as temporary:
        temporary.write_text(text, encoding="utf-8")

    def write(record: LogRecord) -> None:
        # JSON has no NaN and no infinity; every JSON reader accepts null.
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        line = json.dumps(finite) + "\n"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise SaveError(describe_save_error(path, error, len(line)), exit_code=3) from None

    return write


def read_metrics(path: Path) -> list[LogRecord]:
    """Return the records of a metrics.jsonl without incomplete lines, which a crash may leave.
    Raises MiniGPTError if the file cannot be read."""
    records = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise MiniGPTError(f"cannot read {path}: {error.strerror or error}") from None
    for line in lines:
        with suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return [r for r in records if isinstance(r, dict) and isinstance(r.get("step"), int)]


# ---- --log-to

# Value of --log-to -> module
LOGGER_MODULES = {"none": "math", "tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


def check_logger(name: str) -> None:
    """Raise MiniGPTError if the module that --log-to `name` needs cannot be imported."""
    try:
        import_module(LOGGER_MODULES[name])
    except ImportError as error:
        raise MiniGPTError(
            f"--log-to {name}: {error}; pip install {name}, or --log-to none"
        ) from None


@contextmanager
def logger_errors(name: str) -> Iterator[None]:
    """Turn an error of the logger --log-to `name` (network, disk, service) into a SaveError."""
    try:
        yield
    except (OSError, getattr(sys.modules.get("wandb"), "Error", OSError)) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        hint = "try again, or leave it out with --log-to none"
        raise SaveError(f"--log-to {name}: {reason}; {hint}", exit_code=3) from None


def open_tensorboard(settings: Settings, identity: State, step: int, say: Say) -> Write:
    """Return the writer of a TensorBoard log in the folder `RUN.tensorboard` beside the snapshot.

    `step`: the last step that is done; later ones are purged, because they will be repeated.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder = sibling_path(settings.checkpoint_path, ".tensorboard")
    log = SummaryWriter(str(folder), purge_step=step + 1)
    say(f"log      {folder}: tensorboard --logdir {folder.parent} shows it")

    def write(record: LogRecord) -> None:
        for name, value in finite_numbers(record).items():
            log.add_scalar(name, value, record["step"])
        log.flush()  # else it writes only every two minutes if TensorFlow is installed

    return write


def open_wandb(settings: Settings, identity: State, step: int, say: Say) -> Write:
    """Return the writer of a log at Weights & Biases. With WANDB_MODE=offline, wandb writes to a
    folder `wandb` beside the snapshot, for a later upload. `finish_wandb` ends the log.

    All processes that resume a run use the run's id, so that wandb shows them as one run. (If a
    step is repeated, wandb keeps its first record.)
    """
    import wandb

    path = settings.checkpoint_path
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "minigpt"),
        name=sibling_path(path, "").name,
        id=identity["run"],
        resume="allow",
        dir=path.parent,
        config={
            name: value if isinstance(value, int | float) else str(value)
            for name, value in vars(settings).items()
        },
        settings=wandb.Settings(console="off", silent=True),
    )
    folder = f"{path.parent}/wandb/offline-run-*-{identity['run']}"
    say(f"log      wandb, {f'offline; wandb sync {folder} uploads it' if run.offline else run.url}")
    return lambda record: run.log(finite_numbers(record), record["step"])


def finite_numbers(record: LogRecord) -> dict[str, float]:
    """Return the finite numbers of a record, without its step."""
    numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
    return {key: n for key, n in numbers.items() if key != "step" and math.isfinite(n)}


def finish_wandb() -> None:
    """End the log at Weights & Biases, if --log-to opened one. (Python's exit handler would do so,
    but it is not called if one of several processes ends with an error.)"""
    if wandb := sys.modules.get("wandb"):
        with suppress(OSError, wandb.Error):  # a lost network must not change the exit code
            wandb.finish()


OPENERS = {"tensorboard": open_tensorboard, "wandb": open_wandb}


def open_logger(settings: Settings, identity: State, step: int, say: Say) -> Write:
    """Return a function that writes records to the logger --log-to. Both raise SaveError."""
    with logger_errors(settings.log_to):
        write_numbers = OPENERS[settings.log_to](settings, identity, step, say)
    return logger_errors(settings.log_to)(write_numbers)


# ---- Text


def format_line(record: LogRecord, num_steps: int) -> str:
    """Return the log line for the user: fields of a record in a fixed order."""
    peak, share = record["peak_memory_bytes"], record.get("peak_memory_share")  # (of a GPU)
    of_card = "" if share is None else f" ({share:.1%} of the card)"
    return " | ".join(
        [
            f"step {record['step']:>{len(str(num_steps))}}/{num_steps}",
            f"epoch {record['epoch']:.2f}",
            f"lr {record['lr']:.2e}",
            f"loss {format_loss(record['train_loss'])}",
            *([f"val {format_validation(record)}"] if "val_loss" in record else []),
            f"{record['step_ms']:.1f} ms/step",
            f"{record['tokens_per_s']:,.0f} tok/s",
            f"eta {format_time(record['eta_s'])}",
            *([f"peak {format_bytes(peak)} {record['peak_memory_kind']}{of_card}"] if peak else []),
        ]
    )


def format_loss(loss: float) -> str:
    """Return the loss in nats and the perplexity as text: "2.1000 ppl 8.17"."""
    return f"{loss:.4f} ppl {perplexity(loss):.2f}"


def format_validation(record: LogRecord) -> str:
    """Return a record's validation loss as text: "2.1000 ppl 8.17 (2.200 bits/byte)", without bits
    per byte if the record has none."""
    bits = record["val_bits_per_byte"]
    return format_loss(record["val_loss"]) + (f" ({bits:.3f} bits/byte)" if bits else "")


def format_time(seconds: float) -> str:
    """Return seconds as text, in minutes or in hours: 75 -> "1:15", 3675 -> "1:01:15"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
