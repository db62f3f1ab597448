"""Tokens, as people count them; --num-tokens is one of three ways to say how long a run is."""

import argparse
import re
from fractions import Fraction

LENGTHS = ("num_steps", "num_tokens", "num_epochs")  # each says it alone
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def token_count(text: str) -> int:
    """An argparse type: "1B", "1.5B", "300M", "1e9" or plain digits -> tokens."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)([kmbt]?)", text.strip().lower())
    count = Fraction(match[1]) * UNITS[match[2]] if match else Fraction(0)
    if count.denominator > 1 or not 1 <= count <= 10**15:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of tokens up to 1000T, as in 300M, 1.5B or 1e9, "
            f"not {text[:40]!r}"
        )
    return int(count)


def format_tokens(count: int) -> str:
    """1,500,000,000 -> "1.5B"; in full, if it is not that round."""
    for letter, unit in reversed(UNITS.items()):
        if unit > 1 and count >= unit and count * 100 % unit == 0:
            return f"{count / unit:,.10g}{letter.upper()}"
    return f"{count:,}"


def tokens_per_step(args: argparse.Namespace, processes: int) -> int:
    """Of all micro-batches of all processes."""
    return int(args.batch_size * args.seq_len * args.grad_accum_steps * processes)
