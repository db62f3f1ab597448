"""--log-to: the records of metrics.jsonl elsewhere, too."""

import os
import sys
from pathlib import Path

import pytest
from harness.faults import broken
from harness.runs import FAULTS, metrics, older_runs, snapshot, torchrun, train, train_here

from trainer.metrics import LOGGER_MODULES, OPENERS
from trainer.snapshot import sibling_path

TENSORBOARD = "--log-to=tensorboard"


def scalars(path: Path) -> dict[str, list]:
    """What TensorBoard would show: name -> [(step, value)]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = str(sibling_path(path, ".tensorboard"))
    events = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
    names = events.Tags()["scalars"]
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in names}


def logged(path: Path) -> dict[str, list]:
    """The same of metrics.jsonl."""
    records = metrics(path)
    names = {name for record in records for name, value in record.items() if name != "step"}
    curves = {
        name: [
            (record["step"], pytest.approx(record[name], rel=1e-6))
            for record in records
            if isinstance(record.get(name), int | float)
        ]
        for name in names
    }
    return {name: curve for name, curve in curves.items() if curve}


def test_tensorboard_shows_what_the_log_has(path, tmp_path, capsys):
    """Steps that are done again are shown once; and another run does not write into the curves of
    an older one."""
    pytest.importorskip("tensorboard")
    flags = ("--save-interval=2", "--eval-interval=2")
    assert broken(path, "error:0:4", TENSORBOARD, *flags) is None
    assert len(scalars(path)["train_loss"]) == 3
    assert f"run.tensorboard: tensorboard --logdir {tmp_path} shows it" in capsys.readouterr().out
    assert train_here(path, "--resume", "--num-steps=5") == 0  # and the flag is taken over
    curves = scalars(path)
    assert curves == logged(path) and [step for step, _ in curves["val_loss"]] == [2, 5]
    assert train_here(path, TENSORBOARD, "--num-steps=2") == 0 and scalars(path) == logged(path)
    (old,) = older_runs(path)
    assert scalars(old) == curves


@pytest.mark.parametrize("name", OPENERS)
def test_a_package_that_is_missing(name, path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, LOGGER_MODULES[name], None)  # as if it were not there
    assert train_here(path, f"--log-to={name}") == 2 and not [*path.parent.iterdir()]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --log-to {name}: ") and f"pip install {name}," in line


@pytest.mark.parametrize(
    ("where", "says"),
    [(0, "start again (nothing was saved yet)"), (3, "run.pt, step 2, with --resume: ")],
)
def test_a_failure_ends_the_run_with_one_line(where, says, path, monkeypatch, capsys):
    """At the start (0) or at a step."""

    def come_to(record: dict) -> None:
        if record["step"] == where:
            raise OSError("no route\nto host")

    monkeypatch.setitem(OPENERS, "tensorboard", lambda *_: come_to({"step": 0}) or come_to)
    assert train_here(path, TENSORBOARD, "--num-steps=4", "--save-interval=2") == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --log-to tensorboard: OSError: no route to host; ")
    assert "--log-to none" in line and says in line
    if where:
        assert train_here(path, "--resume", "--log-to=none", "--num-steps=4") == 0
        assert [record["step"] for record in metrics(path)] == [1, 2, 3, 4]


# ---- Weights & Biases


@pytest.mark.slow
def test_wandb_goes_on_with_the_same_run(tmp_path, monkeypatch):
    """It stays offline, as it is told to. And has all records on the disk when the process ends,
    also where torchrun's leave by os._exit after a signal. Of two processes one writes."""
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = tmp_path / "runs" / "run.pt"
    signal = {"script": f"{FAULTS} train_ddp", "FAULTS": "term:0:4", "expect": 143}
    assert "; wandb sync" in torchrun(path, "--log-to=wandb", **signal).stdout
    assert "; wandb sync" in train(path, "--resume", "--num-steps=7", "--grad-accum-steps=2").stdout
    written = list(path.parent.glob(f"wandb/offline-run-*-{snapshot(path)['run']}/*.wandb"))
    assert [file.read_bytes().count(b"train_loss") >= 2 for file in written] == [True, True]
