"""--profile: the ranges and what is inside of them, the table, and that nothing else changes."""

import json
import re
from pathlib import Path

import pytest
import torch
from harness.faults import broken, raising
from harness.runs import older_runs, same, snapshot, train_here
from torch._dynamo.utils import counters

from trainer.clocks import STEPS_BEFORE_PROFILE, TABLE_ROWS
from trainer.snapshot import sibling_path

N = 2  # recorded steps
SHORT = ("--num-steps=6", f"--profile={N}")
PHASES = ("data", "forward", "backward", "optimizer", "log", "save", "evaluate")
FULL = "--use-activation-checkpoint"


def ranges(path: Path) -> dict[str, list[dict]]:
    """The trace's events of ours, by name."""
    named: dict[str, list[dict]] = {}
    for event in json.loads(sibling_path(path, ".trace.json").read_text())["traceEvents"]:
        ours = event["name"] in (*PHASES, "head") or re.search(r"\bblock \d+$", event["name"])
        if event["ph"] == "X" and event["cat"] == "user_annotation" and ours:
            named.setdefault(event["name"], []).append(event)
    return named


def inside(event: dict, other: dict) -> bool:
    last, end = (its["ts"] + its["dur"] for its in (event, other))
    return event["tid"] == other["tid"] and other["ts"] <= event["ts"] and last <= end


@pytest.mark.parametrize(
    ("flags", "replays"),  # of each of two blocks, in a micro-batch
    [
        ("--save-interval=4 --eval-interval=4 --log-interval=4", (0, 0)),
        (f"{FULL} full+offload", (1, 1)),
        (f"{FULL} full/2+nested", (2, 1)),  # the group's begins with the first; then each has one
        (f"{FULL} full:1,cheap --grad-accum-steps=2", (1, 0)),  # cheap replays no whole block
    ],
)
def test_ranges_are_named_and_no_bit_changes(flags, replays, tmp_path):
    plain, path = tmp_path / "plain.pt", tmp_path / "run.pt"
    assert train_here(path, *SHORT, *flags.split()) == 0
    assert train_here(plain, "--num-steps=6", *flags.split()) == 0
    assert all(same(snapshot(plain)[key], snapshot(path)[key]) for key in ("model", "optimizer"))
    named, micro_batches = ranges(path), 2 * N if "accum" in flags else N
    evaluations = named.get("evaluate", [])
    batches = 6 * len(evaluations)  # of validation
    assert len(evaluations) == len(named.get("save", [])) == ("eval" in flags)
    for name, more in dict(data=0, forward=0, backward=0, head=batches).items():
        assert len(named[name]) == micro_batches + more, name
    assert len(named["block 0"]) == len(named["block 1"]) == micro_batches + batches
    assert len(named["optimizer"]) == N
    of_each = [len(named.get(f"recompute of block {i}", [])) for i in (0, 1)]
    assert of_each == [micro_batches * n for n in replays]
    for name in named.keys() - PHASES:
        phase = "backward" if "recompute" in name else "forward"
        around = named[phase] + evaluations
        assert all(any(inside(e, other) for other in around) for e in named[name]), name


def test_the_table_and_a_disk_without_room_for_the_trace(path, capsys, monkeypatch):
    """torch's own: operators by their own time, without our ranges."""
    write = raising(OSError("disk full"))
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", write)
    assert train_here(path, *SHORT) == 0
    _, table = capsys.readouterr().out.split(f"profile  {N} of {N} steps, by ")
    trace = sibling_path(path, ".trace.json")
    assert f"\nwarning  no trace: cannot save {trace}: disk full; check its folder" in table
    rows = re.findall(r"^ *(\S.*?)  +([\d.]+)%", table, re.M)
    shares = {name: float(share) for name, share in rows}
    assert len(shares) == TABLE_ROWS and [*shares.values()] == sorted(shares.values())[::-1]
    assert "aten::addmm" in shares and not {*PHASES, "head", "ProfilerStep*"} & shares.keys()


@pytest.mark.parametrize("step", [STEPS_BEFORE_PROFILE - 1, STEPS_BEFORE_PROFILE + 1])
def test_a_signal_before_the_end(step, path, capsys):
    assert broken(path, f"term:0:{step}", *SHORT) == 143
    said = capsys.readouterr().out
    if step < STEPS_BEFORE_PROFILE:
        assert "nothing was recorded" in said and not sibling_path(path, ".trace.json").exists()
    else:
        assert f"profile  1 of {N} steps" in said and len(ranges(path)["backward"]) == 1


def test_it_needs_steps_and_is_of_this_start_alone(path, capsys):
    assert train_here(path, "--num-steps=4", "--profile=1") == 0
    before = sibling_path(path, ".trace.json").read_bytes()
    # A resumed run may have too few steps left, and does not take the flag over.
    assert train_here(path, "--resume", "--num-steps=5", "--profile=1") == 0
    assert "nothing was recorded" in capsys.readouterr().out
    assert train_here(path, "--resume", "--num-steps=9") == 0
    assert "profile  " not in capsys.readouterr().out
    # Of an older run the trace is renamed, too.
    assert train_here(path, "--num-steps=2") == 0 and not sibling_path(path, ".trace.json").exists()
    (old,) = older_runs(path)
    assert sibling_path(old, ".trace.json").read_bytes() == before


@pytest.mark.slow
def test_compiled_blocks_have_ranges_around_them(path):
    """And nothing is compiled anew for the recorded steps."""
    compiled: list[int] = []
    watch = dict.fromkeys(
        range(1, 7), lambda run: compiled.append(counters["stats"]["unique_graphs"])
    )
    torch._dynamo.reset()
    counters.clear()
    flags = *SHORT, "--compile", f"{FULL}=full:1,cheap", "--dropout=0"
    assert broken(path, watch, *flags) == 0
    named = ranges(path)
    assert compiled[STEPS_BEFORE_PROFILE] > 0 and len({*compiled[STEPS_BEFORE_PROFILE:]}) == 1, (
        compiled
    )
    assert len(named["block 0"]) == len(named["block 1"]) == N
    assert len(named["recompute of block 0"]) == N
