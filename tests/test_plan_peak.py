"""plan_memory --at-peak: what is alive, by name; and of which step."""

import re
import shlex
from collections import Counter

import pytest
from cases.shapes import CONFIG
from harness import answers
from harness.answers import ask, budget_for
from harness.records import each_kind, record
from harness.runs import ROOT

from planner.record import Record
from scripts import plan_memory
from scripts.plan_table import LINES, Way, at_peak, format_peak, in_words, record_step, way_of
from trainer.flags import changed
from trainer.metrics import format_bytes

pytestmark = pytest.mark.usefixtures("everything_travels")


@pytest.fixture
def gpu() -> Record:
    return record()


# ---- the list


@each_kind
def test_groups_are_the_peak_to_the_byte(way, setting):
    """Each storage is in one of them, and said to be what it is."""
    step = record(way, setting)
    groups = at_peak(step)
    sizes = [group["bytes"] for group in groups]
    assert sum(sizes) == step.step.peak and sizes == sorted(sizes, reverse=True)
    assert sum(group["count"] for group in groups) == len(step.at_peak)
    assert not any(group["why"].strip().endswith(" of") for group in groups)
    of_kind = Counter(group["kind"] for group in groups)
    assert all(of_kind[kind] <= 1 for kind in ("parameters", "gradients", "optimizer"))


def test_what_differs_in_its_block_only_is_one_line(gpu):
    groups = {in_words(group)[0]: group for group in at_peak(gpu)}
    for what in (".mlp.c_fc: output", ": attention", ".ln_1: mean", ": x + attention"):
        assert f"3 x blocks.*{what}" in groups
    assert in_words(groups["40 x weight"])[1:3] == ("", "")  # no shape, no line
    assert groups["120 x optimizer state"]["why"] == "what the optimizer keeps from step to step"
    wide = groups["3 x blocks.*.mlp.c_fc: output"]
    shape = f"{3 * CONFIG.max_position_embeddings}x{CONFIG.d_ff} bf16"
    assert in_words(wide)[1] == shape and "self.mlp.c_fc(" in wide["code"]
    assert wide["why"] == "GELU's backward needs its input"
    # Two of them wait for the next block, one for ln_f.
    assert groups["3 x blocks.*: x + feed_forward"]["why"] == "ln_1's backward needs its input"
    assert "ln_f: mean" in groups
    whats = [in_words(group)[0] for group in at_peak(record("full"))]
    assert "blocks.0.attn.c_attn: output" in whats  # one block alone has its number
    assert not any("*" in what for what in whats)


@pytest.mark.parametrize("most", [LINES, 2, 60])
def test_the_largest_groups_in_a_few_lines(monkeypatch, most):
    """(All that stands in them: see the document.)"""
    step = record()
    groups, peak = at_peak(step), step.step.peak
    monkeypatch.setattr("scripts.plan_table.LINES", most)
    title, blank, _, *lines = format_peak(step).splitlines()
    assert title == f"alive at the peak of none: {format_bytes(peak)}, {step.step.where}"
    assert blank == "" and len(lines) == min(most, len(groups))
    n = len(groups) if len(groups) <= most else most - 1
    for group, line in zip(groups[:n], lines, strict=False):
        assert line.strip().startswith(format_bytes(group["bytes"]))
        assert all(words in line for words in in_words(group))
    if others := groups[n:]:
        assert f"  and {sum(group['count'] for group in others)} others" in lines[-1]
        rest = sum(group["bytes"] for group in others)
        assert lines[-1].strip().startswith(f"{format_bytes(rest)}  ")


# ---- of which step


SHAPE = f"{answers.SHAPE} --batch-size 8 --device cpu"


def listed(flags: str, taken: Way | None = None, shape: str = SHAPE) -> Record:
    """What --at-peak would list below what --all-knobs found."""
    asked, _ = plan_memory.aim(f"{shape} --at-peak {flags}".split())
    return record_step(asked, taken)


def test_the_document_shows_what_is_listed():
    page = (ROOT / "docs" / "seeing.md").read_text()
    flags = re.search(r"scripts\.plan_memory (.*) --at-peak\n", page)
    found = format_peak(listed(flags[1], shape=""))
    assert found in page


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
    assert len(lines.splitlines()) == 1 + LINES < len(found)
    (wide,) = [g for g in found if g["name"].endswith("ln_1: output") and g["count"] == 2]
    assert (wide["kind"], wide["shape"]) == ("activations", [64, 32, 16])
    assert (wide["dtype"], wide["bytes"]) == ("bfloat16", 2 * 64 * 32 * 16 * 2)
    assert wide["line"].split(":")[0] in ("model.py", "memory/policies.py")
    taken = shlex.join(answer.rows[takes]["flags"])
    assert verdict.strip().endswith(taken) and "--at-peak" not in verdict


def test_with_all_knobs_it_is_the_fastest_setting():
    """Its micro-batch, length and policy."""
    flags = "--card=H100 --device cuda --batch-size=4 --grad-accum-steps=2"
    asked, _ = plan_memory.aim(f"{SHAPE} {flags}".split())
    way = {"batch_size": 1, "grad_accum_steps": 4, "seq_len": 64, "max_position_embeddings": 64}
    longer = asked.about(changed(asked.args, use_activation_checkpoint="full", **way))
    plain, found = listed(flags), listed(flags, way_of(longer))
    assert (plain.step.batch_size, plain.step.config.recompute) == (4, "none")
    assert (found.step.batch_size, found.step.peak) == (1, longer.step.peak)
    assert found.step.seq_len == found.step.config.max_position_embeddings == 64
    assert any(storage.kind == "gradients" for storage in found.alive(0))  # it accumulates
