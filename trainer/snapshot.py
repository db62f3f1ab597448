"""Save and load snapshots: one file that holds everything a run needs to go on.

A run takes a name for its snapshots without taking another run's files: before it starts it looks
whether it may write there (`check_path`), and locks the name (`claim`); what an older run has left
under it is renamed (`rename_older_run`).

A snapshot is a dict of plain types and tensors, written by `torch.save` and read with
`weights_only=True`, so that opening somebody's file never runs their code. The file that
`--checkpoint-path` names is the newest one; beside it lie, from the same stem, `.prev.pt` (the one
before) and `.best.pt` (lowest validation loss).

A snapshot is written before its step is evaluated and logged; `record` is the log line that was due
then, for the run that goes on from it. `run` names the run, for torchrun's restarts
(resume.load_own_run).

What is *not* in it: random-number state and the position in the data. Both are functions of the
step (see `train_minimal.train_step`), and what need not be saved cannot be restored wrongly.
"""

import errno
import os
import pickle
import re
import shutil
import time
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any, BinaryIO

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
# What lies beside a snapshot (see `sibling_path`): others of the same run, and what tells of it.
SUFFIXES = (".prev.pt", ".best.pt", ".metrics.jsonl", ".trace.json", ".tensorboard")


class SnapshotError(ValueError):
    """A snapshot cannot be written, read or continued; one line that says why and what to do."""


class SaveError(Exception):
    """The disk is full, or gone. What was saved before is untouched."""


def sibling_path(path: Path, suffix: str) -> Path:
    """`checkpoints/run.pt`, `.prev.pt` -> `checkpoints/run.prev.pt`."""
    # `lr0.01` and `lr0.02` are two runs: what follows the last point is not always an ending.
    ending = next(ending for ending in reversed(ENDINGS) if path.name.endswith(ending))
    return path.with_name(path.name.removesuffix(ending) + suffix)


def is_sibling(path: Path) -> bool:
    """Is it the name of a run's `.prev.pt` or `.best.pt`?"""
    return sibling_path(path, "").suffix in (".prev", ".best")


def save_snapshot(path: Path, state: State, keep_previous: bool = False) -> None:
    """Write `state` to `path` so that a crash at any moment leaves a complete snapshot.

    Never in place: a process that dies half-way through overwriting its only snapshot has lost
    the run. The new file is complete, and on the disk (fsync), before a rename, which is atomic,
    gives it its name. With `keep_previous` the file that had the name becomes `.prev.pt`.

    Raises SaveError if the disk does not take it.
    """
    with atomic_write(path, bytes_of(state)) as temporary:
        stale = re.compile(re.escape(f".{path.name}.") + r"\d+\.tmp")
        for name in filter(stale.fullmatch, os.listdir(path.parent)):
            path.with_name(name).unlink()  # of a process that was killed while it saved
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if keep_previous and path.exists():
            os.replace(path, sibling_path(path, ".prev.pt"))


def bytes_of(state: State) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))


def temporary_name(path: Path) -> Path:
    """Where a file is written, by this process, before it takes the name of `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextmanager
def atomic_write(path: Path, n_bytes: int) -> Iterator[Path]:
    """A name to write to, then the rename to `path`: nothing is left of it if that fails. Raises
    SaveError with what the operating system says, and how much room is needed."""
    # Of this process alone: where there are no locks, two runs may save under one name.
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
    """One line: the file, the reason and, on a full disk, the bytes needed and free."""
    reason = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"cannot save {path}: {reason}"
    free = shutil.disk_usage(path.parent).free
    no_inodes = error.errno == errno.ENOSPC and free > n_bytes
    hint = "; are its inodes used up (df -i)?" if no_inodes else ""
    return (
        f"cannot save {path}: disk full ({reason}); it needs {n_bytes / 1e6:,.1f} MB, "
        f"{free / 1e6:,.1f} MB are free{hint}"
    )


def read_snapshot(path: Path) -> State:
    """Read one snapshot file onto the CPU.

    The CPU, because a copy on the GPU beside the model and optimizer would take their memory a
    second time. The checksums first: `torch.load` does not look at those that `torch.save` wrote,
    and takes a flipped bit for a weight.

    Raises SnapshotError: missing, damaged, or not a snapshot of this project.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # (to open a pipe would wait for ever)
        raise SnapshotError(f"{path} is not a file")
    try:
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
    if strange := find_defect(state):
        raise SnapshotError(f"{path} is no MiniGPT snapshot (no {strange}, or a strange one)")
    return state


def load(file: Path | BinaryIO, device: str) -> Any:
    """What torch.save wrote, if it is plain data."""
    with warnings.catch_warnings():  # of what no snapshot is: a program, a sparse tensor
        warnings.simplefilter("ignore")
        return torch.load(file, map_location=device, weights_only=True)


def find_defect(state: Any) -> str | None:
    """The first key that a snapshot of ours would have otherwise; None if all are as they were."""
    for key, kind in KEYS.items():
        if not isinstance(state, dict) or not isinstance(state.get(key), kind):
            return key
    return None


def check_shapes(path: Path, weights: State, model: State) -> None:
    """Raise SnapshotError unless the weights in a snapshot, or in a folder of GPT-2, have the names
    and shapes of `model`, the state dict that model.py makes of the file's configuration."""
    for name in model | weights:
        wants, has = describe_weight(model.get(name)), describe_weight(weights.get(name))
        if has != wants:
            raise SnapshotError(
                f"{path} holds {has} as {name}, model.py says {wants}: is it damaged, or has "
                "model.py changed since?"
            )


