"""Dataset, the data of a training run, and the token cache that keeps its ids on disk.

Of several processes that need a cache folder, one builds it and the others wait. None ever reads an
incomplete folder.
"""

import errno
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from .batches import TokenFile, check_length
from .documents import reading, suffix_of
from .errors import DataError
from .tokenizer import Tokenizer

# Name of the file that describes a cache folder. Its hash proves that the folder is complete.
META = "meta.json"
# The errors of `flock` on disks that have no locks, as some network disks.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
# Part of every cache key. Increase it when a change of the code changes the cached files.
CACHE_VERSION = 1
# A file that has changed within so many nanoseconds is not noted: it could change again within one
# tick of its file system's clock, which is up to 2 s.
SETTLED_NS = 2 * 10**9
Say = Callable[[str], None]


@dataclass(frozen=True)
class Dataset:
    """Token ids for training and validation, and their tokenizer.

    `fingerprint` (hex): equal for equal text, split and tokenizer. Two tokenizers `bpe` count as
    equal if they have the same size and the same training text.
    """

    train_token_files: tuple[TokenFile, ...]
    val_token_files: tuple[TokenFile, ...]
    tokenizer: Tokenizer
    source: str  # description of the text's source, for messages
    fingerprint: str

    @classmethod
    def from_cache(
        cls, folder: Path, meta: dict[str, Any], tokenizer: Tokenizer, about: str, fingerprint: str
    ) -> "Dataset":
        """`meta`: content of the folder's meta.json."""
        dtype = np.dtype(meta["dtype"])
        train, val = (
            (TokenFile(path, dtype, 0, meta[f"{path.stem}_tokens"], tokenizer.vocab_size),)
            for path in (folder / "train.bin", folder / "val.bin")
        )
        return cls(train, val, tokenizer, about, fingerprint)

    @property
    def description(self) -> str:
        """Source, numbers of tokens and tokenizer, in one line."""
        train, val = (
            sum(file.count for file in files)
            for files in (self.train_token_files, self.val_token_files)
        )
        vocabulary = f"{self.tokenizer.name}, {self.tokenizer.vocab_size:,} ids"
        return f"{self.source}; {train:,} training and {val:,} validation tokens ({vocabulary})"


@contextmanager
def os_errors_as_data_errors(cache_dir: Path) -> Iterator[None]:
    """Convert an OSError to a DataError, with exit code 3 if the disk is full. The error of a write
    names no file, so its message names `cache_dir`."""
    try:
        yield
    except FileExistsError:
        raise DataError(
            f"{cache_dir} is no folder, or a link to none: remove it, or make what it leads to"
        ) from None
    except OSError as error:
        name = error.filename or cache_dir
        hint = (
            "; the token cache is written there, or to the folder that MINIGPT_CACHE names"
            if Path(str(name)).is_relative_to(cache_dir)
            else ""
        )
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise DataError(
            f"{name}: {error.strerror or error}{hint}", exit_code=3 if is_full else 2
        ) from error


def take_up_to(limit: int, pieces: Iterable[Any]) -> Iterator[Any]:
    """Yield `pieces` up to a total length of `limit`: characters if the pieces are strings, ids if
    the pieces are arrays of ids. The last piece is cut to fit."""
    for piece in pieces:
        yield piece[:limit]
        limit -= len(piece)
        if limit <= 0:
            return


def write_split_ids(
    folder: Path,
    tokenizer: Tokenizer,
    seq_len: int,
    parts: Mapping[str, Iterable[np.ndarray]],
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """Write train.bin and val.bin to `folder`. Return what meta.json says of them.

    `parts`: split ("train" or "val") -> arrays of ids. `max_tokens`: limit for the ids of each
    split; None: no limit. Raises DataError if a split has fewer than seq_len + 1 ids.
    """
    dtype = np.dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")
    meta = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size, "dtype": dtype.name}
    for split, pieces in parts.items():
        taken = take_up_to(max_tokens or sys.maxsize, pieces)
        with open(folder / f"{split}.bin", "wb") as file:
            file.writelines(ids.astype(dtype).tobytes() for ids in taken)
            count = file.tell() // dtype.itemsize
        check_length(count, seq_len, split)
        meta[f"{split}_tokens"] = count
    return meta


