"""A stand-in of a GPU for tests without one: its tensors are CPU tensors with a mark.

The mark is on the storage. A tensor with a marked storage says that its device is "cuda", and the
results of operators with marked inputs are marked. As on a real GPU, an operator with inputs on
both devices raises RuntimeError, and `set_sync_debug_mode` shows where Python waits for the GPU.
Kernels, streams and the allocator are not simulated, and the planner does not work here.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # before anything is replaced
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from memory.offload import copy_streams

CPU, CUDA, GIB = torch.device("cpu"), torch.device("cuda", 0), 2**30
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * GIB, gcnArchName="sm_90"
)
PEAKS = [f"{kind}_bytes.all.peak" for kind in ("requested", "allocated", "active", "reserved")]
# Attribute of a tensor -> its value for a tensor on the GPU
ATTRIBUTES = {"device": CUDA, "is_cuda": True, "is_cpu": False}
# Operators whose result Python reads, so it waits for the GPU.
WAITING = "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"


def nothing(*args: object, **kwargs: object) -> None:
    """Do nothing."""


class Marks:
    """Set of storages: those on the GPU, or those in pinned CPU memory."""

    def __init__(self) -> None:
        self.storages: dict[int, weakref.ref] = {}  # key: address of the storage

    def add(self, results: Any) -> Any:
        """Mark the storages of all tensors in `results`, and return `results`."""
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor not in self:
                storage = tensor.untyped_storage()
                forget = partial(self.forget, storage._cdata)
                self.storages[storage._cdata] = weakref.ref(storage, forget)
        return results

    def forget(self, key: int, _: weakref.ref) -> None:
        del self.storages[key]  # a later storage may get the same address

    def __contains__(self, tensor: object) -> bool:
        plain = isinstance(tensor, Tensor) and type(tensor) in (Tensor, torch.nn.Parameter)
        return plain and tensor.untyped_storage()._cdata in self.storages


def names_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class FakeGPU(TorchDispatchMode):
    """Dispatch mode that marks the results of operators, and finds waits and mixed devices."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.pinned, self.debug_mode = Marks(), Marks(), "default"
        self.peaks = dict.fromkeys(PEAKS, 2 * GIB)  # 1 GiB after a reset
        self.called = False  # True while torch's own code runs for a tensor on the GPU

    def set_debug_mode(self, mode: str) -> None:
        if mode == "warn":
            warnings.warn("does not yet detect all synchronizing operations", stacklevel=2)
        self.debug_mode = mode

    def wait(self, operator: str) -> None:
        """Report that Python waits for the GPU."""
        message = f"called a synchronizing CUDA operation: {operator}"
        if self.debug_mode == "error":
            raise RuntimeError(message)
        if self.debug_mode == "warn":
            warnings.warn(message, stacklevel=2)

    def copy(self, tensor: Tensor, to_gpu: bool, non_blocking: bool) -> Tensor:
        """Return a copy of `tensor` on the other device."""
        if not non_blocking or to_gpu and tensor not in self.pinned:
            self.wait("to")
        with _disable_current_modes():
            return (self.here if to_gpu else self.pinned).add(tensor.detach().clone())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func.__name__.split(".")[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if kwargs.pop("pin_memory", False):
            return self.pinned.add(func(*args, **kwargs))
        if names_gpu(kwargs.get("device")) or self.called and not tensors:
            return self.here.add(func(*args, **kwargs | {"device": CPU}))
        if not any(tensor in self.here for tensor in tensors):
            return func(*args, **kwargs)
        cold = [t for t in tensors if t.dim() and t not in self.here and t.device == CPU]
        if name == "copy_":
            asynchronous = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            if cold and not (asynchronous and cold[0] in self.pinned):
                self.wait(name)
            return func(*args, **kwargs)
        if cold:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        if name in WAITING:
            self.wait(name)
        if func is getattr(torch.ops.aten.addmm, "dtype_out", None):  # CPUs have no such kernel
            return kwargs["out"].copy_(args[0] + args[1].float() @ args[2].float())
        return self.here.add(func(*args, **kwargs))


class FakeTransfers(TorchFunctionMode):
    """Function mode for calls that name a device, and for pinned memory."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name, gpu = dict(kwargs or {}), getattr(func, "__name__", ""), self.gpu
        if name in ("to", "cpu", "cuda") and isinstance(args[0], Tensor):
            named = {"cpu": (CPU,), "cuda": (CUDA,)}.get(name, args[1:])
            tensor, copy = args[0], kwargs.pop("copy", False)
            device, dtype, non_blocking, _ = torch._C._nn._parse_to(*named, **kwargs)
            if device is not None and names_gpu(device) != (tensor in gpu.here):
                tensor = gpu.copy(tensor, names_gpu(device), non_blocking)
            return tensor.to(dtype or tensor.dtype, copy=copy)
        if name == "is_pinned":
            return args[0] in gpu.pinned
        if name == "pin_memory":
            return gpu.pinned.add(args[0].clone())
        if to_gpu := names_gpu(kwargs.get("device")):
            kwargs["device"] = CPU
        gpu.called = any(leaf in gpu.here for leaf in tree_leaves(args))
        try:
            result = func(*args, **kwargs)
        finally:
            gpu.called = False
        return gpu.here.add(result) if to_gpu else result


def on_cpu(function: Callable) -> Callable:
    """Return a function of autocast that gets "cpu" in the place of the device "cuda"."""
    return lambda *args, **kwargs: function(
        *("cpu" if arg == "cuda" else arg for arg in args), **kwargs
    )


def functions_of_cuda(gpu: FakeGPU) -> dict[str, Any]:
    """Return what replaces the attributes of torch.cuda."""
    random, cpu = torch.default_generator, torch.cpu
    return {
        **dict.fromkeys(("_lazy_init", "empty_cache", "manual_seed_all"), nothing),
        "reset_peak_memory_stats": lambda device=None: gpu.peaks.update(dict.fromkeys(PEAKS, GIB)),
        "set_device": nothing,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "device": lambda device: nullcontext(),
        "default_generators": (random,),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_rng_state": lambda device="cuda": random.get_state(),
        "set_rng_state": lambda state, device="cuda": random.set_state(state),
        "max_memory_allocated": lambda device=None: GIB,
        "mem_get_info": lambda device=None: (70 * GIB, 80 * GIB),
        "memory_stats": lambda device=None: gpu.peaks,
        "set_sync_debug_mode": gpu.set_debug_mode,
        "synchronize": lambda device=None: gpu.wait("synchronize"),
        "Event": cpu.Event,
        "Stream": cpu.Stream,
        "current_stream": cpu.current_stream,
        "stream": cpu.stream,
    }


@contextmanager
def fake_cuda() -> Iterator[FakeGPU]:
    """Let torch have one GPU, inside the `with` block and in this process."""
    gpu, group = FakeGPU(), torch._C._group_tensors_by_device_and_dtype
    of_torch: dict[Any, dict[str, Any]] = {
        torch.cuda: functions_of_cuda(gpu),
        torch.accelerator: {
            "current_stream": lambda device=None: SimpleNamespace(is_capturing=lambda: False),
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "synchronize": lambda device=None: gpu.wait("synchronize"),
        },
        torch._C: {
            "_group_tensors_by_device_and_dtype": lambda *args: {
                (lists[0][0].device, dtype): (lists, indices)
                for (_, dtype), (lists, indices) in group(*args).items()
            }
        },
        torch.autocast: {"__init__": on_cpu(torch.autocast.__init__)},
        torch: {
            name: on_cpu(getattr(torch, name))
            for name in ("get_autocast_dtype", "is_autocast_enabled")
        },
    }
    plain = {name: getattr(torch._C.TensorBase, name) for name in ATTRIBUTES}
    of_torch[torch.Tensor] = {
        name: property(
            lambda tensor, name=name: (
                ATTRIBUTES[name] if tensor in gpu.here else plain[name].__get__(tensor)
            )
        )
        for name in ATTRIBUTES
    }
    with ExitStack() as opened:
        for target, replaced in of_torch.items():
            for name, value in replaced.items():
                opened.enter_context(patch.object(target, name, value))
        copy_streams.cache_clear()
        opened.callback(copy_streams.cache_clear)
        opened.enter_context(gpu)
        opened.enter_context(FakeTransfers(gpu))
        yield gpu
