"""Recorded steps of a small model, of each kind that there is: for tests of what shows them."""

from dataclasses import replace

import pytest
from cases.shapes import CONFIG, SETTINGS
from harness.planned import planner

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
    settings = dict(SETTINGS[setting])
    settings.pop("dropout", None)
    return planner(replace(CONFIG, n_layers=3), **settings).record(3, **WAYS[way])
