"""A planned step as a memory snapshot: `--memory-viz` of scripts/plan_memory.py.

https://pytorch.org/memory_viz and torch.cuda._memory_viz open what torch.cuda.memory._snapshot()
returns, pickled: a history of allocations and frees, and what is there in the end. Here both come
from a simulated step, whose storages have names. What was there before the step is allocated at
its beginning: memory_viz knows no name and no kind of what it has not seen coming.

Bytes and order are the planner's. Addresses are those of a small allocator, not CUDA's.
"""

import math
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from planner import Card
from planner.log import Storage
from planner.record import Record
from planner.timeline import KINDS
from scripts.memory_page import along_seconds

BASE = 0x7F0000000000  # where memory begins; as a GPU's may
ALIGNMENT, SEGMENT = 512, 2**21  # bytes: of addresses, and of what is taken from CUDA at a time
# What memory_viz asks of a segment beside its memory
SEGMENT_OF = {"device": 0, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0)}
SEGMENT_OF |= {"is_expandable": False, "frames": []}


class FirstFit:
    """Deals out addresses: the lowest gap that is large enough."""

    def __init__(self) -> None:
        self.gaps: list[tuple[int, float]] = [(BASE, math.inf)]  # (start, end), in order
        self.end = BASE  # of all that was ever dealt out

    def take(self, size: int) -> int:
        i = next(i for i, (start, end) in enumerate(self.gaps) if end - start >= size)
        start, end = self.gaps.pop(i)
        if start + size < end:
            self.gaps.insert(i, (start + size, end))
        self.end = max(self.end, start + size)
        return start

    def give_back(self, start: int, size: int) -> None:
        found, self.gaps = sorted([*self.gaps, (start, start + size)]), []
        for start, end in found:
            if self.gaps and self.gaps[-1][1] == start:
                start, _ = self.gaps.pop()
            self.gaps.append((start, end))


def rounded(size: int, unit: int = ALIGNMENT) -> int:
    return -(-size // unit) * unit


def clock_times(record: Record, card: Card | None, compiled: bool) -> np.ndarray:
    """(operators + 2,) microseconds at which each one begins, and at which the step ends. Without a
    card an operator takes 1."""
    at = np.arange(len(record.operators) + 1)
    if card is None:
        return at
    starts, x = along_seconds(record, card, compiled)
    return np.rint(1e6 * np.array(x)[np.searchsorted(starts, at)]).astype(np.int64)


def frames(storage: Storage, policy: str) -> list[dict[str, Any]]:
    """A stack of calls that was none: the tensor, why it is there, where in the step, the policy.

    The innermost comes first. Shown is "model.py:106:blocks.3.mlp.c_fc: output, ...".
    """
    file, _, line = storage.line.partition(":")
    shape = "x".join(map(str, storage.shape)) or "one number"
    dtype = str(storage.dtype).removeprefix("torch.")
    where = storage.phase or "before the step"
    if storage.block is not None:
        where += f", block {storage.block}"
    if storage.replayed:
        where += ", replayed"
    shown = (
        (file or "tensor", int(line or 0), f"{storage.name}, {shape} {dtype}"),
        *(("why", 0, storage.why), ("where", 0, where), ("policy", 0, policy)),
    )
    return [{"filename": file, "line": line, "name": name} for file, line, name in shown]


def changes(record: Record) -> Iterator[tuple[int, bool, Storage]]:
    """(with which operator, does it come?, storage), in order. What is gone makes room first; what
    was there before comes kind by kind, as weights are there before there are moments."""
    found = []
    for i, storage in enumerate(record.storages):
        kind = KINDS.index(storage.kind) if storage.born == 0 else 0
        found.append((storage.born, True, kind, i))
        if storage.died < len(record.operators):
            found.append((int(storage.died) + 1, False, 0, i))
    for at, comes, _, i in sorted(found):
        yield at, comes, record.storages[i]


def snapshot(record: Record, card: Card | None = None, compiled: bool = False) -> dict[str, Any]:
    """As torch.cuda.memory._snapshot() documents it."""
    times, policy = clock_times(record, card, compiled), record.step.config.recompute
    allocator, trace = FirstFit(), []
    alive: dict[Storage, dict[str, Any]] = {}

    def note(action: str, at: int, **more: Any) -> None:
        trace.append({"action": action, "stream": 0, "time_us": int(times[at])} | more)

    for at, comes, storage in changes(record):
        size = rounded(storage.bytes)
        if comes:
            about = {"category": storage.kind, "frames": frames(storage, policy)}
            alive[storage] = {"addr": allocator.take(size), "size": storage.bytes} | about
            note("alloc", at, **alive[storage])
        else:
            gone = alive.pop(storage)
            note("free_requested", at, **gone)
            note("free_completed", at, **gone)
            allocator.give_back(gone["addr"], size)
    total = sum(there["size"] for there in alive.values())
    # memory_viz colours by category only if one of them is "unknown".
    note("snapshot", -1, addr=0, size=total, category="unknown", frames=[])
    size = rounded(allocator.end - BASE, SEGMENT)
    whole = {"action": "segment_alloc", "stream": 0, "time_us": 0, "addr": BASE, "size": size}
    trace.insert(0, whole | {"frames": []})
    segment = make_segment(size, alive.values(), allocator.gaps)
    return {"segments": [segment], "device_traces": [trace]}


def make_segment(
    size: int, alive: Iterable[dict[str, Any]], gaps: list[tuple[int, float]]
) -> dict[str, Any]:
    """All of the memory: what is alive in the end, and the gaps between."""
    blocks: list[dict[str, Any]] = []

    def add(start: int, size: int, requested: int, state: str, frames: list) -> None:
        what = {"address": start, "size": size, "requested_size": requested}
        blocks.append(what | {"state": state, "frames": frames})

    for there in alive:
        taken = rounded(there["size"])
        add(there["addr"], taken, there["size"], "active_allocated", there["frames"])
    in_use = sum(block["size"] for block in blocks)
    requested = sum(block["requested_size"] for block in blocks)
    for start, end in gaps:
        if start < BASE + size:
            add(start, int(min(end, BASE + size)) - start, 0, "inactive", [])
    blocks.sort(key=lambda block: block["address"])
    of_all = {"address": BASE, "total_size": size, "requested_size": requested, "blocks": blocks}
    return SEGMENT_OF | of_all | {"allocated_size": in_use, "active_size": in_use}


def write_viz(path: Path, record: Record, card: Card | None, compiled: bool) -> None:
    # (memory_viz reads no later protocol.)
    path.write_bytes(pickle.dumps(snapshot(record, card, compiled), protocol=4))
