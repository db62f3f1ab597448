"""Measure: perplexity, peak memory. And where the numbers go: metrics.jsonl,
--log-to, and the log line that a person reads."""

import argparse
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

from .flags import UsageError
from .snapshot import SaveError, State, atomic_write, cannot_save, sibling_path


def perplexity(loss: float) -> float:
    """exp(loss in nats): how many equally likely tokens would be as hard to choose from."""
    try:
        return math.exp(loss)
    except OverflowError:  # from 710 on
        return math.inf


def peak_memory(device: torch.device) -> dict[str, Any]:
    """Return the most memory that this process has held at a time, as the log has it.

    kind "cuda": bytes of tensors, as PyTorch's allocator counts them. Beside them, active: with
    freed memory that another stream may still use; reserved: with all that the allocator keeps.
    kind "rss": resident bytes of the whole process, Python and libraries included (None where the
    system does not tell).
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
        peak *= 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes
    except ImportError:  # Windows
        peak = None
    return {"peak_memory_bytes": peak, "peak_memory_kind": "rss"}


# ---- Where records go: each writer is a function that takes one

LogRecord = dict[str, Any]
Write = Callable[[LogRecord], object]


def open_metrics(path: Path, resumed_step: int) -> Write:
    """Return the writer of metrics.jsonl: one JSON object a line, on the disk when it returns.

    Starts a new file, or goes on with the one there: lines of steps after `resumed_step`, which
    will be done again, are dropped first, and the next line says where the run was resumed.
    Raises SaveError, and so does the writer.
    """
    news = {"resumed_from": resumed_step} if resumed_step else {}
    records = read_metrics(path) if resumed_step and path.exists() else []
    kept = [r for r in records if r.get("step", math.inf) <= resumed_step]
    text = "".join(json.dumps(r) + "\n" for r in kept)
    with atomic_write(path, len(text)) as temporary:
        temporary.write_text(text, encoding="utf-8")
    file = open(path, "a", encoding="utf-8", buffering=1)

    def write(record: LogRecord) -> None:
        # JSON has no NaN: null says "not a number" in a way that every reader takes.
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in (record | news).items()
        }
        news.clear()
        line = json.dumps(finite) + "\n"
        try:
            file.write(line)
        except OSError as error:
            raise SaveError(cannot_save(path, error, len(line))) from None

    return write


def read_metrics(path: Path) -> list[LogRecord]:
    """Return the records of a metrics.jsonl, without a line that a crash cut short. Raises
    OSError."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def logged_at(step: int, path: Path) -> LogRecord | None:
    """Return the record of that step; None if it was not logged."""
    records = read_metrics(path) if path.is_file() else []
    return next((r for r in records if r.get("step") == step), None)


NEEDS = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}  # --log-to: its import
Say = Callable[[str], None]
LogNumbers = Callable[[dict[str, float], int], object]  # of a step


def check_logger(name: str) -> None:
    """Raise UsageError if the package of that logger is not installed."""
    if name not in NEEDS:
        return
    try:
        import_module(NEEDS[name])
    except Exception as error:  # a broken installation says so in many ways
        raise UsageError(
            f"--log-to {name}: import {NEEDS[name]} failed ({type(error).__name__}: {error}); "
            f"pip install {name}, or --log-to none"
        ) from None


def to_tensorboard(path: Path, identity: State, step: int, say: Say) -> LogNumbers:
    """Log into the folder `RUN.tensorboard` beside the snapshot."""
    from torch.utils.tensorboard import SummaryWriter

    folder = sibling_path(path, ".tensorboard")
    # An earlier process may have written later steps: they are done again.
    writer = SummaryWriter(str(folder), purge_step=step + 1)
    flags = (f"    {name} = {value}" for name, value in identity["args"].items())
    writer.add_text("flags", "\n".join(flags), step + 1)
    say(f"log      {folder}: tensorboard --logdir {path.parent} shows it")

    def log(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # (with TensorFlow installed it would wait for two minutes)

    return log


def to_wandb(path: Path, identity: State, step: int, say: Say) -> LogNumbers:
    """Log to Weights & Biases; with WANDB_MODE=offline into a folder `wandb` beside the snapshot,
    to be uploaded later.

    The run's own id makes one run of all processes that go on with it. (Of steps that are done
    again wandb keeps the first.) `finish_logs` ends it.
    """
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "minigpt"),
        name=sibling_path(path, "").name,
        id=identity["run"],
        resume="allow",
        dir=path.parent,
        config=identity["args"],
        settings=wandb.Settings(console="off", silent=True),
    )
    folder = f"{path.parent}/wandb/offline-run-*-{identity['run']}"
    say(f"log      wandb, {f'offline; wandb sync {folder} uploads it' if run.offline else run.url}")
    return run.log


def finish_logs() -> None:
    """End what --log-to has opened. A process of several leaves without Python's exit handlers,
    which would do it."""
    if wandb := sys.modules.get("wandb"):
        with suppress(Exception):  # a network that is gone costs the log, not the exit code
            wandb.finish()


LOGGERS = {"tensorboard": to_tensorboard, "wandb": to_wandb}


def open_logger(args: argparse.Namespace, identity: State, step: int, say: Say) -> Write:
    """Return the writer of --log-to, which logs the finite numbers of each record after `step`.

    A network, a disk or a service may be gone, at the start or later. A line tells of the first
    failure, which ends the log; the run goes on without it.
    """
    log: LogNumbers | None = None

    def attempt(act: Callable, *arguments: object) -> Any:
        nonlocal log
        try:
            return act(*arguments)
        except Exception as error:
            log = None
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            say(f"warning  --log-to {args.log_to} ended ({reason}); metrics.jsonl goes on")

    def write(record: LogRecord) -> None:
        numbers = {
            name: value
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        if log:
            attempt(log, numbers, record["step"])

    log = attempt(LOGGERS[args.log_to], args.checkpoint_path, identity, step, say)
    return write


# ---- In words


def format_line(record: LogRecord, num_steps: int) -> str:
    """Return the log line that a person reads: the same record, in a fixed order."""
    parts = [
        f"step {record['step']:>{len(str(num_steps))}}/{num_steps}",
        f"epoch {record['epoch']:.2f}",
        f"lr {record['lr']:.2e}",
        f"loss {format_loss(record['train_loss'])}",
        *([f"val {format_validation(record)}"] if "val_loss" in record else []),
        f"{record['step_ms']:.1f} ms/step",
        f"{record['tokens_per_s']:,.0f} tok/s",
    ]
    if record["eta_s"] is not None:
        parts.append(f"eta {format_time(record['eta_s'])}")
    if (peak := record["peak_memory_bytes"]) is not None:
        share = record.get("peak_memory_share")  # on a GPU
        of_card = f" ({share:.1%} of the card)" if share is not None else ""
        parts.append(f"peak {format_bytes(peak)} {record['peak_memory_kind']}{of_card}")
    return " | ".join(parts)


def format_loss(loss: float) -> str:
    """ "2.1000 ppl 8.17" """
    return f"{loss:.4f} ppl {perplexity(loss):.2f}"


def format_validation(record: LogRecord) -> str:
    """ "2.1000 ppl 8.17 (2.200 bits/byte)" """
    bits = record["val_bits_per_byte"]
    in_bytes = "" if bits is None else f" ({bits:.3f} bits/byte)"
    return format_loss(record["val_loss"]) + in_bytes


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:.0f} B" if units[0] == "B" else f"{count:,.1f} {units[0]}"


def format_time(seconds: float) -> str:
    """75 -> '1:15', 3675 -> '1:01:15'."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
