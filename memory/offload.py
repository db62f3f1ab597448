"""Offload: CPU memory holds the tensors that blocks keep for backward.

With `full` that is one tensor a block. DeepSpeed calls it cpu_checkpointing, and Unsloth does it by
default. Offload is exact: it copies bytes to CPU memory and back.

On a GPU these copies run beside the computation. Python only fills queues of work, called
*streams*, and runs far ahead of the GPU. A stream does its own work in order, and ignores the other
streams unless it is told to wait for one. Offload uses three streams: *compute* runs the model,
*out* copies tensors to the CPU, and *home* copies them back.

    when                             queued work
    forward keeps a tensor           out:      wait until it is computed; copy it to the CPU
    forward has kept two more        compute:  wait for that copy; then free the tensor's memory
    backward of the block after it   home:     wait until new memory is free; copy the tensor back
    backward of its block needs it   compute:  wait for that copy; go on

So while backward of one block runs, the tensors for the next backward come back, and no others.

Why does the compute stream wait for the copy out? The allocator gives freed memory at once to the
next request *on the same stream*, because the queue keeps the old and the new use apart. So the
compute stream allocates and frees all GPU memory here, and waits for each copy that uses it. (With
`record_stream` the allocator would wait instead. But it would learn late that a copy is done, take
other memory until then, and save nothing.)

On a CPU, where the planner simulates steps, the same code makes plain copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

MIN_OFFLOAD_BYTES = 2**20  # bytes; a smaller tensor is not worth a copy and stays on the device
MAX_COPIES_IN_FLIGHT = 2  # tensors that may be on their way out before the compute stream waits


class PinnedPool:
    """A pool of host buffers in CPU memory: `acquire_buffers` lends buffers, `release_buffers` gets
    them back.

    The pool outlives a step, because pinning takes milliseconds for each buffer. torch pins buffers
    of 2^n bytes only. So a tensor is split over several buffers: 532 MiB over 512 + 16 + 4.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.buffers: list[Tensor] = []  # all host buffers, uint8
        self.free_buffers: dict[int, list[Tensor]] = {}  # bytes -> the free buffers of that size

    def acquire_buffers(self, like: Tensor) -> list[Tensor]:
        """Return host buffers for the 1-D `like`. Raises MemoryError if no more can be pinned."""
        pinned = like.device.type == "cuda"  # unpinned memory cannot be copied beside computation
        blocks: list[Tensor] = []
        try:
            for size in buffer_sizes(like.nbytes):
                blocks.append(self.reuse_or_allocate(size, pinned))
        except RuntimeError as error:
            self.release_buffers(blocks)
            if not pinned or "out of memory" not in str(error):
                raise
            more = f"{like.nbytes / 2**20:,.0f} MiB more of pinned CPU memory"
            way_out = "use smaller batches, or do without it"
            raise MemoryError(f"offload found no {more}: {way_out}") from error
        return blocks

    def reuse_or_allocate(self, size: int, pinned: bool) -> Tensor:
        """Return a host buffer of `size` bytes."""
        if unused := self.free_buffers.get(size):
            return unused.pop()
        block = torch.empty(size, dtype=torch.uint8, device=self.device, pin_memory=pinned)
        self.buffers.append(block)
        return block

    def release_buffers(self, buffers: list[Tensor]) -> None:
        """Return host buffers to the pool."""
        for block in buffers:
            self.free_buffers.setdefault(block.nbytes, []).append(block)


