"""Ids to batches: every window once an epoch, a pure function of the index, flat memory."""

import hashlib
import os
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.corpora import ids
from hypothesis import given, settings
from hypothesis import strategies as st

from data import DataError, TokenFile, TrainBatches, ValBatches
from data.batches import hash_ids, slice_files
from data.tokenizer import ToyTokenizer

CPU = torch.device("cpu")
law = settings(deadline=None, derandomize=True, max_examples=60)
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    """Files of such lengths, of both kinds, whose ids count up through all of them."""
    folder = tmp_path_factory.mktemp("row")

    def make(lengths: list[int]) -> list[TokenFile]:
        files = []
        for i, (n, end) in enumerate(zip(lengths, accumulate(lengths), strict=True)):
            path, offset = folder / f"{i}.bin", 1024 * (i % 2)
            numbers = np.arange(end - n, end, dtype=("uint16", "uint32")[i % 2])
            path.write_bytes(b"\xff" * offset + numbers.tobytes())
            files.append(TokenFile(path, numbers.dtype.name, offset, n))
        return files

    return make


def starts(batches) -> list[int]:
    """The first id of each row, which names the window: the labels follow it one by one."""
    found = []
    for inputs, labels in batches:
        assert inputs.dtype == labels.dtype == torch.int64
        assert inputs.is_contiguous() and labels.is_contiguous()
        assert torch.equal(labels, inputs + 1)
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(inputs.size(1)))
        found += inputs[:, 0].tolist()
    return found


@law
@given(lengths, st.integers(1, 5), st.integers(1, 6), st.integers(0, 3), st.integers(0, 4))
def test_every_window_once_an_epoch_and_validation_in_order(row, lengths, B, T, seed, limit):
    files = row(lengths)
    first = [end - n for n, end in zip(lengths, accumulate(lengths), strict=True)]
    windows = [
        start + i * T for start, n in zip(first, lengths, strict=True) for i in range((n - 1) // T)
    ]
    n, longest = len(windows), max(lengths)
    if not windows:
        for make, kind in ((TrainBatches, "training"), (ValBatches, "validation")):
            says = f"--seq-len {T} needs {T + 1} {kind} tokens in a row, the longest file has "
            with pytest.raises(DataError, match=f"{says}{longest}: lower --seq-len"):
                make(files, B, T, 0, CPU)
        return
    train = TrainBatches(files, B, T, seed, CPU)
    found = starts(train[i] for i in range(-(-3 * n // B)))  # batches straddle epochs
    assert [sorted(found[i : i + n]) for i in (0, n, 2 * n)] == [windows] * 3
    assert train.epoch(n) == B and train.n_windows == n
    again = TrainBatches(files, B, T, seed, CPU)
    assert starts(again[i] for i in (2, 0)) == starts(train[i] for i in (2, 0))
    # The sample order does not depend on the batch size.
    twice = TrainBatches(files, 2 * B, T, seed, CPU)
    assert starts([twice[1]]) == starts([train[2], train[3]])

    val = ValBatches(files, B, T, limit, CPU)
    count = min(n, limit * B) or n
    assert starts(val) == [windows[i * n // count] for i in range(count)]  # ends by IndexError
    assert len(val) == -(-count // B)
    with pytest.raises(IndexError):
        val[-1]


def test_each_epoch_and_each_seed_has_an_order_of_its_own(row):
    files = row([97])
    orders = [starts([TrainBatches(files, 24, 4, seed, CPU)[i]]) for seed in (0, 1) for i in (0, 1)]
    assert len({*map(tuple, orders), tuple(range(0, 96, 4))}) == 5


@law
@given(lengths, st.integers(0, 210), st.integers(0, 210))
def test_slices_are_those_of_the_whole_row(row, lengths, start, size):
    parts = slice_files(row(lengths), start, start + size)
    assert all(part.count for part in parts)
    assert (ids(parts) if parts else []) == list(range(sum(lengths)))[start : start + size]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_memory_stays_flat(tmp_path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    path = tmp_path / "large.bin"
    with open(path, "wb") as file:
        file.truncate(300 * 2**20)  # sparse: as large as promised, yet instant
    batches = TrainBatches([TokenFile(path, "uint16", 0, 150 * 2**20)], 32, 256, 0, CPU)
    for i in range(50):
        batches[i]
    before = resident()
    for i in range(50, 550):  # a memmap would have touched 60 MiB
        batches[i]
    assert resident() - before < 5 * 2**20


@law
@given(lengths, st.integers(1, 210), st.integers(1, 100))
def test_the_fingerprint_is_of_the_tokens_and_of_where_files_end(row, lengths, vocabulary, scan):
    """Not of headers; by a rule that stays, as a run that goes on compares it."""
    files, total, digest = row(lengths), sum(lengths), hashlib.sha256()
    for file in files:
        digest.update(f"{file.dtype} {file.count} ".encode())
        digest.update(np.array(ids([file]), file.dtype).tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.batches.SCAN", scan)  # so many tokens are read at a time
        if total <= vocabulary:
            assert hash_ids(files, ToyTokenizer(vocabulary)) == digest.hexdigest()
            return
        says = f"but --tokenizer-name toy ends at {vocabulary - 1}; name the"
        with pytest.raises(DataError, match=says):
            hash_ids(files, ToyTokenizer(vocabulary))
