"""Save and load snapshots: a snapshot is one file with everything that a run needs to resume.

A run never overwrites the files of another run. Before it writes anything, it checks its path
(`check_path`) and locks it (`lock_run_files`), and then renames the files that an older run left
there (`rename_older_run`).

A snapshot is a dict of tensors and of Python's basic types, which `torch.save` writes; a checksum
of all bytes follows at the end of the file. `torch.load` reads it with `weights_only=True`, so that
opening a file from another person never runs code in the file. The newest snapshot is at
`--checkpoint-path`, beside two more files of the same stem: `.prev.pt`, the previous snapshot, and
`.best.pt`, the one with the lowest validation loss.

A step is evaluated and logged before the newest snapshot is saved. The key `run` holds the id of
the run, by which a run that torchrun has restarted recognises its own snapshots
(resume.load_own_run).

A snapshot contains *no* random-number state and *no* position in the data. Both are functions of
the step (see `train_minimal.accumulate_gradients`), so they need not be saved and cannot be
restored wrongly.
"""

import errno
import os
import pickle
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
from torch.utils._pytree import tree_leaves

from data.errors import MiniGPTError

State = dict[str, Any]

CHECKSUM_LINE_BYTES = 14  # "crc32 " and eight hexadecimal digits
# Files of a run beside its newest snapshot (see `sibling_path`): snapshots first, then logs.
SIBLING_SUFFIXES = (".prev.pt", ".best.pt", ".metrics.jsonl", ".trace.json", ".tensorboard")


class SnapshotError(MiniGPTError):
    """A snapshot cannot be written, read or resumed; the message gives the reason and a remedy."""


class SaveError(MiniGPTError):
    """A save failed, because the disk is full or gone; earlier snapshots are unchanged."""


def sibling_path(path: Path, suffix: str) -> Path:
    """Return `path` with `suffix` in place of its ending: `checkpoints/run.pt` and `.prev.pt` give
    `checkpoints/run.prev.pt`. (Only .pt is an ending: `lr0.01` and `lr0.02` are two runs.)"""
    return path.with_name(path.name.removesuffix(".pt") + suffix)


def files_of_run(path: Path) -> list[Path]:
    """Return all files that a run at `path` writes, except its lock. The first three are its
    snapshots: the newest, the previous, and the best (lowest validation loss)."""
    return [path, *(sibling_path(path, suffix) for suffix in SIBLING_SUFFIXES)]


# ---- Write and read one file


def save_snapshot(path: Path, state: State, keep_previous: bool = False) -> None:
    """Write `state` to `path` so that a crash at any moment leaves a complete snapshot.

    The old snapshot is never overwritten: if a process died while it overwrote the file, the run
    would be lost. The new file is first written completely, under a temporary name, and forced to
    the disk (fsync); an atomic rename then gives it its final name. With `keep_previous`, the old
    file becomes `.prev.pt`. Raises SaveError if the file cannot be written.
    """
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    with writing_atomically(path, sum(tensor.nbytes for tensor in tensors)) as temporary:
        with open(temporary, "w+b") as file:
            torch.save(state, file)
            file.write(run_label(state.get("run", "")))
            file.write(checksum_line(file, file.tell()))
            file.flush()
            os.fsync(file.fileno())
        if keep_previous and path.exists():
            os.replace(path, sibling_path(path, ".prev.pt"))


def checksum_line(file: BinaryIO, end: int) -> bytes:
    """Return the last bytes of a snapshot, CHECKSUM_LINE_BYTES many: the CRC-32 of its first `end`
    bytes. The position in the file is then `end`.

    torch.load ignores bytes after the zip archive that torch.save writes. CRC-32, the fastest
    checksum in Python's library, detects every error within 32 bits in a row, and all but one in
    2^32 of other errors.
    """
    checksum = file.seek(0)
    while chunk := file.read(min(2**20, end - file.tell())):
        checksum = zlib.crc32(chunk, checksum)
    return f"crc32 {checksum:08x}".encode()


