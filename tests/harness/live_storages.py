"""A meter of memory that shares no code with the planner, whose recorder the trainers use."""

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Dispatch mode that counts the bytes of all live storages that operators read or return.

    The count is updated after each operator. So memory that one operator both allocates and frees
    is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, weakref.ref] = {}  # key: address of the storage
        self.now = self.peak = 0  # bytes that are alive now; the maximum of `now` so far

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.track_storages(args, kwargs, result)
        return result

    def track_storages(self, *tensors: object) -> None:
        """Count the storages of all tensors in `tensors`, at any depth of lists, tuples and dicts.
        Then update the peak."""
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor):
                self.add(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed. Skip a storage that is already counted."""
        address, size = storage._cdata, storage.nbytes()
        if address in self.alive:
            return  # counted already, when an operator read or returned the same storage

        def on_free(_: weakref.ref) -> None:
            del self.alive[address]  # a later storage may get the same address
            self.now -= size

        self.alive[address] = weakref.ref(storage, on_free)
        self.now += size
