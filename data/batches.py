"""Cut ids into batches, each a function of (tokens, seed, index) alone, so that a snapshot need not
hold a position in the data.

B = batch size (sequences), T = sequence length (tokens). A window is T + 1 consecutive tokens, of
which the first T are the inputs and the last T the labels. The next window begins T tokens later,
and a window may begin in one file or document and end in another.
"""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch

from .errors import DataError
from .tokens import Tokens


class Windows:
    """The windows of a split, numbered from 0."""

    def __init__(
        self,
        tokens: Tokens,
        batch_size: int,
        seq_len: int,
        device: torch.device,
        kind: str,
        remedy: str,
    ) -> None:
        """Raises DataError if there are not seq_len + 1 tokens, with `kind` ("training" or
        "validation") and `remedy` (how to have more) in its message."""
        if len(tokens) <= seq_len:
            raise DataError(
                f"--seq-len {seq_len} needs {seq_len + 1} {kind} tokens, the data have "
                f"{len(tokens)}: {remedy}, or start a run with a lower --seq-len"
            )
        self.tokens, self.device = tokens, device
        self.batch_size, self.seq_len = batch_size, seq_len
        self.n_windows = (len(tokens) - 1) // seq_len

    def read_inputs_and_labels(self, numbers: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and the labels of n windows: both int64 (n, T) on `device`. Raises the
        errors of Tokens.read."""
        T, starts = self.seq_len, (int(number) * self.seq_len for number in numbers)
        rows = np.stack([self.tokens.read(start, start + T + 1) for start in starts])
        on_gpu = self.device.type == "cuda"  # without pinned memory Python would wait for the copy
        windows = torch.from_numpy(rows)
        windows = (windows.pin_memory() if on_gpu else windows).to(self.device, non_blocking=on_gpu)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@lru_cache(maxsize=2)  # one batch may need the orders of two epochs
def epoch_permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """Return the numbers 0 .. size - 1 in the random order of this epoch: uint32 (size,)."""
    return np.random.default_rng((seed, epoch)).permutation(np.arange(size, dtype=np.uint32))


class TrainBatches(Windows):
    """Batches for training, without end; each epoch has every window once, in a random order."""

    def __init__(
        self, tokens: Tokens, batch_size: int, seq_len: int, seed: int, device: torch.device
    ) -> None:
        super().__init__(
            tokens,
            batch_size,
            seq_len,
            device,
            kind="training",
            remedy="give more text to --train-data",
        )
        self.seed = seed

    def epochs_before(self, index: int) -> float:
        """Return the number of epochs before micro-batch `index`; 1.5 is one and a half epochs."""
        return index * self.batch_size / self.n_windows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and the labels, both (B, T), of micro-batch `index`, counted over all
        steps and processes."""
        samples = range(index * self.batch_size, (index + 1) * self.batch_size)
        epochs = (divmod(sample, self.n_windows) for sample in samples)
        return self.read_inputs_and_labels(
            epoch_permutation(self.seed, epoch, self.n_windows)[place] for epoch, place in epochs
        )


class ValBatches(Windows):
    """Batches for validation: a fixed set of windows in a fixed order, which does not depend on the
    batch size, and which is spread evenly over the split if `max_tokens` limits it."""

    def __init__(
        self, tokens: Tokens, batch_size: int, seq_len: int, max_tokens: int, device: torch.device
    ) -> None:
        """`max_tokens`: limit for the input tokens of all windows, of which at least one is chosen;
        0: no limit."""
        super().__init__(
            tokens,
            batch_size,
            seq_len,
            device,
            kind="validation",
            remedy="raise --val-ratio, or give more text to --val-data",
        )
        limit = max(1, max_tokens // seq_len) if max_tokens else self.n_windows
        self.n_chosen = min(limit, self.n_windows)

    def __len__(self) -> int:
        return -(-self.n_chosen // self.batch_size)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and the labels, both (B, T), of batch `index`, where the last batch may
        have fewer rows. Raises IndexError if there is no batch `index`."""
        first = range(0, self.n_chosen, self.batch_size)[index]
        chosen = range(self.n_chosen)[first : first + self.batch_size]
        return self.read_inputs_and_labels(i * self.n_windows // self.n_chosen for i in chosen)
