"""Print the documents' tables of planned figures as Markdown; no GPU is needed.

python -m studies.tables ladder    # what each policy costs: docs/ladder.md; a minute
python -m studies.tables cards     # which card trains what: docs/planning.md; 3 minutes
python -m studies.tables long      # how long a sequence may be: docs/long.md; 15 minutes

Every figure is the result of `python -m scripts.plan_memory` for the flags in this file. All plans
are without dropout, and in bfloat16, or in float16 on cards that compute faster in float16.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, product
from typing import Any

from tqdm import tqdm

from planner import CARDS
from planner.choose import UNIFORM_POLICIES
from scripts import cli_main
from scripts.plan_memory import make_plan, parse
from scripts.plan_table import (
    flags_for_seq_len,
    format_time,
    longest_sequence,
    plan_row,
    search_fastest_plans,
    significant_digits,
)
from scripts.plans import CommandPlan
from scripts.style import about, write_json
from trainer.flags import OneLineParser, output_file
from trainer.metrics import format_bytes
from trainer.settings import SHAPE_BY_MODEL

Rows = list[dict[str, Any]]


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    lines = [[*header], *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def planned(flags: str, policy: str = "none", clock: str = "") -> CommandPlan:
    """Return one row of plan_memory. `clock`: name of the card for which the time is predicted; "":
    the card that --card names."""
    plan = make_plan(parse(flags.split()))
    return replace(plan, card=CARDS.get(clock, plan.card)).with_policy(policy)


# ---- What each policy costs

PEAKS = {
    "124M, B=12": "--model gpt2 --batch-size 12",
    "1.5B, B=4": "--model gpt2-xl --batch-size 4",
}
CLOCKS = "H100", "RTX 4090"  # cards for which the time of "124M, B=12" is predicted
WAYS = {  # name of a row -> (policy, --loss-chunks)
    "plain": ("none", 1),
    "full, head at once": ("full", 1),
    **{rung: (rung, 0) for rung in UNIFORM_POLICIES},
}


def ladder_row(name: str) -> dict[str, Any]:
    """Return a row: peak bytes of a step for each shape, and seconds on two cards."""
    policy, chunks = WAYS[name]
    flags = f"--dropout 0 --amp-dtype bfloat16 --loss-chunks {chunks}"
    peaks = {
        column: planned(f"{shape} {flags} --device cpu", policy).peak
        for column, shape in PEAKS.items()
    }
    timed = f"{PEAKS['124M, B=12']} {flags} --device cuda"
    return {
        "name": name,
        "peak_bytes": peaks,
        "seconds": {card: planned(timed, policy, card).seconds for card in CLOCKS},
    }


def format_ladder(rows: Rows) -> str:
    """Return the Markdown table: peaks in MiB, times relative to the time without recompute."""
    (none,) = (row["seconds"] for row in rows if row["name"] == "none")
    cells = (
        [
            row["name"],
            *(f"{peak / 2**20:,.0f} MiB" for peak in row["peak_bytes"].values()),
            *(f"{row['seconds'][card] / none[card]:.2f}" for card in CLOCKS),
        ]
        for row in rows
    )
    return table(["", *PEAKS, *(f"time: {card}" for card in CLOCKS)], cells)


# ---- Which card trains what

# Cards of the documents' table: one or two for each size of memory. (Apple's chips are left out,
# because each is sold with several sizes of memory; plan_memory shows what fits.)
SHOWN = (
    "RTX 3060 12GB|RTX 3090|RTX 4060 Ti 16GB|RTX 4070|RTX 4090|RTX 5090|T4|L4|A10G|A100 40GB|A100|"
    "A100 PCIe|H100|H100 PCIe|H200|B200"
).split("|")
STEP = "--batch-size 16 --grad-accum-steps 32"  # half a million tokens per step, as for GPT-3


SETTING = "policy batch_size grad_accum_steps seq_len peak_bytes seconds tokens_per_s".split()


def card_row(name: str) -> dict[str, Any]:
    """Return a row: the fastest settings for the largest model that trains on this card."""
    flags = f"--card {name.replace(' ', '-')} {STEP}"
    plans = (planned(f"{flags} --model {model}") for model in reversed(SHAPE_BY_MODEL))
    found = (
        search_fastest_plans(plan) for plan in plans if plan.state_bytes < plan.bytes_within_margin
    )
    best = next(filter(None, found))[0]
    row = plan_row(best)
    return {"card": name, "model": best.settings.model} | {key: row[key] for key in SETTING}


def format_cards(rows: Rows) -> str:
    """Return the Markdown table: rows like "| RTX 3060 12GB | `gpt2-medium` | 4 x 128 | ..."."""
    cells = (
        [
            row["card"],
            f"`{row['model']}`",
            f"{row['grad_accum_steps']} x {row['batch_size']}",
            row["policy"],
            format_bytes(row["peak_bytes"]),
            significant_digits(3, row["tokens_per_s"]),
            format_time(10**9 / row["tokens_per_s"]),
        ]
        for row in rows
    )
    return table("card|largest model|a step|policy|peak|tokens/s|1B tokens".split("|"), cells)


# ---- How long a sequence may be

# Model -> (card to predict the time for, memory budget, blocks per nested group). The budget is the
# card's nominal memory, a round figure, and the group size is near sqrt(n_layers).
LENGTHS = {"gpt2": ("RTX 4090", "24GiB", 4), "gpt2-xl": ("A100", "80GiB", 7)}
KNOBS = (  # (policy, --mlp-chunks, processes of train_sp.py)
    ("none", 1, 1),
    *product(("sdpa", "full", "full/K+nested", "full+offload"), (1, 0), (1,)),
    *product(("full",), (1,), (2, 4, 8)),
)


def length_row(way: tuple[tuple[str, int, int], str]) -> dict[str, Any]:
    """Return a row: the longest sequence, and the cost of its step. `way`: (an entry of KNOBS, a
    model)."""
    (policy, mlp_chunks, processes), model = way
    clock, budget, group = LENGTHS[model]
    sharded = f"--nproc-per-node {processes} --sp" if processes > 1 else ""
    flags = (
        f"--model {model} --device cuda --memory-budget {budget} --batch-size 1 --dropout 0 "
        f"--mlp-chunks {mlp_chunks} {sharded}"
    )
    row = planned(f"{flags} --longest-sequence", policy.replace("K", str(group)), clock)
    tokens = longest_sequence(row) or 0
    then = row.with_flags(**flags_for_seq_len(row.settings, tokens))
    return {
        "model": model,
        "policy": policy,
        "mlp_chunks": mlp_chunks,
        "processes": processes,
        "tokens": tokens,
        "replayed": then.step.relative_flops - 1,
        "seconds": then.seconds,
        "host_bytes": processes * then.step.host_bytes,
    }


def format_long(rows: Rows) -> str:
    """Return the Markdown table: a row for each entry of KNOBS, the models side by side."""
    lines = defaultdict[str, list[str]](list)
    for row in rows:
        chunks = ", chunks" if row["mlp_chunks"] != 1 else ""
        devices = f", {row['processes']} devices" if row["processes"] > 1 else ""
        lines[f"`{row['policy']}`{chunks}{devices}"] += [
            f"{row['tokens']:,}",
            f"{1 + row['replayed']:.2f}",
            format_time(row["seconds"]),
            format_bytes(row["host_bytes"]) if row["host_bytes"] else "",
        ]
    header = (
        (f"`{model}`, {budget}: tokens", "FLOPs", f"a step, {clock}", "CPU memory")
        for model, (clock, budget, _) in LENGTHS.items()
    )
    return table(["", *chain(*header)], ([way, *cells] for way, cells in lines.items()))


# Table -> (function that makes the row of a key, function that formats all rows, keys).
TABLES: dict[str, tuple[Callable, Callable[[Rows], str], list]] = {
    "ladder": (ladder_row, format_ladder, [*WAYS]),
    "cards": (card_row, format_cards, SHOWN),
    "long": (length_row, format_long, [*product(KNOBS, LENGTHS)]),
}


@cli_main
def main(argv: list[str]) -> None:
    parser = OneLineParser(
        prog="python -m studies.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", choices=TABLES, metavar="NAME", help=" or ".join(TABLES))
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write raw numbers there")
    args = parser.parse_args(argv)
    make, format_rows, keys = TABLES[args.table]
    results = [make(row) for row in tqdm(keys, unit="row", leave=False, disable=None)]
    print(format_rows(results))
    write_json(args.json, about("studies.tables", argv) | {"rows": results})


if __name__ == "__main__":
    sys.exit(main())
