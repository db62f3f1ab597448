"""Compute the memory of a training step by formulas, which explain the figures that planner/step.py
gets from a simulation.
Letters: a micro-batch has B sequences of T tokens, so N = B T tokens. V: size of the vocabulary,
L: layers (blocks), C: channels (d_model), F: channels inside the MLP (d_ff), H: heads.
"""

import math

import torch

from memory import POLICIES, recompute_plan_of_config
from memory.head import VOCAB_MULTIPLE, count_chunks, softmax_slice_rows, weight_rows_per_addmm
from model import MiniGPTConfig


def closed_form_bytes_by_part(
    config: MiniGPTConfig,
    batch_size: int,
    seq_len: int,
    precision: torch.dtype,
) -> dict[str, int]:
    """Return the bytes of each part of a training step, the same that `Planner` counts.

    `precision`: dtype of autocast; float32: no autocast. In the formulas, a is the bytes per
    element of an activation: 2 under autocast, else 4. T_max is max_position_embeddings.
    (`state_bytes` in shards.py adds the optimizer's state, such as 8 P for AdamW's moments.)

    parameters  4 P, where P = (V + T_max) C + L (4 C^2 + 2 C F + 9 C + F) + 2 C
    gradients   4 P
    blocks      for each block the bytes of the tensors that its policy keeps (memory/policies.py);
                `sizes` in the code below has the bytes of each tensor
    head        with chunks of n tokens, the sum of:
                - 4 V C for the gradient of the weight, 4 N C for the gradient of the head's input
                - 13 n for the labels and losses of one chunk, a V n for its logits
                - under autocast, 2 V C for a copy of the weight, 2 n C for a copy of a chunk's
                  input. Under autocast, V is rounded up to a multiple of 64 in this copy of the
                  weight and in the logits
                - the largest of these three, which exist one after the other:
                  - 4 r for the log-likelihoods of a slice of r tokens, and under autocast 4 V r
                    for the slice's float32 logits
                  - under autocast, at most 2^23 for the gradient of some rows of the weight (on
                    CUDA from torch 2.11 nothing)
                  - a n C for the gradient of the chunk's input
                with all tokens at once (loss_chunks=1): 12 V N, and under autocast 2 V C + 2 N C
                for the copies

    The peak of a step is not the sum of these parts, because backward frees activations while it
    makes gradients.

    Sources: Korthikanti et al., 2022, section 4, have 34 N C bytes for a block with F = 4 C in
    float16 with both dropout masks, and 5 H T N bytes for attention scores. Fused attention (Dao et
    al., 2022) does not keep the scores. In this project a block without masks takes 36 N C bytes,
    because autocast keeps the residual stream in float32. Rajbhandari et al., 2020, section 3.1,
    have 16 P bytes for parameters, gradients and moments. Liu et al., 2025 (arXiv 2502.16982),
    section 2.3: Muon stores half as much as AdamW.
    """
    C, F, H = config.d_model, config.d_ff, config.n_heads
    N, amp = batch_size * seq_len, precision != torch.float32
    a = 2 if amp else 4
    P = count_parameters(config)

    # Bytes per element of autocast's copy of a weight, which is kept with the layer's input.
    copies = 2 * amp
    sizes = {
        "x": 4 * N * C,
        "ln_1": a * N * C + 8 * N + copies * 3 * C * C,  # 8 N: mean and 1 / deviation of x
        "qkv": 3 * a * N * C,
        "attention": a * N * C + 4 * N * H,  # 4 N H: the softmax's normaliser
        "c_proj_cast": copies * C * C,
        "mask": 2 * N * C * bool(config.dropout),  # two masks, if dropout is fused
        "x2": 4 * N * C,
        "ln_2": a * N * C + 8 * N + copies * C * F,
        "c_fc": a * N * F,
        "gelu": a * N * F + copies * C * F,
        "results": 2 * a * N * C,
    }
    kept_bytes = 0
    for policy, _ in recompute_plan_of_config(config).group_policies_and_sizes:
        kept_bytes += sum(sizes[name] for name in POLICIES[policy].saved_tensor_names.split())
    return {
        "parameters": 4 * P,
        "gradients": 4 * P,
        "blocks": kept_bytes,
        "head": head_bytes(config, N, precision),
    }


def count_parameters(config: MiniGPTConfig) -> int:
    """Return the number of parameters, which is P in `closed_form_bytes_by_part`."""
    V, C, F = config.vocab_size, config.d_model, config.d_ff
    P = (V + config.max_position_embeddings) * C + 2 * C
    return P + config.n_layers * (4 * C * C + 2 * C * F + 9 * C + F)


def head_bytes(
    config: MiniGPTConfig, n_tokens: int, precision: torch.dtype, in_rows: bool = True
) -> int:
    """Return the bytes of the head (the last matmul and the loss) for `n_tokens` tokens: the part
    "head" in the result of `closed_form_bytes_by_part`.

    `in_rows`: under autocast, the gradient of the weight is made some rows at a time (not on CUDA
    from torch 2.11).
    """
    V, C, amp = config.vocab_size, config.d_model, precision != torch.float32
    if config.loss_chunks == 1:
        return 12 * V * n_tokens + 2 * amp * (V * C + n_tokens * C)
    a = 2 if amp else 4
    n = math.ceil(n_tokens / count_chunks(n_tokens, V, config.loss_chunks, a))
    r = softmax_slice_rows(n, V)
    padded = V + (-V % VOCAB_MULTIPLE if amp else 0)
    softmax = 4 * r + 4 * V * r * amp
    some_rows = 2 * C * min(weight_rows_per_addmm(C), V) * amp * in_rows
    transient = max(softmax, a * n * C, some_rows)
    copies = 2 * (padded + n) * C * amp
    return 4 * (V + n_tokens) * C + 13 * n + copies + a * padded * n + transient
