"""A snapshot is whole or not there, its damage is noticed, and reading one runs no code."""

import errno
import io
import os
import stat
import zipfile
from pathlib import Path

import pytest
import torch
from harness.rows import row
from harness.runs import same
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.claim import claim, lock
from trainer.resume import load_newest
from trainer.snapshot import (
    KEYS,
    SaveError,
    SnapshotError,
    beside,
    read_snapshot,
    save_snapshot,
    saving,
)


def state(step: int) -> dict:
    empty = {key: kind() for key, kind in KEYS.items()}
    return empty | {"step": step, "model": {"weight": torch.randn(64, 64)}}


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


def stored(content: bytes) -> list[range]:
    """Where in a zip file data lie, and not names, padding or the directory."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = [(entry.header_offset, entry.file_size) for entry in archive.infolist()]
    found = []
    for header, size in entries:
        lengths = content[header + 26 : header + 30]  # of the name, and of what is behind it
        start = header + 30 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
        found.append(range(start, start + size))
    return found


@row("a random bit of a snapshot flipped", "noticed, if it is of the data; else it changes nothing")
def test_a_flipped_bit_is_one_line_or_changes_nothing(tmp_path):
    """torch.load takes most of them for weights. (And zipfile, zlib and torch have many ways to say
    what they find.)"""
    path, original = tmp_path / "run.pt", state(1)
    save_snapshot(path, original)
    content = path.read_bytes()
    data, directory = stored(content), content.index(b"PK\1\2")
    places = st.integers(0, len(content) - 1) | st.integers(directory, len(content) - 1)

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(places | st.sampled_from(data).flatmap(st.sampled_from), st.integers(0, 7))
    def check(place, bit):
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            assert same(read_snapshot(path), original)
            assert not any(place in some for some in data)
        except SnapshotError as error:
            assert "\n" not in str(error)

    check()


def test_both_damaged_is_an_error(tmp_path):
    path = tmp_path / "run.pt"
    (tmp_path / "run.prev.pt").write_bytes(b"x")
    path.write_bytes(b"x")
    with pytest.raises(SnapshotError, match="run.prev.pt"):
        load_newest(path)


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

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SnapshotError, match="run.lock: Permission denied"):
        lock(tmp_path / "run.pt")


@pytest.mark.skipif(os.name != "posix", reason="folders cannot be synchronised elsewhere")
def test_a_save_is_on_the_disk_before_it_has_its_name_and_the_name_after(tmp_path, monkeypatch):
    """And no descriptor stays open."""
    path, real, synced = tmp_path / "run.pt", os.fsync, []

    def fsync(descriptor):
        about = os.fstat(descriptor)
        synced.append((stat.S_ISDIR(about.st_mode), about.st_size, path.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    before = sorted(os.listdir("/dev/fd"))
    save_snapshot(path, state(1))
    assert sorted(os.listdir("/dev/fd")) == before
    (is_folder, size, named), (then_folder, _, then_named) = synced
    assert not is_folder and size == path.stat().st_size and not named
    assert then_folder and then_named


def test_only_what_is_asked_for_stays(tmp_path):
    """No snapshot before, unless it is to be kept; nothing of a process that was killed in a save,
    but what another run is just writing."""
    path = tmp_path / "run.pt"
    others = {".run2.pt.123.tmp", ".lr0.01.123.tmp"}
    for name in (".run.pt.123.tmp", ".lr0.123.tmp", *others):
        (tmp_path / name).write_text("half")
    for step in (1, 2):
        save_snapshot(path, state(step))
        save_snapshot(tmp_path / "lr0", state(step))
    assert {p.name for p in tmp_path.iterdir()} == {"run.pt", "lr0", *others}


def test_a_bug_in_a_save_is_no_full_disk(tmp_path):
    with pytest.raises(KeyError), saving(tmp_path / "run.pt", 1) as temporary:
        temporary.write_text("half")
        raise KeyError
    assert not list(tmp_path.iterdir())
    with pytest.raises(
        SaveError, match="cannot save .*run.pt: Input/output error; it needs 2.5 MB"
    ):
        with saving(tmp_path / "run.pt", 2_500_000):  # which had not even begun to write
            raise OSError(errno.EIO, "Input/output error")
    with pytest.raises(SaveError, match="run.pt: something; .* its folder is gone"):
        with saving(tmp_path / "gone" / "run.pt", 1):
            raise OSError("something")


def test_a_folder_is_no_name(tmp_path):
    with pytest.raises(SnapshotError, match="is not a file"):
        beside(Path("/"), ".prev.pt")


@pytest.mark.parametrize("change", [{"step": 4}, {"step": 6}, {"run": "a"}, {"run": "z"}])
def test_a_run_that_has_moved_on_is_not_resumed(tmp_path, change):
    path = tmp_path / "run.pt"
    before = state(5) | {"run": "m"}
    save_snapshot(path, before)
    resumed = load_newest(path)
    held = claim(path, resumed)
    held.close()
    save_snapshot(path, before | change)
    with pytest.raises(SnapshotError, match="another run was still at"):
        claim(path, resumed)
