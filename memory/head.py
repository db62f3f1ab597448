"""Loss of the head, computed without all logits at once.

In a small GPT the head needs more memory than the blocks: without chunks, three float32 tensors of
N * V elements exist at once (log-softmax, its gradient, and the gradient of the logits), which take
1.2 GB for B = 2, T = 1024 and V = 50257. This file has two techniques, each in one class:

    ChunkedHeadLoss          compute the loss chunk by chunk, with the logits of one chunk at a time
    TiedEmbeddingFunction    use one buffer for both gradients of the weight that the embedding
                             and the head share

Shapes: B batch size, T tokens per sequence, N = B * T tokens, n tokens per chunk, r tokens per
slice, C channels, V vocabulary size.
"""

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Maximal bytes of a chunk of logits: far fewer than a step needs, but enough for fast matmuls.
LOGITS_CHUNK_BYTES = 5 * 2**24
# Number of float32 elements in a slice of logits: 16 MiB, so that a slice fits in the cache of an
# A100, an H100 or an RTX 4090 (40 to 72 MB).
SOFTMAX_SLICE_ELEMENTS = 2**22
VOCAB_MULTIPLE = 64  # tensor cores are faster if a row of logits has a multiple of 64 elements
# The number of rows of a slice is a multiple of this, so that each float32 slice begins at a
# multiple of 16 bytes, as compiled code expects; it would copy a slice without this alignment.
SLICE_ROWS_MULTIPLE = 4
# True if torch.addmm can add a low-precision matmul to a float32 matrix (`out_dtype`,
# pytorch#167931), which does not work on AMD's GPUs.
HAS_ADDMM_OUT_DTYPE = torch.version.hip is None
TargetLogProbFn = Callable[..., Tensor]  # `target_log_prob_`, eager or compiled


class TiedEmbeddingFunction(torch.autograd.Function):
    """Return F.embedding(ids, weight) (B, T, C), and the weight (V, C) again for the head.

    With the weight as a second result, autograd sees only one use of it. `backward` gets the head's
    gradient (V, C), which exists during all of backward, and adds the gradient of the vectors (B,
    T, C) to it in place. Autograd alone would make another (V, C) tensor, which, with GPT-2's
    vocabulary and `full` recompute, is the largest tensor that a step computes.

    `row_by_row`: add the rows of the vectors' gradient one by one, as on a CPU.
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
        # A few channels at a time, because all together would need a second (V, C) tensor.
        n_slices = math.ceil(weight.numel() / (2 * SOFTMAX_SLICE_ELEMENTS))
        for total, part in zip(
            grad_weight.chunk(n_slices, dim=1), grad_embedded.chunk(n_slices, dim=-1), strict=True
        ):
            total += torch.ops.aten.embedding_dense_backward(part, ids, len(weight), -1, False)
        return grad_weight, None, None


def target_log_prob_(
    logits: Tensor, target: Tensor, write_softmax: bool, device_type: str
) -> Tensor:
    """Return the log-probability (r, 1) that `logits` (r, V) give to the `target` ids (r, 1).

    Overwrite `logits`: with their softmax if `write_softmax`, else with undefined values.
    `device_type`: use the operators that are fast on this type of device.
    """
    # A sum over the vocabulary needs float32. (`exact` may be `logits` itself.)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # A row is read before it is written (on MPS this is unknown), so `out` may be the input.
    exact = torch.log_softmax(exact, 1, out=None if logits.is_mps else exact)
    found = exact.gather(1, target)
    if write_softmax:
        # torch.compile fuses exp and copy_; its `out` must not have other strides than `exact`.
        if torch.compiler.is_compiling() or logits.is_mps:
            logits.copy_(exact.exp())
        elif device_type == "cuda":
            torch.exp(exact, out=logits)  # `out` also rounds to the precision of `logits`
        else:  # softmax(log_softmax(x)) = softmax(x). On a CPU, softmax is twice as fast as exp
            logits.copy_(torch.softmax(exact, 1, out=exact))
    return found


@cache
def compile_target_log_prob() -> TargetLogProbFn:
    """Return `target_log_prob_` as compiled code."""
    return torch.compile(target_log_prob_)


def chunked_head_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    n_chunks: int,
    device_type: str,
    compiled: bool = False,
) -> Tensor:
    """Return the mean cross-entropy of the head's logits, in nats, a scalar.

    Args:
        x: (B, T, C) the result of the last LayerNorm.
        weight: (V, C) the head's weight.
        labels: (B, T) int64. Labels of -100 are ignored.
        n_chunks: number of chunks of tokens. Only one chunk of logits exists at a time. 0: let
            `count_chunks` choose the number.
        device_type: use the operators that are fast on this type of device.
        compiled: compile the softmax of a slice.
    """
    softmax = compile_target_log_prob() if compiled else target_log_prob_
    x, labels = x.flatten(0, 1), labels.flatten()  # (N, C), (N,)
    if torch.is_grad_enabled():
        return ChunkedHeadLoss.apply(x, weight, labels, n_chunks, device_type, softmax)
    total, count = loss_sum_and_count(x, weight, labels, None, n_chunks, device_type, softmax)
    return total / count


def count_chunks(n_tokens: int, vocab_size: int, n_chunks: int, itemsize: int) -> int:
    """Return the number of chunks into which the head splits the tokens: at most `n_tokens`.

    `n_chunks`: the wanted number; 0: as few chunks as possible, each of at most LOGITS_CHUNK_BYTES.
    `itemsize`: bytes of a logit.
    """
    return max(
        1,
        min(n_chunks or math.ceil(n_tokens * vocab_size * itemsize / LOGITS_CHUNK_BYTES), n_tokens),
    )


def softmax_slice_rows(n_tokens: int, vocab_size: int) -> int:
    """Return the number of tokens of a slice, in a chunk of `n_tokens`.

    Softmax runs slice by slice, with about `SOFTMAX_SLICE_ELEMENTS` logits in a slice. A very large
    chunk is split into about 32 larger slices instead, because each slice costs kernel launches.
    """
    rows = max(SOFTMAX_SLICE_ELEMENTS // vocab_size, n_tokens // 32)
    return min(
        n_tokens, max(SLICE_ROWS_MULTIPLE, rows // SLICE_ROWS_MULTIPLE * SLICE_ROWS_MULTIPLE)
    )


def chunk_starts(n_tokens: int, n: int) -> Iterable[int]:
    """Return the first token of each chunk of `n` tokens, of which the last may have fewer.

    (Chunks are alike, so planner/step.py replaces this function and runs at most three chunks.)
    """
    return range(0, n_tokens, n)


class ChunkedHeadLoss(torch.autograd.Function):
    """Compute the mean loss (a scalar) chunk by chunk, and the gradients already in forward.

    Autograd would keep the log-softmax of every chunk until backward, and an activation checkpoint
    around a chunk would compute the chunk's logits twice. But the loss is the end of the graph:
    backward only multiplies the loss's gradients by one number, so forward can already compute the
    gradients of a chunk, while the chunk's logits exist.

    Until backward, these gradients are those of the sum of all losses. Gradients of the mean would
    be too small for float16, because GradScaler's factor is applied only in backward.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, labels: Tensor, *how: Any) -> Tensor:
        gradients = torch.empty_like(x), torch.zeros_like(weight)
        total, count = loss_sum_and_count(x, weight, labels, gradients, *how)
        ctx.save_for_backward(*gradients, count)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):
        grad_x, grad_weight, count = ctx.saved_tensors  # overwritten below: no other code uses them
        factor = grad_loss / count.clamp(min=1)
        return grad_x.mul_(factor), grad_weight.mul_(factor), None, None, None, None


