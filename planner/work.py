"""What the operators of a step do: FLOPs of products, and bytes to and from memory.

planner/clock.py turns them into seconds on a card. They are noted in the same run on fake tensors
that counts storages (planner/tracker.py): those of the real model, optimizer and policy.

- FLOPs are those of matrix products and of attention, whose backward forms five products (it
  computes the scores again) to forward's two; of causal attention half are masked, and not done.
- Bytes are those of the tensors that an operator is given and returns, once each. Views cost
  nothing, nor does memory that is asked for and not yet written; a lookup reads what it finds, not
  its table.
- Python's share is counted in operators, as if it took the same time for each: planner/overhead.py.
- Whether bytes come from memory or from a cache depends on the card. So what is noted is a
  *distance*: how many bytes were touched since these were touched last, they included. What is
  nearer than a cache is large is found in it (as if it let go of what was used least recently).
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .overhead import Overhead
from .tracker import Storage, StorageTracker

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)  # of products
LEFT_FACTOR = {"mm": "self", "bmm": "self", "addmm": "mat1", "addmm_": "mat1", "baddbmm": "batch1"}
EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
# Arguments that are written, and whose old values are not read; and one that torch declares as
# written, which is so with a GradScaler only.
OVERWRITTEN = {"copy_", "fill_", "zero_", "normal_"}
ONLY_READ = {("_fused_adamw_", "grads")}
# Arguments of which only some elements are touched: as many as are found, or added.
TABLES = {
    ("embedding", "weight"), ("gather", "self"), ("index_select", "self"), ("index", "self"),
    ("scatter_", "self"), ("index_add_", "self"),
}  # fmt: skip
# What a compiler fuses with its neighbours although torch does not call it pointwise. (A LayerNorm
# and the like work row by row.)
ROWWISE = {
    "_to_copy", "copy_", "gather", "native_dropout", "native_dropout_backward",
    "native_layer_norm", "native_layer_norm_backward", "log_softmax", "softmax",
}  # fmt: skip


ATTENTION = "_scaled_dot_product_"
GELUS = {"gelu", "gelu_backward"}  # what a CPU computes longer than it reads and writes
# malloc returns larger blocks to the system at once (glibc: DEFAULT_MMAP_THRESHOLD_MAX), and the
# next one is made of pages that the system has to find and to clear.
LARGE = 2**25


class Touch(NamedTuple):
    """Bytes of a storage that an operator reads or writes: those of a view from start to end."""

    storage: Storage
    start: int
    end: int
    bytes: int  # fewer than end - start if the view leaves some out
    written: bool


@dataclass
class Operation:
    """An operator that ran, or several that were fused."""

    name: str
    first: int  # its number, as StorageTracker counts
    place: tuple[int, str, int | None]  # as in StorageTracker.places
    flops: float
    precision: int  # index into PRECISIONS
    fusable: bool
    touches: list[Touch]
    gelus: int = 0  # elements of a GELU, or of its backward
    launches: float = 1  # operators that take Python as long as this one, and what is around it


class Notebook:
    """Notes what operators do, while a StorageTracker follows their storages."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.overhead = Overhead()

    def __call__(
        self, tracker: StorageTracker, operator: Any, args: tuple, kwargs: dict, results: list
    ) -> None:
        """After `operator` ran, and its results were added to the tracker."""
        self.overhead.look()
        name = operator.overloadpacket.__name__
        if name in EMPTY or is_view(operator):
            return
        given = dict(zip(parameters(operator), args, strict=False)) | kwargs
        touches = list(touch_given(tracker, operator, given, results))
        made = [
            touch_tensor(tracker, tensor, True)
            for tensor in results
            if tracker.find(tensor).born == tracker.now
        ]
        if not (made or any(touch.written for touch in touches)):
            return
        every = dict.fromkeys(touches + made)  # (x * x reads x once)
        left = given.get("query", given.get(LEFT_FACTOR.get(name, "")))
        precision = left.dtype if isinstance(left, Tensor) else torch.float32
        self.operations.append(
            Operation(
                name,
                tracker.now,
                tracker.places[-1],
                count_flops(name, given, results),
                PRECISIONS.index(precision) if precision in PRECISIONS else 0,
                is_fusable(operator, name, given, tracker.places[-1]),
                [touch for touch in every if touch.storage.device.type == "cpu"],  # not offloaded
                results[0].numel() if name in GELUS else 0,
                1 + self.overhead.take(),
            )
        )


