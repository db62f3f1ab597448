"""The planner's clock on a CPU: what a roofline leaves out, and how it is measured."""

from dataclasses import replace
from unittest.mock import Mock, call

import pytest
import torch
import torch.nn.functional as F
from cases.shapes import CONFIG
from harness.planned import planner
from test_clock import HEADS, SCORES, SIMPLE, attend, attend_backward, note, work_of
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from model import RECOMPUTE_POLICIES
from planner import clock, overhead, this_machine
from planner.work import LARGE, PRECISIONS, fuse, summarize_work

aten = torch.ops.aten


def test_a_machine_whose_operators_were_measured():
    """What a roofline does not know: attention, GELU, Python."""
    attention = ((1e6, 2e6), (3e6, 4e6), (5e6, 6e6))
    none, measured = replace(SIMPLE, launch_s=0), replace(SIMPLE, launch_s=0, attention=attention)
    for i, dtype in enumerate((torch.float32, torch.bfloat16)):
        forward = work_of(attend, *[HEADS] * 3, dtype=dtype)
        assert clock.seconds(forward, measured) == pytest.approx(2 * SCORES / attention[i][0])
        backward = work_of(attend_backward, *[HEADS] * 4, HEADS[:3], dtype=dtype)
        assert clock.seconds(backward, measured) == pytest.approx(5 * SCORES / attention[i][1])
        assert clock.seconds(forward, none) < 4e-6  # its bytes
    gelu = note(lambda x: F.gelu(x + 1, approximate="tanh"), (1000,), place="forward")
    backward = work_of(lambda g, x: aten.gelu_backward(g, x, approximate="tanh"), *[(1000,)] * 2)
    slow = replace(none, gelu_s=1e-6)
    assert clock.seconds(summarize_work(gelu), slow) == pytest.approx(1e-3 + 8e-6)
    assert clock.seconds(summarize_work(fuse(gelu)), slow) == pytest.approx(1e-3)
    assert clock.seconds(backward, slow) == pytest.approx(1e-3)
    two, python = work_of(lambda x: x.exp().neg(), (10,)), replace(none, python_s=1e-3)
    assert clock.seconds(two, python) == pytest.approx(2e-3 + 2 * 80e-9)


N = LARGE // 4


def part_by_part(x):
    """Of a buffer that is written later than it was asked for."""
    buffer = torch.empty(2, N)
    for part in (0, 1, 0):
        torch.exp(x, out=buffer[part])
    return buffer


@pytest.mark.parametrize(
    ("run", "n", "fresh"),
    [
        (lambda x: x.exp(), N, 0),
        (lambda x: x.exp(), N + 1, 4 * (N + 1)),
        (lambda x: x.exp_(), N + 1, 0),  # it was there
        (lambda x: x.exp().neg_(), N + 1, 4 * (N + 1)),  # it is there by then
        (lambda x: (x.exp(), None, x.neg())[1:], N + 1, 8 * (N + 1)),  # each time anew
        (part_by_part, N, 8 * N),
    ],
)
def test_large_blocks_come_from_the_system(run, n, fresh):
    made, card = work_of(run, (n,)), replace(SIMPLE, launch_s=0, fresh_s=1.0)
    more = clock.seconds(made, card) - clock.seconds(made, replace(card, fresh_s=0))
    assert round(more) == fresh  # bytes


def test_what_python_does_around_operators():
    """Hooks on saved tensors, and modes that look at operators; in operators."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def hooked(x):
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            y = x.exp().view(9).neg()
        return y.neg()

    def looked_at(x):
        with Mode():
            return x.exp().view(9).neg()

    def launches(run) -> list[float]:
        return [op.launches for op in note(run, (3, 3))]

    assert launches(lambda x: x.exp().view(9).neg()) == [1, 1]
    assert launches(looked_at) == pytest.approx([1 + overhead.LOOK, 1 + 2 * overhead.LOOK])
    # (The view counts, too; who comes later has other hooks, which begin again.)
    begun, more = 1 + overhead.HOOKS + overhead.UNDER_HOOKS, 1 + 2 * overhead.UNDER_HOOKS
    assert launches(lambda x: (hooked(x), hooked(x))) == pytest.approx([begun, more, 1] * 2)
    card = replace(SIMPLE, launch_s=0, bytes_per_s=1e15, python_s=1.0)
    assert clock.seconds(work_of(hooked, (3, 3)), card) == pytest.approx(begun + more + 1)


def test_python_takes_longer_the_finer_the_policy(everything_travels):
    around = {}
    for policy in RECOMPUTE_POLICIES:
        step = planner().step(3, recompute=policy)
        around[policy] = step.work.launches.sum() - len(step.work.launches)
        assert (step.compiled_work.launches == 1).all()
    assert around["none"] == 0
    one, two = around["mlp"], around["cheap"]  # checkpoints a block
    assert one >= 2 * overhead.HOOKS * CONFIG.n_layers and two >= 2 * one - 1
    most = max(around[policy] for policy in ("cheap", "mlp", "attn", "full"))
    assert min(around["selective"], around["sdpa"]) > most


def test_this_machine_is_measured(monkeypatch):
    calls = []

    def stopwatch(run, device, times=1, budget=0.3):
        run()
        calls.append(times)
        return 1e-3 * (2 if len(calls) == 13 else 1)

    monkeypatch.setattr(clock, "time_of", stopwatch)
    card = this_machine(seq_len=16, head_size=8)
    one, heads = 2 * 1024**3 / 1e-3, 16 * torch.get_num_threads()
    assert card.flops == (one, one, 2 * 128**3 / 1e-3)
    assert card.bytes_per_s == 2 * 2**26 / 1e-3 and card.launch_s == 1e-3
    assert len(calls) == 15 and card.memory > 2**28
    assert (card.reached_flops, card.reached_bytes) == (1, 1)
    product = heads * 16 * 16 * 8 / 1e-3
    assert card.attention == ((2 * product, 5 * product),) * len(PRECISIONS)
    assert card.gelu_s == 1e-3 / 2**20
    assert card.fresh_s == pytest.approx(1e-3 / 2**26)  # the 13th takes longer than the 14th
    assert 1e-3 / 200 < card.python_s < 1e-3 / 50  # by the operators of a step


def test_what_measuring_took_is_given_back(monkeypatch):
    """Else it would be missing in what is free, and be the peak of the run."""
    asked, gpu = Mock(), torch.device("cuda", 1)
    monkeypatch.setattr(clock, "measure_card", asked.measure_card)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, getattr(asked, name))
    assert this_machine(gpu, 16, 8) is asked.measure_card.return_value
    given_back = [call.empty_cache(), call.reset_peak_memory_stats(gpu)]
    assert asked.mock_calls == [call.measure_card(gpu, 16, 8), *given_back]


def test_the_fastest_run_counts(monkeypatch):
    # start; begin, end, enough? each time
    ticks = iter([0.0, 0.0, 0.5, 0.6, 0.6, 0.8, 0.9, 1.0, 2.0, 3.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(ticks))
    runs = Mock()
    fastest = clock.time_of(runs, torch.device("cpu"), times=2, budget=1)
    assert fastest == pytest.approx(0.1) and runs.call_count == 1 + 3 * 2
