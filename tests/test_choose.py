"""What is chosen is the best there is: against trying all, and against real steps."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from cases.shapes import CONFIG, WIDE, T
from harness.planned import CARD, measured_peak, planner
from test_readme import DOCS

from memory import expanded
from memory.policies import RECOMPUTE_POLICIES, expand
from model import MiniGPTConfig
from planner import CARDS, Planner
from planner.choose import (
    RUNGS,
    all_alike,
    all_mixes,
    all_ways,
    config_of,
    mean_seconds,
    nested_groups,
    peaks_of,
    pick_recompute,
    rungs,
    segments,
)
from planner.formulas import recompute_cost

pytestmark = pytest.mark.usefixtures("everything_travels")


def test_auto_takes_the_cheapest_that_fits():
    """Never over, by an independent tracker, and never costlier than the best of all pairs of
    policies at all layer counts."""
    config, batch_size = replace(WIDE, n_layers=3), 24
    plan = planner(config)
    steps = all_alike(plan, batch_size)
    mixes = all_mixes(config.n_layers)
    peaks = peaks_of(steps, mixes)
    costs = [recompute_cost(config_of(steps, mix), T) for mix in mixes]
    for budget in np.linspace(min(peaks), max(peaks), 4).astype(int).tolist():
        taken = pick_recompute(plan, batch_size, budget)
        assert measured_peak(taken.config, batch_size) <= budget
        best = min(cost for cost, peak in zip(costs, peaks, strict=True) if peak <= budget)
        assert recompute_cost(taken.config, T) == best
    assert pick_recompute(plan, batch_size, max(peaks)).config.recompute == "none"
    nothing = pick_recompute(plan, batch_size, min(peaks) - 1)
    assert nothing.peak == min(peaks)


def test_auto_nests_groups_where_nothing_else_fits():
    """The faster of two sizes if both do; never over, by an independent tracker."""
    config, batch_size = replace(WIDE, n_layers=11), 24
    plan = planner(config)
    least = min(way.peak for way in all_ways(all_alike(plan, batch_size)))
    faster, slower = (plan.step(batch_size, recompute=way) for way in nested_groups(11))
    assert faster.peak < least and slower.peak < least
    assert faster.seconds(CARD) < slower.seconds(CARD)
    assert "nested" not in pick_recompute(plan, batch_size, least).config.recompute
    for budget in (least - 1, faster.peak):
        taken = pick_recompute(plan, batch_size, budget)
        assert taken.config == faster.config
        assert measured_peak(taken.config, batch_size) <= budget
    nothing = pick_recompute(plan, batch_size, min(faster.peak, slower.peak) - 1)
    assert nothing.peak == min(faster.peak, slower.peak)


def test_nested_groups_are_those_with_the_fewest_inputs():
    """Of all sizes; and none where each block's input is as few."""
    for n_layers in range(1, 200):
        inputs = {K: K + math.ceil(n_layers / K) for K in range(1, n_layers + 1)}
        sizes = [expand(way, n_layers).group for way in nested_groups(n_layers)]
        assert sizes == sorted(sizes) and bool(sizes) == (min(inputs.values()) < n_layers)
        assert all(inputs[K] == min(inputs.values()) for K in sizes)


def test_what_keeps_attentions_result_is_not_offered_where_there_is_none():
    """On MPS `sdpa` keeps what `full` does, and `selective` the scores."""
    plan = planner(WIDE, device_type="mps")
    none, full, sdpa = (plan.step(24, recompute=policy) for policy in ("none", "full", "sdpa"))
    assert full.kept == sdpa.kept
    offered = set(rungs(plan))
    assert {*RUNGS} - offered == {"sdpa", "selective"}
    for budget in np.linspace(full.peak, none.peak, 5).astype(int).tolist():
        taken = pick_recompute(plan, 24, budget)
        assert taken.peak <= budget
        assert set(expanded(taken.config).policies) <= offered


