"""Compute the memory and the work of a simulated step.

Memory is the bytes that exist after each operator; work is the FLOPs of each operator, and the
bytes that it reads and writes. A step is a list of segments, such as the forward of one block, and
its memory and its time are sums over them. Equal blocks share one segment, because the bytes that a
segment allocates and frees do not depend on other segments.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np

from .op_recorder import Op, OpRecorder, PhaseMark, Storage
from .operators import UNIFIED_ATTENTION_NAMES
from .roofline import Card, seconds_of_each_op
from .units import format_bytes, format_sizes

KINDS = (
    "parameters",
    "gradients",  # also those in DDP's buckets
    "optimizer",  # the optimizer's state, such as moments
    "activations",  # kept by forward for backward
    "recomputed",  # activations that backward makes again
    "head",  # logits, the loss, and their gradients
    "temporaries",  # all other storages, freed before their phase ends; workspaces of GPU kernels
)


# The work of one operator; planner/roofline.py turns it into seconds.
OP_WORK_DTYPE = np.dtype(
    [
        ("at", np.int64),  # index of the operator
        ("flops", np.float64),  # FLOPs of its matrix products, 2 per multiply-add
        ("bytes", np.float64),  # bytes that it reads and writes
        ("precision", np.uint8),  # dtype of its products, as an index into MATMUL_DTYPES
        ("attention", np.uint8),  # 1: attention, 2: its backward, 0: another operator
        ("times", np.float64),  # number of times that it runs
        # True: it reads the gradients of earlier micro-batches. Before the update such operators
        # add to these gradients, so the first micro-batch does not run them.
        ("reads_sums", np.bool_),
        ("replayed", np.bool_),  # True: in the recomputation of an activation checkpoint
    ]
)


def op_flops_and_bytes(ops: Sequence[Op], sums: Collection[Storage] = ()) -> np.recarray:
    """Return an array of OP_WORK_DTYPE with one row for each operator that reads or writes bytes.

    `sums`: the gradients of earlier micro-batches (`OpRecorder.gradient_sums`).
    """
    attention = {name: i + 1 for i, name in enumerate(UNIFIED_ATTENTION_NAMES)}
    rows = [
        (
            *(at, op.flops, op.bytes, op.matmul_dtype_index, attention.get(op.name, 0)),
            *(op.repeat_count, any(storage in sums for _, storage in op.named_inputs)),
            op.replayed,
        )
        for at, op in enumerate(ops)
        if op.bytes
    ]
    return np.array(rows, OP_WORK_DTYPE).view(np.recarray)


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of a step: forward or backward of one call, or the operators between two calls.

    A call in MiniGPT.forward runs one block, or a group of blocks that share an activation
    checkpoint.
    """

    phase_marks: list[PhaseMark]  # (first operator, counted from the segment's start; phase; block)
    # (operators, 2, kinds) int64: bytes that each operator allocates; bytes freed right after it.
    allocated_and_freed_by_kind: np.ndarray
    flops_and_bytes_by_op: np.recarray  # of OP_WORK_DTYPE; `at` is counted from the segment's start
    kept_bytes: int  # bytes that the segment keeps for backward
    # Of each tensor that offload copies out: its bytes, and the bytes of CPU memory for it.
    offloaded_sizes: list[tuple[int, int]]

    @cached_property
    def net_bytes(self) -> int:
        """Bytes after the segment minus bytes before it."""
        allocated, freed = self.allocated_and_freed_by_kind.sum(axis=(0, 2)).tolist()
        return allocated - freed

    @cached_property
    def needed_and_replayed_flops(self) -> tuple[float, float]:
        """FLOPs of the matrix products without recompute, and of those that run again.

        The scores that backward of fused attention computes again, the first of its five products,
        are not counted, because it does so with every policy."""
        work = self.flops_and_bytes_by_op
        flops = work.flops * work.times * np.where(work.attention == 2, 0.8, 1)
        return float(flops[~work.replayed].sum()), float(flops[work.replayed].sum())

    @cached_property
    def peak_increase(self) -> int:
        """Bytes at the segment's peak minus bytes before the segment."""
        return max(live_bytes_by_op_and_kind([self]).sum(axis=1).tolist(), default=0)


