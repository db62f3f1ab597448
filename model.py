"""MiniGPT: everything a tensor passes through, from token ids to the loss.

The architecture is GPT-2's (Radford et al., 2019): learned positions, pre-LayerNorm blocks, tanh
GELU, biases, and a head that shares its weight with the token embedding.

Start at `MiniGPT.forward`: it is the whole model, and the line that this project is about stands in
it, the call of `checkpoint`. Then see what a block is made of (above it) and the head (below).

Letters used in the shape comments:
    B batch    T time (position in the sequence)    C channels (d_model)
    H heads    D channels of one head (C / H)       V vocabulary    N tokens (B * T)
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from memory.policies import POLICIES, HostMemory, Offload, run_blocks

RECOMPUTE_POLICIES = ("none", *POLICIES, "full")


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
    # The memory side. None of these changes a result, only what is kept for backward.
    recompute: str = "none"  # what a block keeps, what backward replays instead: see recompute.py
    recompute_layers: int | None = None  # only the first N blocks; None = all
    recompute_group: int = 1  # with "full": one checkpoint for every K consecutive blocks
    offload_activations: bool = False  # what the policy keeps waits in CPU memory
    loss_chunks: int = 0  # head and loss in n chunks of tokens; 0 = choose n, 1 = all at once

    def __post_init__(self) -> None:
        for name in "vocab_size max_position_embeddings n_layers n_heads d_model d_ff".split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.d_model % self.n_heads:
            raise ValueError(
                f"d_model ({self.d_model}) must be divisible by n_heads ({self.n_heads})"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout}")
        if self.recompute not in RECOMPUTE_POLICIES:
            known = ", ".join(RECOMPUTE_POLICIES)
            raise ValueError(f"recompute must be one of {known}, not {self.recompute!r}")
        layers = self.recompute_layers
        if layers is not None and not 0 <= layers <= self.n_layers:
            raise ValueError(f"recompute_layers must be in 0..{self.n_layers}, not {layers}")
        if self.recompute_group < 1:
            raise ValueError(f"recompute_group must be at least 1, not {self.recompute_group}")
        if self.recompute_group > 1 and self.recompute != "full":
            raise ValueError(
                f"recompute_group {self.recompute_group} needs recompute full, "
                f"not {self.recompute}: only whole blocks can share a checkpoint"
            )
        if self.offload_activations and self.recompute == "none":
            raise ValueError("offload_activations needs a recompute policy: full is the usual one")
        if self.loss_chunks < 0:
            raise ValueError(f"loss_chunks must be at least 0, not {self.loss_chunks}")

    @property
    def n_recomputed(self) -> int:
        """How many blocks, from the first one on, the recompute policy applies to."""
        if self.recompute == "none":
            return 0
        return self.n_layers if self.recompute_layers is None else self.recompute_layers


class Attention(nn.Module):
    """Causal multi-head self-attention: each position looks at itself and at those before it."""

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        self.n_heads = config.n_heads
        self.c_attn = nn.Linear(config.d_model, 3 * config.d_model)  # q, k and v in one matmul
        self.c_proj = nn.Linear(config.d_model, config.d_model)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.attend(self.c_attn(x)))

    def attend(self, qkv: Tensor) -> Tensor:
        """(B, T, 3C) -> (B, T, C)."""
        B, T, C = qkv.size(0), qkv.size(1), qkv.size(2) // 3
        q, k, v = qkv.view(B, T, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        # The fused kernel never holds the (B, H, T, T) scores: its backward computes them again.
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
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


class Block(nn.Module):
    """One transformer block: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.d_model)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x, update = self.halves(x)
        return x + self.dropout(update)

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream after attention, and the MLP's update that is still to be added.

        Apart, because an activation checkpoint around both must end before the last dropout: see
        recompute.py.
        """
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x, self.mlp(self.ln_2(x))


class MiniGPT(nn.Module):
    """A GPT-2-shaped language model.

    `model(input_ids)` returns logits; `model(input_ids, labels)` returns the mean loss and never
    holds the whole (N, V) logits (see `head_loss`).
    """

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        self.config = config
        self.token_embedding = TiedEmbedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln_f = nn.LayerNorm(config.d_model)
        self.host_memory = HostMemory()  # for offload_activations
        # What runs for each block; compile_blocks puts compiled versions in their place.
        self.run_blocks, self.policies = run_blocks, dict(POLICIES)
        # There is no lm_head module: the head is the token embedding's weight, used once more.
        self.init_weights()

    def init_weights(self) -> None:
        """GPT-2's initialisation: N(0, 0.02), zero biases.

        The two projections that write to the residual stream are scaled by 1 / sqrt(2 n_layers),
        so that its variance does not grow with depth.
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = residual_std if name.endswith("c_proj") else 0.02
                nn.init.normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits, or the mean loss if `labels` are given.

        Args:
            input_ids: (B, T) int64, T at most `max_position_embeddings`.
            labels: (B, T) int64, already shifted by one (labels[:, t] follows input_ids[:, t]);
                -100 marks a position without a loss.
        Returns:
            (B, T, V) logits without labels; a scalar, the mean cross-entropy in nats, with them.
        Raises:
            ValueError: the sequence is longer than `max_position_embeddings`.
        """
        B, T = input_ids.shape
        if T > self.config.max_position_embeddings:
            limit = self.config.max_position_embeddings
            raise ValueError(f"sequence of {T} tokens, but max_position_embeddings is {limit}")
        positions = torch.arange(T, device=input_ids.device)
        from_head: list[Tensor] = []  # the gradient of the weight that they share: TiedEmbedding
        x = self.token_embedding(input_ids, from_head)  # (B, T, C)
        x = self.dropout(x + self.position_embedding(positions))

        config, blocks = self.config, cast(list[Block], list(self.blocks))
        n_recomputed = config.n_recomputed if self.training else 0
        offload = Offload(self.host_memory) if config.offload_activations else None
        for i in range(0, n_recomputed, config.recompute_group):
            group = blocks[i : min(i + config.recompute_group, n_recomputed)]
            # (The last block's backward comes first: what it keeps would come straight back.)
            last = i + len(group) == config.n_layers
            with offload.block(group) if offload and not last else nullcontext():
                if config.recompute == "full":
                    # The activation checkpoint. Kept for backward: the input x, nothing else.
                    # Backward replays the block from it (with the same dropout masks: torch keeps
                    # the RNG state) and pays two thirds of a forward for that: the replay stops at
                    # the last tensor that backward needs, before the block's last matmul.
                    x, update = checkpoint(self.run_blocks, group, x, use_reentrant=False)
                else:
                    x, update = self.policies[config.recompute](group[0], x)
            x = x + group[-1].dropout(update)
        for block in blocks[n_recomputed:]:
            x, update = self.run_blocks([block], x)  # kept: every intermediate
            x = x + block.dropout(update)

        x = self.ln_f(x)
        weight = self.token_embedding.weight  # (V, C)
        if labels is None:
            return F.linear(x, weight)  # (B, T, V)
        return head_loss(x, weight, labels, config.loss_chunks, from_head)

    def compile_blocks(self) -> None:
        """torch.compile what runs for each block: the first one pays, the others reuse its code.

        Around `full` the activation checkpoint stays outside of the compiled code, where it keeps
        the block's input and nothing else. The finer policies are inside: the compiler has to see
        what they are about.
        """
        # DDP would have graphs cut to its buckets, which cannot be done through a checkpoint; and
        # blocks are small enough for gradients to travel while the next block computes.
        torch._dynamo.config.optimize_ddp = False
        self.run_blocks = torch.compile(run_blocks)
        self.policies = {name: torch.compile(policy) for name, policy in POLICIES.items()}

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> Tensor:
        """Continue `input_ids` (B, T >= 1) by sampling; returns (B, T + max_new_tokens).

        Args:
            temperature: below 1 is safer, above 1 is wilder, 0 always takes the likeliest token.
            top_k: sample among the k likeliest tokens only.
            top_p: sample among the fewest tokens whose probabilities sum to at least p
                (nucleus sampling, Holtzman et al., 2020).
        """
        was_training = self.training
        self.eval()
        for _ in range(max_new_tokens):
            context = input_ids[:, -self.config.max_position_embeddings :]
            logits = self(context)[:, -1, :].float()  # (B, V): only the last position is new
            next_ids = sample(logits, temperature, top_k, top_p)  # (B, 1)
            input_ids = torch.cat([input_ids, next_ids], dim=1)
        self.train(was_training)
        return input_ids


def sample(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Draw one token id per row of logits (B, V) -> (B, 1)."""
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


