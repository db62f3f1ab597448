"""The table of scripts/plan_memory.py: one row for each way to recompute, and which to take.

And how long the whole run takes then; and what is alive at the peak, by name (`--at-peak`): some
hundred tensors, but blocks are alike, so that they make a few dozen groups (`group_of` in
planner/record.py), and the largest nine of them are nearly all of it.
"""

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from memory import expanded, write
from planner import StepMemory
from planner.choose import nested_groups, rungs
from planner.formulas import recompute_cost, step_flops
from planner.log import Storage
from planner.record import ALIKE, Record, code_of, group_of
from scripts.style import policy_fields
from trainer.flags import (
    AUTO,
    changed,
    format_tokens,
    moot_chunks,
    recompute_of,
    tokens_per_step,
    words_of,
)
from trainer.metrics import format_bytes
from trainer.plan import AFTER_RESTART, Question, next_policy

OFFLOADED = "full+offload"
SHOWN = 2  # ways to go on when memory runs out
LINES = 10  # of the list of what is alive
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}


@dataclass(frozen=True)
class Row:
    """One way to run what was asked for."""

    asked: Question  # with this way's policy; of --all-knobs, with its micro-batch as well
    longest: int | None = None  # sequence that fits, in tokens; None: nobody asked

    @property
    def step(self) -> StepMemory:
        return self.asked.step

    @property
    def name(self) -> str:
        return self.step.config.recompute

    def changes(self, args: argparse.Namespace) -> dict[str, Any]:
        """What is to be typed instead of `args`. (Positions follow --seq-len by themselves, unless
        a model by name has its own.)"""
        own = vars(self.asked.args)
        names = ["batch_size", "grad_accum_steps", "seq_len", "mlp_chunks"]
        names += ["max_position_embeddings"] * bool(args.model)
        found = {name: own[name] for name in names if own[name] != getattr(args, name)}
        return found | {"use_activation_checkpoint": self.name} | moot_chunks(args, self.name)

    @property
    def replayed(self) -> float:
        """FLOPs done twice, in units of what the step needs."""
        needed, _ = step_flops(replace(self.step.config, recompute="none"), self.step.seq_len)
        return step_flops(self.step.config, self.step.seq_len, self.asked.args.compile)[1] / needed

    @property
    def offloaded(self) -> bool:
        return expanded(self.step.config).offload

    @property
    def fits(self) -> bool | None:
        """With or without the margin. (And the CPU has room for what is offloaded, as far as
        anybody knows.)"""
        room, step = self.asked.room, self.step
        if room.budget is None:
            return None
        return step.peak <= room.budget and (room.host is None or step.host <= room.host)

    @property
    def safe(self) -> bool:
        return bool(self.fits) and self.step.peak <= self.asked.budget

    @property
    def largest_batch(self) -> int | None:
        """That fits with the margin; None: nobody knows."""
        return None if self.asked.room.budget is None else self.asked.largest_batch

    @property
    def seconds(self) -> float | None:
        return self.asked.seconds(self.step) if self.asked.card else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.asked.tokens_per_s(self.step) if self.asked.card else None

    @property
    def cost(self) -> tuple[float, float]:
        """What is to be small: time, then memory; FLOPs where no clock tells the time."""
        if self.seconds is None:
            return recompute_cost(self.step.config, self.step.seq_len)
        return self.seconds, self.step.peak

    def as_json(self) -> dict[str, Any]:
        step = self.step
        return {
            **policy_fields(step.config),
            "flags": words_of({"use_activation_checkpoint": self.name}),
            "peak_bytes": step.peak,
            "at_peak": step.at_peak,
            "where": step.where,
            "host_bytes": step.host,
            "kept_bytes": step.kept,
            "kept_bytes_per_block": step.kept_per_block,
            "replayed": self.replayed,
            "fits": self.fits,
            "fits_safely": None if self.fits is None else self.safe,
            "largest_batch": self.largest_batch,
            "largest_batch_safely": self.largest_batch,  # (as it was called)
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "longest_sequence_safely": self.longest,
        }


def rows(asked: Question) -> list[Row]:
    """Every policy, and the cheapest way that fits (a row of its own if it is a mix); for long
    sequences nested groups as well."""
    ways, taken = [*rungs(asked.planner), OFFLOADED], asked.pick().config
    if asked.args.longest_sequence:
        ways[-1:-1] = nested_groups(asked.args.n_layers)
    if taken.recompute not in ways:
        how = expanded(taken)
        ways.insert(ways.index(OFFLOADED if how.nested else how.policies[0]), taken.recompute)
    return [Row(asked.about(changed(asked.args, use_activation_checkpoint=way))) for way in ways]


def recommend(table: list[Row]) -> Row | None:
    """The cheapest row of those that fit and leave a margin; offload, whose copies no clock tells,
    is the last."""
    safe = [row for row in table if row.safe]
    return min(safe, key=lambda row: (row.offloaded, row.cost), default=None)


def format_table(table: list[Row], taken: Row | None) -> str:
    """Aligned columns; `taken` is marked."""
    fits = {True: "tight", False: "no", None: "?"}
    lines = []
    for row in table:
        line = {" <": ">" * (row is taken), "policy<": row.name}
        line["peak>"] = format_bytes(row.step.peak)
        if row.asked.card:
            line |= time_cells(row, table[0])
        else:
            line["where<"] = row.step.where
            line["kept a block>"] = format_bytes(row.step.kept_per_block)
            line["FLOPs twice>"] = f"{row.replayed:.1%}"
        line["fits<"] = "yes" if row.safe else fits[row.fits]
        line["up to a batch of>"] = format_count(row.largest_batch)
        if row.longest is not None:
            line["longest sequence>"] = format_count(row.longest)
        lines.append(line)
    return align([[name, *(line[name] for line in lines)] for name in lines[0]])


