"""The head: from the last hidden states to the loss, without all logits at once.

In a small GPT the head, not the blocks, fills memory first. Computed at once, the log-softmax of
the logits, its gradient and the gradient of the logits take 12 bytes for each of N * V entries:
1.2 GB for B=2, T=1024 and a vocabulary of 50,257 tokens. Two ideas help, one class each:

    ChunkedHeadLoss          compute the loss in chunks of tokens; one chunk has logits at a time
    TiedEmbeddingFunction    use one buffer for both gradients of the weight that the embedding
                             and the head share

Shapes: B batch, T time, N tokens (B * T), n tokens of a chunk, r tokens of a slice, C channels,
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

# Bytes of a chunk of logits, at most: small beside a step, enough tokens for fast matmuls.
LOGITS_CHUNK_BYTES = 5 * 2**24
# Elements of a slice of logits in float32. These 16 MiB stay in the cache of an A100, an H100 or an
# RTX 4090 (40 to 72 MB).
SOFTMAX_SLICE_ELEMENTS = 2**22
VOCAB_MULTIPLE = 64  # tensor cores are faster if the length of a row of logits is a multiple of it
# The number of rows of a slice is a multiple of this. So each float32 slice begins at a multiple of
# 16 bytes. Compiled code expects that, and would copy a slice that begins elsewhere.
SLICE_ROWS_MULTIPLE = 4


def parse_release(version: str) -> tuple[int, ...]:
    """Return the release of a torch build as (major, minor): "2.11.0a0+cu130" -> (2, 11).

    (torch.__version__ >= "2.11" is False for this build, because it comes before release 2.11.)
    """
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


# Whether a low-precision matmul can add to a float32 matrix: torch.addmm can with out_dtype, from
# 2.11 on (pytorch#167931), but not on AMD's GPUs.
HAS_ADDMM_OUT_DTYPE = parse_release(torch.__version__) >= (2, 11) and torch.version.hip is None
EmbedCallable = Callable[[nn.Embedding, Tensor], tuple[Tensor, Tensor]]
LossCallable = Callable[[Tensor, Tensor, Tensor, int], Tensor]
SoftmaxCallable = Callable[[Tensor, Tensor, bool], Tensor]  # `target_log_prob_`, plain or compiled


def embed_tied(
    embedding: nn.Embedding, ids: Tensor, plain: EmbedCallable, row_by_row: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Look up ids (B, T) int64: return their vectors (B, T, C), and the weight (V, C) for the head.

    `plain`: `embed` of model.py, for evaluation and for other kinds of embeddings. `row_by_row`:
    make the gradient as on a CPU; None: if the weight is on one. (The planner simulates GPUs on a
    CPU.)

    A CPU adds the gradient's rows one by one, always in the same order. A GPU would add them in a
    random order, and each run would round differently. So a GPU first sorts the ids, and makes the
    whole gradient from them.
    """
    special = embedding.padding_idx is not None or embedding.max_norm is not None
    if not torch.is_grad_enabled() or special or type(embedding) is not nn.Embedding:
        return plain(embedding, ids)
    if row_by_row is None:
        row_by_row = embedding.weight.device.type == "cpu"
    return TiedEmbeddingFunction.apply(embedding.weight, ids, row_by_row)


class TiedEmbeddingFunction(torch.autograd.Function):
    """Return F.embedding(ids, weight) (B, T, C), and the weight (V, C) again for the head.

    So autograd sees one use of the weight, and `backward` gets two gradients: the head's (V, C),
    which has existed since backward began, and the embedding's (B, T, C). It adds the second to the
    first in place. Autograd alone would make a second (V, C) before it adds them. With GPT-2's
    vocabulary and `full` recompute, no other tensor that a step computes is as large.

    `row_by_row`: add the rows of the embedding's gradient one by one, as on a CPU.
    """

    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor, row_by_row: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weight, ids)
        ctx.row_by_row = row_by_row
        return F.embedding(ids, weight), weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_embedded: Tensor, grad_weight: Tensor):
        weight, ids = ctx.saved_tensors  # (autograd passes zeros for a missing gradient)
        if ctx.row_by_row:
            grad_weight.index_add_(0, ids.flatten(), grad_embedded.flatten(0, -2))
            return grad_weight, None, None
        # Take some channels at a time: all at once would need a second (V, C).
        n_slices = math.ceil(weight.numel() / (2 * SOFTMAX_SLICE_ELEMENTS))
        for total, part in zip(
            grad_weight.chunk(n_slices, dim=1), grad_embedded.chunk(n_slices, dim=-1), strict=True
        ):
            total += torch.ops.aten.embedding_dense_backward(part, ids, len(weight), -1, False)
        return grad_weight, None, None


