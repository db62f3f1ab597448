"""Offload: what the blocks keep for backward waits in CPU memory.

With `full` that is one tensor a block. DeepSpeed calls it cpu_checkpointing, Unsloth does it by
default. It is exact: a copy out and a copy back.

On a GPU the copies run beside the computation: into pinned buffers (others cannot be copied
asynchronously), on a stream for each direction, and the tensors of the block before come back while
a block's backward runs. On a CPU the same code makes plain copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


class HostMemory:
    """CPU memory that outlives a step, because pinning takes milliseconds a buffer."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        # (shape, strides, dtype) -> buffers that are not in use
        self.unused: dict[tuple, list[Tensor]] = {}


class Offload:
    """The hooks through which autograd keeps the tensors of one forward."""

    def __init__(self, host: HostMemory):
        self.host = host
        self.newest: Moved | None = None

    def around(self, run: Callable[[Tensor], Any], blocks: Sequence[nn.Module]) -> Callable:
        """`run` (of `blocks`), with what it keeps in CPU memory; called as blocks are."""

        def run_with_hooks(x: Tensor, _: str) -> Any:
            with self.hooks(blocks):
                return run(x)

        return run_with_hooks

    def hooks(self, blocks: Sequence[nn.Module]) -> saved_tensors_hooks:
        # Weights stay. They are told by their storage: what a linear layer saves is weight.t(),
        # which is no Parameter. (Low-precision copies of weights, which autocast makes, are tensors
        # like others, and travel with the policies that keep some; `full` keeps none.)
        weights = {
            StorageWeakRef(weight.untyped_storage())
            for block in blocks
            for weight in block.parameters()
        }

        def pack(tensor: Tensor) -> Tensor | Moved:
            if tensor.numel() == 0 or StorageWeakRef(tensor.untyped_storage()) in weights:
                return tensor  # nothing to send (older torch has such), or it stays there anyway
            self.newest = Moved(tensor, self.host, self.newest)
            return self.newest

        return saved_tensors_hooks(pack, unpack)


class Moved:
    """One tensor in CPU memory, and how to get it back."""

    def __init__(self, tensor: Tensor, host: HostMemory, previous: Moved | None):
        self.device, self.previous = tensor.device, previous
        self.unused = host.unused.setdefault((tensor.shape, tensor.stride(), tensor.dtype), [])
        self.back: Tensor | None = None
        self.taken = False
        self.event: torch.cuda.Event | None = None
        on_gpu = self.device.type == "cuda"
        if self.unused:
            self.copy = self.unused.pop()
        else:
            self.copy = torch.empty_like(tensor, device=host.device, pin_memory=on_gpu)
        if not on_gpu:
            self.copy.copy_(tensor)
            return
        out, home = streams(self.device)
        out.wait_stream(torch.cuda.current_stream())  # the tensor must be there,
        out.wait_stream(home)  # and the buffer read by its last user
        with torch.cuda.stream(out):
            self.copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(out)  # its memory must not be reused before the copy is done

    def fetch(self) -> None:
        """Start to bring the tensor home, unless it is on its way."""
        if self.back is not None:
            return
        if self.device.type != "cuda":
            self.back = self.copy.to(self.device, copy=True)
            return
        out, home = streams(self.device)
        home.wait_stream(out)
        with torch.cuda.stream(home):
            self.back = torch.empty_like(self.copy, device=self.device)
            self.back.copy_(self.copy, non_blocking=True)
        self.event = home.record_event()

    def take(self) -> Tensor:
        """The tensor on its device, for the current stream to use."""
        self.fetch()
        tensor, self.back, self.taken = self.back, None, True
        assert tensor is not None  # fetch saw to that
        if self.event is not None:
            now = torch.cuda.current_stream()
            now.wait_event(self.event)
            tensor.record_stream(now)
        return tensor

    def __del__(self) -> None:
        if hasattr(self, "copy"):  # else there was no memory for it
            self.unused.append(self.copy)  # backward is done: the next forward may use it


def unpack(kept: Tensor | Moved) -> Tensor:
    """What backward gets. While it computes with it, the tensor before comes home, too."""
    if isinstance(kept, Tensor):
        return kept
    tensor = kept.take()
    if kept.previous is not None and not kept.previous.taken:
        kept.previous.fetch()
    return tensor


@lru_cache
def streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """One stream to the CPU, one home."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
