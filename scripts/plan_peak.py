"""What is alive at the peak of a step, by name: `--at-peak` of scripts/plan_memory.py.

A peak is some hundred tensors; but blocks are alike, so that they make a few dozen groups
(`group_of` in planner/record.py), and the largest nine of them are nearly all of it.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Group:
    """Storages that are the same but for their block; or all weights, say. At least one."""

    name: str
    storages: list[Storage]

    @property
    def bytes(self) -> int:
        return sum(storage.bytes for storage in self.storages)

    @property
    def what(self) -> str:
        """ "12 x blocks.*.mlp.c_fc: output", "148 x weight", "blocks.11.mlp: gelu" """
        n = len(self.storages)
        return self.storages[0].name if n == 1 else f"{n} x {self.name}"

    @property
    def shape(self) -> str:
        """With its dtype: "12288x3072 bf16"; "" if they differ."""
        if len({(storage.shape, storage.dtype) for storage in self.storages}) > 1:
            return ""
        first = self.storages[0]
        dtype = str(first.dtype).removeprefix("torch.")
        return f"{'x'.join(map(str, first.shape))} {SHORT.get(dtype, dtype)}".strip()

    @property
    def line(self) -> str:
        """ "model.py:106", where most of them were made; of all weights, say, there is none"""
        several = len(self.storages) > 1 and self.storages[0].kind in ALIKE
        return "" if several else most(storage.line for storage in self.storages)

    @property
    def why(self) -> str:
        """That of most of them, without their block."""
        return most(re.sub(r"\bblocks\.\d+\.", "", storage.why) for storage in self.storages)

    def as_json(self) -> dict[str, Any]:
        first = self.storages[0]
        return {
            "name": first.name if len(self.storages) == 1 else self.name,
            "kind": first.kind,
            "count": len(self.storages),
            "bytes": self.bytes,
            "shape": list(first.shape) if self.shape else None,
            "dtype": str(first.dtype).removeprefix("torch.") if self.shape else None,
            "line": self.line,
            "code": code_of(self.line) if self.line else "",
            "why": self.why,
        }


def at_peak(record: Record) -> list[Group]:
    """The largest first. Their bytes are the peak, exactly."""
    groups: dict[tuple[str, str], list[Storage]] = {}
    for storage in record.at_peak:
        groups.setdefault(group_of(storage), []).append(storage)
    found = [Group(name, storages) for (name, _), storages in groups.items()]
    return sorted(found, key=lambda group: -group.bytes)


def most(words: Iterable[str]) -> str:
    """The one that is there most often."""
    return Counter(words).most_common(1)[0][0]


def format_peak(record: Record) -> str:
    """What is alive there, in ten lines under one that says where that is."""
    groups, peak = at_peak(record), record.step.peak
    shown = groups if len(groups) <= LINES else groups[: LINES - 1]
    sizes = [group.bytes for group in shown]
    others = sum(len(group.storages) for group in groups[len(shown) :])
    last = [f"and {others} others"] * bool(others)
    sizes += [peak - sum(sizes)] * bool(others)
    blank = [""] * bool(others)
    columns = [
        ["bytes>", *map(format_bytes, sizes)],
        ["share>", *(f"{size / peak:.1%}" for size in sizes)],
        ["what<", *(group.what for group in shown), *last],
        ["shape<", *(group.shape for group in shown), *blank],
        ["line<", *(group.line for group in shown), *blank],
        ["why<", *(group.why for group in shown), *blank],
    ]
    width = get_terminal_size((COLUMNS, 0)).columns
    *widths, of_why = (max(map(len, column)) + 2 for column in columns)
    room = width - sum(widths)
    if room - of_why >= LEAST_CODE:
        columns[4] = [with_code(line, room - of_why) for line in columns[4]]
    of_what = max(LEAST_WHAT, widths[2] - 2 - max(LEAST_WHY - room, 0))
    columns[2] = [cut(name, of_what) for name in columns[2]]
    name = record.step.config.recompute
    head = f"alive at the peak of {name}: {format_bytes(peak)}, {record.step.where}"
    return "\n".join([head, "", *(cut(line, width) for line in align(columns).splitlines())])


def with_code(line: str, room: int) -> str:
    """ "model.py:106" and at most `room` more columns"""
    code = code_of(line) if ":" in line else ""
    return f"{line}  {cut(code, room)}" if code else line


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."
