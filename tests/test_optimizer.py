"""Muon and moments in bfloat16: their arithmetic, what they store, and whole ones and shards.

What runs with them promise: test_optimizer_runs.py.
"""

import math

import pytest
import torch
from harness.runs import same, torchrun
from torch import Tensor, nn

from model import MiniGPT, MiniGPTConfig
from trainer import optimizer as optimizer_file
from trainer.flags import build_parser, fill_in
from trainer.optimizer import (
    MOMENTS,
    LeanOptimizer,
    make_optimizer,
    orthogonalize,
    product_of_factors,
    restore_optimizer,
    update_if_finite,
)

CPU, MPS = torch.device("cpu"), torch.device("mps")  # for MPS there is no kernel that can skip
CONFIG = MiniGPTConfig(31, 16, n_layers=3, n_heads=2, d_model=20, d_ff=56)
MUON, SMALL = "--optimizer=muon", "--moments-dtype=bfloat16"
MODES = {"muon": (MUON,), "bf16": (SMALL,), "muon bf16": (MUON, SMALL)}
each_mode = pytest.mark.parametrize("flags", MODES.values(), ids=MODES)


def make(*flags: str, device: torch.device = CPU, precision: torch.dtype = torch.float32):
    args = fill_in(build_parser("test", "x.pt").parse_args(["--lr=0.02", *flags]))
    torch.manual_seed(1)
    model = MiniGPT(CONFIG)
    return model, make_optimizer(model, args, device, precision)


def draw_gradients(model: nn.Module, step: int) -> None:
    torch.manual_seed(100 + step)
    for parameter in model.parameters():
        parameter.grad = 0.1 * torch.randn(parameter.shape)


def drawn(steps: int) -> dict[str, list[Tensor]]:
    """Each parameter's gradients, step by step."""
    found: dict[str, list[Tensor]] = {}
    model = make()[0]
    for step in range(steps):
        draw_gradients(model, step)
        for name, parameter in model.named_parameters():
            found.setdefault(name, []).append(parameter.grad)
    return found


def after(steps: int, *flags: str, **settings) -> tuple[dict[str, Tensor], LeanOptimizer]:
    model, optimizer = make(*flags, **settings)
    for step in range(steps):
        draw_gradients(model, step)
        optimizer.step()
    return dict(model.named_parameters()), optimizer


# ---- Which parameter goes where


def test_muon_is_for_the_matrices_of_the_blocks_and_learns_faster():
    assert type(make()[1]) is torch.optim.AdamW and type(make(SMALL)[1]) is LeanOptimizer
    for flags, rate in (((), 0.4), ((MUON,), 0.8)):
        args = fill_in(build_parser("test", "x.pt").parse_args(["--d-model=64", *flags]))
        assert args.lr == rate / 64 and args.min_lr == args.lr / 10
    model, optimizer = make(MUON)
    rules = [
        (p, (g["rule"], g["weight_decay"])) for g in optimizer.param_groups for p in g["params"]
    ]
    assert len(rules) == len(dict(rules)) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        rule = "muon" if name.startswith("blocks") and parameter.dim() == 2 else "adamw"
        assert dict(rules)[parameter] == (rule, 0.1 if parameter.dim() == 2 else 0.0)


