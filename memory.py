"""Count bytes: what a forward pass keeps for backward. And tell when there are none left."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


def kept_for_backward(model: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes that `forward()` would keep alive for backward, parameters not counted.

    Autograd shows each tensor that it wants to save to a hook. This one notes the size and hands
    nothing back, so that nothing *is* kept: measuring a configuration takes no more memory than
    running it without gradients, also one that would not fit. (Backward is impossible afterwards.)

    Several saved tensors can share one storage (q, k and v do): each storage counts once. It is
    told from others by a weak reference, as the address of a freed one is soon used again.
    Low-precision copies of weights, which autocast makes, do count: they are kept.
    """
    parameters = {StorageWeakRef(p.untyped_storage()) for p in model.parameters()}
    kept: dict[StorageWeakRef, int] = {}

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference not in parameters:
            kept[reference] = storage.nbytes()

    def never(_: None) -> Tensor:
        raise RuntimeError("kept_for_backward only counts: there is no backward after it")

    with saved_tensors_hooks(note, never):
        forward()
    return sum(kept.values())


def is_out_of_memory(error: RuntimeError) -> bool:
    """A GPU says so with a class of its own, the CPU's allocator in its message only."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
