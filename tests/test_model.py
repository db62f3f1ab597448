"""The model is GPT-2, causal, and starts where an untrained model should."""

import math

import pytest
import torch
import torch.nn.functional as F

from memory.head import count_chunks, head_loss
from model import MiniGPT, MiniGPTConfig

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


def test_gpt2_small_has_124439808_parameters():
    with torch.device("meta"):
        model = MiniGPT(MiniGPTConfig())
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def test_shapes():
    model, ids = tiny(), random_ids(3, 10)
    assert model(ids).shape == (3, 10, 61)
    assert model(ids, ids).shape == ()
    assert len(model.blocks) == 2


def test_head_is_the_token_embedding():
    names = [name for name, _ in tiny().named_parameters()]
    assert not [name for name in names if "head" in name]
    assert "token_embedding.weight" in names


@pytest.mark.parametrize("policy", ["none", "full"])
def test_no_position_sees_a_later_one(policy):
    """By gradient: the output at position t depends on the inputs up to t and on no other."""
    model = tiny(recompute=policy).train()
    ids = random_ids(1, 12)
    embedded = []
    hook = model.token_embedding.register_forward_hook(
        lambda _module, _inputs, output: embedded.append(output)
    )
    logits = model(ids)
    hook.remove()
    for t in (0, 5, 11):
        (gradient,) = torch.autograd.grad(logits[0, t].sum(), embedded[0], retain_graph=True)
        reached = gradient[0].abs().sum(dim=-1) > 0
        assert reached.tolist() == [position <= t for position in range(12)]


def test_initial_loss_is_that_of_a_guess():
    model, ids = tiny(vocab_size=5000), torch.randint(0, 5000, (8, 16))
    assert abs(model(ids, ids.roll(-1, 1)).item() - math.log(5000)) < 0.1


def test_residual_projections_start_smaller_with_depth():
    shallow, deep = tiny(n_layers=1, d_model=128), tiny(n_layers=16, d_model=128)

    def ratio(model):
        return (
            model.blocks[0].mlp.c_proj.weight.std() / model.blocks[0].mlp.c_fc.weight.std()
        ).item()

    assert abs(ratio(shallow) - 1 / math.sqrt(2)) < 0.05
    assert abs(ratio(deep) - 1 / math.sqrt(32)) < 0.05


def test_overfits_one_batch():
    model, ids = tiny(), random_ids(4, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def test_too_long_a_sequence_is_an_error():
    with pytest.raises(ValueError, match="max_position_embeddings is 16"):
        tiny()(random_ids(1, 17))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_heads", 3, "must be divisible by n_heads"),
        ("n_layers", 0, "n_layers must be at least 1"),
        ("dropout", 1.0, "dropout must be in"),
        ("dropout", math.nan, "dropout must be in"),
        ("recompute", "some", "recompute must be one of none, cheap"),
        ("recompute_group", 0, "recompute_group must be at least 1"),
        ("recompute_group", 2, "recompute_group 2 needs recompute full"),
        ("offload_activations", True, "needs a recompute policy"),
        ("recompute_layers", 3, "recompute_layers must be in 0..2"),
        ("loss_chunks", -1, "loss_chunks must be at least 0"),
    ],
)
def test_impossible_config(field, value, message):
    with pytest.raises(ValueError, match=message):
        MiniGPTConfig(**{**TINY, field: value})


# ---- the head


def head_inputs(n_tokens: int, vocab_size: int = 97, channels: int = 16):
    torch.manual_seed(1)
    x = torch.randn(1, n_tokens, channels, requires_grad=True)
    weight = (0.1 * torch.randn(vocab_size, channels)).requires_grad_()
    labels = torch.randint(0, vocab_size, (1, n_tokens))
    return x, weight, labels


def head_with_gradients(x, weight, labels, n_chunks: int, factor: float = 1.0):
    """Loss, and the gradients of `factor` times the loss."""
    loss = head_loss(x, weight, labels, n_chunks)
    return loss, *torch.autograd.grad(factor * loss, (x, weight))


