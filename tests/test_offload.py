"""Offload on a GPU, without one: is every copy ordered after what it needs?

The real model runs, on a CPU, and its copies on toy streams. A dispatch mode notes which stream
reads and writes which memory, and finds every *race*: two streams touch the same memory, one of
them to write, and nothing says who is first. Freed memory counts as written by the computing
stream: that is whom the allocator gives it to. What has no race has one result, in whatever order
a GPU works. (That it is the right one: here, and in test_recompute.py.)
"""

import gc
from collections import Counter
from collections.abc import Iterable
from typing import Any
from unittest.mock import Mock
from weakref import ref

import pytest
import torch
from test_model import random_ids, tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memory import PinnedPool, offload
from memory.offload import Offload, OffloadedStorages, unpack

Clock = Counter[str]  # how much of each stream is done


class Stream:
    """Does one thing after the other; `done` before the next one."""

    def __init__(self, name: str):
        self.name, self.done = name, Clock()

    def work(self) -> int:
        self.done[self.name] += 1
        return self.done[self.name]

    def wait_event(self, event: Clock) -> None:
        self.done |= event  # of each stream the later

    def wait_stream(self, other: "Stream") -> None:
        self.done |= other.done

    def record_event(self) -> Clock:
        return self.done.copy()


class Memory:
    """A storage: who wrote it last, and who has read it since. (stream, its clock then)"""

    def __init__(self) -> None:
        self.writes: list[tuple[Stream, int]] = []
        self.reads: list[tuple[Stream, int]] = []


