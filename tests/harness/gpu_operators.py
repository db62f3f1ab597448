"""Make a CPU draw the random numbers of dropout as a CUDA or an MPS device does.

On a CPU dropout runs as several small operators. Attention with dropout runs as about a dozen small
operators. One of these operators, `bernoulli_`, draws the mask, so a replay of a block draws the
mask again. On CUDA dropout is one operator, and attention is one operator, too. A replay that
reuses the result of attention does not run attention's operator, so this operator draws no random
number. Then every later mask of the replay would differ from forward's mask. `cuda` lets a CPU run
these two CUDA operators, with their own backward.

On MPS the operators are the same as on a CPU. But the random numbers come from another generator,
whose state torch's checkpoint does not save. `mps` makes the CPU use such a generator.

Both context managers yield the generator that draws the masks.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from memory import gpt, policies

aten = torch.ops.aten
FUNCTIONAL = "torch.nn.functional"


def drop(x: Tensor, p: float, generator: Generator) -> Tensor:
    return x * (torch.rand(x.shape, generator=generator) >= p) / (1 - p)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, *how: Any) -> Tensor:
    """Compute attention in float32. `how`: the arguments `p` and `generator` of `drop`."""
    scores = q.float() @ k.float().mT / math.sqrt(q.size(-1))
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -math.inf)
    return drop(scores.softmax(dim=-1), *how) @ v.float()


def lay_out(x: Tensor, like: Tensor) -> Tensor:
    """Return x (B, H, T, D) stored in memory as (B, T, H, D), in the dtype of `like`."""
    return x.to(like.dtype).transpose(1, 2).contiguous().transpose(1, 2)


@torch.autocast("cpu", enabled=False)  # inside of a kernel there is no autocast
def attention(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """Compute attention as the fused operator of CUDA does. The operator draws one number, a seed.
    The operator's backward makes the same mask again from this seed."""
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
    """Compute dropout as `F.dropout` does on CUDA: with one operator if 0 < p < 1. For another p,
    return x without running an operator."""
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
        for module in (policies, gpt):
            patch.setattr(module, "checkpoint_loses_rng", lambda device: True)
        yield generator
