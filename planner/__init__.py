"""A training step's memory, before it runs: no GPU is needed, and next to no memory.

tracker.py counts storages, step.py follows a whole step, formulas.py has the same as formulas (and
FLOPs), choose.py picks the cheapest way that fits.
"""

from .step import KINDS, Planner, StepMemory
from .tracker import kept_for_backward

__all__ = ["KINDS", "Planner", "StepMemory", "kept_for_backward"]
