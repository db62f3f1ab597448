"""See memory before it is needed: what backward keeps, and what a whole training step takes.

Nothing is measured with a stopwatch or an allocator here. The real model runs on *fake* tensors,
which have shapes and storages but no memory, while a tracker notes when each storage comes and
goes. That works on any machine, also for models that would not fit in it.

    kept_for_backward   the tensors that one forward leaves behind, one by one
    Planner             one training step: its peak, what that is made of and where it stands

plan.py chooses by these figures; closed_form.py has them as formulas.
"""

import math
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from memory.policies import HostMemory
from model import CHUNK, MiniGPT, MiniGPTConfig
from planner.formulas import head_bytes

ROOT = Path(__file__).parent.parent

# ------------------------------------------------------------------------------------- counting


@dataclass(eq=False)
class Storage:
    """A piece of memory; described as the first tensor that lived in it."""

    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    born: int  # the operator that made it, counted from 1; 0 = was there before
    died: float = math.inf  # the last operator that saw it
    operator: str = ""  # "addmm"
    module: str = ""  # where: "MiniGPT.blocks.0.attn.c_attn"
    line: str = ""  # "model.py:87", the line that asked for it
    phase: str = ""  # forward, head, backward or optimizer
    in_block: bool = False
    replayed: bool = False  # by an activation checkpoint, in backward
    kind: str = "temporaries"  # one of KINDS


