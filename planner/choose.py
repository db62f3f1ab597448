"""Choose by prediction: the cheapest way to recompute that fits, and what it is called."""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from model import RECOMPUTE_POLICIES, MiniGPTConfig

from .formulas import recompute_cost
from .step import Planner, StepMemory

RUNGS: list[dict[str, Any]] = [
    {"recompute": "none", "offload_activations": False},  # (there is nothing to offload)
    *({"recompute": policy} for policy in RECOMPUTE_POLICIES[1:]),
    {"recompute": "full", "recompute_group": 2},
]
# One policy for all blocks, as each of those has it, if the config that it changes is another one.
ALL_ALIKE = {"recompute_layers": None, "recompute_rest": "none", "recompute_group": 1}


def pick_recompute(planner: Planner, batch_size: int, budget: int) -> StepMemory:
    """The cheapest way to recompute whose peak stays within `budget` bytes.

    Cheapest: the fewest FLOPs of matrix products done twice, then the least of anything replayed. A
    policy stops after as many layers as are needed. If nothing fits, the smallest peak is returned.
    """
    config, n_layers = planner.config, planner.config.n_layers
    rungs = [ALL_ALIKE | rung for rung in RUNGS]
    rungs.sort(key=lambda rung: recompute_cost(replace(config, **rung), planner.seq_len))
    smallest = best = planner.step(batch_size, **rungs[0])  # none
    if best.peak <= budget:
        return best
    for rung in rungs[1:]:

        def first_layers(n: int, rung: dict[str, Any] = rung) -> dict[str, Any]:
            return {**rung, "recompute_layers": None if n == n_layers else n}

        def cost(n: int) -> tuple[float, int]:
            return recompute_cost(replace(config, **first_layers(n)), planner.seq_len)

        def peak(n: int) -> int:
            return planner.step(batch_size, **(first_layers(n) if n else rungs[0])).peak

        most = n_layers
        if best.peak <= budget:  # only what is cheaper is of interest now
            most = bisect_left(
                range(1, n_layers + 1), recompute_cost(best.config, planner.seq_len), key=cost
            )
        if most > 0 and peak(most) <= budget:
            best = planner.step(batch_size, **first_layers(fewest_layers(peak, most, budget)))
        elif most == n_layers:
            smallest = min(smallest, planner.step(batch_size, **rung), key=lambda step: step.peak)
    return best if best.peak <= budget else smallest


def fewest_layers(peak: Callable[[int], int], most: int, budget: int) -> int:
    """The first n in 1..most with peak(n) within the budget; n = 0 is over it, `most` is not.

    The peak falls with n, nearly along a line: so interpolate, and look on both sides.
    """
    low, high = 0, most
    while high - low > 1:
        share = (peak(low) - budget) / (peak(low) - peak(high))
        n = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
        low, high = (low, n) if peak(n) <= budget else (n, high)
    return high


def describe_recompute(config: MiniGPTConfig) -> str:
    """ "mlp in 7 of 12 blocks, cheap in the rest" """
    words = config.recompute
    if config.recompute_group > 1:
        words += f" in groups of {config.recompute_group}"
    if has_rest(config):
        words += f" in {config.n_recomputed} of {config.n_layers} blocks"
        if config.recompute_rest != "none":
            words += f", {config.recompute_rest} in the rest"
    return words + (", offloaded" if config.offload_activations else "")


def has_rest(config: MiniGPTConfig) -> bool:
    """Are there blocks that its policy does not apply to?"""
    return config.recompute != "none" and config.n_recomputed < config.n_layers


def recompute_flags(config: MiniGPTConfig) -> list[str]:
    """What to pass to a trainer to get the same."""
    flags = ["--use-activation-checkpoint", config.recompute]
    if has_rest(config):
        flags += ["--recompute-layers", str(config.n_recomputed)]
        if config.recompute_rest != "none":
            flags += ["--recompute-rest", config.recompute_rest]
    if config.recompute_group > 1:
        flags += ["--recompute-group", str(config.recompute_group)]
    return flags + ["--offload-activations"] * config.offload_activations
