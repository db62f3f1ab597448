"""Runs that are killed, stopped, restarted, and moved to other processes; what several of them do
when something goes wrong with one; and the table of docs/reliability.md.

A row of the table is what the tests say that carry it; many stand elsewhere, beside what they are
about. `python -m pytest -m reliability` runs all of them. What is killed is
killed on progress, never on the wall clock, or by itself, at a chosen point (harness/faults.py).
"""

import gc
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import pytest
from harness.faults import (
    SAVE_FAULTS,
    broken,
    broken_together,
    history,
    undisturbed,
    undisturbed_together,
    weights_hash,
)
from harness.rows import row
from harness.runs import (
    DEADLINE,
    FAULTS,
    ROOT,
    TINY,
    Forks,
    by_torchrun,
    errors,
    is_alive,
    last_step,
    metrics,
    older_runs,
    run,
    same,
    snapshot,
    start_together,
    train_here,
    wait_until,
)

from trainer.resume import load_newest_readable, settings_of
from trainer.run import Run
from trainer.snapshot import sibling_path

slow = pytest.mark.slow
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="kills, and looks into /proc")
case = pytest.param
SAVING = ("--no-amp", "--save-interval=5")


def start(path: Path, trainer: str, *flags: str, processes: int = 2, **env: str) -> Forks:
    """Two micro-batches a step, whoever computes them."""
    n = 1 if trainer == "train_minimal" else processes
    micro = f"--grad-accum-steps={2 if trainer == 'train_sp' else 2 // n}"
    words = [FAULTS, trainer, *TINY, *SAVING, f"--checkpoint-path={path}", micro, *flags]
    return start_together(words, n, **env)


def whole(steps: int = 20, trainer: str = "") -> Path:
    """The run of so many steps that nothing happened to. (Where sequences are shared, processes
    draw other masks, and add up otherwise.)"""
    flags = *SAVING, "--grad-accum-steps=2", f"--num-steps={steps}"
    if trainer == "train_sp":
        return undisturbed_together(*flags, script=trainer)
    return undisturbed(*flags)


