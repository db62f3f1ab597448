"""A planned step as a memory snapshot: `--memory-viz` of scripts/plan_memory.py.

https://pytorch.org/memory_viz and torch.cuda._memory_viz open what torch.cuda.memory._snapshot()
returns, pickled: a history of allocations and frees, and what is there in the end. Here both come
from a simulated step, whose storages have names. What was there before the step is allocated at
its beginning: memory_viz knows no name and no kind of what it has not seen coming.

Bytes and order are the planner's. Addresses are those of a small allocator, not CUDA's.
"""

import pickle
from bisect import bisect
from collections.abc import Iterator
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
PROTOCOL = 4  # of pickle; memory_viz reads no later one


class FirstFit:
    """Deals out addresses: the lowest gap that is large enough."""

    def __init__(self) -> None:
        self.gaps: list[tuple[float, float]] = [(0, float("inf"))]  # (start, end), in order
        self.most = 0  # bytes, gaps included

    def take(self, size: int) -> int:
        i = next(i for i, (start, end) in enumerate(self.gaps) if end - start >= size)
        start, end = self.gaps.pop(i)
        if start + size < end:
            self.gaps.insert(i, (start + size, end))
        self.most = max(self.most, int(start) + size)
        return int(start)

    def give_back(self, start: float, size: int) -> None:
        end = start + size
        i = bisect(self.gaps, (start, end))
        if i < len(self.gaps) and self.gaps[i][0] == end:
            end = self.gaps.pop(i)[1]
        if i and self.gaps[i - 1][1] == start:
            start = self.gaps.pop(i - 1)[0]
            i -= 1
        self.gaps.insert(i, (start, end))


def rounded(size: int, unit: int = ALIGNMENT) -> int:
    return -(-size // unit) * unit


def clock_times(record: Record, card: Card | None, compiled: bool) -> np.ndarray:
    """(operators + 2,) int64: microseconds at which each one begins, and at which the step ends.

    Without a card an operator takes 1.
    """
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
    return [
        frame(file or "tensor", f"{storage.name}, {shape} {dtype}", int(line or 0)),
        frame("why", storage.why),
        frame("where", where),
        frame("policy", policy),
    ]


def frame(filename: str, name: str, line: int = 0) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


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
            alive[storage] = {
                "addr": BASE + allocator.take(size),
                "size": storage.bytes,
                "category": storage.kind,
                "frames": frames(storage, policy),
            }
            note("alloc", at, **alive[storage])
        else:
            gone = alive.pop(storage)
            note("free_requested", at, **gone)
            note("free_completed", at, **gone)
            allocator.give_back(gone["addr"] - BASE, size)
    total = sum(there["size"] for there in alive.values())
    # memory_viz colours by category only if one of them is "unknown".
    note("snapshot", -1, addr=0, size=total, category="unknown", frames=[])
    segment = make_segment(rounded(allocator.most, SEGMENT), list(alive.values()))
    whole = {"addr": BASE, "size": segment["total_size"], "frames": []}
    trace.insert(0, {"action": "segment_alloc", "stream": 0, "time_us": 0} | whole)
    return {"segments": [segment], "device_traces": [trace]}


def make_segment(size: int, alive: list[dict[str, Any]]) -> dict[str, Any]:
    """All of the memory: what is alive in the end, and the gaps between."""
    blocks: list[dict[str, Any]] = []
    end = BASE

    def add(size: int, requested: int, state: str, frames: list) -> None:
        nonlocal end
        what = {"address": end, "size": size, "requested_size": requested}
        blocks.append(what | {"state": state, "frames": frames})
        end += size

    for there in sorted(alive, key=lambda there: there["addr"]):
        if there["addr"] > end:
            add(there["addr"] - end, 0, "inactive", [])
        add(rounded(there["size"]), there["size"], "active_allocated", there["frames"])
    if end < BASE + size:
        add(BASE + size - end, 0, "inactive", [])
    in_use = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    return {
        "device": 0,
        "address": BASE,
        "total_size": size,
        "allocated_size": in_use,
        "active_size": in_use,
        "requested_size": sum(block["requested_size"] for block in blocks),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def write_viz(path: Path, record: Record, card: Card | None, compiled: bool) -> None:
    path.write_bytes(pickle.dumps(snapshot(record, card, compiled), protocol=PROTOCOL))
