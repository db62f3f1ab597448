"""When a run saves and stops though no number of steps says so: by a signal, or by the time.

Ctrl-C, SIGTERM and a closed terminal end it after the step, saved; a second one at once. SIGUSR1
and --save-minutes save and go on. All processes do either after the same step.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.faults import history, weights_hash
from harness.rows import row
from harness.runs import (
    DEADLINE,
    FAULTS,
    ROOT,
    TINY,
    Crash,
    by_torchrun,
    crash_after,
    metrics,
    same,
    snapshot,
    torchrun,
    train,
    train_here,
)

import train_minimal
from trainer.process import OneProcess

FP32 = "--no-amp"
FLAGS = (FP32, "--eval-interval=20", "--grad-accum-steps=2")


@pytest.fixture(autouse=True)
def nohup_is_not_inherited():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    path = tmp_path_factory.mktemp("whole") / "run.pt"
    assert train_here(path, *FLAGS) == 0
    return path


def signal_in(step: int, number: int, monkeypatch) -> None:
    """Send it in the middle of that step."""
    real = train_minimal.train_step

    def train_step(run):
        if run.step == step:
            os.kill(os.getpid(), number)
        return real(run)

    monkeypatch.setattr(train_minimal, "train_step", train_step)


SIGNALS = row(
    "Ctrl-C, SIGTERM, a closed terminal; to python, to torchrun, to one of two processes",
    "step finished, one save, all stop at the same step, exit 130 / 143 / 129; a second signal "
    "ends at once",
)
SHARDED = row(
    "`train_fsdp.py`: SIGTERM and Ctrl-C, to torchrun, to one of two processes",
    "step finished, one save, all stop at the same step; one process goes on, bit-identical",
)


@SIGNALS
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_signal_saves_and_stops(tmp_path, monkeypatch, whole, capsys, number, code):
    path = tmp_path / "run.pt"
    for _ in range(1 + (number == signal.SIGHUP)):  # shell and system may both send it
        signal_in(7, number, monkeypatch)
    before = signal.getsignal(number)
    assert train_here(path, *FLAGS) == code
    assert signal.getsignal(number) is before
    assert f"{number.name} after step 7: saved" in capsys.readouterr().out
    assert snapshot(path)["step"] == 7 and metrics(path)[-1]["step"] == 7
    monkeypatch.undo()
    assert train_here(path, *FLAGS, "--resume") == 0
    assert same(snapshot(path)["model"], snapshot(whole)["model"])
    assert [r["train_loss"] for r in metrics(path)] == [r["train_loss"] for r in metrics(whole)]


def test_nohup_goes_on_and_sigusr1_saves(tmp_path, monkeypatch, capfd):
    """A closed terminal is nothing to a run that was told so; a cluster's warning is."""
    path = tmp_path / "run.pt"
    signal_in(5, signal.SIGHUP, monkeypatch)
    signal_in(7, signal.SIGUSR1, monkeypatch)
    crash_after(9, monkeypatch)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(Crash):
            train_here(path)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert snapshot(path)["step"] == 7 and not (tmp_path / "run.prev.pt").exists()
    assert "saving   after this step, and going on" in capfd.readouterr().err


