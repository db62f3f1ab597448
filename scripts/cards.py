"""Which card fits what: the largest micro-batch of GPT-2's four sizes, as a table in Markdown.

    python -m scripts.cards

Predicted, as all of planner/ is, so no card is needed: two steps are simulated for each model and
way to spend memory, and the rest is a line through them. A minute on a laptop.
"""

import sys

if not __package__:  # python scripts/cards.py: the others lie one folder up
    sys.path[0] += "/.."
    import scripts  # noqa: F401

import argparse
import json
import time
from typing import Any

import torch
from tqdm import tqdm

from model import MiniGPTConfig
from planner.formulas import count_parameters, state_bytes
from planner.step import Planner
from scripts import say_stopped
from scripts.plan_memory import PROGRESS
from trainer.flags import SHAPES, OneLineParser, build_parser, fill_in, output_file
from trainer.metrics import format_bytes
from trainer.plan import Plans
from trainer.room import for_tensors

CARDS = (8, 12, 16, 24, 48, 80)  # GiB
WAYS: dict[str, dict[str, Any]] = {
    "as in most tutorials": {"loss_chunks": 1},
    "as it is": {},
    "full": {"recompute": "full"},
}
ONE_SEQUENCE = "--batch-size 1 --device cuda --dropout 0".split()


def make_planner(model: str, watch: tqdm) -> Planner:
    """Of one sequence of 1,024 tokens on a GPU that need not be there."""
    args = fill_in(build_parser("cards", "unused.pt").parse_args(["--model", model, *ONE_SEQUENCE]))
    vocab_size = MiniGPTConfig.vocab_size  # GPT-2's
    return Plans(vocab_size, torch.device("cuda"), torch.bfloat16, watch=watch.update).planner(args)


def largest_batches(planner: Planner) -> dict[str, list[int]]:
    """For each way to spend memory, the largest micro-batch on each card; 0 = not one sequence."""
    return {
        name: [
            planner.largest_batch(for_tensors(size * 2**30, "cuda"), 1, **memory) for size in CARDS
        ]
        for name, memory in WAYS.items()
    }


def measure(models: list[str], watch: tqdm) -> list[dict[str, Any]]:
    table = []
    for model in models:
        planner = make_planner(model, watch)
        table.append(
            {
                "model": model,
                "parameters": count_parameters(planner.config),
                "state_bytes": state_bytes(planner.config),
                "largest_batch": largest_batches(planner),
            }
        )
    return table


def format_row(row: dict[str, Any]) -> str:
    """ "| `gpt2`, 124M | 1.9 GiB | 5 / 15 / 81 | ..." """
    batches = zip(*row["largest_batch"].values(), strict=True)
    cells = [" / ".join(f"{n:,}" for n in cell) if any(cell) else "-" for cell in batches]
    name = f"`{row['model']}`, {row['parameters'] / 1e6:,.0f}M"
    return f"| {' | '.join([name, format_bytes(row['state_bytes']), *cells])} |"


def format_table(table: list[dict[str, Any]]) -> str:
    heads = ["", "always", *(f"{size} GB" for size in CARDS)]
    lines = [f"| {' | '.join(heads)} |".replace("|  |", "| |"), "|---" * len(heads) + "|"]
    return "\n".join([*lines, *map(format_row, table)])


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m scripts.cards", description="Which card fits what.")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the table there")
    parser.add_argument(
        "--models", nargs="+", choices=tuple(SHAPES), default=list(SHAPES), metavar="MODEL",
        help=f"(default: {' '.join(SHAPES)})",
    )  # fmt: skip
    args: argparse.Namespace = parser.parse_args(argv)
    try:
        with tqdm(bar_format=PROGRESS, disable=None, leave=False) as bar:
            table = measure(args.models, bar)
    except KeyboardInterrupt:
        say_stopped()
        return 130
    print(format_table(table))
    if args.json:
        about: dict[str, Any] = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        about |= {"cards_gib": CARDS, "rows": table}
        args.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
