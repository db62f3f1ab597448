"""What batches of any size take, told by the steps of two of them.

Each sequence adds the same to the bytes after an operator. Except in the head, which gets more
chunks instead of larger ones: it goes by its formula. And so do the blocks of CPU memory that
offload asks for, which are of round sizes; on a CPU they are there all the time.
"""

from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from memory.offload import bytes_of_blocks

from .timeline import StepMemory

MOST = 10**6  # sequences


def largest(
    one: StepMemory,
    two: StepMemory,
    budget: int,
    host_budget: float,
    head: Callable[[int], int],
    on_cpu: bool,
) -> int:
    """The most sequences that stay within `budget` bytes, and `host_budget` of CPU memory.

    `head`: tells the bytes that it takes, by sequences.
    """

    def at(sequences: int, *known: np.ndarray) -> np.ndarray:
        """Something that grows with the batch, by what is `known` of the two."""
        share = (sequences - one.batch_size) / (two.batch_size - one.batch_size)
        return known[0] + share * (known[1] - known[0])

    def host(sequences: int) -> int:
        sizes = at(sequences, *(np.array(step.moved) for step in (one, two)))
        return sum(bytes_of_blocks(round(size)) for size in sizes)

    def beside(sequences: int) -> int:
        """All but the head."""
        return int(at(sequences, *totals).max()) + host(sequences) * on_cpu

    def peak(sequences: int) -> int:
        of_head = int(at(sequences, *heads)) + head(sequences) + host(sequences) * on_cpu
        return max(beside(sequences), of_head)

    totals, heads = [], []
    for step in (one, two):
        inside, total = step.phase("head"), step.total - step.host * on_cpu
        heads.append(total[inside].max() - head(step.batch_size))
        totals.append(np.append(np.delete(total, inside), heads[-1]))
    # Chunks are whole: the head's bytes do not grow evenly, all others do. So look for the last
    # batch that could fit, and from there down.
    most = bisect_right(range(1, MOST), budget, key=beside)
    most = min(most, bisect_right(range(1, MOST), host_budget, key=host))
    while most > 0 and peak(most) > budget:
        most -= 1
    return most


def outside_of_head(step: StepMemory) -> int:
    """Operators."""
    inside = step.phase("head")
    return len(step.timeline) - (inside.stop - inside.start)
