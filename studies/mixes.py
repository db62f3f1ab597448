"""How good is a mix of two policies, which is what `auto` looks for? Against all other assignments.

python -m studies.mixes

GPT-2 small's blocks, 12 sequences of 1,024 tokens, bfloat16, as predicted for two cards. First,
what does the fewest FLOPs twice at budgets between two rungs: of one policy in the first N blocks,
and of pairs. Then how much slower than the best of *all*
assignments of 8 policies to blocks the best pair is, at 20 budgets from the tightest to the widest:
of 4 and 6 blocks every assignment, of 12 every one but for its order. All of it is arithmetic on
what nine simulated steps say (planner.choose.peaks_of, which tests compare with simulations).
"""

import sys
from dataclasses import replace
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from model import RECOMPUTE_POLICIES
from planner import CARDS, Planner, StepMemory
from planner.choose import all_alike, all_mixes, config_of, mean_seconds, peaks_of
from planner.formulas import recompute_cost, step_flops
from studies.common import about, add_json, study_parser, table, tool, write_json
from studies.ladder import GPT2_SMALL, SEQ_LEN, adamw

BATCH = 12
CLOCKS = [(card, compiled) for card in ("H100", "RTX 4090") for compiled in (False, True)]
BETWEEN = (22, 18)  # BTC a block, on average
LAYERS = (4, 6, 12)
BUDGETS = 20


def alike(n_layers: int) -> list[StepMemory]:
    """A step of each rung, all blocks alike."""
    config = replace(GPT2_SMALL, n_layers=n_layers)
    planner = Planner(
        config, SEQ_LEN, precision=torch.bfloat16, make_optimizer=adamw, device_type="cuda"
    )
    return all_alike(planner, BATCH)


def clock_name(card: str, compiled: bool) -> str:
    return card + ", compiled" * compiled


def over_none(steps: list[StepMemory], mixes: np.ndarray, card: str, compiled: bool) -> np.ndarray:
    """(mixes,) predicted time, in units of that without recompute."""
    seconds = mean_seconds(steps, mixes, CARDS[card], compiled)
    return seconds / steps[0].seconds(CARDS[card], compiled)


def between_rungs(steps: list[StepMemory]) -> list[dict[str, Any]]:
    """What fits where a block may keep so much on average, and does the fewest FLOPs twice."""
    config, mixes = steps[0].config, all_mixes(steps[0].config.n_layers)
    configs, peaks = [config_of(steps, mix) for mix in mixes], peaks_of(steps, mixes)
    costs = [(*recompute_cost(way, SEQ_LEN), peaks[i]) for i, way in enumerate(configs)]
    found = []
    for btc in BETWEEN:
        less = (36 - btc) * BATCH * SEQ_LEN * config.d_model * config.n_layers
        fits = np.flatnonzero(peaks <= steps[0].peak - less).tolist()
        one_policy = [i for i in fits if "," not in configs[i].recompute]
        for rule, ways in {"one policy, FLOPs": one_policy, "pair, FLOPs": fits}.items():
            i = min(ways, key=costs.__getitem__)
            needed, twice = step_flops(configs[i], SEQ_LEN)
            row = {"btc": btc, "rule": rule, "takes": configs[i].recompute}
            row |= {"flops_twice": twice / needed, "peak_bytes": int(peaks[i])}
            times = {
                clock_name(*clock): float(over_none(steps, mixes[[i]], *clock)[0])
                for clock in CLOCKS
            }
            found.append(row | {"over_none": times})
    return found


def gaps(steps: list[StepMemory]) -> list[dict[str, Any]]:
    """How much slower the best pair is than the best of all, for each clock."""
    n_layers, policies = steps[0].config.n_layers, range(len(RECOMPUTE_POLICIES))
    if n_layers <= 6:
        every = np.array(list(product(policies, repeat=n_layers)))
    else:  # those that keep less come first, where their blocks' backward is over last
        by_bytes = sorted(policies, key=lambda i: steps[i].kept)
        every = np.array(list(combinations_with_replacement(by_bytes, n_layers)))
    pairs = all_mixes(n_layers)
    all_peaks, pair_peaks = peaks_of(steps, every), peaks_of(steps, pairs)
    found = []
    for card, compiled in CLOCKS:
        of_all, of_pairs = (over_none(steps, mixes, card, compiled) for mixes in (every, pairs))
        slower = [
            float(of_pairs[pair_peaks <= budget].min() / of_all[all_peaks <= budget].min() - 1)
            for budget in np.linspace(all_peaks.min(), all_peaks.max(), BUDGETS)
        ]
        row = {"layers": n_layers, "card": card, "compiled": compiled, "assignments": len(every)}
        found.append(row | {"worst": max(slower), "mean": float(np.mean(slower)), "all": slower})
    return found


def report(mixes: list[dict[str, Any]], slower: list[dict[str, Any]]) -> str:
    names = list(mixes[0]["over_none"])
    taken = [
        [str(row["btc"]), row["rule"], row["takes"], f"{row['flops_twice']:.1%}"]
        + [f"{row['over_none'][name] - 1:+.1%}" for name in names]
        for row in mixes
    ]
    lost = [
        [str(row["layers"]), clock_name(row["card"], row["compiled"]), f"{row['assignments']:,}"]
        + [f"{row[name]:.2%}" for name in ("worst", "mean")]
        for row in slower
    ]
    header = ["blocks", "clock", "assignments", "slower than the best, at most", "on average"]
    between = table(["BTC a block", "rule", "takes", "FLOPs twice", *names], taken)
    return f"{between}\n\n{table(header, lost)}"


@tool
def main(argv: list[str]) -> None:
    parser = study_parser("studies.mixes", __doc__)
    add_json(parser)
    args = parser.parse_args(argv)
    steps = {n: alike(n) for n in tqdm(LAYERS, desc="simulating", leave=False, disable=None)}
    mixes = between_rungs(steps[max(LAYERS)])
    slower = [row for n in LAYERS for row in gaps(steps[n])]
    print(report(mixes, slower))
    found = {"between_rungs": mixes, "gaps": slower}
    write_json(args.json, about("studies.mixes", argv) | found)


if __name__ == "__main__":
    sys.exit(main())
