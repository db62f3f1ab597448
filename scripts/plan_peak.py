"""What is alive at the peak of a planned step, by name: `--at-peak` of scripts/plan_memory.py.

A peak is some hundred tensors; but blocks are alike, so that they make a few dozen groups
(`group_of` in planner/record.py), and the largest nine of them are nearly all of it.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterable
from shutil import get_terminal_size
from typing import Any

from memory import write
from planner.log import Storage
from planner.record import ALIKE, Record, code_of, group_of
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
