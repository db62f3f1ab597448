"""Save and load snapshots. A snapshot is one file that contains everything that a run needs to
resume.

A run never overwrites the files of another run. Before a run starts, it checks that its path may be
written (`check_no_path_conflict`), and locks the path (`claim`). Then the run renames the files
that an older run left there (`rename_older_run`).

A snapshot is a dict of tensors and of Python's basic types. `torch.save` writes the dict.
`torch.load` reads it with `weights_only=True`, so opening a file from another person never runs
code in the file. The newest snapshot is at `--checkpoint-path`. Two more files beside it have the
same stem: `.prev.pt` is the previous snapshot, and `.best.pt` is the one with the lowest validation
loss.

A snapshot is written before its step is evaluated and logged. So the key `record` holds the step's
log record, and a resumed run can log that step. The key `run` holds the id of the run. A run that
torchrun has restarted recognises its own snapshots by this id (resume.load_own_run).

A snapshot contains *no* random-number state and *no* position in the data. Both are functions of
the step (see `train_minimal.accumulate`), so they need not be saved and cannot be restored wrongly.
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

# Keys that every snapshot must have -> type of the value. A run needs all of these keys to resume.
# scripts/generate.py reads only the snapshot, because `config` and `tokenizer` are in it.
KEY_TYPES = {
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
# Endings of snapshot names. Paths that differ only in this ending have the same log and the same
# lock.
ENDINGS = ("", ".pt", ".pth", ".ckpt")
# Other files of a run, beside its newest snapshot (see `sibling_path`): snapshots and logs.
SIBLING_SUFFIXES = (".prev.pt", ".best.pt", ".metrics.jsonl", ".trace.json", ".tensorboard")


class SnapshotError(ValueError):
    """A snapshot cannot be written, read or resumed. The message gives the reason and a remedy."""


class SaveError(Exception):
    """A save failed, because the disk is full or gone. Earlier snapshots are unchanged."""


def sibling_path(path: Path, suffix: str) -> Path:
    """Return `path` with `suffix` in place of its ending: `checkpoints/run.pt` and `.prev.pt` give
    `checkpoints/run.prev.pt`."""
    # Only ENDINGS count as endings. The text after the last dot may belong to the name: `lr0.01`
    # and `lr0.02` are two runs.
    ending = next(ending for ending in reversed(ENDINGS) if path.name.endswith(ending))
    return path.with_name(path.name.removesuffix(ending) + suffix)


def is_prev_or_best(path: Path) -> bool:
    """Return True if `path` is the name of some run's `.prev.pt` or `.best.pt`."""
    return sibling_path(path, "").suffix in (".prev", ".best")


def save_snapshot(path: Path, state: State, keep_previous: bool = False) -> None:
    """Write `state` to `path` so that a crash at any moment leaves a complete snapshot.

    The old snapshot is never overwritten: if a process died while it overwrote the file, the run
    would be lost. First the new file is written completely, under a temporary name, and forced to
    the disk (fsync). Then an atomic rename gives the file its final name. With `keep_previous`, the
    old file becomes `.prev.pt`.

    Raises SaveError if the file cannot be written.
    """
    with writing_atomically(path, bytes_of(state)) as temporary:
        stale = re.compile(re.escape(f".{path.name}.") + r"\d+\.tmp")
        for name in filter(stale.fullmatch, os.listdir(path.parent)):
            path.with_name(name).unlink()  # left by a process that was killed during a save
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if keep_previous and path.exists():
            os.replace(path, sibling_path(path, ".prev.pt"))


def bytes_of(state: State) -> int:
    """Return the total size of all tensors in `state`, in bytes."""
    return sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))


