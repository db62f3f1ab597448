"""The model is GPT-2, causal, and starts where an untrained model should."""

import math
from dataclasses import FrozenInstanceError, asdict

import pytest
import torch
import torch._dynamo

from model import MiniGPT, MiniGPTConfig, sample

TINY = dict(
    vocab_size=61,
    max_position_embeddings=16,
    n_layers=2,
    n_heads=2,
    d_model=32,
    d_ff=64,
    dropout=0.0,
)


def tiny(**changes) -> MiniGPT:
    torch.manual_seed(0)
    return MiniGPT(MiniGPTConfig(**{**TINY, **changes}))


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, TINY["vocab_size"], shape)


def test_gpt2_small_has_124439808_parameters_and_its_head_is_the_token_embedding():
    with torch.device("meta"):
        model = MiniGPT(MiniGPTConfig())
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    names = [name for name, _ in model.named_parameters()]
    assert "token_embedding.weight" in names and not [name for name in names if "head" in name]


@pytest.mark.parametrize("policy", ["none", "full"])
def test_no_position_sees_a_later_one(policy):
    """By gradient: the output at position t depends on the inputs up to t and on no other."""
    model, embedded = tiny(recompute=policy).train(), []
    model.token_embedding.register_forward_hook(lambda *hooked: embedded.append(hooked[2]))
    logits = model(random_ids(1, 12))
    for t in (0, 5, 11):
        (gradient,) = torch.autograd.grad(logits[0, t].sum(), embedded[0], retain_graph=True)
        reached = gradient[0].abs().sum(dim=-1) > 0
        assert reached.tolist() == [position <= t for position in range(12)]


def test_initial_loss_is_that_of_a_guess():
    model, ids = tiny(vocab_size=5000), torch.randint(0, 5000, (8, 16))
    assert abs(model(ids, ids.roll(-1, 1)).item() - math.log(5000)) < 0.1


def test_residual_projections_start_smaller_with_depth():
    for n_layers in (1, 16):
        mlp = tiny(n_layers=n_layers, d_model=128).blocks[0].mlp
        ratio = (mlp.c_proj.weight.std() / mlp.c_fc.weight.std()).item()
        assert abs(ratio - 1 / math.sqrt(2 * n_layers)) < 0.05


def test_too_long_a_sequence_is_an_error():
    with pytest.raises(ValueError, match="max_position_embeddings is 16"):
        tiny()(random_ids(1, 17))


def test_the_defaults_are_gpt2_small_without_recompute():
    shape = dict(vocab_size=50257, max_position_embeddings=1024, n_layers=12, n_heads=12)
    shape |= dict(d_model=768, d_ff=3072, dropout=0.1)
    assert asdict(MiniGPTConfig()) == shape | {"recompute": "none", "loss_chunks": 0}
    with pytest.raises(FrozenInstanceError):
        MiniGPTConfig().dropout = 0.0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_heads", 3, "must be divisible by n_heads"),
        ("n_layers", 0, "n_layers must be at least 1"),
        *(("dropout", value, "dropout must be in") for value in (1.0, -0.5, math.nan)),
        ("recompute", "mlp:3", "recompute must be POLICY.*N must be in 0..2"),
        ("loss_chunks", -1, "loss_chunks must be at least 0"),
    ],
)
def test_impossible_config(field, value, message):
    with pytest.raises(ValueError, match=message):
        MiniGPTConfig(**{**TINY, field: value})


def test_what_is_compiled(monkeypatch):
    """Each block, the residual addition, a slice's softmax; not cut to DDP's buckets."""
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    model = tiny()
    # (monkeypatch's own undoing would hide the setting from DDP, in a later test.)
    with torch._dynamo.config.patch(optimize_ddp=True):
        model.compile_blocks()
        assert compiled == [*model.blocks, model.add] and model.token_embedding.compiled
        assert torch._dynamo.config.optimize_ddp is False


# ---- sampling


def test_the_edges_of_top_p_and_of_the_temperature(monkeypatch):
    """(All else of sampling: test_stream.py.)"""
    # The fewest whose sum is at least p: at 0.5 one of two equal ones is enough.
    drawn_from: list[torch.Tensor] = []
    draw = lambda p, num_samples: drawn_from.append(p) or p[:, :1]  # noqa: E731
    monkeypatch.setattr(torch, "multinomial", draw)
    for logits, top_p, expected in (
        ([0.0, 0.0], 0.5, [0, 1]),
        ([0.0, 0.0], 0.51, [0.5, 0.5]),
        ([0.0, 1.0], 0.0, [0, 1]),  # never none
    ):
        sample(torch.tensor([logits]), 1.0, None, top_p)
        assert sorted(drawn_from.pop()[0].tolist()) == expected
    assert sample(torch.tensor([[0.0, 1.0]]), 1e-7, None, None).tolist() == [[1]]
