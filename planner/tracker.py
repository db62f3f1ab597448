"""Count memory without using any: which storages operators make, and how long they live.

The model runs on *fake* tensors, which have shapes and storages but no memory, while a tracker
notes when each storage comes and goes. That works on any machine, also for models that would not
fit in it. `kept_for_backward` is the simplest use of it; planner/step.py follows a whole step.
"""

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memory import HostMemory
from model import MiniGPT

ROOT = Path(__file__).parent.parent


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
    block: int | None = None  # that was at work
    replayed: bool = False  # by an activation checkpoint, in backward
    kind: str = ""  # one of KINDS; "": as planner/timeline.py sorts it
    name: str = ""  # what it is, if somebody said so: "blocks.0.ln_1.weight"
    why: str = ""  # it is there: see planner/record.py


class StorageTracker(TorchDispatchMode):
    """Notes every storage that operators make, without keeping any of them alive.

    It looks after each operator: what a kernel takes and gives back inside is not seen (but
    `inside` may tell).
    """

    def __init__(
        self,
        modules: "Modules | None" = None,
        stand_in: Callable[[Tensor], Tensor] | None = None,
        inside: Callable[[Any, tuple], int] | None = None,
        notes: Sequence[Callable[..., None]] = (),
    ) -> None:
        """`modules` knows the one that is running; `stand_in` is what fakes real tensors;
        `inside` tells the bytes that a kernel takes besides (see planner/kernels.py); `notes`
        are told what operators do (a Notebook of planner/work.py, a Witness of record.py)."""
        super().__init__()
        self.modules, self.stand_in, self.inside = modules, stand_in, inside
        self.notes = notes
        self.storages: list[Storage] = []  # in order of birth
        self.known: dict[int, tuple[weakref.ref, Storage]] = {}  # by address, while they live
        self.stand_ins: list[Tensor] = []
        self.now = 0  # operators seen
        # (from this operator on, phase, block that is at work)
        self.places: list[tuple[int, str, int | None]] = [(0, "", None)]
        # Operators from .. to (without that one) stand for so many runs of theirs, in a row.
        self.repeats: list[tuple[int, int, int]] = []
        self.moved: list[int] = []  # bytes of each tensor that offload sends away

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
        results = result if isinstance(result, tuple | list) else (result,)
        results = [tensor for tensor in results if isinstance(tensor, Tensor)]
        for tensor in results:
            self.add(tensor, func.__name__)
        for note in self.notes:
            note(self, func, args, kwargs, results)
        if self.inside is not None and (size := self.inside(func, args)):
            self.add_scratch(size, args[0].device)
        return result

    def add_scratch(self, size: int, device: torch.device) -> None:
        """Bytes that are there while the operator that was just seen runs."""
        storage = Storage(size, (size,), torch.uint8, device, born=self.now, died=self.now)
        storage.name, storage.why = "inside of a kernel", "the kernel works in it"
        _, storage.phase, storage.block = self.places[-1]
        self.storages.append(storage)

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
            _, storage.phase, storage.block = self.places[-1]
            # In backward, nothing but a replay builds a graph.
            storage.replayed = storage.phase == "backward" and torch.is_grad_enabled()
        if operator and self.modules is not None:
            storage.module, storage.line = self.modules.innermost, line_of_the_model()

        def gone(_: weakref.ref) -> None:
            del self.known[address]  # the next storage at this address is another one
            storage.died = self.now

        self.known[address] = weakref.ref(memory, gone), storage
        if size:  # (an activation checkpoint of torch 2.9 keeps empty tensors)
            self.storages.append(storage)
        return storage

    def name(self, tensor: Tensor, kind: str, name: str) -> None:
        """Say what a storage is."""
        storage = self.add(tensor)
        storage.kind, storage.name = kind, name

    def find(self, tensor: Tensor) -> Storage:
        """The storage of `tensor`; if nobody added it, one that is not counted."""
        memory = tensor.untyped_storage()
        if memory._cdata in self.known:
            return self.known[memory._cdata][1]
        return Storage(memory.nbytes(), tuple(tensor.shape), tensor.dtype, tensor.device, born=0)

    def alive(self) -> list[Storage]:
        return [storage for storage in self.storages if storage.died == math.inf]

    def restart(self) -> None:
        """Count from here; what is alive was there before."""
        self.storages = self.alive()
        self.now, self.places, self.repeats = 0, [(0, "", None)], []
        for storage in self.storages:
            storage.born = 0


class Modules:
    """While it is entered, knows which part of a model runs: "blocks.0.mlp.c_fc"; "" outside.

    (To look for `self` on the stack would keep tensors alive that are about to go.)
    """

    def __init__(self, model: nn.Module, root: str = ""):
        """`root`: the model's own name."""
        self.names = {module: f"{root}.{name}".strip(".") for name, module in model.named_modules()}
        self.running: list[str] = []

    @property
    def innermost(self) -> str:
        return self.running[-1] if self.running else ""

    def __enter__(self) -> "Modules":
        def begin(module: nn.Module, args: tuple) -> None:
            self.running.append(self.names.get(module, self.innermost))

        def end(module: nn.Module, args: tuple, result: Any) -> None:
            self.running.pop()

        # (A replay is ended by an exception, as soon as it has made what is needed.)
        self.hooks = [
            register_module_forward_pre_hook(begin),
            register_module_forward_hook(end, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


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
    modules = Modules(model, type(model).__name__)
    tracker = StorageTracker(modules, fake.from_tensor)
    for parameter in model.parameters():
        if isinstance(parameter, FakeTensor):
            tracker.add(parameter)
        else:
            tracker.add_given(parameter)
    with fake, modules, tracker:
        result = forward()
    # The graph holds all the rest; the result itself is the caller's. (On torch 2.11
    # `result.grad_fn` does not keep the node of an autograd.Function, such as the head's.)
    graph = get_gradient_edge(result)
    del result
    kept = [s for s in tracker.alive() if s.operator and s.device.type == weight.device.type]
    del graph
    if isinstance(model, MiniGPT):
        model.host_memory = HostMemory()
    return kept
