"""The ladder of recompute policies: what a block keeps for backward, and what it replays instead.

Backward of a linear layer needs the layer's input, backward of GELU needs GELU's input, and so on;
autograd keeps them all. `replay(f, x)` below keeps x alone, and calls f again when backward asks.
A policy is a choice of what to wrap in it. Two facts make that choice interesting:

- The replay ends as soon as the last tensor that backward needs is there (*early stop*). A linear
  layer's input is kept before the layer runs: if f ends in one, that matmul is not done again. So
  `replay(lambda wide: c_proj(gelu(wide)), wide)` recomputes a GELU, and no matmul at all.
- Dropout keeps a mask *after* it ran. As the end of f it would force the matmul before it to be
  replayed. So it stands outside: a policy returns the residual stream and the block's last update
  apart, and `MiniGPT.forward` adds them, with dropout.

No policy changes one bit of the loss or of a gradient. What a block keeps, under bfloat16 autocast
with fused attention and no dropout, in units of B * T * C bytes (plus 4 H / C for the softmax's
normaliser and 16 / C for mean and deviation of the LayerNorms, where those are kept):

    policy     keeps  of them                               replays             matmuls done twice
    none          36  everything                            nothing             none
    cheap         24  residuals, q k v, attention, c_fc     LayerNorms, GELU    none
    selective     24  x, results of matmuls and attention   LayerNorms, GELU    none
    attn          26  x, and all of the MLP half            attention half      c_attn, attention
    mlp           18  x, and all of the attention half      MLP half            c_fc
    sdpa           6  x, attention's result                 the rest            c_attn, c_proj, c_fc
    full           4  x                                     all                 those, and attention
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from model import Block

# (residual stream, last update of the block, to be added to it)
Halves = tuple[Tensor, Tensor]

# Never the reentrant variant: it replays all (no early stop) and fails in some DDP settings. The
# RNG state is kept (the default), else dropout would draw other masks in the replay: wrong
# gradients, without an error.
replay = partial(checkpoint, use_reentrant=False)


def cheap(block: Block, x: Tensor) -> Halves:
    """Replay what is pointwise. Megatron-LM: output-discarding recompute; llm.c: -r 2."""
    qkv = replay(lambda x: block.attn.c_attn(block.ln_1(x)), x)
    x = x + block.dropout(block.attn.c_proj(block.attn.attend(qkv)))
    wide = replay(lambda x: block.mlp.c_fc(block.ln_2(x)), x)
    return x, replay(lambda wide: block.mlp.c_proj(F.gelu(wide, approximate="tanh")), wide)


def mlp(block: Block, x: Tensor) -> Halves:
    """Replay the MLP half. Megatron-LM: --recompute-modules mlp."""
    x = x + block.dropout(block.attn(block.ln_1(x)))
    return x, replay(lambda x: block.mlp(block.ln_2(x)), x)


def attn(block: Block, x: Tensor) -> Halves:
    """Replay the attention half. Megatron-LM: --recompute-modules core_attn, and its linears."""
    x = x + block.dropout(replay(lambda x: block.attn(block.ln_1(x)), x))
    return x, block.mlp(block.ln_2(x))


# Operator by operator: `replay` runs the whole block again, but the results of the listed operators
# were kept and are handed out instead of being computed. Overloads must be named (.default), and a
# linear layer with a bias is addmm, not mm. Which attention operator runs depends on the device.
ATTENTION_OPS = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
MATMUL_OPS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
]


def keep_results_of(operators: list) -> Callable[[Block, Tensor], Halves]:
    contexts = partial(create_selective_checkpoint_contexts, operators)
    return lambda block, x: replay(block.halves, x, context_fn=contexts)


sdpa = keep_results_of(ATTENTION_OPS)  # axolotl, Megatron-LM: what costs most at long T is kept
selective = keep_results_of(ATTENTION_OPS + MATMUL_OPS)  # torchtitan, torchtune, JAX dots_saveable


def run_blocks(blocks: Sequence[Block], x: Tensor) -> Halves:
    """The blocks one after the other; the last one's update is not added yet."""
    for block in blocks[:-1]:
        x = block(x)
    return blocks[-1].halves(x)


POLICIES: dict[str, Callable[[Block, Tensor], Halves]] = {
    "cheap": cheap,
    "selective": selective,
    "mlp": mlp,
    "attn": attn,
    "sdpa": sdpa,
}


class Offload:
    """What autograd keeps of one forward waits in CPU memory until backward asks for it.

    With `full` that is one tensor a block. DeepSpeed calls it cpu_checkpointing, Unsloth does it by
    default. It is exact: a copy out and a copy back.

    On a GPU the copies run beside the computation: into pinned buffers (others cannot be copied
    asynchronously), on a stream for each direction, and the tensors of the block before come back
    while a block's backward runs. What happens last in forward is needed first in backward and
    would come straight back: the caller leaves it out. On a CPU the same code makes plain copies.
    """

    def __init__(self, host: HostMemory):
        self.host = host
        self.newest: Ticket | None = None

    def block(self, blocks: Sequence[Block]) -> saved_tensors_hooks:
        """The context in which `blocks` run forward."""
        # Weights stay. They are told by their storage: what a linear layer saves is weight.t(),
        # which is no Parameter. (Low-precision copies of weights, which autocast makes, are tensors
        # like others, and travel with the policies that keep some; `full` keeps none.)
        weights = {
            StorageWeakRef(weight.untyped_storage())
            for block in blocks
            for weight in block.parameters()
        }

        def pack(tensor: Tensor) -> Tensor | Ticket:
            if tensor.numel() == 0 or StorageWeakRef(tensor.untyped_storage()) in weights:
                return tensor  # nothing to send (older torch has such), or it stays there anyway
            self.newest = Ticket(tensor, self.host, self.newest)
            return self.newest

        return saved_tensors_hooks(pack, unpack)


class HostMemory:
    """CPU memory that outlives a step, because pinning takes milliseconds a buffer."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        # (shape, strides, dtype) -> buffers that are not in use
        self.unused: dict[tuple, list[Tensor]] = {}


class Ticket:
    """One tensor in CPU memory, and how to get it back."""

    def __init__(self, tensor: Tensor, host: HostMemory, previous: Ticket | None):
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
        self.unused.append(self.copy)  # backward is through with it: the next forward may use it


def unpack(kept: Tensor | Ticket) -> Tensor:
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
