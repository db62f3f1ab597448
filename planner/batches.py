"""Find the largest batch that fits in memory: extrapolate from planned steps of two batch sizes.

The bytes that exist after an operator grow by the same number with each further sequence, so two
batch sizes suffice to extrapolate. The exception is the head, which splits more tokens into more
chunks, not into larger ones: its bytes come from the formula `head_bytes` in planner/formulas.py.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from .timeline import StepMemory

MAX_BATCH = 10**6  # sequences


def largest_batch(
    one: StepMemory, two: StepMemory, budget: int, head: Callable[[int], int], on_cpu: bool
) -> int:
    """Return the largest number of sequences with which a step's peak is at most `budget` bytes.

    Return MAX_BATCH if the two steps run different operators, because their bytes cannot be
    extrapolated. (With offload a larger batch may run more operators: offload moves only tensors of
    at least MIN_OFFLOAD_BYTES.)

    Args:
        one, two: steps with two different batch sizes.
        head: function that maps a number of sequences to the head's bytes.
        on_cpu: True: the steps are planned for a CPU, where a peak includes the host buffers of
            offload. Their padding does not grow linearly with the batch and is left out, so the
            result is an upper bound.
    """
    outside, heads = [], []
    for step in (one, two):
        head_ops = step.phase_slice("head")
        padding = sum(pinned - size for size, pinned in step.offloaded_sizes) * on_cpu
        # Until the update, ids and labels of a single sequence are two views of T + 1 tokens.
        shared = 8 * (step.seq_len - 1) * (step.batch_size == 1)
        heads.append(
            step.bytes_after_each_op[head_ops].max() + shared - padding - head(step.batch_size)
        )
        others = bytes_at_ops_outside_head(step) - padding
        others[: step.phase_slice("optimizer").start - len(step.timeline)] += shared
        outside.append(np.append(others, heads[-1]))
    if len(outside[0]) != len(outside[1]):
        return MAX_BATCH

    # All bytes grow linearly with the batch, except those that `head` returns, because the head
    # runs in whole chunks: find the largest batch that fits without them, and reduce it until it
    # fits with them.
    sizes = one.batch_size, two.batch_size
    largest = largest_linear_batch(sizes, outside, budget)
    while largest > 0 and int(extrapolate(largest, sizes, heads)) + head(largest) > budget:
        largest -= 1
    return largest


def largest_linear_batch(sizes: tuple[int, int], known: Sequence[np.ndarray], budget: int) -> int:
    """Return the largest number of sequences with at most `budget` bytes after each operator, for
    bytes that grow linearly with the batch. `known`: for each of the two `sizes`, the bytes after
    each operator, (operators,).
    """

    def peak(sequences: int) -> int:
        return int(extrapolate(sequences, sizes, known).max())

    return bisect_right(range(1, MAX_BATCH), budget, key=peak)


def extrapolate(sequences: int, sizes: tuple[int, int], known: Sequence) -> np.ndarray:
    """Return the bytes for a number of sequences, extrapolated linearly from the bytes `known` for
    two `sizes`."""
    return known[0] + (sequences - sizes[0]) / (sizes[1] - sizes[0]) * (known[1] - known[0])


def bytes_at_ops_outside_head(step: StepMemory) -> np.ndarray:
    """Return the bytes after each operator that is not in the head: (operators,) int64."""
    return np.delete(step.bytes_after_each_op, step.phase_slice("head"))
