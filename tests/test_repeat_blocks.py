"""Short cuts tell what the long way does: of blocks, or chunks of the head, that do the same, three
are simulated."""

from dataclasses import replace

import numpy as np
import pytest
from cases.shapes import CONFIG, SETTINGS, mix
from harness.planned import CARD, planner

from planner import CARDS, Planner
from planner.step import few_of


@pytest.mark.parametrize(
    ("setting", "memory"),
    [
        ("cuda", {"recompute": "none"}),
        ("cpu", {"recompute": "sdpa"}),
        ("accumulate", {"recompute": "full"}),
        ("ddp", {"recompute": "cheap"}),
        ("cuda", {"recompute": "full", "recompute_layers": 3}),
        ("cpu", mix("full", 5, "selective")),
        ("cuda", mix("selective", 5, "mlp")),
        ("ddp", mix("attn", 1, "cheap")),
        ("shards", mix("mlp", 4, "cheap")),
    ],
    ids=str,
)
def test_few_blocks_tell_what_all_do(setting, memory):
    """To the byte, operator by operator; and the seconds, where no cache outlasts the blocks."""
    settings = dict(SETTINGS[setting])
    config = replace(CONFIG, n_layers=9, dropout=settings.pop("dropout", 0.0))
    plan = planner(config, **settings)
    every, few = plan.simulate(8, replace(config, **memory), few=False), plan.step(8, **memory)
    assert few.config == every.config
    np.testing.assert_array_equal(few.timeline, every.timeline)
    assert few.places == every.places
    assert few.kept == every.kept
    assert few.kept_per_block == pytest.approx(every.kept_per_block, rel=1e-12)
    for compiled in (False, True):
        assert few.seconds(CARD, compiled) == pytest.approx(every.seconds(CARD, compiled), rel=2e-3)


def test_few_are_simulated(monkeypatch):
    layers = []
    log_step = Planner.log_step

    def note(self, batch_size, config):
        layers.append(config.n_layers)
        return log_step(self, batch_size, config)

    monkeypatch.setattr(Planner, "log_step", note)
    plan = planner(replace(CONFIG, n_layers=24))
    plan.step(2)
    plan.step(2, **mix("mlp", 7, "cheap"))
    plan.step(2, **mix("mlp", 22, "cheap"))
    assert layers == [3, 6, 5]
    # Their copies and their replays go over more than one block.
    plan.step(2, recompute="full", recompute_group=2)
    plan.step(2, recompute="full", offload_activations=True)
    assert layers[3:] == [24, 24]
    assert len(plan.model.blocks) == 24


def test_few_of():
    for n in range(9):
        assert sum(few_of(n)) == n and len(few_of(n)) == min(n, 3)


@pytest.mark.parametrize(
    ("chunks", "precision", "memory"),
    [
        (2, "fp32", {}),
        (3, "bf16", {}),
        (5, "fp32", {}),
        (31, "bf16", {}),
        (23, "bf16", {"recompute": "full", "offload_activations": True}),
    ],
)
def test_of_many_chunks_a_few_tell(memory, chunks, precision, monkeypatch, everything_travels):
    """Operator by operator, to the byte; also where the last one is smaller."""
    config = replace(CONFIG, n_layers=2, loss_chunks=chunks)  # (all blocks are simulated)
    few = planner(config, precision, device_type="cuda").step(3, **memory)
    monkeypatch.setattr("planner.step.few_of", lambda n: [1] * n)
    every = planner(config, precision, device_type="cuda").step(3, **memory)
    np.testing.assert_array_equal(few.timeline, every.timeline)
    assert (few.places, few.kept, few.config) == (every.places, every.kept, every.config)
    for left, right in ((few.work, every.work), (few.compiled_work, every.compiled_work)):
        assert (len(left.flops) < len(right.flops)) == (chunks > 3)
        assert left.times.sum() == right.times.sum()
        assert left.times @ left.flops == right.times @ right.flops
        # (The cast of a chunk is fused with the end of the one before, and the last is smaller.)
        moved = right.times @ right.moved()
        assert left.times @ left.moved() == pytest.approx(moved, rel=5e-3)
    for card in (CARDS["H100"], CARDS["RTX 4090"]):
        for compiled in (False, True):
            seconds = every.seconds(card, compiled)
            assert few.seconds(card, compiled) == pytest.approx(seconds, rel=1e-3)


def test_a_giant_batch_is_simulated_with_few_operators():
    giant, small = (planner(replace(CONFIG, loss_chunks=0)).step(n) for n in (10**6, 10**4))
    assert max(len(giant.work.flops), len(small.work.flops)) < 1000
    assert max(len(giant.timeline), len(small.timeline)) < 10_000
    assert giant.peak == pytest.approx(100 * small.peak, rel=0.1)
