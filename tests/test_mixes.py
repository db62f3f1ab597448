"""studies/mixes.py: the best pair of policies beside all assignments, as documented."""

import json
import re

import numpy as np
import pytest
from cases.shapes import CONFIG
from harness.planned import planner
from harness.runs import ROOT
from test_readme import DOCS

from planner.choose import ALL_ALIKE, RUNGS, pick_recompute
from studies import mixes
from studies.make_results import FOLDER

RESULT = json.loads((ROOT / FOLDER / "mixes.json").read_text())


@pytest.fixture(scope="module")
def plan():
    return planner(CONFIG, "bf16", device_type="cuda")


@pytest.fixture(scope="module")
def steps(plan):
    return [plan.step(16, **ALL_ALIKE | rung) for rung in RUNGS]


def test_the_best_pair_is_what_auto_takes(plan, steps, monkeypatch):
    monkeypatch.setattr(mixes, "BUDGETS", 4)
    rows = mixes.gaps(steps)
    assert [(row["card"], row["compiled"]) for row in rows] == mixes.CLOCKS
    assert rows[0]["assignments"] == 7**4
    budgets = np.linspace(min(step.peak for step in steps), steps[0].peak, 4)
    for card, compiled in mixes.CLOCKS:
        for budget in budgets[1:]:
            taken = pick_recompute(plan, 16, int(budget), mixes.CARDS[card], compiled)
            pairs = mixes.all_mixes(4)
            times = mixes.over_none(steps, pairs, card, compiled)
            best = times[mixes.peaks_of(steps, pairs) <= budget].min()
            of_none = steps[0].seconds(mixes.CARDS[card], compiled)
            assert taken.seconds(mixes.CARDS[card], compiled) / of_none == pytest.approx(best, 1e-3)
    for row in rows:
        assert row["worst"] == max(row["all"]) and len(row["all"]) == 4
        assert -1e-3 < min(row["all"]) and row["worst"] < 0.03  # (all assignments hold all pairs)


def test_each_rule_takes_what_it_says(steps, monkeypatch):
    monkeypatch.setattr(mixes, "BATCH", 16)
    monkeypatch.setattr(mixes, "SEQ_LEN", 32)
    for btc in mixes.BETWEEN:
        rows = {row["rule"]: row for row in mixes.between_rungs(steps) if row["btc"] == btc}
        one, pair = rows["one policy, FLOPs"], rows["pair, FLOPs"]
        assert "in the rest" not in one["takes"] and pair["flops_twice"] <= one["flops_twice"]
        for name in one["over_none"]:
            fastest = rows[f"pair, time on {name}"]["over_none"][name]
            assert fastest == min(row["over_none"][name] for row in rows.values())
        assert all(row["peak_bytes"] < steps[0].peak for row in rows.values())


def test_the_table_has_all_rows(capsys, monkeypatch, steps, tmp_path):
    monkeypatch.setattr(mixes, "alike", lambda n: steps)
    monkeypatch.setattr(mixes, "SEQ_LEN", 32)
    file = tmp_path / "mixes.json"
    assert mixes.main(["--json", str(file)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    result = json.loads(file.read_text())
    assert len(lines) == 4 + len(result["between_rungs"]) + len(result["gaps"])


def test_the_documents_say_what_was_found():
    text = " ".join(DOCS["evidence.md"].split())
    for btc in (22, 18):
        for row in [row for row in RESULT["between_rungs"] if row["btc"] == btc][:2]:
            takes = re.sub("(cheap|mlp|sdpa|selective)", r"`\1`", row["takes"])
            times = [100 * row["over_none"][card] - 100 for card in ("H100", "RTX 4090")]
            twice = f"{100 * row['flops_twice']:.1f} %"
            assert f"| {takes} | {twice} | {times[0]:+.1f} % | {times[1]:+.1f} % |" in text
    worst = {n: max(row["worst"] for row in RESULT["gaps"] if row["layers"] == n) for n in (4, 12)}
    for n in worst:
        assert f"{100 * worst[n]:.1f} %" in text
