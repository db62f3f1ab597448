"""Record one step of each kind with a small model, for tests of the code that shows records."""

from dataclasses import replace
from functools import cache

import pytest
from cases.shapes import CONFIG, SETTINGS
from harness.planned import planner

from memory import POLICIES, offload
from planner import Planner
from planner.record import StepRecord

B = 3
WAYS = {
    **{policy: {"recompute": policy} for policy in ("none", *POLICIES, "full")},
    "plain": {"loss_chunks": 1},
    "groups": {"recompute": "full/2"},
    "mix": {"recompute": "mlp:1,cheap"},
    "offload": {"recompute": "full+offload"},
}
KINDS_OF_STEPS = [
    *((way, "cuda") for way in ("none", "full", "mix", "offload")),
    *[("full", "cpu"), ("mix", "accumulate"), ("offload", "ddp"), ("none", "shards")],
]
each_kind = pytest.mark.parametrize(("way", "setting"), KINDS_OF_STEPS)


def plan(setting: str, dropout: float = 0.0, **more) -> Planner:
    settings = SETTINGS[setting] | more
    settings.pop("dropout", None)
    return planner(replace(CONFIG, n_layers=3, dropout=dropout), **settings)


def record(way: str = "none", setting: str = "cuda", **more) -> StepRecord:
    return record_once(way, setting, offload.MIN_OFFLOAD_BYTES, **more)


@cache
def record_once(way: str, setting: str, small: int, **more) -> StepRecord:
    """Return the record of a step. `small`: the present value of MIN_OFFLOAD_BYTES, which the
    fixture `everything_travels` changes. `small` is only a part of the cache's key."""
    return plan(setting, **more).record(B, **WAYS[way])
