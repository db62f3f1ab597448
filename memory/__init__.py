"""Techniques that save memory, for a model to use. Nothing here imports the rest of the project.

policies.py   what a block keeps for backward, and what it replays instead
offload.py    what it keeps, in CPU memory
head.py       the loss without its logits, and one gradient for the weight that both ends share
sequence.py   a sequence that several processes share
"""

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
    """Give a model.MiniGPT, in place of its own functions, those that take less memory."""
    model.schedule, model.embed, model.head_loss = Schedule(), embed_tied, head_loss
