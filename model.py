"""MiniGPT: a GPT language model, from token ids to the loss.

The architecture is GPT-2's (Radford et al., 2019): learned position embeddings, pre-LayerNorm
blocks, tanh GELU, biases, and a head that shares its weight with the token embedding.

Start at `MiniGPT.forward`, which runs the whole model; its call of `checkpoint` is what this
project is about. The file needs only torch; the trainers use a subclass that saves more memory,
MemorySavingGPT (memory/gpt.py): it overrides `embed`, `head_loss` and `block_calls`, and its
results are bitwise equal except for the rounding of chunks.

Shapes: B batch size, T tokens per sequence, C channels (d_model), H heads, D = C / H, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# KV cache of a layer: [] or [keys, values], each (B, H, tokens so far, D). None: no cache.
KVCache = list[Tensor] | None
# Types of layers that `init_weights` initializes; some of them occur only in changed models.
INITIALIZED_LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Conv1d)


@dataclass(frozen=True)
class MiniGPTConfig:
    """Shape of a MiniGPT (by default GPT-2 small, 124M parameters) and its memory settings.

    Raises ValueError that names the impossible field."""

    vocab_size: int = 50257
    max_position_embeddings: int = 1024
    n_layers: int = 12
    n_heads: int = 12
    d_model: int = 768
    d_ff: int = 3072
    dropout: float = 0.1  # GPT-2's value; the trainers' default is 0.0 (trainer/settings.py)
    # Memory settings: results stay bitwise equal under `recompute`; chunks change their rounding.
    recompute: str = "none"  # "full": checkpoint each block. MemorySavingGPT has more policies
    loss_chunks: int = 0  # chunks of tokens in the head and the loss; 0: MemorySavingGPT chooses
    mlp_chunks: int = 1  # chunks of ln_2 and the MLP that backward recomputes; 0: as loss_chunks

    def __post_init__(self) -> None:
        shape = "vocab_size max_position_embeddings n_layers n_heads d_model d_ff".split()
        for name, minimum in {**dict.fromkeys(shape, 1), "loss_chunks": 0, "mlp_chunks": 0}.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be at least {minimum}, not {getattr(self, name)}")
        if self.d_model % self.n_heads:
            raise ValueError(
                f"d_model ({self.d_model}) must be divisible by n_heads ({self.n_heads})"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout}")


class Attention(nn.Module):
    """Causal multi-head self-attention: a position attends to itself and to earlier positions."""

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        self.head_size = config.d_model // config.n_heads
        self.c_attn = nn.Linear(config.d_model, 3 * config.d_model)  # q, k and v in one matmul
        self.c_proj = nn.Linear(config.d_model, config.d_model)
        self.dropout = config.dropout  # the probability; the attention kernel draws the mask

    def forward(self, x: Tensor, kv_cache: KVCache = None) -> Tensor:
        return self.c_proj(self.attend(self.qkv(x), kv_cache))  # (B, T, C)

    def qkv(self, x: Tensor) -> Tensor:
        return self.c_attn(x)  # (B, T, 3C)

    def attend(self, qkv: Tensor, kv_cache: KVCache = None) -> Tensor:
        """Run attention on q, k and v, side by side in `qkv` (B, T, 3C); return (B, T, C).

        With `kv_cache`, append the new keys and values to it and attend to all keys in it. In
        train_sp.py H and C are the heads and the channels of this rank."""
        B, T, C = qkv.size(0), qkv.size(1), qkv.size(2) // 3
        q, k, v = (x.view(B, T, -1, self.head_size).transpose(1, 2) for x in qkv.split(C, dim=2))
        if kv_cache is not None:
            if kv_cache:
                k, v = (torch.cat(pair, dim=2) for pair in zip(kv_cache, (k, v), strict=True))
            kv_cache[:] = k, v
        # A single token may attend to all keys, so it needs no causal mask. The fused kernel never
        # stores the scores (B, H, T, T), because its backward recomputes them.
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=T > 1)
        return y.transpose(1, 2).reshape(B, T, C)


class MLP(nn.Module):
    """Two linear layers with a GELU between them, for each position separately."""

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.d_model, config.d_ff)
        self.c_proj = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_project(self.up_project(x))  # (B, T, C)

    def up_project(self, x: Tensor) -> Tensor:
        return self.c_fc(x)  # (B, T, d_ff), the widest tensor of a block

    def down_project(self, wide: Tensor) -> Tensor:
        return self.c_proj(F.gelu(wide, approximate="tanh"))


def takes_policy(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let `block(x, ..., policy=p)` return p(block, x, ...). A policy (memory/policies.py) runs
    `forward` on a View: a proxy of the block, with activation checkpoints around some methods."""

    @wraps(forward)
    def call(block: Any, *inputs: Any, policy: Any = None, **named: Any) -> Tensor:
        return policy(block, *inputs, **named) if policy else forward(block, *inputs, **named)

    return call


