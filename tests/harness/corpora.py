"""Load a data set as the trainers do, and read back what it holds."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data import Dataset, TokenFile, find_dataset

EOT = 256  # of the byte tokenizer, whose ids are otherwise the bytes themselves


def load(cache: Path, *paths: Path | str, val: list[str] | None = None, **options) -> Dataset:
    options = {"tokenizer_name": "byte", "say": lambda line: None} | options
    names = [str(path) for path in paths] or None
    return find_dataset(names, val, cache_dir=cache, **options).load()


def ids(files: Iterable[TokenFile]) -> list[int]:
    parts = [np.fromfile(f.path, f.dtype, f.count, offset=f.offset) for f in files]
    return np.concatenate(parts).tolist()


def texts(files: Iterable[TokenFile]) -> list[bytes]:
    """The documents behind ids of the byte tokenizer."""
    assert ids(files)[0] == EOT  # before each document, so also before the first
    found: list[list[int]] = []
    for i in ids(files):
        if i == EOT:
            found.append([])
        else:
            found[-1].append(i)
    return [bytes(document) for document in found]
