"""Whose file is it? A run takes a name for its snapshots without taking another run's files.

What a run writes lies beside its --checkpoint-path (`beside`). Before it starts it looks whether it
may write there, and locks the name; what an older run has left under it is renamed.
"""

import itertools
import os
import re
import time
from pathlib import Path
from typing import IO

from .snapshot import (
    ENDINGS,
    OTHERS,
    SUFFIXES,
    Resumed,
    SnapshotError,
    beside,
    peek,
    temporary_name,
)


def check_writable(path: Path, resuming: bool) -> None:
    """Make the folder of `path`; raise SnapshotError if snapshots could not be written there.

    Called before training: hours later is a bad time to learn of a typing error.
    """
    if beside(path, "").suffix in (".prev", ".best"):  # the run beside it would overwrite it
        raise SnapshotError(
            f"--checkpoint-path: {path} is the name of another run's second file; copy what is "
            "there to a name of its own"
        )
    try:
        if path.exists() and not path.is_file():
            raise SnapshotError(f"--checkpoint-path: {path} is not a file")
        if not resuming:
            check_free(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix in {*SUFFIXES, ".lock"} - {".tensorboard"}:
            if beside(path, suffix).is_dir():
                raise SnapshotError(f"--checkpoint-path: {beside(path, suffix)} is a folder")
        # The longest name: of the log, when a later run of that name renames it.
        date = "" if resuming else ".2026-11-22-101500-99"
        longest = temporary_name(beside(path, f"{date}.metrics.jsonl"))
        longest.touch()
        longest.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise SnapshotError(f"--checkpoint-path: cannot write {path}: {reason}") from None


def check_free(path: Path) -> None:
    """Raise SnapshotError if a new run of that name would take what is not an older one's.

    A name that was typed wrongly must not cost anybody a file that is no snapshot.
    """
    if path.exists() and not peek(path):
        raise SnapshotError(
            f"--checkpoint-path: {path} is there and is no snapshot; name another file"
        )
    for twin in (beside(path, ending) for ending in ENDINGS):
        if twin != path and peek(twin):
            raise SnapshotError(
                f"--checkpoint-path: {path} would share its log with {twin}; name another file"
            )


def lock(path: Path) -> IO[str] | None:
    """Keep a second run off the same files; the kernel opens the lock when this process ends.

    Returns the open lock file, to be held while the run lives (None where there are no locks).
    Raises SnapshotError if another run has it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        file = open(beside(path, ".lock"), "w")
    except OSError as error:
        reason = f"cannot write {beside(path, '.lock')}: {error.strerror}"
        raise SnapshotError(f"--checkpoint-path: {reason}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SnapshotError(
            f"--checkpoint-path: another run is writing to {path}; name another file"
        ) from None
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
        if file.exists():
            try:
                os.replace(file, renamed)
            except OSError as error:
                reason = f"cannot rename {file}, of another run: {error.strerror or error}"
                raise SnapshotError(f"--checkpoint-path: {reason}; name another file") from None


def files_of(path: Path) -> list[Path]:
    """What a run writes, but for its lock."""
    return [path, *(beside(path, suffix) for suffix in SUFFIXES)]


def name_aside(path: Path) -> Path | None:
    """What the older run at `path` is going to be called: `run.2026-11-22-101500.pt`, by the time
    at which it last saved. None if there is none: a log alone, of a run that saved nothing, is no
    run.
    """
    snapshots = [path, *(beside(path, suffix) for suffix in OTHERS)]
    newest = next((file for file in snapshots if file.exists()), None)
    if newest is None:
        return None
    date = time.strftime("%Y-%m-%d-%H%M%S", time.localtime(newest.stat().st_mtime))
    endings = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))  # two in one second
    names = (beside(path, f".{date}{ending}.pt") for ending in endings)
    return next(aside for aside in names if is_free(aside, path))


def is_free(aside: Path, path: Path) -> bool:
    """Can the files at `path` have that name, with nothing overwritten?

    What is there without a snapshot is of the very run at `path`: a kill has cut its renaming
    short, and those that are still here belong to them.
    """
    pairs = zip(files_of(path), files_of(aside), strict=True)
    return not aside.exists() and not any(a.exists() and b.exists() for a, b in pairs)


def replaced_runs(path: Path) -> list[Path]:
    """The snapshots of older runs that had the name `path`, the newest last."""
    stem = re.escape(beside(path, "").name)
    pattern = re.compile(stem + r"\.\d{4}-\d\d-\d\d-\d{6}(-\d+)?\.pt")
    try:
        files = [file for file in path.parent.iterdir() if pattern.fullmatch(file.name)]
    except OSError:
        return []
    return sorted(files, key=lambda file: file.stat().st_mtime)


def claim(path: Path, resumed: Resumed | None) -> IO[str] | None:
    """`lock` the files of a run that is about to start.

    Raises SnapshotError if another run has them, or has saved since `resumed` was read.
    """
    held = lock(path)
    if resumed is None:
        return held
    now = peek(resumed.path)
    if any(now.get(key) != resumed.state.get(key) for key in ("run", "step")):
        raise SnapshotError(f"--resume: another run was still at {resumed.path}; try again")
    return held
