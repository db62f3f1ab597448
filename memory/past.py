"""Keys and values that are kept so that no token is computed twice: recompute, turned around.

Training keeps less and computes more. A text that is written token by token is the other case:
attention of the next one needs keys and values of all before it, which are as they were. They take
2 * n_layers * C numbers a token, and a forward of T tokens becomes one of a single token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Past:
    """Keys and values of a text's tokens so far, of each block; none at first."""

    def __init__(self) -> None:
        self.kept: dict[Any, tuple[Tensor, Tensor]] = {}  # by attention, (B, H, tokens, D) each

    @property
    def n_tokens(self) -> int:
        """How many tokens there are so far."""
        return next((k.size(2) for k, _ in self.kept.values()), 0)

    def join(self, attention: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the next tokens, (B, H, T, D) each -> those of all so far."""
        if attention in self.kept:
            k, v = (
                torch.cat(pair, dim=2) for pair in zip(self.kept[attention], (k, v), strict=True)
            )
        self.kept[attention] = k, v
        return k, v

    @contextmanager
    def before(self, model: Any) -> Iterator[None]:
        """A context for one forward of a model.MiniGPT, whose tokens follow these and join them.

        Behind a past it has to be a single token: the causal mask knows nothing of those before it.
        After it the model is as it was, free to do something else until the text goes on.
        """
        holders = [model, *(block.attn for block in model.blocks)]
        try:
            for holder in holders:
                holder.past = self
            yield
        finally:
            for holder in holders:
                holder.past = None
