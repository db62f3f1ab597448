"""Several processes, one of which runs out of memory. Where the others need not know, it goes
deeper alone; else all begin again, and deeper. Ranks may have policies of their own from the start.
Nothing else changes.

Where a step runs out, and how: PLACES of tests/harness/shortage.py.
"""

import math
import random
import re
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from harness.faults import WHOLE_RUNS, broken_together, history
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
    start_again,
    start_together,
    train_here,
)

from planner.choose import all_ways, frontier
from trainer.device import choose_precision
from trainer.plan import Question

slow, CPU = pytest.mark.slow, torch.device("cpu")
SHAPE = "--n-layers=4 --batch-size=4 --num-steps=4"  # with more policies to choose from
PARTS = "weights", "moments", "scale"  # of a record of `history`


@cache
def together(*flags: str, script: str = "train_ddp") -> Path:
    """Two processes to which nothing happens."""
    path = Path(tempfile.mkdtemp(dir=WHOLE_RUNS.name), "run.pt")
    broken_together(path, "", *flags, script=script)
    return path


def bits(path: Path, rank: int = 0) -> dict[int, list]:
    """After each step, from a restart on those of the new attempt."""
    return {step: [record[part] for part in PARTS] for step, record in history(path, rank).items()}


def recompute(path: Path) -> list[str]:
    """By step, of process 0."""
    return [record["recompute"] for record in metrics(path)]


# ---- Alone


def everywhere(steps: int) -> str:
    """Faults within reach in each step, of one process or of both; the first two are rehearsed."""
    places = ["rehearsed:0:1", "early:1:1", "early:0:2", "rehearsed:1:2"]
    for step in range(3, steps + 1):
        place = "early" if step % 5 else "data"
        places += [f"{place}:{rank}:{step}" for rank in (0, 1) if step % 3 != rank]
    return " ".join(places)


MORE = [
    "--no-amp --optimizer=muon --use-activation-checkpoint=selective",
    "--no-amp --grad-accum-steps=3 --eval-interval=2",
    "--amp-dtype=bfloat16 --grad-accum-steps=2 --compress-gradients",
    "--amp-dtype=float16 --grad-accum-steps=2 --use-activation-checkpoint=cheap",
    "--amp-dtype=bfloat16 --use-activation-checkpoint=mlp --loss-chunks=3",
]


@row("`train_ddp.py`: one of two processes runs out")
@row("`train_ddp.py`: one process has")
@pytest.mark.parametrize(
    ("steps", "flags"),
    [(5, "--no-amp --eval-interval=2"), *(pytest.param(24, ways, marks=slow) for ways in MORE)],
)
def test_one_process_goes_deeper_and_the_others_need_not_know(steps, flags, tmp_path):
    """In forward, in a backward before the last, before both; and anywhere in the rehearsal."""
    path, flags, faults = tmp_path / "run.pt", flags.split(), everywhere(steps)
    said = broken_together(path, faults, *flags, f"--num-steps={steps}").stdout
    whole = together(*flags, f"--num-steps={steps}")
    assert bits(path, 0) == bits(path, 1) == bits(whole)
    for rank in (0, 1):
        assert history(path, rank)[steps]["rescues"] == faults.count(f":{rank}:")
        lines = re.findall(rf"^warning  step (\d+): .* same results \(rank {rank}\)$", said, re.M)
        assert lines == re.findall(rf":{rank}:(\d+)", faults)
    typed, used = recompute(whole)[0], recompute(path)[-1]
    assert typed not in recompute(path)
    assert snapshot(path)["config"]["recompute"] == used
    # And flags stay as they were typed.
    alone = f"--grad-accum-steps={2 * snapshot(path)['args']['grad_accum_steps']}"
    assert train_here(path, "--resume", f"--num-steps={steps + 1}", alone) == 0
    assert recompute(path)[-1] == typed


# ---- Together

LATER, SHARDED = row("`train_ddp.py`: one process runs"), row("`train_fsdp.py`, `train_sp.py`: one")


def attempts(path: Path, faults: str, *flags: str, script: str, restarts: int) -> list[str]:
    """What is said until the last one, which ends well; each of those before in one line."""
    words = [FAULTS, script, *TINY, f"--checkpoint-path={path}", *flags]
    *failed, last = start_again(words, restarts, FAULTS=faults)
    for attempt in failed:
        (line,) = errors(attempt)
        assert attempt.returncode == 4 and line.startswith("error: out of memory with ")
        assert "Traceback" not in attempt.stderr
    assert last.returncode == 0 and len(failed) == restarts, last.stderr
    return [attempt.stdout for attempt in (*failed, last)]


