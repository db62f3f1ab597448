"""How long may a sequence be? One device, one knob after the other; then several devices.

python -m studies.long                # docs/long.md's table
python -m studies.long --out FOLDER   # and its picture: needs matplotlib (pip install matplotlib)

Planned, so no card is needed: bfloat16, AdamW, no dropout, one sequence at a time, and nine tenths
of the card for tensors. Each length is what `python -m scripts.plan_memory --longest-sequence` says
for these flags, and FLOPs and seconds are those of a step of that length. Some minutes on a laptop.
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from planner import CARDS
from scripts import tool
from scripts.benchmark import about, table, write_json
from scripts.plan_knobs import longest_sequence, with_length
from scripts.plan_memory import aim
from scripts.plan_table import Row, format_time
from scripts.style import WIDTH, load_pyplot, save_picture
from studies.common import add_json, study_parser
from trainer.flags import changed, output_folder
from trainer.metrics import format_bytes

# Model -> whose clock tells the time, and the memory of such a card (all of it, for round figures)
CARD = {"gpt2": ("RTX 4090", "24GiB"), "gpt2-xl": ("A100", "80GiB")}
GROUP = {"gpt2": 4, "gpt2-xl": 7}  # blocks, near sqrt(n_layers)
GOING_FAR = ("sdpa", "full", "full/K+nested", "full+offload")
WAYS = [("none", 1), *product(GOING_FAR, (1, 0))]  # of one device: the policy, and --mlp-chunks
PROCESSES = (2, 4, 8)  # with train_sp.py and `full`


def longest(model: str, policy: str, mlp_chunks: int, processes: int = 1) -> dict[str, Any]:
    """The longest sequence of one way, and what a step of it costs."""
    card, budget = CARD[model]
    policy = policy.replace("K", str(GROUP[model]))
    flags = f"--model {model} --device cuda --memory-budget {budget} --batch-size 1 --dropout 0 "
    flags += f"--mlp-chunks {mlp_chunks}"
    if processes > 1:
        flags += f" --nproc-per-node {processes} --sp"
    asked, _ = aim(flags.split())
    args = changed(asked.args, use_activation_checkpoint=policy)
    asked = replace(asked.about(args), card=CARDS[card])
    tokens = longest_sequence(Row(asked))
    then = Row(asked.about(with_length(asked.args, tokens)))
    return {
        "model": model,
        "policy": policy,
        "mlp_chunks": mlp_chunks,
        "processes": processes,
        "tokens": tokens,
        "replayed": then.replayed,
        "seconds": then.seconds,
        "host_bytes": processes * then.step.host,
    }


def report(found: list[dict[str, Any]]) -> str:
    """A row for each way, the models side by side."""
    rows: dict[str, list[str]] = {}
    for each in found:
        way = f"`{'full/K+nested' if 'nested' in each['policy'] else each['policy']}`"
        way += ", chunks" if each["mlp_chunks"] != 1 else ""
        way += f", {each['processes']} devices" if each["processes"] > 1 else ""
        host = format_bytes(each["host_bytes"]) if each["host_bytes"] else ""
        cells = [f"{each['tokens']:,}", f"{1 + each['replayed']:.2f}", format_time(each["seconds"])]
        rows.setdefault(way, []).extend([*cells, host])
    header = [""]
    for model, (card, budget) in CARD.items():
        header += [f"`{model}`, {budget}: tokens", "FLOPs", f"a step, {card}", "CPU memory"]
    return table(header, ([way, *cells] for way, cells in rows.items()))


def draw(plt: Any, found: list[dict[str, Any]]) -> Any:
    """Tokens against processes; and beside it what a step of them takes."""
    figure, (tokens, minutes) = plt.subplots(1, 2, figsize=(WIDTH, 3.2))
    for model, color, mark in zip(CARD, ("#0072B2", "#C04A00"), "os", strict=True):
        ways = [each for each in found if (each["model"], each["policy"]) == (model, "full")]
        ways = [each for each in ways if each["mlp_chunks"] == 1]
        counts = [each["processes"] for each in ways]
        label = f"{model} on {CARD[model][1]}"
        for axis, name, unit in ((tokens, "tokens", 1e6), (minutes, "seconds", 60)):
            figures = [each[name] / unit for each in ways]
            axis.plot(counts, figures, color=color, marker=mark, label=label)
    tokens.set(title="Longest sequence, millions of tokens", ylim=0)
    minutes.set(title="Minutes that one step of it takes", ylim=0)
    for axis in (tokens, minutes):
        axis.set(xlabel="devices that share it (train_sp.py)", xticks=(1, *PROCESSES))
    tokens.legend(frameon=False)
    return figure


@tool
def main(argv: list[str]) -> None:
    parser = study_parser("studies.long", __doc__)
    add_json(parser)
    parser.add_argument("--out", type=output_folder, metavar="FOLDER",
        help="draw the picture there")  # fmt: skip
    args = parser.parse_args(argv)
    plt = load_pyplot("studies.long") if args.out else None
    ways = [(model, *way, 1) for way in WAYS for model in CARD]
    ways += [(model, "full", 1, n) for n in PROCESSES for model in CARD]
    found = [longest(*way) for way in tqdm(ways, unit="way", disable=None, leave=False)]
    print(report(found))
    write_json(args.json, about("studies.long", argv) | {"found": found})
    if plt:
        args.out.mkdir(parents=True, exist_ok=True)
        file: Path = args.out / "long.png"
        save_picture(draw(plt, found), file, {"Description": report(found)})
        print(f"wrote {file}")


if __name__ == "__main__":
    sys.exit(main())
