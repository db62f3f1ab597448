"""The planner is right: about real steps, about formulas, and about what fits."""

import gc
from dataclasses import replace

import pytest
import torch
from test_model import random_ids
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from memory import Planner
from model import RECOMPUTE_POLICIES, MiniGPT, MiniGPTConfig

T = 32
CONFIG = MiniGPTConfig(
    vocab_size=997,
    max_position_embeddings=T,
    n_layers=4,
    n_heads=2,
    d_model=32,
    d_ff=128,
    dropout=0.0,
    loss_chunks=4,
)
WIDE = replace(CONFIG, vocab_size=61, d_model=64, d_ff=192)
MEMORY = [
    *({"recompute": policy} for policy in RECOMPUTE_POLICIES),
    {"recompute": "mlp", "recompute_layers": 2},
    {"recompute": "full", "recompute_group": 2},
    {"recompute": "full", "recompute_group": 2, "recompute_layers": 3},
    {"recompute": "full", "offload_activations": True},
    {"recompute": "none", "loss_chunks": 1},
]
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def planner(config: MiniGPTConfig = CONFIG, precision: str = "fp32", **settings) -> Planner:
    settings = {"make_optimizer": adamw, "seq_len": T} | settings
    return Planner(config, precision=PRECISIONS[precision], **settings)


def measured_peak(
    config: MiniGPTConfig, batch_size: int, precision: str = "fp32", accumulate: int = 1
) -> int:
    """Of the second of two real steps, by a tracker that is not ours."""
    dtype = PRECISIONS[precision]
    model = MiniGPT(config).train()
    optimizer = adamw(model)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    for step in range(2):
        with tracker:
            if step == 1:
                tracker.reset_mod_stats()
                gc.collect()
            for _ in range(accumulate):
                ids = random_ids(batch_size, T) % config.vocab_size
                with torch.autocast(
                    "cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False
                ):
                    loss = model(ids, ids)
                loss.backward()
                del loss, ids
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(CONFIG, 2), (CONFIG, 16), (WIDE, 24)])
@pytest.mark.parametrize("memory", MEMORY, ids=str)
def test_predicted_peak_is_that_of_a_real_step(memory, shape, precision):
    config, batch_size = shape
    predicted = planner(config, precision).step(batch_size, **memory).peak
    measured = measured_peak(replace(config, **memory), batch_size, precision)
    assert predicted == pytest.approx(measured, rel=0.02)
