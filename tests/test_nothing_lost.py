"""What a run does when something goes wrong around it: no step is lost, no bad one is kept.

The faults are injected by scripts/faults.py, in a process of its own, or here by hand.
"""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runs import ROOT, TINY, TORCHRUN, metrics, run, same, snapshot, torchrun, train_here

import train_minimal
from scripts.faults import Injected, weights_hash
from scripts.faults import train_step as faulty_step
from scripts.trainer_process import history
from trainer.torchrun import common_name

FP32, FP16 = "--no-amp", "--amp-dtype=float16"


def faulty(path, faults: str, *flags: str, expect: int = 0):
    command = [sys.executable, "-m", "scripts.faults", *TINY, f"--checkpoint-path={path}", *flags]
    result = run(command, FAULTS=faults)
    assert result.returncode == expect, result.stdout + result.stderr
    return result


def faulty_torchrun(path, faults: str, *flags: str, **options):
    return torchrun(path, *flags, script="-m scripts.faults", FAULTS=faults, **options)


def errors(result) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


def finite(weights: dict) -> bool:
    return all(bool(w.isfinite().all()) for w in weights.values())


@pytest.fixture
def inject(monkeypatch):
    """inject("nan:0:7"): in this process, too."""

    def set_faults(faults: str) -> None:
        monkeypatch.setenv("FAULTS", faults)
        monkeypatch.setattr(train_minimal, "train_step", faulty_step)

    return set_faults


# ---- NaN and infinity


def states_after_each_step(monkeypatch, tmp_path) -> dict[int, dict]:
    states, train_step = {}, train_minimal.train_step

    def spy(run):
        result = train_step(run)
        state = run.optimizer.state_dict()["state"]  # not the rate, which follows the step
        torch.save([run.model.state_dict(), state], tmp_path / "state")
        states[run.step] = torch.load(tmp_path / "state")
        return result

    monkeypatch.setattr(train_minimal, "train_step", spy)
    return states


@pytest.mark.parametrize("fault", ["nan", "infinite-loss"])
@pytest.mark.parametrize("precision", [FP32, FP16])
def test_a_step_that_is_not_finite_changes_nothing(
    tmp_path, monkeypatch, inject, capsys, fault, precision
):
    """Neither weights nor Adam's moments and step count; the next step goes on."""
    path = tmp_path / "run.pt"
    inject(f"{fault}:0:5")
    states = states_after_each_step(monkeypatch, tmp_path)
    assert train_here(path, precision, "--grad-accum-steps=2") == 0
    assert same(states[4], states[5]) and not same(states[5], states[6])
    assert finite(snapshot(path)["model"]) and snapshot(path)["step"] == 20
    assert [r["step"] for r in metrics(path) if r["grad_norm"] is None] == [5]
    (warning,) = re.findall("warning.*", capsys.readouterr().out)
    assert "step 5: loss or gradients are not finite, update skipped" in warning
    scale = snapshot(path)["scaler"].get("scale")
    assert scale == (2.0**15 if precision == FP16 else None)


def test_three_in_a_row_end_the_run(tmp_path, inject, capsys):
    """Two in a row do not; and what is on the disk is from before the third series began."""
    path = tmp_path / "run.pt"
    inject("nan:0:5 nan:0:6 nan:0:8 nan:0:9 nan:0:12 nan:0:13 nan:0:14")
    assert train_here(path, FP32, "--save-interval=1") == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "not finite in 3 steps in a row, 12 to 14" in line
    assert f"go on from {path}, step 11, with --resume, and try a lower --lr than 0.025" in line
    assert "--detect-anomaly" in line
    assert snapshot(path)["step"] == 11
    assert snapshot(tmp_path / "run.prev.pt")["step"] == 10
    assert finite(snapshot(path)["model"])


def test_a_save_that_falls_on_a_skipped_step_is_made_up_for(tmp_path, inject):
    path = tmp_path / "run.pt"
    inject("nan:0:10 nan:0:11 nan:0:20")
    assert train_here(path, FP32, "--save-interval=5") == 0
    assert snapshot(path)["step"] == 20  # the last step saves in any case
    assert snapshot(tmp_path / "run.prev.pt")["step"] == 15
    inject("nan:0:10 nan:0:11 error:0:13")
    with pytest.raises(Injected):
        train_here(path, FP32, "--save-interval=5")
    assert snapshot(path)["step"] == 12


def test_nothing_saved_yet(tmp_path, inject, capsys):
    inject("nan:0:1 nan:0:2 nan:0:3")
    assert train_here(tmp_path / "run.pt", FP32) == 3
    assert "start again (nothing was saved yet), and try a lower --lr" in capsys.readouterr().err
    assert not (tmp_path / "run.pt").exists()


