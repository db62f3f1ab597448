"""What Python does around the operators of a step, in operators that take it as long.

Where nothing runs meanwhile (on a CPU) a small model's step takes most of its time there. Hooks on
saved tensors cost some: an activation checkpoint has its own, in forward and again in its replay.
And selective checkpointing looks at each operator that it might keep or replay.
"""

import sys
from types import FrameType
from typing import Any

import torch

from .tracker import StorageTracker

# Where hooks begin; each operator under them, views too; each one that another mode looks at.
# Fitted to all policies' times in a model of 8 channels: within 10 % (CPython 3.11, torch 2.13).
HOOKS, UNDER_HOOKS, LOOK = 10, 0.6, 1.6


class Overhead:
    """Adds up what Python does until somebody takes it."""

    def __init__(self) -> None:
        self.since = 0.0  # operators
        self.hooks: Any = None  # those that were seen last

    def look(self) -> None:
        """Around the operator that a StorageTracker is being told of."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None:
            self.since += UNDER_HOOKS
            if hooks[0] is not self.hooks:
                self.since += HOOKS
                self.hooks = hooks[0]
        if is_looked_at():
            self.since += LOOK

    def take(self) -> float:
        since, self.since = self.since, 0.0
        return since


def is_looked_at() -> bool:
    """Was the operator called by another mode than the tracker's?"""
    frame: FrameType | None = sys._getframe()
    while frame and frame.f_code is not StorageTracker.__torch_dispatch__.__code__:
        frame = frame.f_back
    frame = frame and frame.f_back
    for _ in range(4):  # torch has some of its own in between
        if frame is None:
            return False
        if frame.f_code.co_name == "__torch_dispatch__":
            return True
        frame = frame.f_back
    return False
