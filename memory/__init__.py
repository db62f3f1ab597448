"""Techniques that save memory in a model. This folder imports no other code of the project.

policies.py   recompute policies: the tensors that a block keeps for backward
offload.py    CPU memory for the tensors that a block keeps
head.py       the loss with few logits at a time; one gradient buffer for embedding and head
sequence.py   sequence parallelism: several processes share each sequence
"""

from functools import partial
from typing import Any

from .head import embed_tied, head_loss
from .offload import PinnedPool
from .policies import (
    POLICIES,
    POLICY_NAMES,
    BlockCallsByPolicy,
    RecomputePlan,
    format_recompute_plan,
    normalized_recompute,
    parse_recompute_plan,
    recompute_plan_of_config,
)


def apply_techniques(model: Any) -> None:
    """Replace `blocks_with_recompute`, `embed` and `head_loss` of a model.MiniGPT by wrappers that
    add the techniques."""
    model.blocks_with_recompute = BlockCallsByPolicy(model.blocks_with_recompute)
    model.embed = partial(embed_tied, plain=model.embed)
    model.head_loss = partial(head_loss, plain=model.head_loss)
