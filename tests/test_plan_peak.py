"""plan_memory --at-peak: what is alive, by name; and of which step."""

from collections import Counter

import pytest
from harness import answers
from harness.answers import ask, budget_for
from harness.records import each_kind, record

from scripts import plan_table
from scripts.plan_table import LINES, at_peak, format_peak

pytestmark = pytest.mark.usefixtures("everything_travels")


# ---- the list


@each_kind
def test_groups_are_the_peak_to_the_byte(monkeypatch, way, setting):
    """Each storage is in one of them, and said to be what it is. The list names all, if it may."""
    step = record(way, setting)
    groups = at_peak(step)
    sizes = [group["bytes"] for group in groups]
    assert sum(sizes) == step.step_memory.peak and sizes == sorted(sizes, reverse=True)
    assert sum(group["count"] for group in groups) == len(step.at_peak)
    assert not any(group["why"].strip().endswith(" of") for group in groups)
    of_kind = Counter(group["kind"] for group in groups)
    assert all(of_kind[kind] <= 1 for kind in ("parameters", "gradients", "optimizer"))
    monkeypatch.setattr(plan_table, "LINES", len(groups))
    assert " others" not in format_peak(step, "full")


# ---- of which step


def test_the_list_is_of_what_is_recommended():
    """And adds up to its peak in the table."""
    flags = "--grad-accum-steps=2 --nproc-per-node=2 --fsdp"
    planner = answers.question(f"--device cuda {flags}").planner
    none, full = (planner.step(64, recompute=policy).peak for policy in ("none", "full"))
    answer = ask(f"{flags} --at-peak {budget_for((none + full) / 2)}")
    takes, found = answer.json["takes"], answer.json["alive_at_peak"]
    assert answer.json["alive_at_peak_of"] == takes != "none"
    assert sum(group["bytes"] for group in found) == answer.peaks[takes]
    *_, title, lines, verdict = answer.out.split("\n\n")
    assert title.startswith(f"alive at the peak of {takes}: ")
    assert len(lines.splitlines()) == 1 + LINES < len(found) and "--at-peak" not in verdict
