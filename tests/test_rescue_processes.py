"""Several processes, one of which runs out of memory: torchrun starts all again, and deeper, and
nothing else changes. And processes that have policies of their own from the start.

Where a step runs out, and how: PLACES of tests/harness/shortage.py.
"""

import math
import random
import re
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from harness.faults import broken_together, history, undisturbed_together
from harness.rows import row
from harness.runs import (
    FAULTS,
    TINY,
    TINY_MODEL,
    by_torchrun,
    errors,
    metrics,
    parse,
    run,
    same,
    snapshot,
    start_together,
)

from planner import Layout
from planner.choose import pareto_frontier, simulate_policies_fastest_first
from trainer.device import choose_precision
from trainer.plan import Plan
from trainer.resume import settings_of

slow, case, CPU = pytest.mark.slow, pytest.param, torch.device("cpu")
SHAPE = "--n-layers=4 --batch-size=4 --num-steps=4"  # with more policies to choose from
PARTS = "weights", "moments", "scale"  # of a record of `history`


def bits(path: Path, rank: int = 0) -> dict[int, list]:
    """After each step, from a restart on those of the new attempt."""
    return {step: [record[part] for part in PARTS] for step, record in history(path, rank).items()}


def recompute(path: Path) -> list[str]:
    """By step, of process 0."""
    return [record["recompute"] for record in metrics(path)]


FLOAT16 = "--amp-dtype=float16 --compress-gradients"


def restarted(
    path: Path, faults: str, *flags: str, script: str = "train_ddp", restarts: int = 1, **env: str
) -> CompletedProcess:
    """By torchrun, as often as that."""
    how = {"script": f"{FAULTS} {script}", "launch": f"--max-restarts={restarts}"}
    return run(by_torchrun(path, *flags, **how), timeout=400, FAULTS=faults, **env)


@row("one of several processes runs")
@pytest.mark.parametrize(
    ("script", "flags", "faults", "restarts"),
    [
        ("train_ddp", "--no-amp", "last:0:3", 1),
        case("train_fsdp", "--no-amp", "anywhere:0:3", 1, marks=slow),
        case("train_ddp", "--no-amp --grad-accum-steps=2", "buckets:0:2", 1, marks=slow),
        case("train_ddp", "--no-amp --grad-accum-steps=2", "anywhere:1:2", 1, marks=slow),
        case("train_ddp", FLOAT16, "last:0:1 last:1:1", 1, marks=slow),
        case("train_fsdp", f"{SHAPE} --no-amp", "anywhere:1:1 anywhere:0:2:1", 2, marks=slow),
        # (One restart: its first deeper policy is the smallest already.)
        case("train_sp", f"{SHAPE} --no-amp --dropout=0", "anywhere:0:3", 1, marks=slow),
    ],
)
def test_torchrun_starts_all_again_and_deeper(script, flags, faults, restarts, tmp_path):
    """Wherever memory runs out: in the last backward, while DDP makes its buckets, anywhere."""
    path, flags = tmp_path / "run.pt", [*flags.split(), "--num-steps=4"]
    how = {"script": script, "restarts": 3}
    result = restarted(path, faults, *flags, "--save-interval=1", **how)
    lines = errors(result)  # (a process that ran out second may only see that the first is gone)
    assert result.returncode == 0 and restarts <= len(lines) <= 2 * restarts, result.stderr
    assert sum(line.startswith("error: out of memory with ") for line in lines) >= restarts
    whole = undisturbed_together(*flags, script=script)
    assert same(snapshot(path)["model"], snapshot(whole)["model"])
    assert bits(path, 0) == bits(path, 1) == bits(whole)
    ran_out = re.findall("memory ran out with (.*); it goes on with (.*)", result.stdout)
    policies = ["none", *(taken for _, taken in ran_out)]
    assert len(ran_out) == restarts and [failed for failed, _ in ran_out] == policies[:-1]
    assert "none" not in policies[1:] and recompute(path)[-1] == policies[-1]


