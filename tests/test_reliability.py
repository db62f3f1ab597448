"""Runs that are killed, and moved to other processes; and the table of docs/reliability.md.

A row of the table is what the tests say that carry it; most stand elsewhere, beside what they are
about. `python -m pytest -m reliability` runs all of them and prints the table. What is killed is
killed on progress, never on the wall clock, or by itself, at a chosen point (harness/faults.py).
"""

import ast
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import faults
from harness.faults import history, weights_hash
from harness.rows import row
from harness.runs import (
    FAULTS,
    ROOT,
    TINY,
    Forks,
    by_torchrun,
    last_step,
    metrics,
    run,
    same,
    snapshot,
    start_together,
    torchrun,
    train_here,
    wait_until,
)

from trainer.resume import load_newest
from trainer.snapshot import beside

slow = pytest.mark.slow
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="kills, and looks into /proc")
SAVING = ("--no-amp", "--save-interval=5")


def start(path: Path, trainer: str, *flags: str, processes: int = 2, **env: str) -> Forks:
    words = [FAULTS, trainer, *TINY, *SAVING, f"--checkpoint-path={path}", *flags]
    if trainer == "train_minimal":
        return Forks([([*words, "--grad-accum-steps=2"], env)])
    return start_together([*words, f"--grad-accum-steps={2 // processes}"], processes, **env)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run of so many steps that nothing happened to."""
    done = {}

    def get(steps: int = 20) -> Path:
        if steps not in done:
            path = done[steps] = tmp_path_factory.mktemp("whole") / "run.pt"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("train_minimal.train_step", faults.train_step)
                flags = (*SAVING, "--grad-accum-steps=2", f"--num-steps={steps}")
                assert train_here(path, *flags) == 0
        return done[steps]

    return get


def ends_as(whole: Path, path: Path, *flags: str) -> bool:
    """Does the run at `path`, gone on with in one process, end with these weights?"""
    assert train_here(path, *SAVING, "--grad-accum-steps=2", "--resume", *flags) == 0
    return same(snapshot(path)["model"], snapshot(whole)["model"])


# ---- Killed, and resumed


@only_linux
@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param(
            "train_minimal",
            marks=row(
                "`kill -9` at random points of training",
                "goes on to the weights of an undisturbed run, at most one save interval lost",
            ),
        ),
        pytest.param(
            "train_fsdp",
            marks=[
                slow,
                row(
                    "`train_fsdp.py`: `kill -9` of one of two processes, at random points of "
                    "training",
                    "goes on to the weights of one undisturbed process, at most one save interval "
                    "lost",
                ),
            ],
        ),
    ],
)
def test_killed_in_training(tmp_path, undisturbed, thorough, trainer):
    """A scheduler's or the kernel's kill leaves no time to save: what lies there must do."""
    kills, steps = (20, 160) if thorough else (1, 20)
    path, whole, rng, kept = tmp_path / "run.pt", undisturbed(steps), random.Random(0), 0
    for number in range(kills):
        flags = [f"--num-steps={steps}", *["--resume"] * (kept > 0)]
        training = start(path, trainer, *flags, PAUSE="0.02")
        training.wait_for_step(kept + rng.randint(1, 10))
        time.sleep(rng.uniform(0, 0.05))  # so that it also hits a step or a save half-way
        os.kill(training.pids[number % len(training.pids)], signal.SIGKILL)
        result = training.end()
        assert result.returncode != 0
        if path.exists() or beside(path, ".prev.pt").exists():
            state = load_newest(path).state
            kept = state["step"]
            assert weights_hash(state["model"]) == history(whole)[kept]["weights"]
        assert last_step(result.stdout) - kept <= 5
    assert start(path, trainer, f"--num-steps={steps}", "--resume").end().returncode == 0
    assert same(snapshot(path)["model"], snapshot(whole)["model"])


IN_A_SAVE = row(
    "`kill -9` at each point inside a save", "the snapshot before it, or the new one; bit-identical"
)
IN_A_SHARDED_SAVE = row(
    "`train_fsdp.py`: `kill -9` of process 0 at each point inside a save",
    "the snapshot before it, or the new one; bit-identical in one process",
)
FAST = ("die-half-written", "die-moved-previous")


@only_linux
@pytest.mark.parametrize(
    ("trainer", "death"),
    [pytest.param("train_minimal", death, marks=[IN_A_SAVE, *[slow] * (death not in FAST)])
     for death in faults.SAVE_FAULTS]
    + [pytest.param("train_fsdp", death, marks=[IN_A_SHARDED_SAVE, slow])
       for death in faults.SAVE_FAULTS],
)  # fmt: skip
def test_killed_in_a_save(tmp_path, undisturbed, trainer, death):
    """A snapshot that is overwritten in place is gone if the writer dies half-way. And what it
    writes may be gathered from all: the others must not wait for it for ever."""
    path = tmp_path / "run.pt"
    assert start(path, trainer, FAULTS=f"{death}:0:10").end().returncode != 0
    renamed = death in ("die-renamed", "die-after-save")
    assert load_newest(path).state["step"] == (10 if renamed else 5)
    assert ends_as(undisturbed(), path)
    assert not list(tmp_path.glob(".*.tmp"))


# ---- Moved, to other processes and other trainers


ACROSS = row(
    "`train_minimal.py` -> `train_ddp.py` on 2 -> `train_fsdp.py` on 2, 1 -> `train_minimal.py`; "
    "`train_fsdp.py` on 4",
    "same micro-batches: bit-identical; on 4, which add up in another order: the same loss to 1e-4",
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts processes by fork")
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(
            [("train_minimal", 1), ("train_ddp", 2)],
            marks=row("1 -> 2 -> 1 processes across resumes", "bit-identical"),
        ),
        pytest.param(
            [("train_minimal", 1), ("train_ddp", 2), ("train_fsdp", 2), ("train_fsdp", 1)],
            marks=[ACROSS, slow],
        ),
    ],
)
def test_from_one_trainer_to_another(tmp_path, undisturbed, parts):
    """The machine that is free tomorrow has another number of GPUs than today's."""
    path = tmp_path / "run.pt"
    for i, (trainer, processes) in enumerate(parts, 1):
        flags = ["--resume"] * (i > 1)
        part = start(path, trainer, *flags, processes=processes, FAULTS=f"term:0:{4 * i}")
        assert part.end().returncode == 143
        assert snapshot(path)["step"] == 4 * i
    assert ends_as(undisturbed(), path)


