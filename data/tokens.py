"""Rows of token ids on disk: the formats of token files, Tokens (a row of ids through several
files), and Dataset, the data of a training run.

A file is neither mapped into memory nor kept open. All pages of a mapped file that were read would
count as resident, a mapped file that is cut off kills its reader, and a thousand open files are too
many.
"""

import hashlib
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from .documents import reading, suffix_of
from .errors import DataError
from .tokenizer import Tokenizer, errors_as_data_errors

# A file of llm.c begins with a header of 256 int32: magic, version, number of tokens, padding. A
# file of nanoGPT has no header, only ids of GPT-2 (below 50257) as uint16. It cannot begin with a
# magic, whose first uint16 is 55432 or 55713.
LLMC_FORMATS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic -> (version, dtype)
LLMC_HEADER_BYTES = 256 * 4
NPY_MAGIC = b"\x93NUMPY"
# In a file of 32- or 64-bit ids without a header, at least every second uint16 is a high half, and
# below 16, as ids are below 2**20. The check reads so many numbers in each of three places.
WIDTH_CHECK_NUMBERS = 4096
CHUNK_TOKENS = 2**20  # number of tokens that `chunks` reads at a time


@dataclass(frozen=True)
class TokenFile:
    """`count` ids of `dtype` (any integer type) from byte `offset` of a file on."""

    path: Path
    dtype: np.dtype
    offset: int
    count: int


def open_token_file(path: Path) -> TokenFile:
    """Return the token file at `path`: a .npy file, a .bin file of llm.c (which has a header), or a
    .bin file of nanoGPT (which has none). Raises DataError."""
    with reading(path), open(path, "rb") as opened:
        is_npy = opened.read(len(NPY_MAGIC)) == NPY_MAGIC or suffix_of(path) == ".npy"
    file = _npy_file(path) if is_npy else _bin_file(path)
    size = path.stat().st_size
    if size != file.offset + file.count * file.dtype.itemsize:
        raise DataError(
            f"{path}: its header promises {file.count:,} tokens, its {size:,} bytes hold another "
            "number: the file is cut off or damaged"
        )
    return file


def _npy_file(path: Path) -> TokenFile:
    with errors_as_data_errors(path, ".npy file"):
        array = np.lib.format.open_memmap(path, mode="r")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"{path}: holds {array.dtype} of shape {array.shape}; want one row of whole numbers"
        )
    return TokenFile(path, array.dtype, array.offset, len(array))