ENDS = """
import atexit, sys
from trainer.torchrun import main_and_exit
atexit.register(print, "cleaned up")
print("done")
main_and_exit(lambda: int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 4])
def test_a_process_ends_without_pythons_clean_up(code):
    """Which aborts now and then, if a thread of gloo is still at work. What is printed arrives."""
    result = run([sys.executable, "-c", ENDS, str(code)])
    assert (result.returncode, result.stdout) == (code, "done\n"), result.stderr


def ends_as_whole(path: Path) -> bool:
    """Does the run at `path`, gone on with in one process, end with its weights?"""
    assert train_here(path, *SAVING, "--grad-accum-steps=2", "--resume") == 0
    return same(snapshot(path)["model"], snapshot(whole())["model"])


# ---- Killed, and resumed


@only_linux
@pytest.mark.parametrize(
    "trainer",
    [
        case("train_minimal", marks=row("`kill -9` at random")),
        case("train_fsdp", marks=[row("`kill -9` at random"), slow]),
        case("train_sp", marks=[row("`kill -9` at random"), slow]),
    ],
)
def test_killed_in_training(path, thorough, trainer):
    """A scheduler's or the kernel's kill leaves no time to save: what lies there must do."""
    kills, steps = (20, 160) if thorough else (1, 20)
    draw, kept, length = random.Random(0), 0, f"--num-steps={steps}"
    for number in range(kills):
        training = start(path, trainer, length, *["--resume"] * (kept > 0), PAUSE="0.02")
        training.wait_for_step(min(kept + draw.randint(1, 10), steps))
        time.sleep(draw.uniform(0, 0.05))  # so that it also hits a step or a save half-way
        os.kill(training.pids[number % len(training.pids)], signal.SIGKILL)
        result = training.end()
        if path.exists() or sibling_path(path, ".prev.pt").exists():
            state = load_newest_readable(path).state
            kept = state["step"]
            assert weights_hash(state["model"]) == history(whole(steps, trainer))[kept]["weights"]
        assert result.returncode != 0 and last_step(result.stdout) - kept <= 5
    assert start(path, trainer, length, "--resume").end().returncode == 0
    assert same(snapshot(path)["model"], snapshot(whole(steps, trainer))["model"])


IN_A_SAVE = row("`kill -9` at each")
FAST = ("half-written", "rename")
SAVES = [
    case("train_minimal", call, marks=[IN_A_SAVE] + [slow] * (call not in FAST))
    for call in SAVE_FAULTS
]


@only_linux
@pytest.mark.parametrize(
    ("trainer", "call"),
    [*SAVES, *(case("train_fsdp", call, marks=[IN_A_SAVE, slow]) for call in FAST)],
)
def test_killed_in_a_save(path, tmp_path, trainer, call):
    """A snapshot that is overwritten in place is gone if the writer dies half-way. And what it
    writes may be gathered from all: the others must not wait for it for ever."""
    assert start(path, trainer, FAULTS=f"{call}:0:10").end().returncode != 0
    assert load_newest_readable(path).state["step"] == 5
    assert ends_as_whole(path)
    assert not list(tmp_path.glob(".*.tmp"))


RESTARTED = row("`torchrun --max-restarts`, a")


@pytest.mark.parametrize(
    ("trainer", "fault"),
    [
        case("train_ddp", "kill:0:9", marks=RESTARTED),
        case("train_ddp", "error:1:3", marks=[RESTARTED, slow]),
        case("train_ddp", "kill:1:20", marks=[RESTARTED, slow]),
        case("train_fsdp", "error:1:9", marks=[RESTARTED, slow]),
        case("train_sp", "kill:0:9", marks=[RESTARTED, slow]),
    ],
)
def test_restarted_by_torchrun(path, trainer, fault):
    """Though nobody said --resume. Not from the snapshot of another run that it was about to
    replace, and that is further on."""
    assert train_here(path, *SAVING, "--grad-accum-steps=2", "--lr=0.001") == 0
    micro = f"--grad-accum-steps={2 if trainer == 'train_sp' else 1}"
    how = {"script": f"{FAULTS} {trainer}", "launch": "--max-restarts=1"}
    result = run(by_torchrun(path, *SAVING, micro, **how), timeout=400, FAULTS=fault)
    assert result.returncode == 0, result.stderr
    assert same(snapshot(path)["model"], snapshot(whole(trainer=trainer))["model"])
    assert [r["step"] for r in metrics(path)] == list(range(1, 21))
    assert settings_of(snapshot(older_runs(path)[-1])).lr == 0.001
    saved = (int(fault.split(":")[2]) - 1) // 5 * 5
    resumed = re.findall(r"^resume   .*run.pt, step (\d+)$", result.stdout, re.MULTILINE)
    assert resumed == ([str(saved)] if saved else [])


# ---- Stopped, all after the same step


def check_stopped(path: Path, trainer: str) -> None:
    """Both processes after the same step, which was saved; one process can go on. (Where sequences
    are shared it would draw other masks.)"""
    step = snapshot(path)["step"]
    first, second = (history(path, rank) for rank in (0, 1))
    assert first == second and max(first) == step < 20
    assert first[step]["weights"] == weights_hash(snapshot(path)["model"])
    assert trainer == "train_sp" or ends_as_whole(path)


@pytest.mark.parametrize(
    ("trainer", "when"),
    [
        case("train_ddp", "term", marks=row("Ctrl-C, SIGTERM, a")),
        case("train_ddp", "asked-in-evaluation", marks=row("Ctrl-C, SIGTERM, a")),
        case("train_fsdp", "term", marks=[row("Ctrl-C, SIGTERM, a"), slow]),
        case("train_fsdp", "asked-in-evaluation", marks=slow),
    ],
)
def test_all_log_save_and_stop_after_the_same_step(path, trainer, when):
    """Whichever of them is asked to; a line is due by the clock of process 0 alone. And what is
    logged or saved takes all of them: else this hangs. An evaluation ends between two batches."""
    flags = f"--no-amp --log-interval=50 --eval-interval={8 * (when != 'term')} --save-interval=5"
    asked, how = f"silence:1:2 silence:0:3 {when}:1:8", {"script": trainer, "expect": 143}
    broken_together(path, asked, *flags.split(), **how, MINIGPT_TIMEOUT_S="60")
    assert [record["step"] for record in metrics(path)] == [3, 5, 8]
    assert (snapshot(path)["step"], snapshot(sibling_path(path, ".prev.pt"))["step"]) == (8, 5)
    check_stopped(path, trainer)


@only_linux
@pytest.mark.parametrize(
    ("trainer", "name", "to_all"),
    [
        case("train_ddp", "SIGTERM", True, marks=row("Ctrl-C, SIGTERM, a")),
        case("train_ddp", "SIGINT", True, marks=[row("Ctrl-C, SIGTERM, a"), slow]),
        case("train_ddp", "SIGINT", False, marks=[row("Ctrl-C, SIGTERM, a"), slow]),
        case("train_fsdp", "SIGINT", True, marks=[row("Ctrl-C, SIGTERM, a"), slow]),
        case("train_fsdp", "SIGTERM", False, marks=[row("Ctrl-C, SIGTERM, a"), slow]),
        case("train_sp", "SIGTERM", True, marks=slow),
    ],
)
def test_signal_to_torchrun(path, trainer, name, to_all):
    """It passes them on, and exits with 1 whatever its processes do. SLURM and systemd send them to
    its processes, too, so that these get two of them. (At its own end torchrun also sends SIGTERM,
    which a process may see first.)"""
    command = by_torchrun(path, "--no-amp", script=f"{FAULTS} {trainer}")
    pipe, env = subprocess.PIPE, os.environ | {"PAUSE": "0.1", "PYTHONUNBUFFERED": "1"}
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=env)
    assert any(line.startswith("step  3/") for line in launcher.stdout)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    for pid in [launcher.pid, *map(int, children * to_all)]:
        os.kill(pid, getattr(signal, name))
    out, err = launcher.communicate(timeout=DEADLINE)
    assert re.search("^stopped .*traceback below is no crash", out, re.M) and "Traceback" in err
    assert launcher.returncode == 1 and not sibling_path(path, ".prev.pt").exists()
    (said,) = re.findall(r"^stopped  (\w+) after step ", out, re.M)
    assert said in (name, "SIGTERM")
    check_stopped(path, trainer)


# ---- Something goes wrong with one of two


@row("NaN or Inf")
@pytest.mark.parametrize(
    ("script", "flags", "steps"),
    [("train_ddp", "--no-amp", "nan:1:11 infinite-loss:0:12 nan:1:13"),
     pytest.param("train_fsdp", "--amp-dtype=float16", "nan:1:11", marks=pytest.mark.slow)],
)  # fmt: skip
def test_all_processes_skip_or_none(path, script, flags, steps):
    """A gradient, then a loss, of process 1 alone; then three of them. In float16 the overflow is
    in the gradients of one shard only.

    And all have the same weights after each step, though DDP averages gradients only in the second
    micro-batch: one that steps on gradients of its own drifts at once. Each line says how many.
    """
    ends = script == "train_ddp"
    how = (flags, "--save-interval=5", "--grad-accum-steps=2", "--log-interval=13")
    bad = f"overflow:1:4 infinite-loss:1:7 {steps}"
    result = broken_together(path, bad, *how, script=script, expect=3 if ends else 0)
    said = re.findall(r"warning  step (\d+): .*, (\d) updates? skipped", result.stdout)
    assert said == [("5", "1"), ("10", "1"), *([] if ends else [("13", "1")])]
    after, state = history(path, rank=0), snapshot(path)
    assert after == history(path, rank=1) and max(after) == (13 if ends else 20)
    for step in (4, 7, 11):
        assert after[step]["weights"] == after[step - 1]["weights"]
        assert ends or after[step]["scale"] == after[step - 1]["scale"] / 2
    assert after[10 if ends else 20]["weights"] == weights_hash(state["model"])
    assert not ends or "in a row, 11 to 13" in errors(result)[0]


@slow  # it waits
@row("a process that")
def test_one_that_hangs_ends_the_job(path):
    """One stuck in a driver or a file system would keep all the others waiting for ever."""
    how = {"expect": 3, "MINIGPT_TIMEOUT_S": "20"}
    result = broken_together(path, "hang:1:7", "--save-interval=5", **how)
    (line,) = (line for line in errors(result) if "rank 0" in line)
    assert "waited 20 s for the others in vain (MINIGPT_TIMEOUT_S): one hangs" in line
    command = f"torchrun ... train_ddp.py --resume --checkpoint-path {path}"
    assert line.endswith(f"; go on from {path}, step 5, with --resume: {command}")
    assert "Traceback" not in result.stderr and snapshot(path)["step"] == 5


# Python runs this before anything else. Processes of torchrun wait here, before they import torch:
# as on a machine so busy that it takes long.
SLOW_IMPORTS = """
import os, sys, time

