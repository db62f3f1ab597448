"""What processes send each other in a step: how often, and how many bytes."""

import json

import pytest
from harness.collectives import watched
from harness.runs import torchrun, train_here

# Parameters of TINY (31 ids, 16 positions, 16 channels, 2 layers): a block's; what is in no block,
# for two processes to share: 31 rows are 32 then; and all.
BLOCK, SHARED, ALL = 3280, 800, 496 + 256 + 32 + 2 * 3280
# Weights are gathered in forward, and those of blocks once more in backward (not for a replay);
# gradients are dealt out, and squares of their norm are added up, in float64.
GATHERS = [("_allgather_base_", 4 * BLOCK)] * 2 * 2 + [("_allgather_base_", 4 * SHARED)]
ONCE = [("_reduce_scatter_base_", 4 * BLOCK)] * 2 + [("_reduce_scatter_base_", 4 * SHARED)]
ONCE += [("allreduce_", 8)]


def collectives(said: str) -> list:
    lines = [line for line in said.splitlines() if line.startswith("collectives ")]
    return [[tuple(call) for call in json.loads(line.split(" ", 1)[1])] for line in lines]


@pytest.mark.parametrize(
    ("script", "flags", "expected"),
    [
        ("train_ddp", "", [("allreduce_", 4 * ALL)]),
        ("train_ddp", "--compress-gradients --no-amp", [("allreduce_", 2 * ALL)]),
        ("train_fsdp", "--use-activation-checkpoint", 3 * GATHERS + ONCE),
    ],
)
def test_gradients_travel_once_a_step(tmp_path, script, flags, expected):
    """However many micro-batches it has: here three. Weights travel in each, if they are dealt out.

    (The fourth step: the first two are about DDP's buckets.)"""
    steps = ("--num-steps=4", "--grad-accum-steps=3", *flags.split())
    result = torchrun(tmp_path / "run.pt", *steps, script=f"tests/harness/collectives.py {script}")
    assert collectives(result.stdout) == [sorted(expected)] * 2


def test_one_process_sends_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("train_minimal.train_step", watched)
    assert train_here(tmp_path / "run.pt", "--num-steps=2", "--grad-accum-steps=3") == 0
    assert collectives(capsys.readouterr().out) == [[]]
