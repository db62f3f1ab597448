"""The token cache on disk: folders of files that are complete, undamaged, and made once.

Of several processes that need a folder, one builds it and the others wait, so that none ever reads
an incomplete folder.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .errors import DataError
from .files import Say, hash_files

# Name of the file that describes a cache folder. Its hash proves that the folder is complete.
META = "meta.json"
# Part of every cache key. Increase it when a change of the code changes the cached files.
CACHE_VERSION = 3


@contextmanager
def os_errors_as_data_errors(cache_dir: Path) -> Iterator[None]:
    """Convert an OSError to a DataError, with exit code 3 if the disk is full. The error of a write
    names no file, so its message names `cache_dir`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or cache_dir}: {error.strerror or error}; MINIGPT_CACHE names "
            "another folder for the token cache",
            exit_code=3 if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else 2,
        ) from error


def cache_key(paths: Sequence[Path], *settings: object) -> str:
    """Return the name of a cache folder (32 hex digits): a hash of the files' states and of all
    other settings that decide its content.

    The state of a file is its path, size, mtime and ctime (ns), so that the key is known without
    reading the file. Other bytes behind equal size and times are not found; that takes a failing
    disk, a clock that was set back, or two writes within one tick of a file system without ctime.
    """
    stats = [(os.path.abspath(path), path.stat()) for path in paths]
    states = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
    content = json.dumps([CACHE_VERSION, states, *settings])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def load_or_build_folder(
    folder: Path, build: Callable[[Path], dict[str, Any]], say: Say
) -> dict[str, Any]:
    """Return the meta.json of a cache folder, which is built if it is missing or damaged.

    `build(new)` writes the files to the temporary folder `new`, and returns what meta.json says of
    them. `sha256` is added, a hash of all files and of meta.json itself, which depends on content
    alone and is therefore also the fingerprint of the data.

    Only one of several processes calls `build`, and one rename makes all files visible. A process
    that is killed during `build` leaves only a temporary folder, which the next builder deletes.
    """
    if meta := read_verified_meta(folder):
        return meta
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".lock-{folder.name}"), "a") as lock:
        with suppress(ImportError):  # (Windows has no flock: there several processes may build)
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases the lock of a process that dies
        if meta := read_verified_meta(folder):  # another process has built it by now
            return meta
        for left in folder.parent.glob(f".tmp-{folder.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        with TemporaryDirectory(prefix=f".tmp-{folder.name}-", dir=folder.parent) as temporary:
            new = Path(temporary, "new")
            new.mkdir()
            meta = build(new)
            meta["sha256"] = hash_folder(new, meta)
            (new / META).write_text(json.dumps(meta, indent=2) + "\n")
            if folder.exists():
                say(f"{folder} is incomplete, damaged or of an older version: built anew")
                os.rename(folder, Path(temporary, "old"))
            os.rename(new, folder)
    return meta


def read_verified_meta(folder: Path) -> dict[str, Any] | None:
    """Return a cache folder's meta.json, or None if a file of the folder has changed since it was
    written; all files are read, about a GB per second."""
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        meta: dict[str, Any] = json.loads((folder / META).read_bytes())
        if meta["sha256"] == hash_folder(folder, meta):
            return meta
    return None


def hash_folder(folder: Path, meta: dict[str, Any]) -> str:
    """Return a hash (hex) of a cache folder: of `meta` without `sha256`, and of the other files."""
    about = json.dumps({name: meta[name] for name in sorted(meta) if name != "sha256"})
    files = sorted(path for path in folder.iterdir() if path.name != META)
    return hashlib.sha256(f"{about} {hash_files(files)}".encode()).hexdigest()
