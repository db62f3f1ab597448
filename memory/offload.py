"""Offload: what the blocks keep for backward waits in CPU memory.

With `full` that is one tensor a block. DeepSpeed calls it cpu_checkpointing, Unsloth does it by
default. It is exact: a copy out and a copy home.

On a GPU the copies run beside the computation. Python only fills queues there, *streams*, and is
far ahead. Each stream does its own work in order, and knows nothing of the others, unless it is
told to wait for one. There are three here: one computes, one copies out, one copies home.

    when                             what is queued
    forward keeps a tensor           out:        wait until it is computed; copy it to the CPU
    two tensors later                computing:  wait for that copy; then its memory is free
    backward of the next block       home:       wait until its new memory is free; copy it home
    backward of this block needs it  computing:  wait for that copy; go on

So the tensors of one block come home while another's backward is at work, and no more.

Why does the stream that computes wait for the copy out? Freed memory goes to whoever asks next *on
the same stream*, at once: the queue keeps the two apart. So the computing stream allocates and
frees all memory here, and waits for what another one does to it. (With `record_stream` the
allocator would wait instead: until it finds that a copy is done, which is late, other memory is
taken, and nothing is saved.)

On a CPU, which the planner plans with too, the same lines make plain copies.
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

SMALL = 2**20  # bytes; what is smaller stays: it is not worth a copy
IN_FLIGHT = 2  # tensors that may be on their way out before the computing stream waits


class HostMemory:
    """CPU memory in blocks of bytes: `take` lends some, `give_back` takes them again.

    It outlives a step, because pinning takes milliseconds a block. torch pins blocks of 2^n bytes
    only. So a tensor lives in several of them, 532 MiB in 512 + 16 + 4.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.made: list[Tensor] = []  # all blocks, of bytes
        self.unused: dict[int, list[Tensor]] = {}  # size -> those that are not in use

    def take(self, like: Tensor) -> list[Tensor]:
        """Blocks for the 1-D `like`. Raises MemoryError if there is none left to pin."""
        pinned = like.device.type == "cuda"  # others cannot be copied beside the computation
        blocks: list[Tensor] = []
        try:
            for size in sizes_of_blocks(like.nbytes):
                blocks.append(self.unused_or_new(size, pinned))
        except RuntimeError as error:
            self.give_back(blocks)
            if not pinned or "out of memory" not in str(error):
                raise
            more = f"{like.nbytes / 2**20:,.0f} MiB more of pinned CPU memory"
            way_out = "use smaller batches, or do without it"
            raise MemoryError(f"offload found no {more}: {way_out}") from error
        return blocks

    def unused_or_new(self, size: int, pinned: bool) -> Tensor:
        if unused := self.unused.get(size):
            return unused.pop()
        block = torch.empty(size, dtype=torch.uint8, device=self.device, pin_memory=pinned)
        self.made.append(block)
        return block

    def give_back(self, blocks: list[Tensor]) -> None:
        for block in blocks:
            self.unused.setdefault(block.nbytes, []).append(block)