@lru_cache(2**12)
def segment_seconds(segment: Segment, card: Card, is_first: bool = False) -> float:
    """Return the estimated seconds of a segment on a card. `is_first`: in the first micro-batch."""
    work = segment.flops_and_bytes_by_op
    # Do not use `@`: BLAS adds in an order that depends on the CPU, and the order changes rounding.
    return float((seconds_of_each_op(work, card) * work.times)[~(is_first & work.reads_sums)].sum())


def live_bytes_by_op_and_kind(segments: Iterable[Segment]) -> np.ndarray:
    """Return the bytes of each kind after each operator: (operators, kinds) int64.

    Storages that exist before the first operator do not count, but those that are freed right after
    an operator do count for it.
    """
    allocated, freed = np.concatenate(
        [segment.allocated_and_freed_by_kind for segment in segments]
    ).swapaxes(0, 1)
    return (allocated - freed).cumsum(axis=0) + freed


def split_into_segments(log: OpRecorder, calls: Iterable[int] = ()) -> list[Segment]:
    """Split a record into segments: each call's forward, its backward, and the parts in between.

    `calls`: number of blocks of each call; by default each call runs one block.
    """
    call_of = [i for i, size in enumerate(calls) for _ in range(size)]

    def part_of(place: PhaseMark) -> tuple[str, int | None]:
        _, phase, block = place
        return phase, call_of[block] if call_of and block is not None else block

    changes = np.zeros((log.n_ops + 1, 2, len(KINDS)), dtype=np.int64)
    kept = np.zeros(log.n_ops + 1, dtype=np.int64)
    for storage in log.storages:
        if storage.device.type != "cpu":
            continue  # a host buffer of offload, on "meta" (see SimulatedPinnedPool)
        is_kept = 0 < storage.born <= log.forward_end < storage.died
        is_kept &= storage.kind != "parameters"
        storage.kind = storage.kind or storage_kind(storage, is_kept)
        kind = KINDS.index(storage.kind)
        changes[storage.born, 0, kind] += storage.nbytes
        if storage.died != math.inf:
            changes[int(storage.died), 1, kind] += storage.nbytes
        kept[storage.born] += storage.nbytes * is_kept
    parts = [list(places) for _, places in groupby(log.phase_marks, part_of)]
    begins = [places[0][0] for places in parts] + [log.n_ops + 1]
    return [
        Segment(
            phase_marks=[(at - begin, phase, block) for at, phase, block in places],
            allocated_and_freed_by_kind=changes[begin:end],
            flops_and_bytes_by_op=op_flops_and_bytes(log.ops[begin:end], log.gradient_sums),
            kept_bytes=int(kept[begin:end].sum()),
            offloaded_sizes=[sizes for sizes, place in log.offloaded_tensors if place in places],
        )
        for places, (begin, end) in zip(parts, pairwise(begins), strict=True)
    ]


def storage_kind(storage: Storage, is_kept: bool) -> str:
    """Return the kind of a storage without a label. `is_kept`: forward keeps it for backward."""
    if storage.phase == "head":
        return "head"
    if is_kept or storage.born == 0:  # born 0: it existed before the step
        return "activations"
    return "recomputed" if storage.replayed else "temporaries"


