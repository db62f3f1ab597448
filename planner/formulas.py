"""Memory and FLOPs of a training step as formulas: to understand what planner/step.py counts.

Letters: B sequences of T tokens a micro-batch, N = B T; V vocabulary, L layers, C channels
(d_model), F channels inside the MLP (d_ff), H heads.
"""

import math

import torch

from memory import POLICIES, RECOMPUTE_POLICIES, recompute_plan
from memory.head import VOCAB_MULTIPLE, addmm_rows, count_chunks, softmax_slice_rows
from memory.policies import sizes_of_chunks
from model import MiniGPTConfig


def closed_form(
    config: MiniGPTConfig,
    batch_size: int,
    seq_len: int,
    precision: torch.dtype,
    optimizer: str = "adamw",
    moments: torch.dtype = torch.float32,
) -> dict[str, int]:
    """Bytes of the parts of a training step; `Planner` finds the same by counting.

    a = 2 is the size of an activation under autocast, else a = 4; m that of a moment.

    parameters  4 P, where P = (V + T_max) C + L (4 C^2 + 2 C F + 9 C + F) + 2 C
    gradients   4 P
    optimizer   2 m P for AdamW's two moments, and a step counter of 4 for each tensor; Muon has one
                moment, and no counter, for the matrices of the blocks, L (4 C^2 + 2 C F) of P
    blocks      of each block what its policy keeps (memory/policies.py), by `sizes` below
    head        in chunks of n tokens: gradients of the weight 4 V C and of its input 4 N C, the
                chunk's labels and losses 13 n and logits a V n, and one after the other
                - in slices of r tokens what it returns 4 r, and under autocast float32 logits 4 V r
                - under autocast the gradient of some rows of the weight, at most 2^23
                - the gradient of the chunk's input a n C
                Autocast also makes copies of the weight 2 V C and of the chunk's input 2 n C, and
                rounds V up to a multiple of 64.
                At once (loss_chunks=1) 12 V N, and autocast's copies 2 V C + 2 N C

    Their sum is not the peak: gradients come while activations go.

    Sources: Korthikanti et al., 2022, section 4, has 34 N C for a block with F = 4 C in float16
    with both masks, and 5 H T N for attention scores, which fused attention (Dao et al., 2022) does
    not keep; autocast's float32 residual stream makes it 36 N C without masks. Rajbhandari et al.,
    2020, section 3.1, has the 16 P; Liu et al., 2025 (arXiv 2502.16982), section 2.3, that Muon
    stores half of what AdamW does.
    """
    C, F, H = config.d_model, config.d_ff, config.n_heads
    N, amp = batch_size * seq_len, precision != torch.float32
    a = 2 if amp else 4
    P = count_parameters(config)

    copies = 2 * amp  # bytes of an element of a weight's copy, which comes with a layer's input
    sizes = {
        "x": 4 * N * C,
        "ln_1": a * N * C + 8 * N + copies * 3 * C * C,  # with its mean and deviation
        "qkv": 3 * a * N * C,
        "attention": a * N * C + 4 * N * H,  # with the softmax's normaliser
        "c_proj": copies * C * C,
        "mask": 2 * N * C * bool(config.dropout),  # of both halves, where dropout is fused
        "x2": 4 * N * C,
        "ln_2": a * N * C + 8 * N + copies * C * F,
        "c_fc": a * N * F,
        "gelu": a * N * F + copies * C * F,
        "results": 2 * a * N * C,
    }
    kept = 0
    for policy, _ in recompute_plan(config).block_groups:
        kept += sum(sizes[name] for name in POLICIES[policy].keeps.split())
    return {
        "parameters": 4 * P,
        "gradients": 4 * P,
        "optimizer": optimizer_bytes(config, optimizer, moments),
        "blocks": kept,
        "head": head_bytes(config, N, precision),
    }


def count_parameters(config: MiniGPTConfig) -> int:
    """P of `closed_form`."""
    V, C, F = config.vocab_size, config.d_model, config.d_ff
    P = (V + config.max_position_embeddings) * C + 2 * C
    return P + config.n_layers * (4 * C * C + 2 * C * F + 9 * C + F)


def optimizer_bytes(config: MiniGPTConfig, optimizer: str, moments: torch.dtype) -> int:
    """What the optimizer stores from step to step; its names are those of --optimizer."""
    C, F, L = config.d_model, config.d_ff, config.n_layers
    stored, counters = 2 * count_parameters(config), 4 + 12 * L
    if optimizer == "muon":
        stored, counters = stored - L * (4 * C * C + 2 * C * F), counters - 4 * L
    return moments.itemsize * stored + 4 * counters


