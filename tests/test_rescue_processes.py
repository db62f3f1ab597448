"""Several processes, one of which runs out of memory: torchrun starts all again, and deeper, and
nothing else changes. And processes that have policies of their own from the start.

Where a step runs out, and how: tests/harness/shortage.py.
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
from trainer.plan import StepPlan

slow, case, CPU = pytest.mark.slow, pytest.param, torch.device("cpu")
SHAPE = "--n-layers=4 --batch-size=4 --num-steps=4"  # with more policies to choose from


def bits(path: Path, rank: int = 0) -> dict[int, list]:
    """After each step, from a restart on those of the new attempt."""
    parts = "weights", "moments", "scale"
    return {step: [record[part] for part in parts] for step, record in history(path, rank).items()}


FLOAT16 = "--amp-dtype=float16 --compress-gradients"


def restarted(
    path: Path, faults: str, *flags: str, script: str = "train_ddp", restarts: int = 1
) -> CompletedProcess:
    """By torchrun, as often as that."""
    how = {"script": f"{FAULTS} {script}", "launch": f"--max-restarts={restarts}"}
    command = by_torchrun(path, "--save-interval=1", "--num-steps=4", *flags, **how)
    return run(command, timeout=400, FAULTS=faults)


@row("one of several processes runs")
@pytest.mark.parametrize(
    ("script", "flags", "faults", "restarts"),
    [
        ("train_ddp", "--no-amp", "shortage:0:3", 1),
        case("train_fsdp", "--no-amp", "shortage:0:3", 1, marks=slow),
        case("train_ddp", "--no-amp --grad-accum-steps=2", "shortage:1:2", 1, marks=slow),
        case("train_ddp", FLOAT16, "shortage:0:1 shortage:1:1", 1, marks=slow),
        case("train_fsdp", f"{SHAPE} --no-amp", "shortage:1:1 shortage:0:2:1", 2, marks=slow),
        # (One restart: its first deeper policy is the smallest already.)
        case("train_sp", f"{SHAPE} --no-amp --dropout=0", "shortage:0:3", 1, marks=slow),
    ],
)
def test_torchrun_starts_all_again_and_deeper(script, flags, faults, restarts, path):
    result = restarted(path, faults, *flags.split(), script=script, restarts=3)
    lines = errors(result)  # (a process that ran out second may only see that the first is gone)
    assert result.returncode == 0 and restarts <= len(lines) <= 2 * restarts, result.stderr
    whole = undisturbed_together("--num-steps=4", *flags.split(), script=script)
    assert same(snapshot(path)["model"], snapshot(whole)["model"])
    assert bits(path, 0) == bits(path, 1) == bits(whole)
    ran_out = re.findall("memory ran out with (.*); it goes on with (.*)", result.stdout)
    policies = ["none", *(taken for _, taken in ran_out)]
    assert len(ran_out) == restarts and [failed for failed, _ in ran_out] == policies[:-1]
    assert "none" not in policies[1:] and metrics(path)[-1]["recompute"] == policies[-1]


@slow
@pytest.mark.parametrize(
    ("faults", "flags"),
    [
        ("update:0:3", ""),  # some weights may have changed: it says nothing of the policy
        ("shortage:0:3", "--on-out-of-memory=stop"),
        ("shortage:0:3", "--use-activation-checkpoint=qkv:1,attn"),  # none needs less
        ("kill:0:3", ""),
    ],
)
def test_started_again_as_it_was(faults, flags, path):
    """As often as torchrun allows. The other process may say that this one is gone."""
    result = restarted(path, f"{faults} {faults}:1", "--no-amp", *flags.split())
    found = [line for line in errors(result) if line.startswith("error: out of memory with ")]
    assert (result.returncode, len(found)) == (1, 0 if "kill" in faults else 2)
    assert result.stdout.count("memory ran out with") == ("attn" in flags)
    assert snapshot(path)["step"] == 2
    assert len({record["recompute"] for record in metrics(path)}) == 1


# ---- Each with a budget of its own


AUTO = "--use-activation-checkpoint=auto"


@cache
def budgets(*flags: str) -> dict[str, float]:
    """The policies that `auto` takes, each by a budget for it, in KiB."""
    settings = parse(*TINY, *SHAPE.split(), *flags)
    precision, layout = choose_precision(settings, CPU), Layout("ddp", world_size=2)
    planner = StepPlan(settings, 31, CPU, precision, layout=layout).planner
    ways = pareto_frontier(simulate_policies_fastest_first(planner, settings.batch_size))
    return {way.config.recompute: math.ceil(way.peak / 0.9 + 1) / 1024 for way in ways}


@slow
@pytest.mark.parametrize(
    "flags",
    [
        "--no-amp --grad-accum-steps=3",
        "--amp-dtype=bfloat16 --grad-accum-steps=2",
        "--amp-dtype=bfloat16 --compress-gradients",
    ],
)
def test_ranks_may_have_policies_of_their_own(flags, path):
    """Each by its own budget. What is written is of process 0."""
    flags = [*SHAPE.split(), *flags.split()]
    known = budgets(*flags)
    ways = random.Random(f"{flags}").sample([*known], 2)
    own = {f"FLAGS_{rank}": f"--memory-budget={known[way]}KiB" for rank, way in enumerate(ways)}
    said = broken_together(path, "", *flags, AUTO, **own).stdout
    assert f"memory   auto takes {ways[0]}: " in said
    assert f"memory   each process has a policy of its own, by rank: {', '.join(ways)}\n" in said
    assert bits(path, 0) == bits(path, 1) == bits(undisturbed_together(*flags))
    assert {record["recompute"] for record in metrics(path)} == {ways[0]}
    assert snapshot(path)["config"]["recompute"] == ways[0]


@pytest.mark.parametrize("rank", [0, case(1, marks=slow)])
def test_one_that_has_too_little_ends_all(rank, path, tmp_path):
    """With the same line, before the tokenizer is trained; none waits for the others."""
    text = tmp_path / "text.txt"
    text.write_text("All that is gold does not glitter. " * 40)
    own = {f"FLAGS_{r}": f"--memory-budget={'100KiB' if r == rank else '1GiB'}" for r in (0, 1)}
    data = [f"--train-data={text}", "--tokenizer-name=bpe", f"--checkpoint-path={path}"]
    words = [FAULTS, "train_ddp", *TINY_MODEL, *data, AUTO]
    result = start_together(words, **own).end()
    (line,) = errors(result)
    assert result.returncode == 2 and "--memory-budget: tensors may take 90.0 KiB" in line
    assert [*tmp_path.iterdir()] == [text]
