"""Find the files that --train-data and --val-data name, and the files of the built-in corpus."""

import glob
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from .documents import TEXT_SUFFIXES, TOKEN_SUFFIXES, suffix_of
from .errors import DataError
from .store import Say

CACHE_DIR = Path(os.environ.get("MINIGPT_CACHE") or Path(__file__).parent / "cache").resolve()
ANY_SUFFIX_HINT = "a file named by itself, or by a pattern, is read whatever its suffix"
# Folders of the standard library that are not in the built-in corpus. Two thirds of the library are
# tests (which Debian leaves out). encodings and pydoc_data are tables. lib2to3, idlelib and
# turtledemo are not in every installation of Python.
SKIPPED_STDLIB_FOLDERS = set(
    "test tests idle_test encodings pydoc_data lib2to3 idlelib turtledemo __pycache__ "
    "site-packages dist-packages".split()
)


def find_files(names: Sequence[str], flag: str, say: Say) -> list[Path]:
    """Return the files that `names` name, in the order of `names`. A file to which several paths
    lead (links, or a loop of links) is taken once.

    A name is a file, a folder (which is searched recursively) or a pattern. In a folder, files with
    an unknown suffix are skipped, and `say` prints one line that counts them. Raises DataError,
    which names `flag` and the first name without a usable file.
    """
    files: list[Path] = []
    skipped: list[Path] = []
    for name in names:
        n_before = len(files)
        for path in _expand_glob(name, flag):
            inside, others = _partition_files_by_suffix(path) if path.is_dir() else ([path], [])
            files += inside
            skipped += others
        if len(files) == n_before:
            raise DataError(
                f"{flag} {name}: no text or token file in this folder "
                f"({describe_suffix_counts(skipped) or 'hidden and empty ones are not counted'}); "
                f"{ANY_SUFFIX_HINT}"
            )
    paths: dict[Path, Path] = {}  # file -> the first path that leads to it
    files = [path for path in files if paths.setdefault(path.resolve(), path) is path]
    if unread := set(skipped) - set(files):
        say(
            f"note     {flag} {describe_paths(names)}: files taken: {len(files):,}, "
            f"skipped: {len(unread):,} "
            f"({describe_suffix_counts(unread)}); {ANY_SUFFIX_HINT}"
        )
    return files


def _expand_glob(name: str, flag: str) -> list[Path]:
    """Return the file or folder `name`. If it does not exist, return the paths that match the
    pattern `name`. Raises DataError if a path is neither file nor folder, or if no path matches.
    """
    paths = [Path(name)]  # try a plain path first: a file name may contain [ or *
    if not name or not paths[0].exists():
        paths = [Path(path) for path in sorted(glob.glob(name, recursive=True))]
    if not paths:
        raise DataError(f"{flag} {name}: no such file or folder")
    for path in paths:
        if not path.is_dir() and not path.is_file():
            raise DataError(f"{flag} {path}: not a regular file")
    return paths


def describe_paths(names: Sequence[str]) -> str:
    """Return the first name and the number of other names, as words for a one-line message."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def describe_suffix_counts(paths: Iterable[Path]) -> str:
    """Return the five most common suffixes and how many paths have each: `.pdf 12, .docx 3`."""
    kinds = Counter(
        (suffix_of(path) or "without suffix") if path.exists() else "links to nothing"
        for path in sorted(paths)
    )
    return ", ".join(f"{suffix} {number:,}" for suffix, number in kinds.most_common(5))


def find_stdlib() -> list[Path]:
    """Return the .py files of the running interpreter's standard library: a corpus that exists on
    every machine with Python. Raises DataError if the files are missing."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files, _ = _partition_files_by_suffix(root, {".py"}, SKIPPED_STDLIB_FOLDERS)
    if sum(path.stat().st_size for path in files) < 1_000_000:
        raise DataError(
            f"--train-data: the built-in corpus, Python's standard library, is not in {root}; "
            "name text files of your own"
        )
    return files


def _partition_files_by_suffix(
    root: Path,
    suffixes: Iterable[str] = (*TEXT_SUFFIXES, *TOKEN_SUFFIXES),
    skips: Iterable[str] = ("__pycache__",),
) -> tuple[list[Path], list[Path]]:
    """Return all files below `root` in two lists: the files with one of `suffixes`, sorted, and the
    other files and dangling links. Both lists leave out empty files, hidden files and folders, the
    logs of our runs, our token cache, and folders whose names are in `skips`.

    Links to folders are followed. A folder to which several ways lead is searched once, so a loop
    of links ends. Raises OSError for a folder that cannot be read.
    """
    matching: list[Path] = []
    others: list[Path] = []
    searched = {CACHE_DIR}
    for folder, folders, names in os.walk(root, onerror=_raise_error, followlinks=True):
        is_new = (real := Path(folder).resolve()) not in searched
        searched.add(real)
        # (Sorted, so of several ways to a folder always the same one is taken.)
        folders[:] = sorted(
            name for name in folders if is_new and name[0] != "." and name not in skips
        )
        for path in (Path(folder, name) for name in names if is_new and name[0] != "."):
            is_link_to_nothing = not path.exists()
            # Skip the log that a run writes next to its snapshots.
            is_read = is_link_to_nothing or path.is_file() and path.stat().st_size
            if is_read and not path.name.endswith(".metrics.jsonl"):
                is_match = suffix_of(path) in suffixes and not is_link_to_nothing
                (matching if is_match else others).append(path)
    return sorted(matching), others  # os.walk yields names in the file system's order


def _raise_error(error: OSError) -> None:
    raise error
