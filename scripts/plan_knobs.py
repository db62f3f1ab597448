"""What scripts/plan_memory.py turns besides the policy: the length of a sequence, the micro-batch.

Peaks grow nearly along lines and times have one valley, so that few steps need to be simulated.
"""

import argparse
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner import Planner, StepMemory
from scripts.plan_table import Row, align, digits, format_seconds
from trainer.flags import changed, words_of
from trainer.metrics import format_bytes
from trainer.plan import Question

STEP = 64  # tokens; lengths are multiples of it
LONGEST = 10**6  # tokens, as --seq-len allows
SHOWN = 5  # settings


# ---- the longest sequence


def with_length(args: argparse.Namespace, seq_len: int) -> dict[str, int]:
    """The flags for sequences of that length; positions grow with it, unless they were typed."""
    flags = {"seq_len": seq_len}
    if "max_position_embeddings" not in args.typed:
        least = args.max_position_embeddings if args.model else 0  # (the shape has as many)
        flags["max_position_embeddings"] = max(seq_len, least)
    return flags


def to_type(args: argparse.Namespace, wanted: dict[str, Any]) -> dict[str, Any]:
    """Of those flags, what is to be typed: positions follow --seq-len by themselves."""
    follows = None if args.model else "max_position_embeddings"
    return {n: value for n, value in wanted.items() if value != getattr(args, n) and n != follows}


def longest_possible(args: argparse.Namespace) -> int:
    typed = "max_position_embeddings" in args.typed
    return min(LONGEST, args.max_position_embeddings) if typed else LONGEST


def longest_sequence(row: Row) -> int:
    """Tokens of the longest sequence that fits with this row's policy and leaves the margin, or
    STEP less; 0: none does."""
    asked, args, batch_size = row.asked, row.asked.args, row.step.batch_size

    def peak(n: int) -> int:
        if n == 0:
            return asked.state
        there = asked.about(changed(args, **with_length(args, n * STEP)))
        return there.planner.step(batch_size, recompute=row.name).peak

    # Where attention is fused, tokens take as much in one sequence as in another.
    guess = (row.largest_batch or 0) * args.seq_len // (batch_size * STEP)
    return STEP * most_that_fit(peak, asked.budget, guess, longest_possible(args) // STEP)


def most_that_fit(peak: Callable[[int], int], budget: int, guess: int, most: int) -> int:
    """An n in 0..most with peak(n) within the budget: the largest one, or the one before it.

    The peak grows with n, nearly along a line: so interpolate, until there is no room for one more.
    """
    low, high, n = 0, most + 1, max(guess, 1)
    known = {0: peak(0)}
    while known[0] <= budget and low < n and high - low > 1:
        n = min(n, high - 1)
        known[n] = peak(n)
        low, high = (n, high) if known[n] <= budget else (low, n)
        ends = [(0, n), (low, high)] if low and high in known else [(0, n)]
        slope = min((known[b] - known[a]) / (b - a) for a, b in ends)
        n = max(low + int((budget - known[low]) / slope), min(low + 1, 1))
        if len(known) > 6:  # it is no line
            n = max(low + 1, (low + high) // 2)
    return low


# ---- all knobs


@dataclass(frozen=True)
class Setting:
    """A way to run the same training: the same sequences a step, and policies change no result."""

    step: StepMemory
    asked: Question  # with its micro-batch and accumulation

    @property
    def seconds(self) -> float:
        return self.asked.seconds(self.step)

    @property
    def name(self) -> str:
        return self.step.config.recompute

    def changes(self, args: argparse.Namespace) -> dict[str, Any]:
        """What is to be typed instead of what was."""
        own = self.asked.args
        wanted = {"batch_size": own.batch_size, "grad_accum_steps": own.grad_accum_steps}
        lengths = with_length(args, own.seq_len)
        return to_type(args, wanted | lengths) | {"use_activation_checkpoint": self.name}

    def as_json(self, args: argparse.Namespace) -> dict[str, Any]:
        return {
            "name": self.name,
            "batch_size": self.step.batch_size,
            "grad_accum_steps": self.asked.args.grad_accum_steps,
            "seq_len": self.step.seq_len,
            "flags": words_of(self.changes(args)),
            "peak_bytes": self.step.peak,
            "seconds": self.seconds,
            "tokens_per_s": self.asked.tokens_per_s(self.step),
        }


def turn_all_knobs(asked: Question) -> list[Setting]:
    """The fastest ways to run the sequences of a step, the best first; none if none fits."""
    if asked.args.longest_sequence:
        asked = longest_for_all(asked)
    args = changed(asked.args, use_activation_checkpoint="none")
    sequences = args.batch_size * args.grad_accum_steps
    sizes = [n for n in range(1, sequences + 1) if sequences % n == 0]

    def dealt(size: int) -> Question:
        parts = {"batch_size": size, "grad_accum_steps": sequences // size}
        return asked.about(changed(args, **parts))

    found = {}
    # From the largest micro-batch that fits without recompute on, larger ones (which replay) and
    # smaller ones (which use the card less) for as long as it pays. Then the one that was asked
    # for, to compare with.
    start = sizes.index(max((size for size in sizes if dealt(size).fits), default=1))
    for way in (sizes[start:], sizes[start::-1], [args.batch_size]):
        best = float("inf")
        for size in way:
            here = dealt(size)
            if here.seconds(here.planner.step(size, recompute="none")) >= best:
                break  # no way is faster than without recompute
            step = here.pick()
            if step.peak > here.budget or here.seconds(step) > best:
                break
            best, found[size] = here.seconds(step), Setting(step, here)
    return sorted(found.values(), key=lambda setting: (setting.seconds, setting.step.peak))


def least(planner: Planner) -> list[str]:
    """Two ways that take the least memory, one of them in any model; shards know no groups."""
    return ["full", "full/2"] if planner.shards == 1 else ["full"]


def longest_for_all(asked: Question) -> Question:
    """With the longest sequences that the tokens of a step can be cut into and that fit, one at a
    time; as it is if none of them does."""
    args = asked.args
    tokens = args.batch_size * args.grad_accum_steps * args.seq_len
    most = min(tokens, longest_possible(args))
    lengths = [n for n in range(STEP, most + 1, STEP) if tokens % n == 0]

    def cut(seq_len: int) -> Question:
        parts = {"batch_size": 1, "grad_accum_steps": tokens // seq_len}
        return asked.about(changed(args, **with_length(args, seq_len), **parts))

    def too_long(seq_len: int) -> bool:
        planner = cut(seq_len).planner
        return all(planner.step(1, recompute=way).peak > asked.budget for way in least(planner))

    n = bisect_left(lengths, True, key=too_long)
    return cut(lengths[n - 1]) if n else asked


def format_settings(settings: list[Setting]) -> str:
    """The best few, the first one marked."""
    few = settings[:SHOWN]
    speeds = [setting.asked.tokens_per_s(setting.step) for setting in few]
    return align(
        [
            [" <", *(">" * (setting is few[0]) for setting in few)],
            ["a step is<", *(batch_words(setting.asked.args) for setting in few)],
            ["policy<", *(setting.name for setting in few)],
            ["peak>", *(format_bytes(setting.step.peak) for setting in few)],
            ["time>", *(f"~{format_seconds(setting.seconds)}" for setting in few)],
            ["tokens/s>", *(f"~{digits(3, speed)}" for speed in speeds)],
        ]
    )


def batch_words(args: argparse.Namespace) -> str:
    return f"{args.grad_accum_steps} x {args.batch_size} x {args.seq_len:,} tokens"
