"""The largest batch, told by the steps of two batches.

Each sequence adds the same to the bytes after an operator. Except in the head, which gets more
chunks instead of larger ones: it goes by its formula.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from .timeline import StepMemory

MAX_BATCH = 10**6  # sequences


def largest_batch(
    one: StepMemory, two: StepMemory, budget: int, head: Callable[[int], int], on_cpu: bool
) -> int:
    """Return the most sequences whose peak stays within `budget` bytes; MOST if the two steps do
    not run the same operators (offload moves tensors from a certain size on).

    `head`: tells the bytes that it takes, by sequences. `on_cpu`: offload's buffers count, and are
    whole, too. Without that the batch is an upper bound.
    """
    outside, heads = [], []
    for step in (one, two):
        inside = step.phase("head")
        padding = (step.host_bytes - sum(step.offloaded_sizes)) * on_cpu
        heads.append(step.total[inside].max() - padding - head(step.batch_size))
        outside.append(np.append(ops_outside_head(step) - padding, heads[-1]))
    if len(outside[0]) != len(outside[1]):
        return MAX_BATCH

    def at(sequences: int, known: Sequence) -> np.ndarray:
        """Something that grows with the batch, by what is `known` of the two."""
        share = (sequences - one.batch_size) / (two.batch_size - one.batch_size)
        return known[0] + share * (known[1] - known[0])

    # Chunks are whole: the head's bytes do not grow evenly, all others do. So look for the last
    # batch that could fit, and from there down.
    most = bisect_right(range(1, MAX_BATCH), budget, key=lambda n: int(at(n, outside).max()))
    while most > 0 and int(at(most, heads)) + head(most) > budget:
        most -= 1
    return most


def ops_outside_head(step: StepMemory) -> np.ndarray:
    """(operators,) Bytes after each operator that is not the head's."""
    return np.delete(step.total, step.phase("head"))