def test_sigusr1_before_training_ends_nothing(tmp_path, monkeypatch):
    """A text may take minutes to be encoded, and there is nothing to save yet."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    real = train_minimal.OneProcess.start

    def start(process):
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGUSR1)
        real(process)

    monkeypatch.setattr(train_minimal.OneProcess, "start", start)
    try:
        assert train_here(tmp_path / "run.pt", "--num-steps=2") == 0
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
def test_a_terminal_that_is_closed(tmp_path):
    """SIGHUP comes from the system, perhaps twice, and nothing can be printed any more."""
    import pty

    path, words = (
        tmp_path / "run.pt",
        ["--num-steps=100000", f"--checkpoint-path={tmp_path}/run.pt"],
    )
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "train_minimal.py", *TINY, *words])
    said = b""
    while b"step      3/" not in said:  # (ends with an OSError if the program does)
        said += os.read(terminal, 1000)
    os.close(terminal)
    deadline = time.monotonic() + 60
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    assert snapshot(path)["step"] == metrics(path)[-1]["step"] >= 3


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("--save-minutes=4", [4, 8]),  # a step takes a minute here
        ("--save-minutes=4 --save-interval=5", [4, 5, 9, 10]),  # whichever is first
        ("--save-minutes=0", []),
        ("--save-minutes=0 --eval-interval=4", [4]),  # the first evaluation saves, once
        ("--save-minutes=3 --eval-interval=4", [3, 6, 9]),
    ],
)
def test_a_save_is_due_by_time_too(tmp_path, monkeypatch, flags, steps):
    path, clock, saved = tmp_path / "run.pt", [0.0], []
    real = train_minimal.train_step

    def train_step(run):
        clock[0] += 60
        return real(run)

    def note(file, state, **options):
        saved.extend([state["step"]] * (file == path))

    monkeypatch.setattr(train_minimal, "train_step", train_step)
    monkeypatch.setattr("trainer.run.monotonic", lambda: clock[0])
    monkeypatch.setattr("trainer.run.save_snapshot", note)
    crash_after(10, monkeypatch)
    with pytest.raises(Crash):
        train_here(path, *flags.split())
    assert saved == steps


def test_the_first_save_waits_while_steps_are_skipped(tmp_path, monkeypatch):
    """And comes then, at no evaluation and no multiple of anything."""
    path = tmp_path / "run.pt"
    monkeypatch.setattr(
        train_minimal.SkippedUpdates, "read_last", lambda skipped: skipped.run.step == 4
    )
    crash_after(7, monkeypatch)
    with pytest.raises(Crash):
        train_here(path, "--eval-interval=4", "--save-minutes=0")
    assert snapshot(path)["step"] == 5


@pytest.mark.parametrize("asked", [[0, 1, 0], [2, 0, 0], [15, 1, 0]])
def test_all_processes_save_and_stop_alike(tmp_path, monkeypatch, asked):
    """When another one is asked to, after step 7."""
    path = tmp_path / "run.pt"

    def largest(self, values):
        if len(values) != 3:
            return values
        seen.append(values)
        return asked if len(seen) == 7 else values

    seen: list[list[int]] = []
    monkeypatch.setattr(OneProcess, "largest", largest)
    assert train_here(path) == (128 + asked[0] if asked[0] else 0)
    assert snapshot(path if asked[0] else tmp_path / "run.prev.pt")["step"] == 7


@SIGNALS
def test_second_signal_ends_at_once(tmp_path):
    path = tmp_path / "run.pt"
    faults = {"script": f"{FAULTS} train_minimal", "FAULTS": "term:0:7 again:0:7"}
    train(path, expect=-signal.SIGTERM, **faults)
    assert not path.exists()


def check_stopped(path: Path, whole: Path) -> None:
    """Both processes after the same step, which was saved, and once; one process can go on."""
    step = snapshot(path)["step"]
    first, second = (history(path, rank) for rank in (0, 1))
    assert first == second and max(first) == step < 20
    assert first[step]["weights"] == weights_hash(snapshot(path)["model"])
    assert not (path.parent / "run.prev.pt").exists()
    assert train_here(path, *FLAGS, "--resume") == 0
    assert same(snapshot(path)["model"], snapshot(whole)["model"])


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("train_ddp", marks=SIGNALS),
        pytest.param("train_fsdp", marks=[SHARDED, pytest.mark.slow]),
    ],
)
def test_signal_to_one_process_stops_all_after_the_same_step(tmp_path, whole, script):
    path, faults = tmp_path / "run.pt", {"script": f"{FAULTS} {script}", "FAULTS": "term:1:6"}
    torchrun(path, FP32, expect=143, **faults)
    assert snapshot(path)["step"] == 6
    check_stopped(path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "script",
    [pytest.param("train_ddp", marks=SIGNALS), pytest.param("train_fsdp", marks=SHARDED)],
)
def test_signal_to_torchrun(tmp_path, whole, script, number):
    """It passes them on, and exits with 1 whatever its processes do."""
    path = tmp_path / "run.pt"
    command = by_torchrun(path, FP32, script=f"{FAULTS} {script}")
    pipe, env = subprocess.PIPE, os.environ | {"PAUSE": "0.1", "PYTHONUNBUFFERED": "1"}
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=env)
    assert any(line.startswith("step  3/") for line in launcher.stdout)
    launcher.send_signal(number)
    launcher.communicate(timeout=DEADLINE)
    assert launcher.returncode == 1
    check_stopped(path, whole)
