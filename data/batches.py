"""Cut ids into batches. A batch is a function of (files, seed, index) alone, so a snapshot need not
hold a position in the data.

B = batch size (sequences), T = sequence length (tokens). A window is T + 1 consecutive tokens of
one file. Its first T tokens are the inputs, and its last T tokens are the labels. The next window
of the file begins T tokens later.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from .documents import reading, suffix_of
from .errors import DataError
from .tokenizer import errors_as_data_errors

# A file of llm.c begins with a header of 256 int32: magic, version, number of tokens, padding. A
# file of nanoGPT has no header, only ids of GPT-2 (below 50257) as uint16. It cannot begin with a
# magic, whose first uint16 is 55432 or 55713.
LLMC_FORMATS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # magic -> (version, dtype)
LLMC_HEADER_BYTES = 256 * 4
# In a file of 32- or 64-bit ids without a header, at least every second uint16 is a high half, and
# below 16, as ids are below 2**20. The check reads so many numbers.
WIDTH_CHECK_NUMBERS = 4096
CHUNK_TOKENS = 2**20  # number of tokens that `id_chunks` reads at a time
# split -> (the name of the split in messages, how to make the split longer)
NAME_AND_HINT_BY_SPLIT = {
    "train": ("training", "give more text to --train-data"),
    "val": ("validation", "raise --val-ratio, or give more text to --val-data"),
}


@dataclass(frozen=True)
class TokenFile:
    """Token file, or a part of one: `count` ids of `dtype` (any integer type) from byte `offset`
    on, all below `vocab_size`."""

    path: Path
    dtype: np.dtype
    offset: int
    count: int
    vocab_size: int

    def sub_file(self, start: int, stop: int) -> "TokenFile":
        """Return tokens [start, stop), clipped to 0 .. count. The file is not read."""
        start, stop = max(0, start), min(self.count, stop)
        offset = self.offset + start * self.dtype.itemsize
        return replace(self, offset=offset, count=max(0, stop - start))

    def read(self) -> np.ndarray:
        """Read all ids: (count,) of `dtype`. Raises DataError if the file was deleted or cut off,
        or if an id is outside of the vocabulary.

        Not mapped into memory: all pages of a mapped file that were read would count as resident.
        Not kept open: a thousand shards would exceed the limit of open files.
        """
        with reading(self.path, "; put it back"):
            ids = np.fromfile(self.path, self.dtype, self.count, offset=self.offset)
        if len(ids) < self.count:
            raise DataError(f"{self.path}: it is shorter than it was; put it back")
        for id in (ids.min(initial=0), ids.max(initial=0)):
            if not 0 <= id < self.vocab_size:
                raise DataError(
                    f"{self.path}: holds id {id}, but the tokenizer ends at {self.vocab_size - 1}: "
                    "another --tokenizer-name made it, or it was overwritten"
                )
        return ids

    def id_chunks(self) -> Iterator[np.ndarray]:
        """Yield all ids in chunks of at most CHUNK_TOKENS. Raises the errors of `read`."""
        for first in range(0, self.count, CHUNK_TOKENS):
            yield self.sub_file(first, first + CHUNK_TOKENS).read()

    @classmethod
    def from_path(cls, path: Path, vocab_size: int) -> "TokenFile":
        """Return the token file at `path`: a .npy file, a .bin file of llm.c (which has a header),
        or a .bin file of nanoGPT (which has none). Raises DataError."""
        find_layout = _npy_layout if suffix_of(path) == ".npy" else _bin_layout
        token_file = cls(path, *find_layout(path), vocab_size)
        size = path.stat().st_size
        if size != token_file.offset + token_file.count * token_file.dtype.itemsize:
            raise DataError(
                f"{path}: its header promises {token_file.count:,} tokens, its {size:,} bytes hold "
                "another number: the file is cut off or damaged"
            )
        return token_file


def _bin_layout(path: Path) -> tuple[np.dtype, int, int]:
    """Return the dtype, the offset of the first token in bytes, and the number of tokens."""
    size, header = path.stat().st_size, np.fromfile(path, "<u4", 3).tolist()
    if len(header) == 3 and header[0] in LLMC_FORMATS:
        version, dtype = LLMC_FORMATS[header[0]]
        if header[1] != version:
            raise DataError(
                f"{path}: a header of llm.c of version {header[1]}, and only version {version} is "
                "known; a file without a header, or .npy, is read, too"
            )
        return np.dtype(dtype), LLMC_HEADER_BYTES, header[2]
    if size % 2:
        raise DataError(f"{path}: {size:,} bytes is odd, so not a file of uint16 tokens")
    sample = np.fromfile(path, "<u2", WIDTH_CHECK_NUMBERS)
    for half in (sample[1::2], sample[::2]):  # (the first half of a big-endian id is the high one)
        if len(half) >= 16 and half.max() < 16 <= sample.max():
            raise DataError(
                f"{path}: every second token is {'below 16' if half.any() else 0}: 32-bit ids? "
                "Without a header, tokens are uint16; save them as .npy, which has the type"
            )
    return np.dtype("uint16"), 0, size // 2


def _npy_layout(path: Path) -> tuple[np.dtype, int, int]:
    """Return what `_bin_layout` returns, for a .npy file."""
    with errors_as_data_errors(path, ".npy file"):
        array = np.lib.format.open_memmap(path, mode="r")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"{path}: holds {array.dtype} of shape {array.shape}; want one row of whole numbers"
        )
    return array.dtype, array.offset, len(array)


TokenFiles = Sequence[TokenFile]


def slice_token_files(files: TokenFiles, start: int, stop: int) -> list[TokenFile]:
    """Return the parts of the files with tokens [start, stop), counted through all files, without
    empty parts."""
    firsts = accumulate((file.count for file in files), initial=0)
    parts = [
        file.sub_file(start - first, stop - first)
        for file, first in zip(files, firsts, strict=False)
    ]
    return [part for part in parts if part.count]


def hash_ids(files: TokenFiles) -> str:
    """Return the SHA-256 (hex) of all ids, and of the dtype and the length of each file. Raises
    DataError for an id outside of the vocabulary."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.dtype} {file.count} ".encode())
        for ids in file.id_chunks():
            digest.update(ids.tobytes())
    return digest.hexdigest()


