"""One sequence shared by several processes: each has some of its tokens, and in attention, some of
its heads (DeepSpeed Ulysses: Jacobs et al., 2023, https://arxiv.org/abs/2309.14509).

But for attention, a model looks at each token alone. So of N processes each computes an N-th of the
tokens, and keeps for backward an N-th of all that is kept, whatever the policy. Attention looks at
all tokens, but at each head alone. Around it the processes exchange tokens for heads, and back:

    my t tokens, all H heads           (B, t, 3C)
    all T tokens, my h heads           (B, T, 3hD)    -> attention -> (B, T, hD)
    my t tokens, all H heads again     (B, t, C)

A process sends 3Ct + hDT numbers for each sequence and block in forward, as many in a replay of
attention, and Ct + 3hDT in backward: where all divides evenly, 4CT/N each time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

# (what I send, 1-D; how many numbers of it go to each process; how many come from each) -> what
# came, one process behind the other.
Exchange = Callable[[Tensor, list[int], list[int]], Tensor]


def deal(n: int, processes: int) -> list[int]:
    """How many of `n` things each process gets, in order: the first may have one more."""
    return [n // processes + (i < n % processes) for i in range(processes)]


class SharedSequence:
    """What one of several processes has of each sequence."""

    def __init__(self, process: int, processes: int, n_heads: int, exchange: Exchange):
        self.process, self.exchange = process, exchange
        self.heads = deal(n_heads, processes)  # of each process
        self.tokens: list[int] = []  # of each process; none: every one has the whole sequence

    def cut(self, T: int) -> slice:
        """My tokens of the sequences that come now, which have `T`."""
        self.tokens = deal(T, len(self.heads))
        return slice(self.before, self.before + self.tokens[self.process])

    def join(self) -> None:
        """From now on each process has whole sequences, of its own."""
        self.tokens = []

    @property
    def before(self) -> int:
        """Tokens before mine."""
        return sum(self.tokens[: self.process])

    def surround(self, model: Any) -> None:
        """Put the exchange around each attention of a model.MiniGPT."""
        for block in model.blocks:
            block.attn.attend = partial(self.attend, block.attn.attend)

    def attend(self, attend: Callable[..., Tensor], qkv: Tensor, past: Any = None) -> Tensor:
        """`attend`, which looks at all tokens; (B, t, 3C) -> (B, t, C), of mine."""
        if not self.tokens:
            return attend(qkv, past)
        y = attend(Moved.apply(qkv, partial(self.to_heads, 3), partial(self.to_tokens, 3)))
        return Moved.apply(y, partial(self.to_tokens, 1), partial(self.to_heads, 1))

    def to_heads(self, n: int, x: Tensor) -> Tensor:
        """`n` tensors side by side, each of my tokens (B, t, C) -> of my heads (B, T, hD)."""
        rows = x.unflatten(2, (n, sum(self.heads), -1)).transpose(0, 1)  # (t, B, n, H, D)
        B, D = rows.size(1), rows.size(4)
        send, take = self.sizes(B * n * D)
        sent = x.new_empty(x.numel())
        # Tokens first: what comes from all is in order then, and is not copied once more.
        for part, place in zip(rows.split(self.heads, dim=3), sent.split(send), strict=True):
            place.view(part.shape).copy_(part)
        return self.exchange(sent, send, take).view(sum(self.tokens), B, -1).transpose(0, 1)

    def to_tokens(self, n: int, x: Tensor) -> Tensor:
        """The way back: (B, T, hD) of my heads -> (B, t, C) of my tokens, `n` of them."""
        B, D = x.size(0), x.size(2) // (n * self.heads[self.process])
        take, send = self.sizes(B * n * D)
        came = self.exchange(x.transpose(0, 1).reshape(-1), send, take)
        y = x.new_empty(B, self.tokens[self.process], n, sum(self.heads), D)
        places = y.transpose(0, 1).split(self.heads, dim=3)
        for part, place in zip(came.split(take), places, strict=True):
            place.copy_(part.view(place.shape))
        return y.flatten(2)

    def sizes(self, numbers: int) -> tuple[list[int], list[int]]:
        """With so many `numbers` a token and head: how many my tokens have of each process's heads,
        and my heads of each process's tokens."""
        t, h = self.tokens[self.process], self.heads[self.process]
        of_heads = [t * heads * numbers for heads in self.heads]
        return of_heads, [tokens * h * numbers for tokens in self.tokens]


class Moved(torch.autograd.Function):
    """(x, there, back) -> there(x), whose gradient goes `back`."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return Moved.apply(gradient, ctx.back, ctx.there), None, None