def test_float16_finds_its_scale_and_resumes_while_it_does(tmp_path, inject, capsys):
    """Overflows are its way to find the largest scale: they end no run and change no weight."""
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    assert train_here(path, FP16, "--num-steps=1", "--warmup-steps=0") == 0
    state = snapshot(path)
    state["scaler"]["scale"] = 2.0**27
    torch.save(state, path)
    whole.write_bytes(path.read_bytes())
    assert train_here(whole, FP16, "--resume", "--warmup-steps=0") == 0
    skipped = capsys.readouterr().out.count("update skipped (float16: the loss scale is now")
    assert skipped >= 4
    assert snapshot(whole)["scaler"]["scale"] == 2.0 ** (27 - skipped)
    inject("error:0:4")
    with pytest.raises(Injected):
        train_here(path, FP16, "--resume", "--warmup-steps=0", "--save-interval=1")
    assert snapshot(path)["step"] == 1  # the scale is still too large
    inject("")
    assert train_here(path, FP16, "--resume", "--warmup-steps=0") == 0
    for part in ("model", "optimizer", "scaler"):
        assert same(snapshot(path)[part], snapshot(whole)[part])


def test_float16_that_never_finds_a_scale_ends_the_run(tmp_path, inject, capsys):
    inject(" ".join(f"nan:0:{step}" for step in range(2, 40)))
    assert train_here(tmp_path / "run.pt", FP16, "--num-steps=40") == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "20 steps in a row, 2 to 21" in line and "--no-amp" in line


def test_all_processes_skip_or_none(tmp_path):
    """A gradient, then a loss, of process 1 alone; then three of them.

    And all have the same weights after each step, though they average gradients only in the second
    micro-batch: one that steps on gradients of its own drifts at once.
    """
    path = tmp_path / "run.pt"
    result = faulty_torchrun(
        path, "nan:1:4 infinite-loss:1:7 nan:1:11 infinite-loss:0:12 nan:1:13", FP32,
        "--save-interval=5", "--grad-accum-steps=2", expect=1,
    )  # fmt: skip
    steps = re.findall(r"warning  step (\d+): .* skipped", result.stdout)
    assert steps == ["4", "7", "11", "12"]
    assert "in a row, 11 to 13" in errors(result)[0] and "exitcode  : 3" in result.stderr
    after = history(path, rank=0)
    assert after == history(path, rank=1)
    assert len({after[step]["weights"] for step in (10, 11, 12, 13)}) == 1
    state = snapshot(path)
    assert state["step"] == 10 and weights_hash(state["model"]) == after[13]["weights"]


# ---- Save first, then evaluate


@pytest.mark.parametrize("step", [10, 20])
def test_an_evaluation_that_dies_is_made_up_for(tmp_path, monkeypatch, inject, step):
    """The step it was for is saved; the resumed run evaluates first: log and best are complete."""
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    flags = (FP32, "--save-interval=5", "--eval-interval=5")
    assert train_here(whole, *flags) == 0
    real = train_minimal.evaluate

    def evaluate(run):
        if run.step == step:
            raise Injected
        return real(run)

    monkeypatch.setattr(train_minimal, "evaluate", evaluate)
    with pytest.raises(Injected):
        train_here(path, *flags)
    assert snapshot(path)["step"] == step and metrics(path)[-1]["step"] == step - 1
    monkeypatch.undo()
    assert train_here(path, *flags, "--resume") == 0
    results = [[(r["step"], r["train_loss"], r.get("val_loss")) for r in metrics(p)]
               for p in (path, whole)]  # fmt: skip
    assert results[0] == results[1]
    for suffix in (".pt", ".prev.pt", ".best.pt"):
        a, b = (snapshot(p.with_suffix(suffix)) for p in (path, whole))
        assert same(a["optimizer"]["state"], b["optimizer"]["state"])
        assert all(same(a[key], b[key]) for key in ("model", "step", "best_val_loss"))


def test_what_was_evaluated_after_the_save_still_counts(tmp_path, monkeypatch, inject):
    """The snapshot knows the lowest loss of the steps before its own; the log knows the rest."""
    path = tmp_path / "run.pt"
    flags = (FP32, "--save-interval=10", "--eval-interval=10", "--num-steps=30")
    losses = iter([3.0, 1.0, 2.0])
    evaluate = lambda run: dict(val_loss=next(losses), val_ppl=1.0, val_bits_per_byte=None)  # noqa: E731
    monkeypatch.setattr(train_minimal, "evaluate", evaluate)
    inject("error:0:22")
    with pytest.raises(Injected):
        train_here(path, *flags)
    inject("")
    assert train_here(path, *flags, "--resume") == 0
    best = snapshot(tmp_path / "run.best.pt")
    assert (best["step"], best["best_val_loss"]) == (20, 1.0)


# ---- A full disk