def check_length(longest: int, seq_len: int, split: str) -> None:
    """Raise DataError if the split has no window, which needs seq_len + 1 tokens of one file.
    `longest`: number of tokens in the longest file of the split. `split`: "train" or "val"."""
    if longest <= seq_len:
        kind, remedy = NAME_AND_HINT_BY_SPLIT[split]
        raise DataError(
            f"--seq-len {seq_len} needs {seq_len + 1} {kind} tokens in a row, the longest file "
            f"has {longest}: {remedy}, or start a run with a lower --seq-len"
        )


class Windows:
    """Windows of several files, numbered from 0 through all files."""

    def __init__(
        self, files: TokenFiles, batch_size: int, seq_len: int, device: torch.device, split: str
    ) -> None:
        """Raises DataError if no file has seq_len + 1 tokens."""
        check_length(max((file.count for file in files), default=0), seq_len, split)
        self.files, self.batch_size, self.seq_len, self.device = files, batch_size, seq_len, device
        counts = (max(0, (file.count - 1) // seq_len) for file in files)
        # Number of each file's first window, and at the end the number of all windows.
        self.first = [*accumulate(counts, initial=0)]
        self.n_windows = self.first[-1]

    def read_window(self, number: int) -> np.ndarray:
        """Return the ids of a window: (T + 1,). Raises the errors of TokenFile.read."""
        shard = bisect_right(self.first, number) - 1
        start = (number - self.first[shard]) * self.seq_len
        return self.files[shard].sub_file(start, start + self.seq_len + 1).read()

    def read_by_number(self, numbers: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and the labels of n windows: both int64 (n, T) on `device`. Raises the
        errors of TokenFile.read."""
        windows = [self.read_window(int(number)) for number in numbers]
        rows = torch.from_numpy(np.array(windows, dtype=np.int64))
        on_gpu = self.device.type == "cuda"  # without pinned memory Python would wait for the copy
        rows = (rows.pin_memory() if on_gpu else rows).to(self.device, non_blocking=on_gpu)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@lru_cache(maxsize=2)  # one batch may need the orders of two epochs
def epoch_permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """Return the numbers 0 .. size - 1 in the random order of this epoch: uint32 (size,)."""
    return np.random.default_rng((seed, epoch)).permutation(np.arange(size, dtype=np.uint32))


class TrainBatches(Windows):
    """Batches for training, without end. Each epoch has every window once, in a random order."""

    def __init__(
        self, files: TokenFiles, batch_size: int, seq_len: int, seed: int, device: torch.device
    ) -> None:
        """Give each window a number. Raises DataError if no file has seq_len + 1 tokens."""
        super().__init__(files, batch_size, seq_len, device, "train")
        self.seed = seed

    def epochs_before(self, index: int) -> float:
        """Return the number of epochs before micro-batch `index`; 1.5 is one and a half epochs."""
        return index * self.batch_size / self.n_windows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and the labels, both (B, T), of micro-batch `index`, counted over all
        steps and processes."""
        samples = range(index * self.batch_size, (index + 1) * self.batch_size)
        epochs = (divmod(sample, self.n_windows) for sample in samples)
        return self.read_by_number(
            epoch_permutation(self.seed, epoch, self.n_windows)[place] for epoch, place in epochs
        )


class ValBatches(Windows):
    """Batches for validation: a fixed set of windows in a fixed order, which does not depend on the
    batch size. If `max_tokens` limits them, they are spread evenly over the split."""

    def __init__(
        self,
        files: TokenFiles,
        batch_size: int,
        seq_len: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        """Choose the windows. `max_tokens`: limit for the input tokens of all windows; 0: no limit.
        At least one window is chosen. Raises DataError if no file has seq_len + 1 tokens."""
        super().__init__(files, batch_size, seq_len, device, "val")
        limit = max(1, max_tokens // seq_len) if max_tokens else self.n_windows
        self.n_chosen = min(limit, self.n_windows)

    def __len__(self) -> int:
        return -(-self.n_chosen // self.batch_size)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and the labels, both (B, T), of batch `index`. The last batch may have
        fewer rows. Raises IndexError if there is no batch `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"validation batch {index} of {len(self)}")
        chosen = range(self.n_chosen)[index * self.batch_size : (index + 1) * self.batch_size]
        return self.read_by_number(i * self.n_windows // self.n_chosen for i in chosen)