def _bin_file(path: Path) -> TokenFile:
    size, header = path.stat().st_size, np.fromfile(path, "<u4", LLMC_HEADER_BYTES // 4)
    # (An unknown magic counts as a header if all behind the first three numbers is 0.)
    if header.size == 256 and header[0] and (header[0] in LLMC_FORMATS or not header[3:].any()):
        version, dtype = LLMC_FORMATS.get(int(header[0]), (None, "<u2"))
        if header[1] != version:
            raise DataError(
                f"{path}: a header with the number {header[0]}, version {header[1]}; known are "
                "those of llm.c, 20240520 of version 1 and 20240801 of version 7; a file without a "
                "header, or .npy, is read, too"
            )
        return TokenFile(path, np.dtype(dtype), LLMC_HEADER_BYTES, int(header[2]))
    if size % 2:
        raise DataError(f"{path}: {size:,} bytes is odd, so not a file of uint16 tokens")
    samples = [
        np.fromfile(path, "<u2", WIDTH_CHECK_NUMBERS, offset=at - at % 4)
        for at in (0, size // 2, max(0, size - 2 * WIDTH_CHECK_NUMBERS))
    ]
    pairs = np.concatenate([sample[: len(sample) // 2 * 2] for sample in samples]).reshape(-1, 2)
    low, high = sorted(pairs.max(0, initial=0))
    if low < 16 <= high and len(pairs) >= 48:
        raise DataError(
            f"{path}: every second token is {'below 16' if low else 0}: 32-bit ids? Without a "
            "header, tokens are uint16; save them as .npy, which has the type"
        )
    return TokenFile(path, np.dtype("<u2"), 0, size // 2)


@dataclass(frozen=True)
class Tokens:
    """Ids `start` .. `stop` - 1 of those in `files`, counted through all files. All ids are below
    `vocab_size`."""

    files: tuple[TokenFile, ...]
    vocab_size: int
    firsts: tuple[int, ...]  # number of each file's first id, and at the end the number of all ids
    start: int
    stop: int

    @classmethod
    def of_files(cls, files: Iterable[TokenFile], vocab_size: int) -> "Tokens":
        files = tuple(files)
        firsts = tuple(accumulate((file.count for file in files), initial=0))
        return cls(files, vocab_size, firsts, 0, firsts[-1])

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> "Tokens":
        """Return ids `start` .. `stop` - 1 of these, or fewer. No file is read."""
        stop = min(self.stop, self.start + stop)
        return replace(self, start=min(self.start + start, stop), stop=stop)

    def read(self) -> np.ndarray:
        """Read all ids: int64 (n,). Raises DataError if a file was deleted or cut off, or if an id
        is outside of the vocabulary."""
        parts, at = [np.empty(0, np.int64)], self.start
        while at < self.stop:
            number = bisect_right(self.firsts, at) - 1
            file, skip = self.files[number], at - self.firsts[number]
            count = min(self.stop - at, file.count - skip)
            with reading(file.path, "; put it back"):
                offset = file.offset + skip * file.dtype.itemsize
                ids = np.fromfile(file.path, file.dtype, count, offset=offset)
            if len(ids) < count:
                raise DataError(f"{file.path}: it is shorter than it was; put it back")
            for id in (ids.min(), ids.max()):
                if not 0 <= id < self.vocab_size:
                    raise DataError(
                        f"{file.path}: holds id {id}, but the tokenizer ends at "
                        f"{self.vocab_size - 1}: another --tokenizer-name made it, or it was "
                        "overwritten"
                    )
            parts.append(ids.astype(np.int64))
            at += count
        return np.concatenate(parts)

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield all ids in chunks of at most CHUNK_TOKENS. Raises the errors of `read`."""
        for first in range(0, len(self), CHUNK_TOKENS):
            yield self.part(first, first + CHUNK_TOKENS).read()

    def sha256(self) -> str:
        """Return the SHA-256 (hex) of the ids. Raises the errors of `read`."""
        digest = hashlib.sha256()
        for ids in self.chunks():
            digest.update(ids.astype("<u4").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Dataset:
    """Token ids for training and validation, and their tokenizer. `fingerprint` (hex): equal for
    equal ids and an equal tokenizer."""

    train_tokens: Tokens
    val_tokens: Tokens
    tokenizer: Tokenizer
    source: str  # description of the text's source, for messages
    fingerprint: str

    @property
    def description(self) -> str:
        """Source, numbers of tokens and tokenizer, in one line."""
        vocabulary = f"{self.tokenizer.name}, {self.tokenizer.vocab_size:,} ids"
        counts = f"{len(self.train_tokens):,} training and {len(self.val_tokens):,} validation"
        return f"{self.source}; {counts} tokens ({vocabulary})"


def take_up_to(limit: int | None, pieces: Iterable[Any]) -> Iterator[Any]:
    """Yield `pieces` up to a total length of `limit`: characters if the pieces are strings, ids if
    the pieces are arrays of ids. The last piece is cut to fit. None: no limit."""
    left = sys.maxsize if limit is None else limit
    for piece in pieces:
        yield piece[:left]
        left -= len(piece)
        if left <= 0:
            return


def write_split_ids(
    folder: Path, vocab_size: int, parts: Mapping[str, Iterable[np.ndarray]], limit: int | None
) -> dict[str, Any]:
    """Write train.bin and val.bin to `folder`. Return what meta.json says of them.

    `parts`: split ("train" or "val") -> arrays of ids. `limit`: for the ids of each split.
    """
    dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
    meta: dict[str, Any] = {"vocab_size": vocab_size, "dtype": dtype.name}
    for split, pieces in parts.items():
        bar = tqdm(take_up_to(limit, pieces), split, unit=" pieces", disable=None, leave=False)
        with open(folder / f"{split}.bin", "wb") as file:
            file.writelines(ids.astype(dtype).tobytes() for ids in bar)
            meta[f"{split}_tokens"] = file.tell() // dtype.itemsize
    return meta


def dataset_in_cache(
    folder: Path, meta: dict[str, Any], tokenizer: Tokenizer, source: str
) -> Dataset:
    """Return the Dataset whose ids `write_split_ids` has written. `meta`: content of meta.json."""
    dtype, n = np.dtype(meta["dtype"]), tokenizer.vocab_size
    train, val = (
        Tokens.of_files([TokenFile(folder / f"{split}.bin", dtype, 0, meta[f"{split}_tokens"])], n)
        for split in ("train", "val")
    )
    return Dataset(train, val, tokenizer, source, meta["sha256"])