def state_bytes(
    config: MiniGPTConfig, optimizer: str = "adamw", moments: torch.dtype = torch.float32
) -> int:
    """Weights, gradients and moments: no step takes less, whatever it recomputes."""
    return 8 * count_parameters(config) + optimizer_bytes(config, optimizer, moments)


def head_bytes(config: MiniGPTConfig, n_tokens: int, precision: torch.dtype) -> int:
    """The head's part of `closed_form`."""
    V, C, amp = config.vocab_size, config.d_model, precision != torch.float32
    if config.loss_chunks == 1:
        return 12 * V * n_tokens + 2 * amp * (V * C + n_tokens * C)
    a = 2 if amp else 4
    n = math.ceil(n_tokens / count_chunks(n_tokens, V, config.loss_chunks, a))
    r = softmax_slice_rows(n, V)
    padded = V + (-V % VOCAB_MULTIPLE if amp else 0)
    softmax = 4 * r + 4 * V * r * amp
    some_rows = 2 * C * min(addmm_rows(C), V) * amp
    passing = max(softmax, a * n * C, some_rows)
    copies = 2 * (padded + n) * C * amp
    return 4 * (V + n_tokens) * C + 13 * n + copies + a * padded * n + passing


def flops_per_token(
    config: MiniGPTConfig, seq_len: int, compiled: bool = False
) -> tuple[float, float]:
    """FLOPs of the matrix products of one training step, per token: (needed, replayed).

    Needed: forward is 2 for each weight, the head included, and 2 T C a block for the two products
    of causal attention, of which half are masked; backward is twice forward (Chowdhery et al.,
    2022, appendix B, without the half). Replayed: see the table in memory/policies.py; the last
    matmul of a region is not, as its result is not needed; but with dropout, if the region has the
    block's last mask, too (`full`, `qkv`, `sdpa`), and with `full` of `compiled` blocks, which run
    to their end.

    Wherever this project speaks of FLOPs, it is of these: a whole step's matrix products,
    attention's included, in units of `needed`. `full` at GPT-2 small, T = 1,024: 1.17; with dropout
    1.24.
    """
    C, F = config.d_model, config.d_ff
    linear = 2 * C * F  # c_fc, and the MLP's c_proj
    flops = {"c_attn": 6 * C * C, "attention": 2 * seq_len * C, "c_proj": 2 * C * C, "c_fc": linear}
    before_last = sum(sizes_of_chunks(seq_len, F, config.mlp_chunks)[:-1]) / max(seq_len, 1)
    replayed: float = 0
    for policy, blocks in recompute_plan(config).block_groups:
        keeps, twice = (names.split() for names in POLICIES[policy][:2])
        # In a nested group each block has a replay of its own, and all but the last one are in the
        # group's. Compiled, a block runs to its end; and in a group's replay all do but the last.
        nested = recompute_plan(config).nested and blocks > 1
        runs = 2 * blocks - 1 if nested else blocks
        # A replay of the block's end makes the second mask, behind the last matmul. (Compiled in
        # one piece with its policy, a mask needs no matmul; but there a whole block is not cut.)
        to_the_end = policy == "full" if compiled else config.dropout > 0
        stopped = 0 if to_the_end else blocks if nested else 1
        last_matmuls = linear * (runs - stopped) * ("c_fc" in twice and "mask" not in keeps)
        replayed += runs * sum(flops[name] for name in twice) + last_matmuls
        if config.mlp_chunks != 1 and POLICIES[policy].supports_mlp_chunks and policy != "mlp":
            # A chunk is in a checkpoint inside of another one, whose replay does both layers of all
            # but the last, and stops there.
            replayed += linear * (blocks - stopped) + 2 * linear * before_last * stopped
    forward = config.n_layers * (sum(flops.values()) + linear) + 2 * config.vocab_size * C
    return 3 * forward, replayed


def recompute_cost(config: MiniGPTConfig, seq_len: int) -> tuple[float, int]:
    """Orders ways to recompute: by FLOPs replayed, then by blocks that replay and how much."""
    replays = sum(map(RECOMPUTE_POLICIES.index, recompute_plan(config).policies))
    return flops_per_token(config, seq_len)[1], replays