class Block(nn.Module):
    """One transformer block: x (B, T, C) -> (B, T, C)."""

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.d_model)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    @takes_policy
    def forward(self, x: Tensor, kv_cache: KVCache = None) -> Tensor:
        x = x + self.dropout(self.attention(x, kv_cache))
        return x + self.dropout(self.feed_forward(x))

    def attention(self, x: Tensor, kv_cache: KVCache = None) -> Tensor:
        return self.attn(self.ln_1(x), kv_cache)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_2(x))


class MiniGPT(nn.Module):
    """A language model with the architecture of GPT-2.

    `model(input_ids, labels)`, both (B, T) int64, returns the mean cross-entropy in nats, a scalar.
    Labels are shifted: labels[:, t] is the token after input_ids[:, t], and -100 is ignored.
    `model(input_ids)` returns logits (B, T, V). `start`: position of the first token (train_sp.py).

    `kv_cache`: only in eval(). Pass {} with the first tokens of a text, then the same cache (layer
    -> KVCache) with one new token; each call returns the last token's logits, (B, 1, V).
    Raises ValueError for other uses, and for more than max_position_embeddings positions."""

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        self.config = self.normalized_config(config)
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)  # also the head
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln_f = nn.LayerNorm(config.d_model)
        self.init_weights()

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, kv_cache: Any = None, start: int = 0
    ) -> Tensor:
        T, limit = input_ids.size(1), self.config.max_position_embeddings
        start = kv_cache[0][0].size(2) if kv_cache else start  # continue after the cached tokens
        if kv_cache is not None and (self.training or kv_cache and T > 1):
            raise ValueError("a KV cache is for eval(); once it is filled, pass one token a call")
        if start + T > limit:
            raise ValueError(f"{start + T} tokens, but max_position_embeddings is {limit}")
        positions = torch.arange(start, start + T, device=input_ids.device)
        x, head_weight = self.embed(input_ids)
        x = self.dropout(x + self.position_embedding(positions))  # (B, T, C)
        has_dropout = self.config.dropout > 0
        for i, (block, recompute) in enumerate(self.block_calls()):
            layer_cache = None if kv_cache is None else kv_cache.setdefault(i, [])
            call = partial(block, kv_cache=layer_cache)  # a new argument of the block goes here
            if recompute:
                # The activation checkpoint keeps only x and, with dropout, the RNG's state.
                # Backward runs the block again with the same dropout masks, up to the last tensor
                # that it needs: mlp.c_proj's input or, with dropout, the last mask.
                x = checkpoint(call, x, use_reentrant=False, preserve_rng_state=has_dropout)
            else:
                # Autograd keeps all that backward needs, unless a policy checkpoints in the block.
                x = call(x)
        x = self.ln_f(x)
        if labels is None:
            return F.linear(x if kv_cache is None else x[:, -1:], head_weight)
        return self.head_loss(x, head_weight, labels)  # MemorySavingGPT: in chunks

    def normalized_config(self, config: MiniGPTConfig) -> MiniGPTConfig:
        """Return `config`, or raise ValueError if its memory settings need MemorySavingGPT."""
        if (
            config.recompute not in ("none", "full")
            or config.loss_chunks > 1
            or config.mlp_chunks != 1
        ):
            raise ValueError(
                f"recompute {config.recompute}, loss_chunks {config.loss_chunks} and mlp_chunks "
                f"{config.mlp_chunks} need memory.MemorySavingGPT: MiniGPT has recompute none and "
                "full, and no chunks"
            )
        return config

    def embed(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Look up ids (B, T): return vectors (B, T, C), and the weight (V, C) of the head. (Both
        come from here, so that a subclass can merge the two gradients of the shared weight.)"""
        return self.token_embedding(input_ids), self.token_embedding.weight

    def block_calls(self) -> Iterable[tuple[Callable[..., Tensor], bool]]:
        """Return (block, recompute) for each block: `forward` checkpoints it if `recompute`."""
        recompute = self.training and self.config.recompute == "full"
        return [(block, recompute) for block in self.blocks]

    def head_loss(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats, of the logits x @ weight.T and the labels (B, T).
        x (B, T, C), weight (V, C). Labels of -100 are ignored."""
        exact = torch.promote_types(x.dtype, torch.float32)
        return F.cross_entropy(F.linear(x, weight).flatten(0, 1).to(exact), labels.flatten())

    @torch.no_grad()
    def init_weights(self, shard_like: Callable = lambda full, weight: full) -> None:
        """Initialize as GPT-2 does: weights normal with mean 0 and standard deviation 0.02, for
        c_proj 0.02 / sqrt(2 n_layers), because otherwise the variance of the residual stream would
        grow with depth. The CPU draws, so that a seed gives the same weights on any device.
        `shard_like(full, weight)` returns this rank's rows of the full tensor (train_fsdp.py).
        Parameters outside of INITIALIZED_LAYERS keep their first values. On device "meta", where
        the trainers make the model, this has no effect; trainer/build.py calls it again."""
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layers)
        for layer_name, layer in self.named_modules():
            std = residual_std if layer_name.endswith("c_proj") else 0.02
            if not isinstance(layer, INITIALIZED_LAYERS):
                continue
            for name, parameter in layer.named_parameters(recurse=False):
                if parameter.dim() > 1:
                    full = torch.empty(parameter.shape).normal_(std=std)
                    parameter.copy_(shard_like(full, parameter))
                else:  # a LayerNorm's gain, or a bias
                    parameter.fill_(1.0 if name == "weight" else 0.0)

    @torch.no_grad()
    def stream_tokens(
        self, input_ids: Tensor, max_new_tokens: int, use_cache: bool = True, **sampling: Any
    ) -> Iterator[Tensor]:
        """Yield tokens (B, 1) after `input_ids` (B, T >= 1). Without `use_cache`, all tokens are
        computed again for each. `sampling`: see `sample_next_ids`."""
        limit, was_training = self.config.max_position_embeddings, self.training
        self.eval()
        ids, next_ids, kv_cache = input_ids, input_ids, dict[int, list[Tensor]]()
        try:
            for _ in range(max_new_tokens):
                if ids.size(1) > limit or not use_cache:
                    # The window slides, so every position changes: run the whole window again.
                    next_ids, kv_cache = ids[:, -limit:], {}
                logits = self(next_ids, kv_cache=kv_cache)[:, -1].float()  # (B, V)
                next_ids = sample_next_ids(logits, **sampling)  # the only token that is not cached
                ids = torch.cat([ids, next_ids], dim=1)
                yield next_ids
        finally:
            self.train(was_training)

    def generate(self, input_ids: Tensor, max_new_tokens: int, **sampling: Any) -> Tensor:
        """Return `input_ids` (B, T) and the tokens of `stream_tokens`, (B, T + max_new_tokens)."""
        return torch.cat([input_ids, *self.stream_tokens(input_ids, max_new_tokens, **sampling)], 1)


def sample_next_ids(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Draw one token id for each row of `logits` (B, V); return ids (B, 1).

    `temperature`: below 1, likely tokens become likelier; at 0 the likeliest token is chosen.
    `top_k`: draw only from the k likeliest tokens (0: all). `top_p`: draw only from the smallest
    set of likeliest tokens whose probabilities sum to p or more (Holtzman et al., 2020)."""
    if temperature < 1e-6:  # dividing by a smaller number could overflow
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k:
        kth_best = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth_best, -math.inf)
    if top_p is not None:
        best_first, order = logits.sort(dim=-1, descending=True)
        probability = best_first.softmax(dim=-1)
        # Remove a token if the probabilities of all likelier tokens sum to p; the likeliest stays.
        gone = (probability.cumsum(dim=-1) - probability) >= max(top_p, 1e-9)
        logits = logits.masked_fill(gone.scatter(-1, order, gone), -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), num_samples=1)
