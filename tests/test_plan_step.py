"""planner.plan_step predicts a step of any model, and leaves the model alone."""

import re
from contextlib import nullcontext, redirect_stdout
from functools import partial
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases.shapes import PRECISIONS
from harness.live_storages import LiveStorages
from harness.marks import rest_slow
from harness.runs import ROOT
from test_house import imports
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from memory import MemorySavingGPT
from model import MiniGPTConfig
from planner import Planner, StepMemory, plan_step
from planner.units import format_bytes

B, T, V, C = 4, 32, 97, 64
IDS, LABELS = torch.arange(2 * B * T).reshape(2, B, T) % V
X = (torch.zeros(B, C),)


class Tied(nn.Module):
    """Two ends with one weight, buffers, a frozen layer, a tensor that nobody registered."""

    def __init__(self, returns: Any = lambda loss, logits: loss) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(V, C), nn.Linear(C, V, bias=False)
        self.head.weight = self.table.weight
        self.frozen = nn.Linear(C, C).requires_grad_(False)
        blocks = (nn.TransformerEncoderLayer(C, 4, 2 * C, batch_first=True) for _ in range(3))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.BatchNorm1d(C)  # its buffers change
        self.register_buffer("mask", torch.full((T, T), -torch.inf).triu(1))
        self.register_buffer("positions", torch.arange(T), persistent=False)
        self.scale, self.returns = torch.ones(C), returns

    def forward(self, ids: Tensor, labels: Tensor, wants: str = "loss") -> Any:
        if (ids < 0).any() or int(self.positions[-1]) != T - 1:  # integers may decide
            raise IndexError
        x = self.frozen(self.table(ids)) * self.scale
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        logits = self.head(self.norm(x.flatten(0, 1)))
        return self.returns(F.cross_entropy(logits, labels.flatten()), logits)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def with_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def measured(
    model: nn.Module,
    batch: Any,
    make: Any = adamw,
    precision: torch.dtype = torch.float32,
    micro_batches: int = 1,
) -> int:
    """Return the peak of the second of two real steps, by the trainers' measurement."""
    made = make([p for p in model.parameters() if p.requires_grad])
    optimizers = made if isinstance(made, list) else [made]

    def step() -> None:
        for _ in range(micro_batches):
            with torch.autocast("cpu", precision, enabled=precision != torch.float32):
                result = model(**batch) if isinstance(batch, dict) else model(*batch)
            loss = getattr(result, "loss", result[0] if isinstance(result, tuple) else result)
            del result
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step()
    storages = LiveStorages()
    states = [[*optimizer.state.values()] for optimizer in optimizers]
    storages.track_storages([*model.parameters()], [*model.buffers()], states)
    with storages:
        step()
    return storages.peak


RETURNS = {
    "a tensor": lambda loss, logits: loss,
    "a tuple": lambda loss, logits: (loss, logits),
    "an object": lambda loss, logits: SimpleNamespace(loss=loss, logits=logits),
}


BY_HAND = [
    ("none", "a tensor", "fp32", adamw),
    ("full", "an object", "bf16", with_momentum),
    ("full", "a tuple", "fp32", adamw),
    ("none", "an object", "bf16", with_momentum),
]


@pytest.mark.parametrize(
    ("recompute", "returns", "precision", "make"), rest_slow(BY_HAND, BY_HAND[:2].__contains__)
)
def test_a_model_by_hand(recompute, returns, precision, make):
    model, how = Tied(RETURNS[returns]), PRECISIONS[precision]
    batch = {"ids": IDS, "labels": LABELS} if returns == "a tensor" else (IDS, LABELS)
    step = plan_step(model, batch, make, blocks=model.blocks, recompute=recompute, precision=how)
    if recompute == "full":
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    else:  # without names of blocks the bytes are the same
        assert plan_step(model, batch, make, precision=how).peak == step.peak
    assert step.peak == pytest.approx(measured(model, batch, make, how), rel=0.005)
    stretches = dict.fromkeys((phase, block) for _, phase, block in step.phase_marks if phase)
    forward, backward = ([(phase, i) for i in range(3)] for phase in ("forward", "backward"))
    before, head, after = ((phase, None) for phase in ("forward", "head", "backward"))
    update = ("optimizer", None)
    assert [*stretches] == [before, *forward, head, *backward[::-1], after, update]
    assert (step.timeline >= 0).all() and step.bytes_after_each_op[-1] >= step.bytes_after_each_op[
        0
    ]
    if recompute == "full" and precision == "fp32":
        assert step.kept_per_block == B * T * C * 4  # its input


