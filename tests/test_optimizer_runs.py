"""Runs with Muon or moments in bfloat16 promise what runs with AdamW do."""

import re

import pytest
import torch
from harness.runs import Crash, crash_after, metrics, same, snapshot, torchrun, train_here

from model import RECOMPUTE_POLICIES
from scripts.generate import main as generate

MUON, BF16_MOMENTS = "--optimizer=muon", "--moments-dtype=bfloat16"
MODES = {"muon": (MUON,), "bf16": (BF16_MOMENTS,), "muon bf16": (MUON, BF16_MOMENTS)}
each_mode = pytest.mark.parametrize("flags", MODES.values(), ids=MODES)
FULL = "--use-activation-checkpoint"


def state(path) -> tuple[dict, dict]:
    return snapshot(path)["model"], snapshot(path)["optimizer"]["state"]


@pytest.mark.parametrize(
    "precision",
    [
        "--no-amp",
        pytest.param("--amp-dtype=bfloat16", marks=pytest.mark.slow),
        pytest.param("--amp-dtype=float16", marks=pytest.mark.slow),
    ],
)
@each_mode
def test_resumed_to_the_bit(tmp_path, monkeypatch, flags, precision):
    whole, path = tmp_path / "whole.pt", tmp_path / "run.pt"
    assert train_here(whole, *flags, precision) == 0
    crash_after(9, monkeypatch)
    with pytest.raises(Crash):
        train_here(path, *flags, precision, "--save-interval=9")
    monkeypatch.undo()
    assert train_here(path, precision, "--resume") == 0  # the optimizer is the snapshot's
    assert same(state(whole), state(path))
    assert [r["train_loss"] for r in metrics(whole)] == [r["train_loss"] for r in metrics(path)]
    assert metrics(path)[-1]["train_loss"] < metrics(path)[0]["train_loss"]


@each_mode
def test_snapshots_are_plain_and_small(tmp_path, flags):
    path = tmp_path / "run.pt"
    assert train_here(path, *flags, "--num-steps=2") == 0
    _, moments = state(path)
    assert sorted(moments) == list(range(28))  # 12 of each block, 2 tables, ln_f's 2
    names = {tuple(sorted(of_one)) for of_one in moments.values()}
    adamw, muon = ("exp_avg", "exp_avg_sq", "step"), ("momentum_buffer",)
    assert names == ({adamw, muon} if MUON in flags else {adamw})
    dtypes = {
        t.dtype for of_one in moments.values() for name, t in of_one.items() if name != "step"
    }
    assert dtypes == {torch.bfloat16 if BF16_MOMENTS in flags else torch.float32}
    assert generate([f"--checkpoint-path={path}", "--prompt=1 2 3", "--max-new-tokens=4"]) == 0


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(p, marks=() if p == "full" else pytest.mark.slow)
        for p in RECOMPUTE_POLICIES[1:]
    ],
)
def test_recompute_changes_no_bit(tmp_path, policy):
    none, path = tmp_path / "none.pt", tmp_path / "run.pt"
    flags = (MUON, BF16_MOMENTS, "--amp-dtype=bfloat16", "--num-steps=6")
    assert train_here(none, *flags) == 0
    assert train_here(path, *flags, f"{FULL}={policy}") == 0
    assert same(state(none), state(path))


@pytest.mark.slow
@each_mode
def test_two_processes_equal_one_with_two_micro_batches(tmp_path, flags):
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    assert train_here(one, *flags, "--grad-accum-steps=2") == 0
    torchrun(two, *flags)
    assert same(state(one), state(two))


