"""A folder that is built once, however many processes ask, and never seen half done."""

import hashlib
import json
import os
import platform
import secrets
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .suffixes import suffix_of

CACHE_VERSION = 1  # part of every key: raise it when the same input would give other files
Say = Callable[[str], None]


def build_cache(folder: Path, build: Callable[[Path], dict[str, Any]], say: Say) -> dict[str, Any]:
    """Make `folder` once, however many processes ask; returns its meta.json.

    build(temporary folder) writes the files. One rename makes them visible, so nobody ever reads
    half a cache, and a builder that is killed leaves only a temporary folder, which the next one
    removes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent, say) as alone:
        if found := read_meta(folder):  # built while we waited
            return found
        if alone:
            for stale in folder.parent.glob(".tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
        temporary = folder.parent / f".tmp-{secrets.token_hex(8)}"
        temporary.mkdir()
        try:
            meta = build(temporary) | {"python": platform.python_version()}
            meta["crc32"] = checksums(temporary, meta, os.listdir(temporary))
            (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
            for path in temporary.iterdir():
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())
            if folder.exists():
                say(f"{shown(folder)} is incomplete or damaged: built anew")
                shutil.rmtree(folder)
            os.rename(temporary, folder)
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

        with open(cache_dir / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for the process that builds a token cache in {shown(cache_dir)}")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield True


def read_meta(folder: Path) -> dict[str, Any] | None:
    """meta.json of a complete cache; None where there is none, or a bit of it has changed.

    All of it is read for that, as the text was to find the folder. A flipped bit is an id that
    nobody wrote: at best an index error hours later, at worst a word that is trained on.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
        saved = meta.pop("crc32")
        found = checksums(folder, meta, saved.keys() - {"meta.json"})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return meta if found == saved else None


def checksums(folder: Path, meta: dict[str, Any], names: Iterable[str]) -> dict[str, int]:
    """CRC-32 of files of a cache and, as "meta.json", of what that says besides."""
    sums = {"meta.json": zlib.crc32(json.dumps(meta, sort_keys=True).encode())}
    for name in names:
        sums[name] = 0
        with open(folder / name, "rb") as file:
            while block := file.read(2**20):
                sums[name] = zlib.crc32(block, sums[name])
    return sums


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
