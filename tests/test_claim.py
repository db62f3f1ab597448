"""A run takes a name for its files without taking another run's.

One that still writes there keeps it; one that has ended is renamed, whatever a kill has left of it,
and is never read as if it were the new run's own past. A forgotten --resume: test_resume.py.
"""

import os
import re
from pathlib import Path

import pytest
import torch
from harness.rows import row
from harness.runs import Crash, crash_after, metrics, same, snapshot, train, train_here

import train_minimal
from trainer.claim import check_writable, files_of, name_aside, replaced_runs, step_aside
from trainer.snapshot import beside


@row("a second run on the same --checkpoint-path", "refused, exit 2, the first unharmed")
def test_second_run_on_the_same_files_is_refused(tmp_path, capsys, monkeypatch):
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    assert train_here(whole) == 0
    real = train_minimal.train_step

    def train_step(run):
        if run.step == 3:  # in the middle of the first run
            other = train(path, expect=2)
            assert "another run is writing" in other.stderr and other.stderr.count("\n") == 1
        return real(run)

    monkeypatch.setattr(train_minimal, "train_step", train_step)
    assert train_here(path) == 0
    assert same(snapshot(path)["model"], snapshot(whole)["model"])
    assert train_here(path, "--resume", "--num-steps=21") == 0  # its end opened the lock


def test_no_run_s_files_are_deleted_by_another(tmp_path, capsys):
    """A demo, an own model, and a third run under the same name: all three are still there."""
    path, seen = tmp_path / "run.pt", {}
    for steps in (9, 2, 3, 10):
        assert train_here(path, f"--num-steps={steps}", "--save-interval=1") == 0
        for file in replaced_runs(path):
            if file not in seen:
                seen[file] = snapshot(file)["step"]
                assert str(file) in capsys.readouterr().out
            assert snapshot(file)["step"] == seen[file] == metrics(file)[-1]["step"]
            assert snapshot(beside(file, ".prev.pt"))["step"] == seen[file] - 1
            assert snapshot(beside(file, ".best.pt"))["best_val_loss"] < 10
    assert [seen[file] for file in replaced_runs(path)] == [9, 2, 3]


def test_nor_does_it_join_the_files_of_another_run(tmp_path):
    path, best = tmp_path / "run.pt", tmp_path / "run.best.pt"
    for steps in (2, 3):
        assert train_here(path, f"--num-steps={steps}") == 0
        for file in (path, best):
            os.utime(file, (10**9, 10**9))
        if steps == 2:
            step_aside(path)
            (old,) = replaced_runs(path)
            for suffix in (".best.pt", ".metrics.jsonl"):  # its owner did not want them
                beside(old, suffix).unlink()
    path.unlink()
    step_aside(path)
    assert not beside(old, ".best.pt").exists() and not best.exists()


def test_two_runs_that_ended_in_the_same_second(tmp_path):
    path = tmp_path / "run.pt"
    for steps in (2, 3, 4):
        assert train_here(path, f"--num-steps={steps}") == 0
        os.utime(path, (10**9, 10**9))
    step_aside(path)
    old = replaced_runs(path)
    assert sorted(snapshot(file)["step"] for file in old) == [2, 3, 4]
    assert len({file.stem[:21] for file in old}) == 1  # run.2001-09-09-014640, -2, -3
    assert all(metrics(file)[-1]["step"] == snapshot(file)["step"] for file in old)


@pytest.mark.parametrize("survived", range(4))
def test_killed_while_the_old_run_is_renamed(tmp_path, monkeypatch, survived):
    """The next start does the rest."""
    path = tmp_path / "run.pt"
    for steps in (3, 7):
        assert train_here(path, f"--num-steps={steps}", "--save-interval=1") == 0
    os.utime(tmp_path / "run.best.pt")  # saved after the snapshot of the same step
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
    old = replaced_runs(path)[-1]
    assert old.read_bytes() == before and metrics(old)[-1]["step"] == 7
    assert snapshot(beside(old, ".prev.pt"))["step"] == 6 and beside(old, ".best.pt").exists()
    assert not any(file.exists() for file in files_of(path))


