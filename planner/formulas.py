"""Memory and FLOPs of a training step as formulas, to understand what planner/step.py counts.

Letters: a micro-batch has B sequences of T tokens, N = B T tokens in all; V vocabulary, L layers,
C channels (d_model), F channels inside the MLP (d_ff), H heads.
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
    """Return the bytes of each part of a training step. `Planner` counts the same bytes.

    `precision`: dtype of autocast, or float32. `optimizer`: a name of --optimizer. `moments`: the
    dtype of its moments. Below, a is the bytes of an activation's element: 2 under autocast, else
    4. m is the bytes of a moment's element.

    parameters  4 P, where P = (V + T_max) C + L (4 C^2 + 2 C F + 9 C + F) + 2 C
    gradients   4 P
    optimizer   2 m P for AdamW's two moments, and a step counter of 4 bytes for each tensor. Muon
                has one moment, and no counter, for the matrices of the blocks: L (4 C^2 + 2 C F)
                of P
    blocks      for each block the tensors that its policy keeps (memory/policies.py): `sizes` below
    head        with chunks of n tokens: gradients of the weight 4 V C and of its input 4 N C, the
                labels and losses 13 n and the logits a V n of one chunk; and the largest of these
                three, which exist one after the other:
                - the results of a slice of r tokens 4 r, and under autocast its float32 logits
                  4 V r
                - under autocast the gradient of some rows of the weight, at most 2^23
                - the gradient of the chunk's input a n C
                Autocast also copies the weight 2 V C and the chunk's input 2 n C, and rounds V up
                to a multiple of 64.
                All tokens at once (loss_chunks=1): 12 V N, and autocast's copies 2 V C + 2 N C

    Their sum is not the peak: backward makes gradients while it frees activations.

    Sources: Korthikanti et al., 2022, section 4: 34 N C for a block with F = 4 C in float16 with
    both masks, and 5 H T N for attention scores. Fused attention (Dao et al., 2022) does not keep
    the scores. Without masks, but with autocast's float32 residual stream, a block has 36 N C.
    Rajbhandari et al., 2020, section 3.1: 16 P for parameters, gradients and moments. Liu et al.,
    2025 (arXiv 2502.16982), section 2.3: Muon stores half as much as AdamW.
    """
    C, F, H = config.d_model, config.d_ff, config.n_heads
    N, amp = batch_size * seq_len, precision != torch.float32
    a = 2 if amp else 4
    P = count_parameters(config)

    copies = (
        2 * amp
    )  # bytes of an element in autocast's copy of a weight: kept with the layer's input
    sizes = {
        "x": 4 * N * C,
        "ln_1": a * N * C + 8 * N + copies * 3 * C * C,  # and its mean and deviation
        "qkv": 3 * a * N * C,
        "attention": a * N * C + 4 * N * H,  # and the softmax's normaliser
        "c_proj": copies * C * C,
        "mask": 2 * N * C * bool(config.dropout),  # of both halves, if dropout is fused
        "x2": 4 * N * C,
        "ln_2": a * N * C + 8 * N + copies * C * F,
        "c_fc": a * N * F,
        "gelu": a * N * F + copies * C * F,
        "results": 2 * a * N * C,
    }
    kept_bytes = 0
    for policy, _ in recompute_plan(config).checkpoint_groups:
        kept_bytes += sum(sizes[name] for name in POLICIES[policy].saved_tensors.split())
    return {
        "parameters": 4 * P,
        "gradients": 4 * P,
        "optimizer": optimizer_bytes(config, optimizer, moments),
        "blocks": kept_bytes,
        "head": head_bytes(config, N, precision),
    }


def count_parameters(config: MiniGPTConfig) -> int:
    """Return the number of parameters: P of `closed_form`."""
    V, C, F = config.vocab_size, config.d_model, config.d_ff
    P = (V + config.max_position_embeddings) * C + 2 * C
    return P + config.n_layers * (4 * C * C + 2 * C * F + 9 * C + F)


def optimizer_bytes(config: MiniGPTConfig, optimizer: str, moments: torch.dtype) -> int:
    """Return the bytes that the optimizer keeps between steps: `optimizer` of `closed_form`.

    `optimizer`: a name of --optimizer. `moments`: the dtype of its moments.
    """
    C, F, L = config.d_model, config.d_ff, config.n_layers
    stored, counters = 2 * count_parameters(config), 4 + 12 * L
    if optimizer == "muon":
        stored, counters = stored - L * (4 * C * C + 2 * C * F), counters - 4 * L
    return moments.itemsize * stored + 4 * counters


def state_bytes(
    config: MiniGPTConfig, optimizer: str = "adamw", moments: torch.dtype = torch.float32
) -> int:
    """Return the bytes of weights, gradients and optimizer: every step takes at least these.

    No recompute policy reduces them.
    """
    return 8 * count_parameters(config) + optimizer_bytes(config, optimizer, moments)


def head_bytes(config: MiniGPTConfig, n_tokens: int, precision: torch.dtype) -> int:
    """Return the head's bytes for `n_tokens` tokens: `head` of `closed_form`."""
    V, C, amp = config.vocab_size, config.d_model, precision != torch.float32
    if config.loss_chunks == 1:
        return 12 * V * n_tokens + 2 * amp * (V * C + n_tokens * C)
    a = 2 if amp else 4
    n = math.ceil(n_tokens / count_chunks(n_tokens, V, config.loss_chunks, a))
    r = softmax_slice_rows(n, V)
    padded = V + (-V % VOCAB_MULTIPLE if amp else 0)
    softmax = 4 * r + 4 * V * r * amp
    some_rows = 2 * C * min(addmm_rows(C), V) * amp
    transient = max(softmax, a * n * C, some_rows)
    copies = 2 * (padded + n) * C * amp
    return 4 * (V + n_tokens) * C + 13 * n + copies + a * padded * n + transient


