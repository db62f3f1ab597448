"""What batches of any size take, told by the steps of two of them.

Each sequence adds the same to the bytes after an operator. Except in the head, which gets more
chunks instead of larger ones: it goes by its formula. And so do the blocks of CPU memory that
offload asks for, which are of round sizes; on a CPU they are there all the time.
"""

from bisect import bisect_right

import numpy as np
import torch

from memory.offload import bytes_of_blocks

from .formulas import head_bytes
from .timeline import StepMemory

MOST = 10**6  # sequences


class Batches:
    def __init__(
        self, one: StepMemory, two: StepMemory, tokens: int, precision: torch.dtype, on_cpu: bool
    ):
        """`tokens`: of a sequence, that a process has."""
        self.one, self.tokens, self.precision, self.on_cpu = one, tokens, precision, on_cpu
        self.start, self.sent = self.by_operator(one), np.array(one.moved)
        more = two.batch_size - one.batch_size
        self.growth = (self.by_operator(two) - self.start) / more
        self.sent_growth = (np.array(two.moved) - self.sent) / more

    def by_operator(self, step: StepMemory) -> np.ndarray:
        """(operators outside of the head + 1,), the last one for what is beside the head."""
        inside, total = step.phase("head"), step.total - step.host * self.on_cpu
        beside = total[inside].max() - self.of_the_head(step.batch_size)
        return np.append(np.delete(total, inside), beside)

    def of_the_head(self, sequences: int) -> int:
        return head_bytes(self.one.config, sequences * self.tokens, self.precision)

    def host(self, sequences: int) -> int:
        """Bytes of CPU memory that offload asks for."""
        sizes = self.sent + self.sent_growth * (sequences - self.one.batch_size)
        return sum(bytes_of_blocks(round(size)) for size in sizes)

    def outside(self, sequences: int) -> np.ndarray:
        """All but the head."""
        here = self.start + self.growth * (sequences - self.one.batch_size)
        return here + self.host(sequences) * self.on_cpu

    def peak(self, sequences: int) -> int:
        now = self.outside(sequences)
        return int(max(now[:-1].max(), now[-1] + self.of_the_head(sequences)))

    def largest(self, budget: int, host: int | None) -> int:
        """The most sequences that stay within `budget` bytes, and `host` of CPU memory."""
        # Chunks are whole: the head's bytes do not grow evenly, all others do. So look for the last
        # batch that could fit, and from there down.
        most = bisect_right(range(1, MOST), budget, key=lambda n: self.outside(n).max())
        if host is not None:
            most = min(most, bisect_right(range(1, MOST), host, key=self.host))
        while most > 0 and self.peak(most) > budget:
            most -= 1
        return most


def outside_of_head(step: StepMemory) -> int:
    """Operators."""
    inside = step.phase("head")
    return len(step.timeline) - (inside.stop - inside.start)
