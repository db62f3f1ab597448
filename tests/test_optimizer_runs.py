"""Runs with Muon or moments in bfloat16 promise what runs with AdamW do."""

import re
import shutil

import pytest
import torch
from harness.runs import Crash, crash_after, metrics, same, snapshot, train_here

from scripts.generate import main as generate

MUON, BF16_MOMENTS = "--optimizer=muon", "--moments-dtype=bfloat16"


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


def slow(*values: str):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("precision", ["--no-amp", slow("--amp-dtype=float16")])
@pytest.mark.parametrize("flags", [slow([MUON]), slow([BF16_MOMENTS]), [MUON, BF16_MOMENTS]])
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


def spoil(saved: dict, damage: str) -> None:
    state, groups = saved["optimizer"]["state"], saved["optimizer"]["param_groups"]
    if damage == "no momentum":
        del state[27]["momentum_buffer"]
    elif damage == "nothing of one":
        del state[0]
    elif damage == "another shape":
        state[27]["momentum_buffer"] = torch.zeros(16, 15)
    elif damage == "two counts":
        state[0]["step"] = torch.ones(2)
    elif damage == "of the other block":
        numbers = groups[2]["params"]
        numbers[0], numbers[4] = numbers[4], numbers[0]
    else:  # flags that say muon, moments that are AdamW's
        groups.pop()


DAMAGE = "no momentum,nothing of one,another shape,two counts,of the other block,AdamW's"


@pytest.mark.parametrize("damage", DAMAGE.split(","))
def test_a_snapshot_that_was_tampered_with(run, capsys, damage):
    saved = snapshot(run)
    spoil(saved, damage)
    torch.save(saved, run)
    assert train_here(run, "--resume", "--num-steps=4") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "does not fit this model: is it damaged?" in line