def run_label(run: str) -> bytes:
    """Return the bytes before the checksum: the id of the run that has written the file."""
    return f"run {run:<32} ".encode()


def run_id_of_snapshot(path: Path) -> str | None:
    """Return the id of the run that has written a snapshot, without reading all of it; None if
    `save_snapshot` has not written this file. Raises OSError."""
    n = len(run_label(""))
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - n - CHECKSUM_LINE_BYTES))
        label, checksum = file.read(n), file.read()
    is_ours = label.startswith(b"run ") and checksum.startswith(b"crc32 ")
    return label[4:].decode(errors="replace").strip() if is_ours else None


@contextmanager
def writing_atomically(path: Path, n_bytes: int) -> Iterator[Path]:
    """Yield a temporary path to write to, which the end of the `with` block renames to `path`.

    After a failure the temporary file is deleted; what a killed process has left there is
    overwritten. (One name is enough, because `lock_run_files` locks the path for one run.) Raises
    SaveError with the reason that the operating system gives, and with the space that is needed and
    free.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # the folder may be gone
            temporary.unlink(missing_ok=True)
        # torch.save raises "unexpected pos ..." while it handles the error that is the real reason.
        reason = error if isinstance(error, OSError) else error.__context__
        if isinstance(reason, OSError):
            raise SaveError(describe_save_error(path, reason, n_bytes), exit_code=3) from None
        raise


def describe_save_error(path: Path, error: OSError, n_bytes: int) -> str:
    """Return an error line with the file, the reason and a remedy; for a full disk, also the MB
    needed and free."""
    reason = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"cannot save {path}: {reason}; check its folder and its disk"
    return (
        f"cannot save {path}: disk full ({reason}); it needs {n_bytes / 1e6:,.1f} MB, "
        f"{shutil.disk_usage(path.parent).free / 1e6:,.1f} MB are free; make room"
    )


def read_snapshot(path: Path) -> State:
    """Check a snapshot file, map it into memory, and return its state.

    The tensors are on the CPU, as pages of the file that all processes of a machine share, so that
    a process needs no memory of its own for them. The checksum is verified first, because
    `torch.load` would accept a flipped bit in a weight. Raises SnapshotError if the file is
    missing, damaged, or no snapshot of this trainer.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would wait forever
        raise SnapshotError(f"{path} is no file")
    try:
        with open(path, "rb") as file:
            end = max(0, file.seek(0, os.SEEK_END) - CHECKSUM_LINE_BYTES)
            if checksum_line(file, end) != file.read():
                raise SnapshotError(f"{path} is no snapshot of this trainer, or a damaged one")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise SnapshotError(f"there is no snapshot {path}") from None
    except pickle.UnpicklingError:
        raise SnapshotError(f"{path} holds more than plain data: refused") from None
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror or error}") from None


@dataclass(frozen=True)
class LoadedSnapshot:
    """A snapshot to resume from: its contents and its file."""

    state: State
    path: Path
    fallback_reason: str = ""  # why `path` is not the file that --checkpoint-path names
    identity: Any = None  # os.stat of the file that was read


def check_shapes(path: Path, weights: State, model: State) -> None:
    """Raise SnapshotError unless `weights` and `model` have the same names and shapes, and both
    have floats of any dtype or the same other dtype.

    `weights`: state dict in a snapshot, or in a folder of GPT-2. `model`: state dict that model.py
    makes for the configuration in that file.
    """
    has, wants = (
        {
            name: f"{'floats' if w.is_floating_point() else w.dtype} of shape {tuple(w.shape)}"
            for name, w in tensors.items()
        }
        for tensors in (weights, model)
    )
    for name in wants | has:
        if has.get(name) != wants.get(name):
            raise SnapshotError(
                f"{path} holds {has.get(name, 'nothing')} as {name}, model.py says "
                f"{wants.get(name, 'nothing')}: is it damaged, or has model.py changed since?"
            )