def buffer_sizes(n: int) -> list[int]:
    """Return the sizes in bytes of the host buffers for `n` bytes, the largest first.

    The sizes are at most six powers of two. Their sum is at least n, and at most n * 33 / 32 (below
    1 KiB: at most n + 15).
    """
    unit = max(16, 2 ** n.bit_length() // 64)
    units = -(-n // unit)
    return [unit << i for i in reversed(range(units.bit_length())) if units >> i & 1]


def pinned_nbytes(n: int) -> int:
    """Return the bytes of all host buffers for `n` bytes."""
    return sum(buffer_sizes(n))


def split_over_buffers(flat: Tensor, buffers: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Split a 1-D tensor over host buffers: yield (part of the tensor, its place in a buffer)."""
    begin = 0
    for block in buffers:
        room = block.view(flat.dtype)
        part = flat[begin : begin + len(room)]
        yield part, room[: len(part)]
        begin += len(part)


class Offload:
    """Offload for one forward: copy out what each block keeps, and fetch it before its backward."""

    def __init__(self, pool: PinnedPool):
        self.pool = pool
        self.at_work: list[nn.Module] = []  # the blocks that run now
        self.weights: set[ref[UntypedStorage]] | None = None  # of those blocks
        # (tensor, event after its copy): this reference keeps the memory until the copy is done.
        self.in_flight: deque[tuple[Tensor, Any]] = deque()
        self.newest = OffloadedStorages()  # of the block or group that ran last

    def wrap(
        self, run: Callable[[Tensor], Tensor], moves: bool, blocks: list[nn.Module]
    ) -> Callable[..., Tensor]:
        """Wrap `run`, which runs `blocks` (one, or a group); if `moves`, offload what they keep."""

        def run_with_hooks(x: Tensor, kv_cache: None = None) -> Tensor:
            before, mine = self.newest, OffloadedStorages()
            self.at_work = blocks
            self.weights, pack = None, partial(self.pack, mine)
            with saved_tensors_hooks(pack, unpack) if moves else nullcontext():
                x = run(x)
            if before:
                # Backward of these blocks begins with the gradient of x. Fetch now the tensors of
                # the blocks before them: backward will need those next.
                x.register_hook(lambda _: prefetch_all(before))
            self.newest = mine
            return x

        return run_with_hooks

    def pack(self, tickets: OffloadedStorages, tensor: Tensor) -> Any:
        """Return the object that autograd keeps instead of `tensor`; `unpack` reverses that.

        The object is a ticket for the tensor's storage, with the tensor's size, strides and offset.
        (q, k and v are views of one storage, which is copied once.) A weight or a small tensor
        stays on the device.
        """
        storage = tensor.untyped_storage()
        reference = ref(storage)
        if storage.nbytes() < MIN_OFFLOAD_BYTES or self.is_weight(reference):
            # Without detach an operator that saves its own result would keep itself alive.
            return tensor.detach()
        key = reference, tensor._version, tensor.dtype  # a change in place makes another version
        ticket = tickets.get(key)
        if ticket is None:
            flat = (storage.nbytes() // tensor.itemsize,)
            whole = tensor.detach().as_strided(flat, (1,), 0)  # detach: do not hold the graph
            ticket = tickets[key] = OffloadedStorage(
                whole, self.pool, self.pool.acquire_buffers(whole)
            )
            self.in_flight.append((whole, ticket.sent))
            self.wait_for_copies(MAX_COPIES_IN_FLIGHT)
        return ticket, tensor.size(), tensor.stride(), tensor.storage_offset()

    def is_weight(self, storage: ref[UntypedStorage]) -> bool:
        """Return whether a storage belongs to a weight of the running blocks: weights stay.

        Compare storages, because a linear layer saves weight.t(), which is no Parameter. Autocast's
        copies of weights do not count as weights.
        """
        # Collect the storages inside the block: sharded weights are gathered only while it runs.
        if self.weights is None:
            weights = (weight for block in self.at_work for weight in block.parameters())
            self.weights = {ref(weight.untyped_storage()) for weight in weights}
        return storage in self.weights

    def wait_for_copies(self, still: int = 0) -> None:
        """Release the tensors that were copied out, all but the last `still`.

        The compute stream first waits for these copies. Python does not wait.
        """
        while len(self.in_flight) > still:
            whole, sent = self.in_flight.popleft()
            copy_streams(whole.device).compute_stream().wait_event(sent)
            del whole  # only after wait_event: else its memory may be reused during the copy


def unpack(kept: Any) -> Tensor:
    """Return the tensor that backward needs for `kept`, the result of `pack`."""
    return kept if isinstance(kept, Tensor) else kept[0].wait().as_strided(*kept[1:])


class OffloadedStorage:
    """One storage in CPU memory, and its way back to the device.

    It lives as long as autograd keeps a tensor of that storage.
    """

    def __init__(self, whole: Tensor, pool: PinnedPool, buffers: list[Tensor]):
        self.device, self.pool, self.buffers = whole.device, pool, buffers
        self.numel, self.dtype = whole.numel(), whole.dtype
        self.back: Tensor | None = None  # the copy on the device, complete or on its way
        self.streams = copy_streams(self.device)
        # Wait for the compute stream. It computes the tensor, and it has waited (in
        # `acquire_buffers` or `__del__`) for the last copy that read these host buffers.
        self.streams.out.wait_stream(self.streams.compute_stream())
        self.sent = self.streams.copy(self.streams.out, split_over_buffers(whole, buffers))

    def prefetch(self) -> None:
        """Start the copy back to the device, unless it has started."""
        if self.back is not None:
            return
        self.computing = self.streams.compute_stream()
        back = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        # The compute stream may still use this memory for the tensor that had it before. This wait
        # covers the copy out, too: the compute stream has waited for that copy in
        # `wait_for_copies`.
        self.streams.home.wait_stream(self.computing)
        homewards = ((block, part) for part, block in split_over_buffers(back, self.buffers))
        self.arrived = self.streams.copy(self.streams.home, homewards)
        self.back = back

    def wait(self) -> Tensor:
        """Return the storage on its device, as a 1-D tensor that the compute stream may use."""
        self.prefetch()
        assert self.back is not None
        self.streams.compute_stream().wait_event(self.arrived)
        return self.back

    def __del__(self) -> None:
        # The copy back may still run if backward failed before it took the storage.
        if self.back is not None:
            self.computing.wait_event(self.arrived)
        self.pool.release_buffers(self.buffers)


# Live tickets of one block or group, by (storage, version, dtype).
OffloadedStorages = WeakValueDictionary[
    tuple[ref[UntypedStorage], int, torch.dtype], OffloadedStorage
]


def prefetch_all(tickets: OffloadedStorages) -> None:
    """Start the copies back of a block's tensors; backward needs the last one first."""
    for ticket in reversed(list(tickets.values())):
        ticket.prefetch()


class CopyStreams:
    """The three streams of a device. On a CPU torch's streams do their work at once."""

    def __init__(self, device: torch.device):
        self.device, self.api = device, torch.cuda if device.type == "cuda" else torch.cpu
        self.out, self.home = self.api.Stream(device), self.api.Stream(device)

    def compute_stream(self) -> Any:
        """Return the compute stream, which is the current stream."""
        return self.api.current_stream(self.device)

    def copy(self, stream: Any, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Queue copies (source, destination) on `stream`; return the event after the last one."""
        with self.api.stream(stream):
            for source, to in pairs:
                to.copy_(source, non_blocking=self.device.type == "cuda")
        return stream.record_event()


copy_streams = lru_cache(CopyStreams)  # one for each device
