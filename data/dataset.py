"""What a trainer gets: where the ids lie, what made them, and from what."""

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .batches import TokenFile
from .tokenizer import DataError, DiskFull, Tokenizer


@dataclass(frozen=True)
class Dataset:
    """What to train on. fingerprint: hex, the same for the same content, tokenizer and split."""

    train: tuple[TokenFile, ...]
    val: tuple[TokenFile, ...]
    tokenizer: Tokenizer
    description: str
    fingerprint: str


@dataclass(frozen=True)
class FoundData:
    """Data that were found to be good. Nothing is encoded yet, and nothing written."""

    vocab_size: int
    get: Callable[[], Dataset]
    cache_dir: Path
    is_most: bool = False  # a bpe is still to be trained: that many ids, or fewer

    def load(self) -> Dataset:
        """From the cache, or into it. Raises DataError if that cannot be written
        (DiskFull, if it has no room)."""
        try:
            return self.get()
        except OSError as error:
            raise of_file(error, self.cache_dir) from error


def of_file(error: OSError, cache_dir: Path) -> DataError:
    """The same in one line; where the error names no file, it is one in `cache_dir`."""
    reason = f"{error.filename or cache_dir}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFull(f"{reason}; the token cache needs room there")
    return DataError(reason)


def cached_dataset(folder: Path, meta: dict[str, Any], tokenizer: Tokenizer, about: str) -> Dataset:
    """The content of a folder of the cache; `about` says what it was made from."""
    counts = [meta["train_tokens"], meta["val_tokens"]]
    train, val = (
        TokenFile(folder / f"{split}.bin", meta["dtype"], 0, count)
        for split, count in zip(("train", "val"), counts, strict=True)
    )
    return Dataset(
        (train,), (val,), tokenizer, describe(about, counts, tokenizer), fingerprint=folder.name
    )


def describe(about: str, counts: list[int], tokenizer: Tokenizer) -> str:
    """counts: training tokens, validation tokens."""
    return (
        f"{about}; {counts[0]:,} training and {counts[1]:,} validation tokens "
        f"({tokenizer.name}, {tokenizer.vocab_size:,} ids)"
    )


def label(names: list[str]) -> str:
    """Files or folders in as few words as a line has room for."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
