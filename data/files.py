"""Names to files: what --train-data and --val-data mean, and the corpus that everybody has."""

import glob
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from .documents import TEXT_SUFFIXES, TOKEN_SUFFIXES, suffix_of
from .store import Say
from .tokenizer import DataError

CACHE_DIR = Path(__file__).resolve().parent / "cache"
AS_TEXT = "a file named by itself, or by a pattern, is read whatever its suffix"
# Tests are two thirds of the standard library (and Debian ships it without them); encodings and
# pydoc_data are tables; the others are gone from newer Pythons.
STDLIB_SKIPS = set(
    "test tests idle_test encodings pydoc_data lib2to3 idlelib turtledemo __pycache__ "
    "site-packages dist-packages".split()
)


def find_files(names: Sequence[str], flag: str, say: Say) -> list[Path]:
    """Files, folders (recursive) and globs as a list of files, each once, in the order given.

    A folder's files of unknown suffix are passed over: one line says so. Raises
    DataError that names `flag` and the name that finds nothing usable.
    """
    found: list[Path] = []
    skipped: list[Path] = []
    for name in names:
        before = len(found)
        for path in _expand(name, flag):
            inside, others = _walk(path) if path.is_dir() else ([path], [])
            found += inside
            skipped += others
        if len(found) == before:
            held = count_suffixes(skipped) or "hidden and empty ones are not counted"
            raise DataError(
                f"{flag} {name}: no text or token file in this folder ({held}); {AS_TEXT}"
            )
    found = list(dict.fromkeys(found))
    if left := set(skipped) - set(found):
        say(
            f"note     {flag} {describe_paths(names)}: files taken: {len(found):,}, "
            f"skipped: {len(left):,} "
            f"({count_suffixes(left)}); {AS_TEXT}"
        )
    return found


def _expand(name: str, flag: str) -> list[Path]:
    """The file or folder of that name, else what the pattern matches."""
    paths = [Path(name)]  # a file whose name holds a [ is not a pattern
    if not name or not paths[0].exists():
        paths = [Path(path) for path in sorted(glob.glob(name, recursive=True))]
    if not paths:
        raise DataError(f"{flag} {name}: no such file or folder")
    for path in paths:
        if not path.is_dir() and not path.is_file():
            raise DataError(f"{flag} {path}: not a regular file")
    return paths


def describe_paths(names: Sequence[str]) -> str:
    """Files or folders in as few words as a line has room for."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def count_suffixes(paths: Iterable[Path]) -> str:
    """`.pdf 12, .docx 3`: the five commonest, the commonest first."""
    kinds = Counter(suffix_of(path) or "without suffix" for path in sorted(paths))
    return ", ".join(f"{suffix} {number:,}" for suffix, number in kinds.most_common(5))


def find_stdlib() -> list[Path]:
    """The running interpreter's standard library, .py only: a corpus that everybody has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files, _ = _walk(root, {".py"}, STDLIB_SKIPS)
    if sum(path.stat().st_size for path in files) < 1_000_000:
        raise DataError(
            f"--train-data: the built-in corpus, Python's standard library, is not in {root}; "
            "name text files of your own"
        )
    return files


def _walk(
    root: Path,
    suffixes: Iterable[str] = (*TEXT_SUFFIXES, *TOKEN_SUFFIXES),
    skips: Iterable[str] = ("__pycache__",),
) -> tuple[list[Path], list[Path]]:
    """Files of these suffixes in a fixed order, and the others: none of them hidden, empty, or in
    our own token cache, or our own logs."""
    found: list[Path] = []
    others: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name[0] != "." and name not in skips and Path(folder, name).resolve() != CACHE_DIR
        ]
        for path in (Path(folder, name) for name in names):
            # (A run writes its log beside its snapshots.)
            if path.name[0] == "." or path.name.endswith(".metrics.jsonl"):
                continue
            if path.is_file() and path.stat().st_size:
                (found if suffix_of(path) in suffixes else others).append(path)
    return sorted(found), others  # os.walk's order is the file system's
