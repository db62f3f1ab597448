"""Count bytes: what forward keeps for backward, tensor by tensor. And tell when none are left.

Nothing is measured with a stopwatch or an allocator here. The real model runs on *fake* tensors,
which have shapes and storages but no memory, while a tracker notes each storage that an operator
makes. Those still alive when forward has ended are what autograd, activation checkpoints and
selective checkpoints hold on to: exactly, on any device, and even for a model that does not fit.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker


@dataclass(frozen=True)
class Kept:
    """A tensor that backward will need (the first of those that share its storage)."""

    module: str  # where it was made: "MiniGPT.blocks.0.attn.c_attn"
    operator: str  # what made it: "addmm"
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int  # of the whole storage
    device: torch.device
    line: str  # "model.py:87", the line that asked for it


class StorageTracker(TorchDispatchMode):
    """Notes every storage that operators make, without keeping any of them alive."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake, self.modules = fake, ModuleTracker()
        # A weak reference tells a storage from a later one at the same address.
        self.given: dict[StorageWeakRef, Tensor] = {}  # were there before: weights and inputs
        self.made: dict[StorageWeakRef, Kept] = {}

    def note_given(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            fake = isinstance(tensor, FakeTensor)
            stand_in = tensor if fake else self.fake.from_tensor(tensor)
            self.given[StorageWeakRef(stand_in.untyped_storage())] = stand_in

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        self.note_given(tensor for tensor in inputs if not isinstance(tensor, FakeTensor))
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            if reference not in self.made and reference not in self.given:
                self.made[reference] = Kept(
                    module=max(self.modules.parents - {"Global"}, key=len, default=""),
                    operator=func.__name__.split(".")[0],
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    bytes=storage.nbytes(),
                    device=tensor.device,
                    line=line_of_the_model(),
                )
        return result

    def alive(self, device: torch.device) -> list[Kept]:
        """What of it still lives in the memory of that kind of device."""
        return [
            kept
            for reference, kept in self.made.items()
            if not reference.expired() and kept.device.type == device.type and kept.bytes
        ]


def tensors_in(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def line_of_the_model() -> str:
    """The innermost line of model.py or recompute.py on the stack: "model.py:87"."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename.rpartition("/")[2]
        if name in ("model.py", "recompute.py"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def kept_for_backward(model: nn.Module, forward: Callable[[], Tensor]) -> list[Kept]:
    """What `forward()`, with gradients, adds to the memory of the model's device until backward.

    Parameters and inputs are there anyway and do not count; low-precision copies of weights, which
    autocast makes, do; so do the head's gradients, which `loss_chunks` makes in forward.
    """
    weight = next(model.parameters())
    if isinstance(weight, FakeTensor):  # the model was built fake, and too large for this machine
        fake = weight.fake_mode
    else:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
    tracker = StorageTracker(fake)
    tracker.note_given(model.parameters())
    with fake, tracker.modules, tracker:
        result = forward()
    graph = result.grad_fn  # it holds all the rest; the result itself is the caller's
    del result
    kept = tracker.alive(weight.device)
    del graph
    return kept


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
