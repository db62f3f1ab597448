"""Find the files that --train-data and --val-data name, and the files of the built-in corpus."""

import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path

from .documents import CHUNK, TEXT_SUFFIXES, TOKEN_SUFFIXES, reading, suffix_of
from .errors import DataError

Say = Callable[[str], None]
CACHE_DIR = Path(os.environ.get("MINIGPT_CACHE") or Path(__file__).parent / "cache").resolve()
# nanoGPT's files are called train.bin and val.bin. llm.c's files are called, for example,
# fineweb_train_000001.bin and fineweb_val_000000.bin. (values.txt does not match.)
VAL_NAME = re.compile("(?<![a-z])val(id|idation)?(?![a-z])")
# Folders of the standard library that are not in the built-in corpus. Two thirds of the library are
# tests (which Debian leaves out). encodings and pydoc_data are tables. lib2to3, idlelib and
# turtledemo are not in every installation of Python.
SKIPPED_STDLIB_FOLDERS = set(
    "test tests idle_test encodings pydoc_data lib2to3 idlelib turtledemo __pycache__ "
    "site-packages dist-packages".split()
)


def find_files(names: Sequence[str], flag: str, say: Say) -> list[Path]:
    """Return the files that `names` name (files, folders, patterns), in the order of `names`. A
    file to which several paths lead is taken once.

    In a folder, files of an unknown suffix are skipped, and `say` prints one line about them.
    Raises DataError, which names `flag` and the first name without a file.
    """
    found: dict[str, Path] = {}  # file -> the first path that leads to it
    skipped: set[str] = set()
    for name in names:
        # A plain path first: a file name may contain [ or *.
        paths = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
        files = [f for p in paths for f in (files_below(p) if os.path.isdir(p) else [p])]
        taken = [f for f in files if f in paths or suffix_of(f) in TEXT_SUFFIXES + TOKEN_SUFFIXES]
        if not taken:
            wrong = "no text or token file in this folder" if paths else "no such file or folder"
            raise DataError(f"{flag} {name}: {wrong}")
        for file in taken:
            if not os.path.isfile(file):
                raise DataError(f"{flag} {file}: not a regular file, or a link to nothing")
            found.setdefault(os.path.realpath(file), Path(file))
        skipped |= {*files} - {*taken}
    if unread := sorted(skipped - {*map(str, found.values())}):
        say(
            f"note     {flag} {describe_paths(names)}: {len(found):,} files; skipped for their "
            f"suffix: {describe_paths(unread)} (named by itself, a file is read)"
        )
    return list(found.values())


def files_below(root: str, skipped_folders: Container[str] = ("__pycache__",)) -> Iterator[str]:
    """Yield all files below `root`, sorted within a folder, without hidden files and folders, the
    logs of our runs and our token cache.

    Links to folders are followed. A folder to which several ways lead is searched once, so a loop
    of links ends. Raises OSError for a folder that cannot be read.
    """
    searched = {str(CACHE_DIR)}
    for folder, folders, names in os.walk(root, onerror=_raise_error, followlinks=True):
        is_new = (real := os.path.realpath(folder)) not in searched
        searched.add(real)
        kept = (n for n in folders if is_new and n[0] != "." and n not in skipped_folders)
        folders[:] = sorted(kept)
        wanted = (n for n in names if n[0] != "." and not n.endswith(".metrics.jsonl"))
        yield from (os.path.join(folder, name) for name in sorted(wanted) if is_new)


def _raise_error(error: OSError) -> None:
    raise error


def describe_paths(names: Sequence[str]) -> str:
    """Return the first name and the number of other names, as words for a one-line message."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def find_stdlib() -> list[Path]:
    """Return the .py files of the running interpreter's standard library: a corpus that exists on
    every machine with Python. Raises DataError if the files are missing."""
    root = sysconfig.get_paths()["stdlib"]
    found = map(Path, files_below(root, SKIPPED_STDLIB_FOLDERS))
    files = [path for path in found if path.suffix == ".py" and path.stat().st_size]
    if sum(path.stat().st_size for path in files) < 1_000_000:
        raise DataError(
            f"--train-data: the built-in corpus, Python's standard library, is not in {root}; "
            "name text files of your own"
        )
    return files


def check_disjoint(train: Sequence[Path], val: Sequence[Path]) -> None:
    """Raise DataError if a file for validation has the content of a file for training. Reads only
    files whose size occurs in both lists."""
    sizes = {path.stat().st_size for path in train} & {path.stat().st_size for path in val}
    hashes = {hash_files([path]): path for path in train if path.stat().st_size in sizes}
    for path in val:
        if path.stat().st_size in sizes and (twin := hashes.get(hash_files([path]))):
            raise DataError(
                f"--val-data {path}: the same content as {twin} of --train-data, so the validation "
                "loss would not see overfitting; name other files"
            )


def hash_files(paths: Sequence[Path]) -> str:
    """Return the SHA-256 (hex) of the files' contents."""
    digest = hashlib.sha256()
    for path in paths:
        with reading(path), open(path, "rb") as file:
            while block := file.read(CHUNK):
                digest.update(block)
    return digest.hexdigest()
