"""--log-to: the records of metrics.jsonl elsewhere, too, and never at the cost of the run."""

import math
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from harness.runs import Crash, crash_after, metrics, snapshot, torchrun, train, train_here

import train_minimal
from trainer.claim import replaced_runs
from trainer.loggers import LOGGERS, NEEDS, Logger
from trainer.snapshot import beside

TENSORBOARD = "--log-to=tensorboard"


def scalars(path: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show: (step, value) of each curve."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(beside(path, ".tensorboard")), size_guidance={"scalars": 0})
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def logged(path: Path) -> dict[str, list[tuple[int, float]]]:
    """The same of metrics.jsonl, whose marks of resumes are no curve."""
    curves = defaultdict(list)
    for record in metrics(path):
        for name, value in record.items():
            if name not in ("step", "resumed_from") and isinstance(value, int | float):
                curves[name].append((record["step"], pytest.approx(value, rel=1e-6)))
    return dict(curves)


@pytest.fixture
def tensorboard():
    return pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)


def test_tensorboard_shows_what_the_log_has(tmp_path, tensorboard, monkeypatch, capsys):
    """On the disk as soon as it is logged; and steps that are done again are shown once."""
    path = tmp_path / "run.pt"
    real, shown = train_minimal.train_step, []

    def train_step(run):
        if run.step == 4:
            shown.extend(scalars(path)["train_loss"])
            raise Crash
        return real(run)

    with monkeypatch.context() as here, pytest.raises(Crash):
        here.setattr(train_minimal, "train_step", train_step)
        train_here(path, TENSORBOARD, "--save-interval=2", "--eval-interval=2")
    assert len(shown) == 3
    assert f"run.tensorboard: tensorboard --logdir {tmp_path} shows it" in capsys.readouterr().out
    flushed: list[int] = []  # with each line of the log
    monkeypatch.setattr(tensorboard.SummaryWriter, "flush", lambda writer: flushed.append(1))
    assert train_here(path, "--resume", "--num-steps=5") == 0  # and the flag is taken over
    assert len(flushed) == 3 and scalars(path) == logged(path)
    assert [step for step, _ in scalars(path)["train_loss"]] == [*range(1, 6)]
    assert [step for step, _ in scalars(path)["val_loss"]] == [2, 5]
    events = sorted(beside(path, ".tensorboard").iterdir())
    assert b"grad_clip_norm = 1.0" in events[0].read_bytes()
    assert train_here(path, "--resume", "--num-steps=6", "--log-to=none") == 0
    assert len(scalars(path)["train_loss"]) == 5 and len(metrics(path)) == 6


def test_another_run_does_not_write_into_the_curves_of_an_older_one(
    tmp_path, tensorboard, monkeypatch
):
    path = tmp_path / "run.pt"
    assert train_here(path, TENSORBOARD, "--num-steps=5") == 0
    with monkeypatch.context() as here, pytest.raises(Crash):  # one that saves nothing
        crash_after(3, here)
        train_here(path, TENSORBOARD)
    assert train_here(path, TENSORBOARD, "--num-steps=2") == 0
    (old,) = replaced_runs(path)
    assert len(scalars(old)["train_loss"]) == 5 and scalars(old) == logged(old)
    assert len(scalars(path)["train_loss"]) == 2 and scalars(path) == logged(path)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_package_that_is_missing(name, tmp_path, monkeypatch, capsys):
    path = tmp_path / "new" / "run.pt"
    monkeypatch.setitem(sys.modules, NEEDS[name], None)  # as if it were not there
    assert train_here(path, f"--log-to={name}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --log-to {name}: ") and f"pip install {name}," in line
    assert not path.parent.exists()
    assert train_here(path, "--num-steps=1") == 0  # who does not ask for it needs it not


# ---- Failures


class Recorder:
    """Stands in for TensorBoard: keeps what it gets, and fails where it is told to."""

    def __init__(self, monkeypatch, fails: object = None):
        self.fails, self.got, self.closed = fails, [], 0
        monkeypatch.setitem(LOGGERS, "tensorboard", self.start)

    def fail(self, where: object) -> None:
        if where == self.fails:
            raise OSError("no route\nto host")

    def start(self, *about):
        self.fail("start")
        return self.write, self.close

    def write(self, numbers: dict[str, float], step: int) -> None:
        self.fail(step)
        self.got.append((step, numbers))

    def close(self) -> None:
        self.fail("close")
        self.closed += 1


