"""The ladder of recompute policies: what a block keeps for backward, and what it replays instead.

Backward of a linear layer needs the layer's input, backward of GELU needs GELU's input, and so on:
autograd keeps a tensor as soon as it goes *into* the operator whose backward will need it.
`checkpoint(f, x)` keeps x alone, and calls f(x) once more when backward asks for the first of the
others. (scripts/checkpoint_from_scratch.py is a checkpoint of thirty lines that tells what happens
while it happens.) A policy is a choice of what to wrap in it. Two facts make it interesting:

- The replay ends as soon as the last tensor that backward needs is there (*early stop*). A linear
  layer's input is kept before the layer runs: if f ends in one, that matmul is not done again. So
  `checkpoint(lambda wide: c_proj(gelu(wide)), wide)` replays a GELU, and no matmul at all.
- Dropout keeps a mask *after* it ran. At the end of f it would force the matmul before it to be
  replayed. So a block returns its last update apart, and the caller adds it, with dropout, outside
  of every checkpoint: see `Block` in model.py.

No policy changes one bit of the loss or of a gradient. What a block makes, in units of B * T * C
bytes under bfloat16 autocast (where the residual stream stays float32), with d_ff = 4 C:

    x  4     ln_1  2     qkv  6     attention  2     x2  4     ln_2  2     c_fc  8     gelu  8

x goes in, x2 is x after attention's half, the others are results of the layers of that name. With
fused attention and no dropout a block keeps of them (and 4 H / C for the softmax's normaliser, 16 /
C for mean and deviation of the LayerNorms, where those are kept):

    policy     keeps                                           replays          matmuls done twice
    none       36  all of them                                 nothing          none
    cheap      24  x, qkv, attention, x2, c_fc                 LayerNorms, GELU none
    selective  24  x, qkv, attention, both c_proj (2 each), c_fc   the same     none
    attn       26  x, x2, ln_2, c_fc, gelu                     attention's half c_attn, attention
    mlp        18  x, ln_1, qkv, attention, x2                 MLP's half       c_fc
    sdpa        6  x, attention                                the rest         c_attn, c_proj, c_fc
    full        4  x                                           all              those, and attention
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from .offload import HostMemory, Offload

# What a block returns: the residual stream x2, and the update that is still to be added to it.
Halves = tuple[Tensor, Tensor]


def checkpoint(run: Callable, x: Tensor, *, random: bool, **options: Any) -> Any:
    """Never the reentrant variant: it replays all (no early stop) and fails in some DDP settings.

    `random`: there is dropout in `run`. The state of the RNG is kept, else the replay would draw
    other masks: wrong gradients, without an error.
    """
    if random and forgets_numbers(x.device) and not torch.compiler.is_compiling():
        run = drawing_alike(run)
    return torch_checkpoint(run, x, use_reentrant=False, preserve_rng_state=random, **options)


def forgets_numbers(device: torch.device) -> bool:
    """Does torch's checkpoint not know the RNG that draws on this device? (pytorch#127676)"""
    return device.type == "mps"


def generator_of(device: torch.device) -> torch.Generator:
    """What draws on a device. (torch.cuda.set_rng_state copies the state with an operator, and a
    selective checkpoint knows of none: its replay would end in an error.)"""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    return torch.default_generator


class Bookmark:
    """A place among the random numbers of a device: the first call marks it, others go back."""

    state: Tensor | None = None

    def __call__(self, device: torch.device) -> None:
        if self.state is None:
            self.state = generator_of(device).get_state()
        else:
            generator_of(device).set_state(self.state)


def drawing_alike(run: Callable) -> Callable:
    """`run`, which draws the same numbers in each call, and uses them up in the first one only."""
    begin = Bookmark()

    def alike(x: Tensor, *more: Any) -> Any:
        is_replay, here = begin.state is not None, Bookmark()
        here(x.device)
        begin(x.device)
        try:
            return run(x, *more)
        finally:
            if is_replay:
                here(x.device)

    return alike


# A policy is called by the block itself, `block(x, "cheap")`, in place of its plain forward: what
# hangs on a block's forward (sharded weights, a compiler) then works with every policy. `block` is
# a model.Block.


def cheap(block: Any, x: Tensor) -> Halves:
    """Replay what is pointwise. Megatron-LM: output-discarding recompute; llm.c: -r 2."""
    replay = partial(checkpoint, random=False)
    qkv = replay(lambda before: block.attn.c_attn(block.ln_1(before)), x)
    x2 = block.add(x, block.attn.c_proj(block.attn.attend(qkv)))
    wide = replay(lambda before: block.mlp.c_fc(block.ln_2(before)), x2)
    return x2, replay(lambda w: block.mlp.c_proj(F.gelu(w, approximate="tanh")), wide)


def replay_mlp(block: Any, x: Tensor) -> Halves:
    """Replay the MLP half. Megatron-LM: --recompute-modules mlp."""
    x2 = block.add(x, block.attn(block.ln_1(x)))
    return x2, checkpoint(lambda before: block.mlp(block.ln_2(before)), x2, random=False)


def replay_attention(block: Any, x: Tensor) -> Halves:
    """Replay the attention half. Megatron-LM: --recompute-modules core_attn, and its linears."""
    random = has_dropout(block)
    update = checkpoint(lambda before: block.attn(block.ln_1(before)), x, random=random)
    x2 = block.add(x, update)
    return x2, block.mlp(block.ln_2(x2))


# Operator by operator: the checkpoint is around the whole block, but the results of the listed
# operators are kept, and handed out in the replay instead of being computed. Overloads must be
# named (.default), and a linear layer with a bias is addmm, not mm. Which attention operator runs
# depends on the device. (torch holds those results itself, not as saved tensors: unless a compiler
# has taken the checkpoint apart, offload does not see them, and only the block's input moves.)
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