def loss_sum_and_count(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    gradients: tuple[Tensor, Tensor] | None,
    n_chunks: int,
    device_type: str,
    softmax: TargetLogProbFn,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses in nats, and the number of labels that are not -100, as scalars.

    x (N, C), weight (V, C), labels (N,) int64. `gradients`: (grad_x, grad_weight) to fill with the
    sum's gradients. grad_x (N, C) is overwritten; grad_weight (V, C) sums all chunks: pass zeros.

    Matmuls run on one chunk at a time, in autocast's precision, and softmax on one slice of the
    chunk at a time, in float32, so that the slice stays in a GPU's cache. The gradient of the
    logits overwrites the logits, in a buffer that all chunks share.
    """
    N, V = len(x), len(weight)
    cast_weight = cast_and_pad(weight)  # (V + padding, C)
    dtype = cast_weight.dtype
    n = math.ceil(N / count_chunks(N, V, n_chunks, dtype.itemsize))
    r = softmax_slice_rows(n, V)
    buffer = x.new_empty(n, len(cast_weight), dtype=dtype)

    sums = torch.promote_types(dtype, torch.float32)
    count = (labels != -100).sum().to(sums)  # a tensor: reading it would stall a GPU
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
            found[part] = softmax(logits[part], target[part], gradients is not None, device_type)
        total -= found.where(kept, 0).sum()
        if gradients is not None:
            # The gradient at the target is softmax - 1, computed in float32 from the log-softmax,
            # because a rounded softmax near 1 would leave few correct digits.
            logits.scatter_(1, target, found.expm1().to(dtype))
            gradients[0][chunk] = (padded @ cast_weight).mul_(kept)
            x_chunk = x_chunk * kept
            addmm_into(gradients[1], logits.T, x_chunk, device_type)
    return total, count


def cast_and_pad(weight: Tensor) -> Tensor:
    """Return `weight` (V, C), or under autocast its low-precision copy (V + padding, C).

    Autocast would make such a copy for each matmul; here all matmuls share one. Rows of zeros at
    its end make the number of rows a multiple of `VOCAB_MULTIPLE`, for fast tensor cores.
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


def weight_rows_per_addmm(width: int) -> int:
    """Return the number of rows that `addmm_into` adds at a time, for rows of `width` elements: a
    multiple of `VOCAB_MULTIPLE`, because a matmul that starts at such a multiple is faster."""
    return max(VOCAB_MULTIPLE, SOFTMAX_SLICE_ELEMENTS // width // VOCAB_MULTIPLE * VOCAB_MULTIPLE)


def addmm_into(total: Tensor, a: Tensor, b: Tensor, device_type: str) -> None:
    """Add `a` (V, n) @ `b` (n, C) to `total` (V, C) in place, in the precision of `total`, without
    a second tensor of its size."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif device_type == "cuda" and total.dtype == torch.float32 and HAS_ADDMM_OUT_DTYPE:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        rows = weight_rows_per_addmm(total.size(1))
        for part, a_part in zip(total.split(rows), a.split(rows), strict=True):
            part += a_part @ b
