"""What scripts/plan_memory.py turns besides the policy: the length of a sequence, the micro-batch.

Peaks grow nearly along lines and times have one valley, so that few steps need to be simulated.
"""

import argparse
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memory import expanded
from memory.policies import sizes_of_chunks
from planner import Planner
from planner.choose import nested_groups
from scripts.plan_table import Row, align, digits, format_time
from trainer.flags import MOST, changed, words_of
from trainer.metrics import format_bytes
from trainer.plan import Knob, Question

STEP = 64  # tokens; lengths are multiples of it
SHOWN = 5  # settings
CHUNKED = "other rounding of six gradients a block"  # what --mlp-chunks costs


# ---- the longest sequence


def with_length(args: argparse.Namespace, seq_len: int) -> argparse.Namespace:
    """The same for sequences of that length; positions grow with it, unless they were typed."""
    then = Knob({"seq_len": seq_len}).change(args)
    then.max_position_embeddings = max(seq_len, then.max_position_embeddings)
    return then


def longest_possible(args: argparse.Namespace) -> int:
    typed = "max_position_embeddings" in args.typed
    return args.max_position_embeddings if typed else MOST


def longest_sequence(row: Row) -> int:
    """Tokens of the longest sequence that fits with this row's policy and leaves the margin, or
    STEP less; 0: none does."""
    asked, args = row.asked, row.asked.args

    def peak(n: int) -> int:
        return asked.about(with_length(args, n * STEP)).step.peak if n else asked.state

    # Where attention is fused, tokens take as much in one sequence as in another.
    guess = (row.largest_batch or 0) * args.seq_len // (args.batch_size * STEP)
    return STEP * most_that_fit(peak, asked.budget, guess, longest_possible(args) // STEP)


def in_chunks(row: Row) -> Row | None:
    """The same with the MLP half in chunks, and its longest sequence; None: that is no longer."""
    args = row.asked.args
    if not expanded(row.step.config).cuts_mlp or not cuts_mlp(with_length(args, row.longest or 1)):
        return None
    cut = Row(row.asked.about(changed(args, mlp_chunks=0)))
    cut = replace(cut, longest=longest_sequence(cut))
    return cut if (cut.longest or 0) > (row.longest or 0) else None


def cuts_mlp(args: argparse.Namespace) -> bool:
    """Would --mlp-chunks 0 cut what it does not cut yet?"""
    fresh = args.mlp_chunks == 1 and not args.compile and args.gather_dtype == "float32"
    return fresh and len(sizes_of_chunks(args.seq_len, args.d_ff, 0)) > 1


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


def turn_all_knobs(asked: Question) -> list[Row]:
    """The fastest ways to run the sequences of a step, the best first; none if none fits. (They are
    the same training: the same sequences a step, and policies change no result.)"""
    if asked.args.longest_sequence:
        asked = longest_for_all(asked)
    args = changed(asked.args, use_activation_checkpoint="none")
    sequences = args.batch_size * args.grad_accum_steps
    sizes = [n for n in range(1, sequences + 1) if sequences % n == 0]

    def dealt(size: int) -> Question:
        return asked.about(changed(args, batch_size=size, grad_accum_steps=sequences // size))

    found = {}
    # From the largest micro-batch that fits without recompute on, larger ones (which replay) and
    # smaller ones (which use the card less) until it no longer pays. Then the one that was asked
    # for, to compare with.
    start = sizes.index(max((size for size in sizes if dealt(size).fits), default=1))
    for way in (sizes[start:], sizes[start::-1], [args.batch_size]):
        best = float("inf")
        for size in way:
            here = dealt(size)
            step = here.pick()
            if step.peak > here.budget:
                break
            policy = changed(here.args, use_activation_checkpoint=step.config.recompute)
            found[size] = Row(here.about(policy))
            if here.seconds(step) > best:
                break
            best = here.seconds(step)
    return sorted(found.values(), key=lambda row: row.cost)


def least(planner: Planner) -> list[str]:
    """Ways one of which takes the least memory, in any model; of groups shards know nested ones."""
    ways = ["full", "full/2"] if planner.shards == 1 else ["full"]
    return ways + nested_groups(planner.config.n_layers)


def longest_for_all(asked: Question) -> Question:
    """With the longest sequences that the tokens of a step can be cut into and that fit, one at a
    time; as it is if none of them does."""
    args = asked.args
    tokens = args.batch_size * args.grad_accum_steps * args.seq_len
    most = min(tokens, longest_possible(args))
    lengths = [n for n in range(STEP, most + 1, STEP) if tokens % n == 0]

    def cut(seq_len: int) -> Question:
        parts = {"batch_size": 1, "grad_accum_steps": tokens // seq_len}
        return asked.about(changed(with_length(args, seq_len), **parts))

    def too_long(seq_len: int) -> bool:
        planner = cut(seq_len).planner
        return all(planner.step(1, recompute=way).peak > asked.budget for way in least(planner))

    n = bisect_left(lengths, True, key=too_long)
    return cut(lengths[n - 1]) if n else asked


def format_settings(settings: list[Row]) -> str:
    """The best few, the first one marked."""
    few = settings[:SHOWN]
    steps = [row.asked.args for row in few]
    return align(
        [
            [" <", *(">" * (row is few[0]) for row in few)],
            [
                "a step is<",
                *(f"{a.grad_accum_steps} x {a.batch_size} x {a.seq_len:,} tokens" for a in steps),
            ],
            ["policy<", *(row.name for row in few)],
            ["peak>", *(format_bytes(row.step.peak) for row in few)],
            ["time>", *(f"~{format_time(row.asked.seconds(row.step))}" for row in few)],
            ["tokens/s>", *(f"~{digits(3, row.asked.tokens_per_s(row.step))}" for row in few)],
        ]
    )


def setting_json(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """`args`: what was typed."""
    return {
        "name": row.name,
        "batch_size": row.step.batch_size,
        "grad_accum_steps": row.asked.args.grad_accum_steps,
        "seq_len": row.step.seq_len,
        "flags": words_of(row.changes(args)),
        "peak_bytes": row.step.peak,
        "seconds": row.seconds,
        "tokens_per_s": row.tokens_per_s,
    }