@pytest.mark.parametrize(
    ("script", "flags", "faults"),
    [
        pytest.param("train_ddp", "--no-amp", "last:0:3 rehearsed:1:3:1", marks=LATER),
        pytest.param("train_fsdp", "--no-amp", "sharded:0:3", marks=SHARDED),
        *(
            pytest.param(script, flags, faults, marks=slow)
            for script, flags, faults in (
                ("train_ddp", "--no-amp --grad-accum-steps=2", "buckets:0:2"),
                ("train_ddp", "--no-amp --grad-accum-steps=2", "last:1:2"),
                ("train_ddp", "--amp-dtype=float16 --compress-gradients", "last:0:1 last:1:1"),
                ("train_fsdp", f"{SHAPE} --no-amp", "sharded:1:1 sharded:0:2:1"),
                ("train_sp", f"{SHAPE} --no-amp --dropout=0", "sharded:0:3 sharded:1:3:1"),
            )
        ),
    ],
)
def test_where_all_have_to_know_torchrun_starts_them_again_and_deeper(
    script, flags, faults, tmp_path
):
    """In the last backward, or while DDP makes its buckets; with shards anywhere."""
    path, flags = tmp_path / "run.pt", [*flags.split(), "--num-steps=4"]
    restarts = 1 + max(fault.split(":")[3:] == ["1"] for fault in faults.split())
    restarts -= script == "train_ddp" and restarts > 1  # (that one is rehearsed)
    said = attempts(path, faults, *flags, "--save-interval=1", script=script, restarts=restarts)
    whole = together(*flags, script=script)
    assert same(snapshot(path)["model"], snapshot(whole)["model"])
    assert bits(path, 0) == bits(path, 1) == bits(whole)
    ran_out = [re.findall("memory ran out with (.*); it goes on with (.*)", part) for part in said]
    policies = ["none", *(taken for ((_, taken),) in ran_out[1:])]
    assert [failed for ((failed, _),) in ran_out[1:]] == policies[:-1]
    assert "none" not in policies[1:] and recompute(path)[-1] == policies[-1]


@pytest.mark.parametrize(
    ("faults", "flags"),
    [
        ("update:0:3", ""),  # some weights may have changed: it says nothing of the policy
        pytest.param("sharded:0:3", "--on-out-of-memory=stop", marks=slow),
        pytest.param("last:0:3", "--use-activation-checkpoint=qkv:1,attn", marks=slow),
        pytest.param("early:1:3", "--use-activation-checkpoint=qkv:1,attn", marks=slow),
        pytest.param("kill:0:3", "", marks=slow),
    ],
)
def test_started_again_as_it_was(faults, flags, tmp_path):
    """After an update that ran out, and where no policy needs less (qkv:1,attn): as often as
    torchrun allows. The other process, which waits for that one, has nothing to add."""
    path, flags = tmp_path / "run.pt", ["--no-amp", "--save-interval=1", *flags.split()]
    words = [FAULTS, "train_ddp", *TINY, f"--checkpoint-path={path}", *flags]
    first, second = start_again(words, 1, FAULTS=f"{faults} {faults}:1")
    for attempt in (first, second):
        assert attempt.returncode == (-9 if "kill" in faults else 4)
        is_told = "attn" in flags[-1]
        assert ("memory ran out with" in attempt.stdout) == (is_told and attempt is second)
        assert "Traceback" not in attempt.stderr and len(errors(attempt)) <= 1 + (not is_told)
        assert "kill" in faults or "error: out of memory with " in errors(attempt)[0]
    assert snapshot(path)["step"] == 2 and len(set(recompute(path))) == 1


@slow
def test_by_torchrun_itself(tmp_path):
    path, flags = tmp_path / "run.pt", ["--no-amp", "--dropout=0", "--save-interval=1"]
    how = {"script": f"{FAULTS} train_fsdp", "launch": "--max-restarts=3"}
    faults = "sharded:1:3 sharded:0:4:1"
    result = run(by_torchrun(path, *flags, **how), timeout=400, FAULTS=faults)
    assert result.returncode == 0 and result.stdout.count("memory ran out with") == 2
    assert len(errors(result)) == 2, result.stderr
    assert same(snapshot(path)["model"], snapshot(together(*flags, script="train_fsdp"))["model"])


# ---- Each with a budget of its own


AUTO = "--use-activation-checkpoint=auto"


@cache
def budgets(*flags: str) -> dict[str, float]:
    """The policies that `auto` takes, each by a budget for it, in KiB."""
    args = parse(*TINY, *SHAPE.split(), *flags)
    precision = choose_precision(args, CPU)
    question = Question(args, 31, CPU, precision, ddp=True, processes=2)
    ways = frontier(all_ways(question.planner, args.batch_size))
    return {way.config.recompute: math.ceil(way.peak / 0.9 + 1) / 1024 for way in ways}


PAIRS = ["--no-amp", "--no-amp --grad-accum-steps=3", "--amp-dtype=bfloat16 --grad-accum-steps=2"]
PAIRS += ["--amp-dtype=bfloat16 --compress-gradients"]


@pytest.mark.parametrize(
    ("draw", "flags"),
    [(0, PAIRS[2]), *(pytest.param(1, way, marks=slow) for way in PAIRS)],
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
    assert bits(path, 0) == bits(path, 1) == bits(together(*SHAPE.split(), *flags))
    state = snapshot(path)
    assert set(recompute(path)) == {state["config"]["recompute"]} == {ways[0]}
    assert state["args"]["memory_budget"] == 1024 * known[ways[0]]


@slow
def test_a_rank_that_needs_less_already_keeps_its_policy(tmp_path):
    """When all are started again because another one's was too much."""
    path, flags = tmp_path / "run.pt", [*SHAPE.split(), "--no-amp"]
    known = budgets("--no-amp")
    deepest = min(known, key=known.__getitem__)
    words = [FAULTS, "train_ddp", *TINY, *flags, AUTO, f"--checkpoint-path={path}"]
    own = {"FLAGS_0": "--memory-budget=1GiB", "FLAGS_1": f"--memory-budget={known[deepest]}KiB"}
    _, last = start_again(words, 1, FAULTS="last:0:3", **own)
    taken = re.findall("memory ran out with none; it goes on with (.*)", last.stdout)
    assert (
        len(taken) == 1
        and taken[0] != deepest
        and f"by rank: {taken[0]}, {deepest}\n" in last.stdout
    )
    assert same(snapshot(path)["model"], snapshot(together(*flags))["model"])


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=slow)])
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