@pytest.mark.parametrize(("moments", "size"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("optimizer", MOMENTS)
def test_what_is_stored(optimizer, moments, size):
    parameters, made = after(1, f"--optimizer={optimizer}", f"--moments-dtype={moments}")
    muon = set(matrices_of(parameters).values())
    expected = sum(
        size * p.numel() if optimizer == "muon" and p in muon else 2 * size * p.numel() + 4
        for p in parameters.values()
    )
    stored = [t for state in made.state.values() for t in state.values()]
    assert sum(t.untyped_storage().nbytes() for t in stored) == expected
    assert all(p.dtype == torch.float32 for p in parameters.values())


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


def matrices_of(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: p for n, p in parameters.items() if n.startswith("blocks") and p.dim() == 2}


PRECISIONS = [(torch.float32, 1e-5), (torch.float16, 1e-5), (torch.bfloat16, 0.02)]


@pytest.mark.parametrize(("precision", "near"), PRECISIONS)
def test_muon_is_that_of_the_papers(precision, near, monkeypatch):
    """Stacks of at most 2 wide matrices; products that no digits are lost in, or bfloat16's."""
    together, dtypes = [], set()

    def watched(matrices: Tensor) -> Tensor:
        together.append(len(matrices))
        dtypes.add(matrices.dtype)
        return orthogonalize(matrices)

    monkeypatch.setattr(optimizer_file, "AT_A_TIME", 2 * 20 * 60)
    monkeypatch.setattr(optimizer_file, "orthogonalize", watched)
    start, steps = dict(make(MUON)[0].named_parameters()), drawn(4)
    for name, weight in matrices_of(after(4, MUON, precision=precision)[0]).items():
        expected = naive_muon(start[name].detach(), steps[name], 0.02, 0.1)
        assert (weight - expected).norm() < near * (start[name] - expected).norm(), name
    assert together == 4 * [2, 1, 3, 2, 1, 2, 1]  # of 60 x 20, 20 x 20, 56 x 20, 20 x 56
    assert dtypes == {torch.bfloat16 if precision == torch.bfloat16 else torch.float32}


@pytest.mark.parametrize(("digits", "squares"), [("highest", 1), ("high", 0)])
def test_singular_values_end_near_one(digits, squares, monkeypatch):
    """The shorter way is not for products in TF32, which have too few digits for it."""
    asked: list[int] = []
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: digits)
    monkeypatch.setattr(
        optimizer_file, "product_of_factors", lambda s: asked.append(1) or product_of_factors(s)
    )
    found = torch.linalg.svdvals(orthogonalize(torch.randn(3, 16, 24)))
    assert 0.68 <= found.min() and found.max() <= 1.21 and len(asked) == squares
    zero = torch.zeros(1, 4, 4)
    assert torch.equal(orthogonalize(zero), zero)


@each_mode
def test_what_is_restored_is_a_copy(flags):
    """A view of what was read would keep all of it alive; and what is no moment is refused."""
    _, optimizer = after(2, *flags)
    saved = optimizer.state_dict()
    _, other = make(*flags)
    restore_optimizer(other, saved)
    for ours, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
        for name in ours.keys() - {"step"}:
            assert same(ours[name], theirs[name])
            assert ours[name].data_ptr() != theirs[name].data_ptr()
    moments = saved["state"][0]
    name = next(name for name in moments if name != "step")
    saved["state"][0] = moments | {name: moments[name].to(torch.complex64)}
    with pytest.raises(ValueError, match="kind"):
        restore_optimizer(other, saved)


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
@pytest.mark.parametrize("device", [CPU, MPS], ids=["fused", "not fused"])
@pytest.mark.parametrize("flags", [*MODES.values(), ()], ids=[*MODES, "float32"])
def test_adamw_rounds_what_it_stores_and_nothing_else(flags, device, at_a_time, monkeypatch):
    monkeypatch.setattr(optimizer_file, "AT_A_TIME", at_a_time)
    dtype = torch.bfloat16 if SMALL in flags else torch.float32
    start, steps = dict(make()[0].named_parameters()), drawn(5)
    parameters, optimizer = after(5, *flags, device=device)
    for name, weight in parameters.items():
        if MUON in flags and name in matrices_of(parameters):
            continue
        decay = 0.1 if weight.dim() == 2 else 0.0
        expected, *moments = naive_adamw(start[name].detach(), steps[name], 0.02, decay, dtype)
        moved = (start[name] - expected).norm()
        assert (weight - expected).norm() < 1e-5 * moved, name  # (a rounding may be on the verge)
        state = optimizer.state[weight]
        assert float(state["step"]) == 5
        for kept, moment in zip((state["exp_avg"], state["exp_avg_sq"]), moments, strict=True):
            assert kept.dtype == dtype
            torch.testing.assert_close(kept, moment, rtol=2**-7, atol=1e-8)


# ---- A step that is skipped


@pytest.mark.parametrize("device", [CPU, MPS], ids=["fused", "not fused"])
@each_mode
def test_an_update_that_is_skipped_leaves_no_trace(flags, device):
    def steps(*sizes: float):
        model, optimizer = make(*flags, device=device)
        for step, size in enumerate(sizes):
            draw_gradients(model, step if size == 1 else 99)
            for parameter in model.parameters():
                parameter.grad *= size
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update_if_finite(optimizer, norm)
        return model.state_dict(), optimizer.state_dict()["state"]

    before = steps(1, 1)
    assert not same(before, steps(1, 1, 1))
    for bad in (torch.nan, torch.inf, 1e30):
        now = steps(1, 1, bad, bad)
        assert same(before, now)
        for a, b in zip(before[0].values(), now[0].values(), strict=True):
            assert torch.equal(a.signbit(), b.signbit())


# ---- Shards


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sharded_parameters_are_updated_as_whole_ones(tmp_path, processes):
    script = "tests/harness/sharded_optimizer.py"
    result = torchrun(tmp_path / "unused.pt", script=script, processes=processes)
    assert result.stdout.count("6 optimizers equal") == processes
