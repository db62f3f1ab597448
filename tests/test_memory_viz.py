"""plan_memory --memory-viz: a snapshot that torch.cuda._memory_viz and its page open."""

import pickle
import pickletools
import re
from collections import Counter
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
from cases.shapes import CONFIG
from harness.records import each_kind, record
from test_plan_memory import SHAPE
from torch.cuda import _memory_viz

from planner import CARDS, KINDS
from planner.clock import seconds_of_each
from planner.record import Record
from scripts import plan_memory
from scripts.plan_table import Clock
from scripts.plan_viz import ALIGNMENT, BASE, FirstFit, snapshot

# What `unpickle` in torch/utils/viz/MemoryViz.js knows, of protocols 2 to 4.
READABLE = """
    APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINUNICODE EMPTY_DICT EMPTY_LIST
    EMPTY_TUPLE FRAME LONG1 LONG_BINGET MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS
    SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3
""".split()


@pytest.fixture(scope="module")
def gpu() -> Record:
    return record()


def replay(events: list[dict]):
    """(time, the blocks that are alive: address -> event) after each event, which is checked."""
    alive: dict[int, dict] = {}
    requested: list[int] = []
    for event in events:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert address not in alive and not requested
            alive[address] = event
        elif event["action"] == "free_requested":
            assert alive[address]["size"] == size and alive[address]["frames"] == event["frames"]
            requested.append(address)
        else:
            assert event["action"] == "free_completed" and requested.pop() == address
            del alive[address]
        yield event["time_us"], alive


def changes(found: dict) -> list[dict]:
    """All but the first event and the last, which are about the whole memory."""
    ((first, *events, last),) = found["device_traces"]
    assert (first["action"], last["action"]) == ("segment_alloc", "snapshot")
    return events


def allocations(found: dict) -> list[dict]:
    return [event for event in changes(found) if event["action"] == "alloc"]


@pytest.mark.usefixtures("everything_travels")
@each_kind
def test_what_is_alive_is_what_was_planned(way, setting):
    """After each operator, to the byte, kind by kind."""
    step = record(way, setting)
    timeline = np.zeros_like(step.step.timeline)
    for time, alive in replay(changes(snapshot(step))):
        if time < len(timeline):  # (else: the end of the step)
            timeline[time] = 0
            for event in alive.values():
                timeline[time, KINDS.index(event["category"])] += event["size"]
        last = time
    seen = {event["time_us"] for event in changes(snapshot(step))}
    for time in range(1, len(timeline)):
        if time not in seen:  # nothing came or went
            timeline[time] = timeline[time - 1]
    np.testing.assert_array_equal(timeline, step.step.timeline)
    assert last <= len(timeline)


def test_what_was_there_before_comes_first_kind_by_kind(gpu):
    before = [event["category"] for event in allocations(snapshot(gpu)) if event["time_us"] == 0]
    assert before == sorted(before, key=KINDS.index)
    wanted = Counter(storage.kind for storage in gpu.storages if storage.born == 0)
    assert Counter(before) == wanted and wanted["optimizer"] == 3 * wanted["parameters"]


def test_no_two_are_at_one_place(gpu):
    found = snapshot(gpu)
    (segment,) = found["segments"]
    most, highest = 0, 0
    for _, alive in replay(changes(found)):
        end = segment["address"]
        for address in sorted(alive):
            assert address >= end and address % ALIGNMENT == 0
            end = address + alive[address]["size"]
        most, highest = max(most, len(alive)), max(highest, end)
    assert most > 100 and highest <= segment["address"] + segment["total_size"]
    assert highest - BASE < 1.5 * gpu.step.peak  # what is free is used again


def test_the_first_gap_that_is_large_enough():
    allocator = FirstFit()
    a, b, c, d = (allocator.take(size) for size in (10, 20, 30, 5))
    assert (a, b, c, d) == (0, 10, 30, 60) and allocator.most == 65
    allocator.give_back(b, 20)
    assert allocator.take(25) == 65  # too large for it
    assert allocator.take(5) == 10 and allocator.take(15) == 15 and allocator.most == 90
    for start, size in ((10, 5), (30, 30), (15, 15)):  # with a gap behind, none, on both sides
        allocator.give_back(start, size)
    assert allocator.gaps == [(10, 60), (90, float("inf"))]
    allocator.give_back(0, 10)
    allocator.give_back(60, 5)
    allocator.give_back(65, 25)
    assert allocator.gaps == [(0, float("inf"))] and allocator.most == 90


def test_what_is_left_are_the_blocks_of_the_segment(gpu):
    found = snapshot(gpu)
    *_, (_, alive) = replay(changes(found))
    (segment,) = found["segments"]
    end, blocks = segment["address"], {}
    for block in segment["blocks"]:
        assert block["address"] == end
        end += block["size"]
        if block["state"] == "active_allocated":
            blocks[block["address"]] = block
    assert end == segment["address"] + segment["total_size"]
    assert blocks.keys() == alive.keys()
    assert {a: b["requested_size"] for a, b in blocks.items()} == {
        a: event["size"] for a, event in alive.items()
    }
    left = sum(block["requested_size"] for block in blocks.values())
    assert left == gpu.step.total[-1] - sum(
        storage.bytes for storage in gpu.storages if storage.died == len(gpu.operators) - 1
    )
    assert {event["category"] for event in alive.values()} >= {"parameters", "optimizer"}