def target_log_prob_(logits: Tensor, target: Tensor, write_softmax: bool) -> Tensor:
    """Return the log-likelihood (r, 1) of the `target` ids (r, 1) for `logits` (r, V).

    If `write_softmax`, `logits` afterwards contain the softmax, else undefined values.
    """
    # A sum over the vocabulary needs float32. For float32 and float64 `exact` is `logits` itself.
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # CPU and CUDA kernels read a row before they write it, so `out` may be the input. MPS: unknown.
    exact = torch.log_softmax(exact, 1, out=None if logits.is_mps else exact)
    found = exact.gather(1, target)
    if write_softmax:
        # A compiler fuses these operators. It does not support an `out` with other strides.
        if torch.compiler.is_compiling() or logits.is_mps:
            logits.copy_(exact.exp())
        elif logits.is_cuda:
            torch.exp(exact, out=logits)  # `out` also rounds to the precision of `logits`
        else:  # softmax(log_softmax(x)) = softmax(x), and on a CPU it is twice as fast as exp
            logits.copy_(torch.softmax(exact, 1, out=exact))
    return found


@cache
def compiled_target_log_prob() -> SoftmaxCallable:
    """Return `target_log_prob_` as compiled code."""
    return torch.compile(target_log_prob_)


def head_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    n_chunks: int,
    plain: LossCallable,
    compiled: bool = False,
) -> Tensor:
    """Return the mean cross-entropy of the head's logits, in nats, a scalar.

    Args:
        x: (B, T, C) the result of the last LayerNorm.
        weight: (V, C) the head's weight.
        labels: (B, T) int64; -100: the token does not count.
        n_chunks: number of chunks; only one chunk of logits exists at a time. 0: `count_chunks`
            chooses it. 1: `plain` computes all tokens at once.
        plain: `head_loss` of model.py.
        compiled: compile the softmax of a slice.
    """
    if n_chunks == 1:
        return plain(x, weight, labels, n_chunks)
    softmax = compiled_target_log_prob() if compiled else target_log_prob_
    x, labels = x.flatten(0, 1), labels.flatten()  # (N, C), (N,)
    if torch.is_grad_enabled():
        return ChunkedHeadLoss.apply(x, weight, labels, n_chunks, softmax)
    total, count = loss_by_chunks(x, weight, labels, n_chunks, softmax)
    return total / count


def count_chunks(n_tokens: int, vocab_size: int, n_chunks: int, itemsize: int) -> int:
    """Return the number of chunks of the head, at most one for each token.

    `n_chunks`: this number; 0: as few chunks of at most `LOGITS_CHUNK_BYTES` bytes as possible.
    `itemsize`: bytes of a logit.
    """
    return max(
        1,
        min(n_chunks or math.ceil(n_tokens * vocab_size * itemsize / LOGITS_CHUNK_BYTES), n_tokens),
    )