def time_cells(row: Row, first: Row) -> dict[str, str]:
    """Estimates, shown as such. Of offloaded rows the clock knows all but the copies."""
    seconds, none = row.asked.seconds(row.step), first.asked.seconds(first.step)
    more = f"{'> ' * row.offloaded}{seconds / none - 1:+.0%}"
    speed = digits(3, row.asked.tokens_per_s(row.step))
    return {
        "time>": f"~{format_time(none)}" if row is first else more,
        "tokens/s>": f"{'<' if row.offloaded else '~'}{speed}",
    }


def describe_host(table: list[Row]) -> str:
    """What the offloaded row takes of a machine's CPU memory, beside its GPUs; "": nothing."""
    row = table[-1]
    asked, step, largest = row.asked, row.step, row.largest_batch or 0
    if asked.device.type == "cpu" or not row.offloaded or not step.host:
        return ""
    pinned, several = asked.processes * step.host, asked.processes > 1
    words = f"offload  pins {format_bytes(pinned)} of CPU memory"
    words += f" in {asked.processes} processes" * several
    if largest > step.batch_size:  # (it grows by the sequence, from some sequences on)
        words += f", about {format_bytes(pinned * largest / step.batch_size)}"
        words += f" for {largest} sequences" + " in each" * several
    return words


# ---- when memory runs out


def if_memory_runs_out(row: Row | None) -> Iterator[Row]:
    """Yield the ways to recompute that a run takes after `row`: each when memory has run out with
    the one before it. (With shards torchrun starts it again: --max-restarts.)"""
    if row and row.longest is None and row.asked.args.on_out_of_memory == "deeper":
        asked, share = row.asked, AFTER_RESTART if row.asked.shards > 1 else 1
        while step := next_policy(asked, row.name, share=share):
            args = changed(asked.args, use_activation_checkpoint=step.config.recompute)
            row = Row(asked.about(args))
            yield row


def describe_next(row: Row | None) -> list[str]:
    """The first two of them, each with its peak and its time; [] if there are none."""
    words = []
    for after in islice(if_memory_runs_out(row), SHOWN):
        time = f", {'> ' * after.offloaded}~{format_time(after.seconds)}" if after.seconds else ""
        words.append(f"{after.name} ({format_bytes(after.step.peak)}{time})")
    return [f"deeper   if memory runs out: {', then '.join(words)}"] * bool(words)


# ---- the whole run


def whole_run(asked: Question, row: Row | None) -> tuple[dict[str, Any], list[str]]:
    """What was asked, with the step that is recommended: for the JSON file, and in words. If nobody
    said how long, it is a billion tokens, by which runs are compared."""
    args, of_step, lines = asked.args, tokens_per_step(asked.args, asked.replicas), []
    if "num_steps" in args.typed:
        steps = args.num_steps
        tokens, words = steps * of_step, f"{steps:,} steps"
    else:
        tokens = args.num_tokens or 10**9
        steps = math.ceil(tokens / of_step)
        words = f"{format_tokens(tokens)} tokens, {steps:,} steps"
    if args.num_epochs is not None:
        unknown = f"how many steps --num-epochs {args.num_epochs:g} are is up to the data"
        lines.append(f"note     {unknown}, which are not read here")
    seconds = None
    # (The command of --longest-sequence has other steps than the rows.)
    if row and row.seconds is not None and row.longest is None:
        seconds = row.seconds * steps
        about = "more than" if row.offloaded else "about"  # (it copies)
        without = "without data, communication, evaluation"
        lines.append(f"run      {words}: {about} {format_time(seconds)}; {without}")
    elif args.num_tokens:
        lines.append(f"run      {words}; --card tells how long they take")
    return {"tokens": tokens, "steps": steps, "seconds": seconds}, lines


# ---- what is alive at the peak


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
    rows = [(group["bytes"], *in_words(group)) for group in shown]
    if others := groups[len(shown) :]:
        rest, n = (sum(group[key] for group in others) for key in ("bytes", "count"))
        rows.append((rest, f"and {n} others", "", "", ""))
    lines: list[tuple[str, ...]] = [("bytes>", "share>", "what<", "shape<", "line<", "why<")]
    lines += [(format_bytes(size), f"{size / peak:.1%}", *words) for size, *words in rows]
    title = f"alive at the peak of {record.step.config.recompute}: {format_bytes(peak)}"
    table = align([[*column] for column in zip(*lines, strict=True)])
    return f"{title}, {record.step.where}\n\n{table}"


# ---- words


def align(columns: list[list[str]]) -> str:
    """The first cell of a column is its name, and "<" or ">": flush left, or right."""
    for column in columns:
        side, column[0] = column[0][-1], column[0][:-1]
        width = max(map(len, column))
        column[:] = [f"{cell:{side}{width}}" for cell in column]
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def format_count(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def digits(n: int, x: float) -> str:
    """Rounded to n digits: "54", "6.1", "358,000"."""
    rounded = float(f"{x:.{n - 1}e}")
    return f"{rounded:,.{max(0, n - 1 - math.floor(math.log10(rounded)))}f}"


def format_time(seconds: float) -> str:
    """ "54 ms", "1.2 s", "25 min", "17 h", "5.2 days": as exact as an estimate is"""
    units = ((0.001, "ms", 1000), (1, "s", 90), (60, "min", 90), (3600, "h", 100))
    found = (unit for unit in units if seconds < unit[0] * unit[2])
    size, name, _ = next(found, (86400, "days", None))
    return f"{digits(2, seconds / size)} {name}"