@ACROSS
@slow
def test_on_four_processes(tmp_path):
    # Alike is only what is computed in the same micro-batches, with the same masks: so without.
    one, four = tmp_path / "one.pt", tmp_path / "four.pt"
    assert train_here(one, *SAVING, "--dropout=0", "--grad-accum-steps=2") == 0
    flags = (*SAVING, "--dropout=0", "--batch-size=1")
    torchrun(four, *flags, processes=4, script="train_fsdp.py")
    ours, theirs = metrics(four)[-1], metrics(one)[-1]
    assert ours["step"] == theirs["step"] == 20
    assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-4)


# ---- To the end


@slow
@row("finished runs, both cores loaded", "exit code 0")
def test_finished_runs_exit_0(tmp_path, thorough, monkeypatch):
    """A run that has finished can still abort while it takes its connections down."""
    monkeypatch.delenv("PYTHONPATH")  # start/sitecustomize.py has other ways to end
    times = 20 if thorough else 4
    commands = [by_torchrun(tmp_path / f"{i}.pt", "--num-steps=5", script="train_ddp.py")
                for i in range(times)]  # fmt: skip
    with ThreadPoolExecutor(4) as pool:  # they are each other's load
        results = list(pool.map(lambda command: run(command, timeout=400), commands))
    assert [result.returncode for result in results] == [0] * times, results
    assert {snapshot(tmp_path / f"{i}.pt")["step"] for i in range(times)} == {5}


@slow
@only_linux
@row("memory and file descriptors over 2,000 steps", "flat")
def test_what_a_run_holds_stays_what_it_is(tmp_path, thorough, monkeypatch):
    """A little more at each step is nothing in a test, and the machine's memory in a week."""
    monkeypatch.delenv("PYTHONPATH")  # start/sitecustomize.py has other ways with memory
    steps, log, found = 2000 if thorough else 1000, tmp_path / "log", []
    flags = [f"--num-steps={steps + 600}", f"--checkpoint-path={tmp_path}/run.pt"]
    flags += [f"--{what}-interval=100" for what in ("log", "save", "eval")]
    command = [sys.executable, "train_minimal.py", *TINY, *flags]
    with open(log, "w") as out, subprocess.Popen(command, cwd=ROOT, stdout=out) as training:
        for step in (500, 500 + steps):
            there = lambda step=step: last_step(log.read_text()) >= step  # noqa: E731
            wait_until(there, f"step {step}", 500)
            of_process = Path(f"/proc/{training.pid}")
            pages = int((of_process / "statm").read_text().split()[1])
            found.append((pages * os.sysconf("SC_PAGE_SIZE"), len(list(of_process.glob("fd/*")))))
        assert training.wait() == 0
    (before, open_before), (after, open_after) = found
    assert after - before < 4 * 2**20 and open_after <= open_before


# ---- The table


def test_the_table_is_in_the_documents():
    """The same rows, in the same words."""
    found = {
        tuple(ast.literal_eval(word) for word in call.args)
        for file in (ROOT / "tests").glob("test_*.py")
        if "from harness.rows import row" in (text := file.read_text("utf-8"))
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "row"
    }
    page = (ROOT / "docs/reliability.md").read_text("utf-8")
    lines = page.split("| what happens | what is wanted |\n|---|---|\n")[1].split("\n\n")[0]
    rows = [tuple(line.strip("| ").split(" | ")) for line in lines.splitlines()]
    assert set(rows) == found and len(rows) == len(found)