class Wait:
    def find_spec(name, path, target=None):
        if name == "torch":
            open(f"{os.environ['WAITS']}/{os.getpid()}", "w").close()
            time.sleep(1000)

if "RANK" in os.environ:
    sys.meta_path.insert(0, Wait)
"""


@slow
@only_linux
@row("torchrun killed with")
def test_no_process_survives_its_torchrun(tmp_path):
    """It dies while its processes import torch. Orphans would take a rank of the next run."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORTS)
    (waits := tmp_path / "waits").mkdir()
    env = os.environ | {"PYTHONPATH": str(tmp_path), "WAITS": str(waits)}
    command = by_torchrun(tmp_path / "run.pt", script="train_ddp.py")
    launcher = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    wait_until(lambda: len(list(waits.iterdir())) == 2, "two that wait")
    os.kill(launcher.pid, signal.SIGKILL)
    orphans = [int(file.name) for file in waits.iterdir()]
    # The system ends them, whatever they are doing.
    wait_until(lambda: not any(map(is_alive, orphans)), "end of both", 5)


# ---- Moved, to other processes and other trainers


ONE, TWO = [("train_minimal", 1), ("train_ddp", 2)], [("train_fsdp", 2), ("train_fsdp", 1)]


@pytest.mark.parametrize(
    "parts",
    [
        case(ONE, marks=row("1 -> 2")),
        case(ONE + TWO, marks=[row("`train_minimal.py` -> `train_ddp.py`"), slow]),
    ],
)
def test_from_one_trainer_to_another(path, parts):
    """The machine that is free tomorrow has another number of GPUs than today's."""
    for i, (trainer, processes) in enumerate(parts, 1):
        flags = ["--resume"] * (i > 1)
        part = start(path, trainer, *flags, processes=processes, FAULTS=f"term:0:{4 * i}")
        assert part.end().returncode == 143
        assert snapshot(path)["step"] == 4 * i
    assert ends_as_whole(path)


