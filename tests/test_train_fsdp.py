"""A model that is dealt out learns what a whole one learns, to the bit; and nothing is lost."""

import re

import pytest
import torch
from harness.runs import metrics, same, snapshot, together, torchrun, train_here

from model import MiniGPT, MiniGPTConfig
from trainer.process import OneProcess

FULL = "--use-activation-checkpoint"


def test_two_shards_equal_one_process(plans_memory, tmp_path, capsys):
    """Weights, moments, losses, with clipping; 12 validation windows in batches of 5 are 5, 5 and
    2, of which process 1 has one only. And a sample is drawn, which needs both."""
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    both = ("--batch-size=5", "--eval-interval=7", "--grad-clip-norm=0.1", FULL)
    both = (*both, "--amp-dtype=bfloat16", "--sample-tokens=4")
    assert train_here(one, *both, "--grad-accum-steps=2") == 0
    plans = [capsys.readouterr().out]
    result = torchrun(two, *both, script="train_fsdp.py")
    ours, theirs = snapshot(two), snapshot(one)
    assert ours.keys() == theirs.keys()
    assert same(ours["optimizer"]["state"], theirs["optimizer"]["state"])
    for key in ("model", "scaler", "step", "config", "tokenizer", "data"):
        assert same(ours[key], theirs[key]), key
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a["train_loss"] == b["train_loss"] and a["grad_norm"] == b["grad_norm"]
        if "val_loss" in a:
            assert a["val_loss"] == pytest.approx(b["val_loss"], rel=1e-6)
    peaks = [re.search(r"full: peak ([\d.]+) KiB", out)[1] for out in (*plans, result.stdout)]
    assert float(peaks[1]) < 0.9 * float(peaks[0])  # as predicted
    assert result.stdout.count("sample") == 1 and "view tensor" not in result.stderr


@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_every_policy_with_shards(which):
    """Each equals DDP, and DDP without recomputation; see fsdp_steps.py."""
    result = together(["tests/harness/fsdp_steps.py", which], timeout=400)
    assert result.stdout.count("variants equal") == 2, result.stdout + result.stderr


def test_weights_are_drawn_one_at_a_time():
    """And they are those that the seed gives without a detour. (That shards are all the memory that
    a process takes: fsdp_steps.py.)"""
    process, seen = OneProcess(torch.device("cpu")), []
    with torch.device("meta"):
        model = MiniGPT(MiniGPTConfig(vocab_size=61, n_layers=2, n_heads=2, d_model=32, d_ff=64))
    assert all(p.is_meta for p in model.parameters())
    process.place(model)
    torch.manual_seed(0)
    model.init_weights(lambda whole, like: seen.append(whole.shape) or whole)
    assert seen == [p.shape for p in model.parameters() if p.dim() > 1]
    torch.manual_seed(0)
    other = MiniGPT(model.config)
    torch.manual_seed(0)
    other.init_weights()
    assert same(model.state_dict(), other.state_dict())