@cache
def parameters(operator: Any) -> dict[str, tuple[bool, bool]]:
    """Names of an operator's parameters -> (is it written? is it an `out`?)"""
    return {
        argument.name: (
            argument.alias_info is not None and argument.alias_info.is_write,
            argument.is_out,
        )
        for argument in operator._schema.arguments
    }


def tensors_in(argument: Any) -> list[Tensor]:
    if isinstance(argument, list | tuple):
        return [tensor for tensor in argument if isinstance(tensor, Tensor)]
    return [argument] if isinstance(argument, Tensor) else []


@cache
def is_view(operator: Any) -> bool:
    """Does it return its arguments, and change nothing?"""
    returned = [result.alias_info for result in operator._schema.returns]
    written = any(is_written for is_written, _ in parameters(operator).values())
    # (`_unsafe_view` is one, whatever torch declares.)
    is_one = operator.overloadpacket is torch.ops.aten._unsafe_view
    return not written and (is_one or any(alias is not None for alias in returned))


def touch_tensor(tracker: StorageTracker, tensor: Tensor, written: bool) -> Touch:
    size, dims = tensor.itemsize, zip(tensor.shape, tensor.stride(), strict=True)
    start = int(tensor.storage_offset()) * size
    extent = size * (1 + sum((n - 1) * stride for n, stride in dims)) if tensor.numel() else 0
    different = min(extent, size * tensor.numel())  # (an expanded row is there once)
    return Touch(tracker.find(tensor), start, start + extent, different, written)


def touch_given(
    tracker: StorageTracker, operator: Any, given: dict, results: list
) -> Iterable[Touch]:
    """How an operator touches what it is given: reads it, writes it, or both."""
    name = operator.overloadpacket.__name__
    for parameter, (written, is_out) in parameters(operator).items():
        for tensor in tensors_in(given.get(parameter)):
            touch = touch_tensor(tracker, tensor, False)
            if (name, parameter) in TABLES:
                few = given.get("src", given.get("source", results[0]))
                touch = touch._replace(bytes=min(touch.bytes, few.nbytes))
            if not (written and (is_out or name in OVERWRITTEN)):
                yield touch
            if written and (name, parameter) not in ONLY_READ:
                yield touch._replace(written=True)


def count_flops(name: str, given: dict, results: list) -> float:
    if name in LEFT_FACTOR:
        return 2 * results[0].numel() * given[LEFT_FACTOR[name]].size(-1)
    if name.startswith(ATTENTION):
        B, H, T, D = given["query"].shape
        products = 5 if "backward" in name else 2
        of_all = 0.5 if given.get("is_causal") else 1  # (torch leaves defaults out)
        return of_all * products * 2 * B * H * T * given["key"].size(2) * D
    return 0


def is_fusable(operator: Any, name: str, given: dict, place: tuple) -> bool:
    """Is it inside of what MiniGPT.compile_blocks compiles, and pointwise, or row by row?"""
    _, phase, block = place
    if block is None and phase != "head":
        return False
    if name == "sum":
        return given.get("dim") in ([-1], [given["self"].dim() - 1])
    return name in ROWWISE or torch.Tag.pointwise in operator.tags


def fuse(operations: list[Operation]) -> list[Operation]:
    """As a compiler would: neighbours at the same place that can be are one operator. It reads what
    was there before it, once, and writes what outlives it, once."""
    fused = []
    groups = [
        list(group)
        for _, group in groupby(
            operations, lambda op: (op.place, True) if op.fusable else (op.first, False)
        )
    ]
    for i, group in enumerate(groups):
        after = groups[i + 1][0].first if i + 1 < len(groups) else math.inf
        inner = {
            touch.storage
            for op in group
            for touch in op.touches
            if op.first == touch.storage.born and len(group) > 1
        }
        touches = dict.fromkeys(
            touch
            for op in group
            for touch in op.touches
            if touch.storage not in inner or (touch.written and touch.storage.died >= after)
        )
        gelus = sum(op.gelus for op in group)
        fused.append(replace(group[0], touches=list(touches), gelus=gelus, launches=1))
    return fused


