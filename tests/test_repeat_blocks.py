"""Simulating three blocks of a run of equal ones tells the same as simulating all."""

from dataclasses import replace

import numpy as np
import pytest
from test_choose import CARD
from test_memory import CONFIG, planner

from planner import Planner
from planner.step import few_of

MIXES = [
    {"recompute": "none"},
    {"recompute": "cheap"},
    {"recompute": "sdpa"},
    {"recompute": "full"},
    {"recompute": "full", "recompute_layers": 3},
    {"recompute": "full", "recompute_layers": 5, "recompute_rest": "selective"},
    {"recompute": "selective", "recompute_layers": 5, "recompute_rest": "mlp"},
    {"recompute": "attn", "recompute_layers": 1, "recompute_rest": "cheap"},
]
SETTINGS = {
    "cuda": {"device_type": "cuda", "precision": "bf16"},
    "cpu": {"dropout": 0.1},
    "accumulate": {"device_type": "cuda", "precision": "bf16", "accumulate": True, "dropout": 0.1},
    "ddp": {"ddp": True, "compress": True, "device_type": "cuda"},
}


@pytest.mark.parametrize(
    ("setting", "mix"),
    [
        pytest.param(setting, mix, id="-".join([setting, *map(str, mix.values())]))
        for i, setting in enumerate(SETTINGS)
        for mix in (MIXES[i::3] if i else MIXES)  # all of them on a GPU, each once more elsewhere
    ],
)
def test_few_blocks_tell_what_all_do(setting, mix):
    """To the byte, operator by operator; and the seconds, where no cache outlasts the blocks."""
    settings = dict(SETTINGS[setting])
    config = replace(CONFIG, n_layers=9, dropout=settings.pop("dropout", 0.0))
    plan = planner(config, **settings)
    every, few = plan.simulate(8, replace(config, **mix)), plan.step(8, **mix)
    assert few.config == every.config
    np.testing.assert_array_equal(few.timeline, every.timeline)
    assert few.places == every.places
    assert few.kept == every.kept
    assert few.kept_per_block == pytest.approx(every.kept_per_block, rel=1e-12)
    for compiled in (False, True):
        assert few.seconds(CARD, compiled) == pytest.approx(every.seconds(CARD, compiled), rel=2e-3)


def test_few_are_simulated(monkeypatch):
    layers = []
    simulate = Planner.simulate

    def note(self, batch_size, config):
        layers.append(config.n_layers)
        return simulate(self, batch_size, config)

    monkeypatch.setattr(Planner, "simulate", note)
    plan = planner(replace(CONFIG, n_layers=24))
    plan.step(2)
    plan.step(2, recompute="mlp", recompute_layers=7, recompute_rest="cheap")
    plan.step(2, recompute="mlp", recompute_layers=22, recompute_rest="cheap")
    assert layers == [3, 6, 5]
    # Their copies and their replays go over more than one block.
    plan.step(2, recompute="full", recompute_group=2)
    plan.step(2, recompute="full", offload_activations=True)
    assert layers[3:] == [24, 24]
    assert len(plan.model.blocks) == 24


@pytest.mark.parametrize("n", range(9))
def test_few_of(n):
    assert sum(few_of(n)) == n and len(few_of(n)) == min(n, 3)