def test_what_is_left_of_a_run_that_was_killed_in_a_save_is_renamed_too(tmp_path):
    path, previous = tmp_path / "run.pt", tmp_path / "run.prev.pt"
    assert train_here(path, "--num-steps=2", "--save-interval=1") == 0
    before = previous.read_bytes()
    path.unlink()
    step_aside(path)
    (old,) = replaced_runs(path)
    assert old.read_bytes() == before and not previous.exists()


@pytest.mark.parametrize("line", [b'{"st', b'{"step": 50, "epoch": 0.0'])
def test_a_log_whose_first_line_was_cut_short(tmp_path, line):
    path, log = tmp_path / "run.pt", tmp_path / "run.metrics.jsonl"
    log.write_bytes(line)
    assert train_here(path, "--num-steps=2") == 0
    log.write_bytes(line)
    assert train_here(path, "--num-steps=3", "--resume") == 0
    assert [record["step"] for record in metrics(path)] == [2, 3]


def test_the_log_of_a_run_that_saved_nothing_is_kept_too(tmp_path, monkeypatch, capsys):
    path, log = tmp_path / "run.pt", tmp_path / "run.metrics.jsonl"
    log.touch()
    assert name_aside(path) is None  # it did not even log
    with monkeypatch.context() as here, pytest.raises(Crash):
        crash_after(2, here)
        train_here(path)
    before = log.read_bytes()
    capsys.readouterr()
    assert train_here(path, "--num-steps=3") == 0
    (old,) = tmp_path.glob("run.2*.metrics.jsonl")
    assert old.read_bytes() == before and len(metrics(path)) == 3
    assert f"note     {log} is of another run and becomes {old}\n" in capsys.readouterr().out


def test_only_runs_of_that_name_are_older_ones_of_it(tmp_path):
    names = ["run.2026-01-02-030405.pt", "run.2026-01-02-030405-2.pt"]
    others = ["run.pt", "run.prev.pt", "run.2026-01-02-030405.best.pt", "runs.2026-01-02-030405.pt"]
    for name in names + others:
        (tmp_path / name).touch()
    assert {file.name for file in replaced_runs(tmp_path / "run.pt")} == set(names)
    assert replaced_runs(tmp_path / "nowhere" / "run.pt") == []


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
    (tmp_path / "run.best.pt").unlink()
    assert train_here(path, "--resume") == 2
    assert "run.pt is no snapshot, or a damaged one" in capsys.readouterr().err


def test_a_run_that_was_killed_before_its_first_save(tmp_path, capsys):
    """Its best weights are there, and no command is promised that could not go on."""
    path, best = tmp_path / "run.pt", tmp_path / "run.best.pt"
    assert train_here(path, "--num-steps=2") == 0
    path.unlink()
    before = best.read_bytes()
    capsys.readouterr()
    assert train_here(path, "--num-steps=3") == 0
    (note,) = re.findall("^note     (.*)", capsys.readouterr().out, re.M)
    renamed, way_back = note.removeprefix(f"{best} is of another run and becomes ").split("; ")
    assert Path(renamed).read_bytes() == before
    old = way_back.rpartition(" --checkpoint-path ")[2]
    assert train_here(Path(old), "--resume", "--num-steps=2") == 0
    assert snapshot(Path(old))["step"] == 2


def test_a_file_that_cannot_be_renamed(tmp_path, monkeypatch, capsys):
    """As in a folder where everybody may write, but only rename what is his own."""
    path = tmp_path / "run.pt"
    assert train_here(path, "--num-steps=2") == 0
    before = path.read_bytes()

    def refuse(source, target):
        if "run.20" in str(target):
            raise PermissionError(1, "Operation not permitted")
        real(source, target)

    real = os.replace
    monkeypatch.setattr("os.replace", refuse)
    assert train_here(path, "--num-steps=3") == 2
    assert "cannot rename" in capsys.readouterr().err and path.read_bytes() == before
