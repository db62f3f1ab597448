"""What a trainer gets, and the cache that it comes from: a folder that is built once, however many
processes ask, and never seen half done."""

import errno
import hashlib
import json
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .batches import TokenFile, TrainBatches, ValBatches
from .documents import suffix_of
from .tokenizer import DataError, DiskFull, Tokenizer

META = "meta.json"  # tells what a folder of the cache holds, and how to see that it is whole
CACHE_VERSION = 1  # part of every key: raise it when the same input would give other files
Say = Callable[[str], None]


@dataclass(frozen=True)
class Dataset:
    """What to train on. fingerprint: hex, the same for the same content, tokenizer and split."""

    train: tuple[TokenFile, ...]
    val: tuple[TokenFile, ...]
    tokenizer: Tokenizer
    about: str  # what it was made from
    fingerprint: str

    @property
    def description(self) -> str:
        """One line."""
        train, val = (sum(file.count for file in files) for files in (self.train, self.val))
        vocabulary = f"{self.tokenizer.name}, {self.tokenizer.vocab_size:,} ids"
        return f"{self.about}; {train:,} training and {val:,} validation tokens ({vocabulary})"


@dataclass(frozen=True)
class FoundData:
    """Data that were found to be good. Nothing is encoded yet, and nothing written."""

    vocab_size: int
    # From the cache, or into it. Raises DataError (DiskFull, if that has no room).
    load: Callable[[], Dataset]
    is_most: bool = False  # a bpe is still to be trained: that many ids, or fewer


@contextmanager
def one_line(cache_dir: Path) -> Iterator[None]:
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


def cached_dataset(folder: Path, meta: dict[str, Any], tokenizer: Tokenizer, about: str) -> Dataset:
    """The content of a folder of the cache."""
    train, val = token_files(folder, meta)
    return Dataset((train,), (val,), tokenizer, about, fingerprint=folder.name)


def token_files(folder: Path, meta: dict[str, Any]) -> list[TokenFile]:
    """train.bin and val.bin of a folder of the cache."""
    return [
        TokenFile(folder / f"{split}.bin", meta["dtype"], 0, meta[f"{split}_tokens"])
        for split in ("train", "val")
    ]


def label(names: Sequence[str]) -> str:
    """Files or folders in as few words as a line has room for."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def build_cache(
    folder: Path, build: Callable[[Path], dict[str, Any]], seq_len: int, say: Say
) -> dict[str, Any]:
    """Make `folder` once, however many processes ask; returns its meta.json.

    build(new folder) writes the files. One rename makes them visible, so no process ever reads half
    a cache; a builder that is killed leaves only a temporary folder, which the next one removes.
    Raises DataError, and leaves nothing, if a part is too short for a sequence of seq_len tokens.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent, say) as alone:
        if found := read_meta(folder):  # built while we waited
            return found
        if alone:
            for stale in folder.parent.glob(".tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
        if os.path.lexists(folder):
            say(f"{shown(folder)} is incomplete, damaged or of an older version: built anew")
        temporary = folder.parent / f".tmp-{secrets.token_hex(8)}"
        new = temporary / "new"
        new.mkdir(parents=True)
        try:
            meta = build(new)
            train, val = token_files(new, meta)
            TrainBatches.check([train], seq_len)
            ValBatches.check([val], seq_len)
            files = sorted(new.iterdir())
            meta |= {"python": platform.python_version(), "content": hash_files(files)}
            meta["times"] = read_times(files)
            write_meta(new, meta)
            for path in new.iterdir():
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())
            if os.path.lexists(folder):  # not a folder, perhaps: a rename moves anything
                os.rename(folder, temporary / "old")
            os.rename(new, folder)
            return meta
        except OSError:
            if found := read_meta(folder):  # no lock, and another process was first: same bytes
                return found
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _lock(cache_dir: Path, say: Say) -> Iterator[bool]:
    """One builder at a time; the kernel opens the lock when its holder dies. Yields whether we
    are alone: Windows has no flock, there everybody builds and the first rename wins."""
    if sys.platform == "win32":
        yield False
    else:
        import fcntl

        with open(cache_dir / ".lock", "a+") as file:  # ("w" would wait for a pipe's reader)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for the process that builds a token cache in {shown(cache_dir)}")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield True


def read_meta(folder: Path) -> dict[str, Any] | None:
    """Return meta.json of a cache that is as it was when it was last found good, else None.

    A file is read again only if its size or times are not those that were noted when it was last
    found good. (A copy has other times. They are noted, where that can be written.)
    """
    # (A damaged file may hold anything, and a pipe in its place would be waited for.)
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        content = (folder / META).read_bytes() if (folder / META).is_file() else b""
        meta = json.loads(content)
        is_whole = meta.pop("checksum") == key(meta)
        files = [folder / name for name in meta["times"]]
        found = read_times(files)
        if is_whole and found == meta["times"]:
            return meta
        if is_whole and all(map(Path.is_file, files)) and hash_files(files) == meta["content"]:
            meta["times"] = found
            with suppress(OSError):
                write_meta(folder, meta)
            return meta
    return None


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write meta.json, whole or not at all: other processes may be reading it."""
    temporary = folder / f"{META}.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(meta | {"checksum": key(meta)}, indent=2) + "\n")
        os.replace(temporary, folder / META)
    finally:
        temporary.unlink(missing_ok=True)


def read_times(files: Sequence[Path]) -> dict[str, list[int]]:
    """Size in bytes, mtime and ctime in ns, of each file. Writing to a file changes its ctime,
    which on Linux and macOS no program can set back. (On Windows it is the time of creation.)"""
    found = {file.name: file.stat() for file in files}
    return {name: [s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in found.items()}


def hash_files(paths: list[Path]) -> str:
    """sha256 of what the files say, wherever they lie (.jsonl is read otherwise than text)."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{suffix_of(path) == '.jsonl'} {path.stat().st_size} ".encode())
        with open(path, "rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def key(*parts: object) -> str:
    """The name of a cache folder: a hash of all that decides its bytes."""
    return hashlib.sha256(json.dumps([CACHE_VERSION, *parts]).encode()).hexdigest()[:32]


def shown(path: Path) -> str:
    """As short as a person would write it: relative to where we are, if it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
