"""Whose file is it? A run takes a name for its snapshots without taking another run's files.

What a run writes lies beside its --checkpoint-path (`beside`). Before it starts it looks whether it
may write there, and locks the name; what an older run has left under it is renamed.
"""

import itertools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from .snapshot import (
    SUFFIXES,
    Resumed,
    SnapshotError,
    beside,
    is_second,
    peek,
    saving,
    temporary_name,
    twins,
)


def refuse(reason: str) -> SnapshotError:
    return SnapshotError(f"--checkpoint-path: {reason}")


def cannot_write(path: Path, error: OSError) -> SnapshotError:
    return refuse(f"cannot write {path}: {error.strerror or error}")


def check_name(path: Path, resuming: bool) -> None:
    """Raise SnapshotError if what is at `path`, or beside it, is not a run's. Writes nothing.

    A name that was typed wrongly must not cost anybody a file that is no snapshot.
    """
    if is_second(path) or path.name.endswith((".lock", *SUFFIXES)):
        raise refuse(
            f"{path} is the name of another run's second file, log or lock; "
            "name another file (a snapshot that is there: copy it to a name of its own)"
        )
    log, lock = beside(path, ".metrics.jsonl"), beside(path, ".lock")
    try:
        for file in (*files_of(path), lock):
            if os.path.lexists(file) and not file.is_file() and file.suffix != ".tensorboard":
                raise refuse(f"{file} is not a file")
        if not resuming and path.exists() and not peek(path):
            raise refuse(f"{path} is there and is no snapshot; name another file")
        for twin in twins(path):
            if not resuming and peek(twin):
                raise refuse(f"{path} would share its log with {twin}; name another file")
        if not is_log(log):
            raise refuse(f"{log} is there and is no log of a run; name another file")
        if lock.exists() and lock.stat().st_size:  # a run's is empty
            raise refuse(f"{lock} is there and is no lock of a run; name another file")
    except OSError as error:
        raise cannot_write(path, error) from None


def is_log(path: Path) -> bool:
    """Has a run written it, or nobody yet?"""
    begin = b'{"step":'
    try:
        with open(path, "rb") as file:
            line = file.readline(2**16)
    except FileNotFoundError:
        return True
    if line.endswith(b"\n"):
        return line.startswith(begin) and b'"train_loss":' in line
    return line.startswith(begin) or begin.startswith(line)  # a crash has cut it short


def claim(path: Path, resumed: Resumed | None) -> IO[str] | None:
    """Make the folder of `path` and `lock` the files of a run that is about to start.

    Raises SnapshotError if snapshots could not be written there (hours later is a bad time to
    learn of a typing error), if another run has them, or has saved since `resumed` was read.
    """
    # The longest name: of the log, when a later run of that name renames it.
    date = "" if resumed else ".2026-11-22-101500-99"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        longest = temporary_name(beside(path, f"{date}.metrics.jsonl"))
        longest.touch()
        longest.unlink()
    except OSError as error:
        raise cannot_write(path, error) from None
    held = lock(path)
    if resumed is not None:
        now = peek(resumed.path)
        if any(now.get(key) != resumed.state.get(key) for key in ("run", "step")):
            raise SnapshotError(f"--resume: another run was still at {resumed.path}; try again")
    return held


def lock(path: Path) -> IO[str] | None:
    """Keep a second run off the same files; the kernel opens the lock when this process ends.

    Returns the open lock file, to be held while the run lives (None where there are no locks).
    Raises SnapshotError if another run has it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    name = beside(path, ".lock")
    try:
        file = open(name, "a")
    except OSError as error:
        raise cannot_write(name, error) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise refuse(f"another run is writing to {path}; name another file") from None
    except OSError:  # a file system that has no locks
        return None
    return file


def step_aside(path: Path) -> None:
    """Rename what an older run has saved, for a new run of that name: see `name_aside`.

    Nothing is deleted and nothing is overwritten: perhaps somebody has merely forgotten --resume,
    or will want those weights tomorrow.
    """
    aside, previous = name_aside(path), beside(path, ".prev.pt")
    if aside is None:
        return
    if not path.exists() and previous.exists():  # killed between the two renames of a save
        os.replace(previous, path)
    # The snapshot comes last: should this process die now, the next one goes on from here.
    for file, renamed in reversed(list(zip(files_of(path), files_of(aside), strict=True))):
        if os.path.lexists(file):
            try:
                os.replace(file, renamed)
            except OSError as error:
                reason = f"cannot rename {file}, of another run: {error.strerror or error}"
                raise refuse(f"{reason}; name another file") from None


def files_of(path: Path) -> list[Path]:
    """What a run writes, but for its lock."""
    return [path, *(beside(path, suffix) for suffix in SUFFIXES)]


def name_aside(path: Path) -> Path | None:
    """What the older run at `path` is going to be called: `run.2026-11-22-101500.pt`, by the time
    at which it last saved, or logged if it saved nothing. None if there is none (what a run wrote
    that was killed before its first line is empty).
    """
    there = [file for file in files_of(path) if os.path.lexists(file)]
    if not any(file.lstat().st_size for file in there):
        return None
    date = time.strftime("%Y-%m-%d-%H%M%S", time.localtime(there[0].lstat().st_mtime))

    def is_free(aside: Path) -> bool:
        # Some files may have that name already: where a kill has cut their renaming short, which
        # begins with the last of them.
        here, gone = (
            [i for i, file in enumerate(files_of(name)) if os.path.lexists(file)]
            for name in (path, aside)
        )
        return not gone or max(here) < min(gone)

    return first_name(path, f".{date}", is_free)


def first_name(path: Path, suffix: str, is_free: Callable[[Path], bool]) -> Path:
    """`run.SUFFIX.pt` if that is free, or else `run.SUFFIX-2.pt`, and so on."""
    endings = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    return next(filter(is_free, (beside(path, f"{suffix}{ending}.pt") for ending in endings)))


def take_place(source: Path, path: Path) -> None:
    """Make the snapshot `source`, that a run goes on from, the newest one of the run at `path`.

    What is there, and could not be read, gets another name: it might be the disk's fault.
    """
    if os.path.lexists(path):
        os.replace(path, first_name(path, ".damaged", lambda name: not os.path.lexists(name)))
    if source == beside(path, ".prev.pt"):  # or the next save would make it the one before
        os.replace(source, path)
    else:  # it stays the best one, of this run or of another
        with saving(path, source.stat().st_size) as temporary:
            shutil.copyfile(source, temporary)
