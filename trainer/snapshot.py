"""Save and load snapshots: one file that holds everything a run needs to go on.

A snapshot is a dict of plain types and tensors, written by `torch.save` and read with
`weights_only=True`, so that opening somebody's file never runs their code. The file that
`--checkpoint-path` names is the newest one; beside it lie, from the same stem, `.prev.pt` (the one
before) and `.best.pt` (lowest validation loss).

A snapshot is written before its step is evaluated and logged; `record` is the log line that was due
then, for the run that goes on from it. `run` names the run, for torchrun's restarts
(resume.load_own).

What is *not* in it: random-number state and the position in the data. Both are functions of the
step (see `train_minimal.train_step`), and what need not be saved cannot be restored wrongly.
"""

import errno
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.serialization import skip_data
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
# What lies beside a snapshot (see `beside`): others of the same run, and what tells of it.
SUFFIXES = (".prev.pt", ".best.pt", ".metrics.jsonl", ".trace.json", ".tensorboard")


class SnapshotError(ValueError):
    """A snapshot cannot be written, read or continued; one line that says why and what to do."""


class SaveError(Exception):
    """The disk is full, or gone. What was saved before is untouched."""


def beside(path: Path, suffix: str) -> Path:
    """`checkpoints/run.pt`, `.prev.pt` -> `checkpoints/run.prev.pt`."""
    # `lr0.01` and `lr0.02` are two runs: what follows the last point is not always an ending.
    ending = next(ending for ending in reversed(ENDINGS) if path.name.endswith(ending))
    stem = path.name.removesuffix(ending)
    if not stem.strip("."):
        raise SnapshotError(
            f"--checkpoint-path: {path} has no name before its ending; name a file, as in "
            "checkpoints/run.pt"
        )
    return path.with_name(stem + suffix)


def twins(path: Path) -> list[Path]:
    """The names that differ from `path` in their ending alone."""
    return [twin for ending in ENDINGS if (twin := beside(path, ending)) != path]


def is_second(path: Path) -> bool:
    """Is it the name of a run's `.prev.pt` or `.best.pt`?"""
    return beside(path, "").suffix in (".prev", ".best")


def temporary_name(path: Path) -> Path:
    """Of this process alone: where there are no locks, two runs may save under one name."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def save_snapshot(path: Path, state: State, keep_previous: bool = False) -> None:
    """Write `state` to `path` so that a crash at any moment leaves a complete snapshot.

    Never in place: a process that dies half-way through overwriting its only snapshot has lost
    the run. The new file is complete, and on the disk (fsync), before a rename, which is atomic,
    gives it its name. With `keep_previous` the file that had the name becomes `.prev.pt`.

    Raises SaveError if the disk does not take it.
    """
    with saving(path, bytes_of(state)) as temporary:
        stale = re.compile(re.escape(f".{path.name}.") + r"\d+\.tmp")
        for name in filter(stale.fullmatch, os.listdir(path.parent)):
            path.with_name(name).unlink()  # of a process that was killed while it saved
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if keep_previous and path.exists():
            os.replace(path, beside(path, ".prev.pt"))


def bytes_of(state: State) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))


@contextmanager
def saving(path: Path, n_bytes: int) -> Iterator[Path]:
    """A name to write to, then the rename to `path`: nothing is left of it if that fails. Raises
    SaveError with what the operating system says, and how much room is needed."""
    temporary = temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
        if os.name == "posix":  # the renames themselves are safe once the folder is on the disk
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
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
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        if not has_inodes(path.parent):
            return (
                f"cannot save {path}: its disk takes no more files (inodes used up: {reason}); "
                "delete some"
            )
        reason = f"disk full ({reason})"
    try:
        room = f"{shutil.disk_usage(path.parent).free / 1e6:,.1f} MB are free"
    except OSError:
        room = "its folder is gone"
    return f"cannot save {path}: {reason}; it needs {n_bytes / 1e6:,.1f} MB, {room}"


def has_inodes(folder: Path) -> bool:
    """Does its file system take one more file, however small?"""
    try:
        disk = os.statvfs(folder)
    except (OSError, AttributeError):  # gone; Windows, which counts no files
        return True
    # (btrfs makes inodes as they are needed; a full ZFS has none, either.)
    return disk.f_favail > 0 or disk.f_files == 0 or disk.f_bavail == 0


def read_snapshot(path: Path) -> State:
    """Read one snapshot file onto the CPU.

    The CPU, because a copy on the GPU beside the model and optimizer would take their memory a
    second time. The checksums first: `torch.load` does not look at those that `torch.save` wrote,
    and takes a flipped bit for a weight.

    Raises SnapshotError: missing, damaged, or not a snapshot of this project.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise SnapshotError(f"{path} is not a file")
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise SnapshotError(f"{path} is damaged (checksum of {damaged} is wrong)")
        state: State = load(path, "cpu")
    except FileNotFoundError:
        raise SnapshotError(f"there is no snapshot {path}") from None
    except pickle.UnpicklingError:
        raise SnapshotError(f"{path} holds more than plain data: refused") from None
    except (SnapshotError, MemoryError):
        raise
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception:  # zipfile and torch raise many kinds for a file that is not what it was
        raise SnapshotError(f"{path} is no snapshot, or a damaged one") from None
    if strange := what_is_strange(state):
        raise SnapshotError(f"{path} is no MiniGPT snapshot ({strange})")
    return state