def temporary_path(path: Path) -> Path:
    """Return the temporary path to which this process writes a file before it is renamed to
    `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextmanager
def writing_atomically(path: Path, n_bytes: int) -> Iterator[Path]:
    """Yield a temporary path to write to. At the end of the `with` block, rename that file to
    `path`.

    After a failure the temporary file is deleted. Raises SaveError with the reason that the
    operating system gives. If the disk is full, the message also says that `n_bytes` are needed.
    """
    # Each process has its own temporary name: where `claim` cannot lock files, two runs may save to
    # the same path.
    temporary = temporary_path(path)
    try:
        yield temporary
        os.replace(temporary, path)
        if os.name == "posix":  # a rename is on the disk only after an fsync of its folder
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
    except BaseException as error:
        with suppress(OSError):  # the folder may be gone
            temporary.unlink(missing_ok=True)
        # torch.save raises "unexpected pos ..." while it handles another error. That other error is
        # the real reason.
        reason = error if isinstance(error, OSError) else error.__context__
        if isinstance(reason, OSError):
            raise SaveError(describe_save_error(path, reason, n_bytes)) from None
        raise


def describe_save_error(path: Path, error: OSError, n_bytes: int) -> str:
    """Return an error line with the file and the reason; for a full disk, also the MB needed and
    free."""
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
    """Read a snapshot file into CPU memory and return its state.

    The tensors do not go to the GPU. The model and the optimizer are there, and the snapshot's
    tensors would take as many bytes again. First the checksums in the file are verified.
    `torch.save` writes checksums, but `torch.load` ignores them, and would accept a flipped bit in
    a weight.

    Raises SnapshotError if the file is missing, damaged, or no snapshot of this project.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # (opening a pipe could wait forever)
        raise SnapshotError(f"{path} is not a file")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise SnapshotError(f"{path} is damaged (checksum of {damaged} is wrong)")
        state: State = load_weights_only(path, "cpu")
    except FileNotFoundError:
        raise SnapshotError(f"there is no snapshot {path}") from None
    except pickle.UnpicklingError:
        raise SnapshotError(f"{path} holds more than plain data: refused") from None
    except (SnapshotError, MemoryError):
        raise
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception:  # for a damaged file zipfile and torch raise many types of errors
        raise SnapshotError(f"{path} is no snapshot, or a damaged one") from None
    if strange := first_invalid_key(state):
        raise SnapshotError(f"{path} is no MiniGPT snapshot (no {strange}, or a strange one)")
    return state


def load_weights_only(file: Path | BinaryIO, device: str) -> Any:
    """Load a file that torch.save has written, if it contains only plain data and tensors."""
    # Hide torch's warnings about TorchScript and sparse tensors, which no snapshot contains.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(file, map_location=device, weights_only=True)


def first_invalid_key(state: Any) -> str | None:
    """Return the first key of KEY_TYPES that is missing in `state` or has a value of another type;
    None if there is no such key."""
    for key, kind in KEY_TYPES.items():
        if not isinstance(state, dict) or not isinstance(state.get(key), kind):
            return key
    return None


def check_shapes(path: Path, weights: State, model: State) -> None:
    """Raise SnapshotError unless `weights` and `model` have the same names and shapes.

    `weights`: state dict in a snapshot, or in a folder of GPT-2. `model`: state dict that model.py
    makes for the configuration in that file.
    """
    for name in model | weights:
        wants, has = describe_weight(model.get(name)), describe_weight(weights.get(name))
        if has != wants:
            raise SnapshotError(
                f"{path} holds {has} as {name}, model.py says {wants}: is it damaged, or has "
                "model.py changed since?"
            )


def describe_weight(weight: object) -> str:
    """Return a weight's type and shape in words, to compare weights. All float dtypes give the same
    words."""
    if weight is None:
        return "nothing"
    if not isinstance(weight, torch.Tensor) or weight.layout != torch.strided:
        return "no plain tensor"
    dtype = "floats" if weight.is_floating_point() else str(weight.dtype)
    return f"{dtype} of shape {tuple(weight.shape)}"


def peek(path: Path) -> State:
    """Read a snapshot without the values of its tensors, which may be many GB. The tensors are on
    device "meta".

    Returns {} if the file is no snapshot.
    """
    try:
        if path.is_file():
            with open(path, "rb") as file, skip_data():
                state: State = load_weights_only(file, "meta")
            return {} if first_invalid_key(state) else state
    except Exception:  # (many types of errors, as in `read_snapshot`)
        pass
    return {}


@dataclass(frozen=True)
class LoadedSnapshot:
    """A snapshot to resume from: its contents and its file."""

    state: State
    path: Path
    fallback_reason: str = ""  # why `path` is not the file that --checkpoint-path names


# ---- The path of a run


def make_path_error(reason: str) -> SnapshotError:
    """Return a SnapshotError that names --checkpoint-path."""
    return SnapshotError(f"--checkpoint-path: {reason}")


def files_of_run(path: Path) -> list[Path]:
    """Return all files that a run at `path` writes, except its lock."""
    return [path, *(sibling_path(path, suffix) for suffix in SIBLING_SUFFIXES)]


