"""Names to files: what --train-data and --val-data mean, and the corpus that everybody has."""

import glob
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from .tokenizer import DataError

CACHE_DIR = Path(__file__).resolve().parent / "cache"
TOKEN_SUFFIXES = {".bin", ".npy"}
TEXT_SUFFIXES = set(
    ".txt .text .md .rst .tex .org .log .srt .jsonl .json .csv .tsv .xml .html .htm .css .yaml "
    ".yml .toml .ini .cfg .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .scala .js .ts .rb "
    ".php .pl .lua .r .jl .hs .ml .swift .sh .sql".split()
)
# Tests are two thirds of the standard library (and Debian ships it without them); encodings and
# pydoc_data are tables; the others are gone from newer Pythons.
STDLIB_SKIPS = set(
    "test tests idle_test encodings pydoc_data lib2to3 idlelib turtledemo __pycache__ "
    "site-packages dist-packages".split()
)


def find_files(patterns: Sequence[str], flag: str) -> list[Path]:
    """Files, folders (recursive) and globs as a list of files, each once, in the order given.

    Raises DataError that names `flag` and the pattern that finds nothing usable.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        if not pattern:
            raise DataError(f"{flag}: an empty name")
        paths = [Path(pattern)]
        if not paths[0].exists():  # a file whose name holds a [ is not a pattern
            paths = [Path(path) for path in sorted(glob.glob(pattern, recursive=True))]
        if not paths:
            what = "no file matches" if glob.has_magic(pattern) else "no such file or folder"
            raise DataError(f"{flag} {pattern}: {what}")
        for path in paths:
            inside = _walk(path, TEXT_SUFFIXES | TOKEN_SUFFIXES) if path.is_dir() else []
            if path.is_dir() and not inside:
                raise DataError(f"{flag} {path}: no text or token file in this folder")
            if not path.is_dir() and not path.is_file():
                raise DataError(f"{flag} {path}: not a regular file")
            if path.is_file() and path.stat().st_size == 0:
                raise DataError(f"{flag} {path}: the file is empty")
            found |= dict.fromkeys(inside or [path])
    return list(found)


def find_stdlib() -> list[Path]:
    """The running interpreter's standard library, .py only: a corpus that everybody has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _walk(root, {".py"}, STDLIB_SKIPS)
    if sum(path.stat().st_size for path in files) < 1_000_000:
        raise DataError(
            f"--train-data: the built-in corpus, Python's standard library, is not in {root}; "
            "name text files of your own"
        )
    return files


def _walk(root: Path, suffixes: set[str], skips: Iterable[str] = ()) -> list[Path]:
    """Files in a fixed order: not hidden, not empty, not in our own token cache."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name[0] != "." and name not in skips and Path(folder, name).resolve() != CACHE_DIR
        ]
        for path in (Path(folder, name) for name in names if name[0] != "."):
            if path.suffix.lower() in suffixes and path.is_file() and path.stat().st_size:
                found.append(path)
    return sorted(found)  # os.walk's order is the file system's