def muon_and_adamw(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices = [p for p in parameters if p.shape == (2 * C, C)]
    rest = [p for p in parameters if p.shape != (2 * C, C)]
    return [torch.optim.Muon(matrices), adamw(rest)]


@pytest.mark.parametrize("recompute", rest_slow([slice(0), slice(None, None, 2)], slice(0).__eq__))
def test_micro_batches_and_two_optimizers_and_a_loss(recompute):
    """Earlier gradients exist in forward. Some blocks recompute."""
    model = Tied(RETURNS["a tuple"])
    step = plan_step(
        model, (IDS, LABELS), muon_and_adamw, blocks=model.blocks, accumulates_gradients=True,
        recompute=[*model.blocks][recompute], loss=lambda output, batch: output[0],
    )  # fmt: skip
    for block in model.blocks[recompute]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    real = measured(model, (IDS, LABELS), muon_and_adamw, micro_batches=2)
    assert step.peak == pytest.approx(real, rel=0.001)
    assert step.batch_size == B


def test_products_of_convolutions_count():
    layers = nn.Conv2d(4, 8, 3, stride=2), nn.ConvTranspose2d(8, 6, 2, stride=2)
    model, x = nn.Sequential(*layers, SumOf()), torch.zeros(2, 4, 9, 9)
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    planned = plan_step(model, (x,), adamw).needed_and_replayed_flops
    assert planned == (counter.get_total_flops(), 0)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "extra",
    rest_slow(
        [{}, {"use_cache": False}, {"attention_mask": torch.ones(B, T, dtype=torch.int64)}],
        lambda extra: "attention_mask" in extra,
    ),
)
def test_gpt2_of_transformers(recompute, extra):
    """None of its blocks is ours, nor is what turns its recompute on."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=T, n_layer=2, n_embd=C, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model, batch = transformers.GPT2LMHeadModel(config), dict(input_ids=IDS, labels=LABELS) | extra
    step = plan_step(model, batch, adamw, blocks=model.transformer.h, recompute=recompute)
    if recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        again = plan_step(model, batch, adamw, blocks=model.transformer.h)  # by its own switch
        assert again.peak == step.peak
    # (A mask on fake tensors only would be 20 KiB.)
    assert step.peak == pytest.approx(measured(model, batch), abs=IDS.nbytes)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("device_type", rest_slow(["cpu", "cuda", "mps"], "cuda".__eq__))
def test_minigpt_is_one_of_them(recompute, device_type):
    """The planner that knows it says the same, to the byte. (In float32. In bfloat16 autocast keeps
    copies of weights here until forward ends, which the trainers turn off.)"""
    config = MiniGPTConfig(V, T, n_layers=5, n_heads=4, d_model=C, d_ff=2 * C, dropout=0.1)
    model = MemorySavingGPT(config)
    how: Any = dict(precision=torch.float32, device_type=device_type)
    planner = Planner(
        config, T, **how, clip_gradients=lambda *_, **__: None,
        make_optimizer=lambda its: torch.optim.AdamW(its.parameters(), fused=True),
    )  # fmt: skip
    known = planner.step(B, recompute=recompute)
    step = plan_step(
        model, (IDS, LABELS), lambda its: torch.optim.AdamW(its, fused=True),
        blocks=model.blocks, recompute=recompute, **how,
    )  # fmt: skip
    for name in ("peak", "kept", "kept_per_block", "peak_location"):
        assert getattr(step, name) == getattr(known, name), name


class SumOf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


def test_cuda_updates_all_weights_at_once_if_nothing_fuses_it():
    """A tensor of their size lies beside them. A CPU updates one weight after the other."""

    def plan(device_type: str, **how: bool) -> StepMemory:
        model, make = nn.Sequential(nn.Linear(C, C), SumOf()), partial(torch.optim.AdamW, **how)
        return plan_step(model, X, make, device_type=device_type)

    def update(step: StepMemory) -> int:
        return step.bytes_after_each_op[step.phase_slice("optimizer")].max()

    told, fused = plan("cuda"), plan("cuda", fused=True)
    assert update(told) == update(plan("cuda", foreach=True)) > update(plan("cpu"))
    assert update(told) >= update(fused) + 4 * C * C and "hint" not in str(fused)
    assert str(told).endswith(f"fused=True), it is {format_bytes(told.peak - fused.peak)} less")


def test_a_printed_step_is_a_verdict():
    """Where its peak is, its kinds that count, its five largest groups by the names of modules."""
    model = Tied()
    step = plan_step(model, (IDS, LABELS), adamw, blocks=model.blocks)
    kinds = {kind for kind, n in step.bytes_by_kind_at_peak.items() if n >= step.peak / 100}
    first, *lines = str(step).splitlines()
    assert re.fullmatch(f"peak +{format_bytes(step.peak)}  {step.peak_location}", first)
    named = {name for name, _ in step.largest_at_peak}
    assert {line[21:] for line in lines} == kinds | named >= {"3 x blocks.*: softmax"}


def state_of(model: nn.Module) -> Any:
    tensors = [*model.parameters(), *model.buffers()]
    hooks = [(m._forward_hooks, m._forward_pre_hooks, m._backward_hooks) for m in model.modules()]
    return (
        [(id(t), t._version, t.data_ptr(), t.grad, t.tolist()) for t in tensors],
        [tuple(map(dict, its)) for its in hooks],
        ["forward" in vars(module) for module in model.modules()],
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_stays_as_it_is(fails):
    model = Tied((lambda loss, logits: 1 / 0) if fails else RETURNS["a tensor"])
    before = state_of(model)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        plan_step(model, (IDS, LABELS), adamw, blocks=model.blocks, recompute="full")
    assert state_of(model) == before
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


class Decides(nn.Linear):
    """By what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).sum()
        return y if y > 0 else -y


