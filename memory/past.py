"""Keys and values that are kept so that no token is computed twice: recompute, turned around.

Who writes a text needs, for each token, keys and values of all before it, which are as they were.
Kept, they take 2 * n_layers * C numbers a token, and forward is one of a single token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Past:
    """Keys and values of a text's tokens so far, of each block; none at first.

    With `past.before(model):` a forward sees those tokens, too, and adds its own to them.
    """

    def __init__(self) -> None:
        self.kept: dict[Any, tuple[Tensor, Tensor]] = {}  # by attention, (B, H, tokens, D) each

    @property
    def n_tokens(self) -> int:
        """How many tokens came before those of the forward that is running; the same in all of its
        blocks, so it may be taken for their position. (The last block is the last to add its own.)
        """
        return self.kept[self.last][0].size(2) if self.last in self.kept else 0

    def join(self, attention: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the next tokens, (B, H, T, D) each -> those of all so far."""
        if attention in self.kept:
            before_k, before_v = self.kept[attention]
            k, v = torch.cat([before_k, k], dim=2), torch.cat([before_v, v], dim=2)
        self.kept[attention] = k, v
        return k, v

    @contextmanager
    def before(self, model: Any) -> Iterator[None]:
        """A context for one forward of a model.MiniGPT, whose tokens follow these and join them.
        (Behind a past a single one: the causal mask knows nothing of those before it.)"""
        holders = [model, *(block.attn for block in model.blocks)]
        self.last = holders[-1]
        try:
            for holder in holders:
                holder.past = self
            yield
        finally:
            for holder in holders:
                holder.past = None
