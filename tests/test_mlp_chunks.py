"""The MLP half in chunks: what keeps its bits, what is rounded otherwise and by how much; what a
chunk is, what that takes, and what refuses or proposes it."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from cases.shapes import CONFIG
from harness.live_storages import LiveStorages
from harness.marks import rest_slow
from harness.runs import ready, train_here
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from memory import MemorySavingGPT, policies
from memory.policies import mlp_chunk_sizes

pytestmark = pytest.mark.usefixtures("everything_travels")

T = 321  # five chunks of 64 tokens, and one token more
WAYS = ["mlp", "sdpa", "full", "full:3,cheap", "full/2", "mlp+offload", "full/3+nested+offload"]
SIX = ("ln_2.weight", "ln_2.bias", *(f"mlp.{of}" for of in ("c_fc.weight", "c_fc.bias")))
SIX += ("mlp.c_proj.weight", "mlp.c_proj.bias")
LONG = replace(CONFIG, max_position_embeddings=T, vocab_size=61, d_ff=512)


@cache
def gradients(way: str, chunks: int, kind: str, dropout: float):
    """The loss, and all gradients by name."""
    torch.manual_seed(0)
    config = replace(LONG, recompute=way, mlp_chunks=chunks, dropout=dropout)
    model = MemorySavingGPT(config).to(torch.float64 if kind == "fp64" else torch.float32).train()
    torch.manual_seed(1)
    ids = torch.randint(61, (2, T))
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16", cache_enabled=False):
        loss = model(ids, ids.roll(-1, 1))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of the six gradients of all blocks together, relative."""
    six = [name for name in found if name.endswith(SIX)]
    assert len(six) == 6 * LONG.n_layers
    wrong, right = (
        torch.cat([gradient.double().flatten() for gradient in gradients])
        for gradients in ([found[n] - expected[n] for n in six], [expected[n] for n in six])
    )
    return (wrong.norm() / right.norm()).item()


@pytest.mark.parametrize(
    ("kind", "dropout", "limit"),
    rest_slow(
        [("fp64", 0.1, 1e-12), ("fp32", 0.0, 2e-6), ("bf16", 0.0, 1e-2), ("bf16", 0.1, 1e-2)],
        lambda case: case[0] == "fp64",
    ),
)
def test_all_but_six_gradients_a_block_keep_their_bits(kind, dropout, limit):
    """With dropout, too: none is in the MLP half itself, so the masks are those of `none`. The six
    are the same in all ways that cut all blocks, and as far from the truth as before."""
    loss, whole = gradients("none", 1, kind, dropout)
    _, first = gradients("full", 5, kind, dropout)
    for way in WAYS:
        loss_of_chunks, found = gradients(way, 5, kind, dropout)
        assert torch.equal(loss_of_chunks, loss), way
        same = [name for name in whole if torch.equal(found[name], whole[name])]
        assert all(name in same or name.endswith(SIX) for name in whole), way
        assert "cheap" in way or all(torch.equal(found[name], first[name]) for name in found), way
    assert 0 < error(first, whole) < limit
    if not dropout:
        _, truth = gradients("none", 1, "fp64", 0.0)
        assert error(first, truth) <= 1.05 * error(whole, truth)


@pytest.mark.parametrize("way", ["full", "mlp:1,cheap", "full/2+offload"])
def test_an_evaluation_needs_less_than_a_step_and_keeps_its_bits(way):
    """It is in chunks, too. Whole, the (B, T, d_ff) tensors alone are twice a step's peak here."""
    config = replace(LONG, recompute=way, mlp_chunks=16, max_position_embeddings=2048)
    ids = torch.randint(61, (2, 2048))
    with LiveStorages() as storages:
        model = MemorySavingGPT(config).train()
        model(ids, ids).backward()
        step, storages.peak = storages.peak, 0
        with torch.no_grad():
            loss = model.eval()(ids, ids)
    assert storages.peak < step
    whole = MemorySavingGPT(replace(config, recompute="none", mlp_chunks=1)).eval()
    whole.load_state_dict(model.state_dict())
    assert torch.equal(loss, whole(ids, ids).detach())


def test_a_trainer_has_autocasts_cache_off(tmp_path):
    """It would sum up the chunks' gradients in bfloat16."""
    run = ready(tmp_path, "--amp-dtype=bfloat16")
    with run.autocast():
        assert not torch.is_autocast_cache_enabled()


@settings(deadline=None, derandomize=True)
@given(some.integers(1, 10**6), some.integers(1, 10**5), some.integers(0, 100))
def test_sizes_of_chunks(n_tokens, d_ff, asked):
    """All but the last are as long; none has a few rows; there are as many as asked, or fewer."""
    *before, last = mlp_chunk_sizes(n_tokens, d_ff, asked)
    assert sum(before) + last == n_tokens and len({*before}) <= 1
    assert all(size % 64 == 0 and last < size + 64 for size in before) and last >= min(64, n_tokens)
    assert len(before) < (asked or n_tokens)
    if n_tokens >= 128 and asked > 1:
        assert before
    if not asked:  # as many as keep each of them small
        assert (before or [last])[0] * d_ff <= max(
            policies.MLP_CHUNK_ELEMENTS, 64 * d_ff
        ) + 64 * d_ff


def test_a_run_says_what_flags_do_not_do(tmp_path, capsys):
    flags = "--mlp-chunks=2", "--warmup-steps=4", "--num-steps=1"
    assert train_here(tmp_path / "run.pt", *flags) == 0
    said = capsys.readouterr().out
    assert "note     --mlp-chunks 2: --use-activation-checkpoint none recomputes no MLP" in said
    assert "note     --warmup-steps 4: the run ends before, at 25% of --lr" in said