def softmax_slice_rows(n_tokens: int, vocab_size: int) -> int:
    """Return the number of tokens of a slice, in a chunk of `n_tokens`.

    Softmax runs slice by slice. A slice has about `SOFTMAX_SLICE_ELEMENTS` logits. But even a very
    large chunk has only about 32 slices, because each kernel launch costs time, too.
    """
    rows = max(SOFTMAX_SLICE_ELEMENTS // vocab_size, n_tokens // 32)
    return min(
        n_tokens, max(SLICE_ROWS_MULTIPLE, rows // SLICE_ROWS_MULTIPLE * SLICE_ROWS_MULTIPLE)
    )


def chunk_starts(n_tokens: int, n: int) -> Iterable[int]:
    """Return the first token of each chunk; a chunk has `n` tokens, the last one maybe fewer.

    (Chunks are alike, so planner/step.py replaces this function by one that returns only a few.)
    """
    return range(0, n_tokens, n)


class ChunkedHeadLoss(torch.autograd.Function):
    """Compute the mean loss (a scalar) chunk by chunk, and the gradients already in forward.

    Autograd would keep the log-softmax of every chunk until backward. An activation checkpoint
    around a chunk would compute its logits twice. But the loss is the end of the graph: backward
    only multiplies its gradients by one number. So forward computes the gradients of a chunk while
    the chunk's logits exist.

    Until backward the gradients are those of the sum of all losses. Gradients of the mean would be
    too small for float16, because GradScaler's factor comes only in backward.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, labels: Tensor, n_chunks: int, softmax: SoftmaxCallable
    ) -> Tensor:
        gradients = torch.empty_like(x), torch.zeros_like(weight)
        total, count = loss_by_chunks(x, weight, labels, n_chunks, softmax, gradients)
        ctx.save_for_backward(*gradients, count)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):
        grad_x, grad_weight, count = ctx.saved_tensors  # in place: no other code uses them
        factor = grad_loss / count.clamp(min=1)
        return grad_x.mul_(factor), grad_weight.mul_(factor), None, None, None


def loss_by_chunks(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    n_chunks: int,
    softmax: SoftmaxCallable,
    gradients: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses in nats, and the number of tokens that count, both scalars.

    x (N, C), weight (V, C), labels (N,) int64. `gradients`: two tensors for the gradients of that
    sum; x's (N, C) is overwritten, the weight's (V, C) is added to and must begin as zeros.

    A chunk of logits, in the precision of matmuls, is large enough for fast matmuls. Its softmax
    runs in float32, in slices that stay in a GPU's cache. The gradient of the logits overwrites the
    logits, and all chunks use the same buffer.
    """
    N, V = len(x), len(weight)
    cast_weight = cast_and_pad(weight)  # (V + padding, C)
    dtype = cast_weight.dtype
    n = math.ceil(N / count_chunks(N, V, n_chunks, dtype.itemsize))
    r = softmax_slice_rows(n, V)
    buffer = x.new_empty(n, len(cast_weight), dtype=dtype)

    sums = torch.promote_types(dtype, torch.float32)
    count = (labels != -100).sum().to(sums)  # a tensor: to read it would stall a GPU
    total = torch.zeros_like(count)
    for start in chunk_starts(N, n):
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
            # The gradient at the target is softmax - 1. Compute it in float32 from the logarithm: a
            # rounded softmax near 1 would leave few digits of the difference.
            logits.scatter_(1, target, found.expm1().to(dtype))
            gradients[0][chunk] = (padded @ cast_weight).mul_(kept)
            x_chunk = x_chunk * kept
            addmm_into(gradients[1], logits.T, x_chunk)
    return total, count


def cast_and_pad(weight: Tensor) -> Tensor:
    """Return `weight` (V, C), or under autocast its low-precision copy (V + padding, C).

    Autocast would make such a copy for each matmul; here one copy serves all. It ends in rows of
    zeros up to a multiple of `VOCAB_MULTIPLE`, because tensor cores are faster with them.
    """
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    if dtype == weight.dtype:
        return weight
    copy = weight.new_zeros(
        len(weight) + -len(weight) % VOCAB_MULTIPLE, weight.size(1), dtype=dtype
    )
    copy[: len(weight)] = weight
    return copy


def addmm_rows(width: int) -> int:
    """Return the number of rows that `addmm_into` adds at a time, for rows of `width` elements.

    It is a multiple of `VOCAB_MULTIPLE`, because matmuls are faster if they begin at such a row.
    """
    return max(VOCAB_MULTIPLE, SOFTMAX_SLICE_ELEMENTS // width // VOCAB_MULTIPLE * VOCAB_MULTIPLE)


def addmm_into(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a` (V, n) @ `b` (n, C) to `total` (V, C) in place, in the precision of `total`.

    No second tensor of the size of `total` is made.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda and total.dtype == torch.float32 and HAS_ADDMM_OUT_DTYPE:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        rows = addmm_rows(total.size(1))
        for part, a_part in zip(total.split(rows), a.split(rows), strict=True):
            part += a_part @ b
