"""MiniGPT: what a tensor passes through, from token ids to the loss.

The architecture is GPT-2's (Radford et al., 2019): learned positions, pre-LayerNorm blocks, tanh
GELU, biases, and a head that shares its weight with the token embedding.

Start at `MiniGPT.forward`: it is the whole model, and the line that this project is about stands in
it, the call of `checkpoint`. The file needs only torch, and can be copied alone. The folder memory/
beside it adds techniques that keep less for backward, made of the parts of a block that stand here.

Shapes: B batch, T time (position), C channels (d_model), H heads, D = C / H, V vocabulary.
"""

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# The KV cache of a text: of each Attention, keys and values (B, H, tokens so far, D). {}: empty.
Past = dict[nn.Module, tuple[Tensor, Tensor]] | None
TECHNIQUES: Any = importlib.util.find_spec("memory") and importlib.import_module("memory")


@dataclass(frozen=True)
class MiniGPTConfig:
    """Shape of a MiniGPT (by default GPT-2 small's, 124M), and how it spends memory. Raises
    ValueError, which names the field, if a value is impossible."""

    vocab_size: int = 50257
    max_position_embeddings: int = 1024
    n_layers: int = 12
    n_heads: int = 12
    d_model: int = 768
    d_ff: int = 3072
    dropout: float = 0.1
    # What is kept for backward. It changes no result (chunks of the MLP: rounding).
    recompute: str = "none"  # "full": a checkpoint around each block. With memory/: see its expand
    # Chunks of tokens need memory/; alone there is one. 0 = memory/ chooses how many.
    loss_chunks: int = 0  # for the head and the loss
    mlp_chunks: int = 1  # for the MLP half of a block, when backward replays it

    def __post_init__(self) -> None:
        shape = "vocab_size max_position_embeddings n_layers n_heads d_model d_ff".split()
        for name in [*shape, "loss_chunks", "mlp_chunks"]:
            if getattr(self, name) < (least := int(name in shape)):
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        C, H = self.d_model, self.n_heads
        if C % H:
            raise ValueError(f"d_model ({C}) must be divisible by n_heads ({H})")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout}")
        if self.recompute not in ("none", "full") or self.loss_chunks > 1 or self.mlp_chunks != 1:
            if not hasattr(TECHNIQUES, "written"):
                raise ImportError(f"this needs the folder memory/ beside model.py: {self}")
            # What is the same is spelled the same: "mlp:12,cheap" of 12 blocks is "mlp".
            object.__setattr__(self, "recompute", TECHNIQUES.written(self))


class Attention(nn.Module):
    """Causal multi-head self-attention: each position looks at itself and at those before it."""

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        self.head_size = config.d_model // config.n_heads
        self.c_attn = nn.Linear(config.d_model, 3 * config.d_model)  # q, k and v in one matmul
        self.c_proj = nn.Linear(config.d_model, config.d_model)
        self.dropout = config.dropout  # a number: attention's kernel draws the mask

    def attend(self, qkv: Tensor, past: Past = None) -> Tensor:
        """(B, T, 3C) -> (B, T, C); between them q, k and v, (B, H, T, D). (SP: some heads.)"""
        B, T, C = qkv.size(0), qkv.size(1), qkv.size(2) // 3
        q, k, v = (x.view(B, T, -1, self.head_size).transpose(1, 2) for x in qkv.split(C, dim=2))
        if past is not None:
            if self in past:  # k and v of all tokens so far; a single q sees them all
                k, v = torch.cat([past[self][0], k], dim=2), torch.cat([past[self][1], v], dim=2)
            past[self] = k, v
        # Fused, it never holds the (B, H, T, T) scores: backward computes them again.
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=T > 1)
        return y.transpose(1, 2).reshape(B, T, C)  # the heads side by side again


class MLP(nn.Module):
    """Two linear layers, on each position alone; Block has the GELU between them."""

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.d_model, config.d_ff)
        self.c_proj = nn.Linear(config.d_ff, config.d_model)


class Block(nn.Module):
    """One transformer block: x (B, T, C) -> (B, T, C). Its halves are cut into parts before and
    behind their largest tensors, for policies: functions of memory/policies.py that call the same
    parts, some in activation checkpoints. Both halves are added in `add`."""

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.d_model)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, past: Past = None, policy: Any = None) -> Tensor:
        if policy is not None:
            return policy(self, x)
        return self.add(x, lambda x: self.attention(x, past), self.feed_forward)

    def add(self, x: Tensor, attention: Callable, feed_forward: Callable) -> Tensor:
        x = x + self.dropout(attention(x))
        return x + self.dropout(feed_forward(x))

    def attention(self, x: Tensor, past: Past = None) -> Tensor:
        return self.attn.c_proj(self.attn.attend(self.qkv(x), past))

    def qkv(self, x: Tensor) -> Tensor:
        return self.attn.c_attn(self.ln_1(x))  # (B, T, 3C)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.widen(x))

    def widen(self, x: Tensor) -> Tensor:
        return self.mlp.c_fc(self.ln_2(x))  # (B, T, d_ff): the widest tensor of a block

    def narrow(self, wide: Tensor) -> Tensor:
        return self.mlp.c_proj(F.gelu(wide, approximate="tanh"))


