"""Two processes are one process with twice the micro-batches: to the bit."""

import shutil

import pytest
from harness.faults import history
from harness.runs import FAULTS, metrics, same, snapshot, torchrun, train_here

from trainer.snapshot import beside

FULL = "--use-activation-checkpoint"


def weights(path):
    return snapshot(path)["model"]


@pytest.mark.parametrize(
    "flags",
    [("--no-amp",), pytest.param(("--amp-dtype=bfloat16", FULL), marks=pytest.mark.slow)],
    ids=["fp32", "bf16 recompute"],
)
def test_two_processes_equal_one_with_two_micro_batches(tmp_path, flags):
    """Weights, losses, validation loss; 12 validation windows in batches of 5 are 5, 5 and 2."""
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    both = (*flags, "--batch-size=5", "--eval-interval=7")
    assert train_here(one, *both, "--grad-accum-steps=2") == 0
    torchrun(two, *both)
    assert same(weights(one), weights(two))
    assert same(snapshot(one)["optimizer"]["state"], snapshot(two)["optimizer"]["state"])
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a["train_loss"] == b["train_loss"]
        if "val_loss" in a:
            assert a["val_loss"] == pytest.approx(b["val_loss"], rel=1e-6)


@pytest.mark.slow
def test_four_micro_batches_in_two_processes(tmp_path):
    """((a + b) + c) + d is not (a + c) + (b + d) in the last bit, and nothing more than that."""
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    flags = ("--no-amp", "--num-steps=1")
    assert train_here(one, *flags, "--grad-accum-steps=4") == 0
    torchrun(two, *flags, "--grad-accum-steps=2")
    # After one step Adam's first moment is a tenth of the (clipped) gradient.
    moments = [snapshot(path)["optimizer"]["state"].values() for path in (one, two)]
    for a, b in zip(*moments, strict=True):
        assert (a["exp_avg"] - b["exp_avg"]).norm() <= 1e-6 * a["exp_avg"].norm()


@pytest.mark.slow
def test_gradients_live_in_buckets_from_the_first_on(tmp_path):
    """With accumulation, where they would be made beside DDP's buckets; and after --resume, where
    AdamW's moments are there already. Three steps each."""
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    flags = ("--no-amp", "--grad-accum-steps=2", "--lr-scheduler=constant", "--warmup-steps=0")
    for more in (("--num-steps=3",), ("--num-steps=6", "--resume")):
        result = torchrun(path, *flags, *more, script="tests/harness/ddp_storages.py")
        assert result.stdout.count("bytes, from the first on") == 2
    torchrun(whole, *flags, "--num-steps=6")
    assert same(weights(path), weights(whole))


@pytest.mark.slow
def test_compressed_gradients(tmp_path):
    """Both processes the same to the bit, and to what resumes; nearly what is not compressed."""
    path, part, plain = (tmp_path / name for name in ("run.pt", "part.pt", "plain.pt"))
    # At so low a rate all steps have the gradients of the first weights.
    flags = ("--no-amp", "--num-steps=4", "--save-interval=2", "--lr=1e-6")
    compressed = (*flags, "--compress-gradients", "--grad-accum-steps=2")
    torchrun(path, *compressed, script=f"{FAULTS} train_ddp")
    assert history(path, rank=0) == history(path, rank=1)
    shutil.copy(beside(path, ".prev.pt"), part)
    result = torchrun(part, *flags, "--resume")
    assert "run.pt, step 2" in result.stdout.replace("part", "run")
    assert same(weights(part), weights(path))
    assert train_here(plain, *flags, "--grad-accum-steps=4") == 0
    moments = [snapshot(p)["optimizer"]["state"].values() for p in (path, plain)]
    for a, b in zip(*moments, strict=True):
        off = (a["exp_avg"] - b["exp_avg"]).norm() / b["exp_avg"].norm()
        assert 1e-4 < off < 1e-2  # bfloat16 has 8 bits; in float32 only the sums' order differs