def load(file: Path | BinaryIO, device: str) -> Any:
    """What torch.save wrote, if it is plain data."""
    with warnings.catch_warnings():  # of what no snapshot is: a program, a sparse tensor
        warnings.simplefilter("ignore")
        return torch.load(file, map_location=device, weights_only=True)


def what_is_strange(state: Any) -> str | None:
    """Why no run of ours has saved that; None if one may have."""
    for key, kind in KEYS.items():
        if not isinstance(state, dict) or not isinstance(state.get(key), kind):
            return f"no {key}, or a strange one"
    if state["step"] < 0:
        return f"a strange step, {state['step']}"
    if any(isinstance(t, torch.Tensor) and t.layout != torch.strided for t in tree_leaves(state)):
        return "a strange tensor, a sparse one"
    return None


def check_shapes(path: Path, weights: State, model: State) -> None:
    """Raise SnapshotError unless the weights in a snapshot, or in a folder of GPT-2, have the names
    and shapes of `model`, the state dict that model.py makes of the file's configuration."""
    expected = {name: f"floats of shape {tuple(like.shape)}" for name, like in model.items()}
    for name in expected | weights:
        has, wants = kind(weights.get(name)), expected.get(name, "nothing")
        if has != wants:
            # A snapshot's checksums have been looked at: what is in it was saved.
            if path.is_file() and weights and has.startswith(("floats", "nothing")):
                raise SnapshotError(
                    f"model.py has changed since {path} was written: {name} is {has} there, "
                    f"{wants} in model.py; go on with the model.py of then, or start anew"
                )
            why = "is it damaged" + ", or is model.py no GPT-2 any more" * path.is_dir()
            raise SnapshotError(
                f"{path} holds {has} as {name}, its configuration says {wants}: {why}?"
            )


def kind(found: object) -> str:
    """What a weight is, in words that can be compared."""
    if found is None:
        return "nothing"
    if not isinstance(found, torch.Tensor) or found.layout != torch.strided or found.is_meta:
        return "no plain tensor"
    what = "floats" if found.is_floating_point() else str(found.dtype)
    return f"{what} of shape {tuple(found.shape)}"


def peek(path: Path) -> State:
    """A snapshot without its numbers, which may be many GB: tensors on "meta". {} if it is none."""
    try:
        if path.is_file():
            with open(path, "rb") as file, skip_data():
                state: State = load(file, "meta")
            return {} if what_is_strange(state) else state
    except Exception:  # as in `read_snapshot`
        pass
    return {}


@dataclass(frozen=True)
class Resumed:
    """A snapshot to go on from: its contents, its file, and why that is not the one that was
    named."""

    state: State
    path: Path
    why: str = ""