def check_no_path_conflict(path: Path, resuming: bool) -> None:
    """Raise SnapshotError if a run may not use `path`. This function writes nothing.

    A new run may not replace a file that is no snapshot, because a typing error must not cost a
    user that file. No run may use a path if its log, its lock, its `.prev.pt` or its `.best.pt`
    would also belong to another run.
    """
    if is_prev_or_best(path):
        raise make_path_error(f"{path} is another run's second file; copy it to a name of its own")
    if not resuming and os.path.exists(path) and not peek(path):
        raise make_path_error(f"{path} is there and is no snapshot; name another file")
    for twin in {sibling_path(path, ending) for ending in ENDINGS} - {path}:
        if peek(twin):
            raise make_path_error(f"{path} would share its files with {twin}; name another file")


def claim(path: Path, resumed: LoadedSnapshot | None) -> IO[str]:
    """Make the folder of `path`, and lock the files of a run that is about to start. Return the
    open lock file.

    Keep the lock file open while the run lives. The kernel releases the lock when this process
    ends.

    Raises SnapshotError if snapshots cannot be written there (it is better to fail now than hours
    later), if another run has the lock, or if another run has saved since `resumed` was read.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        longest = temporary_path(sibling_path(path, ".2026-11-22-101500-99.metrics.jsonl"))
        longest.touch()  # fails if a name is too long
        longest.unlink()
        file = open(sibling_path(path, ".lock"), "a")
    except OSError as error:
        raise make_path_error(f"cannot write {path}: {error.strerror or error}") from None
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise make_path_error(f"another run is writing to {path}; name another file") from None
    except (ImportError, OSError):  # Windows, or a file system without locks
        pass
    if resumed is not None:
        now = peek(resumed.path)
        if any(now.get(key) != resumed.state.get(key) for key in ("run", "step")):
            raise SnapshotError(f"--resume: another run was still at {resumed.path}; try again")
    return file


def rename_older_run(path: Path) -> None:
    """Rename the files of an older run at `path` (see `archived_path`), so that a new run can use
    `path`.

    No file is deleted or overwritten: the user may only have forgotten --resume, or may need the
    old weights later. Raises SnapshotError if a file cannot be renamed.
    """
    aside = archived_path(path)
    if aside is None:
        return
    # Rename the newest snapshot last: if this process dies halfway, the next run finds the snapshot
    # at `path`, and renames the rest.
    files = reversed(list(zip(files_of_run(path), files_of_run(aside), strict=True)))
    try:
        for file, renamed in files:
            if os.path.lexists(file):
                os.replace(file, renamed)
    except OSError as error:
        reason = f"cannot rename {file}, of another run: {error.strerror or error}"
        raise make_path_error(f"{reason}; name another file") from None


def archived_path(path: Path) -> Path | None:
    """Return the new path for an older run at `path`, e.g. `run.2026-11-22-101500.pt`.

    The new name contains the time of the older run's last save. If the older run saved nothing, the
    name contains the time of its last log line. Returns None if there is no older run. (Empty files
    do not count: a run that is killed before its first log line leaves empty files.)
    """
    existing = [file for file in files_of_run(path) if os.path.lexists(file)]
    if not any(file.lstat().st_size for file in existing):
        return None
    date = time.strftime("%Y-%m-%d-%H%M%S", time.localtime(existing[0].lstat().st_mtime))
    return unused_path(path, f".{date}")


def unused_path(path: Path, suffix: str) -> Path:
    """Try the paths `runSUFFIX.pt`, `runSUFFIX-2.pt`, ... in turn. Return the first path at which
    no run has files."""
    numbered = (f"-{number}" * (number > 1) for number in count(1))
    names = (sibling_path(path, f"{suffix}{number}.pt") for number in numbered)
    return next(name for name in names if not any(map(os.path.lexists, files_of_run(name))))


def copy_as_newest_snapshot(source: Path, path: Path) -> None:
    """Copy the snapshot `source`, from which a run resumes, to `path`, so that it becomes the run's
    newest snapshot.

    If a file exists at `path`, `resume.load_newest` could not read it. This file is renamed and not
    deleted, because perhaps only the disk had a fault, and the file is intact.
    """
    if os.path.lexists(path):
        os.replace(path, unused_path(path, ".damaged"))
    with writing_atomically(path, source.stat().st_size) as temporary:
        shutil.copyfile(source, temporary)
