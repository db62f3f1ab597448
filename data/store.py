"""What a trainer gets, and the cache that it comes from: folders that are built once, however many
processes ask, and never seen half done."""

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

META = "meta.json"  # tells what a folder of the cache holds, and how to see that it is whole
CACHE_VERSION = 1  # part of every key: raise it when the same input would give other files
Say = Callable[[str], None]


@dataclass(frozen=True)
class Dataset:
    """What to train on. fingerprint: hex, the same for the same content, split and tokenizer (of a
    bpe: its size, and the text that it would be trained on)."""

    train: tuple[TokenFile, ...]
    val: tuple[TokenFile, ...]
    tokenizer: Tokenizer
    about: str  # what it was made from
    fingerprint: str

    @classmethod
    def from_cache(
        cls, folder: Path, meta: dict[str, Any], tokenizer: Tokenizer, about: str, fingerprint: str
    ) -> "Dataset":
        """The ids in a folder of the cache."""
        dtype = np.dtype(meta["dtype"])
        train, val = (
            (TokenFile(folder / f"{split}.bin", dtype, 0, meta[f"{split}_tokens"]),)
            for split in ("train", "val")
        )
        return cls(train, val, tokenizer, about, fingerprint)

    @property
    def description(self) -> str:
        """One line."""
        train, val = (sum(file.count for file in files) for files in (self.train, self.val))
        vocabulary = f"{self.tokenizer.name}, {self.tokenizer.vocab_size:,} ids"
        return f"{self.about}; {train:,} training and {val:,} validation tokens ({vocabulary})"


@contextmanager
def os_errors_as_data_errors(cache_dir: Path) -> Iterator[None]:
    """Makes a DataError of an OSError; where that names no file, it is one in `cache_dir`."""
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
    """The pieces (arrays of ids, or text), but no more than `limit` ids or characters of all."""
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
    """Write each part ("train", "val") to its .bin, `max_tokens` ids at most; return what their
    reader has to know. Raises DataError if one is too short for a sequence of seq_len tokens."""
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
    """Return meta.json of a folder of the cache. If it is not there, or not as it was written,
    build(new folder) writes its files, once however many processes ask, and returns its meta.json.

    One rename makes them visible, so no process ever reads half a cache; a builder that is killed
    leaves only a temporary folder, which the next one removes.
    """
    if meta := read_meta(folder):
        return meta
    with locked(folder.parent, say):
        if meta := read_meta(folder):  # built while we waited
            return meta
        if os.path.lexists(folder):
            say(f"{folder} is incomplete, damaged or of an older version: built anew")
        with TemporaryDirectory(prefix=".tmp-", dir=folder.parent) as temporary:
            new = Path(temporary, "new")
            new.mkdir()
            meta = build(new)
            meta["sha256"] = hash_folder(new, meta)
            (new / META).write_text(json.dumps(meta, indent=2) + "\n")
            if os.path.lexists(folder):  # not a folder, perhaps: a rename moves anything
                os.rename(folder, Path(temporary, "old"))
            os.rename(new, folder)
        return meta


@contextmanager
def locked(cache_dir: Path, say: Say) -> Iterator[None]:
    """Lets one process build at a time, and removes what a killed one has left. The kernel opens
    the lock when its holder dies. (Windows has no flock: there all build, and may meet.)
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with open(cache_dir / ".lock", "a+") as file:  # ("w" would wait for a pipe's reader)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for the process that builds a token cache in {cache_dir}")
            fcntl.flock(file, fcntl.LOCK_EX)
        for stale in cache_dir.glob(".tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield


def read_meta(folder: Path) -> dict[str, Any] | None:
    """Return meta.json of a folder of the cache if all its files are what was written, else None.

    All of them are read for that: about a second a GB.
    """
    # (A damaged file may hold anything, and a pipe in its place would be waited for.)
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        if (folder / META).is_file():
            meta = json.loads((folder / META).read_bytes())
            if meta["sha256"] == hash_folder(folder, meta):
                return meta
    return None


def hash_folder(folder: Path, meta: dict[str, Any]) -> str:
    """sha256 of meta.json's content, and of the other files that a cache has."""
    files = (folder / name for name in ("tokenizer.tiktoken", "train.bin", "val.bin"))
    content = hash_files([file for file in files if file.is_file()])
    return cache_key({name: meta[name] for name in meta if name != "sha256"}, content)


def hash_files(paths: Sequence[Path]) -> str:
    """sha256 of what the files say, wherever they lie (.jsonl is read otherwise than text)."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{suffix_of(path) == '.jsonl'} {path.stat().st_size} ".encode())
        with open(path, "rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def cache_key(*parts: object) -> str:
    """The name of a cache folder: a hash of all that decides its bytes."""
    return hashlib.sha256(json.dumps([CACHE_VERSION, *parts]).encode()).hexdigest()[:32]