LIMITED = """
import os, resource, sys, train_minimal
real = train_minimal.train_step
def train_step(run):
    if run.step == {step}:
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
    return real(run)
train_minimal.train_step = train_step
sys.exit(train_minimal.main(sys.argv[1:]))
"""


def limited(path, step: int, limit: int, *flags: str):
    """A run that from `step` on can write no file of more than `limit` bytes."""
    script = LIMITED.format(step=step, limit=limit)
    command = [sys.executable, "-c", script, *TINY, "--checkpoint-path", str(path), *flags]
    return run(command)


def test_disk_full_while_saving(tmp_path):
    """RLIMIT_FSIZE is the full disk that needs no root."""
    path = tmp_path / "run.pt"
    flags = (FP32, "--save-interval=4", "--log-interval=0")
    result = limited(path, 10, 20_000, *flags)
    assert result.returncode == 3
    (line,) = result.stderr.splitlines()
    assert re.match(f"error: cannot save {path}: disk full .*; it needs 0.1 MB, [0-9.,]+ MB", line)
    assert f"make room, then go on from {path}, step 8, with --resume" in line
    assert {p.name for p in tmp_path.iterdir()} == {
        "run.pt", "run.prev.pt", "run.lock", "run.metrics.jsonl",
    }  # fmt: skip
    assert [snapshot(tmp_path / f"run.{which}pt")["step"] for which in ("", "prev.")] == [8, 4]
    assert train_here(path, *flags, "--resume") == 0
    assert train_here(tmp_path / "whole.pt", *flags) == 0
    assert same(snapshot(path)["model"], snapshot(tmp_path / "whole.pt")["model"])


def test_disk_full_while_logging(tmp_path):
    path = tmp_path / "run.pt"
    result = limited(path, 10, 3000, FP32)
    assert result.returncode == 3
    (line,) = result.stderr.splitlines()
    assert f"cannot save {tmp_path}/run.metrics.jsonl: disk full" in line
    assert "start again (nothing was saved yet)" in line


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
def test_standard_output_on_a_full_disk_costs_only_the_output(tmp_path):
    path = tmp_path / "run.pt"
    finished_quietly(path, f"{TRAIN} > /dev/full")


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_broken_pipe_costs_only_the_output(tmp_path):
    path = tmp_path / "run.pt"
    result = finished_quietly(path, f"{TRAIN} | head -2; exit ${{PIPESTATUS[0]}}")
    assert len(result.stdout.splitlines()) == 2


TRAIN = '"$0" train_minimal.py "$@"'


def finished_quietly(path, script: str):
    flags = [*TINY, "--checkpoint-path", str(path)]
    result = run(["bash", "-c", script, sys.executable, *flags])
    assert result.returncode == 0 and result.stderr == ""
    assert snapshot(path)["step"] == 20 and len(metrics(path)) == 20
    return result


# ---- Several processes


RESTARTS = ("--save-interval=5", "--no-amp")


@pytest.mark.parametrize(
    "fault",
    [
        "kill:0:9",
        *[pytest.param(f, marks=pytest.mark.slow) for f in ("error:1:3", "kill:1:17", "error:0:9")],
    ],
)
def test_restarted_by_torchrun(tmp_path, fault):
    """It goes on by itself, though nobody said --resume, and ends with one process's weights.

    Not from the snapshot of another run that it was about to replace, and that is further on.
    """
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    assert train_here(whole, *RESTARTS, "--grad-accum-steps=2") == 0
    assert train_here(path, *RESTARTS, "--grad-accum-steps=2", "--lr=0.001") == 0
    result = faulty_torchrun(path, fault, *RESTARTS, launch=("--max-restarts=1",))
    assert same(snapshot(path)["model"], snapshot(whole)["model"])
    assert [r["step"] for r in metrics(path)] == list(range(1, 21))
    old = snapshot(tmp_path / "run.old.pt")
    assert (old["step"], old["args"]["lr"]) == (20, 0.001)
    saved = (int(fault.split(":")[2]) - 1) // 5 * 5
    resumed = re.findall(r"^resume   .*run.pt, step (\d+)$", result.stdout, re.MULTILINE)
    assert resumed == ([str(saved)] if saved else [])


def test_each_attempt_meets_under_a_name_of_its_own():
    """Whoever comes first finds what the attempt before has left, and must not take it."""
    store, names = dist.HashStore(), set()
    for attempt in range(1, 4):
        with ThreadPoolExecutor(2) as pool:
            arguments = 2, timedelta(seconds=30)
            first = pool.submit(common_name, store, attempt % 2, *arguments)
            time.sleep(0.2)
            second = pool.submit(common_name, store, 1 - attempt % 2, *arguments)
            assert first.result() == second.result()
            names.add(first.result())
        assert len(names) == attempt
    with pytest.raises(TimeoutError):  # the other one never comes
        common_name(store, 0, 2, timedelta(seconds=0.2))


