"""The head: from the last hidden states to the loss, without ever holding all logits.

For a small GPT it, not the blocks, is the first wall. With 50,257 tokens in the vocabulary the
logits, their log-softmax and its gradient take 12 bytes for each of N * V entries, in bfloat16 two
or four more: 1.2 GB at B=2, T=1024. Two ideas, one class each:

    ChunkedHeadLoss    cut into chunks of tokens, and only one chunk's logits are alive
    TiedLookup         the head's weight is the token embedding's: two gradients, one buffer

Letters: B batch, T time, N tokens (B * T), n tokens of a chunk, r of a slice, C channels,
V vocabulary.
"""

import math
import re
from collections.abc import Callable, Iterable
from functools import cache

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Bytes of logits that are alive at a time: little beside a step, enough tokens for fast matmuls.
CHUNK = 5 * 2**24
# Elements that are worked on at a time in float32: 16 MiB, which stay in the cache of an A100, an
# H100 or an RTX 4090 (40 to 72 MB).
SLICE = 2**22
PAD = 64  # tensor cores want rows of logits whose length is a multiple of it
# Rows of a slice, too, are a multiple of something: each slice of float32 then begins at a multiple
# of 16 bytes, which is what compiled code has been promised (others it would copy).
ROWS = 4


def parse_release(version: str) -> tuple[int, ...]:
    """The release that a build of torch is of, or is to become: "2.11.0a0+cu130" -> (2, 11).

    torch.__version__ >= "2.11" would be False for it, as a release's first builds come before it.
    """
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


# Can a matmul of low precision add to a float32 matrix? torch.addmm can, with out_dtype, from 2.11
# on (pytorch#167931), but not on AMD's GPUs.
ADDS_IN_FLOAT32 = parse_release(torch.__version__) >= (2, 11) and torch.version.hip is None
Embed = Callable[[nn.Embedding, Tensor], tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor, Tensor, int], Tensor]
Softmax = Callable[[Tensor, Tensor, bool], Tensor]  # `softmax_in_place`, or compiled


def embed_tied(
    embedding: nn.Embedding, ids: Tensor, plain: Embed, on_cpu: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Look up token ids (B, T) int64: their vectors (B, T, C), and the weight (V, C) for the head.
    `plain`: model.py's own, for evaluation, and for any other kind of embedding.

    A CPU adds the rows' gradients one after the other, always in the same order. A GPU would add
    them as they come, and no two runs would be the same: so it makes the whole gradient, sorted by
    id. `on_cpu` None: as the weight's device is. (The planner plans for a GPU on a CPU.)
    """
    special = embedding.padding_idx is not None or embedding.max_norm is not None
    if not torch.is_grad_enabled() or special or type(embedding) is not nn.Embedding:
        return plain(embedding, ids)
    if on_cpu is None:
        on_cpu = embedding.weight.device.type == "cpu"
    return TiedLookup.apply(embedding.weight, ids, on_cpu)


class TiedLookup(torch.autograd.Function):
    """(weight, ids) -> F.embedding(ids, weight), and the weight once more, for the head.

    So the weight has one use, and backward of that gets both gradients: first the head's, which
    has been waiting since backward began, then the embedding's, which is added to it in place.
    Left to autograd, both (V, C) would be there before they are added; with GPT-2's vocabulary and
    `full` recompute nothing else in a step is as large.
    """

    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor, row_by_row: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weight, ids)
        ctx.row_by_row = row_by_row
        return F.embedding(ids, weight), weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_embedded: Tensor, grad_weight: Tensor):
        weight, ids = ctx.saved_tensors  # (autograd makes zeros of a gradient that is not there)
        if ctx.row_by_row:
            grad_weight.index_add_(0, ids.flatten(), grad_embedded.flatten(0, -2))
            return grad_weight, None, None
        # A slice of channels at a time, or there would be a second (V, C) after all.
        n_slices = math.ceil(weight.numel() / (2 * SLICE))
        for total, part in zip(
            grad_weight.chunk(n_slices, dim=1), grad_embedded.chunk(n_slices, dim=-1), strict=True
        ):
            total += torch.ops.aten.embedding_dense_backward(part, ids, len(weight), -1, False)
        return grad_weight, None, None


def softmax_in_place(logits: Tensor, target: Tensor, wants_gradient: bool) -> Tensor:
    """The log-likelihood (r, 1) of the `target`s (r, 1), by (r, V) `logits`. Afterwards those are
    the softmax if somebody `wants_gradient`, else anything."""
    # A sum over a vocabulary needs float32. (float32 and float64 stay the logits themselves.)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # CPU and CUDA kernels read a row before they write it, so `out` may alias. MPS: unknown.
    exact = torch.log_softmax(exact, 1, out=None if logits.is_mps else exact)
    found = exact.gather(1, target)
    if wants_gradient:
        # (The compiler fuses all this, and knows no `out` of other strides.)
        if torch.compiler.is_compiling() or logits.is_mps:
            logits.copy_(exact.exp())
        elif logits.is_cuda:
            torch.exp(exact, out=logits)  # rounded on the way
        else:  # of a softmax the same one again; a CPU takes for it half of the time of exp
            logits.copy_(torch.softmax(exact, 1, out=exact))
    return found


@cache
def compiled_softmax() -> Softmax:
    return torch.compile(softmax_in_place)


def head_loss(
    x: Tensor, weight: Tensor, labels: Tensor, n_chunks: int, plain: Loss, compiled: bool = False
) -> Tensor:
    """Mean cross-entropy of the head's logits, in nats.

    Args:
        x: (B, T, C) what the last LayerNorm returns.
        weight: (V, C) the head's weight.
        labels: (B, T) int64, -100 = no loss here.
        n_chunks: 1 = all tokens at once, by `plain`, model.py's own; n = in n chunks, never more
            than one chunk of logits alive; 0 = as few as `count_chunks` finds small enough.
        compiled: the softmax of a slice runs as compiled code.
    """
    if n_chunks == 1:
        return plain(x, weight, labels, n_chunks)
    softmax = compiled_softmax() if compiled else softmax_in_place
    x, labels = x.flatten(0, 1), labels.flatten()  # (N, C), (N,)
    if torch.is_grad_enabled():
        return ChunkedHeadLoss.apply(x, weight, labels, n_chunks, softmax)
    total, count = loss_by_chunks(x, weight, labels, n_chunks, softmax)
    return total / count


def count_chunks(n_tokens: int, vocab_size: int, asked: int, itemsize: int) -> int:
    """In how many chunks the head runs. `asked`: 0 = chunks of `CHUNK` bytes; `itemsize`: bytes of
    a logit."""
    return max(1, min(asked or math.ceil(n_tokens * vocab_size * itemsize / CHUNK), n_tokens))


def rows_of_slice(n_tokens: int, vocab_size: int) -> int:
    """Tokens whose softmax is taken at a time: about `SLICE` logits; or a 32nd of a chunk that
    somebody asked to be far larger, as each launch costs time, too."""
    rows = max(SLICE // vocab_size, n_tokens // 32)
    return min(n_tokens, max(ROWS, rows // ROWS * ROWS))


def starts_of_chunks(n_tokens: int, n: int) -> Iterable[int]:
    """The first token of each chunk, of `n` tokens but for the last. (They are alike, so the
    planner puts in a few of them for all: planner/step.py.)"""
    return range(0, n_tokens, n)


class ChunkedHeadLoss(torch.autograd.Function):
    """The loss, chunk by chunk, with its gradients taken inside forward.

    Plain autograd would keep every chunk's log-softmax until backward, and a checkpoint around a
    chunk would compute its logits twice. But the loss is the end of the graph: all that backward
    multiplies its gradients with is one number. So they are taken while the chunk's logits live.

    Until backward they are those of the sum of all losses: of the mean they would be too small for
    float16, and GradScaler's factor comes only then.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, labels: Tensor, n_chunks: int, softmax: Softmax
    ) -> Tensor:
        gradients = torch.empty_like(x), torch.zeros_like(weight)
        total, count = loss_by_chunks(x, weight, labels, n_chunks, softmax, gradients)
        ctx.save_for_backward(*gradients, count)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):
        grad_x, grad_weight, count = ctx.saved_tensors  # in place: nobody else needs them
        factor = grad_loss / count.clamp(min=1)
        return grad_x.mul_(factor), grad_weight.mul_(factor), None, None, None


