"""Whose file is it? A run takes a name for its snapshots without taking another run's files.

What a run writes lies beside its --checkpoint-path (`beside`). Before it starts it looks whether it
may write there, and locks the name; what an older run has left under it is renamed.
"""

import os
from pathlib import Path
from typing import IO

from .snapshot import (
    ENDINGS,
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
    try:
        if path.exists() and not path.is_file():
            raise SnapshotError(f"--checkpoint-path: {path} is not a file")
        if not resuming:
            check_free(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        for file in (path, beside(path, ".old.pt")):
            for suffix in (*SUFFIXES, ".lock"):
                if beside(file, suffix).is_dir():
                    raise SnapshotError(f"--checkpoint-path: {beside(file, suffix)} is a folder")
        longest = temporary_name(beside(path, ".metrics.jsonl"))
        longest.touch()
        longest.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise SnapshotError(f"--checkpoint-path: cannot write {path}: {reason}") from None


def check_free(path: Path) -> None:
    """Raise SnapshotError if a new run of that name would take what is not an older one's.

    A name that was typed wrongly must not cost anybody a file that is no snapshot.
    """
    for file in (path, beside(path, ".old.pt")):
        if file.exists() and not peek(file):
            raise SnapshotError(
                f"--checkpoint-path: {file} is there and is no snapshot; name another file"
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
    """Rename what an older run has left: `run.pt` to `run.old.pt`, and so its log and the others.

    For a new run of that name. Perhaps somebody has merely forgotten `--resume`: the old one can
    still go on, as `run.old.pt`, and is never taken for the new one. If there is such a file
    already, the run that got further is kept. Raises SnapshotError if another run is writing there.
    """
    old, previous = beside(path, ".old.pt"), beside(path, ".prev.pt")
    if not path.exists() and previous.exists():  # killed between the two renames of a save
        os.replace(previous, path)
    if not path.exists():
        return
    held = lock(old)
    ours = [*(beside(path, suffix) for suffix in SUFFIXES), path]
    olds = [*(beside(old, suffix) for suffix in SUFFIXES), old]
    # The snapshot comes last: should this process die now, the next one goes on from here.
    if old.exists():
        for file in ours if old_stays(path) else olds:
            file.unlink(missing_ok=True)
    for file, renamed in zip(ours, olds, strict=True):
        if file.exists():
            os.replace(file, renamed)
    if held is not None:
        held.close()


def old_stays(path: Path) -> bool:
    """Has the run that was renamed before got further than the one that is to be renamed now?"""
    return peek(beside(path, ".old.pt")).get("step", -1) > peek(path).get("step", -1)


def claim(path: Path, resumed: Resumed | None) -> IO[str] | None:
    """`lock` the files of a run that is about to start.

    Raises SnapshotError if another run has them, or has saved since `resumed` was read.
    """
    held = lock(path)
    if resumed is None:
        if path.exists():
            old = lock(beside(path, ".old.pt"))
            if old is not None:
                old.close()  # step_aside is going to need it
        return held
    now = peek(resumed.path)
    if any(now.get(key) != resumed.state.get(key) for key in ("run", "step")):
        raise SnapshotError(f"--resume: another run was still at {resumed.path}; try again")
    return held
