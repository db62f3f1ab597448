"""plan_memory --at-peak and --memory-viz: what is alive, by name; and of which step."""

import math
import pickle
import pickletools
import re
import shlex
from collections import Counter
from inspect import signature

import numpy as np
import pytest
from cases.shapes import CONFIG
from harness import answers
from harness.answers import ask, budget_for
from harness.records import each_kind, record
from harness.runs import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.cuda import _memory_viz

from planner import CARDS, KINDS, Planner
from planner.clock import seconds_of_each
from planner.record import Record
from scripts import plan_memory
from scripts.plan_peak import LINES, at_peak, format_peak, in_words, record_step, snapshot
from scripts.plan_table import Row
from trainer.flags import changed
from trainer.metrics import format_bytes

pytestmark = pytest.mark.usefixtures("everything_travels")


@pytest.fixture
def gpu() -> Record:
    return record()


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


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
    for what in ("mlp.c_fc: output", "attn: attention", "ln_1: mean", "add: x + update"):
        assert f"3 x blocks.*.{what}" in groups
    assert in_words(groups["40 x weight"])[1:3] == ("", "")  # no shape, no line
    assert groups["120 x optimizer state"]["why"] == "what the optimizer keeps from step to step"
    wide = groups["3 x blocks.*.mlp.c_fc: output"]
    shape = f"{3 * CONFIG.max_position_embeddings}x{CONFIG.d_ff} bf16"
    assert in_words(wide)[1] == shape and "self.c_fc(x)" in wide["code"]
    assert wide["why"] == "GELU's backward needs its input"
    # Two of them wait for the next block, one for ln_f.
    assert groups["3 x add: x + update"]["why"] == "ln_1's backward needs its input"
    assert "ln_f: mean" in groups
    whats = [in_words(group)[0] for group in at_peak(record("full"))]
    assert "blocks.0.attn.c_attn: output" in whats  # one block alone has its number
    assert not any("*" in what for what in whats)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(60, 260), st.sampled_from((LINES, 2, 30, 60)))
def test_the_largest_groups_in_a_few_lines_of_any_terminal(columns, most):
    """(All that stands in them: see the document.)"""
    step = record()
    groups, peak = at_peak(step), step.step.peak
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setattr("scripts.plan_peak.LINES", most)
        title, blank, head, *lines = format_peak(step).splitlines()
    assert title == f"alive at the peak of none: {format_bytes(peak)}, {step.step.where}"
    assert blank == "" and max(map(len, [head, *lines])) <= columns
    assert len(lines) == min(most, len(groups))
    n = len(groups) if len(groups) <= most else most - 1
    for group, line in zip(groups[:n], lines, strict=False):
        assert line.strip().startswith(format_bytes(group["bytes"]))
        if columns > 200:
            assert all(words in line for words in in_words(group)[:3])
            assert group["code"] in line or "c_fc: output" not in group["name"]
    if others := groups[n:]:
        assert f"  and {sum(group['count'] for group in others)} others" in lines[-1]
        rest = sum(group["bytes"] for group in others)
        assert lines[-1].strip().startswith(f"{format_bytes(rest)}  ")


# ---- of which step


SHAPE = f"{answers.SHAPE} --batch-size 8 --device cpu"


def listed(flags: str, taken: Row | None = None, shape: str = SHAPE) -> Record:
    """What --at-peak would list below what --all-knobs found."""
    asked, _ = plan_memory.aim(f"{shape} --at-peak {flags}".split())
    return record_step(asked, taken)


def test_the_document_shows_what_is_listed():
    page = (ROOT / "docs" / "seeing.md").read_text()
    flags = re.search(r"scripts\.plan_memory (.*) --at-peak\n", page)
    found = format_peak(listed(flags[1], shape=""))
    assert found in page and max(map(len, found.splitlines())) <= 120


@pytest.mark.parametrize("typed", ["", "auto", "mlp:1,cheap+offload"])
def test_typed_flags_say_which_step(typed):
    flags = f"--use-activation-checkpoint {typed} --memory-budget 8GiB" if typed else ""
    of = "none" if typed in ("", "auto") else typed
    assert format_peak(listed(flags)).startswith(f"alive at the peak of {of}: ")


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


