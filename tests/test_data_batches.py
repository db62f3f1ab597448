"""Ids to batches: every window once an epoch, a pure function of the index, flat memory."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from data import DataError, TokenFile, TrainBatches, ValBatches
from data.batches import hash_ids, slice_files

CPU = torch.device("cpu")
B, T = 3, 4


def token_file(path: Path, ids: np.ndarray, offset: int = 0) -> TokenFile:
    path.write_bytes(b"\xff" * offset + ids.tobytes())
    return TokenFile(path, ids.dtype.name, offset, len(ids))


@pytest.fixture
def shards(tmp_path) -> list[TokenFile]:
    """Ids that tell where they came from: 0.., 1000.., 2000..; one shard too short for a window."""
    return [
        token_file(tmp_path / "a.bin", np.arange(0, 43, dtype=np.uint16)),  # 10 windows
        token_file(tmp_path / "b.bin", np.arange(1000, 1004, dtype=np.uint16)),  # none
        token_file(tmp_path / "c.bin", np.arange(70000, 70029, dtype=np.uint32), offset=1024),  # 7
    ]


def starts(batches: TrainBatches, first: int, last: int) -> list[int]:
    """The first id of each row of micro-batches first .. last - 1: it names the window."""
    return [int(row[0]) for i in range(first, last) for row in batches[i][0]]


EXPECTED = [*range(0, 40, T), *range(70000, 70028, T)]


def test_rows_are_windows_and_labels_are_shifted_by_one(shards) -> None:
    inputs, labels = TrainBatches(shards, B, T, 0, CPU)[5]
    assert inputs.shape == labels.shape == (B, T)
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.is_contiguous() and labels.is_contiguous()
    assert torch.equal(labels, inputs + 1)  # the ids count up, within each shard
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(T))


def test_each_window_once_per_epoch_and_another_order_in_each(shards) -> None:
    batches = TrainBatches(shards, B, T, 0, CPU)
    assert batches.n_windows == 17  # not a multiple of B: batches straddle epochs
    rows = starts(batches, 0, 17)
    epochs = [rows[i : i + 17] for i in range(0, 51, 17)]
    assert [sorted(epoch) for epoch in epochs] == [EXPECTED] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != EXPECTED
    assert batches.epoch(0) == 0 and batches.epoch(17) == 3.0


def test_a_batch_is_a_pure_function_of_its_index(shards) -> None:
    batches = TrainBatches(shards, B, T, 7, CPU)
    forwards = [batches[i] for i in range(12)]
    for i in (11, 0, 5, 6, 5, 1):
        fresh = TrainBatches(shards, B, T, 7, CPU)[i]
        for a, b, c in zip(forwards[i], fresh, batches[i], strict=True):
            assert torch.equal(a, b) and torch.equal(a, c)
    assert starts(TrainBatches(shards, B, T, 8, CPU), 0, 6) != starts(batches, 0, 6)
    # The sample order does not depend on the batch size: 2 x 3 rows are 6 rows.
    assert starts(TrainBatches(shards, 6, T, 7, CPU), 0, 3) == starts(batches, 0, 6)


def test_a_batch_larger_than_the_data_repeats_epochs(tmp_path) -> None:
    file = token_file(tmp_path / "x.bin", np.arange(2 * T + 1, dtype=np.uint16))
    rows = starts(TrainBatches([file], 5, T, 0, CPU), 0, 1)
    assert len(rows) == 5 and sorted(rows[:2]) == sorted(rows[2:4]) == [0, T]


def test_validation_takes_every_window_in_order(shards) -> None:
    batches = ValBatches(shards, B, T, 0, CPU)
    assert len(batches) == 6
    rows = [int(row[0]) for inputs, _ in batches for row in inputs]  # ends by IndexError
    assert rows == EXPECTED
    assert batches[5][0].shape == (2, T)
    with pytest.raises(IndexError):
        batches[6]


def test_limited_validation_is_spread_over_the_whole_split(shards) -> None:
    batches = ValBatches(shards, B, T, 2, CPU)
    rows = [int(row[0]) for inputs, labels in batches for row in inputs]
    assert len(batches) == 2 and len(set(rows)) == 6
    assert [EXPECTED.index(row) for row in rows] == [0, 2, 5, 8, 11, 14]
    assert len(ValBatches(shards, B, T, 100, CPU)) == 6


def test_too_few_tokens_name_the_flag_and_the_way_out(shards) -> None:
    with pytest.raises(DataError, match="--seq-len 43 .*43.*--train-data"):
        TrainBatches(shards, B, 43, 0, CPU)
    assert TrainBatches(shards, B, 42, 0, CPU).n_windows == 1
    with pytest.raises(DataError, match="--seq-len 43 .*--val-ratio.*--val-data"):
        ValBatches(shards, B, 43, 0, CPU)
    with pytest.raises(DataError, match="--seq-len"):
        ValBatches([], B, T, 0, CPU)


def test_slices_are_the_tokens_of_the_row(shards) -> None:
    ids = [*range(43), *range(1000, 1004), *range(70000, 70029)]

    def read(files: list[TokenFile]) -> list[int]:
        found: list[int] = []
        for f in files:
            found += np.fromfile(f.path, f.dtype, f.count, offset=f.offset).tolist()
        return found

    for start, stop in [(0, 76), (0, 43), (40, 45), (45, 60), (75, 76), (5, 5), (0, 10**9)]:
        assert read(slice_files(shards, start, stop)) == ids[start:stop]


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
    for i in range(50, 2050):
        batches[i]
    assert resident() - before < 5 * 2**20
    assert len(os.listdir("/proc/self/fd")) == handles


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_on_a_gpu(shards) -> None:
    device = torch.device("cuda")
    on_gpu, on_cpu = (TrainBatches(shards, B, T, 0, where)[3] for where in (device, CPU))
    for a, b in zip(on_gpu, on_cpu, strict=True):
        assert a.device.type == "cuda" and torch.equal(a.cpu(), b)


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


def test_slices_are_those_of_the_whole_row(shards):
    """Every start and stop, across the ends of files and beyond the last."""
    ids = [np.fromfile(f.path, f.dtype, f.count, offset=f.offset).tolist() for f in shards]
    whole = sum(ids, [])
    for start in range(0, len(whole) + 2, 3):
        for stop in (start, start + 1, start + 5, start + 50, len(whole), len(whole) + 9):
            parts = slice_files(shards, start, stop)
            found = [np.fromfile(p.path, p.dtype, p.count, offset=p.offset).tolist() for p in parts]
            assert sum(found, []) == whole[start:stop] and all(found)


class Vocabulary:
    vocab_size, name = 100, "tiny"


def test_the_fingerprint_is_of_the_tokens_and_where_files_end(tmp_path, monkeypatch):
    def fingerprint(*rows: list[int], offset: int = 0, dtype=np.uint16) -> str:
        files = [
            token_file(tmp_path / f"{i}", np.array(row, dtype), offset)
            for i, row in enumerate(rows)
        ]
        return hash_ids(files, Vocabulary())

    rows = list(range(90))
    same = fingerprint(rows)
    assert same == fingerprint(rows, offset=64)  # not of the header
    others = [[*rows[:-1], 99], [99, *rows[1:]], [*rows[:40], 41, 40, *rows[42:]], rows[:-1]]
    hashes = {same, *map(fingerprint, others), fingerprint(rows[:50], rows[50:])}
    hashes |= {fingerprint(rows, dtype=np.uint32), fingerprint(rows[:50], rows[50:80], rows[80:])}
    assert len(hashes) == 8
    for scan in (1, 7, 45, 89, 90):  # some tokens at a time: no difference
        monkeypatch.setattr("data.batches.SCAN", scan)
        assert fingerprint(rows) == same


@pytest.mark.parametrize("scan", [2, 2**20])
@pytest.mark.parametrize("place", [0, 3, 4])
def test_an_id_that_the_tokenizer_does_not_have(tmp_path, monkeypatch, scan, place):
    monkeypatch.setattr("data.batches.SCAN", scan)
    ids = np.array([5, 99, 0, 99, 7], dtype=np.uint16)
    hash_ids([token_file(tmp_path / "x", ids)], Vocabulary())  # 99 is the last one
    for wrong in (100, 250):
        ids[place] = wrong
        with pytest.raises(DataError, match=f"id {wrong}, but --tokenizer-name tiny ends at 99;"):
            hash_ids([token_file(tmp_path / "x", ids)], Vocabulary())


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda files, T: TrainBatches(files, B, T, 0, CPU), "training"),
        (lambda files, T: ValBatches(files, B, T, 0, CPU), "validation"),
    ],
)
def test_too_few_tokens_in_a_row(shards, make, kind):
    make(shards, 42)  # the longest file has 43
    for files, T, longest in ((shards, 43, 43), (shards[1:2], 7, 4), ([], 7, 0)):
        says = (
            f"--seq-len {T} needs {T + 1} {kind} tokens in a row, the longest file has {longest}:"
        )
        with pytest.raises(DataError, match=says):
            make(files, T)


def test_validation_batches_end(shards):
    batches = ValBatches(shards, B, T, 0, CPU)
    for index in (-2, -1, len(batches), len(batches) + 1):
        with pytest.raises(IndexError, match=f"validation batch {index} of {len(batches)}"):
            batches[index]
