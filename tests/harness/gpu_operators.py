"""Draw random numbers on a CPU as another device does.

On a CPU dropout consists of small operators, and attention with dropout of a dozen, `bernoulli_`
among them. So a function that replays a block sees each of them draw. On CUDA each is one operator.
A replay that reuses attention's result draws nothing there, so every later mask would differ.
`cuda` gives the CPU these CUDA operators, with their own autograd.

On MPS the operators are those of a CPU, but the numbers come from another generator, which torch's
checkpoint does not know: `mps`.

Both yield the generator that draws.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from memory import policies

aten = torch.ops.aten
FUNCTIONAL = "torch.nn.functional"


def drop(x: Tensor, p: float, generator: Generator) -> Tensor:
    return x * (torch.rand(x.shape, generator=generator) >= p) / (1 - p)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, *how: Any) -> Tensor:
    """Compute attention in float32. `how`: arguments of `drop`."""
    scores = q.float() @ k.float().mT / math.sqrt(q.size(-1))
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -math.inf)
    return drop(scores.softmax(dim=-1), *how) @ v.float()


def lay_out(x: Tensor, like: Tensor) -> Tensor:
    """Return x (B, H, T, D) stored in memory as (B, T, H, D), in the dtype of `like`."""
    return x.to(like.dtype).transpose(1, 2).contiguous().transpose(1, 2)


@torch.autocast("cpu", enabled=False)  # autocast does not act inside a kernel
def attention(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """Compute attention. It draws one number, a seed from which its backward makes the masks
    again."""
    seed, nothing = (torch.zeros((), dtype=torch.int64) for _ in range(2))
    if dropout_p > 0:
        seed.random_()
    generator, T = Generator().manual_seed(int(seed)), q.size(2)
    out = lay_out(attend(q, k, v, is_causal, dropout_p, generator), q)
    logsumexp = torch.zeros(q.shape[:3])
    return out, logsumexp, nothing, nothing, T, T, seed, nothing.clone(), nothing.clone()


@torch.autocast("cpu", enabled=False)
def attention_backward(grad, q, k, v, *kept, scale=None):
    *_, dropout_p, is_causal, seed, _ = kept
    generator = Generator().manual_seed(int(seed))
    run = lambda q, k, v: attend(q, k, v, is_causal, dropout_p, generator)  # noqa: E731
    _, vjp = torch.func.vjp(run, q, k, v)
    return tuple(map(lay_out, vjp(grad.float()), (q, k, v)))


def fused_attention(q, k, v, dropout_p=0.0, is_causal=False) -> Tensor:
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


def fused_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False):
    """Compute dropout as `F.dropout` does on CUDA: one operator for 0 < p < 1, for other p none."""
    return aten.native_dropout(x, p, True)[0] if training and 0 < p < 1 else x


@contextmanager
def cuda() -> Iterator[Generator]:
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("_scaled_dot_product_flash_attention", attention, "CPU")
    kernels.impl("_scaled_dot_product_flash_attention_backward", attention_backward, "CPU")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{FUNCTIONAL}.scaled_dot_product_attention", fused_attention)
            patch.setattr(f"{FUNCTIONAL}.dropout", fused_dropout)
            yield torch.default_generator
    finally:
        kernels._destroy()


@contextmanager
def mps() -> Iterator[Generator]:
    generator, real = Generator(), policies.default_generator

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False):
        return drop(x, p, generator) if training else x

    def of_mps(q, k, v, dropout_p=0.0, is_causal=False):
        return attend(q, k, v, is_causal, dropout_p, generator).to(v.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{FUNCTIONAL}.scaled_dot_product_attention", of_mps)
        patch.setattr(f"{FUNCTIONAL}.dropout", dropout)
        patch.setattr("torch.mps._get_default_mps_generator", lambda: generator)
        patch.setattr(policies, "default_generator", lambda device: real(torch.device("mps")))
        patch.setattr(policies, "checkpoint_loses_rng", lambda device: True)
        yield generator