def test_nothing_changes_without_the_flag(monkeypatch, tmp_path):
    """What the table is about is left out of it, right or wrong; list and file cost one step."""
    log_step, runs = Planner.log_step, []
    monkeypatch.setattr(
        Planner, "log_step", lambda self, *args: runs.append(1) or log_step(self, *args)
    )
    other = "--device cuda --n-layers 1 --d-model 24"  # what no other test has simulated
    plain = ask(f"{other} --use-activation-checkpoint=mlp:9")
    n = len(runs)
    more = ask(f"{other} --at-peak --memory-viz {tmp_path}/step.pickle")
    assert plain.json["alive_at_peak"] is plain.json["alive_at_peak_of"] is None
    assert n > 5 and len(runs) == n + 1 and "alive at" not in plain.out
    assert plain.json["rows"] == more.json["rows"] and "alive at the peak of none" in more.out
    assert (tmp_path / "step.pickle").exists()


def test_with_all_knobs_it_is_the_fastest_setting():
    """Its micro-batch, length and policy."""
    flags = "--card=H100 --device cuda --batch-size=4 --grad-accum-steps=2"
    asked, _ = plan_memory.aim(f"{SHAPE} {flags}".split())
    way = {"batch_size": 1, "grad_accum_steps": 4, "seq_len": 64, "max_position_embeddings": 64}
    longer = asked.about(changed(asked.args, use_activation_checkpoint="full", **way))
    plain, found = listed(flags), listed(flags, Row(longer))
    assert (plain.step.batch_size, plain.step.config.recompute) == (4, "none")
    assert (found.step.batch_size, found.step.peak) == (1, longer.step.peak)
    assert found.step.seq_len == found.step.config.max_position_embeddings == 64
    assert any(storage.kind == "gradients" for storage in found.alive(0))  # it accumulates


# ---- --memory-viz: the same, for torch.cuda._memory_viz and its page

# What `unpickle` in torch/utils/viz/MemoryViz.js knows, of protocols 2 to 4.
READABLE = """
    APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINUNICODE EMPTY_DICT EMPTY_LIST
    EMPTY_TUPLE FRAME LONG1 LONG_BINGET MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS
    SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3
""".split()


def replay(found: dict):
    """(time, the blocks that are alive: address -> event) after each event, which is checked: each
    begins where the first gap is that is large enough, and ends as it began."""
    ((first, *events, last),) = found["device_traces"]
    assert (first["action"], last["action"]) == ("segment_alloc", "snapshot")
    (segment,) = found["segments"]
    alive: dict[int, dict] = {}
    requested: list[int] = []
    for event in events:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            gap = segment["address"]
            for start in sorted(alive):
                if start - gap >= size:
                    break
                gap = start + math.ceil(alive[start]["size"] / 512) * 512
            assert address == gap and not requested
            assert gap + size <= segment["address"] + segment["total_size"]
            alive[address] = event
        elif event["action"] == "free_requested":
            assert alive[address]["size"] == size and alive[address]["frames"] == event["frames"]
            requested.append(address)
        else:
            assert event["action"] == "free_completed" and requested.pop() == address
            del alive[address]
        yield event["time_us"], alive


def allocations(found: dict) -> list[dict]:
    return [event for event in found["device_traces"][0] if event["action"] == "alloc"]


@each_kind
def test_what_is_alive_is_what_was_planned(way, setting):
    """After each operator, to the byte, kind by kind."""
    step = record(way, setting)
    timeline, seen = np.zeros_like(step.step.timeline), set()
    for time, alive in replay(snapshot(step)):
        seen.add(time)
        if time < len(timeline):  # (else: the end of the step)
            timeline[time] = 0
            for event in alive.values():
                timeline[time, KINDS.index(event["category"])] += event["size"]
    for time in range(1, len(timeline)):
        if time not in seen:  # nothing came or went
            timeline[time] = timeline[time - 1]
    np.testing.assert_array_equal(timeline, step.step.timeline)
    assert time <= len(timeline)


def test_what_was_there_before_comes_first_and_what_is_left_are_the_segments_blocks(gpu):
    found = snapshot(gpu)
    before = [event["category"] for event in allocations(found) if event["time_us"] == 0]
    assert before == sorted(before, key=KINDS.index)
    wanted = Counter(storage.kind for storage in gpu.storages if storage.born == 0)
    assert Counter(before) == wanted and wanted["optimizer"] == 3 * wanted["parameters"]

    (segment,) = found["segments"]
    *_, (_, alive) = replay(found)
    end, left = segment["address"], {}
    for block in segment["blocks"]:
        assert block["address"] == end
        end += block["size"]
        if block["state"] == "active_allocated":
            left[block["address"]] = block["requested_size"]
    assert end == segment["address"] + segment["total_size"]
    assert left == {address: event["size"] for address, event in alive.items()}
    died = [s.bytes for s in gpu.storages if s.died == len(gpu.operators) - 1]
    assert segment["requested_size"] == sum(left.values()) == gpu.step.total[-1] - sum(died)


