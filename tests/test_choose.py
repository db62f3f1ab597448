"""What is chosen is the best there is: against trying all."""

import math
from dataclasses import replace

import numpy as np
import pytest
from cases.shapes import WIDE
from harness.planned import CARD, planner

from memory import recompute_plan_of_config
from memory.policies import POLICY_NAMES, parse_recompute_plan
from planner.choose import (
    UNIFORM_POLICIES,
    enumerate_policy_strings,
    nested_checkpoint_policies,
    pick_fastest_fitting_step,
    recomputed_flops_key,
    simulate_policies_fastest_first,
    uniform_policies,
)

pytestmark = pytest.mark.usefixtures("everything_travels")


def test_auto_takes_the_cheapest_that_fits():
    """Never over, and never costlier than the best of all pairs of policies at all layer counts."""
    config, batch_size = replace(WIDE, n_layers=3), 24
    plan = planner(config)
    ways = simulate_policies_fastest_first(plan, batch_size)
    peaks = [way.peak for way in ways]
    costs = [recomputed_flops_key(way) for way in ways]
    for budget in np.linspace(min(peaks), max(peaks), 4).astype(int).tolist():
        taken = pick_fastest_fitting_step(plan, batch_size, budget)
        assert taken.peak <= budget
        best = min(cost for cost, peak in zip(costs, peaks, strict=True) if peak <= budget)
        assert recomputed_flops_key(taken) == best
    assert pick_fastest_fitting_step(plan, batch_size, max(peaks)).config.recompute == "none"
    nothing = pick_fastest_fitting_step(plan, batch_size, min(peaks) - 1)
    assert nothing.peak == min(peaks)


def test_auto_nests_groups_where_nothing_else_fits():
    """The faster of two sizes if both do."""
    config, batch_size = replace(WIDE, n_layers=11), 24
    plan = planner(config)
    least = min(way.peak for way in simulate_policies_fastest_first(plan, batch_size))
    faster, slower = (
        plan.step(batch_size, recompute=way) for way in nested_checkpoint_policies(11)
    )
    assert faster.peak < least and slower.peak < least
    assert faster.seconds(CARD) < slower.seconds(CARD)
    assert "nested" not in pick_fastest_fitting_step(plan, batch_size, least).config.recompute
    taken = pick_fastest_fitting_step(plan, batch_size, faster.peak)
    assert taken.config == faster.config
    nothing = pick_fastest_fitting_step(plan, batch_size, min(faster.peak, slower.peak) - 1)
    assert nothing.peak == min(faster.peak, slower.peak)


def test_nested_groups_are_those_with_the_fewest_inputs():
    """Of all sizes; and none where each block's input is as few."""
    for n_layers in range(1, 200):
        inputs = {K: K + math.ceil(n_layers / K) for K in range(1, n_layers + 1)}
        sizes = [
            parse_recompute_plan(way, n_layers).group_size
            for way in nested_checkpoint_policies(n_layers)
        ]
        assert sizes == sorted(sizes) and bool(sizes) == (min(inputs.values()) < n_layers)
        assert all(inputs[K] == min(inputs.values()) for K in sizes)


def test_what_keeps_attentions_result_is_not_offered_where_there_is_none():
    """On MPS `sdpa` keeps what `full` does, and `selective` the scores."""
    plan = planner(WIDE, device_type="mps")
    assert plan.step(24, recompute="full").kept == plan.step(24, recompute="sdpa").kept
    assert {*UNIFORM_POLICIES} - {*uniform_policies(plan)} == {"sdpa", "selective"}
    names = {
        name
        for way in simulate_policies_fastest_first(plan, 24)
        for name in recompute_plan_of_config(way.config).policies
    }
    assert not names & {"sdpa", "selective"}


def test_all_names_are_all():
    """By what they say of each block."""
    n, found = (
        len(POLICY_NAMES),
        [parse_recompute_plan(name, 4)[:2] for name in enumerate_policy_strings(4)],
    )
    one_or_two, in_groups = n + 3 * (n - 1) ** 2, n
    assert len(found) == len(set(found)) == one_or_two + in_groups
