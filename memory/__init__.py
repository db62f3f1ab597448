"""Techniques that save memory, for a model to use. Nothing here imports the rest of the project.

policies.py   what a block keeps for backward, and what it replays instead
offload.py    what it keeps, in CPU memory
head.py       the loss without its logits, and one gradient for the weight that both ends share
sequence.py   a sequence that several processes share
"""

from functools import partial
from typing import Any

from .head import embed_tied, head_loss
from .offload import HostMemory
from .policies import (
    POLICIES,
    RECOMPUTE_POLICIES,
    Recompute,
    Schedule,
    expand,
    expanded,
    write,
    written,
)


def compose(model: Any) -> None:
    """Put techniques around the three functions of a model.MiniGPT."""
    model.schedule = Schedule(model.schedule)
    model.embed = partial(embed_tied, plain=model.embed)
    model.head_loss = partial(head_loss, plain=model.head_loss)
