"""Predict the memory and the time of a training step before it runs.

A prediction needs no GPU, and almost no memory.

step.py         simulate one step of MiniGPT: start here
any_model.py    simulate one step of any other model: `plan_step`
op_recorder.py  record the operators and storages of a step; all results come from this record
timeline.py     split the record into segments; a step is a list of segments: bytes after each
                operator, FLOPs, and bytes that move
record.py       name each storage: the operator that made it, why it exists, when it is freed
operators.py    an operator: the tensors that it reads and writes, FLOPs, a GPU kernel's workspace
shards.py       add the memory of sharding
roofline.py     estimate the seconds of a step on a card
cards.py        the known cards: memory, FLOP/s, bytes/s; the card that --card means
batches.py      find the largest batch, from steps of two batch sizes
choose.py       choose the fastest recompute policy that fits
formulas.py     memory and FLOPs as formulas, to check by hand
"""

from .any_model import plan_step
from .cards import CARDS
from .op_recorder import kept_for_backward
from .roofline import Card, this_machine
from .step import Planner
from .timeline import KINDS, StepMemory
