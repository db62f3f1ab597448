"""A planned step, storage by storage, of scripts/plan_memory.py: what is alive at its peak, by name
(`--at-peak`), and all of it as a memory snapshot (`--memory-viz`).

A peak is some hundred tensors; but blocks are alike, so that they make a few dozen groups
(`group_of` in planner/record.py), and the largest nine of them are nearly all of it.

https://pytorch.org/memory_viz and torch.cuda._memory_viz open what torch.cuda.memory._snapshot()
returns, pickled: a history of allocations and frees, and what is there in the end. Here both come
from a simulated step, whose storages have names. What was there before the step is allocated at
its beginning: memory_viz knows no name and no kind of what it has not seen coming. Bytes and order
are the planner's. Addresses are those of a small allocator, not CUDA's.
"""

import argparse
import math
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import numpy as np

from memory import write
from planner import Card
from planner.log import Storage
from planner.record import ALIKE, Record, code_of, group_of
from planner.timeline import KINDS
from scripts.memory_page import along_seconds
from scripts.plan_table import Row, align
from trainer.flags import AUTO, recompute_of
from trainer.metrics import format_bytes
from trainer.plan import Question

LINES = 10
COLUMNS = 120  # where there is no terminal
LEAST_WHAT, LEAST_WHY = 40, 24  # columns: names are cut to make room for that, but no further
LEAST_CODE = 12  # and code is not shown in fewer
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}


# ---- which step


def typed_policy(args: argparse.Namespace) -> str | None:
    """The way to recompute that was typed; None: none was, or auto.

    Raises UsageError if there is no such way.
    """
    if "use_activation_checkpoint" not in args.typed or args.use_activation_checkpoint in AUTO:
        return None
    return write(recompute_of(args))


def record_step(asked: Question, taken: Row | None) -> Record:
    """Of the way that was typed, else of the recommended one, else (nobody knows) without
    recompute."""
    typed = asked.args.typed_policy
    if typed is None and taken is not None:
        asked = taken.asked
    policy = typed or asked.config.recompute
    return asked.planner.record(asked.args.batch_size, recompute=policy)


# ---- what is alive


def at_peak(record: Record) -> list[dict[str, Any]]:
    """Groups, as the JSON file has them, the largest first. Their bytes are the peak, exactly."""
    found: dict[tuple[str, str], list[Storage]] = {}
    for storage in record.at_peak:
        found.setdefault(group_of(storage), []).append(storage)
    groups = [describe(name, storages) for (name, _), storages in found.items()]
    return sorted(groups, key=lambda group: -group["bytes"])


def describe(name: str, storages: list[Storage]) -> dict[str, Any]:
    """Storages that are the same but for their block; or all weights, say. At least one."""
    first, n = storages[0], len(storages)
    equal = len({(storage.shape, storage.dtype) for storage in storages}) == 1
    # Where most of them were made; of all weights, say, there is no line.
    line = "" if n > 1 and first.kind in ALIKE else most(storage.line for storage in storages)
    return {
        "name": first.name if n == 1 else name,
        "kind": first.kind,
        "count": n,
        "bytes": sum(storage.bytes for storage in storages),
        "shape": list(first.shape) if equal else None,
        "dtype": str(first.dtype).removeprefix("torch.") if equal else None,
        "line": line,
        "code": code_of(line) if line else "",
        "why": most(re.sub(r"\bblocks\.\d+\.", "", storage.why) for storage in storages),
    }


def most(words: Iterable[str]) -> str:
    """The one that is there most often."""
    return Counter(words).most_common(1)[0][0]


def in_words(group: dict[str, Any]) -> tuple[str, str, str, str]:
    """("12 x blocks.*.mlp.c_fc: output", "12288x3072 bf16", line, why)"""
    what, shape = group["name"], ""
    if group["count"] > 1:
        what = f"{group['count']} x {what}"
    if group["dtype"]:
        dtype = SHORT.get(group["dtype"], group["dtype"])
        shape = f"{'x'.join(map(str, group['shape']))} {dtype}".strip()
    return what, shape, group["line"], group["why"]


def format_peak(record: Record) -> str:
    """What is alive there, in ten lines under one that says where that is."""
    groups, peak = at_peak(record), record.step.peak
    shown = groups if len(groups) <= LINES else groups[: LINES - 1]
    sizes, rows = [group["bytes"] for group in shown], [*map(in_words, shown)]
    if others := sum(group["count"] for group in groups[len(shown) :]):
        sizes.append(peak - sum(sizes))
        rows.append((f"and {others} others", "", "", ""))
    columns = [["bytes>", *map(format_bytes, sizes)]]
    columns.append(["share>", *(f"{size / peak:.1%}" for size in sizes)])
    columns += map(list, zip(("what<", "shape<", "line<", "why<"), *rows, strict=True))
    width = get_terminal_size((COLUMNS, 0)).columns
    *widths, of_why = (max(map(len, column)) + 2 for column in columns)
    room = width - sum(widths)
    if room - of_why >= LEAST_CODE:
        most_of = room - of_why  # of a line's code
        columns[4] = [f"{line}  {cut(code_of(line), most_of)}".rstrip() for line in columns[4]]
    of_what = max(LEAST_WHAT, widths[2] - 2 - max(LEAST_WHY - room, 0))
    columns[2] = [cut(name, of_what) for name in columns[2]]
    head = f"alive at the peak of {record.step.config.recompute}: {format_bytes(peak)}"
    lines = [cut(line, width) for line in align(columns).splitlines()]
    return "\n".join([f"{head}, {record.step.where}", "", *lines])


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


# ---- the file for memory_viz

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