def loss_by_chunks(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    n_chunks: int,
    softmax: Softmax,
    gradients: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum of the losses, and of how many tokens; writes the sum's gradients to `gradients`, of
    x (N, C) and of the weight (V, C, 0s).

    A chunk of logits, in the matmuls' precision, is large enough to make them fast. Its softmax
    runs in float32, in slices that stay in a cache. The gradient takes the logits' place: one
    buffer serves all chunks.
    """
    N, V = len(x), len(weight)
    cast_weight = cast_by_autocast(weight)  # (V + padding, C)
    dtype = cast_weight.dtype
    n = math.ceil(N / count_chunks(N, V, n_chunks, dtype.itemsize))
    r = rows_of_slice(n, V)
    buffer = x.new_empty(n, len(cast_weight), dtype=dtype)

    sums = torch.promote_types(dtype, torch.float32)
    count = (labels != -100).sum().to(sums)  # stays on the device: reading it would stall a GPU
    total = torch.zeros_like(count)
    for start in starts_of_chunks(N, n):
        chunk = slice(start, start + n)
        x_chunk, label = x[chunk].to(dtype), labels[chunk].unsqueeze(1)
        kept = label != -100
        target = label.where(kept, 0)
        padded = torch.mm(x_chunk, cast_weight.T, out=buffer[: len(x_chunk)])  # the padding is 0
        logits, found = padded[:, :V], torch.empty_like(target, dtype=sums)  # (n, V), (n, 1)
        for i in range(0, len(logits), r):
            part = slice(i, i + r)
            found[part] = softmax(logits[part], target[part], gradients is not None)
        total -= found.where(kept, 0).sum()
        if gradients is not None:
            # At the target 1 is taken off, in float32: of a softmax near 1 little remains.
            logits.scatter_(1, target, found.expm1().to(dtype))
            gradients[0][chunk] = (padded @ cast_weight).mul_(kept)
            x_chunk = x_chunk * kept
            add_product(gradients[1], logits.T, x_chunk)
    return total, count


def cast_by_autocast(weight: Tensor) -> Tensor:
    """By hand, and once, what autocast would do for each matmul: a copy in lower precision. A copy
    can have rows of zeros at its end, with which tensor cores are faster."""
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    if dtype == weight.dtype:
        return weight
    copy = weight.new_zeros(len(weight) + -len(weight) % PAD, weight.size(1), dtype=dtype)
    copy[: len(weight)] = weight
    return copy


def rows_of_product(width: int) -> int:
    """Rows that `add_product` adds at a time; a multiple of PAD, as matmuls want to begin there."""
    return max(PAD, SLICE // width // PAD * PAD)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total` += `a` @ `b`, added up in the precision of `total`, without a second one of it."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda and total.dtype == torch.float32 and ADDS_IN_FLOAT32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        rows = rows_of_product(total.size(1))
        for part, a_part in zip(total.split(rows), a.split(rows), strict=True):
            part += a_part @ b
