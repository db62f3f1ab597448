"""Muon and moments in bfloat16: their arithmetic, what they store, whole ones and shards; and runs
with them promise what runs with AdamW do."""

import math

import pytest
import torch
from harness.runs import parse, snapshot, train_here
from torch import Tensor

from model import MiniGPT, MiniGPTConfig
from trainer import optimizer as optimizer_file
from trainer.optimizer import AdamWAndMuon, make_optimizer, orthogonalize

CPU, CUDA, MPS = map(torch.device, ("cpu", "cuda", "mps"))
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CONFIG = MiniGPTConfig(31, 16, n_layers=3, n_heads=2, d_model=20, d_ff=56)
MUON, SMALL = "--optimizer=muon", "--moments-dtype=bfloat16"


def make(*flags: str, device: torch.device = CPU, precision: torch.dtype = FP32):
    torch.manual_seed(1)
    model = MiniGPT(CONFIG)
    return model, make_optimizer(model, parse("--lr=0.02", *flags), device, precision)


def learn(steps: int, *flags: str, **settings) -> tuple[dict[str, tuple], AdamWAndMuon]:
    """Of each parameter what it was, its gradients step by step, and what it is."""
    model, optimizer = make(*flags, **settings)
    found = {name: (p.detach().clone(), [], p) for name, p in model.named_parameters()}
    for _ in range(steps):
        for _, gradients, parameter in found.values():
            parameter.grad = 0.1 * torch.randn_like(parameter.t()).t()  # with other strides
            gradients.append(parameter.grad)
        optimizer.step()
    return found, optimizer


def is_matrix(name: str, parameter: Tensor) -> bool:
    return name.startswith("blocks") and parameter.dim() == 2


# ---- Which parameter goes where


def test_muon_is_for_the_matrices_of_the_blocks_and_learns_faster():
    assert type(make()[1]) is torch.optim.AdamW and type(make(SMALL)[1]) is AdamWAndMuon
    assert all(make(device=device)[1].defaults["fused"] for device in (CPU, CUDA, MPS))
    assert parse("--d-model=64", MUON).lr == 0.8 / 64 == 2 * parse("--d-model=64").lr
    model, optimizer = make(MUON)
    rules = [
        (p, (g["rule"], g["weight_decay"])) for g in optimizer.param_groups for p in g["params"]
    ]
    assert len(rules) == len(dict(rules)) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        rule = "muon" if is_matrix(name, parameter) else "adamw"
        assert dict(rules)[parameter] == (rule, 0.1 if parameter.dim() == 2 else 0.0)


# ---- Its arithmetic, beside some that shares no line


def naive_muon(weight: Tensor, gradients: list[Tensor], rate: float, decay: float) -> Tensor:
    """One matrix in float64; its singular values go through the polynomial as numbers."""
    weight, momentum = weight.double(), torch.zeros_like(weight).double()
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient.double()
        ahead = 0.95 * momentum + 0.05 * gradient.double()
        u, s, vh = torch.linalg.svd(ahead, full_matrices=False)
        s = s / s.square().sum().sqrt()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        scale = 0.2 * math.sqrt(max(weight.shape))
        weight = weight - rate * decay * weight - rate * scale * (u * s) @ vh
    return weight


@pytest.mark.parametrize(("precision", "near"), [(FP32, 1e-5), (FP16, 1e-5), (BF16, 0.02)])
def test_muon_is_that_of_the_papers(precision, near):
    """Products that no digits are lost in, or bfloat16's."""
    for name, (start, gradients, end) in learn(4, MUON, precision=precision)[0].items():
        if is_matrix(name, start):
            expected = naive_muon(start, gradients, 0.02, 0.1)
            assert (end - expected).norm() < near * (start - expected).norm(), name
    zero = torch.zeros(4, 4)
    assert torch.equal(orthogonalize(zero), zero)


def naive_adamw(
    weight: Tensor, gradients: list[Tensor], rate: float, decay: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    first, second = torch.zeros(2, *weight.shape, dtype=dtype)
    for step, g in enumerate(gradients, 1):
        m = 0.9 * first.float() + 0.1 * g
        v = 0.95 * second.float() + 0.05 * g * g
        ahead = m / (1 - 0.9**step) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        weight = weight * (1 - rate * decay) - rate * ahead
        first, second = m.to(dtype), v.to(dtype)
    return weight, first, second


@pytest.mark.parametrize("at_a_time", [2**22, 256])  # whole tensors, or slices
@pytest.mark.parametrize("flags", [(MUON,), (SMALL,), (MUON, SMALL), ()], ids=" ".join)
def test_adamw_rounds_what_it_stores_and_nothing_else(flags, at_a_time, monkeypatch):
    monkeypatch.setattr(optimizer_file, "UPDATE_CHUNK_ELEMENTS", at_a_time)
    dtype = BF16 if SMALL in flags else FP32
    found, optimizer = learn(5, *flags)
    by_adamw = [name for name in found if not (MUON in flags and is_matrix(name, found[name][2]))]
    for start, gradients, end in map(found.get, by_adamw):
        decay = 0.1 if end.dim() == 2 else 0.0
        expected, *moments = naive_adamw(start, gradients, 0.02, decay, dtype)
        state = optimizer.state[end]
        # (Some roundings may be on the verge: 1e-5 of it.)
        assert (end - expected).norm() < 1e-4 * (start - expected).norm()
        assert float(state["step"]) == 5
        for kept, moment in zip((state["exp_avg"], state["exp_avg_sq"]), moments, strict=True):
            assert kept.dtype == dtype
            assert (kept.float() - moment.float()).norm() < 1e-3 * moment.float().norm()


# ---- Runs


@pytest.mark.parametrize(("name", "other"), [("adamw", "muon"), ("muon", "adamw")])
def test_at_resume_the_moments_dtype_may_change_the_optimizer_not(name, other, tmp_path, capsys):
    """Moments are cast, and there and back they are what they were; a snapshot of them is plain."""
    run = tmp_path / "run.pt"
    assert train_here(run, f"--optimizer={name}", "--num-steps=2", "--lr-scheduler=constant") == 0
    assert train_here(run, "--resume", f"--optimizer={other}") == 2
    assert f"was trained with {name}, this run has {other};" in capsys.readouterr().err
    for steps, now, before in ((3, "bfloat16", "float32"), (4, "float32", "bfloat16")):
        flags = ("--resume", f"--moments-dtype={now}", f"--num-steps={steps}")
        assert train_here(run, *flags) == 0
        assert f"--moments-dtype {before} -> {now}" in capsys.readouterr().out
        moments = snapshot(run)["optimizer"]["state"].values()
        kept = {t.dtype for one in moments for n, t in one.items() if n != "step"}
        assert kept == {getattr(torch, now)}
