"""What a simulated step took: bytes after each operator, and what the operators do.

`summarize` makes it of what a tracker saw, `repeat_blocks` of a step with fewer blocks.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from memory.offload import bytes_of_blocks
from model import MiniGPTConfig

from .clock import Card, seconds
from .tracker import StorageTracker
from .work import Operation, Work, fuse, summarize_work

KINDS = (
    "parameters",
    "gradients",  # with DDP's buckets
    "optimizer",  # its moments
    "activations",  # what forward keeps for backward
    "recomputed",  # what backward replays
    "head",  # logits, loss and their gradients
    "temporaries",  # the rest, gone before the phase ends; and what a GPU's kernels work in
)
MOST_RUNS = 30  # of operators that repeat, one after the other


@dataclass(frozen=True)
class StepMemory:
    """The memory of one training step, in bytes, after each of its operators."""

    config: MiniGPTConfig
    batch_size: int
    seq_len: int
    timeline: np.ndarray  # (operators + 1, len(KINDS)) int64
    places: list[tuple[int, str, int | None]]  # (from this operator on, phase, block)
    kept: int  # for backward when forward is over, by blocks and head
    kept_per_block: float  # on average
    moved: list[int]  # bytes of each tensor that offload sends away
    work: Work  # what the operators do
    compiled_work: Work  # the same with neighbours fused, as --compile does

    def seconds(self, card: Card, compiled: bool = False) -> float:
        """How long the step, of one micro-batch, takes on a card: an estimate (planner/clock.py).

        `compiled`: with neighbours fused, as --compile does.
        """
        return seconds(self.compiled_work if compiled else self.work, card)

    @cached_property
    def total(self) -> np.ndarray:
        """(operators + 1,) int64"""
        return self.timeline.sum(axis=1)

    @property
    def peak(self) -> int:
        return int(self.total.max())

    @property
    def host(self) -> int:
        """CPU memory that offload asks for. (On a CPU it is in the peak, too.)"""
        return sum(map(bytes_of_blocks, self.moved))

    @property
    def at_peak(self) -> dict[str, int]:
        """What the peak is made of: a kind's name -> bytes."""
        return dict(zip(KINDS, self.timeline[self.total.argmax()].tolist(), strict=True))

    @property
    def where(self) -> str:
        """The place of the peak: "head", or "backward, block 11"."""
        at = self.total.argmax()
        _, phase, block = [place for place in self.places if place[0] <= at][-1]
        return phase if block is None else f"{phase}, block {block}"

    def phase(self, name: str) -> slice:
        """The operators of "forward", "head", "backward" or "optimizer"."""
        inside = [place[1] == name for place in self.places]
        first, last = inside.index(True), len(inside) - inside[::-1].index(True)
        end = self.places[last][0] if last < len(inside) else len(self.timeline)
        return slice(self.places[first][0], end)


def summarize(
    tracker: StorageTracker,
    operations: list[Operation],
    config: MiniGPTConfig,
    batch_size: int,
    seq_len: int,
    forward_end: int,
    most_runs: int = MOST_RUNS,
) -> StepMemory:
    """Sort the storages by kind, and add them up operator by operator. In the timeline, what
    repeats does so at most `most_runs` times: its bytes are the same each time."""
    changes = np.zeros((tracker.now + 2, len(KINDS)), dtype=np.int64)
    kept = kept_by_blocks = 0
    for storage in tracker.storages:
        if storage.device.type != "cpu":
            continue  # offloaded
        is_kept = 0 < storage.born <= forward_end < storage.died and storage.kind != "parameters"
        if not storage.kind:
            if storage.phase == "head":
                storage.kind = "head"
            elif is_kept or storage.born == 0:  # (offload's buffers on a CPU)
                storage.kind = "activations"
            else:
                storage.kind = "recomputed" if storage.replayed else "temporaries"
        kind = KINDS.index(storage.kind)
        changes[storage.born, kind] += storage.bytes
        if storage.died != math.inf:
            changes[int(storage.died) + 1, kind] -= storage.bytes
        kept += storage.bytes * is_kept
        kept_by_blocks += storage.bytes * (is_kept and storage.block is not None)
    order = order_of(len(changes) - 1, tracker.repeats, most_runs)
    reached = np.maximum.accumulate(order)
    return StepMemory(
        config=config,
        batch_size=batch_size,
        seq_len=seq_len,
        timeline=changes[order].cumsum(axis=0),
        places=[
            (int(reached.searchsorted(at)), phase, block) for at, phase, block in tracker.places
        ],
        kept=kept,
        kept_per_block=kept_by_blocks / config.n_layers,
        moved=tracker.moved,
        work=summarize_work(operations, tracker.repeats),
        compiled_work=summarize_work(fuse(operations), tracker.repeats),
    )


def order_of(n: int, repeats: list[tuple[int, int, int]], most: int) -> np.ndarray:
    """Which of `n` operators runs, one after the other, if some are repeated (at most so often)."""
    order = np.arange(n)
    for begin, end, times in reversed(repeats):
        again = np.tile(order[begin:end], min(times, most) - 1)
        order = np.insert(order, end, again)
    return order


def parts(step: StepMemory) -> list[tuple[str, int | None, list[int], int]]:
    """What a step does, in order: (phase, block, operators at which it begins or begins anew, the
    operator at which the next one begins)."""
    found = []
    for (phase, block), group in groupby(step.places, lambda place: place[1:]):
        found.append((phase, block, [at for at, _, _ in group]))
    ends = [begins[0] for _, _, begins in found[1:]] + [len(step.timeline)]
    return [(*part, end) for part, end in zip(found, ends, strict=True)]


def repeat_blocks(step: StepMemory, config: MiniGPTConfig, times: list[int]) -> StepMemory:
    """The step of `config`, in which `times[i]` blocks in a row do what block i of `step` does.

    Equal blocks change the bytes equally, operator by operator. So the changes are repeated, and
    nothing else has to be simulated.
    """
    first = np.cumsum([0, *times])  # block i of `step` -> the first one that it stands for
    changes = np.diff(step.timeline, axis=0, prepend=0)
    repeated, places, now, more = [], [], 0, 0
    for phase, block, begins, end in parts(step):
        n, begin = 1 if block is None else times[block], begins[0]
        for i in range(n):
            if block is None:
                which = None
            else:
                which = int(first[block]) + (i if phase == "forward" else n - 1 - i)
            places += [(now + at - begin, phase, which) for at in begins]
            repeated.append(changes[begin:end])
            now += end - begin
        if phase == "forward" and block is not None:
            more += (n - 1) * int(changes[begin:end].sum())
    n_layers, few = config.n_layers, step.config.n_layers
    return replace(
        step,
        config=config,
        timeline=np.concatenate(repeated).cumsum(axis=0),
        places=places,
        kept=step.kept + more,
        kept_per_block=(step.kept_per_block * few + more) / n_layers,
        work=step.work.repeat_blocks(times),
        compiled_work=step.compiled_work.repeat_blocks(times),
    )