def sizes_of_blocks(n: int) -> list[int]:
    """At most six powers of two, the largest first, that are `n` bytes in all, or up to 1 / 32 more
    (of less than 1 KiB up to 15 bytes)."""
    unit = max(16, 2 ** n.bit_length() // 64)
    units = -(-n // unit)
    return [unit << i for i in reversed(range(units.bit_length())) if units >> i & 1]


def bytes_of_blocks(n: int) -> int:
    return sum(sizes_of_blocks(n))


def dealt(flat: Tensor, blocks: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of a 1-D tensor, and the places in its blocks where they live."""
    begin = 0
    for block in blocks:
        room = block.view(flat.dtype)
        part = flat[begin : begin + len(room)]
        yield part, room[: len(part)]
        begin += len(part)


class Offload:
    """What the blocks of one forward keep: sent away as they run, fetched as backward comes."""

    def __init__(self, host: HostMemory):
        self.host = host
        self.at_work: list[nn.Module] = []  # the blocks that run now
        self.weights: set[ref[UntypedStorage]] | None = None  # theirs
        # What is being copied out must not be freed yet: (tensor, its copy is done).
        self.in_flight: deque[tuple[Tensor, Any]] = deque()
        self.newest = Tickets()  # of the block that ran last

    def around(
        self, run: Callable[[Tensor], Tensor], moves: bool, blocks: list[nn.Module]
    ) -> Callable[..., Tensor]:
        """`run`, which runs these blocks; if it `moves`, what they keep goes away."""

        def run_with_hooks(x: Tensor, past: None = None) -> Tensor:
            before, mine = self.newest, Tickets()
            self.at_work = blocks
            self.weights, pack = None, partial(self.pack, mine)
            with saved_tensors_hooks(pack, unpack) if moves else nullcontext():
                x = run(x)
            if before:
                # The gradient of x is the first that backward brings to these blocks.
                x.register_hook(lambda _: fetch_all(before))
            self.newest = mine
            return x

        return run_with_hooks

    def pack(self, tickets: Tickets, tensor: Tensor) -> Any:
        """What autograd keeps instead of `tensor`: a ticket for its storage, and where in it it is.
        (q, k and v are views of one storage, which travels once.)"""
        storage = tensor.untyped_storage()
        reference = ref(storage)
        if storage.nbytes() < SMALL or self.is_weight(reference):
            return tensor.detach()  # (an operator that keeps its own result would keep itself)
        key = reference, tensor._version, tensor.dtype  # (changed in place, it is another one)
        ticket = tickets.get(key)
        if ticket is None:
            flat = (storage.nbytes() // tensor.itemsize,)
            whole = tensor.detach().as_strided(flat, (1,), 0)  # (it must not hold the graph)
            ticket = tickets[key] = Ticket(whole, self.host, self.host.take(whole))
            self.in_flight.append((whole, ticket.sent))
            self.settle(IN_FLIGHT)
        return ticket, tensor.size(), tensor.stride(), tensor.storage_offset()

    def is_weight(self, storage: ref[UntypedStorage]) -> bool:
        """Weights stay. They are told by their storage: what a linear layer saves is weight.t(),
        which is no Parameter. (Autocast's copies of weights are tensors like others.)"""
        if self.weights is None:  # only now, in a block: if they are sharded, its own are whole now
            weights = (weight for block in self.at_work for weight in block.parameters())
            self.weights = {ref(weight.untyped_storage()) for weight in weights}
        return storage in self.weights

    def settle(self, still: int = 0) -> None:
        """Let go of what was sent, all but the last `still` tensors."""
        while len(self.in_flight) > still:
            whole, sent = self.in_flight.popleft()
            streams(whole.device).computing().wait_event(sent)
            del whole  # not before


def unpack(kept: Any) -> Tensor:
    """What backward gets."""
    return kept if isinstance(kept, Tensor) else kept[0].take().as_strided(*kept[1:])


class Ticket:
    """One storage in CPU memory, and how it comes home. It lives as long as autograd keeps a tensor
    of that storage."""

    def __init__(self, whole: Tensor, host: HostMemory, blocks: list[Tensor]):
        self.device, self.host, self.blocks = whole.device, host, blocks
        self.numel, self.dtype = whole.numel(), whole.dtype
        self.back: Tensor | None = None  # on its device again, or on the way there
        self.streams = streams(self.device)
        # The tensor must be computed; and who read the blocks last was waited for by `take`.
        self.streams.out.wait_stream(self.streams.computing())
        self.sent = self.streams.copy(self.streams.out, dealt(whole, blocks))

    def fetch(self) -> None:
        """Start to bring it home, unless it is on its way."""
        if self.back is not None:
            return
        self.computing = self.streams.computing()
        back = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        # Who had this memory before may still be at work. (That the tensor is in the blocks, the
        # computing stream has waited for already: `settle`.)
        self.streams.home.wait_stream(self.computing)
        homewards = ((block, part) for part, block in dealt(back, self.blocks))
        self.arrived = self.streams.copy(self.streams.home, homewards)
        self.back = back

    def take(self) -> Tensor:
        """The storage on its device, as a 1-D tensor, for the computing stream to use."""
        self.fetch()
        assert self.back is not None
        self.streams.computing().wait_event(self.arrived)
        return self.back

    def __del__(self) -> None:
        if self.back is not None:  # perhaps nobody took it: a backward that was given up
            self.computing.wait_event(self.arrived)
        self.host.give_back(self.blocks)


# The tickets of one block, by what they are for; those that live.
Tickets = WeakValueDictionary[tuple[ref[UntypedStorage], int, torch.dtype], Ticket]


def fetch_all(tickets: Tickets) -> None:
    """Start to bring home all that a block has kept; what backward asks for first comes first."""
    for ticket in reversed(list(tickets.values())):
        ticket.fetch()


class Streams:
    """The three queues of a device. (torch.cpu's do at once what they are told.)"""

    def __init__(self, device: torch.device):
        self.device, self.api = device, torch.cuda if device.type == "cuda" else torch.cpu
        self.out, self.home = self.api.Stream(device), self.api.Stream(device)

    def computing(self) -> Any:
        return self.api.current_stream(self.device)

    def copy(self, stream: Any, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Queue copies on `stream`, (from, to); the event that is returned tells: all are done."""
        with self.api.stream(stream):
            for source, to in pairs:
                to.copy_(source, non_blocking=self.device.type == "cuda")
        return stream.record_event()


streams = lru_cache(Streams)  # each device has its own