def keep_results_of(operators: list) -> Callable[[Any, Tensor], Halves]:
    contexts = partial(create_selective_checkpoint_contexts, operators)

    def run(block: Any, x: Tensor) -> Halves:
        random = has_dropout(block)
        # (Compiled, each operator that draws has a state of its own.)
        by_hand = random and not torch.compiler.is_compiling()
        forward = with_same_masks(block) if by_hand else block.forward
        return checkpoint(forward, x, random=random, context_fn=contexts)

    return run


def with_same_masks(block: Any) -> Callable[[Tensor], Halves]:
    """The block's forward, for a replay that may be handed attention's result.

    A GPU's attention draws its masks inside of one operator. Handed out, it draws nothing, and the
    mask behind it would be made of the numbers that attention had in forward.
    """
    behind_attention = Bookmark()

    def forward(x: Tensor) -> Halves:
        update = block.attn(block.ln_1(x))
        behind_attention(x.device)
        x = block.add(x, update)
        return x, block.mlp(block.ln_2(x))

    return forward


def has_dropout(block: Any) -> bool:
    return block.add.dropout.p > 0


POLICIES: dict[str, Callable[[Any, Tensor], Halves]] = {
    "cheap": cheap,
    "selective": keep_results_of(ATTENTION_OPS + MATMUL_OPS),  # torchtitan, JAX dots_saveable
    "mlp": replay_mlp,
    "attn": replay_attention,
    "sdpa": keep_results_of(ATTENTION_OPS),  # axolotl: what costs most at long T is kept
}
# `full` is not among them: it is the line in MiniGPT.forward (offloaded, the one in `offloaded`).
RECOMPUTE_POLICIES = ("none", *POLICIES, "full")


Call = tuple[Callable[..., Halves], str]  # (block, policy), for `block(x, policy)`


def schedule(
    blocks: Iterable[Any], config: Any, training: bool, host: HostMemory
) -> Iterator[Call]:
    """What MiniGPT.forward calls, one after the other.

    Each block, by the policy of `config` (a model.MiniGPTConfig), unless other fields of it say:
    only the first `recompute_layers`, and by `recompute_rest` those after them; `recompute_group`
    of the first ones as if they were one; with `offload_activations`, what the policies keep in CPU
    memory. Evaluation recomputes nothing.
    """
    if not training:
        return iter([(block, "none") for block in blocks])
    blocks, calls = list(blocks), list[Call]()
    n_recomputed = config.n_recomputed
    for i in range(0, n_recomputed, config.recompute_group):
        group = blocks[i : min(i + config.recompute_group, n_recomputed)]
        calls.append((group[0] if len(group) == 1 else one_by_one(group), config.recompute))
    calls += [(block, config.recompute_rest) for block in blocks[n_recomputed:]]
    if config.offload_activations:
        return offloaded(calls, Offload(host, blocks), random=config.dropout > 0)
    if config.dropout > 0 and forgets_numbers(next(blocks[0].parameters()).device):
        # (The finer policies call our `checkpoint`, which sees to it; `full` calls torch's.)
        calls = [(drawing_alike(run) if policy == "full" else run, policy) for run, policy in calls]
    return iter(calls)


def offloaded(calls: list[Call], offload: Offload, random: bool) -> Iterator[Call]:
    """The same calls, with what their policies keep in CPU memory."""
    try:
        for i, (block, policy) in enumerate(calls):
            # Only hooks that are around a checkpoint see its input, so it moves in here.
            run = partial(block, policy=policy)
            if policy == "full":
                run = partial(checkpoint, block, random=random)
            # (The last block's backward comes first: what it keeps would come straight back.)
            moves = policy != "none" and i + 1 < len(calls)
            yield offload.around(run, moves, block), "none"
    finally:
        offload.settle()


def one_by_one(blocks: list) -> Callable[..., Halves]:
    """Several blocks that are called as if they were one."""

    def run(x: Tensor, policy: str = "none") -> Halves:
        for block in blocks[:-1]:
            x, update = block(x, policy)
            x = block.add(x, update)
            del update  # not beside the next block
        return blocks[-1](x, policy)

    return run


def check_memory(config: Any) -> None:
    """Raises ValueError, with a message that names the field, if a value of `config` (a
    model.MiniGPTConfig) that says how memory is spent is impossible."""
    for name, least in {"recompute_group": 1, "loss_chunks": 0}.items():
        if getattr(config, name) < least:
            raise ValueError(f"{name} must be at least {least}, not {getattr(config, name)}")
    policy, rest, layers = config.recompute, config.recompute_rest, config.recompute_layers
    for name, word in (("recompute", policy), ("recompute_rest", rest)):
        if word not in RECOMPUTE_POLICIES:
            raise ValueError(f"{name} must be one of {', '.join(RECOMPUTE_POLICIES)}, not {word!r}")
    if layers is not None and not 0 <= layers <= config.n_layers:
        raise ValueError(f"recompute_layers must be in 0..{config.n_layers}, not {layers}")
    if rest != "none" and (policy == "none" or layers is None):
        raise ValueError("recompute_rest needs recompute and recompute_layers for the first blocks")
    if config.recompute_group > 1 and policy != "full":
        needs = f"recompute_group {config.recompute_group} needs recompute full, not {policy}"
        raise ValueError(f"{needs}: only whole blocks can share a checkpoint")
    if config.offload_activations and policy == "none":
        raise ValueError("offload_activations needs a recompute policy: full is the usual one")
