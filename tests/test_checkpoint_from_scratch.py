"""The rebuilt checkpoint is torch's: to the bit, to the operation, to the byte."""

import re
from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from model import Block, MiniGPTConfig
from scripts import checkpoint_from_scratch as lesson
from scripts.checkpoint_from_scratch import (
    PRECISIONS,
    checkpoint,
    is_torchs,
    main,
    run_step,
    same_gradients,
)


def plain(function, *args):
    return function(*args)


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
@pytest.mark.parametrize("dtype", PRECISIONS.values())
def test_a_step_equals_none_and_torch(dtype, dropout, replays):
    steps = {name: run_step(*how, dtype, dropout) for name, how in lesson.VARIANTS.items()}
    assert len(replays) == lesson.CONFIG.n_layers  # by "this file", and by nobody else
    none, whole, torchs, ours = steps.values()
    assert torch.equal(ours.loss, none.loss)
    assert len(none.gradients) == 4 + 12 * lesson.CONFIG.n_layers
    assert same_gradients(none, ours) and all(map(torch.any, none.gradients.values()))
    # Early stop leaves out each block's last matmul, but not where dropout comes behind it.
    last_matmul = 2 * 4 * 32 * lesson.CONFIG.d_model * lesson.CONFIG.d_ff
    left_out = 0 if dropout else lesson.CONFIG.n_layers * last_matmul
    assert none.flops < ours.flops == torchs.flops == whole.flops - left_out
    assert ours.kept == torchs.kept < none.kept / 4
    assert is_torchs(ours, torchs)


def test_without_gradients_it_is_a_plain_call(monkeypatch):
    monkeypatch.setattr(lesson, "remember_conditions", None)
    block, x = small_block(0.0), torch.randn(2, 4, 16)
    with torch.no_grad():
        result = checkpoint(block, x)
        assert torch.equal(result, block(x)) and not result.requires_grad


def test_backward_leaves_the_random_numbers_alone():
    block, x = small_block(), torch.randn(2, 4, 16, requires_grad=True)
    y = checkpoint(block, x).sum()
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


OTHERS = several_results_in_any_order, one_inside_of_another


@pytest.mark.parametrize("gradients", OTHERS)
def test_gradients_are_those_of_a_plain_call(gradients, replays):
    assert all(map(torch.equal, gradients(checkpoint), gradients(plain)))
    assert 1 <= len(replays) <= 3


def test_a_function_that_changes_its_way_is_found_out():
    ways = iter([lambda x: x.sin().cos().tanh(), lambda x: x.sin()])
    y = checkpoint(lambda x: next(ways)(x), torch.randn(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="fewer tensors"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        (["--dropout", "0"], "mlp.c_proj   #22, #23 was the last: EARLY STOP, its matmul is not"),
        ([], "dropout      #25 was the last: EARLY STOP, too late for the matmul before it."),
    ],
)
def test_main_tells_the_story_and_prints_the_table(flags, end, capsys):
    assert main(flags) == 0
    out = capsys.readouterr().out
    story, table = out.split("\n\n")
    # Each ticket is given out, filled and handed in once.
    tickets = Counter(re.findall(r"#(\d+)", story))
    assert len(tickets) == int(re.search(r"(\d+) tickets", story)[1]) and {*tickets.values()} == {3}
    assert end in story
    assert table.count("this file ") == 2 and len(re.findall(r"\bequal {5,}", table)) == 2 * 2 * 3


def test_main_fails_if_something_differs(capsys, monkeypatch):
    def other_masks(*args, **options):
        return torch_checkpoint(*args, **options | {"preserve_rng_state": False})

    forgets = "full", partial(mock.patch, "model.checkpoint", other_masks)
    monkeypatch.setitem(lesson.VARIANTS, "this file", forgets)
    assert main([]) == 1
    out = capsys.readouterr().out  # of each precision the gradients; and the last line
    assert out.count("NOT EQUAL") == 2 + 1 and "\nThis file and torch: NOT EQUAL " in out
