"""Techniques that save memory, for a model to use. Nothing here imports the rest of the project.

policies.py   what a block keeps for backward, and what it replays instead
offload.py    what it keeps, in CPU memory
head.py       the loss without its logits, and one gradient for the weight that both ends share
sequence.py   a sequence that several processes share
past.py       the other way round: keys and values that are kept while a text is written
"""

from .head import TiedEmbedding
from .offload import HostMemory
from .past import Past
from .policies import POLICIES, RECOMPUTE_POLICIES, Recompute, expand, schedule, write
