"""Techniques that save memory, for a model to use. Nothing here imports the rest of the project.

policies.py: what a block keeps, what it replays. offload.py: what it keeps, in CPU memory.
head.py: the loss without its logits, and one gradient for the weight that both ends share.
"""

from .head import TiedEmbedding
from .offload import HostMemory
from .policies import POLICIES, RECOMPUTE_POLICIES, check_memory, schedule

__all__ = [
    "POLICIES",
    "RECOMPUTE_POLICIES",
    "HostMemory",
    "TiedEmbedding",
    "check_memory",
    "schedule",
]
