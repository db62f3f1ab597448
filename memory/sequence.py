"""Sequence parallelism: several processes (ranks) share each sequence.

The method is DeepSpeed Ulysses (Jacobs et al., 2023, https://arxiv.org/abs/2309.14509). Outside of
attention, tokens are independent: each of N ranks computes 1/N of the tokens, and with every policy
keeps 1/N of the bytes for backward. Attention needs all tokens, but its heads are independent, so
one all-to-all exchanges tokens for heads before attention, and another exchanges them back:
    this rank's t tokens, all H heads     (B, t, 3C)
    all T tokens, this rank's h heads     (B, T, 3hD)    -> attention -> (B, T, hD)
    this rank's t tokens, all H heads     (B, t, C)

For each sequence and block, a rank sends 3Ct + hDT elements in forward and Ct + 3hDT in backward,
and 3Ct + hDT more if backward recomputes attention. If N divides T and H, each sum is 4CT/N.

Shapes: B batch size, T tokens, C channels, H heads, D = C / H; t tokens and h heads of this rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .policies import View

# An all-to-all: (1-D tensor to send, number of elements for each rank, number of elements from each
# rank) -> 1-D tensor of the received elements, in the order of the ranks.
AllToAllFn = Callable[[Tensor, list[int], list[int]], Tensor]


def split_evenly(n: int, world_size: int) -> list[int]:
    """Split `n` things over ranks: return a number per rank; the first may be one larger."""
    return [n // world_size + (i < n % world_size) for i in range(world_size)]


class SequenceShard:
    """This rank's part of each sequence: its tokens, and its heads in attention."""

    def __init__(self, rank: int, world_size: int, n_heads: int, all_to_all: AllToAllFn):
        """Set up the part of rank `rank`; `all_to_all` exchanges elements with all ranks."""
        self.rank, self.all_to_all = rank, all_to_all
        self.heads = split_evenly(n_heads, world_size)  # number of heads per rank
        self.tokens: list[int] = []  # number of tokens per rank; empty: sequences are not shared

    def start_sharding(self, T: int) -> slice:
        """Split sequences of `T` tokens over the ranks from now on; return this rank's slice."""
        self.tokens = split_evenly(T, len(self.heads))
        return slice(self.token_offset, self.token_offset + self.tokens[self.rank])

    def stop_sharding(self) -> None:
        """Stop sharing: from now on each rank has whole sequences of its own."""
        self.tokens = []

    @property
    def token_offset(self) -> int:
        """Number of tokens before this rank's first token."""
        return sum(self.tokens[: self.rank])

    def run_block(
        self, block: Any, x: Tensor, *more: Any, policy: Callable | None, **named: Any
    ) -> Tensor:
        """Run a model.Block under `policy` (None: no policy), with all-to-alls around attention."""
        attn = View(block.attn, attend=partial(self.attend, block.attn.attend))
        view = View(block, attn=attn)
        return policy(view, x, *more, **named) if policy else view(x, *more, **named)

    def attend(
        self, attend: Callable[..., Tensor], qkv: Tensor, *more: Any, **named: Any
    ) -> Tensor:
        """Run `attend` on all T tokens of this rank's heads: (B, t, 3C) -> (B, t, C)."""
        if not self.tokens:
            return attend(qkv, *more, **named)
        qkv = CustomBackward.apply(
            qkv, partial(self.shard_by_heads, 3), partial(self.shard_by_tokens, 3)
        )
        y = attend(qkv, *more, **named)
        return CustomBackward.apply(
            y, partial(self.shard_by_tokens, 1), partial(self.shard_by_heads, 1)
        )

    def shard_by_heads(self, n: int, x: Tensor) -> Tensor:
        """Exchange tokens for heads: (B, t, nC) -> (B, T, nhD). x is `n` tensors side by side."""
        rows = x.unflatten(2, (n, sum(self.heads), -1)).transpose(0, 1)  # (t, B, n, H, D)
        B, D = rows.size(1), rows.size(4)
        send_sizes, receive_sizes = self.all_to_all_sizes(B * n * D)
        to_send = x.new_empty(x.numel())
        # The first dimension is tokens, so the received parts are in order without another copy.
        for part, place in zip(
            rows.split(self.heads, dim=3), to_send.split(send_sizes), strict=True
        ):
            place.view(part.shape).copy_(part)
        return (
            self.all_to_all(to_send, send_sizes, receive_sizes)
            .view(sum(self.tokens), B, -1)
            .transpose(0, 1)
        )

    def shard_by_tokens(self, n: int, x: Tensor) -> Tensor:
        """Exchange heads for tokens: (B, T, nhD) -> (B, t, nC). x is `n` tensors side by side."""
        B, D = x.size(0), x.size(2) // (n * self.heads[self.rank])
        receive_sizes, send_sizes = self.all_to_all_sizes(B * n * D)
        received = self.all_to_all(x.transpose(0, 1).reshape(-1), send_sizes, receive_sizes)
        y = x.new_empty(B, self.tokens[self.rank], n, sum(self.heads), D)
        places = y.transpose(0, 1).split(self.heads, dim=3)
        for part, place in zip(received.split(receive_sizes), places, strict=True):
            place.copy_(part.view(place.shape))
        return y.flatten(2)

    def all_to_all_sizes(self, numbers: int) -> tuple[list[int], list[int]]:
        """Return two lists with a number of elements for each rank: those of this rank's tokens in
        each rank's heads, and those of each rank's tokens in this rank's heads. `numbers`: number
        of elements per token and head."""
        t, h = self.tokens[self.rank], self.heads[self.rank]
        of_heads = [t * heads * numbers for heads in self.heads]
        return of_heads, [tokens * h * numbers for tokens in self.tokens]


class CustomBackward(torch.autograd.Function):
    """Return `there(x)` in forward, and `back(gradient)` in backward.

    `there` maps a tensor shaped like x to a tensor of any shape, and `back` does the reverse.
    """

    @staticmethod
    def forward(ctx, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return CustomBackward.apply(gradient, ctx.back, ctx.there), None, None
