"""Choose the fastest recompute policy that fits in memory, by predictions of the planner."""

import math
from collections.abc import Sequence
from itertools import chain, permutations

from memory import POLICIES, POLICY_NAMES, recompute_plan_of_config

from .roofline import Card
from .step import Planner
from .timeline import StepMemory

UNIFORM_POLICIES = (*POLICY_NAMES, "full/2")  # one policy for all blocks


def pick_fastest_fitting_step(
    planner: Planner, batch_size: int, budget: int, card: Card | None = None
) -> StepMemory:
    """Return the fastest step whose peak is at most `budget` bytes, over all recompute policies.

    The candidates are every policy in all blocks, and every pair of policies: one in the first N
    blocks and another in the rest, for every N. With a `card` the fastest step is the one with the
    fewest predicted seconds, and without a card the one with the lowest `recomputed_flops_key`,
    which compares first the recomputed FLOPs of matrix products. Of equally fast steps, the one
    with the smallest peak is returned.

    If no candidate fits, nested groups (`full/K+nested`) are tried, which are slower than all
    candidates, and if they do not fit either, the step with the smallest peak of all is returned.

    Only steps with one policy for all blocks are simulated; steps with a pair of policies are
    composed of segments of the simulated steps.
    """
    none = planner.step(batch_size, recompute="none")
    if none.peak <= budget:
        return none
    nested = nested_checkpoint_policies(planner.config.n_layers)
    too_large = []
    for step in chain(
        simulate_policies_fastest_first(planner, batch_size, card),
        (planner.step(batch_size, recompute=policy) for policy in nested),
    ):
        if step.peak <= budget:
            return step
        too_large.append(step)
    return min(too_large, key=lambda step: step.peak)


def nested_checkpoint_policies(n_layers: int) -> list[str]:
    """Return the strings `full/K+nested` that keep the fewest block inputs, the fastest first.

    Groups of K blocks keep n_layers / K + K block inputs at a time, where `full` keeps n_layers.
    The result is empty if no K keeps fewer block inputs than `full`.
    """
    sizes = {math.isqrt(n_layers), math.isqrt(n_layers - 1) + 1}
    group_sizes = sorted(K for K in sizes if K + math.ceil(n_layers / K) < n_layers)
    return [f"full/{K}+nested" for K in group_sizes]


def simulate_policies_fastest_first(
    planner: Planner, batch_size: int, card: Card | None = None
) -> list[StepMemory]:
    """Return the candidates of `pick_fastest_fitting_step`, the fastest first, and of equally fast
    ones the one with the smallest peak first."""

    def cost(step: StepMemory) -> tuple:
        return (*((step.seconds(card),) if card else recomputed_flops_key(step)), step.peak)

    names = enumerate_policy_strings(planner.config.n_layers, uniform_policies(planner))
    steps = [planner.step(batch_size, recompute=name) for name in names]
    return sorted(steps, key=cost)


def recomputed_flops_key(step: StepMemory) -> tuple[float, int]:
    """Return a key that sorts policies by cost: (recomputed FLOPs per token, a tie-breaker). The
    tie-breaker is the sum, over all blocks, of the index of the block's policy in POLICY_NAMES."""
    policies = recompute_plan_of_config(step.config).policies
    flops_per_token = step.needed_and_replayed_flops[1] / (step.batch_size * step.seq_len)
    return flops_per_token, sum(map(POLICY_NAMES.index, policies))


def pareto_frontier(steps: list[StepMemory]) -> list[StepMemory]:
    """Return each step that `pick_fastest_fitting_step` returns for some budget.

    `steps`: the result of `simulate_policies_fastest_first`. The returned list begins with the step
    that recomputes nothing, and each further step has a smaller peak than all faster steps.
    """
    frontier = [step for step in steps if step.config.recompute == "none"]
    for step in steps:
        if step.peak < frontier[-1].peak:
            frontier.append(step)
    return frontier


def uniform_policies(planner: Planner) -> list[str]:
    """Return the policies of UNIFORM_POLICIES that suit the planner's device and sharding.

    With sharded weights, policies with groups of blocks are left out, because weights are gathered
    block by block. On "mps", policies that keep the fused attention operator's result are left out,
    because attention is not fused there.
    """
    left_out = {"full/2"} if planner.layout.shard_degree > 1 else set()
    if planner.device_type == "mps":
        left_out |= {name for name, policy in POLICIES.items() if policy.needs_fused_attention}
    return [policy for policy in UNIFORM_POLICIES if policy not in left_out]


def enumerate_policy_strings(
    n_layers: int, policies: Sequence[str] = UNIFORM_POLICIES
) -> list[str]:
    """Return a policy string for each policy in all blocks, and for each pair of policies.

    A pair has one policy, never `none`, in the first N blocks and another in the rest. Only the
    first policy may have groups of blocks, and N is then a multiple of the group size.
    """
    names = list(policies)
    for first, rest in permutations(policies, 2):
        policy, _, group = first.partition("/")
        if policy not in ("none", rest) and "/" not in rest:
            for n in range(int(group or 1), n_layers, int(group or 1)):
                names.append(f"{policy}:{n},{rest}" + f"/{group}" * bool(group))
    return names
