"""--log-to: the records of metrics.jsonl elsewhere, too, and never at the cost of the run."""

import math
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


def test_tensorboard_shows_what_the_log_has(tmp_path, tensorboard, capsys, monkeypatch):
    path, flushed = tmp_path / "run.pt", []
    monkeypatch.setattr(tensorboard.SummaryWriter, "flush", lambda writer: flushed.append(1))
    assert train_here(path, TENSORBOARD, "--num-steps=4", "--eval-interval=2") == 0
    curves = scalars(path)
    assert curves == logged(path) and len(flushed) == len(metrics(path))
    assert [step for step, _ in curves["val_loss"]] == [2, 4] and len(curves["train_loss"]) == 4
    assert f"run.tensorboard: tensorboard --logdir {tmp_path} shows it" in capsys.readouterr().out
    (events,) = beside(path, ".tensorboard").iterdir()
    assert b"grad_clip_norm = 1.0" in events.read_bytes()


def test_steps_that_are_done_again_are_shown_once(tmp_path, tensorboard, monkeypatch):
    path = tmp_path / "run.pt"
    real, shown = train_minimal.train_step, []

    def train_step(run):
        if run.step == 9:
            shown.extend(scalars(path)["train_loss"])
            raise Crash
        return real(run)

    with monkeypatch.context() as here, pytest.raises(Crash):
        here.setattr(train_minimal, "train_step", train_step)
        train_here(path, TENSORBOARD, "--save-interval=5")
    assert len(shown) == 8  # on the disk as soon as it is logged
    assert train_here(path, "--resume", "--num-steps=10") == 0  # and the flag is taken over
    assert [step for step, _ in scalars(path)["train_loss"]] == [*range(1, 11)]
    assert scalars(path) == logged(path)
    assert train_here(path, "--resume", "--num-steps=12", "--log-to=none") == 0
    assert len(scalars(path)["train_loss"]) == 10 and len(metrics(path)) == 12


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


def fake_wandb(monkeypatch, fails: Exception | None = None) -> list[dict]:
    """A module of that name, whose `init` fails like that; returns what it was called with."""
    calls: list[dict] = []
    busy = []  # one that failed has not let go of the run's id

    def init(**options):
        calls.append(options)
        offline = options.get("mode") == "offline"
        assert not busy, "run ID is in use"
        if fails and not offline:
            busy.append(1)
            raise fails
        run = SimpleNamespace(offline=offline, url="https://wandb.example/run", logged=[])
        run.log = lambda numbers, step: run.logged.append((step, numbers))  # (wandb's order)
        run.finish = lambda: calls.append({"logged": run.logged})
        return run

    module = ModuleType("wandb")
    module.init, module.Settings = init, lambda **settings: settings  # type: ignore[attr-defined]
    module.teardown = busy.clear  # type: ignore[attr-defined]
    errors = SimpleNamespace(UsageError=UsageError, CommError=CommError)
    module.errors = errors  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return calls


def test_wandb_goes_on_with_the_same_run(tmp_path, monkeypatch, capsys):
    path, calls = tmp_path / "run.pt", fake_wandb(monkeypatch)
    assert train_here(path, "--log-to=wandb", "--num-steps=3") == 0
    assert train_here(path, "--resume", "--num-steps=5") == 0
    first, done, second, more = calls
    assert first["id"] == second["id"] == snapshot(path)["run"] and second["resume"] == "allow"
    assert (first["project"], first["name"], first["dir"]) == ("minigpt", "run", tmp_path)
    assert first["config"]["n_layers"] == 2 and "mode" not in first
    assert [step for step, _ in done["logged"] + more["logged"]] == [1, 2, 3, 4, 5]
    assert done["logged"][0][1]["train_loss"] == metrics(path)[0]["train_loss"]
    assert capsys.readouterr().out.count("log      wandb, https://wandb.example/run\n") == 2


@pytest.mark.parametrize(
    "why", [UsageError("No API key configured"), CommError("retrying:\nconnection refused")]
)
def test_wandb_that_cannot_start_writes_to_the_disk(why, tmp_path, monkeypatch, capsys):
    path, calls = tmp_path / "run.pt", fake_wandb(monkeypatch, why)
    assert train_here(path, "--log-to=wandb", "--num-steps=2") == 0
    assert [call.get("mode") for call in calls] == [None, "offline", None]
    assert len(calls[-1]["logged"]) == 2
    folder = f"{tmp_path}/wandb/offline-run-*-{snapshot(path)['run']}"
    reason = " ".join(str(why).split())
    line = f"log      wandb, offline ({reason}); wandb sync {folder} uploads it\n"
    assert line in capsys.readouterr().out


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
