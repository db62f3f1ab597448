"""The head in chunks: the same loss and gradients as at once, and never all logits.

That they are right at all: test_oracle.py.
"""

import pytest
import torch
import torch.nn.functional as F
from test_model import TINY, random_ids, tiny
from torch import Tensor, nn

from memory import MemorySavingGPT
from model import MiniGPT, MiniGPTConfig
from planner.op_recorder import OpRecorder


def head_loss(x: Tensor, weight: Tensor, labels: Tensor, loss_chunks: int) -> Tensor:
    return tiny(loss_chunks=loss_chunks).head_loss(x, weight, labels)


def head_inputs(n_tokens: int, vocab_size: int = 97, channels: int = 16):
    torch.manual_seed(1)
    x = torch.randn(1, n_tokens, channels, requires_grad=True)
    weight = (0.1 * torch.randn(vocab_size, channels)).requires_grad_()
    labels = torch.randint(0, vocab_size, (1, n_tokens))
    return x, weight, labels


def head_with_gradients(x, weight, labels, n_chunks: int):
    """Loss, and its gradients."""
    loss = head_loss(x, weight, labels, n_chunks)
    return loss, *torch.autograd.grad(loss, (x, weight))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "n_tokens"), [(97, 250), (64, 256), (1, 250)])
def test_chunked_head_in_bfloat16(vocab_size, n_tokens, weights):
    """As near to the truth, which float64 knows, as autograd's own; also of a weight that is in
    bfloat16 already. (64 columns are not padded.)"""
    x, weight, labels = head_inputs(n_tokens, vocab_size, channels=64)
    low = weight.detach().bfloat16().requires_grad_()
    rounded, wide = (part.detach().bfloat16().double().requires_grad_() for part in (x, low))
    exact = head_with_gradients(rounded, wide, labels, 1)
    weight = low if weights == torch.bfloat16 else weight
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        plain, chunked = (head_with_gradients(x, weight, labels, n) for n in (1, 4))
    for truth, by_autograd, ours in zip(exact, plain, chunked, strict=True):
        errors = [(value - truth).norm().item() for value in (by_autograd, ours)]
        assert errors[1] <= (1.5 if weight is low else 1.2) * errors[0] + 1e-9
        assert ours.dtype == by_autograd.dtype


@pytest.mark.parametrize(
    ("shape", "n_labels", "rare"),
    [((1024, 4096, 16), 1024, 100), *(((2**16, 7, 4), n, 0) for n in (0, 1, 3))],
)
def test_chunked_head_in_float16(shape, n_labels, rare):
    """A token that never is the label gets gradients of p / N: nearly nothing in float16. And the
    mean may be over few labels: nothing in float16 may be N times as large."""
    x, weight, labels = head_inputs(*shape)
    labels %= rare or shape[1]
    labels.view(-1)[n_labels:] = -100
    exact = head_with_gradients(x, weight, labels, 4)
    with torch.autocast("cpu", torch.float16):
        found = head_with_gradients(x, weight, labels, 4)
    for a, b in zip(exact[1:], found[1:], strict=True):
        assert (a - b).norm() <= 5e-3 * a.norm()
    assert (exact[2] - found[2])[rare:].norm() <= 0.01 * exact[2][rare:].norm()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("asked", "rows"), [(0, 7), (2, 32), (3, 22)])
def test_only_so_many_logits_at_a_time(monkeypatch, asked, rows, grad):
    """With and without gradients; 64 tokens, and room for the logits of 7 if it may choose."""
    monkeypatch.setattr("memory.head.LOGITS_CHUNK_BYTES", 7 * 97 * 4)
    monkeypatch.setattr("memory.head.SOFTMAX_SLICE_ELEMENTS", 5 * 97)
    x, weight, labels = head_inputs(64)
    ran: list[tuple[str, float]] = []
    monkeypatch.setattr(
        OpRecorder, "record_op", lambda _, operator, given, results: ran.extend(
            (operator.overloadpacket.__name__, result.numel() / 97) for result in results
        ),
    )  # fmt: skip
    with torch.set_grad_enabled(grad), OpRecorder():
        head_loss(x, weight, labels, asked)
    chunks = [min(rows, 64 - start) for start in range(0, 64, rows)]
    assert [rows for name, rows in ran if name == "mm" and rows.is_integer()] == chunks
    slices = [min(4, n - start) for n in chunks for start in range(0, n, 4)]
    assert [rows for name, rows in ran if name == "log_softmax"] == slices


def tied_gradients(loss_chunks: int, device_type: str) -> dict[str, Tensor]:
    model, ids = tiny(device_type, loss_chunks=loss_chunks), random_ids(4, 16)
    model(ids, ids.roll(-1, 1)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("two", "slices"), [(61 * 32, 1), (61 * 16, 2), (300, 7), (300, "on a CPU")]
)
def test_the_embeddings_gradient_comes_in_as_few_slices_as_may_be(monkeypatch, two, slices):
    """And on a CPU row by row."""
    on_cpu = slices == "on a CPU"
    whole = tied_gradients(4, "cuda")
    monkeypatch.setattr("memory.head.SOFTMAX_SLICE_ELEMENTS", two // 2)
    with OpRecorder() as log:  # (chunks of the head would be in slices, too)
        sliced = tied_gradients(1, "cpu" if on_cpu else "cuda")
    names = [op.name for op in log.ops]
    assert names.count("embedding_dense_backward") == (0 if on_cpu else slices) + 1
    assert names.count("index_add_") == on_cpu
    torch.testing.assert_close(sliced, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("lookups", "heads"), [(1, 0), (0, 1), (1, 2), (0, 2)])
def test_the_tied_weight_gets_the_gradients_of_all_its_uses(lookups, heads):
    x, weight, labels = head_inputs(32, vocab_size=61)
    embedding, gradients = nn.Embedding(61, 16, _weight=weight.detach()), []
    for model_class in (MiniGPT, MemorySavingGPT):
        model = model_class(MiniGPTConfig(**TINY))
        model.token_embedding = embedding
        embedded, tied = model.embed(labels)
        losses = [F.cross_entropy(F.linear(x, tied)[0], labels[0]) for _ in range(heads)]
        losses += [embedded.square().sum()] * lookups
        gradients += torch.autograd.grad(sum(losses), embedding.weight)
    torch.testing.assert_close(*gradients)


def test_the_loss_of_a_model_in_bfloat16_is_exact_in_one_chunk_as_well():
    losses = [tiny(loss_chunks=n).bfloat16()(*[random_ids(2, 16)] * 2) for n in (1, 2)]
    assert {loss.dtype for loss in losses} == {torch.float32}
    torch.testing.assert_close(*losses, rtol=1e-2, atol=0)


def test_backward_twice_is_refused_not_wrong():
    ids = random_ids(4, 16)
    loss = tiny(loss_chunks=4)(ids, ids)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
