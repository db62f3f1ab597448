"""Compute perplexity and peak memory; write log records to metrics.jsonl and to the logger of
--log-to; format the log line for the user."""

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from data.errors import MiniGPTError

from .settings import Settings
from .snapshot import SaveError, State, describe_save_error, sibling_path, writing_atomically


def perplexity(loss: float) -> float:
    """Return the perplexity exp(loss), for a loss in nats. It is the number of equally likely
    tokens that would give the same loss. From 710 nats on the result is infinite."""
    return math.inf if loss > 709.78 else math.exp(loss)


def peak_memory_fields(device: torch.device) -> dict[str, Any]:
    """Return the peak memory of this process so far, as fields of a log record.

        peak_memory_kind: "cuda" for a GPU, else "rss".
        peak_memory_bytes: peak in bytes. For "cuda" it is the memory of tensors, as PyTorch's
            allocator counts it. For "rss" it is the resident memory of the whole process, with
            Python and libraries (None if the system does not report it).

    For "cuda" there are three more fields:

        peak_memory_share: peak_memory_bytes as a share of the GPU's memory, 0 to 1.
        peak_active_bytes: peak of tensors plus freed memory that another stream may still use.
        peak_reserved_bytes: peak of all memory that the allocator has reserved.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        peak = stats.get("allocated_bytes.all.peak", 0)
        return {
            "peak_memory_bytes": peak,
            "peak_memory_share": peak / torch.cuda.get_device_properties(device).total_memory,
            "peak_active_bytes": stats.get("active_bytes.all.peak", 0),
            "peak_reserved_bytes": stats.get("reserved_bytes.all.peak", 0),
            "peak_memory_kind": "cuda",
        }
    try:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    except ImportError:  # Windows has no `resource`
        peak = None
    return {"peak_memory_bytes": peak, "peak_memory_kind": "rss"}


# ---- Writers. A writer is a function that writes one log record.

LogRecord = dict[str, Any]
Write = Callable[[LogRecord], object]


def open_metrics(path: Path, resumed_step: int) -> Write:
    """Return the writer of metrics.jsonl. The file has one JSON object per line. The writer passes
    each line to the operating system before it returns.

    A new run (`resumed_step` 0) begins a new file. A resumed run continues the file. First the run
    drops the lines of steps after `resumed_step`, because those steps will be repeated. The first
    new line gets the field `resumed_from`. Both this function and the writer raise SaveError if
    they cannot write.
    """
    resume_note = {"resumed_from": resumed_step} if resumed_step else {}
    records = read_metrics(path) if resumed_step and path.exists() else []
    kept = [r for r in records if r.get("step", math.inf) <= resumed_step]
    text = "".join(json.dumps(r) + "\n" for r in kept)
    with writing_atomically(path, len(text)) as temporary:
        temporary.write_text(text, encoding="utf-8")

    def write(record: LogRecord) -> None:
        # JSON has no NaN and no infinity. Write null instead, which every JSON reader accepts.
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in (record | resume_note).items()
        }
        resume_note.clear()
        line = json.dumps(finite) + "\n"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise SaveError(describe_save_error(path, error, len(line)), exit_code=3) from None

    return write


def read_metrics(path: Path) -> list[LogRecord]:
    """Return the records of a metrics.jsonl. Skip incomplete lines, which a crash may leave. Raises
    OSError."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


# ---- --log-to

# Value of --log-to -> module.
LOGGER_MODULES = {
    "tensorboard": "torch.utils.tensorboard",
    "wandb": "wandb",
}
Say = Callable[[str], None]
# Function that logs the numbers of a step. Its arguments are a dict, name -> number, and the step.
LogNumbers = Callable[[dict[str, float], int], object]


def check_logger(name: str) -> None:
    """Raise MiniGPTError if the module that --log-to `name` needs cannot be imported."""
    if name not in LOGGER_MODULES:
        return
    try:
        import_module(LOGGER_MODULES[name])
    except ImportError as error:
        raise MiniGPTError(
            f"--log-to {name}: {error}; pip install {name}, or --log-to none"
        ) from None


