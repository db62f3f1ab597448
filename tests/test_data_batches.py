"""Ids to batches: every window once an epoch, a pure function of the index."""

import hashlib
from itertools import accumulate

import numpy as np
import pytest
import torch
from harness import oracle
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


@law
@given(lengths, st.integers(1, 5), st.integers(1, 6), st.integers(0, 3), st.integers(0, 4))
def test_batches_are_those_of_a_plain_sampler(row, lengths, B, T, seed, limit):
    """Which windows, in which order, and their labels, over three epochs; and a fixed validation,
    evenly spread if it is limited."""
    files = row(lengths)
    windows = oracle.windows([ids([file]) for file in files], T)
    n, longest = len(windows), max(lengths)
    if not windows:
        for make, kind in ((TrainBatches, "training"), (ValBatches, "validation")):
            says = f"--seq-len {T} needs {T + 1} {kind} tokens in a row, the longest file has "
            with pytest.raises(DataError, match=f"{says}{longest}: lower --seq-len"):
                make(files, B, T, 0, CPU)
        return
    train, found = TrainBatches(files, B, T, seed, CPU), []
    numbers = [*range(-(-3 * n // B)), 0]  # epochs end inside of batches; of its number alone
    for number in numbers:
        wanted = oracle.training_batch(windows, B, seed, number)
        for tensor, other in zip(train[number], wanted, strict=True):
            assert tensor.dtype == torch.int64 and tensor.is_contiguous()
            assert torch.equal(tensor, other)
        found += train[number][0][:, 0].tolist()
    firsts = [window[0] for window in windows]
    assert [sorted(found[i : i + n]) for i in (0, n, 2 * n)] == [firsts] * 3
    assert train.epoch(n) == B and train.n_windows == n

    val = ValBatches(files, B, T, limit, CPU)
    count = min(n, limit * B) or n
    rows = [windows[i * n // count] for i in range(count)]
    parts = [oracle.shifted(rows[i : i + B]) for i in range(0, count, B)]
    assert len(val) == len(parts)
    for batch, part in zip(val, parts, strict=True):  # ends by IndexError
        assert all(map(torch.equal, batch, part))
    with pytest.raises(IndexError):
        val[-1]


@law
@given(lengths, st.integers(0, 210), st.integers(0, 210))
def test_slices_are_those_of_the_whole_row(row, lengths, start, size):
    parts = slice_files(row(lengths), start, start + size)
    assert all(part.count for part in parts)
    assert (ids(parts) if parts else []) == list(range(sum(lengths)))[start : start + size]


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
