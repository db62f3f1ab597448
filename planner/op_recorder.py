"""One log of a step: which operators ran, what they touched, and which storages came and went.

The model runs on *fake* tensors, which have shapes and storages but no memory, while an
`OpRecorder` looks on. That works on any machine, also for models that would not fit in it. All that
the planner tells of a step is made of this one list: bytes over time (timeline.py), FLOPs and bytes
that move (timeline.py), names and reasons (record.py). `kept_for_backward` is the simplest use of
it.
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from .operators import EMPTY, count_flops, precision_of, signature, tensors_in

ROOT = Path(__file__).parent.parent
RUNS_AGAIN = ("model.py", "memory/policies.py")  # in backward: their lines are a replay's


@dataclass(eq=False)
class Storage:
    """A piece of memory; described as the first tensor that lived in it."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    born: int  # the operator that made it, counted from 1; 0 = was there before
    died: float = math.inf  # the last operator that saw it
    operator: str = ""  # "addmm"
    line: str = ""  # "model.py:87", the line that asked for it
    phase: str = ""  # forward, head, backward or optimizer
    block: int | None = None  # that was at work
    replayed: bool = False  # by an activation checkpoint, in backward
    kind: str = ""  # one of KINDS; "": as planner/timeline.py sorts it
    name: str = ""  # what it is, if somebody said so: "blocks.0.ln_1.weight"
    reason_alive: str = ""  # it is there: see planner/record.py


class CallSite(NamedTuple):
    """Who asked for an operator."""

    module: str  # "blocks.0.mlp.c_fc"; "": the model itself, or nothing in it
    line: str  # "model.py:106"
    is_backward: bool = False  # then they are those of its forward


UNKNOWN_SITE = CallSite("", "")

PhaseMark = tuple[int, str, int | None]  # (from this operator on, phase, block that is at work)


class Op(NamedTuple):
    """An operator that ran. A view has nothing but a place."""

    name: str
    place: PhaseMark
    site: CallSite = UNKNOWN_SITE
    inputs: tuple[tuple[str, Storage], ...] = ()  # by the names of its arguments
    outputs: tuple[tuple[int, Storage], ...] = ()  # (which of its results, storage)
    bytes: int = 0  # that it reads and writes
    flops: float = 0
    precision: int = 0  # of its products: index into PRECISIONS
    times: int = 1  # it stands for so many that do the same