# ---- To the end


@slow
@row("finished runs, both")
def test_finished_runs_exit_0(tmp_path, thorough):
    """A run that has finished can still abort while it takes its connections down."""
    times = 20 if thorough else 4
    commands = [
        by_torchrun(tmp_path / f"{i}.pt", "--num-steps=5", script=f"train_{kind}.py")
        for i, kind in zip(range(times), cycle(("ddp", "fsdp")), strict=False)
    ]
    with ThreadPoolExecutor(4) as pool:  # they are each other's load
        results = list(pool.map(lambda command: run(command, timeout=400), commands))
    assert [result.returncode for result in results] == [0] * times, results
    assert {snapshot(tmp_path / f"{i}.pt")["step"] for i in range(times)} == {5}


@slow
@only_linux
@row("memory and file")
def test_what_a_run_holds_stays_what_it_is(path, thorough):
    """A little more at each step is nothing in a test, and the machine's memory in a week."""
    steps, found = 2000 if thorough else 1000, []

    def look(run: Run) -> None:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found.append((pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))))

    flags = [f"--{what}-interval=100" for what in ("log", "save", "eval")]
    watch = {500: look, 500 + steps: look}
    assert broken(path, watch, *flags, f"--num-steps={steps + 600}") == 0
    (before, open_before), (after, open_after) = found
    assert after - before < 4 * 2**20 and open_after <= open_before