@pytest.mark.parametrize("compiled", [False, True])
def test_times_are_the_clocks(gpu, compiled):
    card = CARDS["H100"]
    found = snapshot(gpu, Clock(card, compiled, 1, 1))
    times = [event["time_us"] for event in found["device_traces"][0]]
    assert times == sorted(times) and times[0] == 0 and len(set(times)) > 100
    assert times[-1] == round(1e6 * gpu.step.seconds(card, compiled))
    assert all(type(time) is int for time in times)
    name = "blocks.1.mlp.c_fc: output"  # comes when the product begins that makes it
    (storage,) = [storage for storage in gpu.storages if storage.name == name]
    (comes,) = [e["time_us"] for e in allocations(found) if name in e["frames"][0]["name"]]
    work = gpu.step.compiled_work if compiled else gpu.step.work
    before = np.array(gpu.compiled_begun if compiled else gpu.begun) < storage.born
    assert comes == round(1e6 * seconds_of_each(work, card)[before].sum()) > 0


def test_frames_name_the_tensor_its_line_and_the_policy():
    found = snapshot(record("mix"))
    stacks = [_memory_viz._frames_fmt(e["frames"], full_filename=True) for e in allocations(found)]
    assert {len(stack) for stack in stacks} == {4}  # none is filtered out
    policy = "policy:0:mlp in 1 of 3 blocks, cheap in the rest"
    (wide,) = [s for s in stacks if "blocks.0.mlp.c_fc: output" in s[0] and "replay" in s[2]]
    shape = f"{3 * CONFIG.max_position_embeddings}x{CONFIG.d_ff} bfloat16"
    assert re.fullmatch(rf"model\.py:\d+:blocks\.0\.mlp\.c_fc: output, {shape}", wide[0])
    why = "why:0:GELU's backward needs its input"
    assert wide[1:] == [why, "where:0:backward, block 0, replayed", policy]
    (step,) = [s for s in stacks if "step of ln_f.weight" in s[0]]
    assert step == [
        "tensor:0:step of ln_f.weight, one number float32",
        "why:0:what the optimizer keeps from step to step",
        "where:0:before the step",
        policy,
    ]


# ---- the file


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """Written by the command."""
    path = tmp_path_factory.mktemp("viz") / "step.pickle"
    argv = [*SHAPE, "--d-model=256", "--memory-budget=1GiB", "--memory-viz", str(path)]
    assert plan_memory.main([*argv, "--use-activation-checkpoint", "full"]) == 0
    return path


@pytest.fixture
def data(path) -> dict:
    return pickle.loads(path.read_bytes())


def test_its_step_is_the_one_that_was_typed(path, data):
    assert {event["frames"][-1]["name"] for event in changes(data)} == {"full"}
    most = max(sum(e["size"] for e in alive.values()) for _, alive in replay(changes(data)))
    asked = plan_memory.aim([*SHAPE, "--d-model=256"])
    assert most == asked.plans.planner(asked.args).step(8, recompute="full").peak


def test_torch_opens_it(data):
    assert "segments: 1\n" in _memory_viz.segsum(data)
    text = _memory_viz.trace(data)
    events = data["device_traces"][0]
    assert f"{len(events)} entries" in text and " = cudaMalloc(" in text and "MEM[" not in text
    assert text.count("# free completed for") == len(events) - 2 - text.count("\ndel ") - sum(
        event["action"] == "alloc" for event in events
    )
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        page = plot(data)
        assert "<script" in page and len(page) > 10_000
    if "filter_freed" in signature(_memory_viz.trace_plot).parameters:  # torch 2.9 has it not
        left = pickle.loads(pickle.dumps(data))
        assert _memory_viz.trace_plot(left, filter_freed=True).count("<script") == 1
        (few,) = left["device_traces"]
        assert {event["action"] for event in few} == {"segment_alloc", "alloc", "snapshot"}
    flames = _memory_viz.memory(data, format_flamegraph=lambda lines: lines)
    assert "stream_0;active_allocated;policy:0:full;where:0:before the step;" in flames


def test_its_page_can_read_it(path, data):
    """It knows some of pickle only, colours by category only where one is unknown, and shows
    the segments that have a device."""
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(path.read_bytes())}
    assert opcodes <= set(READABLE) and pickletools.optimize(path.read_bytes())
    assert path.read_bytes()[:2] == b"\x80\x04"
    ((*_, last),) = data["device_traces"]
    categories = {event["category"] for event in changes(data)}
    assert categories == set(KINDS) and last["category"] == "unknown"
    assert [segment["device"] for segment in data["segments"]] == [0]
    for event in data["device_traces"][0]:
        assert event.keys() >= {"action", "addr", "size", "stream", "frames", "time_us"}
        assert 0 <= event["addr"] < 2**53  # as exact as JavaScript's numbers


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere/step.pickle", "there is no folder"), ("", "is a folder")],
)
def test_a_file_that_cannot_be_written(name, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        plan_memory.main([*SHAPE, "--memory-viz", str(tmp_path / name)])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith("error: --memory-viz: ") and message in line


def test_both_need_one_simulation(tmp_path, monkeypatch, capsys):
    record_step, calls = plan_memory.record_step, []
    monkeypatch.setattr(
        plan_memory, "record_step", lambda *args: calls.append(1) or record_step(*args)
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = tmp_path / "step.pickle"
    argv = [*SHAPE[:-1], "cuda", "--at-peak", "--memory-viz", str(path)]
    assert plan_memory.main(argv) == 0
    out = capsys.readouterr().out
    assert calls == [1] and path.exists() and "alive at the peak of none" in out