# ---------------------------------------------------------------------------------------------
# The head. For a small GPT it, not the blocks, is the first wall: with 50,257 tokens in the
# vocabulary, logits, log-softmax and their gradients take 12 to 16 bytes for each of N * V
# entries, which at B=2, T=1024 is 1.2 GB. Cut into chunks of tokens, only one chunk is alive.


CHUNK = 2**23  # elements: 32 MB in float32 are little beside a step, and enough for a fast matmul


def head_loss(
    x: Tensor, weight: Tensor, labels: Tensor, n_chunks: int, from_head: list[Tensor]
) -> Tensor:
    """Mean cross-entropy of the head's logits, in nats.

    Args:
        x: (B, T, C) what the last LayerNorm returns.
        weight: (V, C) the head's weight.
        labels: (B, T) int64, -100 = no loss here.
        n_chunks: 1 = all tokens at once; n = in n chunks, never more than one chunk of logits
            alive; 0 = choose n.
        from_head: takes the weight's gradient, in backward, if there are chunks.
    """
    x, labels = x.flatten(0, 1), labels.flatten()  # (N, C), (N,)
    if n_chunks == 0:
        n_chunks = math.ceil(labels.numel() * weight.size(0) / CHUNK)
    n_chunks = min(n_chunks, labels.numel())
    if n_chunks <= 1:
        return F.cross_entropy(at_least_float32(F.linear(x, weight)), labels)
    if torch.is_grad_enabled():
        return ChunkedHeadLoss.apply(x, weight, labels, n_chunks, from_head)
    total = sum(
        F.cross_entropy(at_least_float32(F.linear(x_chunk, weight)), label_chunk, reduction="sum")
        for x_chunk, label_chunk in zip(x.chunk(n_chunks), labels.chunk(n_chunks), strict=True)
    )
    return total / (labels != -100).sum()


