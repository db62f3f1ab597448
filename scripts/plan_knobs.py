"""What scripts/plan_memory.py turns besides the policy: the length of a sequence, the micro-batch.

Peaks grow nearly along lines and times have one valley, so that few steps need to be simulated.
"""

import argparse
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from planner import Planner, StepMemory
from planner.choose import pick_recompute
from scripts.plan_table import Clock, Row, align, digits, format_seconds
from trainer.metrics import format_bytes
from trainer.plan import Plans

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


def changed(args: argparse.Namespace, flags: dict[str, Any]) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | flags)


def longest_possible(args: argparse.Namespace) -> int:
    typed = "max_position_embeddings" in args.typed
    return min(LONGEST, args.max_position_embeddings) if typed else LONGEST


def longest_sequence(row: Row, args: argparse.Namespace, plans: Plans) -> int:
    """Tokens of the longest sequence that fits safely with this row's policy, or STEP less; 0: none
    does."""
    safe = row.room.safe or 0

    def peak(n: int) -> int:
        if n == 0:
            return plans.state(args)
        there = changed(args, with_length(args, n * STEP))
        return plans.planner(there).step(args.batch_size, recompute=row.name).peak

    # Where attention is fused, tokens take as much in one sequence as in another.
    guess = (row.safe_batch or 0) * args.seq_len // (args.batch_size * STEP)
    return STEP * most_that_fit(peak, safe, guess, longest_possible(args) // STEP)


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
    clock: Clock

    @property
    def seconds(self) -> float:
        return self.clock.seconds(self.step)

    @property
    def name(self) -> str:
        return self.step.config.recompute

    def wanted(self, args: argparse.Namespace) -> dict[str, int]:
        """What is changed of the flags, besides those that recompute."""
        wanted = {"batch_size": self.step.batch_size, "grad_accum_steps": self.clock.micro_batches}
        if self.step.seq_len != args.seq_len:
            wanted |= with_length(args, self.step.seq_len)
        return wanted

    def flags(self, args: argparse.Namespace) -> list[str]:
        """What is to be typed instead of what was."""
        words = length_words(args, self.wanted(args))
        return [*words, "--use-activation-checkpoint", self.name]

    def as_json(self, args: argparse.Namespace) -> dict[str, Any]:
        return {
            "name": self.name,
            "batch_size": self.step.batch_size,
            "grad_accum_steps": self.clock.micro_batches,
            "seq_len": self.step.seq_len,
            "flags": self.flags(args),
            "peak_bytes": self.step.peak,
            "seconds": self.seconds,
            "tokens_per_s": self.clock.tokens_per_s(self.step),
        }


def least(planner: Planner) -> list[str]:
    """Two ways that take the least memory, one of them in any model; shards know no groups."""
    return ["full", "full/2"] if planner.shards == 1 else ["full"]


def length_words(args: argparse.Namespace, wanted: dict[str, Any]) -> list[str]:
    """Those flags that differ from what was asked, as words."""
    words = []
    for name, value in wanted.items():
        follows = name == "max_position_embeddings" and not args.model  # --seq-len
        if value != getattr(args, name) and not follows:
            words += ["--" + name.replace("_", "-"), str(value)]
    return words


def turn_all_knobs(
    args: argparse.Namespace, plans: Plans, safe: int, clock: Clock
) -> list[Setting]:
    """The fastest ways to run a step within `safe` bytes, the best first; none if none fits."""
    if args.longest_sequence:
        args = longest_for_all(args, plans, safe)
    return Search(args, plans, safe, clock).settings()


class Search:
    """For the fastest way to run the sequences of a step on a card, within `safe` bytes."""

    def __init__(self, args: argparse.Namespace, plans: Plans, safe: int, clock: Clock):
        self.args, self.plans, self.safe, self.clock = args, plans, safe, clock
        self.sequences = args.batch_size * args.grad_accum_steps
        self.sizes = [n for n in range(1, self.sequences + 1) if self.sequences % n == 0]

    def planner(self, size: int) -> Planner:
        flags = {"batch_size": size, "grad_accum_steps": self.sequences // size}
        return self.plans.planner(changed(self.args, flags))

    def setting(self, step: StepMemory) -> Setting:
        clock = replace(self.clock, micro_batches=self.sequences // step.batch_size)
        return Setting(step, clock)

    def without(self, size: int) -> Setting:
        """Without recompute, whether that fits or not: no way is faster."""
        return self.setting(self.planner(size).step(size, recompute="none"))

    def fastest(self, size: int) -> Setting | None:
        """The fastest way to recompute with micro-batches of `size`; None if none fits."""
        clock = self.clock
        step = pick_recompute(self.planner(size), size, self.safe, clock.card, clock.compiled)
        return self.setting(step) if step.peak <= self.safe else None

    def largest_without(self) -> int:
        """The largest micro-batch that fits without recompute; else the smallest there is."""
        whole = self.sizes[-1]
        if self.without(whole).step.peak <= self.safe:
            return whole
        planner, asked = self.planner(1), self.args.batch_size
        most = planner.largest_batch(self.safe, asked, recompute="none")
        return max([n for n in self.sizes[:-1] if n <= most], default=1)

    def settings(self) -> list[Setting]:
        """The fastest first. From the largest micro-batch without recompute on, larger ones (which
        replay) are tried, and smaller ones (which use the card less), for as long as it pays."""
        start, asked = self.sizes.index(self.largest_without()), self.args.batch_size
        found = {asked: self.fastest(asked)}  # to compare with
        for way in (self.sizes[start:], self.sizes[start::-1]):
            best = float("inf")
            for size in way:
                plain = self.without(size)
                if plain.step.peak <= self.safe:
                    found[size] = plain
                if plain.seconds >= best:
                    break
                here = found[size] = found.get(size) or self.fastest(size)
                if here is None or here.seconds > best:
                    break
                best = here.seconds
        fitting = [setting for setting in found.values() if setting is not None]
        return sorted(fitting, key=lambda setting: (setting.seconds, setting.step.peak))


def longest_for_all(args: argparse.Namespace, plans: Plans, safe: int) -> argparse.Namespace:
    """The flags with the longest sequences that the tokens of a step can be cut into and that fit,
    one at a time; as they are if none of them does."""
    tokens = args.batch_size * args.grad_accum_steps * args.seq_len
    most = min(tokens, longest_possible(args))
    lengths = [n for n in range(STEP, most + 1, STEP) if tokens % n == 0]

    def flags(seq_len: int) -> argparse.Namespace:
        parts = {"batch_size": 1, "grad_accum_steps": tokens // seq_len}
        return changed(args, with_length(args, seq_len) | parts)

    def too_long(seq_len: int) -> bool:
        planner = plans.planner(flags(seq_len))
        return all(planner.step(1, recompute=way).peak > safe for way in least(planner))

    n = bisect_left(lengths, True, key=too_long)
    return flags(lengths[n - 1]) if n else args


def format_settings(settings: list[Setting]) -> str:
    """The best few, the first one marked."""
    few = settings[:SHOWN]
    speeds = [setting.clock.tokens_per_s(setting.step) for setting in few]
    return align(
        [
            [" <", *(">" * (setting is few[0]) for setting in few)],
            ["a step is<", *(batch_words(setting) for setting in few)],
            ["policy<", *(setting.name for setting in few)],
            ["peak>", *(format_bytes(setting.step.peak) for setting in few)],
            ["time>", *(f"~{format_seconds(setting.seconds)}" for setting in few)],
            ["tokens/s>", *(f"~{digits(3, speed)}" for speed in speeds)],
        ]
    )


def batch_words(setting: Setting) -> str:
    step = setting.step
    return f"{setting.clock.micro_batches} x {step.batch_size} x {step.seq_len:,} tokens"
