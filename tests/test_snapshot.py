"""A snapshot is whole or not there, its damage is noticed, and reading one runs no code.

And a run takes a name for its files without taking another run's: one that still writes there keeps
it; one that has ended is renamed, whatever a kill has left of it, and is never read as if it were
the new run's own past. (A forgotten --resume: test_resume.py.)
"""

import errno
import os
import re
import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from harness.faults import Injected, broken, raising
from harness.rows import row
from harness.runs import metrics, same, snapshot, train_here
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.snapshot import (
    SaveError,
    SnapshotError,
    claim,
    files_of_run,
    read_snapshot,
    rename_older_run,
    save_snapshot,
    sibling_path,
)


def state(step: int) -> dict:
    return {
        **{key: {} for key in ("scaler", "config", "args")},
        **{"typed": [], "tokenizer": {"name": "toy"}, "run": "", "threads": 1},
        "data": {"description": "", "fingerprint": "", "sequences_per_step": 2},
        "optimizer": {"state": {0: {"exp_avg": torch.randn(64)}}, "param_groups": []},
        **{"best_val_loss": 2.5, "step": step, "model": {"weight": torch.randn(64, 64)}},
    }


# ---- To write one


FULL = r"disk full \(No space .*\); it needs 0.0 MB, .* MB are free; are its inodes used up"


@pytest.mark.parametrize(
    ("where", "call", "error", "says"),
    [
        ("torch.save", 1, errno.ENOSPC, FULL),
        ("os.fsync", 1, errno.EIO, "Input/output error"),
        ("os.fsync", 2, errno.EIO, "Input/output error"),  # of the folder: the file is there
        ("os.fsync", 2, errno.EINVAL, None),  # a folder that cannot be synced, as on SMB
        ("os.fsync", 2, errno.ENOTSUP, None),
    ],
)
def test_a_failed_save_harms_nothing(path, tmp_path, monkeypatch, where, call, error, says):
    save_snapshot(path, state(1))
    effects = [None] * (call - 1) + [OSError(error, os.strerror(error))]
    monkeypatch.setattr(where, Mock(side_effect=effects))
    with pytest.raises(SaveError, match=f"cannot save .*run.pt: {says}") if says else nullcontext():
        save_snapshot(path, state(2), keep_previous=True)
    assert {p.name for p in tmp_path.iterdir()} == {"run.pt", *["run.prev.pt"] * (call > 1)}
    assert read_snapshot(path)["step"] == call


def test_only_what_is_asked_for_stays(tmp_path):
    """No snapshot before, unless it is to be kept; nothing of a process that was killed in a save,
    but what another run is just writing, whose name differs after a point."""
    for name in (".lr0.123.tmp", ".lr0.01.123.tmp"):
        (tmp_path / name).write_text("half")
    for step in (1, 2):
        save_snapshot(tmp_path / "lr0", state(step))
    assert {p.name for p in tmp_path.iterdir()} == {"lr0", ".lr0.01.123.tmp"}
    assert sibling_path(Path("lr0.01"), ".prev.pt") == Path("lr0.01.prev.pt")


# ---- To read one


@row("a random bit")
def test_a_flipped_bit_is_one_line_or_changes_nothing(path):
    """torch.load takes most of them for weights. (And zipfile, zlib and torch have many ways to say
    what they find.)"""
    original = state(1)
    save_snapshot(path, original)
    assert same(read_snapshot(path), original)
    content = path.read_bytes()
    directory = content.index(b"PK\1\2")

    @settings(max_examples=300)
    @given(
        st.integers(0, len(content) - 1) | st.integers(directory, len(content) - 1),
        st.integers(0, 7),
    )
    def check(place, bit):
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            assert same(read_snapshot(path), original)
        except SnapshotError as error:
            assert "\n" not in str(error)

    check()


# ---- The lock


@row("a second run")
def test_second_run_on_the_same_files_is_refused(tmp_path, capsys):
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    assert train_here(whole) == 0

    def start_another(run):
        assert train_here(path) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "another run is writing" in line

    assert broken(path, {3: start_another}) == 0  # in the middle of the first run
    assert same(snapshot(path)["model"], snapshot(whole)["model"])
    assert train_here(path, "--resume", "--num-steps=21") == 0  # its end opened the lock


@pytest.mark.parametrize("change", [{"step": 3}, {"run": "another"}])
def test_a_snapshot_that_changes_while_a_run_is_set_up(path, capsys, monkeypatch, change):
    """The run before was still at its last save: to go on from the one before would drop that."""
    assert train_here(path, "--num-steps=2") == 0
    later = snapshot(path) | change

    def save_and_claim(*given):
        torch.save(later, path)
        return claim(*given)

    monkeypatch.setattr("trainer.build.claim", save_and_claim)
    assert train_here(path, "--resume") == 2
    assert "another run was still at" in capsys.readouterr().err
    assert same(snapshot(path), later)


# ---- The name


@given(st.lists(st.sets(st.integers(0, 5)), max_size=3), st.integers(0, 7))
def test_whatever_runs_of_one_second_and_a_kill_have_left_is_kept(runs, survived):
    """Any files of three runs; each start is killed once, after so many of them were renamed."""
    with tempfile.TemporaryDirectory() as folder:
        path, renames = Path(folder, "run.pt"), [os.replace] * survived + [raising(Injected())]
        written = []
        for some in runs:
            for i in some:
                written.append(f"{len(written)} {i}")
                files_of_run(path)[i].write_text(written[-1])
                os.utime(files_of_run(path)[i], (10**9, 10**9))
            calls = iter(renames)
            killed = patch.object(os, "replace", lambda *names, calls=calls: next(calls)(*names))
            with killed, suppress(Injected):
                rename_older_run(path)
            rename_older_run(path)
            assert not any(file.exists() for file in files_of_run(path))
        there = [*Path(folder).iterdir()]
        assert all(file.name.startswith("run.2001-09-09-014640") for file in there)  # -2, -3
        assert sorted(file.read_text() for file in there) == sorted(written)


@pytest.mark.parametrize(
    ("left", "becomes", "goes_on"),
    [
        (".metrics.jsonl", ".metrics.jsonl", False),  # killed before its first save
        (".best.pt", ".best.pt", True),  # in its first save
        (".prev.pt", ".prev.pt", True),  # between the two renames of a save
    ],
)
def test_what_a_kill_has_left_is_kept_and_gone_on_with(
    path, tmp_path, capsys, left, becomes, goes_on
):
    file = sibling_path(path, left)
    assert train_here(path, "--num-steps=2", "--save-interval=1") == 0
    for other in set(files_of_run(path)) - {file}:
        other.unlink(missing_ok=True)
    before = file.read_bytes()
    assert train_here(path, "--num-steps=3") == 0
    said = capsys.readouterr().out
    (renamed,) = tmp_path.glob(f"run.2*{becomes}")
    assert f"note     the files of another run at {path} become those of {tmp_path}/run.2" in said
    assert renamed.read_bytes() == before and len(metrics(path)) == 3
    (old,) = map(Path, re.findall("^note .* --checkpoint-path (.*)", said, re.M))
    assert train_here(old, "--resume", "--num-steps=2") == (0 if goes_on else 2)
    assert not goes_on or snapshot(old)["step"] == 2
