"""Record one step: the operators that ran, the storages that they used, when storages were freed.

The model runs on *fake* tensors, which have shapes and storages but no memory, so that recording
works on any machine, also for models that do not fit in its memory. All results of the planner come
from this record: timeline.py computes from it the bytes that exist after each operator, the FLOPs,
and the bytes that operators read and write, and record.py gives each storage a name, and a reason
why it exists. `kept_for_backward` below is the simplest use of a record.
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path, PurePath
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from .operators import EMPTY, count_flops, matmul_dtype_index, operator_schema, tensors_in

PROJECT_FOLDER = Path(__file__).parent.parent
ADDMM_IN_FLOAT32 = torch.ops.aten.addmm.dtype_out  # of memory.head.addmm_into


@dataclass(eq=False)
class Storage:
    """A storage (a piece of memory), with the shape and the dtype of the first tensor in it."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    born: int  # index in `ops` of the operator that made it; 0: existed before the step
    died: float = math.inf  # index of the last operator before it was freed; inf: not freed
    operator: str = ""  # name of the operator that made it: "addmm"
    line: str = ""  # the line that called this operator: "model.py:87"
    phase: str = ""  # forward, head, backward or optimizer
    block_index: int | None = None  # index of the block that ran when it was made
    replayed: bool = False  # made by the recomputation of an activation checkpoint
    kind: str = ""  # one of KINDS; "": planner/timeline.py chooses it
    name: str = ""  # "blocks.0.ln_1.weight"; "": planner/record.py chooses it
    reason_alive: str = ""  # why it exists; "": planner/record.py chooses it


class CallSite(NamedTuple):
    """The module and the line that called an operator."""

    module: str  # "blocks.0.mlp.c_fc"; "": the model itself, or no module
    file_and_line: str  # "model.py:106"
    # True: an operator of backward, with the module and the line of the forward operator whose
    # gradient it computes (or with the line in memory/ that called it, if there is one).
    is_backward: bool = False


UNKNOWN_SITE = CallSite("", "")

# Start of a phase: (index of its first operator, its name, index of the block that runs or None)
PhaseMark = tuple[int, str, int | None]


class Op(NamedTuple):
    """An operator that ran; if it returns a view, its name is "", and only `phase_mark`,
    `call_site` and `replayed` are set."""

    name: str
    phase_mark: PhaseMark
    call_site: CallSite = UNKNOWN_SITE
    named_inputs: tuple[tuple[str, Storage], ...] = ()  # (argument's name, storage)
    indexed_new_outputs: tuple[tuple[int, Storage], ...] = ()  # (index of the result, new storage)
    bytes: int = 0  # number of bytes that it reads and writes
    flops: float = 0  # FLOPs of its matrix products, 2 per multiply-add
    matmul_dtype_index: int = 0  # dtype of its matrix products, as an index into MATMUL_DTYPES
    repeat_count: int = 1  # number of equal operators that this entry represents
    replayed: bool = False  # in the recomputation of an activation checkpoint


