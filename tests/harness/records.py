"""Recorded steps of a small model, of each kind that there is: for tests of what shows them."""

from dataclasses import replace
from functools import cache

import pytest
from cases.shapes import CONFIG, SETTINGS
from harness.planned import planner

from memory import offload
from planner.record import Record

WAYS = {
    "none": {},
    "full": {"recompute": "full"},
    "mix": {"recompute": "mlp", "recompute_layers": 1, "recompute_rest": "cheap"},
    "offload": {"recompute": "full", "offload_activations": True},
}
each_kind = pytest.mark.parametrize(
    ("way", "setting"),
    [
        *((way, "cuda") for way in WAYS),
        *[("full", "cpu"), ("mix", "accumulate"), ("offload", "ddp"), ("none", "shards")],
    ],
)


def record(way: str = "none", setting: str = "cuda") -> Record:
    return record_once(way, setting, offload.SMALL)


@cache
def record_once(way: str, setting: str, small: int) -> Record:
    """`small`: see everything_travels."""
    settings = dict(SETTINGS[setting])
    settings.pop("dropout", None)
    return planner(replace(CONFIG, n_layers=3), **settings).record(3, **WAYS[way])
