"""What the operators of a step do: FLOPs of products, and bytes to and from memory.

planner/clock.py turns them into seconds on a card. What an operator reads, writes and computes
stands in the log of the step (planner/log.py, operators.py).

Whether bytes come from memory or from a cache depends on the card. So what is noted is a
*distance*: how many bytes were touched since these were touched last, they included. What is nearer
than a cache is large is found in it (as if it let go of what was used least recently).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .log import Op, Storage, Touch
from .operators import ATTENTION

WHICH = {name: i + 1 for i, name in enumerate(ATTENTION)}


@dataclass(frozen=True, eq=False)
class Work:
    """The operators of a step as numbers."""

    at: np.ndarray  # (operators,) int64, where in the log each begins
    flops: np.ndarray  # (operators,) float64
    precision: np.ndarray  # (operators,) uint8, index into PRECISIONS
    attention: np.ndarray  # (operators,) uint8: 1 attention, 2 its backward, 0 anything else
    times: np.ndarray  # (operators,) float64: how often it runs
    operator: np.ndarray  # (touches,) int32: who touches
    bytes: np.ndarray  # (touches,) int64
    distance: np.ndarray  # (touches,) float64, bytes; infinite: never touched before

    def moved(self, cache: float = 0, share: float = 0) -> np.ndarray:
        """(operators,) bytes; those found in a cache of `cache` bytes count as a `share`."""
        weight = np.where(self.distance > cache, 1, share)
        return np.bincount(self.operator, self.bytes * weight, minlength=len(self.flops))


def with_distances(ops: Iterable[Op]) -> list[Op]:
    """Return the operators of a whole log that move bytes, each with what it has moved.

    Views move none.
    """
    found = [op for op in ops if op.touches]
    memory = Distances(found)
    for i, op in enumerate(found):
        memory.free(op.at)
        touches = sorted(op.touches, key=lambda touch: touch.written)
        moved = tuple((touch.bytes, memory.touch(touch)) for touch in touches)
        found[i] = op._replace(moved=moved)
    return found


def summarize_work(ops: Sequence[Op]) -> Work:
    """Put operators from `with_distances` into arrays."""
    moved = [(i, *each) for i, op in enumerate(ops) for each in op.moved]
    operator, size, distance = np.array(moved, dtype=np.float64).reshape(-1, 3).T
    return Work(
        at=np.array([op.at for op in ops], dtype=np.int64),
        flops=np.array([op.flops for op in ops], dtype=np.float64),
        precision=np.array([op.precision for op in ops], dtype=np.uint8),
        attention=np.array([WHICH.get(op.name, 0) for op in ops], dtype=np.uint8),
        times=np.array([op.times for op in ops], dtype=np.float64),
        operator=operator.astype(np.int32),
        bytes=size.astype(np.int64),
        distance=distance,
    )


# A part of a storage that was touched: when, in bytes touched by all operators until then; and the
# largest distance since it was last written (infinite: it never was).
Span = tuple[int, float]


class Distances:
    """Tells how long ago, in bytes, something was touched last.

    A write is for free if what it overwrites was not yet written back: if it stayed in the cache
    since it was written. A new storage takes the place of the last one of its size that died.
    """

    def __init__(self, ops: Iterable[Op]):
        self.now = 0
        self.spans: dict[Storage, dict[tuple[int, int], Span]] = defaultdict(dict)
        self.freed: dict[int, list[Span]] = defaultdict(list)  # by size
        storages = dict.fromkeys(touch.storage for op in ops for touch in op.touches)
        self.dying = sorted(storages, key=lambda storage: storage.died, reverse=True)

    def free(self, until: int) -> None:
        """Storages that died before operator `until` make room."""
        while self.dying and self.dying[-1].died < until:
            storage = self.dying.pop()
            if spans := self.spans.pop(storage, None):
                self.freed[storage.bytes].append(max(spans.values()))

    def touch(self, touch: Touch) -> float:
        storage, place = touch.storage, (touch.start, touch.end)
        if storage not in self.spans and storage.born and self.freed[storage.bytes]:
            self.spans[storage][0, storage.bytes] = self.freed[storage.bytes].pop()
        distance = worst = math.inf
        for (start, end), (when, since_written) in self.spans[storage].items():
            far = self.now - when + end - start
            if start <= place[0] and place[1] <= end and far < distance:
                distance, worst = far, max(since_written, far)
        self.now += touch.bytes
        self.spans[storage][place] = self.now, 0 if touch.written else worst
        return worst if touch.written else distance
