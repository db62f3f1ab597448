"""Results are equal to the bit for the same number of threads: a sum is rounded as it is split.

Real runs, in processes of their own, with two threads each; the other tests have one.
"""

from pathlib import Path

import pytest
import torch
from harness.runs import TINY, same, snapshot, together

# Large enough that two threads share the sums: with one, other weights come out.
FLAGS = [*TINY, "--max-tokens=2000", "--d-model=64", "--seq-len=64", "--batch-size=8", "--no-amp"]
FLAGS += ["--warmup-steps=1", "--lr-scheduler=constant", "--num-steps=4"]


def train(
    path: Path, *flags: str, script: str = "train_minimal.py", processes: int = 1, threads: int = 2
) -> str:
    """What the run says."""
    words = [script, *FLAGS, "--checkpoint-path", str(path), *flags]
    result = together(words, processes, OMP_NUM_THREADS=str(threads))
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    path = tmp_path_factory.mktemp("alone") / "run.pt"
    train(path, "--grad-accum-steps=2")
    return path


@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_two_processes_of_two_threads_equal_one_of_two(tmp_path, alone, script):
    train(tmp_path / "run.pt", script=script, processes=2)
    assert same(snapshot(tmp_path / "run.pt")["model"], snapshot(alone)["model"])


def test_resumed_with_as_many_threads_or_with_others(tmp_path, alone):
    path = tmp_path / "run.pt"
    said = train(path, "--grad-accum-steps=2", "--num-steps=2")
    assert "1 x cpu (2 threads; another number rounds sums otherwise)" in said
    state = snapshot(path)
    assert state["threads"] == 2
    assert "sums are rounded" not in train(path, "--resume")
    assert same(snapshot(path)["model"], snapshot(alone)["model"])
    torch.save(state, path)
    said = train(path, "--resume", "--lr=0.002", threads=1)
    changed = "-> 0.0002, threads 2 -> 1: sums are rounded otherwise\n"
    assert changed in said and snapshot(path)["threads"] == 1
    # A snapshot from before they were noted.
    del state["threads"]
    torch.save(state, path)
    assert "sums are rounded" not in train(path, "--resume", threads=1)