class StorageTracker(TorchDispatchMode):
    """Notes every storage that operators make, without keeping any of them alive.

    It looks after each operator: what a kernel takes and gives back inside is not seen.
    """

    def __init__(
        self,
        modules: ModuleTracker | None = None,
        stand_in: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`modules` knows the module that is running; `stand_in` is what fakes real tensors."""
        super().__init__()
        self.modules, self.stand_in = modules, stand_in
        self.storages: list[Storage] = []  # in order of birth
        self.known: dict[int, tuple[weakref.ref, Storage]] = {}  # by address, while they live
        self.stand_ins: list[Tensor] = []
        self.now = 0  # operators seen
        # (from this operator on, phase, block that is at work)
        self.places: list[tuple[int, str, int | None]] = [(0, "", None)]

    def enter(self, phase: str, block: int | None = None) -> None:
        self.places.append((self.now + 1, phase, block))

    @property
    def phase(self) -> str:
        return self.places[-1][1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # nothing happens, and it is asked all the time
        kwargs = kwargs or {}
        if self.stand_in is not None:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):
                    self.add_given(tensor)
        result = func(*args, **kwargs)
        self.now += 1
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.add(tensor, func.__name__)
        return result

    def add_given(self, tensor: Tensor) -> None:
        """A real tensor, which operators will see as a fake one."""
        assert self.stand_in is not None
        self.stand_ins.append(self.stand_in(tensor))
        self.add(self.stand_ins[-1])

    def add(self, tensor: Tensor, operator: str = "") -> Storage:
        """The storage of `tensor`: known (the tensor is a view, or changed in place) or new."""
        memory = tensor.untyped_storage()
        address = memory._cdata
        if address in self.known:
            return self.known[address][1]
        shape, size = tuple(tensor.shape), memory.nbytes()
        operator = operator.split(".")[0]  # "addmm.default"
        storage = Storage(size, shape, tensor.dtype, tensor.device, self.now, operator=operator)
        if operator:
            _, storage.phase, block = self.places[-1]
            storage.in_block = block is not None
            # In backward, nothing but a replay builds a graph.
            storage.replayed = storage.phase == "backward" and torch.is_grad_enabled()
        if operator and self.modules is not None:
            storage.module = max(self.modules.parents - {"Global"}, key=len, default="")
            storage.line = line_of_the_model()

        def gone(_: weakref.ref) -> None:
            del self.known[address]  # the next storage at this address is another one
            storage.died = self.now

        self.known[address] = weakref.ref(memory, gone), storage
        self.storages.append(storage)
        return storage

    def alive(self) -> list[Storage]:
        return [storage for storage in self.storages if storage.died == math.inf]

    def restart(self) -> None:
        """Count from here; what is alive was there before."""
        self.storages = self.alive()
        self.now, self.places = 0, [(0, "", None)]
        for storage in self.storages:
            storage.born = 0


def line_of_the_model() -> str:
    """The innermost line of the model or of memory/ on the stack: "model.py:87"."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
        if name == "model.py" or name.startswith("memory/"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def kept_for_backward(model: nn.Module, forward: Callable[[], Tensor]) -> list[Storage]:
    """What `forward()`, with gradients, adds to the memory of the model's device until backward.

    Parameters and inputs are there anyway and do not count; low-precision copies of weights, which
    autocast makes, do; so do the head's gradients, which `loss_chunks` makes in forward.
    """
    weight = next(model.parameters())
    if isinstance(weight, FakeTensor):  # the model was built fake, and too large for this machine
        fake = weight.fake_mode
    else:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
    if isinstance(model, MiniGPT):
        model.host_memory = HostMemory()  # (see the end: real steps cannot use fake buffers)
    modules = ModuleTracker()
    tracker = StorageTracker(modules, fake.from_tensor)
    for parameter in model.parameters():
        if isinstance(parameter, FakeTensor):
            tracker.add(parameter)
        else:
            tracker.add_given(parameter)
    with fake, modules, tracker:
        result = forward()
    graph = result.grad_fn  # it holds all the rest; the result itself is the caller's
    del result
    kept = [s for s in tracker.alive() if s.operator and s.device.type == weight.device.type]
    del graph
    if isinstance(model, MiniGPT):
        model.host_memory = HostMemory()
    return [storage for storage in kept if storage.bytes]


# ------------------------------------------------------------------------------------- planning

KINDS = (
    "parameters",
    "gradients",  # with DDP's buckets
    "optimizer",  # AdamW's two moments
    "activations",  # what forward keeps for backward
    "recomputed",  # what backward replays
    "head",  # logits, loss and their gradients
    "temporaries",  # the rest, gone before the phase ends
)


@dataclass(frozen=True)
class StepMemory:
    """The memory of one training step, in bytes, after each of its operators."""

    config: MiniGPTConfig
    batch_size: int
    seq_len: int
    timeline: np.ndarray  # (operators + 1, len(KINDS)) int64
    places: list[tuple[int, str, int | None]]  # (from this operator on, phase, block)
    kept: int  # for backward when forward is over, by blocks and head
    kept_per_block: float  # on average

    @cached_property
    def total(self) -> np.ndarray:
        """(operators + 1,) int64"""
        return self.timeline.sum(axis=1)

    @property
    def peak(self) -> int:
        return int(self.total.max())

    @property
    def at_peak(self) -> dict[str, int]:
        """What the peak is made of: a kind's name -> bytes."""
        return dict(zip(KINDS, self.timeline[self.total.argmax()].tolist(), strict=True))

    @property
    def where(self) -> str:
        """The place of the peak: "head", or "backward, block 11"."""
        at = self.total.argmax()
        _, phase, block = [place for place in self.places if place[0] <= at][-1]
        return phase if block is None else f"{phase}, block {block}"

    def phase(self, name: str) -> slice:
        """The operators of "forward", "head", "backward" or "optimizer"."""
        inside = [place[1] == name for place in self.places]
        first, last = inside.index(True), len(inside) - inside[::-1].index(True)
        end = self.places[last][0] if last < len(inside) else len(self.timeline)
        return slice(self.places[first][0], end)


class Planner:
    """One training step of the real model, optimizer and policies, on fake tensors.

    Args:
        config: the model; `step` can change how it spends memory.
        seq_len: tokens in a sequence.
        precision: float32, or the dtype of autocast. (float16's GradScaler needs some bytes more.)
        make_optimizer: what the trainer makes its own with.
        device_type: the kind of device it is planned for. The fake tensors are the CPU's in any
            case; for a GPU its fused dropout and attention are put in.
        accumulate: forward runs beside the gradients of an earlier micro-batch.
        ddp: gradients stay, in the buckets of DistributedDataParallel.
    """

    def __init__(
        self,
        config: MiniGPTConfig,
        seq_len: int,
        *,
        precision: torch.dtype,
        make_optimizer: Callable[[MiniGPT], torch.optim.Optimizer],
        device_type: str = "cpu",
        accumulate: bool = False,
        ddp: bool = False,
    ):
        self.config, self.seq_len, self.precision = config, seq_len, precision
        self.on_cpu, self.accumulate, self.ddp = device_type == "cpu", accumulate, ddp
        self.fake = FakeTensorMode()
        self.steps: dict[tuple[int, MiniGPTConfig], StepMemory] = {}
        with self.fake:
            self.model = MiniGPT(config).train()
            if not self.on_cpu:
                fuse_dropout(self.model)
            self.optimizer = make_optimizer(self.model)
            # The first step makes the optimizer's state; all others find it there.
            for parameter in self.model.parameters():
                parameter.grad = torch.empty_like(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def step(self, batch_size: int, **memory: Any) -> StepMemory:
        """A step on `batch_size` sequences. `memory`: changes of the config (recompute="full")."""
        config = replace(self.config, **memory)
        if (batch_size, config) not in self.steps:
            self.steps[batch_size, config] = self.simulate(batch_size, config)
        return self.steps[batch_size, config]

    def largest_batch(self, budget: int, batch_size: int, **memory: Any) -> int:
        """The most sequences whose peak stays within `budget` bytes; 0 = not even one does.

        Two simulations tell: each sequence adds the same to the bytes after an operator. Except in
        the head, which gets more chunks instead of larger ones; it goes by its formula.
        """
        fewest = 1
        if not self.config.loss_chunks:  # enough for two chunks: one would be another program
            fewest += 2 * CHUNK // (self.config.vocab_size * self.seq_len)
        first = max(batch_size, fewest)
        other = fewest if fewest < first else first + 1
        one, two = self.step(first, **memory), self.step(other, **memory)

        def head(sequences: int) -> int:
            return head_bytes(one.config, sequences * self.seq_len, self.precision)

        def parts(step: StepMemory) -> np.ndarray:
            """(operators outside of the head + 1,), the last one for what is beside the head."""
            inside = step.phase("head")
            beside = step.total[inside].max() - head(step.batch_size)
            return np.append(np.delete(step.total, inside), beside)

        start = parts(one)
        growth = (start - parts(two)) / (first - other)

        def beside_the_head(sequences: int) -> np.ndarray:
            return start + growth * (sequences - first)

        def peak(sequences: int) -> int:
            now = beside_the_head(sequences)
            return int(max(now[:-1].max(), now[-1] + head(sequences)))

        # Chunks are whole: the head's bytes do not grow evenly, all others do. So look for the last
        # batch that could fit, and from there down.
        most = bisect_right(range(1, 10**6), budget, key=lambda n: beside_the_head(n).max())
        while most > 0 and peak(most) > budget:
            most -= 1
        asked = batch_size if self.step(batch_size, **memory).peak <= budget else 0
        return max(asked, most)

    def simulate(self, batch_size: int, config: MiniGPTConfig) -> StepMemory:
        """What train_minimal.train_step does, without its data and its numbers."""
        model, tracker = self.model, StorageTracker()
        model.config, model.host_memory = config, HostMemory()
        if not self.on_cpu:
            model.host_memory.device = torch.device("meta")  # anything but the fake GPU
        with self.fake, tracker, follow(model, tracker):
            for parameter in model.parameters():
                tracker.add(parameter).kind = "parameters"
                for state in self.optimizer.state[parameter].values():
                    tracker.add(state).kind = "optimizer"
                if self.accumulate or self.ddp:
                    parameter.grad = torch.empty_like(parameter)
                    tracker.add(parameter.grad).kind = "gradients"
            ids, labels = torch.zeros(2, batch_size, self.seq_len, dtype=torch.int64)
            tracker.add(ids).kind = "activations"  # backward will want them
            if config.offload_activations and self.on_cpu:
                self.forward(ids, labels)  # buffers are made once, and stay
            tracker.restart()

            tracker.enter("forward")
            loss = self.forward(ids, labels)
            forward_end = tracker.now
            loss.backward()
            for parameter in model.parameters():
                tracker.add(cast(Tensor, parameter.grad)).kind = "gradients"
            tracker.enter("optimizer")
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return summarize(tracker, config, batch_size, self.seq_len, forward_end)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        enabled = self.precision != torch.float32
        dtype = self.precision if enabled else None
        with torch.autocast("cpu", dtype, enabled=enabled, cache_enabled=False):
            return self.model(ids, labels)


@contextmanager
def follow(model: MiniGPT, tracker: StorageTracker) -> Iterator[None]:
    """Tell the tracker which part of the model is at work, in forward, backward and replays."""

    def enter_block(i: int) -> Callable:
        def hook(ln_1: nn.Module, args: tuple[Tensor]) -> None:
            phase = tracker.phase
            tracker.enter(phase, i)
            if phase == "forward" and i > 0:  # backward of block i ends with its input's gradient
                args[0].register_hook(lambda _: tracker.enter("backward", i - 1))

        return hook

    def leave_blocks(ln_f: nn.Module, args: tuple[Tensor]) -> None:
        tracker.enter("forward")

    def enter_head(ln_f: nn.Module, args: tuple[Tensor], x: Tensor) -> None:
        tracker.enter("head")
        x.register_hook(lambda _: tracker.enter("backward", len(model.blocks) - 1))

    handles = [model.ln_f.register_forward_pre_hook(leave_blocks)]
    handles += [model.ln_f.register_forward_hook(enter_head)]
    handles += [
        block.ln_1.register_forward_pre_hook(enter_block(i))  # type: ignore[union-attr]
        for i, block in enumerate(model.blocks)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class FusedDropout(nn.Module):
    """Dropout as a GPU does it: what it keeps is a mask of one byte an element."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.native_dropout(x, self.p, self.training)[0]


def fuse_dropout(model: MiniGPT) -> None:
    """A CPU has no fused dropout, and no fused attention with dropout; a GPU has both."""
    for module in list(model.modules()):
        if isinstance(getattr(module, "dropout", None), nn.Dropout) and model.config.dropout > 0:
            module.dropout = FusedDropout(model.config.dropout)
    for block in model.blocks:
        block.attn.dropout = 0.0  # type: ignore[union-attr]  # its mask is never stored


def summarize(
    tracker: StorageTracker,
    config: MiniGPTConfig,
    batch_size: int,
    seq_len: int,
    forward_end: int,
) -> StepMemory:
    """Sort the storages by kind, and add them up operator by operator."""
    changes = np.zeros((tracker.now + 2, len(KINDS)), dtype=np.int64)
    kept = kept_by_blocks = 0
    for storage in tracker.storages:
        if storage.device.type != "cpu":
            continue  # offloaded
        is_kept = 0 < storage.born <= forward_end < storage.died
        if storage.kind == "temporaries":
            if storage.phase == "head":
                storage.kind = "head"
            elif is_kept or storage.born == 0:  # (offload's buffers on a CPU)
                storage.kind = "activations"
            elif storage.replayed:
                storage.kind = "recomputed"
        kind = KINDS.index(storage.kind)
        changes[storage.born, kind] += storage.bytes
        if storage.died != math.inf:
            changes[int(storage.died) + 1, kind] -= storage.bytes
        kept += storage.bytes * is_kept
        kept_by_blocks += storage.bytes * (is_kept and storage.in_block)
    return StepMemory(
        config=config,
        batch_size=batch_size,
        seq_len=seq_len,
        timeline=changes[:-1].cumsum(axis=0),
        places=tracker.places,
        kept=kept,
        kept_per_block=kept_by_blocks / config.n_layers,
    )


def is_out_of_memory(error: Exception) -> bool:
    """CUDA says so with a class of its own, the others in their message only."""
    messages = (
        "can't allocate memory",
        "not enough memory",
        "MPS backend out of memory",
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        message in str(error) for message in messages
    )
