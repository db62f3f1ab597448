"""Rows of token ids on disk: the token files of other programs, the files of our token cache, and
Dataset, the data of a training run."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from .documents import suffix_of
from .errors import DataError, errors_as_data_errors
from .tokenizer import Tokenizer

# A file of llm.c begins with a header of 256 int32 (magic, version, number of tokens, padding); a
# file of nanoGPT has no header, only ids as uint16.
LLMC_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # (magic, version) -> dtype
LLMC_HEADER_BYTES = 256 * 4
CHUNK_TOKENS = 2**20  # number of tokens that `iter_token_file` yields at a time


def iter_token_file(path: Path, vocab_size: int) -> Iterator[np.ndarray]:
    """Yield the ids of a token file in chunks: a .npy file, a .bin file of llm.c (which has a
    header), or a .bin file of nanoGPT (which has none). Raises DataError, also for an id outside of
    the vocabulary."""
    with errors_as_data_errors(path, "token file"):
        ids = _map_token_file(path)
        for start in range(0, len(ids), CHUNK_TOKENS):
            chunk = np.asarray(ids[start : start + CHUNK_TOKENS])
            if not 0 <= chunk.min() <= chunk.max() < vocab_size:
                raise DataError(
                    f"holds ids {chunk.min()} to {chunk.max()}, but the tokenizer ends at "
                    f"{vocab_size - 1}: another --tokenizer-name made it"
                )
            yield chunk


def _map_token_file(path: Path) -> np.ndarray:
    header = np.fromfile(path, "<u4", LLMC_HEADER_BYTES // 4)
    if suffix_of(path) == ".npy" or header.tobytes().startswith(b"\x93NUMPY"):
        array: np.ndarray = np.load(path, mmap_mode="r")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(f"holds {array.dtype} of shape {array.shape}; want one row of integers")
        return array
    if header.size == 256 and header[0] and not header[3:].any():
        magic, version, count = map(int, header[:3])
        if (magic, version) not in LLMC_DTYPES:
            raise DataError(
                f"a header with the number {magic}, version {version}; known are those of llm.c, "
                "20240520 of version 1 and 20240801 of version 7; a file without a header, or "
                ".npy, is read, too"
            )
        ids = np.memmap(path, LLMC_DTYPES[magic, version], "r", LLMC_HEADER_BYTES)
        if len(ids) != count:
            raise DataError(f"its header promises {count:,} tokens, it has {len(ids):,}: cut off?")
        return ids
    ids = np.memmap(path, "<u2", "r")
    # In a file of 32- or 64-bit ids, at least every second uint16 is a high half, and below 16, as
    # ids are below 2**20, which a thousand pairs, spread over the file, show.
    pairs = ids[: len(ids) // 2 * 2].reshape(-1, 2)
    low, high = sorted(pairs[:: len(pairs) // 1000 + 1].max(0, initial=0))
    if low < 16 <= high and len(pairs) >= 48:
        raise DataError(
            f"every second token is {'below 16' if low else 0}: 32-bit ids? Without a header, "
            "tokens are uint16; save them as .npy, which has the type"
        )
    return ids


def take_up_to(limit: int | None, pieces: Iterable[Any]) -> Iterator[Any]:
    """Yield `pieces` up to a total length of `limit` (None: no limit), the last one cut to fit.
    Their unit is characters for strings, ids for arrays of ids."""
    left = sys.maxsize if limit is None else limit
    for piece in pieces:
        yield piece[:left]
        left -= len(piece)
        if left <= 0:
            return


@dataclass(frozen=True)
class Tokens:
    """The ids in a file of the token cache, which has no header; all are below `vocab_size`.

    The file is neither mapped into memory nor kept open: all pages of a mapped file that were read
    would count as resident, and a mapped file that is cut off kills its reader.
    """

    path: Path
    vocab_size: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    def __len__(self) -> int:
        return self.path.stat().st_size // self.dtype.itemsize

    def write(self, pieces: Iterable[np.ndarray], limit: int | None = None) -> None:
        """Write arrays of ids to the file, at most `limit` ids."""
        bar = tqdm(take_up_to(limit, pieces), self.path.stem, disable=None, leave=False)
        with open(self.path, "wb") as file:
            file.writelines(ids.astype(self.dtype).tobytes() for ids in bar)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read the ids from `start` to before `stop`: int64 (stop - start,). Raises DataError if
        the file was deleted, cut off or overwritten."""
        with errors_as_data_errors(self.path):
            offset = start * self.dtype.itemsize
            ids = np.fromfile(self.path, self.dtype, stop - start, offset=offset)
        if len(ids) < stop - start or ids.max(initial=0) >= self.vocab_size:
            raise DataError(f"{self.path}: it is shorter than it was, or was overwritten")
        return ids.astype(np.int64)


@dataclass(frozen=True)
class Dataset:
    """Token ids for training and validation, and their tokenizer, with a `fingerprint` (hex) that
    is equal for equal ids and an equal tokenizer."""

    train_tokens: Tokens
    val_tokens: Tokens
    tokenizer: Tokenizer
    description: str  # source, numbers of tokens and tokenizer, in one line
    fingerprint: str

    @classmethod
    def from_cache_folder(
        cls, folder: Path, meta: dict[str, Any], tokenizer: Tokenizer, source: str
    ) -> "Dataset":
        """Return the Dataset of train.bin and val.bin in a cache folder. `meta`: its meta.json."""
        train, val = (
            Tokens(folder / name, tokenizer.vocab_size) for name in ("train.bin", "val.bin")
        )
        description = (
            f"{source}; {len(train):,} training and {len(val):,} validation tokens "
            f"({tokenizer.name}, {tokenizer.vocab_size:,} ids)"
        )
        return cls(train, val, tokenizer, description, meta["sha256"])
