"""Find the files that --train-data and --val-data name, and the built-in corpus."""

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
# Tests are two thirds of the standard library (and Debian ships it without them). encodings and
# pydoc_data are tables. Newer Pythons do not have the others.
STDLIB_SKIPS = set(
    "test tests idle_test encodings pydoc_data lib2to3 idlelib turtledemo __pycache__ "
    "site-packages dist-packages".split()
)


def find_files(names: Sequence[str], flag: str, say: Say) -> list[Path]:
    """Return files, folders (searched recursively) and globs as a list of files, each once, in the
    order given.

    Files with an unknown suffix in a folder are skipped, and `say` gets one line about them. Raises
    DataError with `flag` and the first name that has no usable file.
    """
    files: list[Path] = []
    skipped: list[Path] = []
    for name in names:
        n_before = len(files)
        for path in _expand(name, flag):
            inside, others = _walk(path) if path.is_dir() else ([path], [])
            files += inside
            skipped += others
        if len(files) == n_before:
            suffixes = count_suffixes(skipped) or "hidden and empty ones are not counted"
            raise DataError(
                f"{flag} {name}: no text or token file in this folder ({suffixes}); {AS_TEXT}"
            )
    files = list(dict.fromkeys(files))
    if unread := set(skipped) - set(files):
        say(
            f"note     {flag} {describe_paths(names)}: files taken: {len(files):,}, "
            f"skipped: {len(unread):,} "
            f"({count_suffixes(unread)}); {AS_TEXT}"
        )
    return files


def _expand(name: str, flag: str) -> list[Path]:
    """Return the file or folder of that name, else the paths that match it as a pattern. Raises
    DataError."""
    paths = [Path(name)]  # first as a plain path: a file name may contain [ or *
    if not name or not paths[0].exists():
        paths = [Path(path) for path in sorted(glob.glob(name, recursive=True))]
    if not paths:
        raise DataError(f"{flag} {name}: no such file or folder")
    for path in paths:
        if not path.is_dir() and not path.is_file():
            raise DataError(f"{flag} {path}: not a regular file")
    return paths


def describe_paths(names: Sequence[str]) -> str:
    """Return the first name and the number of the others: short enough for one line."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def count_suffixes(paths: Iterable[Path]) -> str:
    """Return the five most common suffixes, the most common first: `.pdf 12, .docx 3`."""
    kinds = Counter(suffix_of(path) or "without suffix" for path in sorted(paths))
    return ", ".join(f"{suffix} {number:,}" for suffix, number in kinds.most_common(5))


def find_stdlib() -> list[Path]:
    """Return the .py files of the running interpreter's standard library, a corpus that every
    machine has. Raises DataError if it is not there."""
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
    """Return the files with these suffixes, sorted, and the other files. Both leave out hidden
    files, empty files, our token cache and our logs."""
    matching: list[Path] = []
    others: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name[0] != "." and name not in skips and Path(folder, name).resolve() != CACHE_DIR
        ]
        for path in (Path(folder, name) for name in names):
            # A run writes its log beside its snapshots.
            if path.name[0] == "." or path.name.endswith(".metrics.jsonl"):
                continue
            if path.is_file() and path.stat().st_size:
                (matching if suffix_of(path) in suffixes else others).append(path)
    return sorted(matching), others  # os.walk has the file system's order
