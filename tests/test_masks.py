"""A replay draws the masks of forward, whoever draws them: a GPU's operators, another generator."""

from functools import partial

import pytest
import torch
from harness import gpu_operators
from test_model import random_ids, tiny
from test_recompute import autocast
from torch import Tensor

from model import RECOMPUTE_POLICIES

pytestmark = pytest.mark.usefixtures("everything_travels")

MEMORY = [
    *({"recompute": policy} for policy in RECOMPUTE_POLICIES[1:]),
    *({"recompute": f"{policy}+offload"} for policy in RECOMPUTE_POLICIES[1:]),
    {"recompute": "selective:1,sdpa"},
    {"recompute": "full:1,attn"},
    {"recompute": "full/2"},
    {"recompute": "full/2+offload"},
]


def step(
    generator: torch.Generator, precision: str, compiler: str | None = None, **changes
) -> list[Tensor]:
    """Losses of two micro-batches, all gradients, and what is drawn next."""
    model, ids = tiny(n_layers=3, **changes).train(), random_ids(2, 16)
    if compiler:
        torch._dynamo.reset()
        for module in (*model.blocks, model.add):
            module.compile(backend=compiler)
    generator.manual_seed(7)
    losses = []
    for _ in range(2):
        with autocast(precision):
            losses.append(model(ids, ids.roll(-1, 1)))
        losses[-1].backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*losses, *gradients, torch.rand(1, generator=generator)]


@pytest.mark.parametrize(
    ("device", "precision", "dropout"),
    [("cuda", "fp32", 0.1), ("cuda", "bf16", 0.1), ("cuda", "bf16", 0.0), ("mps", "fp32", 0.1)],
)
def test_no_policy_changes_a_bit(device, precision, dropout):
    with getattr(gpu_operators, device)() as generator:
        none = step(generator, precision, dropout=dropout)
        for memory in MEMORY:
            same = step(generator, precision, dropout=dropout, **memory)
            assert all(map(torch.equal, none, same)), memory


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["selective", "sdpa", "attn"])  # what is in the compiled code
def test_no_policy_changes_a_bit_of_what_is_compiled(policy):
    """By the compiler's own rules for what is drawn in a replay."""
    run = partial(step, precision="fp32", compiler="aot_eager_decomp_partition", dropout=0.1)
    with gpu_operators.cuda() as generator:
        assert all(map(torch.equal, run(generator), run(generator, recompute=policy)))


def test_the_stand_in_for_cuda_is_what_it_stands_for():
    """Without dropout: a CPU's own attention, and its gradients."""
    q, k, v = qkv = torch.randn(3, 2, 3, 8, 4).requires_grad_()
    own = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    with gpu_operators.cuda():
        other = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradients = [torch.autograd.grad(out.sin().sum(), qkv)[0] for out in (own, other)]
    torch.testing.assert_close(own, other)
    torch.testing.assert_close(*gradients)
