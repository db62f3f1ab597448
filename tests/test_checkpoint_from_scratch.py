"""The rebuilt checkpoint is torch's: to the bit, to the operation, to the byte."""

import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from memory import MemorySavingGPT
from model import Block, MiniGPTConfig
from planner.op_recorder import kept_for_backward
from scripts import checkpoint_from_scratch as lesson
from scripts.checkpoint_from_scratch import checkpoint, main

CONFIG = MiniGPTConfig(64, 32, n_layers=2, n_heads=4, d_model=64, d_ff=256)


def plain(function, *args, **options):
    return function(*args)


def ours(function, *args, **options):
    return checkpoint(function, *args)


def run_step(
    policy: str,
    context: Callable[[], AbstractContextManager] = nullcontext,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.1,
) -> SimpleNamespace:
    """A training step of the model in `context`: its results, its FLOPs, and what forward keeps.
    (Hooks would miss x, which our checkpoint keeps in a closure.)"""
    torch.manual_seed(0)
    model = MemorySavingGPT(replace(CONFIG, recompute=policy, dropout=dropout)).train()
    ids = torch.randint(0, CONFIG.vocab_size, (4, 33))

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False):
            return model(ids[:, :-1], ids[:, 1:])

    with context():
        kept = sum(tensor.nbytes for tensor in kept_for_backward(model, forward))
        torch.manual_seed(1)
        with FlopCounterMode(display=False) as counter:
            loss = forward()
            loss.backward()
    results = {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}
    return SimpleNamespace(results=results, flops=counter.get_total_flops(), kept=kept)


def n_different(one: SimpleNamespace, other: SimpleNamespace) -> int:
    return sum(not tensor.equal(other.results[name]) for name, tensor in one.results.items())


def small_block(dropout: float = 0.1) -> Block:
    torch.manual_seed(0)
    return Block(MiniGPTConfig(n_heads=2, d_model=16, d_ff=64, dropout=dropout)).train()


@pytest.fixture
def replays(monkeypatch):
    """Grows by one with every replay."""
    seen, replay = [], lesson.replay
    monkeypatch.setattr(lesson, "replay", lambda *args: (seen.append(1), replay(*args)))
    return seen


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_equals_none_and_torch(dtype, dropout, replays):
    none, whole, torchs, this = (
        run_step(policy, context, dtype, dropout)
        for policy, context in (
            ("none", nullcontext),
            ("full", partial(set_checkpoint_early_stop, False)),
            ("full", nullcontext),
            ("full", partial(mock.patch, "model.checkpoint", ours)),
        )
    )
    assert len(replays) == CONFIG.n_layers  # by ours, and by nobody else
    assert len(none.results) == 1 + 4 + 12 * CONFIG.n_layers
    assert n_different(none, this) == n_different(none, torchs) == 0
    assert all(map(torch.any, none.results.values()))
    # Early stop leaves out each block's last matmul, but not where dropout comes behind it.
    last_matmul = 2 * 4 * 32 * CONFIG.d_model * CONFIG.d_ff
    left_out = 0 if dropout else CONFIG.n_layers * last_matmul
    assert none.flops < this.flops == torchs.flops == whole.flops - left_out
    assert this.kept == torchs.kept < none.kept / 4


def test_without_gradients_it_is_a_plain_call(monkeypatch):
    monkeypatch.setattr(lesson, "save_rng_and_autocast", None)
    with torch.no_grad():
        assert not checkpoint(small_block(0.0), torch.randn(2, 4, 16)).requires_grad


def test_backward_leaves_the_random_numbers_alone():
    y = checkpoint(small_block(), torch.randn(2, 4, 16, requires_grad=True)).sum()
    torch.rand(3)  # between forward and backward, others draw too
    before = torch.get_rng_state()
    y.backward()
    assert torch.equal(torch.get_rng_state(), before)


def several_results_in_any_order(wrap):
    """Each has its own backward: the last ticket is not always the first one back."""

    def two(a, b, scale, unused):
        return scale * (a * b).exp(), nn.functional.dropout(a.tanh() * b, 0.5)

    torch.manual_seed(0)
    a, b = (torch.randn(5, requires_grad=True) for _ in range(2))
    first, second = wrap(two, a, b, 2.0, None)
    return [
        *torch.autograd.grad(first.sum(), (a, b), retain_graph=True),
        *torch.autograd.grad(second.sum(), (b, a), retain_graph=True),
        *torch.autograd.grad(first.sum(), b),
    ]


def one_inside_of_another(wrap):
    block, other = small_block(), small_block()
    x = torch.randn(2, 4, 16, requires_grad=True)
    wrap(lambda x: other(wrap(block, x)), x).square().sum().backward()
    return [x.grad, *(p.grad for p in [*block.parameters(), *other.parameters()])]


@pytest.mark.parametrize("gradients", [several_results_in_any_order, one_inside_of_another])
def test_gradients_are_those_of_a_plain_call(gradients, replays):
    assert all(map(torch.equal, gradients(checkpoint), gradients(plain)))
    assert 1 <= len(replays) <= 3


def test_a_function_that_changes_its_way_is_found_out():
    ways = iter([lambda x: x.sin().cos().tanh(), lambda x: x.sin()])
    y = checkpoint(lambda x: next(ways)(x), torch.randn(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="fewer tensors"):
        y.sum().backward()


@pytest.mark.parametrize("flags", [["--dropout", "0"], []])
def test_the_story(flags, capsys):
    """Each ticket is given out, filled and handed in once."""
    assert main(flags) == 0
    story = capsys.readouterr().out
    tickets = Counter(re.findall(r"#(\d+)", story))
    assert len(tickets) == int(re.search(r"(\d+) tickets", story)[1]) and {*tickets.values()} == {3}
    end = "its matmul is not run" if flags else "too late for the matmul before it"
    assert f"EARLY STOP, {end}" in story