def flops_per_token(
    config: MiniGPTConfig, seq_len: int, compiled: bool = False
) -> tuple[float, float]:
    """Return the FLOPs of a training step's matrix products, per token: (needed, recomputed).

    A multiply-add is 2 FLOPs. `compiled`: the blocks are compiled (--compile).

    Needed: forward takes 2 for each element of a weight matrix, the head's included, and 2 T C a
    block for the two products of causal attention, without the masked half. Backward takes twice as
    many as forward. (Chowdhery et al., 2022, appendix B, which counts the masked half, too.)

    Recomputed: see `POLICIES` in memory/policies.py. The last matmul of a checkpointed region is
    not recomputed, because backward does not need its result. There are two exceptions: with
    dropout a region that has the block's last mask (`full`, `qkv`, `sdpa`), and `full` with
    `compiled` blocks, which run to their end.

    In this project FLOPs always mean these: the products of a whole step, attention's included, in
    units of `needed`. `full` with GPT-2 small and T = 1,024 takes 1.17, with dropout 1.24.
    """
    C, F = config.d_model, config.d_ff
    linear = 2 * C * F  # of c_fc, and of the MLP's c_proj
    flops = {"c_attn": 6 * C * C, "attention": 2 * seq_len * C, "c_proj": 2 * C * C, "c_fc": linear}
    before_last = sum(sizes_of_chunks(seq_len, F, config.mlp_chunks)[:-1]) / max(seq_len, 1)
    recomputed: float = 0
    for policy, blocks in recompute_plan(config).checkpoint_groups:
        keeps, matmuls = (names.split() for names in POLICIES[policy][:2])
        # A group's recomputation runs all its blocks to their ends, but stops early in the last.
        # In a nested group it leaves out the last block; then each block recomputes itself alone,
        # and stops early. With `full` a compiled block never stops early.
        nested = recompute_plan(config).nested and blocks > 1
        runs = 2 * blocks - 1 if nested else blocks
        # With dropout a recomputation makes the second mask, which comes after the last matmul. (If
        # a policy is compiled with its block, the mask needs no matmul. But `full` is outside of
        # the compiled block, so it runs the whole block.)
        to_the_end = policy == "full" if compiled else config.dropout > 0
        stopped = 0 if to_the_end else blocks if nested else 1
        last_matmuls = linear * (runs - stopped) * ("c_fc" in matmuls and "mask" not in keeps)
        recomputed += runs * sum(flops[name] for name in matmuls) + last_matmuls
        if config.mlp_chunks != 1 and POLICIES[policy].supports_mlp_chunks and policy != "mlp":
            # A chunk's checkpoint is inside the block's. The block's recomputation runs both layers
            # of all chunks but the last, and stops there. Then each chunk recomputes itself.
            recomputed += linear * (blocks - stopped) + 2 * linear * before_last * stopped
    forward = config.n_layers * (sum(flops.values()) + linear) + 2 * config.vocab_size * C
    return 3 * forward, recomputed


def recompute_cost(config: MiniGPTConfig, seq_len: int) -> tuple[float, int]:
    """Return a key that sorts policies by cost: (recomputed FLOPs per token, recomputed parts).

    The second value breaks ties: the sum over blocks of their policy's index in RECOMPUTE_POLICIES.
    """
    replays = sum(map(RECOMPUTE_POLICIES.index, recompute_plan(config).policies))
    return flops_per_token(config, seq_len)[1], replays