@dataclass(frozen=True)
class Work:
    """The operators of a step as numbers."""

    flops: np.ndarray  # (operators,) float64
    precision: np.ndarray  # (operators,) uint8, index into PRECISIONS
    attention: np.ndarray  # (operators,) uint8: 1 attention, 2 its backward, 0 anything else
    gelus: np.ndarray  # (operators,) int64: elements of a GELU, or of its backward; else 0
    launches: np.ndarray  # (operators,) float64: how many operators take Python as long
    block: np.ndarray  # (operators,) int: which one is at work; -1: none
    times: np.ndarray  # (operators,) float64: how often it runs
    operator: np.ndarray  # (touches,) int32: who touches
    bytes: np.ndarray  # (touches,) int64
    distance: np.ndarray  # (touches,) float64, bytes; infinite: never touched before
    fresh: np.ndarray  # (touches,) bool: is it the first write to a block from the system?

    def moved(self, cache: float = 0, share: float = 0) -> np.ndarray:
        """(operators,) bytes; those found in a cache of `cache` bytes count as a `share`."""
        weight = np.where(self.distance > cache, 1, share)
        return np.bincount(self.operator, self.bytes * weight, minlength=len(self.flops))

    def fresh_bytes(self) -> np.ndarray:
        """(operators,) bytes of memory that the system has to find and to clear."""
        return np.bincount(self.operator, self.bytes * self.fresh, minlength=len(self.flops))

    def repeat_blocks(self, times: list[int]) -> "Work":
        """`times[i]`: how many blocks do what block i does."""
        return replace(self, times=np.array([*times, 1.0])[self.block] * self.times)


def summarize_work(
    operations: list[Operation], repeats: Iterable[tuple[int, int, int]] = ()
) -> Work:
    """`repeats`: as in StorageTracker."""
    times = np.ones(len(operations))
    for begin, end, n in repeats:
        times[[begin <= operation.first < end for operation in operations]] *= n
    memory = Distances(operations)
    touches = []  # (operator, bytes, distance, fresh)
    for i, operation in enumerate(operations):
        memory.free(operation.first)
        for touch in sorted(operation.touches, key=lambda touch: touch.written):
            touches.append((i, touch.bytes, memory.touch(touch), memory.is_fresh(touch)))
    columns = list(zip(*touches, strict=True)) or [()] * 4
    return Work(
        flops=np.array([op.flops for op in operations], dtype=np.float64),
        precision=np.array([op.precision for op in operations], dtype=np.uint8),
        attention=np.array([which_attention(op.name) for op in operations], dtype=np.uint8),
        gelus=np.array([op.gelus for op in operations], dtype=np.int64),
        launches=np.array([op.launches for op in operations], dtype=np.float64),
        block=np.array([-1 if op.place[2] is None else op.place[2] for op in operations], int),
        times=times,
        operator=np.array(columns[0], dtype=np.int32),
        bytes=np.array(columns[1], dtype=np.int64),
        distance=np.array(columns[2], dtype=np.float64),
        fresh=np.array(columns[3], dtype=bool),
    )


def which_attention(name: str) -> int:
    return ("backward" in name) + 1 if name.startswith(ATTENTION) else 0


@dataclass
class Span:
    """A part of a storage that was touched."""

    when: int  # in bytes touched by all operators until then
    worst: float  # the largest distance since it was last written; infinite: it never was


@dataclass
class Distances:
    """Tells how long ago, in bytes, something was touched last.

    A write is for free if what it overwrites was not yet written back: if it stayed in the cache
    since it was written. A new storage takes the place of the last one of its size that died.
    """

    operations: list[Operation]
    now: int = 0
    spans: dict[Storage, dict[tuple[int, int], Span]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    freed: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    written: dict[Storage, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        storages = dict.fromkeys(touch.storage for op in self.operations for touch in op.touches)
        self.dying = sorted(storages, key=lambda storage: storage.died, reverse=True)

    def free(self, until: int) -> None:
        """Storages that died before operator `until` make room."""
        while self.dying and self.dying[-1].died < until:
            storage = self.dying.pop()
            if spans := self.spans.pop(storage, None):
                self.freed[storage.bytes].append(max(spans.values(), key=lambda span: span.when))

    def is_fresh(self, touch: Touch) -> bool:
        """Is it the first write to that part of a block that is the system's before and after?"""
        storage, part = touch.storage, (touch.start, touch.end)
        if not (touch.written and storage.born and storage.bytes > LARGE):
            return False
        is_new = part not in self.written[storage]
        self.written[storage].add(part)
        return is_new

    def touch(self, touch: Touch) -> float:
        storage, place = touch.storage, (touch.start, touch.end)
        if storage not in self.spans and storage.born and self.freed[storage.bytes]:
            self.spans[storage][0, storage.bytes] = self.freed[storage.bytes].pop()
        distance = worst = math.inf
        for (start, end), span in self.spans[storage].items():
            far = self.now - span.when + end - start
            if start <= place[0] and place[1] <= end and far < distance:
                distance, worst = far, max(span.worst, far)
        self.now += touch.bytes
        self.spans[storage][place] = Span(self.now, 0 if touch.written else worst)
        return worst if touch.written else distance
