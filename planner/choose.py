"""Choose by prediction: the fastest way to recompute that fits."""

import math
from collections.abc import Sequence
from itertools import permutations

from memory import POLICIES, RECOMPUTE_POLICIES

from .formulas import recompute_cost
from .roofline import Card
from .step import Planner
from .timeline import StepMemory

UNIFORM_POLICIES = (*RECOMPUTE_POLICIES, "full/2")  # all blocks alike


def pick_recompute(
    planner: Planner, batch_size: int, budget: int, card: Card | None = None
) -> StepMemory:
    """The fastest way to recompute whose peak stays within `budget` bytes.

    It tries every policy in all blocks, and every pair: one policy in the first N blocks, another
    one in the rest, for every N. On a `card` the fastest takes the least seconds. Without one it
    does the fewest matrix products' FLOPs twice, then replays the least.
    Of equals it has the smallest peak. If nothing fits, the smallest peak of all is returned.
    Nested groups, which are slower than all of these, are tried where none of them fits.

    Only the rungs are simulated (mixes are put together of their segments).
    """
    none = planner.step(batch_size, recompute="none")
    if none.peak <= budget:
        return none
    ways = candidates(planner, batch_size, card)
    for way in ways:
        if way.peak <= budget:
            return way
    least = min(ways, key=lambda way: way.peak)
    for nested in nested_policies(planner.config.n_layers):
        least = min(least, planner.step(batch_size, recompute=nested), key=lambda way: way.peak)
        if least.peak <= budget:
            break
    return least


def nested_policies(n_layers: int) -> list[str]:
    """The nested groups whose inputs take the least, n_layers / K + K of them; the fastest first;
    none where `full` has no more."""
    sizes = {math.isqrt(n_layers), math.isqrt(n_layers - 1) + 1}
    few = sorted(K for K in sizes if K + math.ceil(n_layers / K) < n_layers)
    return [f"full/{K}+nested" for K in few]


def candidates(planner: Planner, batch_size: int, card: Card | None = None) -> list[StepMemory]:
    """Those of `pick_recompute`, the fastest first; of equals, the one with the smallest peak."""

    def cost(step: StepMemory) -> tuple:
        replayed = recompute_cost(step.config, step.seq_len)
        return (*((step.seconds(card),) if card else replayed), step.peak)

    names = policy_strings(planner.config.n_layers, uniform_steps(planner))
    steps = [planner.step(batch_size, recompute=name) for name in names]
    return sorted(steps, key=cost)


def pareto_frontier(ways: list[StepMemory]) -> list[StepMemory]:
    """Of any budget, what is taken: the first of these that fits. Without recompute, if that fits;
    and each that takes less than all that are faster."""
    found = [way for way in ways if way.config.recompute == "none"]
    for way in ways:
        if way.peak < found[-1].peak:
            found.append(way)
    return found


def uniform_steps(planner: Planner) -> list[str]:
    """RUNGS; under shards, which are gathered block by block, no group of blocks; without fused
    attention, nothing that keeps the result of its operator."""
    left_out = {"full/2"} if planner.shard_degree > 1 else set()
    if planner.device_type == "mps":
        left_out |= {name for name, policy in POLICIES.items() if policy.by_operator}
    return [rung for rung in UNIFORM_POLICIES if rung not in left_out]


def policy_strings(n_layers: int, rungs: Sequence[str] = UNIFORM_POLICIES) -> list[str]:
    """One rung for all blocks, or one for the first N and another one for the rest. (A group is for
    the first ones, and whole.)"""
    names = list(rungs)
    for first, rest in permutations(rungs, 2):
        policy, _, group = first.partition("/")
        if policy not in ("none", rest) and "/" not in rest:
            for n in range(int(group or 1), n_layers, int(group or 1)):
                names.append(f"{policy}:{n},{rest}" + f"/{group}" * bool(group))
    return names
