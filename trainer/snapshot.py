"""Save and load snapshots. A snapshot is one file that contains everything that a run needs to
resume.

A run never overwrites the files of another run. Before a run starts, it checks that its path may be
written (`check_no_path_conflict`), and locks the path (`claim`). Then the run renames the files
that an older run left there (`rename_older_run`).

A snapshot is a dict of tensors and of Python's basic types. `torch.save` writes the dict.
`torch.load` reads it with `weights_only=True`, so opening a file from another person never runs
code in the file. A checksum of all bytes is at the end of the file. The newest snapshot is at
`--checkpoint-path`. Two more files beside it have the same stem: `.prev.pt` is the previous
snapshot, and `.best.pt` is the one with the lowest validation loss.

A step is evaluated and logged before it is saved. The key `run` holds the id of the run. A run that
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
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
from torch.serialization import skip_data
from torch.utils._pytree import tree_leaves

from data.errors import MiniGPTError

State = dict[str, Any]

# Keys that every snapshot has. scripts/generate.py reads only the snapshot, because `config` and
# `tokenizer` are in it. (Their values were right when the checksum was made; shapes of tensors are
# checked by the code that uses them.)
KEYS = "model optimizer scaler step config args typed tokenizer data best_val_loss".split()
KEYS += ["run", "threads"]
# Text before the checksum in the comment at the end of a snapshot (see `append_checksum`).
CHECKSUM_LABEL = b"crc32 "
CHECKSUM_DIGITS = 8  # hexadecimal
# Endings of snapshot names. Paths that differ only in this ending have the same log and the same
# lock.
ENDINGS = ("", ".pt", ".pth", ".ckpt")
# Other files of a run, beside its newest snapshot (see `sibling_path`): snapshots and logs.
SIBLING_SUFFIXES = (".prev.pt", ".best.pt", ".metrics.jsonl", ".trace.json", ".tensorboard")


class SnapshotError(MiniGPTError):
    """A snapshot cannot be written, read or resumed. The message gives the reason and a remedy."""


class SaveError(MiniGPTError):
    """A save failed, because the disk is full or gone. Earlier snapshots are unchanged."""


def sibling_path(path: Path, suffix: str) -> Path:
    """Return `path` with `suffix` in place of its ending: `checkpoints/run.pt` and `.prev.pt` give
    `checkpoints/run.prev.pt`."""
    # Only ENDINGS count as endings. The text after the last dot may belong to the name: `lr0.01`
    # and `lr0.02` are two runs.
    ending = next(ending for ending in reversed(ENDINGS) if path.name.endswith(ending))
    return path.with_name(path.name.removesuffix(ending) + suffix)


def save_snapshot(path: Path, state: State, keep_previous: bool = False) -> None:
    """Write `state` to `path` so that a crash at any moment leaves a complete snapshot.

    The old snapshot is never overwritten: if a process died while it overwrote the file, the run
    would be lost. First the new file is written completely, under a temporary name, and forced to
    the disk (fsync). Then an atomic rename gives the file its final name. With `keep_previous`, the
    old file becomes `.prev.pt`.

    Raises SaveError if the file cannot be written.
    """
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    with writing_atomically(path, sum(tensor.nbytes for tensor in tensors)) as temporary:
        stale = re.compile(re.escape(f".{path.name}.") + r"\d+\.tmp")
        for name in filter(stale.fullmatch, os.listdir(path.parent)):
            path.with_name(name).unlink()  # left by a process that was killed during a save
        with open(temporary, "w+b") as file:
            torch.save(state, file)
            append_checksum(file)
            file.flush()
            os.fsync(file.fileno())
        if keep_previous and path.exists():
            os.replace(path, sibling_path(path, ".prev.pt"))


def append_checksum(file: BinaryIO) -> None:
    """Append the checksum of all bytes to a file that torch.save has written.

    The file is a zip archive. So the checksum is text in the archive's comment, which torch.load
    ignores: "crc32 " and eight hexadecimal digits. CRC-32 detects every error within 32 bits in a
    row, and all but one in 2^32 of other errors. It is the fastest checksum in Python's library.
    """
    file.seek(-2, os.SEEK_END)  # the last two bytes are the length of the comment: 0
    file.write((len(CHECKSUM_LABEL) + CHECKSUM_DIGITS).to_bytes(2, "little") + CHECKSUM_LABEL)
    file.write(checksum_before(file, file.tell()))


def checksum_before(file: BinaryIO, end: int) -> bytes:
    """Return the CRC-32 of the first `end` bytes of the file, as CHECKSUM_DIGITS hexadecimal
    digits. The position in the file is then `end`."""
    checksum = file.seek(0)
    while chunk := file.read(min(2**20, end - file.tell())):
        checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:0{CHECKSUM_DIGITS}x}".encode()


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
            sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):  # the folder may be gone
            temporary.unlink(missing_ok=True)
        # torch.save raises "unexpected pos ..." while it handles another error. That other error is
        # the real reason.
        reason = error if isinstance(error, OSError) else error.__context__
        if isinstance(reason, OSError):
            raise SaveError(describe_save_error(path, reason, n_bytes), exit_code=3) from None
        raise


def sync_folder(folder: Path) -> None:
    """Force a rename in the folder to the disk, where the file system can do that. SMB, VirtualBox
    and some FUSE file systems cannot. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def describe_save_error(path: Path, error: OSError, n_bytes: int) -> str:
    """Return an error line with the file, the reason and a remedy; for a full disk, also the MB
    needed and free."""
    reason = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"cannot save {path}: {reason}; check its folder and its disk"
    free = shutil.disk_usage(path.parent).free
    no_inodes = error.errno == errno.ENOSPC and free > n_bytes
    return (
        f"cannot save {path}: disk full ({reason}); it needs {n_bytes / 1e6:,.1f} MB, "
        f"{free / 1e6:,.1f} MB are free{'; are its inodes used up (df -i)?' if no_inodes else ''}; "
        "make room"
    )


