"""Offload on a GPU, without one: is every copy ordered after what it needs?

The code that a GPU runs meets a toy CUDA here: streams that know which work of which other stream
is done before theirs (vector clocks), and tensors that complain when somebody reads what may not be
written yet, or overwrites what may still be read. That the values come back: test_recompute.py.
"""

import gc
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from memory import offload
from memory.offload import HostMemory, Moved, unpack


class Stream:
    """Does one thing after the other; `done`: how much of each stream is done before the next."""

    def __init__(self, name: str):
        self.name, self.done = name, {name: 0}

    def work(self) -> dict[str, int]:
        self.done[self.name] += 1
        return dict(self.done)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: dict[str, int]) -> None:
        names = self.done.keys() | event.keys()
        self.done = {name: max(self.done.get(name, 0), event.get(name, 0)) for name in names}

    def record_event(self) -> dict[str, int]:
        return dict(self.done)


class Tensor:
    """A value, and who has touched it on which stream."""

    shape, dtype = (2, 3), "float32"

    def __init__(self, cuda: "Cuda", kind: str, value: object = None):
        self.cuda, self.device, self.value = cuda, SimpleNamespace(type=kind), value
        self.recorded = {cuda.now}  # the caching allocator knows whose memory it is
        self.written: tuple[Stream, dict] | None = None
        self.read: list[tuple[Stream, dict]] = []

    def stride(self) -> tuple[int, int]:
        return (3, 1)

    def record_stream(self, stream: Stream) -> None:
        self.recorded.add(stream)

    def touch(self, write: bool) -> None:
        now = self.cuda.now
        before = [self.written] if self.written else []
        for stream, then in before + (self.read if write else []):
            assert now.done.get(stream.name, 0) >= then[stream.name], f"{now.name} too early"
        mark = now, now.work()
        if write:
            self.written, self.read = mark, []
        else:
            self.read.append(mark)

    def copy_(self, other: "Tensor", non_blocking: bool = False) -> None:
        assert non_blocking, "Python must not wait"
        other.touch(write=False)
        self.touch(write=True)
        self.value = other.value

    def freed(self) -> None:
        """Its memory goes to the next who asks, as soon as all streams that are known are done."""
        users = {stream for stream, _ in [*self.read, *([self.written] if self.written else [])]}
        assert users <= self.recorded, "reused too early"


class Cuda:
    """What memory/offload.py asks of torch."""

    def __init__(self):
        self.main = self.now = Stream("main")
        self.cuda = SimpleNamespace(current_stream=lambda: self.now, stream=self.stream)
        self.device = torch.device
        self.made: list[Tensor] = []

    @contextmanager
    def stream(self, stream: Stream):
        before, self.now = self.now, stream
        yield
        self.now = before

    def empty_like(self, like: Tensor, device, pin_memory: bool = False) -> Tensor:
        pinned = device.type == "cpu"
        assert pin_memory == pinned, "only pinned memory is copied beside the computation"
        self.made.append(Tensor(self, device.type))
        return self.made[-1]


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    toy, out, home = Cuda(), Stream("out"), Stream("home")
    monkeypatch.setattr(offload, "torch", toy)
    monkeypatch.setattr(offload, "streams", lambda device: (out, home))
    monkeypatch.setattr(offload, "Tensor", Tensor)
    return toy


def forward(cuda: Cuda, host: HostMemory, values: list[int]) -> list[Moved]:
    """Each block keeps a tensor."""
    kept: list[Moved] = []
    for value in values:
        tensor = Tensor(cuda, "cuda", value)
        tensor.touch(write=True)  # the block computes it
        kept.append(Moved(tensor, host, kept[-1] if kept else None))
        tensor.touch(write=False)  # and the next one reads it
        tensor.freed()
    return kept


def backward(cuda: Cuda, kept: list[Moved], values: list[int]) -> None:
    """The last block first."""
    for value in reversed(values):
        ticket = kept.pop()
        tensor = unpack(ticket)
        assert tensor.value == value and tensor.device.type == "cuda"
        assert all(before.back is not None for before in kept[-1:]), "nothing comes back meanwhile"
        assert all(before.back is None for before in kept[:-1]), "all come back at once"
        assert ticket.back is None, "it is held while backward works"
        tensor.touch(write=False)
        tensor.freed()


def test_each_copy_waits_for_what_it_needs(cuda):
    host = HostMemory()
    for values in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        backward(cuda, forward(cuda, host, values), values)
        gc.collect()
    pinned = [tensor for tensor in cuda.made if tensor.device.type == "cpu"]
    assert len(pinned) == 3 == sum(map(len, host.unused.values()))  # pinned once, then reused


def test_forward_waits_for_no_copy(cuda):
    forward(cuda, HostMemory(), [1, 2, 3])
    assert set(cuda.main.done) == {"main"}


def test_what_is_on_its_way_is_not_asked_for_again(cuda):
    first, second = forward(cuda, HostMemory(), [1, 2])
    unpack(second)
    made = len(cuda.made)
    assert unpack(first).value == 1 and len(cuda.made) == made
    unpack(second)  # backward once more, with retain_graph: the first one is through
    assert first.back is None and len(cuda.made) == made + 1


def test_a_backward_that_is_given_up(cuda):
    """What was on its way home is never taken; its buffer may still be read when it is reused."""
    host = HostMemory()
    kept = forward(cuda, host, [1, 2])
    unpack(kept[-1])
    del kept
    gc.collect()
    backward(cuda, forward(cuda, host, [3, 4]), [3, 4])
