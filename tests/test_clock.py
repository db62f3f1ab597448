"""The planner's clock: FLOPs and bytes by hand, a roofline by hand."""

from dataclasses import replace
from functools import partial
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from planner import CARDS, Card, measure_this_machine, roofline, timeline
from planner.op_recorder import OpRecorder
from planner.roofline import seconds_of_each_op

pytestmark = pytest.mark.usefixtures("everything_travels")
aten = torch.ops.aten

# 1 TFLOP/s, a byte a nanosecond, a launch of a microsecond, nothing taken off.
SIMPLE = Card("simple", 2**30, (1e12, 1e12, 1e12), 1e9, 1e-6, 1, 1)


def work_of(run, *shapes, dtype=torch.float32) -> np.recarray:
    """What `run` of fake tensors of these shapes does."""
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=dtype) for shape in shapes]
        with OpRecorder() as log:
            for tensor in tensors:
                log.add_storage(tensor)
            run(*tensors)
    return timeline.op_flops_and_bytes(log.ops)


def totals(work: np.recarray) -> tuple[float, float]:
    return float(work.flops @ work.times), float(work.bytes @ work.times)


def seconds(work: np.recarray, card: Card) -> float:
    return float(seconds_of_each_op(work, card).sum())


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_backward(q, k, v, out, log):
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(out, q, k, v, out, log, 0.0, True)


def adamw(*tensors):
    rates = {"lr": 1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0, "eps": 1}
    columns = [[tensor] for tensor in tensors]
    torch._fused_adamw_(*columns, [], [torch.ones(())], **rates, amsgrad=False, maximize=False)


HEADS = (2, 3, 8, 4)  # B, H, T, D
SCORES = 2 * 3 * 8 * 8 * 4  # multiplications of one product
ONE = 2 * 3 * 8 * 4  # elements of q
LOG = 2 * 3 * 8  # a number a row


@pytest.mark.parametrize(
    "run, shapes, flops, elements",
    [
        (torch.mm, [(3, 5), (5, 7)], 2 * 3 * 5 * 7, 15 + 35 + 21),
        (lambda a, b, c: torch.mm(a, b, out=c), [(3, 5), (5, 7), (3, 7)], 210, 15 + 35 + 21),
        (lambda a, b, c: c.addmm_(a, b), [(3, 5), (5, 7), (3, 7)], 210, 15 + 35 + 2 * 21),
        (F.linear, [(3, 5), (7, 5), (7,)], 210, 15 + 35 + 7 + 21),
        (attend, [HEADS] * 3, 2 * SCORES, 4 * ONE + LOG),
        (attend_backward, [*[HEADS] * 4, HEADS[:3]], 5 * SCORES, 7 * ONE + LOG),
        (lambda a: a.mul_(2), [(3, 7)], 0, 2 * 21),
        (lambda a, b: a.copy_(b), [(3, 7), (3, 7)], 0, 2 * 21),
        (lambda a: torch.empty(3, 7), [(3, 7)], 0, 0),
        (lambda a: a.view(21).detach().unsqueeze(0).expand(5, 21), [(3, 7)], 0, 0),
        (lambda a, b: a.expand(3, 7) + b, [(1, 7), (3, 7)], 0, 7 + 2 * 21),
        (lambda a: a[:, :2].exp(), [(3, 7)], 0, 2 * 6),
        (lambda a: a.reshape(7, 3).t().reshape(21), [(3, 7)], 0, 2 * 21),  # (it copies)
        (lambda a: F.gelu(a).sum(), [(3, 7)], 0, 3 * 21 + 1),
        (lambda a: a.to("meta"), [(3, 7)], 0, 21),  # offloaded: that is not the card's memory
        (adamw, [(30, 40)] * 4, 0, 7 * 30 * 40 + 2),  # (the count of steps is made, and read)
    ],
)
def test_operators_by_hand(run, shapes, flops, elements):
    assert totals(work_of(run, *shapes)) == (flops, 4 * elements)


def test_what_is_not_read_whole():
    ids, rows = partial(torch.zeros, 6, dtype=torch.int64), 6 * 5 * 4
    looked_up = work_of(lambda table: F.embedding(ids(), table), (100, 5))[1:]  # (after the ids)
    assert totals(looked_up) == (0, 6 * 8 + 2 * rows)
    added = work_of(lambda table, x: table.index_add_(0, ids(), x), (100, 5), (6, 5))[1:]
    assert totals(added) == (0, 6 * 8 + 3 * rows)


def test_a_roofline_by_hand():
    slow = replace(SIMPLE, flops=(1e10, 1e9, 1), flops_efficiency=0.5, bandwidth_efficiency=0.5)
    square = [(1000, 1000)] * 2
    thousand = work_of(torch.mm, *square)
    in_bfloat16 = work_of(torch.mm, *square, dtype=torch.bfloat16)
    speeds = ((1e6, 2e6), (3e6, 4e6), (5e6, 6e6))  # of attention and its backward, if measured
    measured = replace(SIMPLE, launch_s=0, attention=speeds)
    backward = work_of(attend_backward, *[HEADS] * 4, HEADS[:3], dtype=torch.bfloat16)
    microseconds = [
        # 3 x 4 MB at 1 GB/s, which takes longer than 2 GFLOP at 1 TFLOP/s
        (SIMPLE, thousand, 12e3),
        # and shorter than these at half of 10 GFLOP/s, or in bfloat16 of 1
        (slow, thousand, 4e5),
        (slow, in_bfloat16, 4e6),
        # what is over in a launch
        (SIMPLE, work_of(torch.exp, (10,)), 1.0),
        (CARDS["A100"], work_of(torch.add, (10,), (10,)), 3.0),
        # 3 x 64 MiB over 85 % of 1,008 GB/s
        (CARDS["RTX 4090"], work_of(torch.add, (4096, 4096), (4096, 4096)), 234.97501),
        # products outside of attention are not as slow as it
        (measured, thousand, 12e3),
        (measured, work_of(attend, *[HEADS] * 3), 2 * SCORES / 1),
        (measured, backward, 5 * SCORES / 4),
    ]
    for card, work, expected in microseconds:
        assert 1e6 * seconds(work, card) == pytest.approx(expected, rel=1e-6)


# ---- this machine


def test_this_machine_is_measured_and_what_that_took_is_given_back(monkeypatch):
    """Else it would be missing in what is free, and be the peak of the run."""
    monkeypatch.setattr(roofline, "measure_seconds", lambda run: run() is None or 1e-3)
    card = measure_this_machine(seq_len=16, head_size=8)
    assert card.flops[0] == 2 * 1024**3 / 1e-3
    assert card.bytes_per_s == 2 * 2**26 / 1e-3 and card.launch_s == 1e-3
    gpu, asked = torch.device("cuda", 1), Mock()
    monkeypatch.setattr(roofline, "measure_card", Mock())
    monkeypatch.setattr(torch, "cuda", asked)
    measure_this_machine(gpu, 16, 8)
    assert asked.mock_calls == [call.empty_cache(), call.reset_peak_memory_stats(gpu)]