@pytest.mark.parametrize("n_tokens", [32, 37])
@pytest.mark.parametrize("n_chunks", [2, 5, 37])
@pytest.mark.parametrize("ignored", [False, True])
def test_chunked_head_equals_the_plain_one(n_tokens, n_chunks, ignored):
    x, weight, labels = head_inputs(n_tokens)
    if ignored:
        labels[0, ::3] = -100
    plain = F.cross_entropy(F.linear(x, weight).flatten(0, 1), labels.flatten())
    expected = torch.autograd.grad(3 * plain, (x, weight))
    loss, *gradients = head_with_gradients(x, weight, labels, n_chunks, factor=3)
    torch.testing.assert_close(loss, plain, rtol=2e-7, atol=0)
    torch.testing.assert_close(gradients[0], expected[0], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(gradients[1], expected[1], rtol=1e-5, atol=1e-8)
    with torch.no_grad():
        torch.testing.assert_close(head_loss(x, weight, labels, n_chunks), plain.detach())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("n_tokens", [256, 250])
def test_chunked_head_gives_hidden_states_the_same_gradient(precision, n_tokens):
    """To the bit (rows of a matmul do not know of each other); the weight's is summed in another
    order, which float32 sees in its last digits and bfloat16 in its own."""
    x, weight, labels = head_inputs(n_tokens, channels=64)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        plain, *expected = head_with_gradients(x, weight, labels, 1)
        chunked, *found = head_with_gradients(x, weight, labels, 4)
    torch.testing.assert_close(chunked, plain, rtol=2e-7, atol=0)
    assert torch.equal(found[0], expected[0])
    error = ((found[1] - expected[1]).norm() / expected[1].norm()).item()
    assert error < (1e-6 if precision == "fp32" else 4e-3)


def test_chunked_head_with_a_grad_scaler():
    """The scaler's factor comes in backward, when the head's gradients are made already."""
    gradients = []
    for dtype in (torch.float32, torch.float16):
        model = tiny(loss_chunks=4)
        ids = random_ids(4, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
        with torch.autocast("cpu", dtype, enabled=dtype == torch.float16, cache_enabled=False):
            loss = model(ids, ids)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradients.append(model.token_embedding.weight.grad)
    exact, scaled = gradients
    assert ((scaled - exact).norm() / exact.norm()).item() < 5e-3


def test_chunked_head_in_float16_keeps_small_gradients():
    """A token that never is the label gets gradients of p / N: nearly nothing in float16."""
    x, weight, labels = head_inputs(1024, vocab_size=4096)
    labels %= 100
    exact = head_with_gradients(x, weight, labels, 1)[2][100:]
    with torch.autocast("cpu", torch.float16):
        gradient = head_with_gradients(x, weight, labels, 8)[2][100:]
    assert ((gradient - exact).norm() / exact.norm()).item() < 0.01


def test_how_many_chunks():
    """As few as keep a chunk's logits within 2**23 elements; never more than there are tokens."""
    assert count_chunks(768, 1024) == 1 == count_chunks(8192, 1024)
    assert count_chunks(8193, 1024) == 2
    assert count_chunks(2 * 1024, 50257) == 13 and count_chunks(12 * 1024, 50257) == 74
    assert count_chunks(3, 2**23) == 3 == count_chunks(3, 2**24)
    assert [count_chunks(10, 61, asked) for asked in (1, 4, 11)] == [1, 4, 10]


def tied_gradients(loss_chunks: int, forwards: int = 1) -> dict[str, torch.Tensor]:
    model = tiny(loss_chunks=loss_chunks)
    batches = [random_ids(4, 16) for _ in range(forwards)]
    sum(model(ids, ids.roll(-1, 1)) * (i + 1) for i, ids in enumerate(batches)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("forwards", [1, 2])
def test_the_tied_weight_gets_the_gradients_of_both_its_uses(forwards):
    expected, found = (tied_gradients(chunks, forwards) for chunks in (1, 4))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss_chunks", [1, 4])
def test_slices_of_the_embeddings_gradient_change_no_bit(loss_chunks, monkeypatch):
    whole = tied_gradients(loss_chunks)
    monkeypatch.setattr("memory.head.CHUNK", 300)  # of 61 * 32
    sliced = tied_gradients(loss_chunks)
    assert all(torch.equal(whole[name], sliced[name]) for name in whole)


def test_backward_twice_is_an_error_not_a_wrong_gradient():
    ids = random_ids(4, 16)
    loss = tiny(loss_chunks=4)(ids, ids)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- sampling


def test_generate_extends_beyond_the_context_and_restores_the_mode():
    model = tiny(dropout=0.5).train()
    out = model.generate(random_ids(2, 3), max_new_tokens=20)
    assert out.shape == (2, 23)
    assert model.training


def test_generate_is_greedy_at_temperature_zero():
    model, ids = tiny(), random_ids(1, 4)
    out = model.generate(ids, max_new_tokens=1, temperature=0.0)
    assert out[0, -1] == model.eval()(ids)[0, -1].argmax()


def test_top_k_and_top_p_only_draw_what_they_may():
    from model import sample

    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))

    def drawn(**limits):
        settings = {"temperature": 1.0, "top_k": None, "top_p": None} | limits
        return {sample(logits, **settings).item() for _ in range(300)}

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.7) == {0, 1}  # 0.5 is not yet 0.7: the second is in, the third is not
    assert drawn(top_p=0.4) == {0}
    assert drawn(top_k=99) == {0, 1, 2, 3}
