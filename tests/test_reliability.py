"""The rows of scripts/reliability.py, with smaller counts: real trainers, killed and resumed.

`python -m scripts.reliability` measures them in full. What other tests ask faster, of the functions
themselves, is marked slow here.
"""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from scripts import (
    reliability,
    reliability_conditions,
    reliability_endings,
    reliability_shards,
)
from scripts.reliability import ROWS, Row
from scripts.trainer_process import Bench, NotHeld, Trainer, check, kill_all, pids_of
from trainer.snapshot import beside

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
slow = pytest.mark.slow

COUNTS = [
    pytest.param("kill", {"kills": 1, "steps": 30}),
    pytest.param("save", {"points": ["die-half-written"]}, marks=slow),
    pytest.param("bits", {"flips": 60}),
    pytest.param("code", {}),
    pytest.param("orphans", {}, marks=slow),
    pytest.param("offline", {"limit": 60}, marks=slow),  # (limits: other tests run beside it)
    pytest.param("damage", {"kinds": 2}, marks=slow),
    pytest.param("signals", {"numbers": [2], "limit": 30}, marks=slow),
    pytest.param("restarts", {"times": 2}, marks=slow),
    pytest.param("elastic", {}, marks=slow),
    pytest.param("hang", {}, marks=slow),
    pytest.param("exit", {"times": 2}, marks=slow),
    pytest.param("second", {}, marks=slow),
    pytest.param("nan", {}, marks=slow),
    pytest.param("fp16", {}, marks=slow),
    pytest.param("disk", {}, marks=slow),
    pytest.param("oom", {"faults": ["cuda-oom"]}, marks=slow),
    pytest.param("resume", {"refused": ["--n-layers=3", "--max-tokens=100"]}, marks=slow),
    pytest.param("cache", {"at_once": [4]}, marks=slow),
    pytest.param("flat", {"steps": 1000}, marks=slow),
    pytest.param("fsdp-kill", {"kills": 1, "steps": 30}, marks=slow),
    pytest.param("fsdp-save", {"points": ["die-half-written"]}, marks=slow),
    pytest.param("fsdp-signals", {"numbers": [15], "limit": 30}, marks=slow),
    pytest.param("fsdp-restarts", {"times": 2}, marks=slow),
    pytest.param("fsdp-elastic", {}, marks=slow),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    yield Bench(folder)
    kill_all(folder)


@pytest.mark.parametrize(("name", "counts"), COUNTS)
def test_row_is_held(bench, name, counts, monkeypatch):
    if name in ("exit", "flat"):  # about Python's own ways at the end, and with memory
        monkeypatch.delenv("PYTHONPATH")  # (start/sitecustomize.py has others)
    print(ROWS[name].measure(bench, **counts))
    assert pids_of(bench.folder) == []


def test_every_row_is_here():
    """But the one that runs test_bad_input.py."""
    assert {param.values[0] for param in COUNTS} == ROWS.keys() - {"input"}


def test_every_function_is_in_the_table():
    """In the order of the table."""
    parts = (reliability_endings, reliability_conditions, reliability_shards)
    rows = [one for part in parts for one in vars(part).values() if isinstance(one, Row)]
    assert list(ROWS.items()) == [(row.name, row) for row in rows]


def test_a_run_that_differs_is_noticed(bench):
    """What all rows rely on: another seed, or another step, is another run."""
    path = bench.path()
    bench.train(path, "--seed=5")
    with pytest.raises(NotHeld, match="the final weights differ"):
        bench.check_same(path)
    with pytest.raises(NotHeld, match="ended at step 15"):
        bench.check_same(beside(path, ".prev.pt"))


def test_what_does_not_end_is_ended(bench):
    path = bench.path()
    run = Trainer(path, PAUSE="1000")
    with pytest.raises(NotHeld, match="no end within 1 s"):
        run.end(0, seconds=1)
    assert pids_of(path) == []


def test_killed_means_gone(bench, monkeypatch):
    """However long SIGKILL takes to be delivered, as it does on a busy machine."""
    path, real_kill, timers = bench.path(), os.kill, []

    def late_kill(pid, number):
        timers.append(threading.Timer(0.2, real_kill, (pid, number)))
        if len(timers) == 1:
            timers[0].start()

    command = [sys.executable, "-c", "import time; time.sleep(1000)", str(path)]
    with subprocess.Popen(command) as process:
        assert pids_of(path) == [process.pid]
        monkeypatch.setattr(os, "kill", late_kill)
        kill_all(path)
        assert pids_of(path) == []
        assert process.wait() == -signal.SIGKILL


def test_the_table_and_the_exit_code(tmp_path, monkeypatch, capsys):
    def lost(bench):
        check(False, "2 of\n3")

    def broken(bench):
        raise KeyError("weights")

    rows = {
        "good": Row("good", "a thing", "3 of 3", lambda bench: "3 of 3"),
        "lost": Row("lost", "another", "3 of 3", lost),
        "broken": Row("broken", "a third", "3 of 3", broken),
    }
    for name, one in rows.items():
        monkeypatch.setitem(ROWS, name, one)
    file = tmp_path / "x.json"
    assert reliability.main(["--only", "good"]) == 0
    assert reliability.main(["--only", *rows, "--json", str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "| a thing | 3 of 3 | 3 of 3 | held |" in lines
    assert "| another | 3 of 3 | 2 of 3 | **not held** |" in lines
    assert "| a third | 3 of 3 | KeyError: 'weights' | **not held** |" in lines
    written = json.loads(file.read_text())["rows"]
    assert [(one["row"], one["held"]) for one in written] == [
        ("good", True),
        ("lost", False),
        ("broken", False),
    ]