class OpRecorder(TorchDispatchMode):
    """Notes operators and storages, without keeping any tensor alive.

    Args:
        sources: knows who asks for an operator.
        inside: tells the bytes that a kernel takes and gives back while it runs, which nobody sees
            after it (see planner/operators.py).
    """

    def __init__(
        self, sources: "CallSiteTracker | None" = None, kernel_workspace: Any = None
    ) -> None:
        super().__init__()
        self.sources, self.inside = sources, kernel_workspace
        self.places: list[PhaseMark] = [(0, "", None)]
        self.ops = [Op("", self.places[0])]  # by number; the first stands for what was before
        self.storages: list[Storage] = []  # in order of birth
        self.known: dict[int, tuple[weakref.ref, Storage]] = {}  # by address, while they live
        self.times = 1  # each operator from now on stands for so many that do the same
        self.forward_end = 0  # the operator with which forward ended
        # Of each tensor that offload sends away: its bytes, and the place that was at work.
        self.moved: list[tuple[int, PhaseMark]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # (nobody compiles here; what torch wraps it in costs more than the log)

    @property
    def n_ops(self) -> int:
        """The number of the last operator."""
        return len(self.ops) - 1

    def enter_phase(self, phase: str, block: int | None = None) -> None:
        self.places.append((self.n_ops + 1, phase, block))

    @property
    def phase(self) -> str:
        return self.places[-1][1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # nothing happens, and it is asked all the time
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        names = (parameter.name for parameter in signature(func).parameters)
        self.record_op(func, dict(zip(names, args, strict=False)) | kwargs, tensors_in(result))
        if self.inside is not None and (size := self.inside(func, args)):
            self.add_bytes(
                size, "inside of a kernel", "the kernel works in it", self.n_ops, self.n_ops
            )
        return result

    # ---- operators

    def record_op(self, func: Any, arguments: dict[str, Any], results: list[Tensor]) -> None:
        """Record what an operator did, after it ran."""
        its, place, at = signature(func), self.places[-1], self.n_ops + 1
        if its.name in EMPTY and results[0].numel() == 0:
            return  # (an activation checkpoint of torch 2.9 begins with one, and keeps it)
        source = self.sources.current(*place[1:]) if self.sources else UNKNOWN_SITE
        operator = "" if its.is_view else func.__name__
        storages = [self.add(tensor, operator, source) for tensor in results]
        if its.is_view:
            self.ops.append(Op("", place, source))
            return
        made = [(i, storage) for i, storage in enumerate(storages) if storage.born == at]
        given = []
        # Bytes by (storage, where in it the tensor begins): x * x reads x once.
        reads: dict[tuple[Storage, int], int] = {}
        writes = {(s, int(results[i].storage_offset())): extent(results[i]) for i, s in made}
        for parameter in its.parameters:
            for tensor in tensors_in(arguments.get(parameter.name)):
                view, size = (self.storage_of(tensor), int(tensor.storage_offset())), extent(tensor)
                given.append((parameter.name, view[0]))
                if parameter.is_table:
                    added = arguments.get("src", arguments.get("source"))
                    size = min(size, (results[0] if added is None else added).nbytes)
                if parameter.is_read:
                    reads[view] = size
                if parameter.is_written:
                    writes[view] = size
        touched = [*reads.items(), *writes.items()] if writes and its.name not in EMPTY else []
        op = Op(
            its.name,
            place,
            source,
            tuple(given),
            tuple(made),
            bytes=sum(size for (storage, _), size in touched if storage.device.type == "cpu"),
            flops=count_flops(its.name, arguments, results),
            precision=precision_of(its.name, arguments),
            times=self.times,
        )
        self.ops.append(op)

    # ---- storages

    def add(self, tensor: Tensor, operator: str = "", source: CallSite = UNKNOWN_SITE) -> Storage:
        """The storage of `tensor`: known (the tensor is a view, or changed in place) or new. It
        dies with the last tensor that lives in it."""
        memory = tensor.untyped_storage()
        address = memory._cdata
        if address in self.known:
            return self.known[address][1]
        storage = new_storage(tensor, self.n_ops + bool(operator))
        storage.operator = operator.split(".")[0]  # "addmm.default"
        _, storage.phase, storage.block = self.places[-1]
        # In backward, nothing but a replay builds a graph.
        storage.replayed = storage.phase == "backward" and torch.is_grad_enabled()
        storage.line = source.line
        if storage.nbytes:  # (an activation checkpoint of torch 2.9 keeps empty tensors)
            self.storages.append(storage)

        def gone(_: weakref.ref) -> None:
            del self.known[address]  # the next storage at this address is another one
            storage.died = self.n_ops

        self.known[address] = weakref.ref(memory, gone), storage
        return storage

    def add_bytes(
        self, size: int, name: str, why: str, born: int, died: float, kind: str = "temporaries"
    ) -> None:
        """Memory that no tensor shows."""
        _, phase, block = self.places[-1]
        here = Storage(size, (size,), torch.uint8, torch.device("cpu"), born, died)
        self.storages.append(
            replace(here, name=name, reason_alive=why, phase=phase, block=block, kind=kind)
        )

    def label(self, tensor: Tensor, kind: str, name: str, why: str = "") -> None:
        """Say what a storage is, and why it is there."""
        storage = self.add(tensor)
        storage.kind, storage.name, storage.reason_alive = kind, name, why

    def storage_of(self, tensor: Tensor) -> Storage:
        """The storage of `tensor`; if nobody added it, one that is not counted."""
        found = self.known.get(tensor.untyped_storage()._cdata)
        return found[1] if found else new_storage(tensor, 0)


def extent(tensor: Tensor) -> int:
    """Bytes of a tensor in its storage. (An expanded row is there once.)"""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((n - 1) * stride for n, stride in dims)
    return tensor.itemsize * max(0, min(span, tensor.numel()))


def new_storage(tensor: Tensor, born: int) -> Storage:
    # (A fake tensor's `device` is an operator.)
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    size = tensor.untyped_storage().nbytes()
    return Storage(size, tuple(tensor.shape), tensor.dtype, device, born)


class CallSiteTracker:
    """While it listens, it knows who asks for an operator: the module that runs, and the line.

    Backward's operators have no line: autograd runs them. But autograd numbers what it notes in
    forward, and a node of its graph still has that number in backward; so the line is the one that
    ran when the number was given. (To look for `self` on the stack would keep tensors alive that
    are about to go.)
    """

    def __init__(self, model: nn.Module):
        self.names = {module: name for name, module in model.named_modules()}
        self.running = [""]  # modules, the innermost last: "blocks.0.mlp.c_fc"
        self.of_forward: dict[int, CallSite] = {}  # by autograd's number

    def current(self, phase: str, block: int | None) -> CallSite:
        """Of the operator that has just run."""
        line = line_of_the_model()
        node = torch._C._current_autograd_node()  # None in forward, and in an optimizer's step
        if node is None or line.startswith(RUNS_AGAIN):
            # (A policy's replay is of a block's parts, which runs without the block.)
            running = self.running[-1] or ("" if block is None else f"blocks.{block}")
            source = CallSite("head" if phase == "head" else running, line)
            # Autograd has just given a number to this operator, if it noted it at all.
            self.of_forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, source)
            return source
        source = self.of_forward.get(node._sequence_nr(), CallSite("", ""))
        return CallSite(source.module, line or source.line, is_backward=True)

    @contextmanager
    def listen(self) -> Iterator[None]:
        def begin(module: nn.Module, args: tuple) -> None:
            self.running.append(self.names.get(module, self.running[-1]))

        def end(module: nn.Module, args: tuple, result: Any) -> None:
            self.running.pop()

        # (A replay is ended by an exception, as soon as it has made what is needed.)
        after = register_module_forward_hook(end, always_call=True)
        with register_module_forward_pre_hook(begin), after:
            yield


def line_of_the_model() -> str:
    """The innermost line of the model or of memory/ on the stack: "model.py:87"."""
    for frame, number in walk_stack(sys._getframe()):
        name = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
        if name == "model.py" or name.startswith("memory/"):
            return f"{name}:{number}"
    return ""


def kept_for_backward(model: nn.Module, forward: Callable[[], Tensor]) -> list[Storage]:
    """What `forward()`, with gradients, adds to the memory of the model's device until backward.

    Parameters and inputs are there anyway and do not count; low-precision copies of weights, which
    autocast makes, do; so do the head's gradients, which `loss_chunks` makes in forward. A model
    that was built fake needs no memory for it.
    """
    weight = next(model.parameters())
    sources = CallSiteTracker(model)
    log = OpRecorder(sources)
    for parameter in model.parameters():
        log.add(parameter)
    fake = weight.fake_mode if isinstance(weight, FakeTensor) else nullcontext()
    with fake, sources.listen(), log:
        result = forward()
    # The graph holds all the rest; the result itself is the caller's. (On torch 2.11
    # `result.grad_fn` does not keep the node of an autograd.Function, such as the head's.)
    graph = get_gradient_edge(result)
    del result
    alive = [storage for storage in log.storages if storage.died == math.inf]
    kept = [s for s in alive if s.operator and s.device.type == weight.device.type]
    del graph
    return kept