def describe_weight(weight: object) -> str:
    """What a weight is, in words that can be compared: any float is as good as another."""
    if weight is None:
        return "nothing"
    if not isinstance(weight, torch.Tensor) or weight.layout != torch.strided:
        return "no plain tensor"
    dtype = "floats" if weight.is_floating_point() else str(weight.dtype)
    return f"{dtype} of shape {tuple(weight.shape)}"


def peek(path: Path) -> State:
    """A snapshot without its numbers, which may be many GB: tensors on "meta". {} if it is none."""
    try:
        if path.is_file():
            with open(path, "rb") as file, skip_data():
                state: State = load(file, "meta")
            return {} if find_defect(state) else state
    except Exception:  # as in `read_snapshot`
        pass
    return {}


@dataclass(frozen=True)
class LoadedSnapshot:
    """A snapshot to go on from: its contents, its file, and why that is not the one that was
    named."""

    state: State
    path: Path
    why: str = ""


# ---- The name of a run


def path_error(reason: str) -> SnapshotError:
    return SnapshotError(f"--checkpoint-path: {reason}")


def files_of(path: Path) -> list[Path]:
    """What a run writes, but for its lock."""
    return [path, *(sibling_path(path, suffix) for suffix in SUFFIXES)]


def check_path(path: Path, resuming: bool) -> None:
    """Raise SnapshotError if what is at `path`, or would share its files, is not this run's. Writes
    nothing. A name that was typed wrongly must not cost anybody a file that is no snapshot."""
    if is_sibling(path):
        raise path_error(f"{path} is another run's second file; copy it to a name of its own")
    if not resuming and os.path.exists(path) and not peek(path):
        raise path_error(f"{path} is there and is no snapshot; name another file")
    for twin in {sibling_path(path, ending) for ending in ENDINGS} - {path}:
        if peek(twin):
            raise path_error(f"{path} would share its files with {twin}; name another file")


def claim(path: Path, resumed: LoadedSnapshot | None) -> IO[str]:
    """Make the folder of `path` and lock the files of a run that is about to start.

    Returns the open lock file, to be held while the run lives; the kernel opens the lock when this
    process ends.
    Raises SnapshotError if snapshots could not be written there (hours later is a bad time to
    learn of a typing error), if another run has them, or has saved since `resumed` was read.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        longest = temporary_name(sibling_path(path, ".2026-11-22-101500-99.metrics.jsonl"))
        longest.touch()  # a name may be too long, too
        longest.unlink()
        file = open(sibling_path(path, ".lock"), "a")
    except OSError as error:
        raise path_error(f"cannot write {path}: {error.strerror or error}") from None
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise path_error(f"another run is writing to {path}; name another file") from None
    except (ImportError, OSError):  # Windows; a file system that has no locks
        pass
    if resumed is not None:
        now = peek(resumed.path)
        if any(now.get(key) != resumed.state.get(key) for key in ("run", "step")):
            raise SnapshotError(f"--resume: another run was still at {resumed.path}; try again")
    return file


def rename_older_run(path: Path) -> None:
    """Rename what an older run has saved, for a new run of that name: see `archived_path`.

    Nothing is deleted and nothing is overwritten: perhaps somebody has merely forgotten --resume,
    or will want those weights tomorrow.
    """
    aside = archived_path(path)
    if aside is None:
        return
    # The snapshot comes last: should this process die now, the next one goes on from here.
    files = reversed(list(zip(files_of(path), files_of(aside), strict=True)))
    try:
        for file, renamed in files:
            if os.path.lexists(file):
                os.replace(file, renamed)
    except OSError as error:
        reason = f"cannot rename {file}, of another run: {error.strerror or error}"
        raise path_error(f"{reason}; name another file") from None


def archived_path(path: Path) -> Path | None:
    """What the older run at `path` is going to be called: `run.2026-11-22-101500.pt`, by the time
    at which it last saved, or logged if it saved nothing. None if there is none (what a run wrote
    that was killed before its first line is empty).
    """
    there = [file for file in files_of(path) if os.path.lexists(file)]
    if not any(file.lstat().st_size for file in there):
        return None
    date = time.strftime("%Y-%m-%d-%H%M%S", time.localtime(there[0].lstat().st_mtime))
    return unused_path(path, f".{date}")


def unused_path(path: Path, suffix: str) -> Path:
    """`run.SUFFIX.pt`, or else `run.SUFFIX-2.pt`, and so on: the first that no run has."""
    numbered = (f"-{number}" * (number > 1) for number in count(1))
    names = (sibling_path(path, f"{suffix}{number}.pt") for number in numbered)
    return next(name for name in names if not any(map(os.path.lexists, files_of(name))))


def promote_snapshot(source: Path, path: Path) -> None:
    """Make the snapshot `source`, that a run goes on from, the newest one of the run at `path`.

    What is there, and could not be read, gets another name: it might be the disk's fault.
    """
    if os.path.lexists(path):
        os.replace(path, unused_path(path, ".damaged"))
    with atomic_write(path, source.stat().st_size) as temporary:
        shutil.copyfile(source, temporary)
