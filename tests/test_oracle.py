"""Right, not only consistent: against a model, an optimizer and a sampler that are not ours.

Everywhere else two paths of ours are compared, and both could be wrong. Here loss and the gradient
of every parameter, what a step changes, and which tokens it sees are computed by harness/oracle.py,
which shares no line with ours. (test_weights.py asks Hugging Face's GPT-2.)
"""

import math

import numpy as np
import pytest
import torch
from harness import oracle
from harness.runs import parse, ready

from memory import POLICY_NAMES, MemorySavingGPT
from model import MiniGPT, MiniGPTConfig
from train_minimal import derive_seed, evaluate, learning_rate, train_step

SHAPE = dict(vocab_size=61, max_position_embeddings=20, n_layers=3, n_heads=2, d_model=16, d_ff=48)
LAYERS, HEADS = 3, 2
pytestmark = pytest.mark.usefixtures("everything_travels")

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
MEMORY = [
    *({"recompute": policy} for policy in POLICY_NAMES),
    {"recompute": "mlp:1"},
    {"recompute": "full/2"},
    {"recompute": "full+offload"},
]


def make(dtype: torch.dtype, **memory) -> MiniGPT:
    torch.manual_seed(0)
    model = MemorySavingGPT(MiniGPTConfig(**SHAPE, dropout=0.0, **memory)).to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():  # not zero biases and unit gains, which hide mistakes
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def micro_batches(n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for i in range(n):
        ids, labels = torch.randint(0, 61, (2, 3, 17), generator=generator)
        labels[i, ::5] = -100
        batches.append((ids, labels))
    return batches


@pytest.fixture(scope="module", params=TOLERANCE, ids=str)
def expected(request):
    """dtype; losses and gradients that the plain GPT makes of two micro-batches."""
    weights = make(request.param).state_dict()
    return request.param, *oracle.loss_and_gradients(weights, micro_batches(2), LAYERS, HEADS)


@pytest.mark.parametrize("loss_chunks", [0, 1, 4])
@pytest.mark.parametrize("memory", MEMORY, ids=str)
def test_loss_and_every_gradient(expected, memory, loss_chunks):
    """Losses relative; a gradient's worst entry in units of the gradient's largest."""
    dtype, losses, gradients = expected
    model = make(dtype, loss_chunks=loss_chunks, **memory)
    found = [model(*batch) for batch in micro_batches(2)]
    (sum(found) / 2).backward()
    assert [x.item() for x in found] == pytest.approx(losses, rel=TOLERANCE[dtype])
    for name, parameter in model.named_parameters():
        error = (parameter.grad - gradients[name]).abs().max() / gradients[name].abs().max()
        assert error.item() < TOLERANCE[dtype], name


@pytest.mark.parametrize(("training", "p"), [(True, 0.5), (False, 0.0)])
@pytest.mark.parametrize("memory", MEMORY, ids=str)
def test_dropout_is_where_gpt2_has_it(memory, training, p, monkeypatch):
    """Made visible: here it does not drop, it multiplies by 1 + p."""
    real = torch.nn.functional.scaled_dot_product_attention

    def visible(x, p, training=True, inplace=False):
        return x * (1 + p) if training else x

    def attention(q, k, v, dropout_p, is_causal):
        return (1 + dropout_p) * real(q, k, v, is_causal=is_causal)

    def drop(x):
        return x * (1 + p)

    monkeypatch.setattr("torch.nn.functional.dropout", visible)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", attention)
    model = MemorySavingGPT(MiniGPTConfig(**SHAPE, dropout=0.5, **memory)).double().train(training)
    ((ids, _),) = micro_batches(1)
    expected = oracle.gpt_logits(model.state_dict(), ids, LAYERS, HEADS, drop, drop)
    torch.testing.assert_close(model(ids), expected, rtol=1e-10, atol=1e-10)


# ---- the step


def start(tmp_path, *flags: str):
    run = ready(tmp_path, "--no-amp", "--dropout=0", *flags)
    run.model.double()  # then rounding cannot hide a mistake, nor look like one
    run.model.train()
    return run


def rows_of(batches) -> list[list[int]]:
    """All windows of a data set, as lists."""
    ids, labels = batches.read_inputs_and_labels(np.arange(batches.n_windows))
    return torch.cat([ids, labels[:, -1:]], 1).tolist()


def test_steps_are_the_formulas(tmp_path):
    """Three whole steps of the trainer: tokens, losses, norm, rate, update."""
    flags = "--grad-accum-steps=2 --grad-clip-norm=0.5 --lr=0.01 --min-lr=0.001 --warmup-steps=2"
    run = start(tmp_path, *flags.split(), "--weight-decay=0.3", "--num-steps=5")
    windows = rows_of(run.training_batches)
    weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    optimizer = oracle.AdamW(weights, decay=0.3, limit=0.5)
    half_way_down = 0.001 + 0.009 * (1 + math.cos(math.pi / 3)) / 2
    for step, lr in enumerate([0.005, 0.01, half_way_down], 1):
        numbers = (2 * step - 2, 2 * step - 1)
        batches = [oracle.training_batch(windows, 2, 3, number) for number in numbers]
        losses, gradients = oracle.loss_and_gradients(weights, batches, 2, 2)
        norm = optimizer.step(weights, gradients, lr)
        run.step = step
        found, found_norm = train_step(run)
        assert found.tolist() == pytest.approx(losses, rel=1e-6)
        assert norm > 0.5  # it was limited
        assert found_norm.item() == pytest.approx(norm, rel=1e-10)
        for name, parameter in run.model.named_parameters():
            torch.testing.assert_close(parameter.detach(), weights[name], rtol=1e-9, atol=1e-9)
            assert parameter.grad is None


def test_seeds_are_what_they_were():
    """A snapshot of last year must go on to the same bits; torch takes 63 of them."""
    assert derive_seed(1337, 1) == 8311963500192281539
    seeds = [derive_seed(5, number) for number in range(100)]
    assert 0 <= min(seeds) and 2**62 < max(seeds) < 2**63


def test_evaluation_is_the_mean_over_all_tokens(tmp_path):
    """In batches of 5, 5 and 2 windows. (Dealt out to processes: test_torchrun.py.)"""
    run = start(tmp_path, "--batch-size=5", "--loss-chunks=4")
    run.bytes_by_token_id = torch.arange(31) % 3  # toy data has no text: invent one
    ids, labels = oracle.shifted(rows_of(run.val_batches))
    loss = oracle.mean_loss(oracle.gpt_logits(run.model.state_dict(), ids, 2, 2), labels).item()
    n_bytes = sum(token % 3 for token in labels.flatten().tolist())
    bits = loss * labels.numel() / math.log(2) / n_bytes
    found = evaluate(run)
    assert run.model.training
    assert found["val_loss"] == pytest.approx(loss, rel=1e-6)
    assert found["val_ppl"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert found["val_bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    run.bytes_by_token_id = torch.zeros(31)
    assert evaluate(run)["val_bits_per_byte"] is None


COSINE = [(1 + math.cos(math.pi * i / 6)) / 2 for i in range(1, 7)]


@pytest.mark.parametrize(
    ("warmup", "scheduler", "rates"),
    [
        (2, "cosine", [4, 8, *(2 + 6 * share for share in COSINE)]),
        (2, "linear", [4, 8, 7, 6, 5, 4, 3, 2]),
        (4, "constant", [2, 4, 6, 8, 8, 8, 8, 8]),
        (0, "linear", [8 - 6 * i / 8 for i in range(1, 9)]),
        (7, "cosine", [8 * i / 7 for i in range(1, 8)] + [2]),
        (8, "cosine", [1, 2, 3, 4, 5, 6, 7, 8]),
        (9, "cosine", [8 * i / 9 for i in range(1, 9)]),
    ],
)
def test_learning_rates_by_hand(warmup, scheduler, rates):
    schedule = f"--warmup-steps={warmup} --lr-scheduler={scheduler}"
    args = parse(f"--lr=8 --min-lr=2 --num-steps=8 {schedule}")
    assert [learning_rate(step, args) for step in range(1, 9)] == pytest.approx(rates)
    assert parse(f"--lr=8 --min-lr=8 {schedule}").min_lr == 8  # as high as --lr, and no higher