def test_skipped_steps_leave_no_trace(tmp_path, monkeypatch):
    """As test_nothing_lost.py has it for AdamW: the step that is skipped is as if never taken."""
    from harness.faults import train_step

    path, flags = tmp_path / "run.pt", (MUON, BF16_MOMENTS, "--no-amp", "--num-steps=6")
    monkeypatch.setenv("FAULTS", "nan:0:6")
    monkeypatch.setattr("train_minimal.train_step", train_step)
    constant = ("--lr-scheduler=constant", "--warmup-steps=0")
    assert train_here(path, *flags, *constant) == 0
    monkeypatch.undo()
    five = tmp_path / "five.pt"
    assert train_here(five, *flags, *constant, "--num-steps=5") == 0
    assert same(state(path), state(five))


# ---- What may change at --resume, and what may not


@pytest.mark.parametrize(("before", "now"), [("adamw", "muon"), ("muon", "adamw")])
def test_the_other_optimizer_is_refused(tmp_path, capsys, before, now):
    path = tmp_path / "run.pt"
    assert train_here(path, f"--optimizer={before}", "--num-steps=2") == 0
    content = path.read_bytes()
    assert train_here(path, "--resume", f"--optimizer={now}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --optimizer: ")
    assert f"was trained with {before}, this run has {now}; pass the old value" in line
    assert path.read_bytes() == content


def test_older_snapshots_are_adamws(tmp_path, capsys):
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    constant = ("--lr-scheduler=constant", "--warmup-steps=1")
    assert train_here(path, "--num-steps=4", *constant) == 0
    old = snapshot(path)
    for name in ("optimizer", "moments_dtype"):
        del old["args"][name]
    torch.save(old, path)
    assert train_here(path, "--resume", MUON) == 2
    assert "was trained with adamw, this run has muon" in capsys.readouterr().err
    assert train_here(path, "--resume", *constant, "--num-steps=8") == 0
    assert train_here(whole, *constant, "--num-steps=8") == 0
    assert same(state(path), state(whole))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_moments_dtype_may_change(tmp_path, capsys, optimizer):
    """They are cast, and there and back they are what they were."""
    path = tmp_path / "run.pt"
    flags = (f"--optimizer={optimizer}", "--lr-scheduler=constant", "--warmup-steps=1")
    assert train_here(path, *flags, "--num-steps=3") == 0
    for steps, dtype, other in ((6, "bfloat16", "float32"), (9, "float32", "bfloat16")):
        capsys.readouterr()
        flags = ("--resume", f"--moments-dtype={dtype}", f"--num-steps={steps}")
        assert train_here(path, *flags) == 0
        (line,) = re.findall("resume   changed.*", capsys.readouterr().out)
        assert f"--moments-dtype {other} -> {dtype}" in line
        kept = {t.dtype for s in state(path)[1].values() for n, t in s.items() if n != "step"}
        assert kept == {getattr(torch, dtype)}
    assert len(metrics(path)) == 9


def drop(saved: dict) -> None:
    del saved["optimizer"]["state"][27]["momentum_buffer"]


def drop_all_of_one(saved: dict) -> None:
    del saved["optimizer"]["state"][0]


def bend(saved: dict) -> None:
    saved["optimizer"]["state"][27]["momentum_buffer"] = torch.zeros(16, 15)


def misplace(saved: dict) -> None:
    """The moments of one block for those of the other."""
    numbers = saved["optimizer"]["param_groups"][2]["params"]
    numbers[0], numbers[4] = numbers[4], numbers[0]


def count_twice(saved: dict) -> None:
    saved["optimizer"]["state"][0]["step"] = torch.ones(2)


def swap(saved: dict) -> None:
    """Flags that say muon, moments that are AdamW's."""
    saved["optimizer"]["param_groups"].pop()


@pytest.mark.parametrize("damage", [drop, drop_all_of_one, bend, misplace, count_twice, swap])
def test_a_snapshot_that_was_tampered_with(tmp_path, capsys, damage):
    path = tmp_path / "run.pt"
    assert train_here(path, MUON, "--num-steps=2") == 0
    saved = snapshot(path)
    damage(saved)
    torch.save(saved, path)
    assert train_here(path, "--resume", "--num-steps=4") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "does not fit this model: is it damaged?" in line
