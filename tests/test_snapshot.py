"""A snapshot is whole or not there, its damage is noticed, and reading one runs no code.

And a run takes a name for its files without taking another run's: one that still writes there keeps
it; one that has ended is renamed, whatever a kill has left of it, and is never read as if it were
the new run's own past. (A forgotten --resume: test_resume.py.)
"""

import errno
import os
import random
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from harness.faults import Injected, broken, raising
from harness.rows import row
from harness.runs import metrics, same, snapshot, train_here
from hypothesis import given
from hypothesis import strategies as st

from trainer.resume import load_newest_readable
from trainer.snapshot import (
    SaveError,
    SnapshotError,
    files_of_run,
    lock_run_files,
    read_snapshot,
    rename_older_run,
    save_snapshot,
    sibling_path,
)


def state(step: int) -> dict:
    return {
        **{"scaler": {}, "config": {}, "args": [], "run": "", "threads": 1},
        "tokenizer": {"name": "toy"},
        "data": {"description": "", "fingerprint": "", "sequences_per_step": 2},
        "optimizer": {"state": {0: {"exp_avg": torch.randn(64)}}, "param_groups": []},
        **{"best_val_loss": 2.5, "step": step, "model": {"weight": torch.randn(8, 8)}},
    }


# ---- To write one


FULL = r"disk full \(No space .*\); it needs 0.0 MB, .* MB are free; make room"


@pytest.mark.parametrize(
    ("where", "error", "says"),
    [
        ("torch.save", errno.ENOSPC, FULL),
        ("os.fsync", errno.EIO, "Input/output error"),
        ("os.replace", errno.EACCES, "Permission denied"),
    ],
)
def test_a_save_keeps_what_it_must_and_leaves_nothing_else(path, tmp_path, where, error, says):
    """Nor what a killed process has left."""
    (tmp_path / ".run.pt.tmp").write_text("half")
    for step in (1, 2):
        save_snapshot(path, state(step))
    failing = patch(where, Mock(side_effect=OSError(error, os.strerror(error))))
    with failing, pytest.raises(SaveError, match=f"cannot save .*run.pt: {says}"):
        save_snapshot(path, state(3), keep_previous=True)
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"] and read_snapshot(path)["step"] == 2
    save_snapshot(path, state(3), keep_previous=True)
    assert read_snapshot(sibling_path(path, ".prev.pt"))["step"] == 2
    assert sibling_path(Path("lr0.01"), ".prev.pt") == Path("lr0.01.prev.pt")


# ---- To read one


@row("a random bit")
def test_each_flipped_bit_is_found(path):
    """torch.load takes most of them for weights."""
    original = state(1)
    save_snapshot(path, original)
    assert same(read_snapshot(path), original)
    content = path.read_bytes()
    places = random.Random(0).choices(range(len(content)), k=4000)
    with path.open("r+b") as file:  # (writing it anew 4,000 times takes long)
        for place, bit in zip(places, 500 * [1 << n for n in range(8)], strict=True):
            os.pwrite(file.fileno(), bytes([content[place] ^ bit]), place)
            with pytest.raises(SnapshotError, match="no snapshot of this trainer, or a damaged"):
                read_snapshot(path)
            os.pwrite(file.fileno(), content[place : place + 1], place)
    assert same(read_snapshot(path), original)


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


def test_a_snapshot_that_changes_while_a_run_is_set_up(path):
    """The run before was still at its last save: to go on from the one before would drop that."""
    save_snapshot(path, state(1))
    lock_run_files(path, load_newest_readable(path)).close()
    resumed = load_newest_readable(path)
    save_snapshot(path, state(2))
    with pytest.raises(SnapshotError, match="another run was still at"):
        lock_run_files(path, resumed)


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
                rename_older_run(path, files_of_run(path))
            rename_older_run(path, files_of_run(path))
            assert not any(file.exists() for file in files_of_run(path))
        there = [*Path(folder).iterdir()]
        assert all(file.name.startswith("run.2001-09-09-014640") for file in there)  # -2, -3
        assert sorted(file.read_text() for file in there) == sorted(written)


@pytest.mark.parametrize(
    ("left", "goes_on"),
    [
        (".metrics.jsonl", False),  # killed before its first save
        (".best.pt", True),  # in its first save
        (".prev.pt", True),  # between the two renames of a save
    ],
)
def test_what_a_kill_has_left_is_kept_and_gone_on_with(path, tmp_path, capsys, left, goes_on):
    """No command is promised that could not."""
    file = sibling_path(path, left)
    assert train_here(path, "--num-steps=2", "--save-interval=1") == 0
    for other in set(files_of_run(path)) - {file}:
        other.unlink(missing_ok=True)
    before = file.read_bytes()
    assert train_here(path, "--num-steps=3") == 0
    said = capsys.readouterr().out
    (renamed,) = tmp_path.glob(f"run.2*{left}")
    assert f"note     the files of another run at {path} become those of {tmp_path}/run.2" in said
    assert renamed.read_bytes() == before and len(metrics(path)) == 3
    commands = re.findall("^note .* --checkpoint-path (.*)", said, re.M)
    assert len(commands) == goes_on
    for old in map(Path, commands):
        assert train_here(old, "--resume", "--num-steps=3") == 0 and snapshot(old)["step"] == 3


@pytest.mark.parametrize("fault", ["copied", "damaged"])
def test_a_resume_takes_no_files_of_another_run(path, tmp_path, capsys, fault):
    """A snapshot was copied here, or this run's is damaged and another one's is beside it."""
    other, n = tmp_path / "other.pt", "--save-interval=1"
    assert train_here(path, "--num-steps=2", n) == train_here(other, "--num-steps=3", n) == 0
    if fault == "copied":
        shutil.copy(other, path)
    else:
        path.write_bytes(b"?")
        shutil.copy(sibling_path(other, ".prev.pt"), sibling_path(path, ".prev.pt"))
    theirs = {file: file.read_bytes() for file in files_of_run(path)[1:4] if file.is_file()}
    if fault == "damaged":
        del theirs[sibling_path(path, ".prev.pt")]
    capsys.readouterr()
    assert train_here(path, "--resume", "--num-steps=5", n) == 0
    assert f"note     the files of another run at {path} become those of" in capsys.readouterr().out
    assert min(record["step"] for record in metrics(path)) == (4 if fault == "copied" else 3)
    kept = [file.read_bytes() for file in tmp_path.glob("run.2*")]
    assert sorted(kept) == sorted(theirs.values()) and len(theirs) >= 2
