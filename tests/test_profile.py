"""--profile: the ranges and what is inside of them, the table, and that nothing else changes."""

import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.faults import broken
from harness.runs import older_runs, same, snapshot, torchrun, train_here
from torch._dynamo.utils import counters

import train_minimal
from memory import policies
from model import Block, MiniGPT, MiniGPTConfig
from trainer.process import OneProcess
from trainer.profile import SHOWN, WARM_UP, ProfilingClock
from trainer.snapshot import beside

N = 2  # recorded steps
SHORT = ("--num-steps=6", f"--profile={N}")
PHASES = ("data", "forward", "backward", "optimizer", "log", "save", "evaluate")
FULL = "--use-activation-checkpoint"
MIX = f"{FULL}=full:1,cheap"


def trace_of(path: Path) -> list[dict]:
    """What has a beginning and an end: ranges (cat "user_annotation") and operators."""
    events = json.loads(beside(path, ".trace.json").read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def ranges(path: Path) -> dict[str, list[dict]]:
    """Those of ours, by name."""
    named: dict[str, list[dict]] = {}
    for event in trace_of(path):
        ours = event["name"] in (*PHASES, "head") or re.search(r"\bblock \d+$", event["name"])
        if event["cat"] == "user_annotation" and ours:
            named.setdefault(event["name"], []).append(event)
    return named


def end(event: dict) -> float:
    return event["ts"] + event["dur"]


def inside(event: dict, other: dict) -> bool:
    within = other["ts"] <= event["ts"] and end(event) <= end(other)
    return event["tid"] == other["tid"] and within


def in_place() -> list[bool]:
    """Is what a profile replaces as it always was?"""
    return [
        "__call__" not in vars(Block),
        policies.torch_checkpoint is torch.utils.checkpoint.checkpoint,
    ]


@pytest.mark.parametrize(
    ("flags", "replays"),  # of each of two blocks, in a micro-batch
    [
        ("--save-interval=4 --eval-interval=4 --log-interval=4", (0, 0)),
        (f"{FULL} full+offload", (1, 1)),
        (f"{FULL} full/2+nested", (2, 1)),  # the group's begins with the first; then each has one
        (f"{FULL} cheap+offload", (3, 3)),  # each half's LayerNorm, and the GELU
        (f"{FULL} selective", (1, 1)),
        (f"{FULL} qkv", (2, 2)),  # before attention, and after it
        (f"{MIX} --grad-accum-steps=2", (1, 3)),
    ],
)
def test_ranges_are_named_and_no_bit_changes(flags, replays, tmp_path):
    plain, path = tmp_path / "plain.pt", tmp_path / "run.pt"
    assert train_here(path, *SHORT, *flags.split()) == 0 and all(in_place())
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
    # What a replay does is inside of its range: `cheap` replays a GELU without calling a module.
    gelus = [event for event in trace_of(path) if event["name"] == "aten::gelu"]
    for name in (f"recompute of block {i}" for i in (0, 1) if replays[i] == 3):
        within = [g for g in gelus if any(inside(g, e) for e in named[name])]
        assert len(within) == micro_batches, name
    flat = sorted((e for events in named.values() for e in events), key=lambda e: e["ts"])
    for event, later in zip(flat, flat[1:], strict=False):
        nested = inside(later, event) and later["name"] not in PHASES
        assert nested or later["ts"] >= end(event)


def before_each_step(monkeypatch, act) -> None:
    real = train_minimal.train_step
    monkeypatch.setattr(train_minimal, "train_step", lambda run: act(run) or real(run))


def test_a_run_that_dies_leaves_nothing_behind(path):
    assert broken(path, f"error:0:{WARM_UP + 2}", *SHORT) is None
    assert all(in_place()) and not beside(path, ".trace.json").exists()


# ---- The table


def test_the_table(tmp_path, capsys, monkeypatch):
    """torch's own: operators by their own time, without our ranges."""
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")  # which is for a GPU alone
    assert train_here(tmp_path / "run.pt", *SHORT) == 0
    said = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(said) if line.startswith(f"profile  {N} step(s)"))
    last = next(i for i, line in enumerate(said) if "perfetto" in line)
    assert str(beside(tmp_path / "run.pt", ".trace.json")) in said[last]
    rows = [re.match(r" *(\S.*?)  +([\d.]+)%", line) for line in said[first + 1 : last]]
    shares = {row[1]: float(row[2]) for row in rows if row}
    assert len(shares) == SHOWN and [*shares.values()] == sorted(shares.values())[::-1]
    assert "aten::addmm" in shares and 0 < sum(shares.values()) <= 100.1
    assert not {*PHASES, "head", "block", "ProfilerStep*"} & shares.keys()


# ---- When, and when not


@pytest.mark.parametrize("step", [WARM_UP, WARM_UP + 1])
def test_a_signal_before_the_end(step, path, monkeypatch, capsys):
    before_each_step(
        monkeypatch, lambda run: os.kill(os.getpid(), signal.SIGINT) if run.step == step else None
    )
    assert train_here(path, *SHORT) == 130
    said, recorded = capsys.readouterr().out, step - WARM_UP
    assert f"({recorded} of {N} steps: the run ended)" in said
    if recorded:
        assert len(ranges(path)["backward"]) == recorded
    else:
        assert "nothing was recorded" in said and not beside(path, ".trace.json").exists()
    assert all(in_place())