def test_all_mixes_are_all():
    """By names, as a person would write them down."""
    found = {tuple(mix) for mix in all_mixes(4)}
    assert len(found) == len(all_mixes(4))
    names = [*RECOMPUTE_POLICIES, "full/2"]
    wanted = {(name,) * 4 for name in names}
    for first, rest, n in itertools.product(names[1:], names[:-1], range(1, 4)):
        if first != rest and (n == 2 or "/" not in first):
            wanted.add((first,) * n + (rest,) * (4 - n))
    assert {tuple(names[i] for i in mix) for mix in found} == wanted


@pytest.mark.parametrize(
    "settings",
    [
        {"device_type": "cuda", "precision": "bf16"},
        {"device_type": "cuda", "precision": "bf16", "shards": 2},
        {"accumulate": True},
    ],
    ids=str,
)
def test_peak_and_seconds_of_a_mix_are_known_without_its_simulation(settings):
    """Its bytes to the byte, beside `selective` as well, which keeps what a block returns."""
    plan = planner(replace(CONFIG, n_layers=5, dropout=0.1), **settings)
    steps, mixes = all_alike(plan, 8), all_mixes(5)
    mixes = mixes[(mixes < len(steps)).all(axis=1)][::41]  # (of shards no group)
    known = peaks_of(steps, mixes), mean_seconds(steps, mixes, CARD)
    for mix, peak, seconds in zip(mixes, *known, strict=True):
        step = plan.simulate(8, config_of(steps, mix))
        assert (step.peak, step.seconds(CARD)) == (peak, pytest.approx(seconds, rel=0.01)), step
    if plan.shards == 1:  # one segment after the other, though a group's replay enters blocks anew
        most, added = segments(plan.step(8, recompute="full/3")).T
        assert (most >= added).all()


@pytest.mark.slow
def test_the_best_pair_is_hardly_slower_than_the_best_of_all_assignments():
    """docs/evidence.md says by how much: of 4 of GPT-2 small's blocks, at 20 budgets."""
    config = MiniGPTConfig(n_layers=4, dropout=0.0)
    steps = all_alike(planner(config, "bf16", device_type="cuda", seq_len=1024), 12)
    every = np.array(list(itertools.product(range(len(RECOMPUTE_POLICIES)), repeat=4)))
    pairs, worst = all_mixes(4), 0.0
    of_every, of_pairs = peaks_of(steps, every), peaks_of(steps, pairs)
    for card in (CARDS["H100"], CARDS["RTX 4090"]):
        all_seconds, seconds = (mean_seconds(steps, mixes, card) for mixes in (every, pairs))
        for budget in np.linspace(of_every.min(), of_every.max(), 20):
            best, pair = all_seconds[of_every <= budget].min(), seconds[of_pairs <= budget].min()
            worst = max(worst, pair / best - 1)
    assert f"at most {100 * worst:.1f} % slower" in " ".join(DOCS["evidence.md"].split())


def test_what_is_taken_has_been_simulated(monkeypatch):
    """Whatever was thought of its peak: it is never over the budget."""
    plan = planner(CONFIG)
    steps = all_alike(plan, 16)
    budget = (steps[0].peak + steps[-2].peak) // 2  # none and full
    fits = pick_recompute(plan, 16, budget, CARD).peak
    monkeypatch.setattr("planner.choose.peaks_of", lambda *a: peaks_of(*a) * 9 // 10)
    assert 0.8 * budget < fits <= budget
    assert pick_recompute(plan, 16, budget, CARD).peak <= budget


def test_few_steps_are_simulated(monkeypatch):
    """One if it fits as it is; else the rungs, and what is taken."""
    simulated, simulate = [], Planner.simulate

    def note(*args):
        simulated.append(args[1:])
        return simulate(*args)

    monkeypatch.setattr(Planner, "simulate", note)
    plan = planner(replace(CONFIG, n_layers=6))
    most = pick_recompute(plan, 16, 2**40, CARD).peak
    assert len(simulated) == 1
    pick_recompute(plan, 16, int(0.8 * most), CARD)
    assert len(simulated) <= len(RUNGS) + 1
