"""A training step's memory and time, before it runs. It needs no GPU, and next to no memory.

step.py       one step of the real model, simulated: start here
tracker.py    which storages its operators make, and how long they live
work.py       the FLOPs of its operators, and the bytes that they move
timeline.py   what all that tells of the step
record.py     each storage by name: who made it, why it is there, when it goes
kernels.py    what a GPU's kernels take besides
shards.py     what sharding adds
clock.py      how long the step takes on a card
overhead.py   what Python takes, in small steps on a CPU
cards.py      the cards: memory, FLOP/s, bytes/s
batches.py    the peak of any batch, from the steps of two
choose.py     the fastest way to recompute that fits
formulas.py   memory and FLOPs as formulas, to check by hand
"""

from .cards import CARDS
from .clock import Card, this_machine
from .step import Planner
from .timeline import KINDS, StepMemory
from .tracker import kept_for_backward

__all__ = ["CARDS", "KINDS", "Card", "Planner", "StepMemory", "kept_for_backward", "this_machine"]