def schedule(model: Any) -> Iterable[tuple[Callable[..., Tensor], bool]]:
    """Each block in its order, and whether an activation checkpoint is around it."""
    recompute = model.training and model.config.recompute == "full"
    return [(block, recompute) for block in model.blocks]


def embed(embedding: nn.Embedding, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors of tokens (B, T, C), and the weight (V, C) for the head."""
    return embedding(input_ids), embedding.weight


def head_loss(x: Tensor, weight: Tensor, labels: Tensor, loss_chunks: int) -> Tensor:
    """The mean cross-entropy of labels that are not -100, in float32 or better, in one chunk."""
    exact = torch.promote_types(x.dtype, torch.float32)
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1).to(exact), labels.flatten())


class MiniGPT(nn.Module):
    """A GPT-2-shaped language model.

    `model(input_ids, labels)`, each (B, T) int64, returns the mean cross-entropy in nats, a scalar.
    Labels are already shifted by one (labels[:, t] follows input_ids[:, t]); -100 = no loss here.
    `model(input_ids)` returns logits (B, T, V). `start`: position of the first token (train_sp.py).
    `past`: a KV cache, {} with the first tokens of a text, then one token a call; eval() only.
    Logits are then the last token's, (B, 1, V). Raises ValueError for what cannot be.
    """

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)  # also the head
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln_f = nn.LayerNorm(config.d_model)
        # Three functions, to be called with this model's tensors; memory/ puts others around them.
        self.schedule, self.embed, self.head_loss = schedule, embed, head_loss
        if hasattr(TECHNIQUES, "compose"):
            TECHNIQUES.compose(self)
        self.init_weights()

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, past: Past = None, start: int = 0
    ) -> Tensor:
        T, limit = input_ids.size(1), self.config.max_position_embeddings
        if past:
            start = next(iter(past.values()))[0].size(2)
        if past is not None and (self.training or past and T > 1):
            raise ValueError("a KV cache takes one token a call, behind its first ones, in eval()")
        if start + T > limit:
            raise ValueError(f"{start + T} tokens, but max_position_embeddings is {limit}")
        positions = torch.arange(start, start + T, device=input_ids.device)
        x, head_weight = self.embed(self.token_embedding, input_ids)
        x = self.dropout(x + self.position_embedding(positions))  # (B, T, C)
        has_dropout = self.config.dropout > 0
        for block, recompute in self.schedule(self):
            if recompute:
                # The activation checkpoint keeps x, and the RNG's state for dropout. Backward runs
                # the block again, with the same masks, up to the last tensor that it needs: the
                # input of mlp.c_proj or, with dropout, the mask behind that.
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=has_dropout)
            else:
                x = block(x, past)  # autograd keeps every intermediate
        x = self.ln_f(x)
        if labels is None:
            return F.linear(x if past is None else x[:, -1:], head_weight)
        return self.head_loss(x, head_weight, labels, self.config.loss_chunks)

    @torch.no_grad()
    def init_weights(self, part: Callable[[Tensor, Tensor], Tensor] = lambda new, _: new) -> None:
        """GPT-2's: N(0, 0.02); projections to the residual stream have 1 / sqrt(2 n_layers) of that
        deviation, or its variance would grow with depth. Drawn on the CPU: one seed, one model on
        every device. `part(new, weight)` returns the rows that this process has (train_fsdp.py)."""
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                std = residual_std if name.endswith("c_proj.weight") else 0.02
                parameter.copy_(part(torch.empty(parameter.shape).normal_(std=std), parameter))
            else:  # a LayerNorm's gain, or a bias
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)

    @torch.no_grad()
    def stream(self, input_ids: Tensor, max_new_tokens: int, **how: Any) -> Iterator[Tensor]:
        """Continue `input_ids` (B, T >= 1), as `sample` says how: yields token by token (B, 1)."""
        limit, was_training = self.config.max_position_embeddings, self.training
        self.eval()
        text, new, past = input_ids, input_ids, dict[nn.Module, Any]()
        try:
            for _ in range(max_new_tokens):
                if text.size(1) > limit:
                    # The window slides: each token's position changes, so all is computed again.
                    new, past = text[:, -limit:], {}
                logits = self(new, past=past)[:, -1].float()  # (B, V)
                new = sample(logits, **how)  # only this token is still to be computed
                text = torch.cat([text, new], dim=1)
                yield new
        finally:
            self.train(was_training)

    def generate(self, input_ids: Tensor, max_new_tokens: int, **how: Any) -> Tensor:
        """Continue `input_ids` (B, T) as `stream` does; returns (B, T + max_new_tokens)."""
        return torch.cat([input_ids, *self.stream(input_ids, max_new_tokens, **how)], dim=1)


def sample(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Draw one token id per row of logits (B, V) -> (B, 1).

    `temperature`: below 1 is safer, 0 always takes the likeliest token. `top_k`: draw among the k
    likeliest only. `top_p`: among the fewest that sum to p or more (Holtzman et al., 2020).
    """
    if temperature < 1e-6:  # dividing by less would overflow
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None:
        kth_best = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth_best, -math.inf)
    if top_p is not None:
        best_first, order = logits.sort(dim=-1, descending=True)
        probability = best_first.softmax(dim=-1)
        # A token goes if those before it reach p already; the first one always stays.
        gone = (probability.cumsum(dim=-1) - probability) >= max(top_p, 1e-9)
        logits = logits.masked_fill(gone.scatter(-1, order, gone), -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), num_samples=1)