def refused(
    words: str, model: Any = None, batch: Any = (IDS, LABELS), make: Any = adamw, **how: Any
) -> Any:
    return pytest.param(model or Tied, batch, make, how, words, id=words)


@pytest.mark.parametrize(
    ("model", "batch", "make", "how", "words"),
    [
        refused("model: call .train()", lambda: Tied().eval()),
        refused("batch: a dict", batch=IDS),
        refused("optimizer: a function", make=with_momentum([nn.Parameter(torch.ones(1))])),
        refused("optimizer: make it of", make=lambda _: adamw([nn.Parameter(torch.ones(1))])),
        refused("none of its weights is trained", lambda: Tied().requires_grad_(False)),
        refused("blocks: a list", blocks=[]),
        refused("blocks: some are no modules", blocks=[nn.Linear(C, C)]),
        refused("recompute: none or full, not cheap", recompute="cheap"),
        refused("recompute: full needs blocks", recompute="full"),
        refused("precision: one of", precision=torch.int8),
        refused("device_type: cpu, cuda, mps: tpu?", device_type="tpu"),
        refused("forward returns no loss", lambda: Tied(lambda loss, logits: logits)),
        refused("returns no loss", lambda: Tied(lambda loss, logits: loss.detach())),
        refused("returns no loss (", lambda: Tied(lambda loss, logits: SimpleNamespace(loss=None))),
        refused("needs the value of a tensor", lambda: Decides(C, C), X),
    ],
)
def test_a_line_says_what_is_wrong(model, batch, make, how, words):
    with pytest.raises(ValueError, match=re.escape(words)) as refusal:
        plan_step(model(), batch, make, **how)
    assert "\n" not in str(refusal.value)


def test_the_shown_lines_print_what_is_shown():
    """Those of docs/seeing.md, word by word."""
    pytest.importorskip("transformers")
    section = (ROOT / "docs/seeing.md").read_text("utf-8").split("## Any other model")[1]
    code, printed = re.findall(r"```(?:python)?\n(.*?)```", section, re.S)[:2]
    with redirect_stdout(StringIO()) as out:
        exec(code, {})
    assert out.getvalue() == printed


def test_the_general_half_imports_neither_the_model_nor_its_memory():
    """What planner/any_model.py needs, with all that this imports, knows no MiniGPT."""
    half, to_read = set(), {"planner/any_model.py", "planner/record.py", "planner/cards.py"}
    while to_read:
        half |= to_read
        to_read = {name for file in to_read for name in imports(file)} - half
    assert "planner/simulate.py" in half and all(name.startswith("planner/") for name in half)