def load_or_build_folder(
    folder: Path,
    check: Callable[[], dict[str, Any]],
    build: Callable[[Path], dict[str, Any]],
    say: Say,
) -> dict[str, Any]:
    """Return the meta.json of a cache folder, which is built if it is missing or damaged.

    `check()` returns a part of meta.json, and raises an error if the folder cannot be built; it is
    called before a lock is waited for. `build(new)` writes the files to the temporary folder `new`,
    and returns the other part.

    Only one of several processes calls `build`, and one rename makes all files visible. A process
    that is killed during `build` leaves only a temporary folder, which the next builder deletes.
    """
    if meta := read_meta(folder):
        return meta
    facts = check()
    with locked(folder, say):
        if meta := read_meta(folder):  # another process has built it by now
            return meta
        if os.path.lexists(folder):
            say(f"{folder} is incomplete, damaged or of an older version: built anew")
        with TemporaryDirectory(prefix=f".tmp-{folder.name}-", dir=folder.parent) as temporary:
            new = Path(temporary, "new")
            new.mkdir()
            meta = facts | build(new)
            meta["sha256"] = hash_folder(new, meta)
            (new / META).write_text(json.dumps(meta, indent=2) + "\n")
            try:
                os.rename(new, folder)
            except OSError:  # it exists: damaged, or just built by a process without a lock
                if not read_meta(folder):
                    os.rename(folder, Path(temporary, "old"))  # (even if it is a file)
                    os.rename(new, folder)
        return meta


@contextmanager
def locked(folder: Path, say: Say) -> Iterator[None]:
    """Lock a cache folder for its builder, and delete the temporary folders of killed builders.

    The kernel releases the lock of a process that dies. (Windows and some network disks have no
    flock: there several processes may build at once, and the first rename counts.)
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # (The mode is "a+", because "w" would block if the file is a pipe.)
    with open(folder.with_name(f".lock-{folder.name}"), "a+") as file:
        try:
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for the process that builds {folder}")
                fcntl.flock(file, fcntl.LOCK_EX)
            for temporary in folder.parent.glob(f".tmp-{folder.name}-*"):
                shutil.rmtree(temporary, ignore_errors=True)
        except (ImportError, OSError) as error:  # without a lock, another process may write there
            if isinstance(error, OSError) and error.errno not in NO_LOCKS:
                raise
        yield


def read_meta(folder: Path) -> dict[str, Any] | None:
    """Return a cache folder's meta.json, or None if a file of the folder has changed since it was
    written. Reads all files of the folder: about a second per GB."""
    # A damaged meta.json may raise any of these errors, and may be a pipe, which would block.
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        if (folder / META).is_file():
            meta = json.loads((folder / META).read_bytes())
            if meta["sha256"] == hash_folder(folder, meta):
                return meta
    return None


def hash_folder(folder: Path, meta: dict[str, Any]) -> str:
    """Return a hash (hex) of a cache folder: of `meta` without `sha256`, and of the other files."""
    files = (folder / name for name in ("tokenizer.tiktoken", "train.bin", "val.bin"))
    content = hash_files([file for file in files if file.is_file()])
    return cache_key({name: meta[name] for name in meta if name != "sha256"}, content)


def noted_checksum(
    cache_dir: Path, paths: Sequence[Path], compute: Callable[[], str], *settings: object
) -> str:
    """Return `compute()`, a checksum (hex) of the files `paths`, and note it in `cache_dir`. The
    next start takes the note, unless path, size, mtime, ctime (ns) or inode of a file has changed.
    `settings`: what else the checksum depends on.

    Not found: other bytes behind equal size, times and inode. That takes a failing disk; a clock
    that was set back; a program that sets mtime back, where the file system keeps no ctime (FAT,
    Windows); or times that a network disk or a mapped file has not refreshed yet.
    """
    now, stats = time.time_ns(), [path.stat() for path in paths]
    state = [
        (str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        for path, stat in zip(paths, stats, strict=True)
    ]
    note = cache_dir / f".checksum-{cache_key(state, *settings)}"
    with suppress(OSError, ValueError):
        checksum, proof = note.read_text().split()
        if proof == cache_key(note.name, checksum):
            return checksum
    checksum = compute()
    if all(max(stat.st_mtime_ns, stat.st_ctime_ns) < now - SETTLED_NS for stat in stats):
        with suppress(OSError):  # without a note, all is read again
            cache_dir.mkdir(parents=True, exist_ok=True)
            note.write_text(f"{checksum} {cache_key(note.name, checksum)}")
    return checksum


def hash_files(paths: Sequence[Path]) -> str:
    """Return the SHA-256 (hex) of the contents of the files. Of their names only the suffix .jsonl
    counts, because such a file is read differently."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{suffix_of(path) == '.jsonl'} {path.stat().st_size} ".encode())
        with reading(path), open(path, "rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def cache_key(*parts: object) -> str:
    """Return the name of a cache folder (32 hex digits): a hash of all that decides its content."""
    return hashlib.sha256(json.dumps([CACHE_VERSION, *parts]).encode()).hexdigest()[:32]
