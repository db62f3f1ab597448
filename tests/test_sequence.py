"""A sequence that processes share (memory/sequence.py, train_sp.py): what one process computes, in
each a share of the bytes (which test_shards.py compares with the plan)."""

import pytest
from harness.runs import FAULTS, metrics, start_together, torchrun, train_here

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("n", "which"), [(2, "few"), *(pytest.param(n, "all", marks=slow) for n in (2, 4))]
)
def test_processes_learn_what_one_does(n, which):
    """15 tokens, 5 heads; each policy to the bit what none does. See `together` in sharded.py."""
    result = start_together(["tests/harness/sharded.py", "together", which], n).end(timeout=400)
    assert result.stdout.count("as one") == n, result.stdout + result.stderr


# 15 tokens over two processes; and what is logged, in all of its columns.
FLAGS = "--no-amp --dropout=0 --seq-len=15 --num-steps=16 --eval-interval=4 --sample-tokens=4"


@pytest.mark.slow
def test_from_and_to_other_trainers(tmp_path):
    """All the way with the losses, evaluations and norms of one process. In the end both write a
    text, each token of it after those before."""
    whole, path, flags = tmp_path / "whole.pt", tmp_path / "run.pt", FLAGS.split()
    assert train_here(whole, *flags, "--grad-accum-steps=2") == 0
    parts = [("train_sp", 2, 2), ("train_minimal", 1, 2), ("train_fsdp", 2, 1), ("train_sp", 2, 2)]
    for i, (trainer, processes, accumulate) in enumerate(parts, 1):
        how = {"processes": processes, "script": f"{FAULTS} {trainer}", "expect": 143 * (i < 4)}
        more = [f"--grad-accum-steps={accumulate}", *["--resume"] * (i > 1)]
        result = torchrun(path, *flags, *more, FAULTS=f"term:0:{4 * i + 1}" * (i < 4), **how)
    assert result.stdout.count("sample") == 1
    for ours, theirs in zip(metrics(path), metrics(whole), strict=True):
        for name in ("step", "epoch", "train_loss", "grad_norm", "val_loss"):
            assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-4), ours
