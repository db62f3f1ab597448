"""Recompute changes what is kept, and nothing else: not one bit of the result."""

import pytest
import torch
from test_model import random_ids, tiny

from memory import kept_for_backward

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}


def autocast(precision: str):
    dtype = PRECISIONS[precision]
    return torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False)


def train(policy: str, precision: str, steps: int = 20, **changes):
    """Losses, gradients of the last step, and weights after training with dropout 0.1."""
    model = tiny(recompute=policy, dropout=0.1, **changes).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        ids = random_ids(2, 16)
        with autocast(precision):
            loss = model(ids, ids.roll(-1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = [p.grad for p in model.parameters()]
    return losses, gradients, list(model.parameters())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("changes", [{}, {"recompute_layers": 1}, {"loss_chunks": 4}])
def test_full_equals_none_to_the_bit(precision, changes):
    losses, gradients, weights = train("none", precision, loss_chunks=changes.get("loss_chunks", 0))
    losses_full, gradients_full, weights_full = train("full", precision, **changes)
    assert losses == losses_full
    assert all(map(torch.equal, gradients, gradients_full))
    assert all(map(torch.equal, weights, weights_full))


def kept(policy: str, mode: str = "train", **changes) -> int:
    model, ids = tiny(recompute=policy, loss_chunks=1, **changes), random_ids(4, 16)
    model.train(mode == "train")
    return kept_for_backward(model, lambda: model(ids, ids))


def test_full_keeps_one_tensor_a_block():
    """By the closed form: 64 bsh + 4bsa + 16bs of float32 tensors a block become 4 bsh."""
    b, s, h, a, layers = 4, 16, 32, 2, 2
    bsh = b * s * h
    # 64 at d_ff = 4 h: 2 LayerNorm inputs, 2 outputs, q k v, attention output, and twice d_ff.
    everything = 4 * (8 * bsh + 2 * b * s * 64) + 4 * b * s * a + 16 * b * s
    assert kept("none") - kept("full") == layers * (everything - 4 * bsh)


def test_recompute_layers_is_in_between():
    none, one, both = kept("none"), kept("full", recompute_layers=1), kept("full")
    assert none - one == one - both > 0
    assert kept("full", recompute_layers=0) == none


def test_only_active_in_training():
    assert kept("full", mode="eval") == kept("none", mode="eval")


def test_counting_keeps_nothing():
    """The count must not hold what it counts: that is what makes it safe on a full card."""
    import weakref

    model, ids, alive = tiny(), random_ids(4, 16), []
    model.blocks[0].register_forward_hook(
        lambda _module, _inputs, output: alive.append(weakref.ref(output))
    )
    assert kept_for_backward(model, lambda: model(ids, ids)) > 0
    assert alive[0]() is None


def test_bytes_of_autocast_copies_count():
    model, ids = tiny(loss_chunks=1), random_ids(1, 1)
    with autocast("bf16"):
        with_copies = kept_for_backward(model, lambda: model(ids, ids))
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    matrices -= model.position_embedding.weight.numel()  # looked up, not multiplied
    assert with_copies > 2 * matrices
