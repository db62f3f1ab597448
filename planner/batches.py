"""Find the largest batch that fits, from the steps of two batch sizes.

Each sequence adds the same number of bytes after an operator. The head is the exception: more
tokens make more chunks, not larger chunks. So the head's bytes come from its formula, `head_bytes`.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from .timeline import StepMemory

MAX_BATCH = 10**6  # sequences


def largest_batch(
    one: StepMemory, two: StepMemory, budget: int, head: Callable[[int], int], on_cpu: bool
) -> int:
    """Return the largest number of sequences whose peak is at most `budget` bytes.

    Return MAX_BATCH if the two steps run different operators. (Offload moves only tensors of at
    least MIN_OFFLOAD_BYTES.)

    Args:
        one, two: steps with two different batch sizes.
        head: maps a number of sequences to the head's bytes.
        on_cpu: the peak includes offload's host buffers. Their padding does not grow evenly with
            the batch. So it is left out, and the result is an upper bound.
    """
    outside, heads = [], []
    for step in (one, two):
        head_ops = step.phase_slice("head")
        padding = (step.host_bytes - sum(step.offloaded_sizes)) * on_cpu
        heads.append(step.total[head_ops].max() - padding - head(step.batch_size))
        outside.append(np.append(ops_outside_head(step) - padding, heads[-1]))
    if len(outside[0]) != len(outside[1]):
        return MAX_BATCH

    def at(sequences: int, known: Sequence) -> np.ndarray:
        """Extrapolate bytes that grow evenly with the batch. `known`: bytes of `one` and `two`."""
        share = (sequences - one.batch_size) / (two.batch_size - one.batch_size)
        return known[0] + share * (known[1] - known[0])

    # All bytes grow evenly, except those of the head's formula, because its chunks are whole. So
    # find the largest batch that fits without them, then go down until it fits with them.
    largest = bisect_right(range(1, MAX_BATCH), budget, key=lambda n: int(at(n, outside).max()))
    while largest > 0 and int(at(largest, heads)) + head(largest) > budget:
        largest -= 1
    return largest


def ops_outside_head(step: StepMemory) -> np.ndarray:
    """Return the bytes after each operator outside the head: (operators,) int64."""
    return np.delete(step.total, step.phase_slice("head"))
