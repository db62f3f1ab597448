"""The head: from the last hidden states to the loss, without ever holding all logits.

For a small GPT it, not the blocks, is the first wall. With 50,257 tokens in the vocabulary the
logits, their log-softmax and its gradient take 12 bytes for each of N * V entries, in bfloat16 two
or four more: 1.2 GB at B=2, T=1024. Two ideas, one class each:

    ChunkedHeadLoss    cut into chunks of tokens, and only one chunk's logits are alive
    TiedLookup         the head's weight is the token embedding's: two gradients, one buffer

Letters: B batch, T time, N tokens (B * T), n tokens of a chunk, C channels, V vocabulary.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

CHUNK = 2**23  # elements: 32 MB in float32 are little beside a step, and enough for a fast matmul


class TiedEmbedding(nn.Embedding):
    """Both ends of a GPT: token ids to vectors, and vectors to logits, by one weight (V, C).

    `forward` is nn.Embedding's, (B, T) int64 -> (B, T, C); `logits` and `loss` are the head.
    """

    for_head: Tensor | None = None  # the weight, on its way from the lookup to the head

    def forward(self, ids: Tensor) -> Tensor:
        embedded, self.for_head = TiedLookup.apply(self.weight, ids)
        return embedded

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, V)."""
        return F.linear(x, self.take_weight())

    def loss(self, x: Tensor, labels: Tensor, n_chunks: int) -> Tensor:
        """The mean loss of `head_loss`, without logits in between."""
        return head_loss(x, self.take_weight(), labels, n_chunks)

    def take_weight(self) -> Tensor:
        """As the lookup returned it; `self.weight` itself would get a second gradient buffer."""
        weight, self.for_head = self.for_head, None
        return self.weight if weight is None else weight


class TiedLookup(torch.autograd.Function):
    """(weight, ids) -> F.embedding(ids, weight), and the weight once more, for the head.

    So the weight has one use, and backward of that gets both gradients: first the head's, which
    has been waiting since backward began, then the embedding's, which is added to it in place.
    Left to autograd, both (V, C) would be there before they are added; with GPT-2's vocabulary and
    `full` recompute nothing else in a step is as large.
    """

    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weight, ids)
        return F.embedding(ids, weight), weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_embedded: Tensor, grad_weight: Tensor):
        weight, ids = ctx.saved_tensors  # (autograd makes zeros of a gradient that is not there)
        # A slice of channels at a time, or there would be a second (V, C) after all.
        n_slices = math.ceil(weight.numel() / CHUNK)
        for total, part in zip(
            grad_weight.chunk(n_slices, dim=1), grad_embedded.chunk(n_slices, dim=-1), strict=True
        ):
            total += torch.ops.aten.embedding_dense_backward(part, ids, len(weight), -1, False)
        return grad_weight, None


def head_loss(x: Tensor, weight: Tensor, labels: Tensor, n_chunks: int) -> Tensor:
    """Mean cross-entropy of the head's logits, in nats.

    Args:
        x: (B, T, C) what the last LayerNorm returns.
        weight: (V, C) the head's weight.
        labels: (B, T) int64, -100 = no loss here.
        n_chunks: 1 = all tokens at once; n = in n chunks, never more than one chunk of logits
            alive; 0 = choose n (1 if all logits are no more than one chunk).
    """
    x, labels = x.flatten(0, 1), labels.flatten()  # (N, C), (N,)
    n_chunks = count_chunks(labels.numel(), weight.size(0), n_chunks)
    if n_chunks <= 1:
        return F.cross_entropy(at_least_float32(F.linear(x, weight)), labels)
    if torch.is_grad_enabled():
        return ChunkedHeadLoss.apply(x, weight, labels, n_chunks)
    total = sum(
        F.cross_entropy(at_least_float32(F.linear(x_chunk, weight)), label_chunk, reduction="sum")
        for x_chunk, label_chunk in zip(x.chunk(n_chunks), labels.chunk(n_chunks), strict=True)
    )
    return total / (labels != -100).sum()


def count_chunks(n_tokens: int, vocab_size: int, asked: int = 0) -> int:
    """In how many chunks the head runs; `asked`: 0 = chunks of about `CHUNK` logits."""
    return min(asked or math.ceil(n_tokens * vocab_size / CHUNK), n_tokens)


def at_least_float32(logits: Tensor) -> Tensor:
    """A sum over a vocabulary needs it; float64 stays what it is."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class ChunkedHeadLoss(torch.autograd.Function):
    """The loss, chunk by chunk, with its gradients taken inside forward.

    Plain autograd would keep every chunk's log-softmax until backward, and checkpointing the
    chunks would compute their logits twice. But the loss is the end of the graph: the only thing
    that backward multiplies its gradients with is one number. So they can be taken right away,
    while the chunk's logits are alive, and nothing is computed twice.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, labels: Tensor, n_chunks: int) -> Tensor:
        # Under autocast each F.linear would cast the weight again: cast it once, by hand.
        device_type = x.device.type
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else weight.dtype
        cast_weight = weight.detach().to(dtype)
        count = (labels != -100).sum()  # stays on the device: reading it would stall a GPU
        # float16 ends at 6e-8. The usual cure, GradScaler's factor, comes only in backward, when
        # these gradients are long made; so they carry a factor of their own (a power of two:
        # exact), about the number of tokens, which undoes the mean's division.
        scale = 2.0 ** math.floor(math.log2(labels.numel())) if dtype == torch.float16 else 1.0

        exact = torch.promote_types(dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=x.device)
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        for x_chunk, label_chunk, grad_x_chunk in zip(
            x.detach().chunk(n_chunks),
            labels.chunk(n_chunks),
            grad_x.chunk(n_chunks),
            strict=True,
        ):
            # The identity hooks keep this small graph to itself: whoever counts or offloads what
            # the model keeps for backward must not see tensors that are gone a line later.
            with torch.enable_grad(), saved_tensors_hooks(lambda t: t, lambda t: t):
                logits = F.linear(x_chunk.requires_grad_(), cast_weight)  # (n, V)
                edge = get_gradient_edge(logits)  # where its gradient arrives: backward ends there
                loss = F.cross_entropy(at_least_float32(logits), label_chunk, reduction="sum")
                loss = loss / count
                del logits
                (grad_logits,) = torch.autograd.grad(loss * scale, edge)
            total += loss.detach()
            del loss, edge
            # The rest by hand, as it can add to what is there: to write a (V, C) gradient for each
            # chunk would take as long as the matmul. (Autocast does not cast for addmm_.)
            x_chunk = x_chunk.detach().to(dtype)
            grad_x_chunk.copy_(grad_logits @ cast_weight)
            if dtype == grad_weight.dtype:
                grad_weight.addmm_(grad_logits.T, x_chunk)
            else:
                grad_weight += grad_logits.T @ x_chunk
            del grad_logits  # not beside the next chunk's logits
        ctx.save_for_backward(grad_x.div_(scale), grad_weight.div_(scale))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):
        grad_x, grad_weight = ctx.saved_tensors  # in place: nobody else needs them
        return grad_x.mul_(grad_loss), grad_weight.mul_(grad_loss), None, None
