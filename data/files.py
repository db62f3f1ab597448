"""Names to files: what --train-data and --val-data mean, and the corpus that everybody has."""

import glob
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from .documents import TEXT_SUFFIXES, TOKEN_SUFFIXES, suffix_of
from .store import Say, label
from .tokenizer import DataError

CACHE_DIR = Path(__file__).resolve().parent / "cache"
SHOWN_SUFFIXES = 5  # of those that were skipped
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
    skipped: set[Path] = set()
    for name in names:
        usable: list[Path] = []
        others: list[Path] = []
        for path in _expand(name, flag):
            inside, rest = _walk(path) if path.is_dir() else ([path], [])
            usable += inside
            others += rest
        if not usable:
            held = count_suffixes(others) or "hidden and empty ones are not counted"
            what = f"no text or token file in this folder ({held})"
            raise DataError(f"{flag} {name}: {what}; {AS_TEXT}")
        found += usable
        skipped.update(others)
    found = list(dict.fromkeys(found))
    if left := skipped - set(found):
        taken = "1 file" if len(found) == 1 else f"{len(found):,} files"
        say(
            f"note     {flag} {label(names)}: {taken} taken, {len(left):,} skipped "
            f"({count_suffixes(left)}); {AS_TEXT}"
        )
    return found


def _expand(name: str, flag: str) -> list[Path]:
    """The file or folder of that name, else what the pattern matches."""
    if not name:
        raise DataError(f"{flag}: an empty name")
    paths = [Path(name)]  # a file whose name holds a [ is not a pattern
    if not paths[0].exists():
        paths = [Path(path) for path in sorted(glob.glob(name, recursive=True))]
    if not paths:
        what = "no file matches" if glob.has_magic(name) else "no such file or folder"
        raise DataError(f"{flag} {name}: {what}")
    for path in paths:
        if not path.is_dir() and not path.is_file():
            raise DataError(f"{flag} {path}: not a regular file")
        if path.is_file() and path.stat().st_size == 0:
            raise DataError(f"{flag} {path}: the file is empty")
    return paths


def count_suffixes(paths: Iterable[Path]) -> str:
    """`.pdf 12, .docx 3`: the commonest first."""
    kinds = Counter(suffix_of(path) or "without suffix" for path in sorted(paths)).most_common()
    shown = [f"{suffix} {number:,}" for suffix, number in kinds[:SHOWN_SUFFIXES]]
    return ", ".join(shown + ["..."] * (len(kinds) > SHOWN_SUFFIXES))


def warn_of_shared(train: Sequence[Path], val: Sequence[Path], say: Say) -> None:
    """Says so if files of `val` are in `train` as well."""
    trained = {path.resolve() for path in train}
    if shared := [str(path) for path in val if path.resolve() in trained]:
        what = f"--val-data {label(shared)}: in --train-data, too"
        say(f"warning  {what}: the validation loss will not see overfitting")


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
