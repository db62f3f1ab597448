"""What a simulated step took: bytes after each operator, and what the operators do.

`summarize` makes it of the log of a step (planner/log.py). What repeats, equal blocks and equal
chunks of the head, was simulated once: it changes the bytes equally each time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from memory.offload import bytes_of_blocks
from model import MiniGPTConfig

from .clock import Card, seconds
from .log import Log, Op, Place, Repeat, Storage
from .work import Work, summarize_work, what_moves

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

    config: Any  # MiniGPTConfig, or None: another model (planner/any_model.py)
    batch_size: int  # 0 of another model, whose batch may be anything
    seq_len: int
    timeline: np.ndarray  # (operators + 1, len(KINDS)) int64
    places: list[Place]  # (from this operator on, phase, block)
    kept: int  # for backward when forward is over, by blocks and head
    kept_per_block: float  # on average
    moved: list[int]  # bytes of each tensor that offload sends away
    ops: list[Op]  # those that move bytes
    repeats: list[Repeat]  # and which of them run more than once

    def seconds(self, card: Card) -> float:
        """How long the step, of one micro-batch, takes on a card: an estimate (planner/clock.py).
        It is of eager code, with --compile as well."""
        return seconds(self.work, card)

    @cached_property
    def work(self) -> Work:
        """What the operators do."""
        return summarize_work(self.ops, self.repeats)

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
        inside = [stretch for stretch in stretches(self) if stretch[0] == name]
        return slice(inside[0][2][0], inside[-1][3])


class Shown(NamedTuple):
    """A block of the log, and those of the model for which it stands."""

    call: int  # of a group of blocks, which are called, and repeat, as one; or of a block
    blocks: range


def summarize(
    log: Log,
    config: MiniGPTConfig | None = None,
    batch_size: int = 0,
    seq_len: int = 0,
    shown: list[Shown] | None = None,
    most_runs: int = MOST_RUNS,
) -> StepMemory:
    """The step of `config`, of which the log has a few blocks (`shown`), by default all.

    Its storages are sorted by kind, and added up operator by operator. In the timeline the head's
    chunks repeat at most `most_runs` times.
    """
    shown = shown or [
        Shown(i, range(i, i + 1))
        for i in range(max((1 + block for *_, block in log.places if block is not None), default=0))
    ]
    times = {None: 1} | {i: len(its.blocks) for i, its in enumerate(shown)}
    # One place of each call, forward or backward. (A group's replay goes through all its blocks.)
    parts = groupby(log.places, lambda at: (at[1], at[2] is not None and shown[at[2]].call))
    first = [next(places) for _, places in parts]
    ends = [begin for begin, *_ in first[1:]] + [log.now + 1]
    blocks = [(place[0], end, times[place[2]]) for place, end in zip(first, ends, strict=True)]
    changes = np.zeros((log.now + 2, len(KINDS)), dtype=np.int64)
    kept_beside = kept_by_blocks = 0
    for storage in log.storages:
        if storage.device.type != "cpu":
            continue  # offloaded
        is_kept = 0 < storage.born <= log.forward_end < storage.died
        is_kept &= storage.kind != "parameters"
        storage.kind = storage.kind or kind_of(storage, is_kept)
        kind = KINDS.index(storage.kind)
        # (What was there before the step, offload's buffers, repeats with no operator.)
        of_all = storage.bytes * times[storage.block]
        changes[storage.born, kind] += storage.bytes if storage.born else of_all
        if storage.died != math.inf:
            changes[int(storage.died) + 1, kind] -= storage.bytes
        if is_kept and storage.block is not None:
            kept_by_blocks += of_all
        elif is_kept:
            kept_beside += storage.bytes
    few_chunks = [(begin, end, min(n, most_runs)) for begin, end, n in log.repeats]
    order = order_of(log.now + 1, blocks + few_chunks)
    return StepMemory(
        config=config,
        batch_size=batch_size,
        seq_len=seq_len,
        timeline=changes[order].cumsum(axis=0),
        places=places_of(log, shown, order),
        kept=kept_beside + kept_by_blocks,
        kept_per_block=kept_by_blocks / max(1, sum(len(its.blocks) for its in shown)),
        moved=[size for size, block in log.moved for _ in range(times[block])],
        ops=what_moves(log.ops),
        repeats=blocks + log.repeats + log.repeats_of_work,
    )


def kind_of(storage: Storage, is_kept: bool) -> str:
    if storage.phase == "head":
        return "head"
    if is_kept or storage.born == 0:  # (offload's buffers on a CPU)
        return "activations"
    return "recomputed" if storage.replayed else "temporaries"


def order_of(n: int, repeats: list[Repeat]) -> np.ndarray:
    """Which of `n` operators runs, one after the other, if some are repeated; repeats may lie
    within others."""
    order, now_at = np.arange(n), np.arange(n + 1)
    for begin, end, times in sorted(repeats, key=lambda repeat: (-repeat[0], repeat[1])):
        once = order[now_at[begin] : now_at[end]]
        order = np.insert(order, now_at[end], np.tile(once, times - 1))
        now_at[end:] += len(once) * (times - 1)
    return order


def places_of(log: Log, shown: list[Shown], order: np.ndarray) -> list[Place]:
    """Where each of the blocks begins in that order, and all else."""
    found: list[Place] = []
    for at, phase, block in log.places:
        which: Sequence[int | None] = [None] if block is None else shown[block].blocks
        rows = np.flatnonzero(order == at)[:: 1 if phase == "forward" else -1].tolist()
        found += [(row, phase, its) for row, its in zip(rows, which, strict=True)]
    return sorted(found, key=lambda place: place[0])


Stretch = tuple[str, int | None, list[int], int]


def stretches(step: StepMemory) -> list[Stretch]:
    """What a step does, in order: (phase, block, operators at which it begins or begins anew, the
    operator at which the next one begins)."""
    found = [
        (phase, block, [at for at, _, _ in group])
        for (phase, block), group in groupby(step.places, lambda place: place[1:])
    ]
    ends = [begins[0] for _, _, begins in found[1:]] + [len(step.timeline)]
    return [(*stretch, end) for stretch, end in zip(found, ends, strict=True)]