class Gpu(TorchDispatchMode):
    """Toy streams, and all that is done on them."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.out, self.home = Stream("main"), Stream("out"), Stream("home")
        self.now = self.main
        self.known: dict[int, tuple[ref, Memory]] = {}  # by address, while they live
        self.races: list[str] = []

    def compute_stream(self) -> Stream:
        return self.main

    def copy(self, stream: Stream, pairs: Iterable[tuple[Tensor, Tensor]]) -> Clock:
        self.now = stream
        for source, to in pairs:
            to.copy_(source)
        self.now = self.main
        return stream.record_event()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [self.memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [self.memory(t) for t in tree_leaves(result) if isinstance(t, Tensor)]
        if func._schema.is_mutable or not all(memory in given for memory in made):  # no view
            for memory in given:
                self.touch(memory, f"{func} reads", memory.writes, memory.reads)
            for memory in made:
                self.write(memory, f"{func} writes")
        return result

    def memory(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.known:
            memory = Memory()

            def freed(_: ref) -> None:
                del self.known[address]
                self.write(memory, "its next owner writes")

            self.known[address] = ref(storage, freed), memory
        return self.known[address][1]

    def write(self, memory: Memory, what: str) -> None:
        self.touch(memory, what, memory.writes + memory.reads, memory.writes)
        memory.writes, memory.reads = memory.writes[-1:], []

    def touch(self, memory: Memory, what: str, before: list, note: list) -> None:
        for stream, then in before:
            if self.now.done[stream.name] < then:
                self.races.append(f"{what}, on {self.now.name}: too early for {stream.name}")
        note.append((self.now, self.now.work()))


@pytest.fixture
def gpu(monkeypatch, everything_travels) -> Gpu:
    toy = Gpu()
    monkeypatch.setattr(offload, "copy_streams", lambda device: toy)
    return toy


def make(policy: str = "full", offloaded: bool = True, **changes):
    changes = {"n_layers": 4, "dropout": 0.1, "loss_chunks": 1} | changes
    return tiny(recompute=policy + "+offload" * offloaded, **changes).train()


def backward_of(model, seed: int = 0) -> list[Tensor]:
    """The gradients of a step."""
    torch.manual_seed(seed)
    ids = random_ids(3, 16)
    model.zero_grad()
    model(ids, ids).backward()
    return [p.grad.clone() for p in model.parameters()]


MODELS: list[dict[str, Any]] = [
    *({"policy": policy} for policy in ("cheap", "selective", "mlp", "full")),
    {"policy": "mlp", "dropout": 0.0},  # (fused attention)
    {"policy": "mlp:2"},
    {"policy": "full/2"},
    {"policy": "full", "n_layers": 1},
]


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_no_order_of_work_on_a_gpu_changes_the_gradients(gpu, model):
    plain, moved = make(**model, offloaded=False), make(**model)
    for seed in range(2):  # buffers are written again
        expected = backward_of(plain, seed)
        with gpu:
            assert all(map(torch.equal, expected, backward_of(moved, seed)))
    assert gpu.races == [] and gpu.main.done["main"] > 0


def test_a_backward_that_is_given_up(gpu):
    """What was on its way is never taken: its memory, and its buffer, are used again."""
    model = make("mlp")

    def give_up(*_: object) -> None:
        raise KeyboardInterrupt

    # When what the next block needs is on its way home.
    handle = model.blocks[3].ln_1.register_full_backward_hook(give_up)
    with pytest.raises(KeyboardInterrupt), gpu:
        backward_of(model)
    gc.collect()
    handle.remove()
    with gpu:
        again = backward_of(model)
    assert gpu.races == []
    assert all(map(torch.equal, again, backward_of(make("mlp", offloaded=False))))


# ---- what travels, and when


def test_what_is_smaller_than_a_megabyte_stays(monkeypatch):
    model, ids = make("mlp", dropout=0.0), random_ids(3, 16)
    backward_of(model)
    assert not model.offload_pool.buffers
    monkeypatch.setattr(offload, "MIN_OFFLOAD_BYTES", 3 * 16 * 32 * 4)  # x is not below it
    backward_of(model)
    x, qkv = (4096, 2048), (16384, 2048)
    of_each = Counter(4 * x + qkv)  # (x, ln_1, attention's output and x2 are of a size)
    of_all = {size: len(blocks) for size, blocks in model.offload_pool.free_buffers.items()}
    assert of_all == {size: 3 * n for size, n in of_each.items()}  # of 4 blocks
    # A forward that is given up lets go of all that it kept, of results that stay here, too.
    kept = ref(model(ids, ids))
    gc.collect()
    pool = model.offload_pool
    assert kept() is None and sum(map(len, pool.free_buffers.values())) == len(pool.buffers)


def test_views_of_one_storage_travel_once(everything_travels):
    sender, tickets, whole = Offload(PinnedPool()), OffloadedStorages(), torch.randn(3, 4, 6)
    views = [whole, whole[1], whole.permute(2, 0, 1)[::2], whole[:, :1].expand(3, 4, 6)]
    kept = [sender.pack(tickets, view) for view in views]
    assert len({id(ticket) for ticket, *_ in kept}) == 1
    for view, one in zip(views, kept, strict=True):
        back = unpack(one)
        assert torch.equal(back, view) and back.stride() == view.stride()
        assert back.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    # What is changed in place, or read as another type, is another tensor.
    kept = [sender.pack(tickets, whole.zero_())]
    kept += [sender.pack(tickets, whole.add_(1)), sender.pack(tickets, whole.view(torch.int32))]
    before, after, bits = map(unpack, kept)
    assert not before.any() and torch.equal(after, torch.ones(3, 4, 6))
    assert torch.equal(bits, whole.view(torch.int32)) and bits.dtype == torch.int32


# ---- what only a GPU does


@pytest.mark.parametrize(
    ("message", "error", "says"),
    [
        ("CUDA error: out of memory\nCUDA kernel", MemoryError, "^offload found no 4 MiB more of"),
        ("device assert", RuntimeError, "device assert"),
    ],
)
def test_no_pinned_memory(message, error, says, monkeypatch):
    monkeypatch.setattr(torch, "empty", Mock(side_effect=RuntimeError(message)))
    with pytest.raises(error, match=says):
        PinnedPool().acquire_buffers(Mock(nbytes=2**22, device=torch.device("cuda")))
    assert torch.empty.call_args.kwargs["pin_memory"]
