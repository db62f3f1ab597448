"""The line early in a run that says what a step's tensors really took, and what it leaves alone."""

import re

import pytest
import torch
from harness.runs import same, snapshot, train_here
from torch.utils._python_dispatch import _get_current_dispatch_mode

import train_minimal
from trainer import profile
from trainer.measured import STEP
from trainer.metrics import StepClock

pytestmark = pytest.mark.usefixtures("plans_memory")
FULL = "--use-activation-checkpoint"
LARGER = ("--n-layers=3", "--d-model=32", "--num-steps=3", "--max-tokens=900")
SIZE = r"([\d.]+ \w+)"
LINE = rf"^measured peak {SIZE} of tensors; predicted {SIZE}(?:, without recompute {SIZE})?$"
PLAN = rf"^memory .*?peak {SIZE}, .*?(?:recompute: peak {SIZE}|$)"


def lines(out: str) -> list[tuple[str, ...]]:
    return re.findall(LINE, out, re.M)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        (FULL, "--grad-accum-steps=2"),
        (FULL, "selective", "--optimizer=muon", "--profile=1"),
        (FULL, "cheap", "--no-amp", "--loss-chunks=1"),
    ],
)
def test_a_step_takes_what_was_predicted(flags, tmp_path, capsys):
    assert train_here(tmp_path / "run.pt", *LARGER, "--seq-len=64", "--num-steps=6", *flags) == 0
    out = capsys.readouterr().out
    ((measured, predicted, plain),) = lines(out)
    assert measured == predicted
    planned = re.search(PLAN, out, re.M)
    assert planned and planned[1] == predicted and (planned[2] or "") == plain


@pytest.mark.parametrize("flags", [("--dropout=0.1", FULL, "mlp"), (FULL, "full+offload")])
def test_it_changes_no_bit(flags, tmp_path, monkeypatch, capsys):
    ways = tmp_path / "measured.pt", tmp_path / "not.pt"
    assert train_here(ways[0], *LARGER, *flags) == 0
    monkeypatch.setattr(profile, "MeasuringClock", lambda *_: StepClock())
    assert train_here(ways[1], *LARGER, *flags) == 0
    assert len(lines(capsys.readouterr().out)) == 1
    first, second = map(snapshot, ways)
    assert same(first["model"], second["model"]) and same(first["optimizer"], second["optimizer"])


def test_one_step_is_looked_at_and_it_ends_with_the_step_or_the_run(tmp_path, monkeypatch):
    looking = []

    def count(losses: torch.Tensor) -> torch.Tensor:
        looking.append(_get_current_dispatch_mode() is not None)
        if len(looking) == fails_in:
            raise FloatingPointError
        return losses

    monkeypatch.setattr(train_minimal, "nan_if_infinite", count)
    fails_in = 0
    assert train_here(tmp_path / "run.pt", *LARGER, "--num-steps=5") == 0
    assert looking == [step == STEP for step in range(1, 6)]
    looking.clear()
    fails_in = STEP
    with pytest.raises(FloatingPointError):
        train_here(tmp_path / "other.pt", *LARGER)
    assert looking[-1] and _get_current_dispatch_mode() is None