def test_a_logger_gets_finite_numbers_only(monkeypatch):
    recorder = Recorder(monkeypatch)
    args = SimpleNamespace(log_to="tensorboard", checkpoint_path=Path("x.pt"))
    logger = Logger(args, {}, 0, print)  # type: ignore[arg-type]
    nothing = {"val_loss": math.nan, "train_ppl": math.inf, "eta_s": None, "kind": "rss"}
    logger.write({"step": 3, "loss": 1.5, "bytes": 7, **nothing})
    logger.close()
    assert recorder.got == [(3, {"loss": 1.5, "bytes": 7})] and recorder.closed == 1


@pytest.mark.parametrize(("where", "got"), [("start", 0), (3, 2), ("close", 4)])
def test_a_failure_is_told_once(where, got, tmp_path, monkeypatch, capsys):
    recorder = Recorder(monkeypatch, where)
    assert train_here(tmp_path / "run.pt", TENSORBOARD, "--num-steps=4") == 0
    said = capsys.readouterr().out
    line = "warning  --log-to tensorboard ended (OSError: no route to host); metrics.jsonl goes on"
    assert said.count("--log-to") == said.count(line) == 1
    assert len(recorder.got) == got and not recorder.closed
    assert len(metrics(tmp_path / "run.pt")) == 4


# ---- Weights & Biases


class UsageError(Exception):
    pass


class CommError(Exception):
    pass


@pytest.fixture(
    params=[None, UsageError("No API key configured"), CommError("retrying:\nconnection refused")],
    ids=str,
)
def wandb(request, monkeypatch):
    """A module of that name, whose `init` fails like that; `calls`: what that got, and for each run
    that ended what was logged."""
    calls: list = []
    busy: list = []  # one that failed has not let go of the run's id
    module: Any = ModuleType("wandb")

    def init(**options):
        calls.append(options)
        offline = options.get("mode") == "offline"
        assert not busy, "run ID is in use"
        if request.param and not offline:
            busy.append(1)
            raise request.param
        logged: list = []
        return SimpleNamespace(
            offline=offline,
            url="https://wandb.example/run",
            log=lambda numbers, step: logged.append((step, numbers)),
            finish=lambda: calls.append(logged),
        )

    module.init, module.Settings, module.teardown = init, dict, busy.clear
    module.errors = SimpleNamespace(UsageError=UsageError, CommError=CommError)
    module.calls, module.fails = calls, request.param
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def test_wandb_goes_on_with_the_same_run_offline_if_need_be(wandb, tmp_path, capsys):
    path = tmp_path / "run.pt"
    assert train_here(path, "--log-to=wandb", "--num-steps=3") == 0
    assert train_here(path, "--resume", "--num-steps=5") == 0
    starts = [call for call in wandb.calls if isinstance(call, dict)]
    assert [start.get("mode") for start in starts] == (
        [None, "offline"] * 2 if wandb.fails else [None] * 2
    )
    for start in starts:
        assert start["id"] == snapshot(path)["run"] and start["resume"] == "allow"
        assert (start["project"], start["name"], start["dir"]) == ("minigpt", "run", tmp_path)
        assert start["config"]["n_layers"] == 2
    logged = [line for call in wandb.calls if isinstance(call, list) for line in call]
    assert [step for step, _ in logged] == [1, 2, 3, 4, 5]
    assert [numbers["train_loss"] for _, numbers in logged] == [
        record["train_loss"] for record in metrics(path)
    ]
    where, why = "https://wandb.example/run", " ".join(str(wandb.fails).split())
    if wandb.fails:
        folder = f"{tmp_path}/wandb/offline-run-*-{snapshot(path)['run']}"
        where = f"offline ({why}); wandb sync {folder} uploads it"
    assert capsys.readouterr().out.count(f"log      wandb, {where}\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize("key", ["", "0123456789" * 4])
def test_wandb_itself_without_a_key_or_a_network(key, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody answers there
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    path = tmp_path / "runs" / "run.pt"
    for flags in (("--log-to=wandb", "--num-steps=3"), ("--resume", "--num-steps=5")):
        result = train(path, *flags)
        assert "; wandb sync" in result.stdout and "--log-to" not in result.stdout
    written = list(path.parent.glob(f"wandb/offline-run-*-{snapshot(path)['run']}/*.wandb"))
    assert len(written) == 2 and all(b"train_loss" in file.read_bytes() for file in written)
    assert len(metrics(path)) == 5


@pytest.mark.slow
def test_process_0_logs(tmp_path, tensorboard):
    path = tmp_path / "run.pt"
    result = torchrun(path, TENSORBOARD, "--num-steps=3")
    assert result.stdout.count("shows it") == 1
    assert len(list(beside(path, ".tensorboard").iterdir())) == 1 and scalars(path) == logged(path)
