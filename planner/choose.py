"""Choose by prediction: the fastest way to recompute that fits."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from memory import POLICIES, RECOMPUTE_POLICIES, expand, expanded, write
from model import MiniGPTConfig

from .clock import Card
from .formulas import recompute_cost
from .step import Planner
from .timeline import StepMemory, stretches

RUNGS = (*RECOMPUTE_POLICIES, "full/2")  # all blocks alike


def pick_recompute(
    planner: Planner,
    batch_size: int,
    budget: int,
    card: Card | None = None,
    offload: bool = False,
) -> StepMemory:
    """The fastest way to recompute whose peak stays within `budget` bytes.

    It tries every policy in all blocks, and every pair: one policy in the first N blocks, another
    one in the rest, for every N. On a `card` the fastest takes the least seconds. Without one it
    does the fewest matrix products' FLOPs twice, then replays the least.
    Of equals it has the smallest peak. If nothing fits, the smallest peak of all is returned.
    `offload`: whatever is taken, what it keeps waits in CPU memory. Nested groups, which are slower
    than all of these, are tried where none of them fits.

    Only the rungs are simulated (the rest follows: `peaks_of`), and what is taken.
    """
    none = planner.step(batch_size, recompute="none")
    if none.peak <= budget:
        return none
    ways = all_ways(all_alike(planner, batch_size, offload), card)
    for way in ways:
        if way.peak <= budget:
            step = planner.step(batch_size, recompute=way.config.recompute)
            if step.peak <= budget:  # (what is offloaded may take more than was thought)
                return step
    least = min(ways, key=lambda way: way.peak)
    smallest = planner.step(batch_size, recompute=least.config.recompute)
    for nested in [] if offload else nested_groups(planner.config.n_layers):
        step = planner.step(batch_size, recompute=nested)
        smallest = min(smallest, step, key=lambda its: its.peak)
        if smallest.peak <= budget:
            break
    return smallest


def nested_groups(n_layers: int) -> list[str]:
    """The nested groups whose inputs take the least, n_layers / K + K of them; the fastest first;
    none where `full` has no more."""
    sizes = {math.isqrt(n_layers), math.isqrt(n_layers - 1) + 1}
    few = sorted(K for K in sizes if K + math.ceil(n_layers / K) < n_layers)
    return [f"full/{K}+nested" for K in few]


class Way(NamedTuple):
    """A way to recompute: what it takes in bytes, and more time or FLOPs than another."""

    cost: tuple[float, float]
    peak: int
    config: MiniGPTConfig


def all_ways(alike: list[StepMemory], card: Card | None = None) -> list[Way]:
    """Those of `pick_recompute`, the fastest first, and of equals the one with the smallest peak.

    `alike`: a step of each rung, all blocks alike. No other is simulated.
    """
    mixes = all_mixes(alike[0].config.n_layers, [step.config.recompute for step in alike])
    configs = [config_of(alike, mix) for mix in mixes]
    if card is None:
        costs = [recompute_cost(config, alike[0].seq_len) for config in configs]
    else:
        costs = [(cost, 0) for cost in mean_seconds(alike, mixes, card).tolist()]
    found = map(Way, costs, peaks_of(alike, mixes).tolist(), configs)
    return sorted(found, key=lambda way: (way.cost, way.peak))


def frontier(ways: list[Way]) -> list[Way]:
    """Of any budget, what is taken: the first of these that fits. Without recompute, if that fits;
    and each that takes less than all that are faster."""
    found = [way for way in ways if way.config.recompute == "none"]
    for way in ways:
        if way.peak < found[-1].peak:
            found.append(way)
    return found


def all_alike(planner: Planner, batch_size: int, offload: bool = False) -> list[StepMemory]:
    """A step of each rung that this planner knows, in all blocks."""
    more = "+offload" * offload
    return [
        planner.step(batch_size, recompute=rung + more * (rung != "none"))
        for rung in rungs(planner)
    ]


def rungs(planner: Planner) -> list[str]:
    """RUNGS; under shards, which are gathered block by block, no group of blocks; without fused
    attention, nothing that keeps the result of its operator."""
    left_out = {"full/2"} if planner.shards > 1 else set()
    if planner.device_type == "mps":
        left_out |= {name for name, policy in POLICIES.items() if policy.by_operator}
    return [rung for rung in RUNGS if rung not in left_out]


def all_mixes(n_layers: int, rungs: Sequence[str] = RUNGS) -> np.ndarray:
    """(mixes, n_layers): the rung of each block, its place in `rungs`. One for all, or one for the
    first N and another one for the rest. (A group is for the first ones, and whole.)"""
    block, mixes = np.arange(n_layers), []
    groups = [expand(rung, n_layers).group for rung in rungs]
    for first, (rung, group) in enumerate(zip(rungs, groups, strict=True)):
        mixes.append(np.full(n_layers, first))
        if rung != "none":
            for rest in range(len(rungs)):
                if rest != first and groups[rest] == 1:
                    mixes += [
                        np.where(block < n, first, rest) for n in range(group, n_layers, group)
                    ]
    return np.array(mixes)


def config_of(alike: list[StepMemory], mix: np.ndarray) -> MiniGPTConfig:
    """`alike`: a step of each rung, all blocks alike."""
    of_each = [expanded(alike[rung].config) for rung in mix]
    policies = tuple(rung.policies[0] for rung in of_each)
    return replace(alike[mix[0]].config, recompute=write(of_each[0]._replace(policies=policies)))


def mean_seconds(alike: list[StepMemory], mixes: np.ndarray, card: Card) -> np.ndarray:
    """(mixes,) A block takes as long as among blocks like it, and the rest of the step is the same
    in all."""
    each = np.array([step.seconds(card) for step in alike])
    return each[mixes].mean(axis=1)


def peaks_of(alike: list[StepMemory], mixes: np.ndarray) -> np.ndarray:
    """(mixes,) The peak in bytes of any assignment of rungs to blocks, without simulating it.

    A step goes through its segments one after the other: what comes before the blocks, each block,
    the head, each block in backward, the optimizer. Each adds to the bytes, or frees some (`net`),
    and on the way it has needed some more (`most`). That does not depend on what the other blocks
    do; so each segment is taken from the step in which all blocks are of that kind.

    Not so with offload, whose copies of a block wait for another: there it is an estimate, and
    something better may be passed over. (What is taken is simulated, and never over the budget.)
    """
    most, net = np.array([segments(step) for step in alike]).transpose(2, 0, 1)  # (rungs, segments)
    first, last = mixes[:, :1], mixes[:, -1:]
    rung = np.hstack([first, mixes, last, mixes[:, ::-1], first])  # (mixes, segments)
    segment = np.arange(rung.shape[1])
    added = net[rung, segment]
    # What a block returns is there until the next block ends, or longer if its policy keeps it: by
    # so much a first block, before which there is none, adds more than a second one.
    names = [expanded(step.config).policies[0] for step in alike]
    left = (net[:, 1] - net[:, 2])[[names.index(name) for name in names]]
    added[:, 2 : 1 + mixes.shape[1]] += np.diff(left[mixes], axis=1)
    end = added.cumsum(axis=1)
    return (end - added + most[rung, segment]).max(axis=1)


def segments(step: StepMemory) -> np.ndarray:
    """(2 L + 3, 2) int64: the most bytes in each segment of a step of L blocks above those when it
    began, and what it has added when it ends."""
    of_blocks = [stretch for stretch in stretches(step) if stretch[1] is not None]
    forward = [part for part in of_blocks if part[0] == "forward"]
    backward = of_blocks[len(forward) :]
    # (The replay of a group enters its blocks, too.)
    ends = {block: end for _, block, _, end in backward}
    # The last row of each segment but one. What dies with a block's last operator is still there
    # when the next one's first operator runs, which is a LayerNorm in all of them.
    last = [forward[0][2][0], *(end for _, _, _, end in forward)]
    last += [backward[0][2][0] - 1, *(end - 1 for end in sorted(ends.values()))]
    begin = [0, *(row + 1 for row in last)]
    level = step.total[[*last, -1]]
    before = np.concatenate([[0], level[:-1]])
    return np.stack([np.maximum.reduceat(step.total, begin) - before, level - before], axis=1)
