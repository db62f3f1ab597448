"""The models whose steps are planned and measured, in these processes and under torchrun; and what
is planned for. Tests that ask about the same step share its simulation: see harness/planned.py."""

from dataclasses import replace

import torch
from hypothesis import strategies as some

from memory import POLICY_NAMES
from model import MiniGPTConfig
from planner import Layout

T = 32
CONFIG = MiniGPTConfig(
    vocab_size=997,  # an odd number of rows
    max_position_embeddings=T,
    n_layers=4,
    n_heads=2,
    d_model=32,
    d_ff=128,
    dropout=0.0,
    loss_chunks=4,
)
WIDE = replace(CONFIG, vocab_size=61, d_model=64, d_ff=192)
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}

MEMORY = [
    *({"recompute": policy} for policy in POLICY_NAMES),
    {"recompute": "mlp:2"},
    {"recompute": "full/2"},
    {"recompute": "full:3/2+nested"},
    {"recompute": "full:3/2"},
    {"recompute": "full+offload"},
    {"recompute": "none", "loss_chunks": 1},
]


def mix(first: str, n: int, rest: str, **changes) -> dict:
    """`first` in n blocks, `rest` in those after them."""
    return {"recompute": f"{first}:{n},{rest}", **changes}


GROUPS = ["", "/2", "/3", "/2+nested", "/3+nested"]


def ways(n_layers: int, first: str = "", ends: tuple[str, ...] = ("", "+offload")):
    """Policy strings for that many blocks; those that begin with `first`, or any."""

    def spell(first: str, n: str, group: str, end: str) -> str:
        return first + n + group * (first == "full") + end

    rest = some.sampled_from(["", *(f",{policy}" for policy in POLICY_NAMES)])
    n = some.just("") | some.builds(":{}{}".format, some.integers(1, n_layers), rest)
    firsts = some.just(first) if first else some.sampled_from(POLICY_NAMES[1:])
    return some.builds(spell, firsts, n, some.sampled_from(GROUPS), some.sampled_from(ends))


MIXES = [
    mix("mlp", 2, "cheap"),
    mix("full", 1, "sdpa"),
    mix("cheap", 3, "full"),
    mix("full", 3, "attn/2"),
    mix("full", 3, "selective"),
    mix("full", 2, "cheap+offload"),
]
# What a planner is told of the run, beside the model (`dropout` is the model's)
SETTINGS = {
    "cuda": {"device_type": "cuda", "precision": "bf16"},
    "cpu": {"dropout": 0.1},
    "accumulate": {
        "device_type": "cuda",
        "precision": "bf16",
        "accumulates_gradients": True,
        "dropout": 0.1,
    },
    "ddp": {"layout": Layout("ddp"), "gradient_copies": torch.bfloat16, "device_type": "cuda"},
    "shards": {"layout": Layout("fsdp", world_size=2), "precision": "bf16"},
    "rounded shards": {
        "layout": Layout("fsdp", world_size=2),
        "precision": "bf16",
        "gather_in_bfloat16": True,
    },
}
