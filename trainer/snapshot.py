"""Save and load snapshots: one file that holds everything a run needs to go on.

A snapshot is a dict of plain types and tensors, written by `torch.save` and read with
`weights_only=True`, so that opening somebody's file never runs their code. The file that
`--checkpoint-path` names is the newest one; beside it lie, from the same stem, `.prev.pt` (the one
before) and `.best.pt` (lowest validation loss). What an older run has left under that name becomes
`.old.pt`, `.old.prev.pt` and so on when a new one starts: claim.py.

A snapshot is written before its step is evaluated and logged; `record` is the log line that was due
then, for the run that goes on from it. `run` names the run, for torchrun's restarts (`load_own`).

What is *not* in it: random-number state and the position in the data. Both are functions of the
step (see `train_minimal.train_step`), and what need not be saved cannot be restored wrongly.
"""

import errno
import glob
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

State = dict[str, Any]

# What a run needs to go on. `config`, `args` and `tokenizer` also let scripts/generate.py work
# from the file alone.
KEYS = {
    "model": dict,
    "optimizer": dict,
    "scaler": dict,
    "step": int,
    "config": dict,
    "args": dict,
    "tokenizer": dict,
    "data": dict,
    "best_val_loss": float,
}
# Names that differ in nothing else have the same log, and the same lock.
ENDINGS = ("", ".pt", ".pth", ".ckpt")
SUFFIXES = (".prev.pt", ".best.pt", ".metrics.jsonl")  # what lies beside a snapshot: see `beside`


class SnapshotError(ValueError):
    """A snapshot cannot be written, read or continued; one line that says why and what to do."""


class SaveError(Exception):
    """The disk is full, or gone. What was saved before is untouched."""


def beside(path: Path, suffix: str) -> Path:
    """`checkpoints/run.pt`, `.prev.pt` -> `checkpoints/run.prev.pt`."""
    if not path.name:
        raise SnapshotError(f"--checkpoint-path: {path} is not a file")
    # `lr0.01` and `lr0.02` are two runs: what follows the last point is not always an ending.
    stem = path.stem if path.suffix in ENDINGS else path.name
    return path.with_name(stem + suffix)


def temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def save_snapshot(path: Path, state: State, keep_previous: bool = False) -> None:
    """Write `state` to `path` so that a crash at any moment leaves a complete snapshot.

    Never in place: a process that dies half-way through overwriting its only snapshot has lost
    the run. The new file is complete, and on the disk (fsync), before a rename, which is atomic,
    gives it its name. With `keep_previous` the file that had the name becomes `.prev.pt`.

    Raises SaveError if the disk does not take it.
    """
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    with saving(path, n_bytes=sum(tensor.nbytes for tensor in tensors)) as temporary:
        for stale in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            stale.unlink()  # of a process that was killed while it saved
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if keep_previous and path.exists():
            os.replace(path, beside(path, ".prev.pt"))
        os.replace(temporary, path)
        if os.name == "posix":  # the renames themselves are safe once the folder is on the disk
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)


@contextmanager
def saving(path: Path, n_bytes: int) -> Iterator[Path]:
    """A name to write to before the rename to `path`: nothing is left of it if that fails.

    Raises SaveError with what the operating system says, and how much room is needed.
    """
    temporary = temporary_name(path)
    try:
        yield temporary
    except BaseException as error:
        with suppress(OSError):  # the folder may be gone
            temporary.unlink(missing_ok=True)
        # torch.save speaks of an "unexpected pos"; the reason is the error that it was handling.
        reason = error if isinstance(error, OSError) else error.__context__
        if isinstance(reason, OSError):
            raise SaveError(cannot_save(path, reason, n_bytes)) from None
        raise


def cannot_save(path: Path, error: OSError, n_bytes: int) -> str:
    """One line: the file, the reason, how much room it needs and how much there is."""
    reasons = {
        errno.ENOSPC: "disk full",
        errno.EDQUOT: "disk full (your quota is used up)",
        errno.EFBIG: "disk full (files may not be that large here)",
    }
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    try:
        room = f"{shutil.disk_usage(path.parent).free / 1e6:,.1f} MB are free"
    except OSError:
        room = "its folder is gone"
    return f"cannot save {path}: {reason}; it needs {n_bytes / 1e6:,.1f} MB, {room}"


def read_snapshot(path: Path) -> State:
    """Read one snapshot file onto the CPU.

    The CPU, because a copy on the GPU beside the model and optimizer would take their memory a
    second time. The checksums first: `torch.load` does not look at those that `torch.save` wrote,
    and takes a flipped bit for a weight.

    Raises SnapshotError: missing, damaged, or not a snapshot of this project.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if is_torchscript(archive):
                raise SnapshotError(f"{path} is no snapshot but a TorchScript program")
            damaged = archive.testzip()
        if damaged is not None:
            raise SnapshotError(f"{path} is damaged (checksum of {damaged} is wrong)")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise SnapshotError(f"there is no snapshot {path}") from None
    except pickle.UnpicklingError:
        raise SnapshotError(f"{path} holds more than plain data: refused") from None
    except (zipfile.BadZipFile, EOFError, RuntimeError, KeyError):
        raise SnapshotError(f"{path} is no snapshot, or a damaged one") from None
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror or error}") from None
    for key, kind in KEYS.items():
        if not isinstance(state, dict) or not isinstance(state.get(key), kind):
            raise SnapshotError(f"{path} is no MiniGPT snapshot (no {key}, or a strange one)")
    if state["step"] < 0:
        raise SnapshotError(f"{path} is no MiniGPT snapshot (a strange step, {state['step']})")
    return state


def is_torchscript(archive: zipfile.ZipFile) -> bool:
    """Of a program torch.load would print a warning before it refuses it."""
    return any(name.endswith("/constants.pkl") for name in archive.namelist())


def peek(path: Path) -> State:
    """A snapshot whose weights, which may be many GB, are not read; {} if it is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            if is_torchscript(archive):
                return {}
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return state if KEYS.keys() <= state.keys() and state["step"] >= 0 else {}
    except Exception:
        return {}


