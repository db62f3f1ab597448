"""A training step's memory, before it runs: no GPU is needed, and next to no memory.

tracker.py counts storages, work.py FLOPs and bytes; step.py follows a step with both, timeline.py
is what that tells; clock.py tells how long it takes on a card, of which cards.py has a table.
formulas.py has the same as formulas (and FLOPs), choose.py picks the fastest way that fits.
"""

from .cards import CARDS
from .clock import Card, this_machine
from .step import Planner
from .timeline import KINDS, StepMemory
from .tracker import kept_for_backward

__all__ = ["CARDS", "KINDS", "Card", "Planner", "StepMemory", "kept_for_backward", "this_machine"]
