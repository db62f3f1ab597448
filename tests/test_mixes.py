"""studies/mixes.py: the best pair of policies beside all assignments, as documented."""

import json

import numpy as np
import pytest
from cases.shapes import CONFIG, T
from harness.planned import planner
from harness.runs import ROOT
from test_readme import DOCS

from planner.choose import RUNGS, pick_recompute
from studies import mixes
from studies.make_results import FOLDER

RESULT = json.loads((ROOT / FOLDER / "mixes.json").read_text())


def test_the_best_pair_and_what_each_rule_takes(capsys, monkeypatch, tmp_path):
    """All of the study, of a small model with 4 blocks; its pair is what auto takes."""
    plan = planner(CONFIG, "bf16", device_type="cuda")
    steps = [plan.step(16, recompute=rung) for rung in RUNGS]
    monkeypatch.setattr(mixes, "alike", lambda n: steps)
    for name, value in {"BUDGETS": 4, "LAYERS": (4,), "BATCH": 16, "SEQ_LEN": T}.items():
        monkeypatch.setattr(mixes, name, value)
    assert mixes.main(["--json", str(tmp_path / "mixes.json")]) == 0
    found = json.loads((tmp_path / "mixes.json").read_text())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(lines) == 4 + len(found["between_rungs"]) + len(found["gaps"])

    assert [(row["card"], row["compiled"]) for row in found["gaps"]] == mixes.CLOCKS
    for row in found["gaps"]:
        assert row["assignments"] == 7**4 and row["worst"] == max(row["all"])
        assert -1e-3 < min(row["all"]) and row["worst"] < 0.03  # (all assignments hold all pairs)
        pairs, clock = mixes.all_mixes(4), (mixes.CARDS[row["card"]], row["compiled"])
        times = mixes.over_none(steps, pairs, row["card"], row["compiled"])
        for budget in np.linspace(min(step.peak for step in steps), steps[0].peak, 4)[1:]:
            taken = pick_recompute(plan, 16, int(budget), *clock).seconds(*clock)
            best = times[mixes.peaks_of(steps, pairs) <= budget].min()
            assert taken / steps[0].seconds(*clock) == pytest.approx(best, rel=1e-3)

    for btc in mixes.BETWEEN:
        rows = {row["rule"]: row for row in found["between_rungs"] if row["btc"] == btc}
        one, pair = rows["one policy, FLOPs"], rows["pair, FLOPs"]
        assert "," not in one["takes"] and pair["flops_twice"] <= one["flops_twice"]
        for name in one["over_none"]:
            fastest = rows[f"pair, time on {name}"]["over_none"][name]
            assert fastest == min(row["over_none"][name] for row in rows.values())
        assert all(row["peak_bytes"] < steps[0].peak for row in rows.values())


def test_the_documents_say_what_was_found():
    text = " ".join(DOCS["evidence.md"].split())
    for btc in (22, 18):
        for row in [row for row in RESULT["between_rungs"] if row["btc"] == btc][:2]:
            takes = f"`{row['takes']}`"
            times = [100 * row["over_none"][card] - 100 for card in ("H100", "RTX 4090")]
            twice = f"{100 * row['flops_twice']:.1f} %"
            assert f"| {takes} | {twice} | {times[0]:+.1f} % | {times[1]:+.1f} % |" in text
    worst = {n: max(row["worst"] for row in RESULT["gaps"] if row["layers"] == n) for n in (4, 12)}
    for n in worst:
        assert f"{100 * worst[n]:.1f} %" in text
