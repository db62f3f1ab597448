"""A training step's memory and time, before it runs. It needs no GPU, and next to no memory.

step.py       one step of the real model, simulated: start here
any_model.py  one step of any other model: plan_step
op_recorder.py  the one log of it: operators and storages. All else is made of that:
timeline.py   the log, cut into segments; a step is a list of them: bytes after each operator, FLOPs
              and the bytes that move
record.py     each storage by name: who made it, why it is there, when it goes
operators.py  what an operator reads, writes and costs; what a GPU's kernels take besides
shards.py     what sharding adds
roofline.py   how long the step takes on a card
cards.py      the cards: memory, FLOP/s, bytes/s; and which of them --card means
batches.py    the largest batch, from the steps of two
choose.py     the fastest way to recompute that fits
formulas.py   memory and FLOPs as formulas, to check by hand
"""

from .any_model import plan_step
from .cards import CARDS
from .op_recorder import kept_for_backward
from .roofline import Card, this_machine
from .step import Planner
from .timeline import KINDS, StepMemory
