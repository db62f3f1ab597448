"""--log-to: the records of metrics.jsonl elsewhere, too, and never at the cost of the run."""

import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from harness.faults import broken
from harness.runs import FAULTS, metrics, older_runs, snapshot, torchrun, train, train_here

from trainer.metrics import LOGGERS, NEEDS
from trainer.snapshot import beside

TENSORBOARD = "--log-to=tensorboard"


def scalars(path: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard would show: each curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(beside(path, ".tensorboard")), size_guidance={"scalars": 0})
    events.Reload()
    found: dict[str, dict[int, float]] = {}
    for name in events.Tags()["scalars"]:
        curve = events.Scalars(name)
        found[name] = {event.step: event.value for event in curve}
        assert len(found[name]) == len(curve)  # no step twice
    return found


def logged(path: Path) -> dict[str, Any]:
    """The same of metrics.jsonl, whose marks of resumes are no curve."""
    curves: dict[str, dict[int, float]] = {}
    for record in metrics(path):
        step = record.pop("step")
        for name in record.keys() - {"resumed_from", "peak_memory_kind", "recompute"}:
            if record[name] is not None:
                curves.setdefault(name, {})[step] = pytest.approx(record[name], rel=1e-6)
    return curves


def test_tensorboard_shows_what_the_log_has(path, tmp_path, monkeypatch, capsys):
    """On the disk as soon as it is logged; steps that are done again are shown once; and another
    run does not write into the curves of an older one."""
    pytest.importorskip("tensorboard")

    flags = ("--save-interval=2", "--eval-interval=2")
    assert broken(path, "error:0:4", TENSORBOARD, *flags) is None
    assert [*scalars(path)["train_loss"]] == [1, 2, 3]
    assert f"run.tensorboard: tensorboard --logdir {tmp_path} shows it" in capsys.readouterr().out
    flush = MagicMock()  # with each line of the log
    with monkeypatch.context() as here:
        here.setattr("torch.utils.tensorboard.SummaryWriter.flush", flush)
        assert train_here(path, "--resume", "--num-steps=5") == 0  # and the flag is taken over
    curves = scalars(path)
    assert flush.call_count == 3 and curves == logged(path)
    assert [*curves["train_loss"]] == [1, 2, 3, 4, 5] and [*curves["val_loss"]] == [2, 5]
    first = min(beside(path, ".tensorboard").iterdir())
    assert b"grad_clip_norm = 1.0" in first.read_bytes()
    assert train_here(path, "--resume", "--num-steps=6", "--log-to=none") == 0
    assert len(scalars(path)["train_loss"]) == 5 and len(metrics(path)) == 6
    assert broken(path, "error:0:4", TENSORBOARD) is None  # another run, that saves nothing
    assert train_here(path, TENSORBOARD, "--num-steps=2") == 0 and scalars(path) == logged(path)
    (old,) = older_runs(path)
    assert len(scalars(old)["train_loss"]) == 5


@pytest.mark.parametrize("name", NEEDS)
def test_a_package_that_is_missing(name, tmp_path, monkeypatch, capsys):
    path = tmp_path / "new" / "run.pt"
    monkeypatch.setitem(sys.modules, NEEDS[name], None)  # as if it were not there
    assert train_here(path, f"--log-to={name}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --log-to {name}: ") and f"pip install {name}," in line
    assert not path.parent.exists()
    assert train_here(path, "--num-steps=1") == 0  # who does not ask for it needs it not


@pytest.mark.parametrize(("where", "got"), [(0, 0), (3, 2), (None, 4)])
def test_a_failure_is_told_once(where, got, path, monkeypatch, capsys):
    """At the start (0) or at a step. And a logger gets numbers, and finite ones only."""
    written: list[tuple[int, dict]] = []

    def come_to(step: int) -> None:
        if step == where:
            raise OSError("no route\nto host")

    def log(numbers: dict[str, float], step: int) -> None:
        come_to(step)
        written.append((step, numbers))

    monkeypatch.setitem(LOGGERS, "tensorboard", lambda *about: come_to(0) or log)
    monkeypatch.setattr("trainer.report.perplexity", lambda loss: math.inf)
    assert train_here(path, TENSORBOARD, "--num-steps=4") == 0
    said = capsys.readouterr().out
    line = "warning  --log-to tensorboard ended (OSError: no route to host); metrics.jsonl goes on"
    assert said.count("--log-to") == said.count(line) == (where is not None)
    records = {record.pop("step"): record for record in metrics(path)}
    assert [*records] == [1, 2, 3, 4] and len(written) == got
    for step, numbers in written:
        told = {name: value for name, value in records[step].items() if value is not None}
        words = {"peak_memory_kind": "rss", "recompute": "none"}
        assert "train_ppl" not in told and told == numbers | words


# ---- Weights & Biases


@pytest.mark.parametrize("offline", [False, True])
def test_wandb_goes_on_with_the_same_run(offline, path, monkeypatch, capsys):
    """With a stand-in. (What the package itself does: the next test.)"""
    wandb = MagicMock()
    wandb.run.url, wandb.run.offline = "URL", offline
    wandb.init.return_value = wandb.run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert train_here(path, "--log-to=wandb", "--num-steps=3") == 0
    assert train_here(path, "--resume", "--num-steps=5") == 0
    name = snapshot(path)["run"]
    about = {"project": "minigpt", "name": "run", "id": name, "resume": "allow", "dir": path.parent}
    assert wandb.init.call_count == 2
    for start in wandb.init.call_args_list:
        assert about.items() <= start.kwargs.items() and start.kwargs["config"]["n_layers"] == 2
    found = [(step, numbers["train_loss"]) for (numbers, step), _ in wandb.run.log.call_args_list]
    assert found == [(record["step"], record["train_loss"]) for record in metrics(path)]
    upload = f"wandb sync {path.parent}/wandb/offline-run-*-{name} uploads it"
    where = f"offline; {upload}" if offline else "URL"
    assert capsys.readouterr().out.count(f"log      wandb, {where}\n") == 2


@pytest.mark.slow
def test_wandb_itself_stays_offline(tmp_path, monkeypatch):
    """And has all records on the disk when the process ends, also where torchrun's leaves by
    os._exit after a signal."""
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = tmp_path / "runs" / "run.pt"
    signal = {"script": f"{FAULTS} train_ddp", "FAULTS": "term:0:4", "expect": 143}
    assert "; wandb sync" in torchrun(path, "--log-to=wandb", processes=1, **signal).stdout
    assert "; wandb sync" in train(path, "--resume", "--num-steps=7").stdout
    written = list(path.parent.glob(f"wandb/offline-run-*-{snapshot(path)['run']}/*.wandb"))
    assert [file.read_bytes().count(b"train_loss") >= 2 for file in written] == [True, True]


@pytest.mark.slow
def test_process_0_logs(path):
    pytest.importorskip("tensorboard")
    result = torchrun(path, TENSORBOARD, "--num-steps=3")
    assert result.stdout.count("shows it") == 1
    assert len(list(beside(path, ".tensorboard").iterdir())) == 1 and scalars(path) == logged(path)
