"""MiniGPT: what a tensor passes through, from token ids to the loss.

The architecture is GPT-2's (Radford et al., 2019): learned positions, pre-LayerNorm blocks, tanh
GELU, biases, and a head that shares its weight with the token embedding.

Start at `MiniGPT.forward`: it is the whole model, and the line that this project is about stands in
it, the call of `checkpoint`. Above it: what a block is made of. Below it: sampling.

Letters used in the shape comments:
    B batch    T time (position in the sequence)    C channels (d_model)
    H heads    D channels of one head (C / H)       V vocabulary
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memory import POLICIES, HostMemory, Past, Recompute, TiedEmbedding, expand, schedule, write
from memory import RECOMPUTE_POLICIES as RECOMPUTE_POLICIES  # for whoever imports the model


@dataclass(frozen=True)
class MiniGPTConfig:
    """Shape of a MiniGPT and how it spends memory. The defaults are GPT-2 small (124M).

    Raises ValueError, with a message that names the field, if a value is impossible.
    """

    vocab_size: int = 50257
    max_position_embeddings: int = 1024
    n_layers: int = 12
    n_heads: int = 12
    d_model: int = 768
    d_ff: int = 3072
    dropout: float = 0.1
    # The memory side. None of these changes a result (but chunks of the MLP, by rounding), only
    # what is kept for backward.
    recompute: str = "none"  # "full": an activation checkpoint around each block. Or "cheap",
    # "mlp:7,cheap", "full/2", "full+offload", ...: see `expand` in memory/policies.py
    loss_chunks: int = 0  # head and loss in n chunks of tokens; 0 = choose n, 1 = all at once
    mlp_chunks: int = 1  # so does backward replay the MLP half of a block, if that is replayed

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
        # What is the same is spelled the same: "mlp:12,cheap" of 12 blocks is "mlp".
        object.__setattr__(self, "recompute", write(self.expanded))

    @property
    def expanded(self) -> Recompute:
        """What `recompute` says of each block."""
        return expand(self.recompute, self.n_layers)


class Attention(nn.Module):
    """Causal multi-head self-attention: each position looks at itself and at those before it."""

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        self.head_size = config.d_model // config.n_heads
        self.c_attn = nn.Linear(config.d_model, 3 * config.d_model)  # q, k and v in one matmul
        self.c_proj = nn.Linear(config.d_model, config.d_model)
        self.dropout = config.dropout  # a number: the fused kernel drops by itself
        self.past: Past | None = None  # of a text that goes on: see MiniGPT.stream

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.attend(self.c_attn(x)))

    def attend(self, qkv: Tensor) -> Tensor:
        """(B, T, 3C) -> (B, T, C); between them q, k and v, each (B, H, T, D), of any H heads."""
        B, T, C = qkv.size(0), qkv.size(1), qkv.size(2) // 3
        q, k, v = (x.view(B, T, -1, self.head_size).transpose(1, 2) for x in qkv.split(C, dim=2))
        if self.past:
            k, v = self.past.join(self, k, v)  # of all tokens so far; a single q sees them all
        # A fused kernel never holds the (B, H, T, T) scores: its backward computes them again.
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=T > 1)
        return y.transpose(1, 2).reshape(B, T, C)  # the heads side by side again


class MLP(nn.Module):
    """Two linear layers with a GELU between them, on each position alone."""

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.d_model, config.d_ff)
        self.c_proj = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.c_fc(x)  # (B, T, d_ff): the widest tensor of a block
        return self.c_proj(F.gelu(wide, approximate="tanh"))


class Residual(nn.Module):
    """How a half of a block adds to the residual stream x (B, T, C)."""

    def __init__(self, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, update: Tensor) -> Tensor:
        return x + self.dropout(update)


class Block(nn.Module):
    """One transformer block: x (B, T, C) -> (x after attention, the MLP's update), both (B, T, C).

    The update is still to be added to x, with dropout; the caller does that. Inside, the addition
    would be inside of the caller's activation checkpoint as well, and dropout, which needs its mask
    in backward, would make the replay run to the end. So a block ends in a matmul, whose result
    backward does not need: the replay stops before it. (Unless the block is compiled.)
    """

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.d_model)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)
        self.add = Residual(config.dropout)

    def forward(self, x: Tensor, policy: str = "none", **how: Any) -> tuple[Tensor, Tensor]:
        if run := POLICIES[policy].run:
            return run(self, x, **how)  # the same, and keeps less: memory/policies.py
        x = self.add(x, self.attn(self.ln_1(x)))
        return x, self.mlp(self.ln_2(x))


class MiniGPT(nn.Module):
    """A GPT-2-shaped language model.

    `model(input_ids)` returns logits; `model(input_ids, labels)` returns the mean loss, and holds
    at most 80 MiB of logits at a time, unless `loss_chunks` says otherwise (see memory/head.py).

    Args of a call:
        input_ids: (B, T) int64, T at most `max_position_embeddings`.
        labels: (B, T) int64, already shifted by one (labels[:, t] follows input_ids[:, t]);
            -100 marks a position without a loss.
        logits_to_keep: logits of that many last positions only; 0 = of all.
        start: position of the first token (train_sp.py cuts sequences).
    Returns:
        (B, T, V) logits without labels; a scalar, the mean cross-entropy in nats, with them.
    Raises:
        ValueError: the sequence is longer than `max_position_embeddings`.
    """

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        self.config = config
        self.token_embedding = TiedEmbedding(config.vocab_size, config.d_model)  # also the head
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.add = Residual(config.dropout)
        self.ln_f = nn.LayerNorm(config.d_model)
        self.host_memory = HostMemory()  # for +offload
        self.past: Past | None = None  # for `stream`
        self.init_weights()

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        start: int = 0,
    ) -> Tensor:
        start = self.past.n_tokens if self.past else start
        end, limit = start + input_ids.size(1), self.config.max_position_embeddings
        if end > limit:
            raise ValueError(f"sequence of {end} tokens, but max_position_embeddings is {limit}")
        positions = torch.arange(start, end, device=input_ids.device)
        x = self.token_embedding(input_ids) + self.position_embedding(positions)  # (B, T, C)
        x = self.dropout(x)

        random = self.config.dropout > 0
        for block, policy in schedule(self.blocks, self.config, self.training, self.host_memory):
            if policy == "full":
                # The activation checkpoint keeps the input x for backward, nothing else. Backward
                # runs the block again from it, with the same dropout masks (torch keeps the RNG's
                # state), up to the last tensor that it needs: all but the block's last matmul.
                x, update = checkpoint(block, x, use_reentrant=False, preserve_rng_state=random)
            else:
                x, update = block(x, policy)  # "none": every intermediate is kept
            x = self.add(x, update)  # outside of the checkpoint: see Block

        x = self.ln_f(x)
        if labels is None:
            return self.token_embedding.logits(x[:, -logits_to_keep:])  # (B, T, V)
        return self.token_embedding.loss(x, labels, self.config.loss_chunks)

    @torch.no_grad()
    def init_weights(self, part: Callable[[Tensor, Tensor], Tensor] = lambda new, _: new) -> None:
        """GPT-2's: N(0, 0.02), the two projections that write to the residual stream scaled by
        1 / sqrt(2 n_layers), so that its variance does not grow with depth. Drawn on the CPU: one
        seed, one model on every device. `part(new, weight)`: what of it a sharded weight takes."""
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                std = residual_std if name.endswith("c_proj.weight") else 0.02
                parameter.copy_(part(torch.empty(parameter.shape).normal_(std=std), parameter))
            else:  # a LayerNorm's gain, or a bias
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)

    def compile_blocks(self) -> None:
        """torch.compile each block: the first one of a policy pays, the others reuse its code.

        Around `full` the activation checkpoint stays outside of the compiled code, where it keeps
        the block's input alone. (Such code cannot stop half-way: the last matmul is replayed, too.)
        The finer policies are inside: the compiler has to see what they are about.
        """
        torch._dynamo.config.optimize_ddp = False  # DDP would cut graphs, checkpoints as well
        # On CUDA replayed dropout would draw from generators that manual_seed does not reach.
        torch._functorch.config.graphsafe_rng_functionalization = False
        for module in (*self.blocks, self.add):
            module.compile()
        self.token_embedding.compiled = True

    @torch.no_grad()
    def stream(self, input_ids: Tensor, max_new_tokens: int, **how: Any) -> Iterator[Tensor]:
        """Continue `input_ids` (B, T >= 1), as `sample` says how: yields token by token (B, 1)."""
        limit, was_training = self.config.max_position_embeddings, self.training
        self.eval()
        text, new = input_ids, input_ids
        past = Past()  # keys and values of the text: only its newest token is still to be computed
        try:
            for _ in range(max_new_tokens):
                if text.size(1) > limit:
                    # The window slides: each token's position changes, so all is computed again.
                    new, past = text[:, -limit:], Past()
                with past.before(self):
                    logits = self(new, logits_to_keep=1)[:, -1].float()  # (B, V)
                new = sample(logits, **how)
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

    Args:
        temperature: below 1 is safer, above 1 is wilder, 0 always takes the likeliest token.
        top_k: draw among the k likeliest tokens only.
        top_p: draw among the fewest that sum to p or more (nucleus: Holtzman et al., 2020).
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
        gone = (probability.cumsum(dim=-1) - probability) >= top_p
        gone[:, 0] = False
        logits = logits.masked_fill(gone.scatter(-1, order, gone), -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), num_samples=1)
