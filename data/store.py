"""The Dataset that a trainer gets, and the token cache that it comes from.

A cache folder is built once, however many processes ask for it, and is never seen half built.
"""

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from .batches import TokenFile, check_length
from .documents import suffix_of
from .tokenizer import DataError, DiskFull, Tokenizer

META = "meta.json"  # describes a cache folder; its hash proves that the folder is complete
CACHE_VERSION = 1  # part of every key: raise it if the same input gives other files than before
Say = Callable[[str], None]


@dataclass(frozen=True)
class Dataset:
    """The ids of training and validation, and their tokenizer. fingerprint: hex, equal for equal
    content, split and tokenizer (of a bpe: for equal size and equal text to train it on)."""

    train: tuple[TokenFile, ...]
    val: tuple[TokenFile, ...]
    tokenizer: Tokenizer
    about: str  # the source of the text, for people
    fingerprint: str

    @classmethod
    def from_cache(
        cls, folder: Path, meta: dict[str, Any], tokenizer: Tokenizer, about: str, fingerprint: str
    ) -> "Dataset":
        """Return the Dataset of a cache folder; `meta`: the content of its meta.json."""
        dtype = np.dtype(meta["dtype"])
        train, val = (
            (TokenFile(folder / f"{split}.bin", dtype, 0, meta[f"{split}_tokens"]),)
            for split in ("train", "val")
        )
        return cls(train, val, tokenizer, about, fingerprint)

    @property
    def description(self) -> str:
        """One line: the source, the numbers of tokens, the tokenizer."""
        train, val = (sum(file.count for file in files) for files in (self.train, self.val))
        vocabulary = f"{self.tokenizer.name}, {self.tokenizer.vocab_size:,} ids"
        return f"{self.about}; {train:,} training and {val:,} validation tokens ({vocabulary})"


@contextmanager
def os_errors_as_data_errors(cache_dir: Path) -> Iterator[None]:
    """Turn an OSError into a DataError, or into DiskFull if there is no space. An error without a
    file name is reported with `cache_dir`."""
    try:
        yield
    except FileExistsError:
        raise DataError(
            f"{cache_dir} is no folder, or a link to none: remove it, or make what it leads to"
        ) from None
    except OSError as error:
        reason = f"{error.filename or cache_dir}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFull(f"{reason}; the token cache needs room there") from error
        raise DataError(reason) from error


def up_to(limit: int, pieces: Iterable[Any]) -> Iterator[Any]:
    """Yield the pieces (arrays of ids, or strings) up to `limit` ids or characters in total; cut
    the last piece."""
    for piece in pieces:
        yield piece[:limit]
        limit -= len(piece)
        if limit <= 0:
            return


def write_ids(
    folder: Path,
    tokenizer: Tokenizer,
    seq_len: int,
    parts: Mapping[str, Iterable[np.ndarray]],
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """Write the ids of each split ("train", "val") to its .bin file, at most `max_tokens` of each;
    return the part of meta.json that a reader needs. Raises DataError if a split has no seq_len + 1
    tokens."""
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    meta = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size, "dtype": dtype}
    for split, pieces in parts.items():
        count = 0
        with open(folder / f"{split}.bin", "wb") as file:
            for ids in up_to(max_tokens or sys.maxsize, pieces):
                file.write(ids.astype(dtype).tobytes())
                count += len(ids)
        check_length(count, seq_len, split)
        meta[f"{split}_tokens"] = count
    return meta


def load_folder(folder: Path, build: Callable[[Path], dict[str, Any]], say: Say) -> dict[str, Any]:
    """Return the content of a cache folder's meta.json. If the folder is absent or damaged, build
    it first: build(new folder) writes the files and returns the content of meta.json.

    `build` runs once, however many processes ask. One rename makes the files visible, so no process
    ever reads half a cache. A builder that is killed leaves only a temporary folder, which the next
    builder removes.
    """
    if meta := read_meta(folder):
        return meta
    with locked(folder.parent, say):
        if meta := read_meta(folder):  # another process has built it
            return meta
        if os.path.lexists(folder):
            say(f"{folder} is incomplete, damaged or of an older version: built anew")
        with TemporaryDirectory(prefix=".tmp-", dir=folder.parent) as temporary:
            new = Path(temporary, "new")
            new.mkdir()
            meta = build(new)
            meta["sha256"] = hash_folder(new, meta)
            (new / META).write_text(json.dumps(meta, indent=2) + "\n")
            if os.path.lexists(folder):  # it may be a file: a rename moves that too
                os.rename(folder, Path(temporary, "old"))
            os.rename(new, folder)
        return meta


@contextmanager
def locked(cache_dir: Path, say: Say) -> Iterator[None]:
    """Let one process build at a time, and remove the leftovers of killed builders. The kernel
    releases the lock when its holder dies. (Windows has no flock: there, processes may build at the
    same time.)"""
    cache_dir.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with open(cache_dir / ".lock", "a+") as file:  # (if it is a pipe, "w" would wait for a reader)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for the process that builds a token cache in {cache_dir}")
            fcntl.flock(file, fcntl.LOCK_EX)
        for stale in cache_dir.glob(".tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield


def read_meta(folder: Path) -> dict[str, Any] | None:
    """Return the content of a cache folder's meta.json if all files are as they were written, else
    None.

    This reads all files: about a second per GB.
    """
    # A damaged file may hold anything. If it is a pipe, reading would block: so is_file first.
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        if (folder / META).is_file():
            meta = json.loads((folder / META).read_bytes())
            if meta["sha256"] == hash_folder(folder, meta):
                return meta
    return None


def hash_folder(folder: Path, meta: dict[str, Any]) -> str:
    """Return a hash (hex) of meta.json's content and of the other files of a cache folder."""
    files = (folder / name for name in ("tokenizer.tiktoken", "train.bin", "val.bin"))
    content = hash_files([file for file in files if file.is_file()])
    return cache_key({name: meta[name] for name in meta if name != "sha256"}, content)


def hash_files(paths: Sequence[Path]) -> str:
    """Return the SHA-256 (hex) of the files' contents, wherever they lie. Whether a file is a
    .jsonl counts, because a .jsonl is read differently."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{suffix_of(path) == '.jsonl'} {path.stat().st_size} ".encode())
        with open(path, "rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def cache_key(*parts: object) -> str:
    """Return the name of a cache folder: a hash (32 hex digits) of everything that decides its
    bytes."""
    return hashlib.sha256(json.dumps([CACHE_VERSION, *parts]).encode()).hexdigest()[:32]
