"""Runs with Muon or moments in bfloat16 promise what runs with AdamW do."""

import re
import shutil

import pytest
import torch
from harness.runs import Crash, crash_after, metrics, same, snapshot, torchrun, train_here

from scripts.generate import main as generate

MUON, BF16_MOMENTS = "--optimizer=muon", "--moments-dtype=bfloat16"
MODES = {"muon": (MUON,), "bf16": (BF16_MOMENTS,), "muon bf16": (MUON, BF16_MOMENTS)}


def state(path) -> tuple[dict, dict]:
    return snapshot(path)["model"], snapshot(path)["optimizer"]["state"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Of each optimizer, two steps."""
    folder = tmp_path_factory.mktemp("trained")
    for optimizer in ("adamw", "muon"):
        flags = (f"--optimizer={optimizer}", "--num-steps=2", "--lr-scheduler=constant")
        assert train_here(folder / f"{optimizer}.pt", *flags, "--warmup-steps=1") == 0
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of that of Muon, and how it goes on."""
    path = tmp_path / "run.pt"
    shutil.copy(trained / "muon.pt", path)
    return path


def modes(*fast: str):
    slow = pytest.mark.slow
    params = [pytest.param(MODES[m], marks=() if m in fast else slow, id=m) for m in MODES]
    return pytest.mark.parametrize("flags", params)


@pytest.mark.parametrize(
    "precision",
    ["--no-amp", pytest.param("--amp-dtype=float16", marks=pytest.mark.slow)],
)
@modes("muon bf16")
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


@pytest.mark.slow
@modes()
def test_two_processes_equal_one_with_two_micro_batches(tmp_path, flags):
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    assert train_here(one, *flags, "--grad-accum-steps=2") == 0
    torchrun(two, *flags)
    assert same(state(one), state(two))


def test_snapshots_are_plain_and_small(run):
    _, moments = state(run)
    assert sorted(moments) == list(range(28))  # 12 of each block, 2 tables, ln_f's 2
    names = {tuple(sorted(of_one)) for of_one in moments.values()}
    assert names == {("exp_avg", "exp_avg_sq", "step"), ("momentum_buffer",)}
    assert generate([f"--checkpoint-path={run}", "--prompt=1 2 3", "--max-new-tokens=4"]) == 0


# ---- What may change at --resume, and what may not


@pytest.mark.parametrize(("before", "now"), [("adamw", "muon"), ("muon", "adamw")])
def test_the_other_optimizer_is_refused(trained, run, capsys, before, now):
    saved = snapshot(trained / f"{before}.pt")
    if before == "adamw":  # as older snapshots are, which do not say so
        for name in ("optimizer", "moments_dtype"):
            del saved["args"][name]
    torch.save(saved, run)
    content = run.read_bytes()
    assert train_here(run, "--resume", f"--optimizer={now}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --optimizer: ")
    assert f"was trained with {before}, this run has {now}; pass the old value" in line
    assert run.read_bytes() == content
    if before == "adamw":
        assert train_here(run, "--resume", "--num-steps=3") == 0


def test_the_moments_dtype_may_change(run, capsys):
    """They are cast, and there and back they are what they were."""
    for steps, dtype, other in ((3, "bfloat16", "float32"), (4, "float32", "bfloat16")):
        flags = ("--resume", f"--moments-dtype={dtype}", f"--num-steps={steps}")
        assert train_here(run, *flags) == 0
        (line,) = re.findall("resume   changed.*", capsys.readouterr().out)
        assert f"--moments-dtype {other} -> {dtype}" in line
        kept = {t.dtype for s in state(run)[1].values() for n, t in s.items() if n != "step"}
        assert kept == {getattr(torch, dtype)}


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
def test_a_snapshot_that_was_tampered_with(run, capsys, damage):
    saved = snapshot(run)
    damage(saved)
    torch.save(saved, run)
    assert train_here(run, "--resume", "--num-steps=4") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "does not fit this model: is it damaged?" in line
