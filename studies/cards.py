"""Which card trains what: the largest of GPT-2's four sizes, how fast, and how many sequences.

    python -m studies.cards
    python -m studies.cards --cards "RTX 4090" H100

Predicted, as all of planner/ is, so no card is needed. What fits is what plan_memory says for
`--card NAME`, and how fast is what it says with `--all-knobs` for half a million tokens a step, as
GPT-3 had; cards of one precision share what is simulated. Some minutes on a laptop.
"""

import sys
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from planner import CARDS
from scripts import tool
from scripts.benchmark import about, table, write_json
from scripts.plan_knobs import setting_json, turn_all_knobs
from scripts.plan_memory import aim
from scripts.plan_table import digits, format_time
from studies.common import add_json, study_parser
from trainer.card import card_name, device_type
from trainer.flags import SHAPES, UsageError
from trainer.metrics import format_bytes
from trainer.plan import Question

WAYS: dict[str, dict[str, Any]] = {
    "as in most tutorials": {"loss_chunks": 1},
    "as it is": {},
    "full": {"recompute": "full"},
}
ONE_SEQUENCE, STEP = "--batch-size 1", "--batch-size 16 --grad-accum-steps 32 --all-knobs"
# (Apple sells each of its chips with several memories: what fits there plan_memory tells.)
NVIDIA = [name for name, card in CARDS.items() if device_type(card) == "cuda"]
# The documents' table has one or two cards for each size of memory; these are between those.
BESIDE = {"RTX 3070", "RTX 3080 10GB", "RTX 4060", "RTX 4080", "RTX 5080", "RTX A6000"}
BESIDE |= {"RTX 6000 Ada", "V100 16GB", "V100 32GB"}
SHOWN = [name for name in NVIDIA if name not in BESIDE]


MADE = defaultdict[torch.dtype, dict](dict)  # cards of one precision share what is simulated


def ask(card: str, model: str, flags: str) -> Question:
    """As plan_memory does."""
    asked, _ = aim(["--model", model, "--card", card, *flags.split()])
    return replace(asked, made=MADE[asked.precision])


def largest_batches(card: str, model: str) -> dict[str, int]:
    """For each way to spend memory, the largest micro-batch; 0 = not one sequence."""
    asked = ask(card, model, ONE_SEQUENCE)
    if asked.state >= asked.budget:
        return dict.fromkeys(WAYS, 0)
    most = asked.planner.largest_batch
    return {name: most(asked.budget, 1, **way) for name, way in WAYS.items()}


def row(card: str) -> dict[str, Any]:
    """The largest batches of each model; of the largest that fits, the fastest way to run 512
    sequences a step."""
    batches = {model: largest_batches(card, model) for model in SHAPES}
    found = {"card": card, "memory_bytes": CARDS[card].memory, "largest_batch": batches}
    for model in reversed(SHAPES):
        asked = ask(card, model, STEP)
        if batches[model]["full"] and (settings := turn_all_knobs(asked)):
            precision = str(asked.precision).removeprefix("torch.")
            best = {"model": model, **setting_json(settings[0], asked.args)}
            return found | {"fastest": best, "precision": precision}
    return found | {"fastest": None}


def format_fastest(rows: list[dict[str, Any]]) -> str:
    """ "| RTX 3060 12GB | `gpt2-medium` | 8 x 64 | `cheap` | ..." """
    header = ("card", "largest model", "a step", "policy", "peak", "tokens/s", "1B tokens")
    lines = []
    for row in rows:
        cells = ["-", *[""] * 5]
        if best := row["fastest"]:
            cells = [
                f"`{best['model']}`",
                f"{best['grad_accum_steps']} x {best['batch_size']}",
                best["name"],
                format_bytes(best["peak_bytes"]),
                digits(3, best["tokens_per_s"]),
                format_time(10**9 / best["tokens_per_s"]),
            ]
        lines.append([row["card"], *cells])
    return table(header, lines)


def format_batches(rows: list[dict[str, Any]]) -> str:
    """ "| RTX 3060 12GB | 9 / 26 / 128 | ..."; cards with equal figures in one row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in sorted(rows, key=lambda row: row["memory_bytes"]):
        of_models = [row["largest_batch"][model].values() for model in SHAPES]
        cells = [" / ".join(f"{n:,}" for n in of) if any(of) else "-" for of in of_models]
        alike.setdefault(tuple(cells), []).append(row["card"])
    header = ["", *(f"`{model}`" for model in SHAPES)]
    return table(header, ([", ".join(names), *cells] for cells, names in alike.items()))


@tool
def main(argv: list[str]) -> None:
    parser = study_parser("studies.cards", __doc__)
    add_json(parser)
    parser.add_argument("--cards", nargs="+", type=card_name, default=SHOWN, metavar="NAME",
        help="any of NVIDIA's that are known (default: those in docs/planning.md)")  # fmt: skip
    args = parser.parse_args(argv)
    if others := [name for name in args.cards if name not in NVIDIA]:
        raise UsageError(f"--cards: {others[0]} is no NVIDIA card; plan_memory --card plans for it")
    rows = [row(card) for card in tqdm(args.cards, unit="card", disable=None, leave=False)]
    print(format_fastest(rows), format_batches(rows), sep="\n\n")
    write_json(args.json, about("studies.cards", argv) | {"rows": rows})


if __name__ == "__main__":
    sys.exit(main())
