"""--profile: the trace, the table, and that nothing else changes."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from harness.faults import broken
from harness.runs import older_runs, same, snapshot, train_here

from trainer.clocks import STEPS_BEFORE_PROFILE, TABLE_ROWS
from trainer.snapshot import sibling_path

N = 2  # recorded steps
SHORT = ("--num-steps=6", f"--profile={N}")
FULL = "--use-activation-checkpoint"


def calls(path: Path) -> Counter[str]:
    """How often the trace has each range and each operator, by name."""
    events = json.loads(sibling_path(path, ".trace.json").read_text())["traceEvents"]
    return Counter(event["name"] for event in events if event["ph"] == "X")


@pytest.mark.parametrize(
    "flags", ["--save-interval=4 --eval-interval=4", "--grad-accum-steps=2 " + FULL]
)
def test_the_trace_has_the_phases_and_no_bit_changes(flags, tmp_path):
    plain, path = tmp_path / "plain.pt", tmp_path / "run.pt"
    assert train_here(path, *SHORT, *flags.split()) == 0
    assert train_here(plain, "--num-steps=6", *flags.split()) == 0
    assert all(same(snapshot(plain)[key], snapshot(path)[key]) for key in ("model", "optimizer"))
    found, micro_batches = calls(path), 2 * N if "accum" in flags else N
    assert [found[name] for name in ("data", "forward", "backward")] == [micro_batches] * 3
    assert found["optimizer"] == N and found["aten::addmm"] > 0
    assert found["evaluate"] == found["save"] == ("eval" in flags)


def test_the_table(path, capsys):
    """torch's own: operators by their own time, without our ranges."""
    assert train_here(path, *SHORT) == 0
    _, table = capsys.readouterr().out.split(f"profile  {N} of {N} steps, by ")
    rows = re.findall(r"^ *(\S.*?)  +([\d.]+)%", table, re.M)
    shares = {name: float(share) for name, share in rows}
    assert len(shares) == TABLE_ROWS and [*shares.values()] == sorted(shares.values())[::-1]
    assert (
        "aten::addmm" in shares
        and not {"forward", "backward", "optimizer", "ProfilerStep*"} & shares.keys()
    )


@pytest.mark.parametrize("step", [STEPS_BEFORE_PROFILE - 1, STEPS_BEFORE_PROFILE + 1])
def test_a_signal_before_the_end(step, path, capsys):
    assert broken(path, f"term:0:{step}", *SHORT) == 143
    said = capsys.readouterr().out
    if step < STEPS_BEFORE_PROFILE:
        assert "nothing was recorded" in said and not sibling_path(path, ".trace.json").exists()
    else:
        assert f"profile  1 of {N} steps" in said and calls(path)["backward"] == 1


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
