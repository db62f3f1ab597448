"""Offload: store the tensors that blocks keep for backward in CPU memory, not on the GPU.

With the policy `full`, each block keeps one tensor. (Its offload is cpu_checkpointing in DeepSpeed,
and the default in Unsloth.) Offload only copies bytes, so results stay bitwise equal.

On a GPU the copies run at the same time as the computation, because Python only queues work in
*streams* and does not wait for the GPU. Each stream does its work in order, and waits for another
stream only where Python queues such a wait. Offload uses three streams: *compute* runs the model,
*out* copies tensors to the CPU, and *home* copies tensors back to the GPU.

    event                              work that Python puts into a stream
    forward of block i keeps a tensor  out:      wait for compute; copy the tensor to the CPU
    forward has kept two more tensors  compute:  wait for that copy; then free the tensor's memory
    backward of block i + 1 begins     home:     wait for compute; copy the tensor to new GPU memory
    backward of block i needs it       compute:  wait for that copy; use the tensor

While backward of block i + 1 runs, therefore, only the tensors of block i are copied back.

Compute waits for the copy to the CPU because the allocator gives freed memory at once to the next
request on the same stream: the order of that stream separates the old use from the new use, but a
copy on another stream is not in this order. Therefore compute allocates and frees all GPU memory
here, and waits for each copy that uses it. (With `record_stream` the allocator would wait for
copies, but learns late that a copy is done, takes other memory until then, and saves nothing.)

On a CPU, where the planner simulates steps, the same code makes ordinary copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

MIN_OFFLOAD_BYTES = 2**20  # bytes; a smaller tensor is not worth a copy and stays on the device
MAX_COPIES_IN_FLIGHT = 2  # the compute stream waits for each copy to the CPU except the 2 newest


class PinnedPool:
    """A pool of host buffers (in CPU memory), which keeps them from step to step, because pinning a
    buffer takes milliseconds.

    torch pins only sizes of 2^n bytes: 532 MiB are split over buffers of 512, 16 and 4 MiB.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.buffers: list[Tensor] = []  # all host buffers, uint8
        self.free_buffers: dict[int, list[Tensor]] = {}  # bytes -> the free buffers of that size

    def acquire_buffers(self, like: Tensor) -> list[Tensor]:
        """Return host buffers for a 1-D tensor, or raise MemoryError if memory cannot be pinned."""
        pinned = like.device.type == "cuda"  # without pinning, no copy can overlap computation
        buffers: list[Tensor] = []
        try:
            for size in split_into_buffer_sizes(like.nbytes):
                buffers.append(self.reuse_or_allocate(size, pinned))
        except RuntimeError as error:
            self.return_buffers(buffers)
            if not pinned or "out of memory" not in str(error):
                raise
            raise MemoryError(
                f"offload found no {like.nbytes / 2**20:,.0f} MiB more of pinned CPU memory: "
                "use smaller batches, or no offload"
            ) from error
        return buffers

    def reuse_or_allocate(self, size: int, pinned: bool) -> Tensor:
        """Return a host buffer of `size` bytes: a free one, or else a new one."""
        if unused := self.free_buffers.get(size):
            return unused.pop()
        block = torch.empty(size, dtype=torch.uint8, device=self.device, pin_memory=pinned)
        self.buffers.append(block)
        return block

    def return_buffers(self, buffers: list[Tensor]) -> None:
        """Return host buffers to the pool."""
        for block in buffers:
            self.free_buffers.setdefault(block.nbytes, []).append(block)


