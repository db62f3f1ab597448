"""--profile: the trace, the table, and that nothing else changes."""

import json
import re
from collections import Counter

import pytest
from harness.faults import broken
from harness.runs import same, snapshot, train_here

from trainer.clocks import TABLE_ROWS

N = 2  # recorded steps


@pytest.mark.parametrize(
    "flags", ["--save-interval=4 --eval-interval=4", "--grad-accum-steps=2 --num-steps=4"]
)
def test_the_trace_has_the_phases_and_no_bit_changes(flags, path, tmp_path, capsys):
    """Also of a run that ends before all steps are recorded. The table is torch's own: operators by
    their own time, without our ranges."""
    plain, flags = tmp_path / "plain.pt", ("--num-steps=6", *flags.split())
    assert train_here(path, *flags, f"--profile={N}") == 0
    table = capsys.readouterr().out.partition("profile  by operators' own time:")[2]
    assert train_here(plain, *flags) == 0
    assert all(same(snapshot(plain)[key], snapshot(path)[key]) for key in ("model", "optimizer"))
    events = json.loads(path.with_name("run.trace.json").read_text())["traceEvents"]
    found = Counter(event["name"] for event in events if event["ph"] == "X")
    assert [found[name] for name in ("data", "forward", "backward")] == [2] * 3
    assert found["evaluate"] == found["save"] == 1
    rows = re.findall(r"^ *(\S.*?)  +([\d.]+)%", table, re.M)
    shares = {name: float(share) for name, share in rows}
    assert len(shares) == TABLE_ROWS and [*shares.values()] == sorted(shares.values())[::-1]
    assert "aten::addmm" in shares and not {"forward", "ProfilerStep*"} & shares.keys()


def test_a_run_without_recorded_steps_and_a_resumed_one_write_no_trace(path):
    assert broken(path, "term:0:2", "--profile=1") == 143
    assert train_here(path, "--resume", "--num-steps=8") == 0
    assert not path.with_name("run.trace.json").exists()
