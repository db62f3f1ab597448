"""What the planner counts for a GPU beside tensors: planner/kernels.py."""

import pytest
import torch
from test_memory import CONFIG, planner

from planner.kernels import workspaces


@pytest.mark.parametrize(("precision", "each"), [("bf16", 5 * 2 * 128 * (32 + 1) * 4), ("fp32", 0)])
def test_inside_of_a_gpus_kernels(precision, each, monkeypatch):
    """While attention's backward runs: dq_accum and softmax_d; T = 32 and D = 16 are rounded up."""
    monkeypatch.setattr("planner.step.workspaces", lambda: 1000)
    with_kernels = planner(CONFIG, precision, device_type="cuda").step(5, recompute="full").total
    monkeypatch.setattr("planner.step.inside", lambda operator, args: 0)
    monkeypatch.setattr("planner.step.workspaces", lambda: 0)
    without = planner(CONFIG, precision, device_type="cuda").step(5, recompute="full")
    more = with_kernels - without.total - 1000
    assert sorted(more)[-CONFIG.n_layers - 1 :] == [0] + [each] * CONFIG.n_layers
    assert not more[: without.phase("backward").start].any()


@pytest.mark.parametrize(("capability", "mib"), [((8, 9), 16.25), ((9, 0), 64), ((12, 0), 16.25)])
def test_what_cublas_works_in(capability, mib, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert workspaces() == mib * 2**20
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert workspaces() == 16.25 * 2**20