class OpRecorder(TorchDispatchMode):
    """Dispatch mode that records operators and storages, without keeping a tensor alive.

    Args:
        sources: finds the call site of each operator; None: do not record call sites.
        kernel_workspace: function (operator, args) -> bytes that the operator's kernel takes only
            while it runs (planner/operators.py); None: do not count workspaces.
    """

    def __init__(
        self, sources: "CallSiteTracker | None" = None, kernel_workspace: Any = None
    ) -> None:
        super().__init__()
        self.sources, self.kernel_workspace = sources, kernel_workspace
        self.phase_marks: list[PhaseMark] = [(0, "", None)]
        self.ops = [Op("", self.phase_marks[0])]  # ops[n]: operator n; ops[0]: before the step
        self.storages: list[Storage] = []  # in order of birth
        self.live_storages: dict[int, tuple[weakref.ref, Storage]] = {}  # live storages, by address
        self.times = 1  # number of real operators that each recorded one represents
        self.forward_end = 0  # index of forward's last operator
        self.block_end = 0  # index of the last operator of the block that ran last
        # True: operators run between the blocks, or a block gets other tensors besides x.
        self.loop_has_ops = False
        # Gradients accumulated so far; none in the first micro-batch.
        self.gradient_sums: set[Storage] = set()
        # For each tensor that offload copies out: (its bytes, the bytes of CPU memory for it), and
        # the phase mark at the copy.
        self.offloaded_tensors: list[tuple[tuple[int, int], PhaseMark]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # (With True a wrapper of `__torch_dispatch__` would turn torch.compile off in each call.
        # This takes longer than recording, and nothing is compiled here.)
        return False

    @property
    def n_ops(self) -> int:
        """Number of operators so far; also the index of the last operator."""
        return len(self.ops) - 1

    def enter_phase(self, phase: str, block: int | None = None) -> None:
        """Begin a phase with the next operator, in the block with index `block`; None: in no
        block."""
        self.phase_marks.append((self.n_ops + 1, phase, block))

    @property
    def current_phase(self) -> str:
        """Name of the current phase."""
        return self.phase_marks[-1][1]

    @property
    def is_replaying(self) -> bool:
        """Whether the recomputation of an activation checkpoint runs."""
        # In backward gradients are enabled only while a recomputation runs.
        return self.current_phase == "backward" and torch.is_grad_enabled()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # not recorded: it does no work, and it is frequent
        kwargs = kwargs or {}
        # torch 2.11 cannot run this operator on fake tensors.
        skipped = func is ADDMM_IN_FLOAT32 and isinstance(kwargs["out"], FakeTensor)
        result = kwargs["out"] if skipped else func(*args, **kwargs)
        names = (parameter.name for parameter in operator_schema(func).parameters)
        self.record_op(func, dict(zip(names, args, strict=False)) | kwargs, tensors_in(result))
        if self.kernel_workspace is not None and (size := self.kernel_workspace(func, args)):
            self.add_non_tensor_storage(
                size, "inside of a kernel", "the kernel works in it", self.n_ops, self.n_ops
            )
        return result

    # ---- operators

    def record_op(self, func: Any, arguments: dict[str, Any], results: list[Tensor]) -> None:
        """Record an operator that has just run: its overload `func`, its `arguments` by name, and
        the tensors that it returned."""
        schema, place, number = operator_schema(func), self.phase_marks[-1], self.n_ops + 1
        if schema.name in EMPTY and results[0].numel() == 0:
            return  # the empty tensor that torch 2.11's activation checkpoint makes
        site = self.sources.current_call_site(*place[1:]) if self.sources else UNKNOWN_SITE
        operator = "" if schema.is_view else func.__name__
        storages = [self.add_storage(tensor, operator, site) for tensor in results]
        if schema.is_view:
            self.ops.append(Op("", place, site, replayed=self.is_replaying))
            return
        outputs = [(i, storage) for i, storage in enumerate(storages) if storage.born == number]
        inputs = []
        # (storage, offset of the tensor) -> bytes. A tensor counts once: x * x reads x once.
        reads: dict[tuple[Storage, int], int] = {}
        writes = {
            (s, int(results[i].storage_offset())): bytes_spanned_in_storage(results[i])
            for i, s in outputs
        }
        for parameter in schema.parameters:
            for tensor in tensors_in(arguments.get(parameter.name)):
                key, size = (
                    (self.find_storage(tensor), int(tensor.storage_offset())),
                    bytes_spanned_in_storage(tensor),
                )
                inputs.append((parameter.name, key[0]))
                if parameter.is_table:
                    added_rows = arguments.get("src", arguments.get("source"))
                    size = min(size, (results[0] if added_rows is None else added_rows).nbytes)
                if parameter.is_read:
                    reads[key] = size
                if parameter.is_written:
                    writes[key] = size
        accesses = [*reads.items(), *writes.items()] if writes and schema.name not in EMPTY else []
        op = Op(
            schema.name,
            place,
            site,
            tuple(inputs),
            tuple(outputs),
            bytes=sum(size for (storage, _), size in accesses if storage.device.type == "cpu"),
            flops=count_flops(schema.name, arguments, results),
            matmul_dtype_index=matmul_dtype_index(schema.name, arguments),
            repeat_count=self.times,
            replayed=self.is_replaying,
        )
        self.ops.append(op)

    # ---- storages

    def add_storage(
        self, tensor: Tensor, operator: str = "", source: CallSite = UNKNOWN_SITE
    ) -> Storage:
        """Return the `Storage` of a tensor; add it if it is new.

        A view, or the result of an in-place operator, uses a storage that was added before, and a
        storage is freed with its last tensor. `operator`: name of the operator that is being
        recorded and makes the storage, with the call site `source`; "": the storage exists already.
        """
        memory = tensor.untyped_storage()
        address = memory._cdata
        if address in self.live_storages:
            return self.live_storages[address][1]
        storage = make_storage(tensor, self.n_ops + bool(operator))
        storage.operator = operator.split(".")[0]  # "addmm.default" -> "addmm"
        _, storage.phase, storage.block_index = self.phase_marks[-1]
        storage.replayed = self.is_replaying
        storage.line = source.file_and_line
        if storage.nbytes:  # (torch 2.11's activation checkpoint keeps an empty tensor)
            self.storages.append(storage)

        def on_freed(_: weakref.ref) -> None:
            del self.live_storages[address]  # another storage may get this address
            storage.died = self.n_ops

        self.live_storages[address] = weakref.ref(memory, on_freed), storage
        return storage

    def add_non_tensor_storage(
        self, size: int, name: str, why: str, born: int, died: float, kind: str = "temporaries"
    ) -> None:
        """Add a storage of `size` bytes without a tensor, from operator `born` to operator `died`.
        `why`: the reason why it exists (`Storage.reason_alive`)."""
        _, phase, block = self.phase_marks[-1]
        storage = Storage(size, (size,), torch.uint8, torch.device("cpu"), born, died)
        self.storages.append(
            replace(storage, name=name, reason_alive=why, phase=phase, block_index=block, kind=kind)
        )

    def label_storage(self, tensor: Tensor, kind: str, name: str, why: str = "") -> None:
        """Set the kind, the name and the `reason_alive` of a tensor's storage."""
        storage = self.add_storage(tensor)
        storage.kind, storage.name, storage.reason_alive = kind, name, why

    def find_storage(self, tensor: Tensor) -> Storage:
        """Return the `Storage` of a tensor, or a new one that is not part of the record if the
        tensor was not added."""
        entry = self.live_storages.get(tensor.untyped_storage()._cdata)
        return entry[1] if entry else make_storage(tensor, 0)


def bytes_spanned_in_storage(tensor: Tensor) -> int:
    """Return the bytes that a tensor occupies in its storage, where an expanded row counts once."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((n - 1) * stride for n, stride in dims)
    return tensor.itemsize * max(0, min(span, tensor.numel()))


def make_storage(tensor: Tensor, born: int) -> Storage:
    """Return a new `Storage` for the memory of a tensor, made by the operator with index `born`."""
    # (`tensor.device` of a fake tensor would run an operator.)
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    size = tensor.untyped_storage().nbytes()
    return Storage(size, tuple(tensor.shape), tensor.dtype, device, born)


class CallSiteTracker:
    """Find the call site (module and line) of each operator that runs inside
    `track_running_module()`.

    Autograd runs the operators of backward, so no line of the model calls them. Each node of
    autograd's graph, however, has the same sequence number in forward and in backward, so the
    tracker stores a call site under this number in forward, and looks it up in backward. (A search
    for modules in the stack's local variables would keep tensors alive that are about to be freed.)

    Args:
        model: the model that runs.
        blocks: name of the list of blocks in `model`, such as "blocks" or "transformer.h".
        sources: the files and folders whose lines are recorded.
    """

    def __init__(self, model: nn.Module, blocks: str, sources: tuple[Path, ...]):
        self.blocks = blocks
        self.name_of_file = cache(partial(name_in_sources, sources=sources))
        # Operators of modules that are no layers, such as an MLP in a block, count as operators of
        # the block: policies run these modules' methods without their hooks.
        depth = blocks.count(".") + 2
        self.names = {
            module: name
            for name, module in model.named_modules()
            if name.count(".") < depth or not [*module.children()]
        }
        self.running = [""]  # names of running modules, the innermost last
        self.of_forward: dict[int, CallSite] = {}  # autograd's sequence number -> call site

    def current_call_site(self, phase: str, block: int | None) -> CallSite:
        """Return the call site of the operator that has just run."""
        line = innermost_line(self.name_of_file)
        node = torch._C._current_autograd_node()  # None in forward, and in an optimizer's step
        if node is None or torch.is_grad_enabled():  # forward, the update, a recomputation
            # If a policy recomputes parts of a block, the block's own forward does not run, and the
            # block is that of the phase mark.
            running = self.running[-1] or ("" if block is None else f"{self.blocks}.{block}")
            site = CallSite((self.running[-1] or "head") if phase == "head" else running, line)
            # If autograd recorded this operator, the last sequence number is this operator's.
            self.of_forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, site)
            return site
        site = self.of_forward.get(node._sequence_nr(), CallSite("", ""))
        return CallSite(site.module, line or site.file_and_line, is_backward=True)

    @contextmanager
    def track_running_module(self) -> Iterator[None]:
        """Keep track of the running module inside this context."""

        def enter_module(module: nn.Module, args: tuple) -> None:
            self.running.append(self.names.get(module, self.running[-1]))

        def leave_module(module: nn.Module, args: tuple, result: Any) -> None:
            self.running.pop()

        # `always_call`: run `leave_module` also after an exception, with which torch ends a
        # recomputation when the last needed tensor exists.
        after = register_module_forward_hook(leave_module, always_call=True)
        with register_module_forward_pre_hook(enter_module), after:
            yield


def innermost_line(name_of_file: Callable[[str], str]) -> str:
    """Return the innermost line on the stack that is in a named file, such as "model.py:87", or ""
    if there is none. `name_of_file`: path of a file -> its name, or ""."""
    for frame, number in walk_stack(sys._getframe()):
        if name := name_of_file(frame.f_code.co_filename):
            return f"{name}:{number}"
    return ""


def name_in_sources(file: str, sources: tuple[PurePath, ...]) -> str:
    """Return the name of `file` if it is in `sources`, such as "memory/head.py"; else return "".
    (Paths are compared by their parts, because Windows separates them by backslashes.)"""
    for source in sources:
        path = type(source)(file)
        if path.is_relative_to(source):
            return path.relative_to(source.parent).as_posix()
    return ""


def kept_for_backward(model: nn.Module, forward: Callable[[], Tensor]) -> list[Storage]:
    """Return the storages that `forward()` makes on the model's device and keeps for backward.

    `forward` runs with gradients enabled, and returns a tensor. Parameters and inputs do not count,
    because they exist before. Autocast's low-precision copies of weights count, and so do the
    gradients that the head makes in forward (`loss_chunks`). If the model was built on fake
    tensors, the call needs no memory.
    """
    weight = next(model.parameters())
    log = OpRecorder()
    for parameter in model.parameters():
        log.add_storage(parameter)
    fake = weight.fake_mode if isinstance(weight, FakeTensor) else nullcontext()
    with fake, log:
        result = forward()
    # Keep only the graph, which holds the tensors that backward needs; the result itself does not
    # count. (`result.grad_fn` cannot replace `graph`: on torch 2.11 it does not keep the node of an
    # autograd.Function alive, such as the head's node.)
    graph = get_gradient_edge(result)
    del result
    alive = [storage for storage in log.storages if storage.died == math.inf]
    kept = [s for s in alive if s.operator and s.device.type == weight.device.type]
    del graph
    return kept