@dataclass(frozen=True, eq=False)
class StepMemory:
    """Memory of one training step, in bytes after each of its operators."""

    config: Any  # MiniGPTConfig; None: another model (planner/any_model.py)
    batch_size: int  # sequences; another model: first dimension of its first input, or 0
    seq_len: int  # tokens
    # In order: (segment, number to add to its block indices).
    segments_and_block_shifts: list[tuple[Segment, int]]
    # (name, bytes) of the largest groups of tensors at the peak (`explain_storages`); (): tensors
    # have no names here.
    largest_at_peak: Sequence[tuple[str, int]] = ()

    def __repr__(self) -> str:
        """Return a verdict as readable text: the peak and where it is, kinds of tensors
        above 1 %, the largest groups of tensors, and what the optimizer's temporaries cost."""
        kinds = [(k, n) for k, n in self.bytes_by_kind_at_peak.items() if n >= self.peak / 100]
        groups = [*kinds, *self.largest_at_peak]
        texts = format_sizes([self.peak, *(size for _, size in groups)])
        titles = {0: "peak", 1: "by kind", 1 + len(kinds): "largest"}
        names = [self.peak_location, *(name for name, _ in groups)]
        lines = [
            f"{titles.get(i, ''):9}{text:>10}  {name}"
            for i, (text, name) in enumerate(zip(texts, names, strict=True))
        ]
        # Bytes after each operator if the update of the weights made no temporaries.
        update, levels = self.phase_slice("optimizer"), self.bytes_after_each_op.copy()
        levels[update] -= self.timeline[update, KINDS.index("temporaries")]
        if saving := self.peak - int(levels.max()):
            lines.append(
                "hint     the optimizer's temporaries are the peak; without them, as with "
                f"torch.optim.AdamW(..., fused=True), it is {format_bytes(saving)} less"
            )
        return "\n".join(lines)

    def seconds(self, card: Card, micro_batches: int = 1) -> float:
        """Return the estimated seconds of a training step on this card.

        The step has n micro-batches and one update. If a simulated micro-batch with its update
        takes t seconds, and the update alone u, the step takes n (t - u) + u, less the time of
        additions to earlier gradients, which the first micro-batch does not run. The estimate
        (planner/roofline.py) is for eager code, and does not change with --compile.
        """
        *segments, update = [segment for segment, _ in self.segments_and_block_shifts]
        first, other = (
            math.fsum(segment_seconds(segment, card, is_first) for segment in segments)
            for is_first in (True, False)
        )
        return first + (micro_batches - 1) * other + segment_seconds(update, card)

    def backward_and_total_seconds(self, card: Card) -> tuple[float, float]:
        """Return the seconds of backward, and of a whole micro-batch without the update."""
        timed = [
            (segment.phase_marks[0][1], segment_seconds(segment, card))
            for segment, _ in self.segments_and_block_shifts[:-1]
        ]
        backward = sum(seconds for phase, seconds in timed if phase == "backward")
        return backward, sum(seconds for _, seconds in timed)

    @cached_property
    def segment_starts(self) -> list[int]:
        """Index of each segment's first operator in the step; at the end len(self.timeline)."""
        sizes = (
            len(segment.allocated_and_freed_by_kind)
            for segment, _ in self.segments_and_block_shifts
        )
        return list(accumulate(sizes, initial=0))

    @property
    def flops_and_bytes_by_op(self) -> np.recarray:
        """Array of OP_WORK_DTYPE with one row for each operator that reads or writes bytes."""
        work = np.concatenate(
            [segment.flops_and_bytes_by_op for segment, _ in self.segments_and_block_shifts]
        ).view(np.recarray)
        work.at += np.repeat(
            self.segment_starts[:-1],
            [len(segment.flops_and_bytes_by_op) for segment, _ in self.segments_and_block_shifts],
        )
        return work

    @property
    def phase_marks(self) -> list[PhaseMark]:
        """Phases in order: (index of the first operator, phase, block that runs or None)."""
        return [
            (begin + at, phase, block if block is None else block + shift)
            for begin, (segment, shift) in zip(
                self.segment_starts, self.segments_and_block_shifts, strict=False
            )
            for at, phase, block in segment.phase_marks
        ]

    @cached_property
    def timeline(self) -> np.ndarray:
        """Bytes of each kind after each operator: (operators + 1, len(KINDS)) int64; row 0 has the
        bytes before the first operator."""
        return live_bytes_by_op_and_kind(segment for segment, _ in self.segments_and_block_shifts)

    @cached_property
    def bytes_after_each_op(self) -> np.ndarray:
        """Bytes after each operator: (operators + 1,) int64; entry 0: before the first operator."""
        return self.timeline.sum(axis=1)

    @cached_property
    def peak(self) -> int:
        """Largest number of bytes that exist at any operator of the step."""
        peak = level = 0
        for segment, _ in self.segments_and_block_shifts:
            peak, level = max(peak, level + segment.peak_increase), level + segment.net_bytes
        return peak

    @cached_property
    def needed_and_replayed_flops(self) -> tuple[float, float]:
        """FLOPs of a micro-batch's matrix products without recompute, and of those that run again;
        2 per multiply-add, without the masked half of causal attention."""
        *micro_batch, _update = [segment for segment, _ in self.segments_and_block_shifts]
        flops = [segment.needed_and_replayed_flops for segment in micro_batch]
        return sum(needed for needed, _ in flops), sum(replayed for _, replayed in flops)

    @property
    def relative_flops(self) -> float:
        """FLOPs of a micro-batch's matrix products, relative to a step without recompute."""
        needed, replayed = self.needed_and_replayed_flops
        return (needed + replayed) / needed

    @property
    def kept(self) -> int:
        """Bytes that blocks and head keep for backward when forward ends."""
        return sum(segment.kept_bytes for segment, _ in self.segments_and_block_shifts)

    @property
    def kept_per_block(self) -> float:
        """Bytes that a block keeps for backward, as the mean over all blocks."""
        kept = (
            segment.kept_bytes
            for segment, _ in self.segments_and_block_shifts
            if segment.phase_marks[0][2] is not None
        )
        return sum(kept) / max(1, len({block for *_, block in self.phase_marks} - {None}))

    @property
    def offloaded_sizes(self) -> list[tuple[int, int]]:
        """Bytes of each tensor that offload copies out, and the bytes of CPU memory for it."""
        return [
            sizes
            for segment, _ in self.segments_and_block_shifts
            for sizes in segment.offloaded_sizes
        ]

    @property
    def host_bytes(self) -> int:
        """Bytes of CPU memory that offload allocates, which on a CPU `peak` includes."""
        return sum(pinned for _, pinned in self.offloaded_sizes)

    @property
    def bytes_by_kind_at_peak(self) -> dict[str, int]:
        """Bytes of each kind at the peak: name of the kind -> bytes."""
        return dict(
            zip(KINDS, self.timeline[self.bytes_after_each_op.argmax()].tolist(), strict=True)
        )

    @property
    def peak_location(self) -> str:
        """Phase and block of the peak: "head", or "backward, block 11"."""
        at = self.bytes_after_each_op.argmax()
        _, phase, block = [place for place in self.phase_marks if place[0] <= at][-1]
        return phase if block is None else f"{phase}, block {block}"

    def phase_slice(self, name: str) -> slice:
        """Return the slice of operators of phase "forward", "head", "backward" or "optimizer"."""
        intervals = [interval for interval in phase_intervals(self) if interval[0] == name]
        return slice(intervals[0][2][0], intervals[-1][3])


# (phase, block, first operator of each visit, first operator of the next interval)
PhaseInterval = tuple[str, int | None, list[int], int]


def phase_intervals(step: StepMemory) -> list[PhaseInterval]:
    """Return the intervals of a step in order, each of which has one phase, and one block or none.
    If a phase visits a block several times in a row, these visits are one interval, which lists the
    first operator of each visit."""
    intervals = [
        (phase, block, [at for at, _, _ in group])
        for (phase, block), group in groupby(step.phase_marks, lambda place: place[1:])
    ]
    ends = [begins[0] for _, _, begins in intervals[1:]] + [len(step.timeline)]
    return [(*interval, end) for interval, end in zip(intervals, ends, strict=True)]