def open_tensorboard(settings: Settings, identity: State, step: int, say: Say) -> LogNumbers:
    """Open a TensorBoard log in the folder `RUN.tensorboard` beside the snapshot. Return the
    function that logs numbers. `step`: the last step that is done."""
    from torch.utils.tensorboard import SummaryWriter

    folder = sibling_path(settings.checkpoint_path, ".tensorboard")
    # An earlier process of this run may have logged later steps. Purge them, because these steps
    # will be repeated.
    writer = SummaryWriter(str(folder), purge_step=step + 1)
    say(f"log      {folder}: tensorboard --logdir {folder.parent} shows it")

    def log(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        # Without `flush`, the writer writes only every two minutes if TensorFlow is installed.
        writer.flush()

    return log


def open_wandb(settings: Settings, identity: State, step: int, say: Say) -> LogNumbers:
    """Open a log at Weights & Biases (wandb), and return the function that logs numbers. With
    WANDB_MODE=offline, wandb writes to a folder `wandb` beside the snapshot, for a later upload.

    All processes that resume a run use the run's id, so wandb shows them as one run. (If a step is
    repeated, wandb keeps its first record.) `finish_wandb` ends the log.
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
    return run.log


def finish_wandb() -> None:
    """End the log at Weights & Biases, if --log-to opened one. Usually an exit handler of Python
    ends the log. But if a run has several processes, a process with an error calls no exit handler.
    So every run calls this function."""
    if wandb := sys.modules.get("wandb"):
        with suppress(Exception):  # a lost network must not change the exit code
            wandb.finish()


LOGGER_OPENERS = {"tensorboard": open_tensorboard, "wandb": open_wandb}


def open_external_logger(settings: Settings, identity: State, step: int, say: Say) -> Write:
    """Return the writer for the logger of --log-to. The writer logs all finite numbers of a record.

    `step`: the last step that is done. `say`: prints a line. The network, the disk or the service
    may fail, now or later. Then this function, or the writer, raises SaveError.
    """

    def call(function: Callable, *arguments: object) -> Any:
        try:
            return function(*arguments)
        except Exception as error:  # the loggers raise errors of many libraries
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise SaveError(
                f"--log-to {settings.log_to}: {reason}; try again, or leave it out with --log-to "
                "none",
                exit_code=3,
            ) from None

    log = call(LOGGER_OPENERS[settings.log_to], settings, identity, step, say)

    def write(record: LogRecord) -> None:
        numbers = {
            key: value
            for key, value in record.items()
            if key != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        call(log, numbers, record["step"])

    return write


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
            f"loss {format_loss_and_perplexity(record['train_loss'])}",
            *([f"val {format_validation(record)}"] if "val_loss" in record else []),
            f"{record['step_ms']:.1f} ms/step",
            f"{record['tokens_per_s']:,.0f} tok/s",
            f"eta {format_time(record['eta_s'])}",
            *([f"peak {format_bytes(peak)} {record['peak_memory_kind']}{of_card}"] if peak else []),
        ]
    )


def format_loss_and_perplexity(loss: float) -> str:
    """Return the loss in nats and the perplexity as text: "2.1000 ppl 8.17"."""
    return f"{loss:.4f} ppl {perplexity(loss):.2f}"


def format_validation(record: LogRecord) -> str:
    """Return a record's validation loss as text: "2.1000 ppl 8.17 (2.200 bits/byte)". Bits per byte
    are left out if the record has none."""
    bits = record["val_bits_per_byte"]
    in_bytes = "" if bits is None else f" ({bits:.3f} bits/byte)"
    return format_loss_and_perplexity(record["val_loss"]) + in_bytes


def format_bytes(count: float) -> str:
    """Return a number of bytes as text with a binary unit: 1536 -> "1.5 KiB"."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:.0f} B" if units[0] == "B" else f"{count:,.1f} {units[0]}"


def format_time(seconds: float) -> str:
    """Return seconds as text, in minutes or in hours: 75 -> "1:15", 3675 -> "1:01:15"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
