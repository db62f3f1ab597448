"""Find the files that --train-data and --val-data name, and the files of the built-in corpus."""

import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Container, Sequence
from pathlib import Path

from .documents import CHUNK, TEXT_SUFFIXES, TOKEN_SUFFIXES, suffix_of
from .errors import DataError, errors_as_data_errors

Say = Callable[[str], None]
CACHE_DIR = Path(os.environ.get("MINIGPT_CACHE") or Path(__file__).parent / "cache").resolve()
# nanoGPT's files are called train.bin and val.bin, llm.c's for example fineweb_train_000001.bin and
# fineweb_val_000000.bin. (values.txt does not match.)
VAL_NAME = re.compile("(?<![a-z])val(id|idation)?(?![a-z])")
# Folders of the standard library that are not in the built-in corpus: two thirds of the library are
# tests (which Debian leaves out), encodings and pydoc_data are tables, and lib2to3, idlelib and
# turtledemo are not in every installation of Python.
SKIPPED_STDLIB_FOLDERS = set(
    "test tests idle_test encodings pydoc_data lib2to3 idlelib turtledemo __pycache__ "
    "site-packages dist-packages".split()
)


def find_files(names: Sequence[str], flag: str, say: Say) -> list[Path]:
    """Return the files that `names` name (files, folders, patterns), in the order of `names`; a
    file to which several paths lead is taken once.

    In a folder, only files of a known suffix are taken, and `say` prints one line about the others.
    Raises DataError, which names `flag` and the first name without a file.
    """
    found: dict[str, Path] = {}  # file -> the first path that leads to it
    skipped: set[str] = set()
    for name in names:
        # A plain path first: a file name may contain [ or *.
        paths = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
        files = [f for p in paths for f in (paths_below(p) if os.path.isdir(p) else [p])]
        taken = [
            f
            for f in files
            if os.path.isfile(f) and (suffix_of(f) in TEXT_SUFFIXES + TOKEN_SUFFIXES or f in paths)
        ]
        if not taken:
            only = f"no text or token file, only {describe_paths(files)}" if files else ""
            raise DataError(f"{flag} {name}: {only or 'no such file, or an empty folder'}")
        for file in taken:
            found.setdefault(os.path.realpath(file), Path(file))
        skipped |= {*files} - {*taken}
    if unread := sorted(path for path in skipped if os.path.realpath(path) not in found):
        say(
            f"note     {flag} {describe_paths(names)}: {len(found):,} files; skipped for their "
            f"suffix: {describe_paths(unread)} (named by itself, a file or a linked folder is read)"
        )
    return list(found.values())


def paths_below(root: str, skipped_folders: Container[str] = ("__pycache__",)) -> list[str]:
    """Return all files below `root`, sorted within a folder, without hidden files and folders, the
    logs of our runs and our token cache.

    Folders that are links or cannot be read are returned like files: they are not searched.
    """
    found: list[str] = []
    tree = os.walk(root, onerror=lambda error: found.append(error.filename))
    for folder, folders, names in tree:
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = sorted(
            name
            for name in folders
            if name[0] != "."
            and name not in skipped_folders
            and os.path.realpath(os.path.join(folder, name)) != str(CACHE_DIR)
        )
        found += [
            os.path.join(folder, name)
            for name in sorted(names + links)
            if name[0] != "." and not name.endswith(".metrics.jsonl")
        ]
    return found


def describe_paths(names: Sequence[str]) -> str:
    """Return the first name and the number of other names, as words for a one-line message."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def find_stdlib_files() -> list[Path]:
    """Return the .py files of the running interpreter's standard library: a corpus that exists on
    every machine with Python."""
    return [
        Path(path)
        for path in paths_below(sysconfig.get_paths()["stdlib"], SKIPPED_STDLIB_FOLDERS)
        if path.endswith(".py") and os.path.getsize(path)
    ]


def check_and_count_duplicates(train: Sequence[Path], val: Sequence[Path]) -> int:
    """Return the number of files for training that have the content of another one. Raises
    DataError if a file for validation has the content of a file for training."""
    paths = {hash_files([path]): path for path in train}
    for path in val:
        if twin := paths.get(hash_files([path])):
            raise DataError(
                f"--val-data {path}: the same content as {twin} of --train-data, so the validation "
                "loss would not see overfitting; name other files"
            )
    return len(train) - len(paths)


def hash_files(paths: Sequence[Path]) -> str:
    """Return the SHA-256 (hex) of the files' contents, one behind the other."""
    digest = hashlib.sha256()
    for path in paths:
        with errors_as_data_errors(path), open(path, "rb") as file:
            while block := file.read(CHUNK):
                digest.update(block)
    return digest.hexdigest()
