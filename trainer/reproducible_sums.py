"""Sum gradients in an order that does not depend on the number of processes (--reproducible-sums).

Each addition of floating-point numbers rounds, so a sum depends on the order of its additions.
Accumulation adds micro-batch after micro-batch, and an all-reduce has an order of its own. Here the
gradients g of a step's micro-batches, in the order of their ids, are summed in one binary tree
(pairwise summation), for example of 8 micro-batches:

    ((g0 + g1) + (g2 + g3)) + ((g4 + g5) + (g6 + g7))

The number of micro-batches of a process and the number of processes are powers of two, so that each
process can compute one subtree: of 4 processes, rank 0 computes g0 + g1, and rank 1 g2 + g3. The
processes' sums are then added in the upper levels of the same tree.

With train_fsdp.py rank r computes g_r and g_(4 + r) instead, and the processes' gradients are
summed after each micro-batch, in the lower levels of the tree, so that every pending sum is a
shard.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist  # (some builds of torch have no class in it)
from torch import Tensor, nn
from torch.futures import Future

# The process group and, on a GPU, the stream in which a DDP hook sums.
HookState = tuple["dist.ProcessGroup | None", "torch.cuda.Stream | None"]


class GradientTree:
    """Sum the gradients of this process's micro-batches of a step pairwise, in `.grad`.

    Each gradient is taken out of `.grad` as soon as backward has made it. As in a binary counter, a
    parameter has at most one pending sum of each level of the tree, so at most log2(n).

    Args:
        parameters: parameters whose gradients are summed; (): autograd sums all gradients.
        n: number of micro-batches of this process in a step, a power of two.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], n: int):
        self.n, self.index = n, 0
        self.pending: dict[nn.Parameter, list[Tensor]] = {
            p: [] for p in parameters if p.requires_grad
        }
        for parameter in self.pending:
            parameter.register_post_accumulate_grad_hook(self.add)

    @contextmanager
    def micro_batch(self, index: int) -> Iterator[None]:
        """Context of forward and backward of micro-batch `index`, 0 .. n - 1; after the last one
        `.grad` holds the sums."""
        for parameter, sums in self.pending.items() if index == 0 else ():
            if sums:  # of a step that ran out of memory, and is repeated
                # Put the oldest tensor back. With DDP it is a view of a communication bucket.
                parameter.grad = sums[0].zero_()
                sums.clear()
        self.index = index
        yield
        for parameter in self.pending if index == self.n - 1 else ():
            self.add(parameter)  # has an effect if the last micro-batch gave it no gradient

    def add(self, parameter: nn.Parameter) -> None:
        """Add the gradient of a parameter in the present micro-batch to the tree."""
        sums, total, index = self.pending[parameter], parameter.grad, self.index
        last = index == self.n - 1
        while sums and (index % 2 == 1 or last):  # the sum of the left neighbour is pending
            left = sums.pop()
            total = left if total is None else left.add_(total)
            index //= 2
        if total is not None and not last:
            sums.append(total)
            total = None
        parameter.grad = total


def pairwise_sum(rows: Tensor) -> Tensor:
    """Return the sum (n,) of the rows of `rows` (N, n), which it overwrites. N: a power of two."""
    while len(rows) > 1:
        rows = rows[::2].add_(rows[1::2])
    return rows[0]


def pairwise_all_reduce(x: Tensor, group: "dist.ProcessGroup | None") -> None:
    """Replace x (n,) by its sum over all ranks of `group`. Each rank sums one piece of x, and sends
    as many bytes as in a ring all-reduce."""
    sizes = [len(piece) for piece in x.tensor_split(dist.get_world_size(group))]
    own_sizes = [sizes[dist.get_rank(group)]] * len(sizes)
    rows = x.new_empty(len(sizes), own_sizes[0])  # this rank's piece, from every rank
    dist.all_to_all_single(rows.view(-1), x, own_sizes, sizes, group)
    rows[1:] = pairwise_sum(rows)
    dist.all_to_all_single(x, rows.view(-1), sizes, own_sizes, group)


def pairwise_all_reduce_hook(state: HookState, bucket: "dist.GradBucket") -> Future[Tensor]:
    """Sum a bucket of gradients over all ranks: a communication hook of DistributedDataParallel.

    On a GPU this runs in a stream of its own, beside backward. When backward ends, DDP waits for
    the future, and so for the stream.
    """
    (group, stream), buffer = state, bucket.buffer()
    future: Future[Tensor] = Future(devices=cast(Any, [buffer.device] if stream else []))
    if stream:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # None: no effect
        pairwise_all_reduce(buffer, group)
        future.set_result(buffer)
    return future


class PairwiseReduceScatter:
    """Reduce-scatter for `FSDPModule.set_custom_reduce_scatter`."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor, for the input or the output."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: "dist.ProcessGroup", **_: Any
    ) -> None:
        """Write this rank's part (n,) of the sum of all ranks' `input_tensor` (N * n,) to
        `output_tensor`."""
        rows = torch.empty_like(input_tensor)
        dist.all_to_all_single(rows, input_tensor, group=group)
        output_tensor.copy_(pairwise_sum(rows.view(group.size(), -1)))