def test_it_needs_steps_and_is_of_this_start_alone(path, capsys, monkeypatch):
    assert train_here(path, "--num-steps=4", "--profile=1") == 0
    before = beside(path, ".trace.json").read_bytes()
    # A resumed run counts what is left, and does not take the flag over.
    assert train_here(path, "--resume", "--num-steps=7", "--profile=1") == 2
    assert "--num-steps 8 at least, not 7" in capsys.readouterr().err
    # One that torchrun has started again near its end has better things to do.
    with monkeypatch.context() as here:
        here.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert train_here(path, "--resume", "--num-steps=5", "--profile=1") == 0
    assert "nothing was recorded" in capsys.readouterr().out
    assert train_here(path, "--resume", "--num-steps=9") == 0
    assert "profile  " not in capsys.readouterr().out
    # Of an older run the trace is renamed, too.
    assert train_here(path, "--num-steps=2") == 0 and not beside(path, ".trace.json").exists()
    (old,) = older_runs(path)
    assert beside(old, ".trace.json").read_bytes() == before


def test_a_full_disk_costs_the_trace_and_not_the_run(path, tmp_path, monkeypatch, capsys):
    """Who writes a trace says nothing of it: what is there is cut short."""
    write = lambda profiled, path: Path(path).write_text('{"a": [1, 2')  # noqa: E731
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", write)
    assert train_here(path, *SHORT) == 0
    said = capsys.readouterr().out
    assert said.count(f"warning  no trace, {tmp_path}/run.trace.json: not all of it") == 1
    assert "aten::mm" in said and snapshot(path)["step"] == 6
    assert not [file for file in tmp_path.iterdir() if "trace" in file.name]


def test_nsight_gets_the_same_ranges(tmp_path, monkeypatch, capsys):
    """On a GPU that is not there: what is called of torch.cuda is written down."""
    calls: list[str] = []

    written = {"push": "nvtx.range_push", "pop": "nvtx.range_pop", "wait": "synchronize"}
    written |= {"start": "profiler.start", "stop": "profiler.stop"}
    for word, name in written.items():
        note = lambda *names, word=word: calls.append(" ".join([word, *names]))  # noqa: E731
        monkeypatch.setattr(f"torch.cuda.{name}", note)
    monkeypatch.setattr("torch.accelerator.synchronize", lambda *_: calls.append("WAIT"))
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    model = MiniGPT(MiniGPTConfig(31, 16, n_layers=1, n_heads=2, d_model=16, d_ff=64, dropout=0))
    args: Any = SimpleNamespace(profile=1, compile=False, checkpoint_path=tmp_path / "run.pt")
    clock = ProfilingClock(args, OneProcess(torch.device("cuda")), model, None, None)
    ids, loss_of_model = torch.zeros(1, 16, dtype=torch.int64), model.head_loss
    with clock:
        for _ in range(6):
            clock.begin("data")
            clock.begin("forward")
            loss = model(ids, ids)
            clock.begin("backward")
            loss.backward()
            clock.begin("optimizer")
            clock.end_step()
    assert model.head_loss is loss_of_model and all(in_place())
    _, recorded = " ".join(calls).split("push profile WAIT start ")
    assert recorded.startswith(
        "pop push log pop push data pop push forward push block 0 pop push head pop pop "
        "push backward pop push optimizer pop push log pop push profile pop wait stop push log"
    )
    assert calls.count("stop") == 1 and calls.count("pop") == len([c for c in calls if "push" in c])
    assert "in the report that nsys writes" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


# ---- Several processes, compiled blocks


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_process_0_profiles(script, tmp_path):
    path, plain = tmp_path / "run.pt", tmp_path / "plain.pt"
    result = torchrun(path, *SHORT, FULL, script=script)
    assert result.stdout.count(f"profile  {N} step(s)") == 1
    named = ranges(path)
    assert len(named["recompute of block 0"]) == len(named["block 1"]) == len(named["head"]) == N
    assert {file.name for file in tmp_path.glob("*.json")} == {"run.trace.json"}
    torchrun(plain, "--num-steps=6", FULL, script=script)
    assert same(snapshot(plain)["model"], snapshot(path)["model"])


@pytest.mark.slow
def test_compiled_blocks_have_ranges_around_them(tmp_path, monkeypatch):
    """And nothing is compiled anew for the recorded steps."""
    compiled: list[int] = []
    before_each_step(monkeypatch, lambda run: compiled.append(counters["stats"]["unique_graphs"]))
    torch._dynamo.reset()
    counters.clear()
    assert train_here(tmp_path / "run.pt", *SHORT, "--compile", MIX, "--dropout=0") == 0
    named = ranges(tmp_path / "run.pt")
    assert compiled[WARM_UP] > 0 and len({*compiled[WARM_UP:]}) == 1, compiled
    assert len(named["block 0"]) == len(named["block 1"]) == N
    assert len(named["recompute of block 0"]) == N
    assert "recompute of block 1" not in named  # it is inside of what is compiled
