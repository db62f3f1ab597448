"""What a simulated step took: bytes after each operator, and what the operators do.

A step is a list of segments: one block's forward is one, for instance. What a segment adds, frees
and needs on the way does not depend on the others. So blocks that do the same share a segment, and
a step's memory and time are sums over its segments.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np

from memory.offload import padded_nbytes

from .op_recorder import Op, OpRecorder, PhaseMark, Storage
from .operators import ATTENTION
from .roofline import Card, op_seconds

KINDS = (
    "parameters",
    "gradients",  # with DDP's buckets
    "optimizer",  # its moments
    "activations",  # what forward keeps for backward
    "recomputed",  # what backward replays
    "head",  # logits, loss and their gradients
    "temporaries",  # the rest, gone before the phase ends; and what a GPU's kernels work in
)


# What an operator does: planner/roofline.py turns it into seconds.
WORK_DTYPE = np.dtype(
    [
        ("at", np.int64),  # its number
        ("flops", np.float64),  # of products
        ("bytes", np.float64),  # that it reads and writes
        ("precision", np.uint8),  # of its products: index into PRECISIONS
        ("attention", np.uint8),  # 1 attention, 2 its backward, 0 anything else
        ("times", np.float64),  # how often it runs
    ]
)


def work_of(ops: Sequence[Op]) -> np.recarray:
    """Return what the operators that move bytes do: an array of `WORK_DTYPE`."""
    attention = {name: i + 1 for i, name in enumerate(ATTENTION)}
    rows = [
        (at, op.flops, op.bytes, op.precision, attention.get(op.name, 0), op.times)
        for at, op in enumerate(ops)
        if op.bytes
    ]
    return np.array(rows, WORK_DTYPE).view(np.recarray)


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of a step: forward or backward of one call in MiniGPT.forward, which is of a block or
    of a group of blocks; or what lies between two calls."""

    places: list[PhaseMark]  # (operators of the segment before it, phase, block)
    changes: np.ndarray  # (operators, 2, kinds) int64: bytes that come, and that go, with each
    work: np.recarray  # of `WORK_DTYPE`, numbered from the segment's begin
    kept: int  # bytes for backward
    offloaded_sizes: list[int]  # bytes of each tensor that offload sends away

    @cached_property
    def added(self) -> int:
        """Bytes that are there after it, and were not before."""
        came, went = self.changes.sum(axis=(0, 2)).tolist()
        return came - went

    @cached_property
    def most(self) -> int:
        """The most bytes that are there on the way, above those when it begins."""
        return max(timeline_of([self]).sum(axis=1).tolist(), default=0)


@lru_cache(2**12)
def segment_seconds(segment: Segment, card: Card) -> float:
    # (Not `@`, a BLAS's product: what a CPU is decides in which order that adds up.)
    return float((op_seconds(segment.work, card) * segment.work.times).sum())


def timeline_of(segments: Iterable[Segment]) -> np.ndarray:
    """(operators, kinds) int64: bytes after each operator, above those before the first one."""
    came, went = np.concatenate([segment.changes for segment in segments]).swapaxes(0, 1)
    return (came - went).cumsum(axis=0) + went


def split_into_segments(log: OpRecorder, calls: Iterable[int] = ()) -> list[Segment]:
    """Cut a log into segments, where another call begins or what lies between two of them.

    `calls`: of how many blocks each call is; by default of one.
    """
    call_of = [i for i, size in enumerate(calls) for _ in range(size)]

    def part(place: PhaseMark) -> tuple[str, int | None]:
        _, phase, block = place
        return phase, call_of[block] if call_of and block is not None else block

    changes = np.zeros((log.n_ops + 1, 2, len(KINDS)), dtype=np.int64)
    kept = np.zeros(log.n_ops + 1, dtype=np.int64)
    for storage in log.storages:
        if storage.device.type != "cpu":
            continue  # offloaded
        is_kept = 0 < storage.born <= log.forward_end < storage.died
        is_kept &= storage.kind != "parameters"
        storage.kind = storage.kind or kind_of(storage, is_kept)
        kind = KINDS.index(storage.kind)
        changes[storage.born, 0, kind] += storage.nbytes
        if storage.died != math.inf:
            changes[int(storage.died), 1, kind] += storage.nbytes
        kept[storage.born] += storage.nbytes * is_kept
    parts = [list(places) for _, places in groupby(log.places, part)]
    begins = [places[0][0] for places in parts] + [log.n_ops + 1]
    return [
        Segment(
            places=[(at - begin, phase, block) for at, phase, block in places],
            changes=changes[begin:end],
            work=work_of(log.ops[begin:end]),
            kept=int(kept[begin:end].sum()),
            offloaded_sizes=[size for size, place in log.moved if place in places],
        )
        for places, (begin, end) in zip(parts, pairwise(begins), strict=True)
    ]


