"""Techniques that save memory in a model; of the project, they import only model.py.

gpt.py        MemorySavingGPT: MiniGPT with all these techniques, what the trainers build
policies.py   recompute policies: the tensors that a block keeps for backward
offload.py    CPU memory for the tensors that a block keeps
head.py       the loss with few logits at a time; one gradient buffer for embedding and head
sequence.py   sequence parallelism: several processes share each sequence
"""

from .gpt import MemorySavingGPT, SequenceParallelGPT
from .offload import PinnedPool
from .policies import (
    POLICIES,
    POLICY_NAMES,
    RecomputePlan,
    format_recompute_plan,
    parse_recompute_plan,
    recompute_plan_of_config,
)