@pytest.mark.parametrize(
    ("faults", "flags"),
    [
        # Some weights may have changed: it says nothing of the policy.
        case("update:0:3", "", marks=slow),
        case("anywhere:0:3", "--on-out-of-memory=stop", marks=slow),
        case("last:0:3", "--use-activation-checkpoint=qkv:1,attn", marks=slow),
        case("kill:0:3", "", marks=slow),
    ],
)
def test_started_again_as_it_was(faults, flags, tmp_path):
    """After an update that ran out, and where no policy needs less (qkv:1,attn): as often as
    torchrun allows. The other process may say that this one is gone."""
    path, flags = tmp_path / "run.pt", ["--no-amp", "--save-interval=1", *flags.split()]
    result = restarted(path, f"{faults} {faults}:1", *flags)
    killed, is_told = "kill" in faults, "attn" in flags[-1]
    assert re.search(f"exitcode +: {-9 if killed else 4} ", result.stderr)
    assert result.stdout.count("memory ran out with") == is_told
    found = [line for line in errors(result) if line.startswith("error: out of memory with ")]
    assert len(found) == (0 if killed else 2) and len(errors(result)) <= 4
    assert snapshot(path)["step"] == 2 and len(set(recompute(path))) == 1


# ---- Each with a budget of its own


AUTO = "--use-activation-checkpoint=auto"


@cache
def budgets(*flags: str) -> dict[str, float]:
    """The policies that `auto` takes, each by a budget for it, in KiB."""
    settings = parse(*TINY, *SHAPE.split(), *flags)
    precision, layout = choose_precision(settings, CPU), Layout("ddp", world_size=2)
    planner = Plan(settings, 31, CPU, precision, layout=layout).planner
    ways = pareto_frontier(simulate_policies_fastest_first(planner, settings.batch_size))
    return {way.config.recompute: math.ceil(way.peak / 0.9 + 1) / 1024 for way in ways}


PAIRS = ["--no-amp", "--no-amp --grad-accum-steps=3", "--amp-dtype=bfloat16 --grad-accum-steps=2"]
PAIRS += ["--amp-dtype=bfloat16 --compress-gradients"]


@pytest.mark.parametrize(
    ("draw", "flags"),
    [case(0, PAIRS[2], marks=slow), *(case(1, way, marks=slow) for way in PAIRS)],
)
def test_ranks_may_have_policies_of_their_own(draw, flags, tmp_path):
    """Each by its own budget. What is written is of process 0."""
    path, flags = tmp_path / "run.pt", flags.split()
    known = budgets(*flags)
    ways = random.Random(f"{draw} {flags}").sample([*known], 2)
    own = {f"FLAGS_{rank}": f"--memory-budget={known[way]}KiB" for rank, way in enumerate(ways)}
    said = broken_together(path, "", *SHAPE.split(), *flags, AUTO, **own).stdout
    assert f"memory   auto takes {ways[0]}: " in said
    assert f"memory   each process has a policy of its own, by rank: {', '.join(ways)}\n" in said
    assert bits(path, 0) == bits(path, 1) == bits(undisturbed_together(*SHAPE.split(), *flags))
    state = snapshot(path)
    assert set(recompute(path)) == {state["config"]["recompute"]} == {ways[0]}
    assert settings_of(state).memory_budget == 1024 * known[ways[0]]


@slow
def test_a_rank_that_needs_less_already_keeps_its_policy(tmp_path):
    """When all are started again because another one's was too much."""
    path, flags = tmp_path / "run.pt", [*SHAPE.split(), "--no-amp"]
    known = budgets("--no-amp")
    deepest = min(known, key=known.__getitem__)
    own = {"FLAGS_0": "--memory-budget=1GiB", "FLAGS_1": f"--memory-budget={known[deepest]}KiB"}
    said = restarted(path, "last:0:3", *flags, AUTO, **own).stdout
    (taken,) = re.findall("memory ran out with none; it goes on with (.*)", said)
    assert taken != deepest and f"by rank: {taken}, {deepest}\n" in said
    assert same(snapshot(path)["model"], snapshot(undisturbed_together(*flags))["model"])


@pytest.mark.parametrize("rank", [0, case(1, marks=slow)])
def test_one_that_has_too_little_ends_all(rank, tmp_path):
    """With the same line, before the tokenizer is trained; none waits for the others."""
    text = tmp_path / "text.txt"
    text.write_text("All that is gold does not glitter. " * 40)
    own = {f"FLAGS_{r}": f"--memory-budget={'100KiB' if r == rank else '1GiB'}" for r in (0, 1)}
    path, data = tmp_path / "run.pt", [f"--train-data={text}", "--tokenizer-name=bpe"]
    words = [FAULTS, "train_ddp", *TINY_MODEL, f"--checkpoint-path={path}", *data, AUTO]
    result = start_together(words, **own).end()
    (line,) = errors(result)
    assert result.returncode == 2 and "--memory-budget: tensors may take 90.0 KiB" in line
    assert [*tmp_path.iterdir()] == [text]