def kind_of(storage: Storage, is_kept: bool) -> str:
    if storage.phase == "head":
        return "head"
    if is_kept or storage.born == 0:  # (offload's buffers on a CPU)
        return "activations"
    return "recomputed" if storage.replayed else "temporaries"


@dataclass(frozen=True, eq=False)
class StepMemory:
    """The memory of one training step, in bytes, after each of its operators."""

    config: Any  # MiniGPTConfig, or None: another model (planner/any_model.py)
    batch_size: int  # 0 of another model, whose batch may be anything
    seq_len: int
    segments: list[tuple[Segment, int]]  # in order; and what is to be added to its blocks' numbers

    def seconds(self, card: Card) -> float:
        """Return the estimated seconds of one micro-batch's step on a card (planner/roofline.py).

        The estimate is for eager code, also with --compile.
        """
        return math.fsum(segment_seconds(segment, card) for segment, _ in self.segments)

    @cached_property
    def begins(self) -> list[int]:
        """The operator with which each segment begins."""
        sizes = (len(segment.changes) for segment, _ in self.segments)
        return list(accumulate(sizes, initial=0))

    @property
    def work(self) -> np.recarray:
        """What the operators do: an array of `WORK_DTYPE`."""
        work = np.concatenate([segment.work for segment, _ in self.segments]).view(np.recarray)
        work.at += np.repeat(self.begins[:-1], [len(segment.work) for segment, _ in self.segments])
        return work

    @property
    def places(self) -> list[PhaseMark]:
        """(from this operator on, phase, block)"""
        return [
            (begin + at, phase, block if block is None else block + more)
            for begin, (segment, more) in zip(self.begins, self.segments, strict=False)
            for at, phase, block in segment.places
        ]

    @cached_property
    def timeline(self) -> np.ndarray:
        """(operators + 1, len(KINDS)) int64"""
        return timeline_of(segment for segment, _ in self.segments)

    @cached_property
    def total(self) -> np.ndarray:
        """(operators + 1,) int64"""
        return self.timeline.sum(axis=1)

    @cached_property
    def peak(self) -> int:
        peak = level = 0
        for segment, _ in self.segments:
            peak, level = max(peak, level + segment.most), level + segment.added
        return peak

    @property
    def kept(self) -> int:
        """For backward when forward is over, by blocks and head."""
        return sum(segment.kept for segment, _ in self.segments)

    @property
    def kept_per_block(self) -> float:
        """On average."""
        of_blocks = [segment for segment, _ in self.segments if segment.places[0][2] is not None]
        n_blocks = len({block for *_, block in self.places} - {None})
        return sum(segment.kept for segment in of_blocks) / max(1, n_blocks)

    @property
    def offloaded_sizes(self) -> list[int]:
        """Bytes of each tensor that offload sends away."""
        return [size for segment, _ in self.segments for size in segment.offloaded_sizes]

    @property
    def host_bytes(self) -> int:
        """CPU memory that offload asks for. (On a CPU it is in the peak, too.)"""
        return sum(map(padded_nbytes, self.offloaded_sizes))

    @property
    def at_peak(self) -> dict[str, int]:
        """What the peak is made of: a kind's name -> bytes."""
        return dict(zip(KINDS, self.timeline[self.total.argmax()].tolist(), strict=True))

    @property
    def peak_location(self) -> str:
        """The place of the peak: "head", or "backward, block 11"."""
        at = self.total.argmax()
        _, phase, block = [place for place in self.places if place[0] <= at][-1]
        return phase if block is None else f"{phase}, block {block}"

    def phase(self, name: str) -> slice:
        """The operators of "forward", "head", "backward" or "optimizer"."""
        inside = [stretch for stretch in phase_intervals(self) if stretch[0] == name]
        return slice(inside[0][2][0], inside[-1][3])


PhaseInterval = tuple[str, int | None, list[int], int]


def phase_intervals(step: StepMemory) -> list[PhaseInterval]:
    """What a step does, in order: (phase, block, operators at which it begins or begins anew, the
    operator at which the next one begins)."""
    found = [
        (phase, block, [at for at, _, _ in group])
        for (phase, block), group in groupby(step.places, lambda place: place[1:])
    ]
    ends = [begins[0] for _, _, begins in found[1:]] + [len(step.timeline)]
    return [(*stretch, end) for stretch, end in zip(found, ends, strict=True)]