@pytest.mark.parametrize("compiled", [False, True])
def test_times_are_the_clocks(gpu, compiled):
    card = CARDS["H100"]
    found = snapshot(gpu, card, compiled)
    times = [event["time_us"] for event in found["device_traces"][0]]
    assert times == sorted(times) and times[0] == 0 and len(set(times)) > 100
    assert times[-1] == round(1e6 * gpu.step.seconds(card, compiled))
    assert all(type(time) is int for time in times)
    name = "blocks.1.mlp.c_fc: output"  # comes when the product begins that makes it
    (storage,) = [storage for storage in gpu.storages if storage.name == name]
    (comes,) = [e["time_us"] for e in allocations(found) if name in e["frames"][0]["name"]]
    work = gpu.step.compiled_work if compiled else gpu.step.work
    before = work.at < storage.born
    assert comes == round(1e6 * seconds_of_each(work, card)[before].sum()) > 0


def test_frames_name_the_tensor_its_line_and_the_policy():
    found = snapshot(record("mix"))
    stacks = [_memory_viz._frames_fmt(e["frames"], full_filename=True) for e in allocations(found)]
    assert {len(stack) for stack in stacks} == {4}  # none is filtered out
    policy = "policy:0:mlp:1,cheap"
    (wide,) = [s for s in stacks if "blocks.0.mlp.c_fc: output" in s[0] and "replay" in s[2]]
    shape = f"{3 * CONFIG.max_position_embeddings}x{CONFIG.d_ff} bfloat16"
    assert re.fullmatch(rf"model\.py:\d+:blocks\.0\.mlp\.c_fc: output, {shape}", wide[0])
    why = "why:0:GELU's backward needs its input"
    assert wide[1:] == [why, "where:0:backward, block 0, replayed", policy]
    (step,) = [s for s in stacks if "step of ln_f.weight" in s[0]]
    name = "tensor:0:step of ln_f.weight, one number float32"
    why = "why:0:what the optimizer keeps from step to step"
    assert step == [name, why, "where:0:before the step", policy]


def test_torch_opens_the_file_and_its_page_can_read_it(tmp_path):
    """The page knows some of pickle only, colours by category only where one is unknown, and shows
    the segments that have a device."""
    path = tmp_path / "step.pickle"
    words = [*answers.SHAPE.split(), "--d-model=256", "--batch-size=8", "--device=cpu"]
    more = ["--memory-budget=1GiB", "--memory-viz", str(path), "--use-activation-checkpoint=full"]
    assert plan_memory.main([*words, *more]) == 0
    data = pickle.loads(path.read_bytes())
    assert {event["frames"][-1]["name"] for event in allocations(data)} == {"full"}
    most = max(sum(e["size"] for e in alive.values()) for _, alive in replay(data))
    asked, _ = plan_memory.aim(words)
    assert most == asked.planner.step(8, recompute="full").peak  # as typed

    assert path.read_bytes()[:2] == b"\x80\x04"  # protocol 4
    assert {opcode.name for opcode, _, _ in pickletools.genops(path.read_bytes())} <= set(READABLE)
    ((*_, last),) = data["device_traces"]
    categories = {event["category"] for event in allocations(data)}
    assert categories == set(KINDS) and last["category"] == "unknown"
    assert [segment["device"] for segment in data["segments"]] == [0]
    for event in data["device_traces"][0]:
        assert event.keys() >= {"action", "addr", "size", "stream", "frames", "time_us"}
        assert 0 <= event["addr"] < 2**53  # as exact as JavaScript's numbers

    text = _memory_viz.trace(data)
    assert "segments: 1\n" in _memory_viz.segsum(data)
    assert f"{len(data['device_traces'][0])} entries" in text
    assert " = cudaMalloc(" in text and "MEM[" not in text
    plots = _memory_viz.trace_plot, _memory_viz.segment_plot
    assert all("<script" in plot(data) for plot in plots)
    flames = _memory_viz.memory(data, format_flamegraph=lambda lines: lines)
    assert "stream_0;active_allocated;policy:0:full;where:0:before the step;" in flames
    if "filter_freed" in signature(_memory_viz.trace_plot).parameters:  # torch 2.9 has it not
        assert "<script" in _memory_viz.trace_plot(data, filter_freed=True)
        (few,) = data["device_traces"]
        assert {event["action"] for event in few} == {"segment_alloc", "alloc", "snapshot"}
