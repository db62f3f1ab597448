"""Techniques that save memory in a model. This folder imports nothing else of the project.

policies.py   recompute policies: the tensors that a block keeps for backward
offload.py    CPU memory for the tensors that a block keeps
head.py       the loss without all logits at once; one gradient buffer for embedding and head
sequence.py   sequence parallelism: several processes share each sequence
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
    """Wrap the functions `schedule`, `embed` and `head_loss` of a model.MiniGPT in techniques."""
    model.schedule = Schedule(model.schedule)
    model.embed = partial(embed_tied, plain=model.embed)
    model.head_loss = partial(head_loss, plain=model.head_loss)