def read_snapshot(path: Path) -> State:
    """Check a snapshot file, map it into memory, and return its state.

    The tensors are on the CPU. They are pages of the file, which all processes of a machine share,
    so a process needs no memory of its own for them. The checksum is verified first, because
    `torch.load` would accept a flipped bit in a weight.

    Raises SnapshotError if the file is missing, damaged, or no snapshot of this project.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # (opening a pipe could wait forever)
        raise SnapshotError(f"{path} is not a file")
    try:
        if damaged := find_damaged_part(path):
            raise SnapshotError(f"{path} is damaged (checksum of {damaged} is wrong)")
        # torch cannot map a file whose name is not valid Unicode. It then reads the file.
        return load_state(path, "cpu", mmap=str(path).isprintable())
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


def find_damaged_part(path: Path) -> str | None:
    """Return the part of a snapshot file whose checksum is wrong; None if all checksums are right.

    Older snapshots have no checksum of all bytes, but each record has one. No record has
    attributes: a bit among these could make torch take the record for a folder, and return memory
    that was never written.
    """
    with open(path, "rb") as file:
        end = max(0, file.seek(0, os.SEEK_END) - CHECKSUM_DIGITS)
        file.seek(max(0, end - len(CHECKSUM_LABEL)))
        if file.read(len(CHECKSUM_LABEL)) == CHECKSUM_LABEL:
            return None if checksum_before(file, end) == file.read() else "all bytes"
    with zipfile.ZipFile(path) as archive:
        strange = [entry.filename for entry in archive.infolist() if entry.external_attr]
        return archive.testzip() or next(iter(strange), None)


def load_state(path: Path, device: str, mmap: bool = False) -> State:
    """Load a file that torch.save has written, if it contains only plain data and tensors.

    With `mmap` the tensors are pages of the file. Raises SnapshotError if the content is no
    snapshot, and torch's errors.
    """
    # Hide torch's warnings about TorchScript and sparse tensors, which no snapshot contains.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
    missing = [key for key in KEYS if key not in state] if isinstance(state, dict) else KEYS
    if missing:
        raise SnapshotError(f"{path} is no MiniGPT snapshot (no {missing[0]})")
    return state


# ---- The content of a snapshot


def check_shapes(path: Path, weights: State, model: State) -> None:
    """Raise SnapshotError unless `weights` and `model` have the same names and shapes. All dtypes
    of floats count as equal.

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


def peek(path: Path) -> State:
    """Read a snapshot without the values of its tensors, which may be many GB. The tensors are on
    device "meta".

    Returns {} if the file is no snapshot.
    """
    with suppress(Exception):  # (many types of errors, as in `read_snapshot`)
        if path.is_file():
            with skip_data():
                return load_state(path, "meta")
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
    would also belong to another run, or is no file. (A run would wait forever for the other end of
    a pipe. A link whose target is missing may name a disk that is not mounted.)
    """
    for file in (*files_of_run(path), sibling_path(path, ".lock")):
        if os.path.lexists(file) and not os.path.isfile(file) and file.suffix != ".tensorboard":
            raise make_path_error(f"{file} is there and is no file; name another file")
    if sibling_path(path, "").suffix in (".prev", ".best"):
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
    numbered = chain([""], (f"-{number}" for number in count(2)))
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