# ---- The path of a run


def check_path(path: Path, resuming: bool) -> None:
    """Raise SnapshotError, before anything is written, if a run may not use `path`: because
    something else than a snapshot is there, or because its other files would belong to another run,
    too."""
    (twin,) = {sibling_path(path, ""), sibling_path(path, ".pt")} - {path}
    reason = ""
    if os.path.lexists(path) and not os.path.isfile(path):  # a folder, or a link to a lost disk
        reason = f"{path} is there and is no file"
    elif os.path.isfile(path) and not resuming and run_id_of_snapshot(path) is None:
        reason = f"{path} is there and is no snapshot"
    elif path.stem.endswith((".prev", ".best")):
        reason = f"{path} is another run's second file; copy it to a name of its own"
    elif os.path.isfile(twin):
        reason = f"{path} would share its files with {twin}"
    if reason:
        raise SnapshotError(f"--checkpoint-path: {reason}; name another file")


def lock_run_files(path: Path, resumed: LoadedSnapshot | None) -> IO[str]:
    """Make the folder of `path`, and lock the files of a run that is about to write them. Return
    the open lock file, to be kept open while the run lives: the kernel releases the lock when this
    process ends. Windows and some network file systems have no such locks, so two runs must not
    share a path there.

    Raises SnapshotError if the folder cannot be written (it is better to fail now than hours
    later), if another run has the lock, or if another run has saved since `resumed` was read.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(sibling_path(path, ".lock"), "a")
    except OSError as error:
        at = error.filename or ""
        is_lost = os.path.islink(at) and not os.path.exists(at)  # (mkdir says "File exists")
        reason = f"{at} is a link to nothing" if is_lost else error.strerror or error
        raise SnapshotError(f"--checkpoint-path: cannot write {path}: {reason}") from None
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SnapshotError(
            f"--checkpoint-path: another run is writing to {path}; name another file"
        ) from None
    except (ImportError, OSError):
        pass  # no locks here
    if resumed is not None and not is_same_file(resumed):
        raise SnapshotError(f"--resume: another run was still at {resumed.path}; try again")
    return file


def is_same_file(resumed: LoadedSnapshot) -> bool:
    """Return False if the file has been replaced or removed since it was read."""
    path = resumed.path
    return os.path.exists(path) and os.path.samestat(os.stat(path), resumed.identity)


def rename_older_run(path: Path, files: list[Path]) -> Path | None:
    """Rename those `files` at `path` that are of an older run, so that a run can use `path`. Return
    the new path of its snapshot, or None if there is no older run.

    The new name, such as `run.2026-11-22-101500.pt`, contains the time of the older run's last save
    or, if it saved nothing, of its last log line. No file is deleted or overwritten: the user may
    only have forgotten --resume. (A run that is killed before its first log line leaves empty
    files, which do not count.)
    """
    found = [file.lstat() for file in files if os.path.lexists(file) and file.lstat().st_size]
    if not found:
        return None
    date = time.strftime(".%Y-%m-%d-%H%M%S", time.localtime(found[0].st_mtime))
    aside = unused_path(path, date)
    # Rename the newest snapshot last: if this process dies halfway, the next run finds the snapshot
    # at `path`, and renames the rest.
    for file, renamed in reversed([*zip(files_of_run(path), files_of_run(aside), strict=True)]):
        if file in files and os.path.lexists(file):
            os.replace(file, renamed)
    return aside


def unused_path(path: Path, suffix: str) -> Path:
    """Return the first of the paths `runSUFFIX.pt`, `runSUFFIX-2.pt`, ... at which no run has
    files."""
    numbered = chain([""], (f"-{number}" for number in count(2)))
    names = (sibling_path(path, f"{suffix}{number}.pt") for number in numbered)
    return next(name for name in names if not any(map(os.path.lexists, files_of_run(name))))
