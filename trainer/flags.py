"""Read the values of flags: the argparse types of the trainers and of all commands.

A program whose flags are wrong prints one error line and ends with exit code 2, before it reads the
data or writes a file.
"""

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

from memory import parse_recompute_plan
from model import MiniGPTConfig
from planner.cards import CARDS, THIS_MACHINE, canonical_card_name

# Upper limits, far above any useful value, which reject a typing error before it fills the memory.
MAX_COUNT = 10**9
MAX_LAYERS = 10**4
MAX_WIDTH = 10**6  # of heads, channels, and sequences of a micro-batch
AUTO = "auto"  # value of --use-activation-checkpoint: the run chooses the policy
# Unit -> factor. With an "i", or with no "b", the units of bytes are powers of 1,024.
TOKEN_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
BYTE_UNITS = {"b": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("kmgt", 1)
    for end, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


class OneLineParser(argparse.ArgumentParser):
    """ArgumentParser that prints an error as one line, without argparse's long usage text."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("LOCAL_RANK", "0") in ("0", ""):  # torchrun: one process prints it
            print_error(message.removeprefix("argument "))
        self.exit(2)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        # The intermixed parser also finds positional arguments that stand between flags.
        positionals = self._get_positional_actions()
        parse = self.parse_known_intermixed_args if positionals else self.parse_known_args
        parsed, unknown = parse(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            similar = difflib.get_close_matches(name, self._option_string_actions, n=1)
            hint = f"did you mean {similar[0]}?" if similar else "--help lists all flags"
            self.error(f"unrecognized arguments: {' '.join(unknown)}; {hint}")
        return parsed


def flag(name: str) -> str:
    """Return the flag whose value argparse stores as `name`: `--n-layers` for `n_layers`."""
    return "--" + name.replace("_", "-")


def print_error(message: object) -> None:
    """Print the message on stderr as one line, even if the message contains line breaks. One write
    keeps lines of several processes apart; if it fails, the exit code still tells of the error."""
    with suppress(OSError):
        sys.stderr.write(f"error: {escape_controls(' '.join(str(message).splitlines()))}\n")
        sys.stderr.flush()


def escape_controls(text: str) -> str:
    """Return `text` with control characters escaped, as \\x1b, because a file's name, or a
    generated text, could clear the terminal. Line breaks and tabs stay."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", lambda c: ascii(c[0])[1:-1], text)


def number_in_range(
    kind: type, low: float, high: float = math.inf, *, open: bool = False
) -> Callable:
    """Return an argparse type for finite numbers in [low, high]; with `open`, in (low, high)."""
    noun = "a whole number" if kind is int else "a number"
    limits = f"above {low:g}" if open else f"of at least {low:g}"
    if high != math.inf:
        limits += f" and {'below' if open else 'at most'} {high:,}"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan  # NaN fails every comparison below
        inside = low < value < high if open else low <= value <= high
        if not inside or value == math.inf:
            raise argparse.ArgumentTypeError(f"must be {noun} {limits}, not {text[:40]!r}")
        return value

    return parse


def check_policy_string(text: str) -> str:
    """Check a policy string and return it (argparse type): "auto", or one that
    `memory.parse_recompute_plan` accepts. The N of `POLICY:N` is only checked against MAX_LAYERS,
    because the number of layers is not known yet."""
    if text != AUTO:
        try:
            parse_recompute_plan(text, MAX_LAYERS)
        except ValueError as error:
            message = str(error).removeprefix("recompute must be ")
            raise argparse.ArgumentTypeError(f"must be auto or {message}") from None
    return text


def card_name(text: str) -> str:
    """Return the card's name in CARDS, or THIS_MACHINE (argparse type). For the text "list", print
    a table of the cards and end, as --help does."""
    if text == "list":
        print(format_card_table())
        sys.exit()
    try:
        return canonical_card_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def format_card_table() -> str:
    """Return a table of CARDS: memory, peak rate of matrix products in the faster one of bfloat16
    and float16, peak bandwidth of the memory."""
    lines = [
        f"{each.name:30}{each.memory / 2**30:8.1f} GiB{max(each.flops) / 1e12:9,.1f} TFLOP/s"
        f"{each.bytes_per_s / 1e9:8,.0f} GB/s"
        for each in CARDS.values()
    ]
    return "\n".join([*lines, f"{THIS_MACHINE:30} (measured in about three seconds)"])


def replace_fields_by_flags(message: str) -> str:
    """Replace the names of config fields in `message` by the flags that the user knows, such as
    `d_model` by `--d-model`."""
    names = "|".join(field.name for field in fields(MiniGPTConfig))
    message = re.sub(rf"\b({names})\b", lambda name: flag(name[0]), message)
    return message.replace("--recompute", "--use-activation-checkpoint")


def number_with_unit(units: Mapping[str, int], least: int, expected: str) -> Callable:
    """Return an argparse type for numbers from `least` to 10^15, written with one of `units`, such
    as "1.5B", "8 GiB" or "1e9". The result is rounded down; the error message names `expected`."""

    def parse(text: str) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d{1,2})?) *([a-z]*)", text.strip().lower())
        count = Fraction(match[1]) * units.get(match[2], -1) if match else Fraction(-1)
        if not least <= count <= 10**15:
            raise argparse.ArgumentTypeError(f"must be {expected}, not {text[:40]!r}")
        return int(count)

    return parse


def token_count(least: int) -> Callable:
    """Return an argparse type for a number of tokens: "1B", "300M", "1e9" or plain digits."""
    expected = "a whole number of tokens up to 1000T, as in 300M, 1.5B or 1e9"
    return number_with_unit(TOKEN_UNITS, least, expected)


byte_count = number_with_unit(
    BYTE_UNITS, 1, "bytes with a unit (KiB MiB GiB TiB, or kB MB GB TB), as in 8GiB"
)


def format_byte_count(n: int) -> str:
    """Return a number of bytes in the largest unit of which it is a multiple: "5MiB"."""
    units = ((unit, BYTE_UNITS[unit.lower()]) for unit in ("GiB", "MiB", "KiB", "b"))
    return next(f"{n // size}{unit}" for unit, size in units if n % size == 0)


def snapshot_path(text: str) -> Path:
    """Parse the path of a snapshot (argparse type), but reject one that names no file, such as
    "checkpoints/" or ".pt". (The text is checked, because Path would drop a slash at the end.)"""
    if os.path.basename(text) in ("", ".", "..", ".pt"):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file, as checkpoints/run.pt")
    return Path(text).expanduser()  # (a shell leaves ~ in --flag=~/file)


def output_file(text: str) -> Path:
    """Parse the path of a file to write (argparse type), and check that it can be written before
    the program spends hours on its content."""
    path = Path(text)
    target = path if os.path.exists(path) else path.parent
    if os.path.isdir(path) or not os.access(target, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written: is there such a folder?")
    return path
