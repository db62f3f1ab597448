"""studies/clock_check.py: what is compared with what."""

import json

import numpy as np
import pytest
import torch
from harness.runs import ROOT
from test_benchmark import CARD, SHAPE
from test_readme import DOCS, cells

from studies import clock_check


@pytest.fixture(autouse=True)
def no_measured_card(monkeypatch):
    """It takes three seconds."""
    monkeypatch.setattr(clock_check, "clock_card", lambda args, device: CARD)


def test_every_policy_runs_and_is_predicted(tmp_path, capsys, monkeypatch):
    ran = []
    timed_step = clock_check.timed_step

    def note(run):
        ran.append(run.model.config.recompute)
        return timed_step(run)

    monkeypatch.setattr(clock_check, "timed_step", note)
    file = tmp_path / "clock.json"
    assert clock_check.main([*SHAPE, "--rounds", "2", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    policies = ["none", "cheap", "selective", "mlp", "attn", "sdpa", "full"]
    assert [row["policy"] for row in result["rows"]] == policies
    assert ran == 3 * [policy for policy in policies for _ in range(2)]
    none, *_, full = result["rows"]
    assert len(full["step_s_all"]) == 2 and none["over_none"] == 0
    assert full["predicted_over_none"] == pytest.approx(
        full["predicted_s"] / none["predicted_s"] - 1
    )
    assert full["predicted_over_none"] > 0.1
    out = capsys.readouterr().out
    assert f"| full | {1000 * full['step_s']:,.1f} ms" in out and "predicted for: a card" in out


def test_what_a_policy_costs_is_compared_within_a_round():
    """A machine that is twice as slow in one round changes no ratio, one slow step no median."""
    args = clock_check.parse([*SHAPE])
    config = clock_check.config_of(args, clock_check.Job("none", 8))
    planner = clock_check.make_planner(
        args, config, clock_check.choose_device("cpu"), torch.float32
    )
    clock = clock_check.Clock(CARD, False, 1, 1)
    measured = np.array([[1.0, 1.1], [2.0, 2.2], [1.0, 2.0]])
    rows = clock_check.compare(planner, 8, clock, ["none", "full"], measured)
    assert rows[1]["over_none"] == pytest.approx(0.1)
    assert rows[1]["step_s"] == 2.0


@pytest.mark.parametrize("flags", ["--card H100", "--use-activation-checkpoint mlp"])
def test_what_has_no_effect_is_refused(flags, capsys):
    assert clock_check.main([*SHAPE, *flags.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {flags.split()[0]}: ") and "leave it out" in line


def test_the_clocks_table_is_what_was_measured():
    rows = json.loads((ROOT / "studies/results/clock_cpu_124m.json").read_text())["rows"]
    for found, row in zip(cells(DOCS["evidence.md"], "| | GPT-2 small | pred"), rows, strict=True):
        seconds = [f"{1000 * row[key]:,.0f} ms" for key in ("step_s", "predicted_s")]
        more = [f"{100 * row[key]:+.1f} %" for key in ("over_none", "predicted_over_none")]
        assert found == [f"`{row['policy']}`", *seconds, *more]
    short = [100 - 100 * row["predicted_s"] / row["step_s"] for row in rows]
    text = " ".join(DOCS["evidence.md"].split())
    assert f"predicted {min(short):.0f} to {max(short):.0f} % too short" in text
