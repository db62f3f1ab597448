"""A snapshot is whole or not there, its damage is noticed, and reading one runs no code."""

import errno
import os
import random
from pathlib import Path

import pytest
import torch

from trainer import snapshot
from trainer.claim import lock
from trainer.snapshot import (
    KEYS,
    SaveError,
    SnapshotError,
    beside,
    load_newest,
    read_snapshot,
    save_snapshot,
)


def state(step: int) -> dict:
    empty = {key: kind() for key, kind in KEYS.items()}
    return empty | {"step": step, "model": {"weight": torch.randn(64, 64)}}


def test_previous_is_kept(tmp_path):
    path = tmp_path / "run.pt"
    for step in (1, 2, 3):
        save_snapshot(path, state(step), keep_previous=True)
    assert read_snapshot(path)["step"] == 3
    assert read_snapshot(tmp_path / "run.prev.pt")["step"] == 2
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("failing", ["save", "hidden", "fsync"])
def test_failed_save_harms_nothing(tmp_path, monkeypatch, failing):
    path = tmp_path / "run.pt"
    save_snapshot(path, state(1))

    def disk_full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    def hidden(state, file):
        """As torch.save does when its file fails."""
        file.write(b"PK")
        try:
            disk_full()
        except OSError:
            raise RuntimeError("inline_container.cc: unexpected pos 704 vs 598")  # noqa: B904

    what, name = {"fsync": (os, "fsync")}.get(failing, (torch, "save"))
    monkeypatch.setattr(what, name, hidden if failing == "hidden" else disk_full)
    with pytest.raises(SaveError, match="run.pt: disk full; it needs 0.0 MB, .* MB are free"):
        save_snapshot(path, state(2), keep_previous=True)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]
    assert read_snapshot(path)["step"] == 1


def test_save_never_writes_in_place(tmp_path, monkeypatch):
    """While the new file is being written, the old one can still be read."""
    path = tmp_path / "run.pt"
    save_snapshot(path, state(1))
    real, seen = torch.save, []

    def save(what, file):
        real(what, file)
        seen.append(read_snapshot(path)["step"])

    monkeypatch.setattr(snapshot.torch, "save", save)
    save_snapshot(path, state(2))
    assert seen == [1]
    assert read_snapshot(path)["step"] == 2


def test_every_flipped_bit_in_the_stored_data_is_noticed(tmp_path):
    path, original = tmp_path / "run.pt", state(1)
    save_snapshot(path, original)
    content = path.read_bytes()
    weights = original["model"]["weight"].numpy().tobytes()
    start = content.index(weights)
    generator = random.Random(0)
    for _ in range(50):
        damaged = bytearray(content)
        damaged[start + generator.randrange(len(weights))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        torch.load(path, weights_only=True)  # torch sees nothing wrong
        with pytest.raises(SnapshotError, match="damaged"):
            read_snapshot(path)


@pytest.mark.parametrize("damage", ["empty", "cut", "zeroed", "flipped"])
def test_damaged_newest_falls_back_to_the_one_before(tmp_path, damage):
    path = tmp_path / "run.pt"
    save_snapshot(path, state(1))
    save_snapshot(path, state(2), keep_previous=True)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    if damage == "empty":
        content = bytearray()
    elif damage == "cut":
        content = content[:middle]
    elif damage == "zeroed":
        content[middle : middle + 4096] = bytes(4096)
    else:
        content[middle] ^= 1
    path.write_bytes(content)
    resumed = load_newest(path)
    assert resumed.state["step"] == 1
    assert resumed.path == tmp_path / "run.prev.pt"
    assert str(path) in resumed.damage and "\n" not in resumed.damage


def test_both_damaged_is_an_error(tmp_path):
    path = tmp_path / "run.pt"
    (tmp_path / "run.prev.pt").write_bytes(b"x")
    path.write_bytes(b"x")
    with pytest.raises(SnapshotError, match="run.prev.pt"):
        load_newest(path)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_code_in_a_snapshot_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(state(1) | {"extra": Bomb()}, tmp_path / "run.pt")
    with pytest.raises(SnapshotError, match="refused"):
        read_snapshot(tmp_path / "run.pt")
    assert not (tmp_path / "exploded").exists()


def test_names_that_differ_after_a_point_are_two_runs():
    assert beside(Path("lr0.01"), ".prev.pt") != beside(Path("lr0.02"), ".prev.pt")
    assert beside(Path("x/run.pt"), ".prev.pt") == beside(Path("x/run.ckpt"), ".prev.pt")
    assert beside(Path("x/run.pt"), ".prev.pt") == Path("x/run.prev.pt")


def test_a_file_system_without_locks_costs_no_run(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def flock(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert lock(tmp_path / "run.pt") is None


def test_a_lock_that_may_not_be_written_is_named(tmp_path, monkeypatch):
    """It is another user's, in a folder of the group; (root may write it: so by hand)."""

    def refuse(*args):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("trainer.claim.open", refuse, raising=False)
    with pytest.raises(SnapshotError, match="run.lock: Permission denied"):
        lock(tmp_path / "run.pt")
