"""What offload takes: of a CPU's memory as the planner predicts it, at sizes as they are."""

import gc
import random
from typing import NamedTuple
from weakref import ref

import pytest
import torch
from test_memory import PRECISIONS, adamw
from test_model import random_ids, tiny
from torch import nn

from memory import offload
from model import RECOMPUTE_POLICIES, MiniGPT, MiniGPTConfig
from planner import Planner
from scripts.ladder import LiveStorages

POLICIES = RECOMPUTE_POLICIES[1:]


class Case(NamedTuple):
    config: MiniGPTConfig
    batch_size: int
    seq_len: int
    precision: torch.dtype


def draw(number: int, policy: str) -> Case:
    """A tiny shape, of whose tensors some are large enough to travel; and some shapes have none."""
    choose = random.Random(number).choice
    n_heads, seq_len = choose((1, 2, 4)), choose((8, 31, 64, 96, 128, 200))
    d_model = n_heads * choose((8, 16, 32, 48))
    config = MiniGPTConfig(
        vocab_size=choose((31, 256, 1000)),
        max_position_embeddings=seq_len,
        n_layers=choose(range(1, 6)),
        n_heads=n_heads,
        d_model=d_model,
        d_ff=choose((2, 3, 4)) * d_model,
        dropout=number % 2 / 10,
        recompute=policy,
        offload_activations=True,
    )
    precision = [*PRECISIONS.values()][number // 2 % 2]
    return Case(config, max(1, choose((8, 300, 700, 1000)) // seq_len), seq_len, precision)


def measured_peak(case: Case) -> int:
    """The most bytes that are alive at once in the second of two real steps."""
    config, batch_size, seq_len, precision = case
    in_bf16 = precision != torch.float32
    with LiveStorages() as storages:
        model = MiniGPT(config).train()
        optimizer = adamw(model)
        for _ in range(2):
            storages.peak = storages.now
            ids, labels = torch.zeros(2, batch_size, seq_len, dtype=torch.int64)
            with torch.autocast("cpu", precision, enabled=in_bf16, cache_enabled=False):
                loss = model(ids, labels)
            loss.backward()
            del ids, labels, loss
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            optimizer.step()
            optimizer.zero_grad()
    return storages.peak


SOME = [(number, [POLICIES[number % 6]]) for number in range(6)]
ALL = [pytest.param(number, POLICIES, marks=pytest.mark.slow) for number in range(40)]


@pytest.mark.parametrize(("number", "policies"), [*SOME, *ALL])
def test_predicted_peak_is_that_of_a_real_offloaded_step(number, policies):
    for policy in policies:
        case = draw(number, policy)
        planner = Planner(case.config, case.seq_len, precision=case.precision, make_optimizer=adamw)
        predicted, measured = planner.step(case.batch_size).peak, measured_peak(case)
        assert predicted == pytest.approx(measured, rel=1e-3 if measured > 1e6 else 3e-3), policy


def test_a_forward_that_is_given_up_lets_go_of_all_it_kept(monkeypatch):
    """Also of what is too small to travel, such as a result that an operator keeps of itself."""
    monkeypatch.setattr(offload, "SMALL", 3 * 3 * 16 * 32 * 4)  # qkv travels
    model, ids = (
        tiny(recompute="mlp", offload_activations=True, n_layers=4).train(),
        random_ids(3, 16),
    )
    loss = model(ids, ids)
    kept = ref(loss)
    del loss
    gc.collect()
    assert kept() is None and len(model.host_memory.made) == 3
    assert sum(map(len, model.host_memory.unused.values())) == 3