def split_into_buffer_sizes(n: int) -> list[int]:
    """Return the sizes in bytes of the host buffers for `n` bytes, the largest first: at most six
    powers of two, whose sum is at least n and at most n * 33 / 32 (below 1 KiB: n + 15)."""
    unit = max(16, 2 ** n.bit_length() // 64)
    units = -(-n // unit)
    return [unit << i for i in reversed(range(units.bit_length())) if units >> i & 1]


def host_buffer_bytes(n: int) -> int:
    """Return the total bytes of the host buffers for a tensor of `n` bytes."""
    return sum(split_into_buffer_sizes(n))


def split_over_buffers(flat: Tensor, buffers: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Split a 1-D tensor over host buffers: return (part of the tensor, its place in a buffer)."""
    rooms = [block.view(flat.dtype) for block in buffers]
    parts = flat.tensor_split([*accumulate(map(len, rooms[:-1]))])  # the last may fill it in part
    return [(part, room[: len(part)]) for part, room in zip(parts, rooms, strict=True)]


class Offload:
    """Offload for one forward: copy tensors to the CPU, and back before a block's backward."""

    def __init__(self, pool: PinnedPool):
        self.pool = pool
        self.at_work: list[nn.Module] = []  # the blocks that run now
        self.weights: set[ref[UntypedStorage]] | None = None  # storages of `at_work`'s weights
        # (tensor, event after its copy). This reference keeps the tensor's memory during the copy.
        self.in_flight: deque[tuple[Tensor, Any]] = deque()
        self.newest = OffloadedStorages()  # tickets of the block or group that ran last

    def wrap(
        self, run: Callable[[Tensor], Tensor], moves: bool, blocks: list[nn.Module]
    ) -> Callable[..., Tensor]:
        """Wrap `run`, which runs `blocks`, and offload the tensors that they keep if `moves`."""

        def run_with_hooks(x: Tensor, *more: Any, **named: Any) -> Tensor:
            before, mine = self.newest, OffloadedStorages()
            self.at_work = blocks
            self.weights, pack = None, partial(self.pack, mine)
            with saved_tensors_hooks(pack, unpack) if moves else nullcontext():
                x = run(x, *more, **named)
            if before:
                # Backward of these blocks begins when it has the gradient of x. Start then to copy
                # back the tensors of the block before, which backward needs next.
                x.register_hook(lambda _: prefetch_all(before))
            self.newest = mine
            return x

        return run_with_hooks

    def pack(self, tickets: OffloadedStorages, tensor: Tensor) -> Any:
        """Return what autograd keeps instead of `tensor`, and `unpack` turns into `tensor` again.

        The object is a ticket (OffloadedStorage) with the tensor's size, strides and offset. All
        tensors in one storage share its ticket, so that the storage of q, k and v is copied once. A
        weight or a small tensor stays on the device.
        """
        storage = tensor.untyped_storage()
        reference = ref(storage)
        if storage.nbytes() < MIN_OFFLOAD_BYTES or self.is_weight(reference):
            # Without detach, an operator that saves its own result would never be freed (a cycle).
            return tensor.detach()
        key = reference, tensor._version, tensor.dtype  # each change in place makes a new version
        ticket = tickets.get(key)
        if ticket is None:
            flat = (storage.nbytes() // tensor.itemsize,)
            whole = tensor.detach().as_strided(flat, (1,), 0)  # detach: do not keep the graph
            ticket = tickets[key] = OffloadedStorage(
                whole, self.pool, self.pool.acquire_buffers(whole)
            )
            self.in_flight.append((whole, ticket.sent))
            self.wait_for_copies(MAX_COPIES_IN_FLIGHT)
        return ticket, tensor.size(), tensor.stride(), tensor.storage_offset()

    def is_weight(self, storage: ref[UntypedStorage]) -> bool:
        """Return whether a storage belongs to a weight of the running blocks, which stays on the
        device. (Autocast's copies of weights do not count as weights.)

        Storages are compared, because a linear layer saves weight.t(), which is no Parameter.
        """
        # Collect the storages while the block runs, because sharded weights are gathered only then.
        if self.weights is None:
            weights = (weight for block in self.at_work for weight in block.parameters())
            self.weights = {ref(weight.untyped_storage()) for weight in weights}
        return storage in self.weights

    def wait_for_copies(self, still: int = 0) -> None:
        """Let the compute stream (not Python) wait for the copies to the CPU, except for the last
        `still`, and release the tensors that they read."""
        while len(self.in_flight) > still:
            whole, sent = self.in_flight.popleft()
            copy_streams(whole.device).compute_stream().wait_event(sent)
            del whole  # only after wait_event, or its memory could be reused during the copy


def unpack(kept: Any) -> Tensor:
    """Return the tensor that `pack` replaced by `kept`."""
    return kept if isinstance(kept, Tensor) else kept[0].fetch_storage().as_strided(*kept[1:])


class OffloadedStorage:
    """A ticket: one storage that was copied to CPU memory, and can be copied back to the device. It
    exists as long as autograd keeps a tensor of that storage."""

    def __init__(self, whole: Tensor, pool: PinnedPool, buffers: list[Tensor]):
        self.device, self.pool, self.buffers = whole.device, pool, buffers
        self.numel, self.dtype = whole.numel(), whole.dtype
        self.back: Tensor | None = None  # the copy on the device, finished or not
        self.streams = copy_streams(self.device)
        # `out` waits for the compute stream, which computes the tensor and has waited (in
        # `fetch_storage` or `__del__`) for the last copy that read these host buffers.
        self.streams.out.wait_stream(self.streams.compute_stream())
        self.sent = self.streams.copy(self.streams.out, split_over_buffers(whole, buffers))

    def prefetch(self) -> None:
        """Start the copy back to the device, unless the copy has already started."""
        if self.back is not None:
            return
        self.computing = self.streams.compute_stream()
        back = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        # `home` waits for the compute stream, which may still use the memory of `back` for an
        # earlier tensor. The copy to the CPU has then ended, too, because the compute stream has
        # waited for it (in `wait_for_copies`).
        self.streams.home.wait_stream(self.computing)
        homewards = ((block, part) for part, block in split_over_buffers(back, self.buffers))
        self.arrived = self.streams.copy(self.streams.home, homewards)
        self.back = back

    def fetch_storage(self) -> Tensor:
        """Return the storage on its device, as a 1-D tensor that the compute stream may use."""
        self.prefetch()
        assert self.back is not None
        self.streams.compute_stream().wait_event(self.arrived)
        return self.back

    def __del__(self) -> None:
        # The copy back may still be running, if backward failed before it called `fetch_storage`.
        if self.back is not None:
            self.computing.wait_event(self.arrived)
        self.pool.return_buffers(self.buffers)


# Live tickets of one block or group, by (storage, version, dtype).
OffloadedStorages = WeakValueDictionary[
    tuple[ref[UntypedStorage], int, torch.dtype], OffloadedStorage
]


def prefetch_all(tickets: OffloadedStorages) -> None:
    """Start to copy a block's storages back: the last one first, as backward needs it first."""
    for ticket in reversed(list(tickets.values())):
        ticket.prefetch()


class CopyStreams:
    """The three streams of a device; on a CPU, a stream runs each operation immediately."""

    def __init__(self, device: torch.device):
        self.device, self.api = device, torch.cuda if device.type == "cuda" else torch.cpu
        self.out, self.home = self.api.Stream(device), self.api.Stream(device)

    def compute_stream(self) -> Any:
        """Return the compute stream, which is the current stream."""
        return self.api.current_stream(self.device)

    def copy(self, stream: Any, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Queue copies (source, destination) on `stream`; return the event after the last copy."""
        with self.api.stream(stream):
            for source, to in pairs:
                to.copy_(source, non_blocking=self.device.type == "cuda")
        return stream.record_event()


copy_streams = lru_cache(CopyStreams)  # one for each device
