"""Compute the expected results of a training step, slowly and independently of the project's code.

This file has three parts: a GPT-2 that uses plain autograd, the optimizer AdamW, and a sampler of
batches that uses Python lists. It imports nothing of the project and nothing of torch.nn. An
embedding is written as tensor indexing. LayerNorm, GELU and cross-entropy are the formulas of the
papers.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Weights = dict[str, Tensor]


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / ((x * x).mean(-1, keepdim=True) + 1e-5).sqrt() * gain + bias


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gpt_logits(
    w: Weights,
    ids: Tensor,
    n_layers: int,
    n_heads: int,
    drop: Callable[[Tensor], Tensor] = lambda x: x,
    drop_scores: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Return the logits (B, T, V) of ids (B, T). `w`: weights, with their names in a snapshot.
    `drop`: dropout of the embeddings, and of a block's attention result and MLP result.
    `drop_scores`: dropout of the attention weights (B, T, T) of a head."""
    T = ids.size(1)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    x = drop(w["token_embedding.weight"][ids] + w["position_embedding.weight"][:T])
    for i in range(n_layers):
        b = {key.removeprefix(f"blocks.{i}."): p for key, p in w.items() if f"blocks.{i}." in key}
        normed = layer_norm(x, b["ln_1.weight"], b["ln_1.bias"])
        qkv = normed @ b["attn.c_attn.weight"].T + b["attn.c_attn.bias"]
        heads = []
        for q, k, v in zip(*(part.chunk(n_heads, -1) for part in qkv.chunk(3, -1)), strict=True):
            scores = q @ k.transpose(1, 2) / math.sqrt(q.size(-1))
            heads.append(drop_scores(scores.masked_fill(future, -math.inf).softmax(-1)) @ v)
        x = x + drop(torch.cat(heads, -1) @ b["attn.c_proj.weight"].T + b["attn.c_proj.bias"])
        normed = layer_norm(x, b["ln_2.weight"], b["ln_2.bias"])
        wide = gelu(normed @ b["mlp.c_fc.weight"].T + b["mlp.c_fc.bias"])
        x = x + drop(wide @ b["mlp.c_proj.weight"].T + b["mlp.c_proj.bias"])
    return layer_norm(x, w["ln_f.weight"], w["ln_f.bias"]) @ w["token_embedding.weight"].T


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats over the labels that are not -100."""
    counts = labels >= 0
    right = logits[counts].gather(-1, labels[counts][:, None])[:, 0]
    return (logits[counts].logsumexp(-1) - right).mean()


def loss_and_gradients(
    weights: Weights, batches: list[tuple[Tensor, Tensor]], n_layers: int, n_heads: int
) -> tuple[list[float], Weights]:
    """Return the losses of the micro-batches, and the gradients of the mean of these losses."""
    w = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    losses = [mean_loss(gpt_logits(w, ids, n_layers, n_heads), labels) for ids, labels in batches]
    (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
    return [loss.item() for loss in losses], {name: p.grad for name, p in w.items()}


class AdamW:
    """AdamW of Loshchilov and Hutter (2019), algorithm 2, with clipping: before an update, the norm
    of all gradients is limited to `limit`. `decay`: weight decay of the matrices."""

    def __init__(self, weights: Weights, decay: float, limit: float):
        self.decay, self.limit, self.t = decay, limit, 0
        self.m = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.v = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    def step(self, weights: Weights, gradients: Weights, lr: float) -> float:
        """Update the dict `weights`. Return the norm of all gradients before clipping."""
        self.t += 1
        norm = math.sqrt(sum((g * g).sum().item() for g in gradients.values()))
        for name, weight in weights.items():
            g = gradients[name] * min(1, self.limit / (norm + 1e-6))
            self.m[name] = 0.9 * self.m[name] + 0.1 * g
            self.v[name] = 0.95 * self.v[name] + 0.05 * g * g
            m, v = self.m[name] / (1 - 0.9**self.t), self.v[name] / (1 - 0.95**self.t)
            decay = self.decay if weight.dim() > 1 else 0.0
            weights[name] = weight - lr * decay * weight - lr * m / (v.sqrt() + 1e-8)
        return norm


def windows(tokens: list[int], T: int) -> list[list[int]]:
    """Return the windows of T + 1 tokens. The last token of a window is the first token of the next
    window."""
    return [tokens[start : start + T + 1] for start in range(0, len(tokens) - T, T)]


def training_batch(
    all_windows: list[list[int]], B: int, seed: int, number: int
) -> tuple[Tensor, Tensor]:
    """Return the inputs and the labels, both (B, T), of micro-batch `number`. Each epoch has its
    own random order of the windows."""
    n, rows = len(all_windows), []
    for sample in range(number * B, (number + 1) * B):
        order = np.random.default_rng([seed, sample // n]).permutation(n)
        rows.append(all_windows[order[sample % n]])
    return shifted(rows)


def shifted(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    return torch.tensor([row[:-1] for row in rows]), torch.tensor([row[1:] for row in rows])