def at_least_float32(x: Tensor) -> Tensor:
    """Sums over a vocabulary need it; float64 stays what it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ChunkedHeadLoss(torch.autograd.Function):
    """The loss, chunk by chunk, with its gradients taken inside forward.

    Plain autograd would keep every chunk's log-softmax until backward, and checkpointing the
    chunks would compute their logits twice. But the loss is the end of the graph: the only thing
    that backward multiplies its gradients with is one number. So they can be taken right away,
    while the chunk's logits are alive, and nothing is computed twice.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, labels: Tensor, n_chunks: int, from_head: list[Tensor]
    ) -> Tensor:
        # Under autocast each F.linear would cast the weight again: cast it once, by hand.
        device_type = x.device.type
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else weight.dtype
        cast_weight = weight.detach().to(dtype)
        count = (labels != -100).sum()  # stays on the device: reading it would stall a GPU
        # float16 ends at 6e-8. The usual cure, GradScaler's factor, comes only in backward, when
        # these gradients are long made; so they carry a factor of their own (a power of two:
        # exact), about the number of tokens, which undoes the mean's division.
        scale = 2.0 ** math.floor(math.log2(labels.numel())) if dtype == torch.float16 else 1.0

        total = at_least_float32(torch.zeros((), device=x.device, dtype=dtype))
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        for x_chunk, label_chunk, grad_x_chunk in zip(
            x.detach().chunk(n_chunks),
            labels.chunk(n_chunks),
            grad_x.chunk(n_chunks),
            strict=True,
        ):
            # The identity hooks keep this small graph to itself: whoever counts or offloads what
            # the model keeps for backward must not see tensors that are gone a line later.
            with torch.enable_grad(), saved_tensors_hooks(lambda t: t, lambda t: t):
                logits = F.linear(x_chunk.requires_grad_(), cast_weight)  # (n, V)
                edge = get_gradient_edge(logits)  # where its gradient arrives: backward ends there
                loss = F.cross_entropy(at_least_float32(logits), label_chunk, reduction="sum")
                loss = loss / count
                del logits
                (grad_logits,) = torch.autograd.grad(loss * scale, edge)
            total += loss.detach()
            del loss, edge
            # The rest by hand, as it can add to what is there: to write a (V, C) gradient for each
            # chunk would take as long as the matmul.
            x_chunk = x_chunk.detach().to(dtype)
            grad_x_chunk.copy_(grad_logits @ cast_weight)
            if dtype == grad_weight.dtype:
                grad_weight.addmm_(grad_logits.T, x_chunk)
            else:
                grad_weight += grad_logits.T @ x_chunk
            del grad_logits  # not beside the next chunk's logits
        ctx.save_for_backward(grad_x.div_(scale), grad_weight.div_(scale))
        ctx.from_head = from_head
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):
        grad_x, grad_weight = ctx.saved_tensors  # in place: nobody else needs them
        ctx.from_head.append(grad_weight.mul_(grad_loss))
        return grad_x.mul_(grad_loss), None, None, None, None


class TiedEmbedding(nn.Embedding):
    """Token ids (B, T) -> (B, T, C), by a weight (V, C) that is the head's as well.

    So it has two gradients. Left to autograd, both are there before they are added, and with
    GPT-2's vocabulary and `full` recompute nothing else in a step is as large. Here the head leaves
    its own in `from_head` when backward begins, and the embedding's is added to it in the end.
    """

    def forward(  # type: ignore[override]
        self, ids: Tensor, from_head: list[Tensor]
    ) -> Tensor:
        return TiedLookup.apply(self.weight, ids, from_head)


class TiedLookup(torch.autograd.Function):
    """F.embedding, but for where its gradient goes."""

    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor, from_head: list[Tensor]) -> Tensor:
        ctx.save_for_backward(weight, ids)
        ctx.from_head = from_head
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        weight, ids = ctx.saved_tensors
        grad_weight = ctx.from_head.pop() if ctx.from_head else torch.zeros_like(weight)
        # A slice of channels at a time, or there would be a second (V, C) after all.
        n_slices = math.ceil(weight.numel() / CHUNK)
        for total, part in zip(
            grad_weight.chunk(n_slices, dim=1), grad.chunk(n_slices, dim=-1), strict=True
        ):
            total += torch.ops.aten.embedding_dense_backward(part, ids, len(weight), -1, False)
        return grad_weight, None, None
