"""Ids to batches: every window once an epoch, a pure function of the index, flat memory."""

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

CPU = torch.device("cpu")
law = settings(deadline=None, derandomize=True, max_examples=60)
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def token_file(path: Path, ids: np.ndarray, offset: int = 0) -> TokenFile:
    path.write_bytes(b"\xff" * offset + ids.tobytes())
    return TokenFile(path, ids.dtype.name, offset, len(ids))


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    """Files of such lengths, of both kinds, whose ids count up through all of them."""
    folder = tmp_path_factory.mktemp("row")

    def make(lengths: list[int]) -> list[TokenFile]:
        ends = list(accumulate(lengths))
        return [
            token_file(
                folder / f"{i}.bin",
                np.arange(end - n, end, dtype=("uint16", "uint32")[i % 2]),
                offset=1024 * (i % 2),
            )
            for i, (n, end) in enumerate(zip(lengths, ends, strict=True))
        ]

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
    for index in (-1, len(val)):
        with pytest.raises(IndexError, match=f"validation batch {index} of {len(val)}"):
            val[index]


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
def test_memory_and_file_handles_stay_flat(tmp_path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    path = tmp_path / "large.bin"
    with open(path, "wb") as file:
        file.truncate(300 * 2**20)  # sparse: as large as promised, yet instant
    batches = TrainBatches([TokenFile(path, "uint16", 0, 150 * 2**20)], 32, 256, 0, CPU)
    for i in range(50):
        batches[i]
    before, handles = resident(), len(os.listdir("/proc/self/fd"))
    for i in range(50, 550):  # a memmap would have touched 60 MiB
        batches[i]
    assert resident() - before < 5 * 2**20
    assert len(os.listdir("/proc/self/fd")) == handles


def test_the_shortest_files(tmp_path):
    """Shorter than a header, they can only be plain tokens; with llm.c's magic, only be cut off."""
    path = tmp_path / "x.bin"
    for size in range(0, 16, 2):
        path.write_bytes(bytes(size))
        assert TokenFile.open(path) == TokenFile(path, "uint16", 0, size // 2)
    for size in (12, 14, 16):
        path.write_bytes(np.array([20240520, 1, 4], dtype="<u4").tobytes() + bytes(size - 12))
        with pytest.raises(DataError, match="its header promises 4 tokens"):
            TokenFile.open(path)


class Vocabulary:
    vocab_size, name = 100, "tiny"


@pytest.mark.parametrize("scan", [2, 7, 90, 2**20])  # so many tokens at a time: no difference
def test_the_fingerprint_is_of_the_tokens_and_where_files_end(tmp_path, monkeypatch, scan):
    monkeypatch.setattr("data.batches.SCAN", scan)

    def fingerprint(*rows: list[int], offset: int = 0, dtype=np.uint16) -> str:
        files = [
            token_file(tmp_path / f"{i}", np.array(row, dtype), offset)
            for i, row in enumerate(rows)
        ]
        return hash_ids(files, Vocabulary())

    rows = list(range(90))
    same = fingerprint(rows)
    assert same == fingerprint(rows, offset=64)  # not of the header
    assert same.startswith("ea0cc661")  # a run that goes on compares it
    others = [[*rows[:-1], 99], [99, *rows[1:]], [*rows[:40], 41, 40, *rows[42:]], rows[:-1]]
    hashes = {same, *map(fingerprint, others), fingerprint(rows[:50], rows[50:])}
    hashes |= {fingerprint(rows, dtype=np.uint32), fingerprint(rows[:50], rows[50:80], rows[80:])}
    assert len(hashes) == 8
    for place in (0, 3, 89):
        wrong = [*rows[:place], 100, *rows[place + 1 :]]
        with pytest.raises(DataError, match="id 100, but --tokenizer-name tiny ends at 99;"):
            fingerprint(wrong)