def test_a_process_that_hangs_ends_the_job(tmp_path):
    """By the timeout; and one line says so."""
    path = tmp_path / "run.pt"
    result = faulty_torchrun(
        path, "stall:1:7", "--save-interval=5", expect=1, MINIGPT_TIMEOUT_S="5"
    )
    waited = "error: rank 0 waited 5 s for the others in vain (MINIGPT_TIMEOUT_S): one hangs"
    assert waited in errors(result)  # (rank 1, too, if it is that slow to wake up)
    assert "train_ddp.py" not in result.stderr  # no traceback but torchrun's own
    assert snapshot(path)["step"] == 5


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_nobody_outlives_torchrun(tmp_path):
    """kill -9 leaves torchrun no time to end those that it started."""
    path = tmp_path / "run.pt"
    command = [*TORCHRUN, "--nproc-per-node=2", "-m", "scripts.faults", *TINY, "--num-steps=100000"]
    command += ["--log-interval=1", f"--checkpoint-path={path}"]
    launcher = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert any(line.startswith("step") for line in launcher.stdout)  # both are training
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        assert len(children) == 2
    finally:
        launcher.kill()
        launcher.wait(10)
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    survivors = [int(pid) for pid in children if alive(pid)]
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    assert not survivors


def alive(pid: str) -> bool:
    """And no zombie, which only waits for a parent to ask about it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- Out of memory


KNOBS = {
    "--loss-chunks=1": "--loss-chunks 0 ",
    "": "--use-activation-checkpoint (same results",
    "--use-activation-checkpoint=mlp": "--use-activation-checkpoint full",
    "--use-activation-checkpoint --recompute-layers=1": "--use-activation-checkpoint full without",
    "--use-activation-checkpoint --batch-size=6": "--batch-size 3 --grad-accum-steps 2",
    "--use-activation-checkpoint --batch-size=1": "a shorter --seq-len or a smaller model",
}


@pytest.mark.parametrize("flags", KNOBS)
def test_out_of_memory_names_what_helps_next(tmp_path, inject, capsys, flags):
    path = tmp_path / "run.pt"
    inject("cuda-oom:0:7")
    assert train_here(path, "--save-interval=5", *flags.split()) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"error: out of memory with --batch-size \d --seq-len 16, recompute \w+;", line)
    assert f"; try {KNOBS[flags]}" in line
    assert line.endswith(f"; go on from {path}, step 5, with --resume") == ("smaller" not in line)


def test_out_of_memory_before_training(tmp_path, monkeypatch, capsys):
    def make_optimizer(*args):
        raise MemoryError

    monkeypatch.setattr("trainer.setup.make_optimizer", make_optimizer)
    assert train_here(tmp_path / "run.pt") == 4
    assert "; try a smaller model (--n-layers, --d-model)" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["train_minimal.evaluate", "trainer.endings.sample_text"])
def test_out_of_memory_after_the_save(tmp_path, monkeypatch, capsys, where):
    def fail(run):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ...")

    monkeypatch.setattr(where, fail)
    assert train_here(tmp_path / "run.pt") == 4
    assert "step 20, with --resume" in capsys.readouterr().err
    assert snapshot(tmp_path / "run.pt")["step"] == 20


def test_one_line_for_all_processes(tmp_path):
    """Each of them would say it."""
    result = torchrun(tmp_path / "run.pt", "--d-model=15", expect=1)
    assert len(errors(result)) == 1 and "exitcode  : 2" in result.stderr


@pytest.mark.slow
def test_one_line_of_a_process_that_is_alone_with_it(tmp_path):
    result = faulty_torchrun(tmp_path / "run.pt", "cuda-oom:1:3", expect=1)
    assert sum("out of memory with --batch-size 2" in line for line in errors(result)) == 1
    assert "exitcode  : 4" in result.stderr


# ---- What a resumed run may change


def test_what_changed_is_said(tmp_path, capsys):
    path = tmp_path / "run.pt"
    assert train_here(path, "--num-steps=3", "--warmup-steps=0") == 0
    assert "resume   changed" not in capsys.readouterr().out
    changed = ("--num-steps=4", "--lr=0.001", "--warmup-steps=0", "--log-interval=2")
    assert train_here(path, "--resume", *changed, "--use-activation-checkpoint") == 0
    (line,) = re.findall("resume   changed.*", capsys.readouterr().out)
    assert line.partition(": ")[2] == (
        "--num-steps 3 -> 4, --lr 0.025 -> 0.001, --min-lr 0.0025 -> 0.0001, "
        "--log-interval 1 -> 2, --use-activation-checkpoint none -> full"
    )
    assert train_here(path, "--resume", "--num-steps=5", *changed[1:], "--save-interval=5") == 0
    assert "--save-interval 0 -> 5" in capsys.readouterr().out
