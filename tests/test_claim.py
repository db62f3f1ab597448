"""A run takes a name for its files without taking another run's.

One that still writes there keeps it; one that has ended is renamed, whatever a kill has left of it,
and is never read as if it were the new run's own past. A forgotten --resume: test_resume.py.
"""

import os

import pytest
import torch
from runs import Crash, metrics, snapshot, train, train_here

import train_minimal
from trainer.claim import check_writable, step_aside


def test_second_run_on_the_same_files_is_refused(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run.pt"
    real = train_minimal.train_step

    def train_step(run):
        if run.step == 3:  # in the middle of the first run
            other = train(path, expect=2)
            assert "another run is writing" in other.stderr and other.stderr.count("\n") == 1
        return real(run)

    monkeypatch.setattr(train_minimal, "train_step", train_step)
    assert train_here(path) == 0
    assert train_here(path, "--resume", "--num-steps=21") == 0  # its end opened the lock


def test_of_two_old_runs_the_one_that_got_further_stays(tmp_path, capsys):
    """A job that starts again and again without --resume must not lose the days of the first."""
    path, old = tmp_path / "run.pt", tmp_path / "run.old.pt"
    for steps, expected in ((9, None), (2, 9), (3, 9), (10, 9), (2, 10)):
        assert train_here(path, f"--num-steps={steps}", "--save-interval=1") == 0
        assert snapshot(path)["step"] == steps
        if expected:
            assert snapshot(old)["step"] == expected == metrics(old)[-1]["step"]
            assert snapshot(tmp_path / "run.old.prev.pt")["step"] == expected - 1
    assert "which got further, stays" in capsys.readouterr().out


@pytest.mark.parametrize("survived", range(4))
def test_killed_while_the_old_run_is_renamed(tmp_path, monkeypatch, survived):
    """The next start does the rest."""
    path, old = tmp_path / "run.pt", tmp_path / "run.old.pt"
    for steps in (3, 7):
        assert train_here(path, f"--num-steps={steps}", "--save-interval=1") == 0
    before, renames = path.read_bytes(), []

    def replace(source, target):
        if len(renames) == survived:
            raise Crash
        renames.append(source)
        real(source, target)

    real = os.replace
    with monkeypatch.context() as here, pytest.raises(Crash):
        here.setattr(os, "replace", replace)
        step_aside(path)
    step_aside(path)
    assert old.read_bytes() == before and metrics(old)[-1]["step"] == 7
    assert snapshot(tmp_path / "run.old.prev.pt")["step"] == 6
    assert not path.exists() and not (tmp_path / "run.prev.pt").exists()


def test_what_is_left_of_a_run_that_was_killed_in_a_save_is_renamed_too(tmp_path):
    path, previous = tmp_path / "run.pt", tmp_path / "run.prev.pt"
    assert train_here(path, "--num-steps=2", "--save-interval=1") == 0
    before = previous.read_bytes()
    path.unlink()
    step_aside(path)
    assert (tmp_path / "run.old.pt").read_bytes() == before and not previous.exists()


def test_a_run_that_goes_on_as_the_old_one_is_left_alone(tmp_path, capsys, monkeypatch):
    path, old = tmp_path / "run.pt", tmp_path / "run.old.pt"
    assert train_here(path, "--num-steps=2") == train_here(path, "--num-steps=3") == 0
    real, before = train_minimal.train_step, path.read_bytes()

    def train_step(run):  # of the old run; meanwhile somebody starts a third
        monkeypatch.setattr(train_minimal, "train_step", real)
        assert train_here(path, "--num-steps=4") == 2
        return real(run)

    monkeypatch.setattr(train_minimal, "train_step", train_step)
    capsys.readouterr()
    assert train_here(old, "--num-steps=4", "--resume") == 0
    out, err = capsys.readouterr()
    assert "another run is writing to" in err
    assert "of another run and becomes" not in out  # it is known before the run is announced
    assert path.read_bytes() == before and snapshot(old)["step"] == 4


def test_a_snapshot_that_changes_while_a_run_is_set_up(tmp_path, capsys, monkeypatch):
    """The run before was still at its last save: to go on from the one before would drop that."""
    path = tmp_path / "run.pt"
    assert train_here(path, "--num-steps=2") == 0
    later = snapshot(path) | {"step": 3}

    def save_and_check(*args, **options):
        torch.save(later, path)
        return check_writable(*args, **options)

    monkeypatch.setattr("trainer.setup.check_writable", save_and_check)
    assert train_here(path, "--resume") == 2
    assert "another run was still at" in capsys.readouterr().err
    assert snapshot(path)["step"] == 3


def test_another_run_s_snapshot_is_never_the_one_before(tmp_path, capsys):
    """To go on from it would be to go on with the other run."""
    path = tmp_path / "run.pt"
    assert train_here(path, "--save-interval=5") == 0
    assert train_here(path, "--num-steps=3") == 0
    path.write_bytes(path.read_bytes()[:1000])
    assert train_here(path, "--resume") == 2
    assert "run.pt is no snapshot, or a damaged one" in capsys.readouterr().err