@dataclass(frozen=True)
class Resumed:
    """A snapshot to go on from: its contents, its file, and why that is not the newest one."""

    state: State
    path: Path
    damage: str | None = None


def load_newest(path: Path) -> Resumed:
    """The snapshot at `path`, or, if that is gone or damaged, the one before it.

    Raises SnapshotError if neither can be read.
    """
    previous, old = beside(path, ".prev.pt"), beside(path, ".old.pt")
    # (Path.exists raises for a name that is too long.)
    if not os.path.exists(path) and not os.path.exists(previous):
        name = f"name {old}, of the run before," if os.path.exists(old) else "name the file"
        raise SnapshotError(
            f"--resume: there is no snapshot {path}; start without --resume, "
            f"or {name} with --checkpoint-path"
        )
    try:
        return Resumed(read_snapshot(path), path)
    except SnapshotError as error:
        if not previous.exists():
            raise SnapshotError(f"--resume: {error}") from None
        return Resumed(read_snapshot(previous), previous, damage=str(error))


def load_own(path: Path, run_id: str) -> Resumed | None:
    """The newest snapshot if it is of the run `run_id`; None if that run has saved nothing yet.

    What a run finds that torchrun has started again: its own, or one of an older run, which it was
    to replace and must not go on from. Raises SnapshotError as `load_newest` does.
    """
    if not any(peek(file).get("run") == run_id for file in (path, beside(path, ".prev.pt"))):
        return None
    return load_newest(path)


def check_resumable(saved: State, now: State, path: Path) -> None:
    """Raise SnapshotError if a run that is identified by `now` cannot go on from `saved`.

    Free to change: how memory is spent (it changes no result), learning rate, number of steps,
    intervals, and the number of processes as long as the batch of all of them together stays.
    """
    shape = "n_layers n_heads d_model d_ff max_position_embeddings dropout vocab_size".split()
    rows = [("--tokenizer-name", saved["tokenizer"].get("name"), now["tokenizer"]["name"])]
    rows += [(flag(name), saved["config"].get(name), now["config"][name]) for name in shape]
    for name in ("seq_len", "seed", "data_seed"):
        rows.append((flag(name), saved["args"].get(name), now["args"][name]))
    for name, before, after in rows:
        if before != after:
            raise SnapshotError(
                f"{name}: {path} was trained with {before}, this run has {after}; pass the old "
                "value to resume, or another --checkpoint-path to start a new run"
            )
    if saved["data"].get("fingerprint") != now["data"]["fingerprint"]:
        raise SnapshotError(
            f"--train-data: {path} was trained on {saved['data'].get('description')}, this run "
            f"has {now['data']['description']}; the data must stay the same to resume"
        )
    before, after = saved["data"].get("sequences_per_step"), now["data"]["sequences_per_step"]
    if not isinstance(before, int):
        raise SnapshotError(f"{path} is no MiniGPT snapshot (no sequences per step)")
    if before != after:
        steps = now["args"]["grad_accum_steps"] * before / after
        way_out = f"--grad-accum-steps {steps:.0f}" if steps == int(steps) else "the old batch"
        raise SnapshotError(
            f"--batch-size: {path} was trained with {before} sequences a step over all processes, "
            f"this run has {after}; {way_out} fits"
        )


def changes(saved: State, now: State) -> list[str]:
    """The flags that may change, and did: `--lr 0.001 -> 0.0001`."""
    free = (
        "num_steps lr min_lr lr_scheduler warmup_steps weight_decay grad_clip_norm log_interval "
        "eval_interval save_interval eval_batches use_activation_checkpoint"
    ).split()
    before, after = saved["args"], now["args"]

    def short(value: object) -> str:
        return f"{value:g}" if isinstance(value, float) else str(value)

    return [
        f"{flag(name)} {short(before[name])} -> {short(after[name])}"
        for name in free
        if name in before and before[name] != after[name]
    ]


def flag(name: str) -> str:
    """`n_layers` -> `--n-layers`."""
    return "--" + name.replace("_", "-")


def restore(
    resumed: Resumed,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> None:
    """Put weights, optimizer and loss scale back. Raises SnapshotError if they do not fit."""
    state = resumed.state
    expected = {name: (value.shape, value.dtype) for name, value in model.state_dict().items()}
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    try:
        found = {name: (value.shape, value.dtype) for name, value in state["model"].items()}
        if found != expected:
            raise ValueError
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for parameter, moments in optimizer.state.items():
            if not all(moments[m].shape == parameter.shape for m in ("exp_avg", "exp_avg_sq")):
                raise ValueError
        if state["scaler"] and scaler.is_enabled():  # empty unless that run was in float16
            scaler.load_state_dict(state["scaler"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        raise SnapshotError(f"{resumed.path} does not fit this model: is it damaged?") from None
    # The moments are the snapshot's, the settings (weight decay, fused or not) are this run's.
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)
