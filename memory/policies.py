"""Recompute policies: a policy chooses the tensors that a block keeps for backward.

Backward of a linear layer needs the layer's input, backward of GELU needs GELU's input, and so on:
autograd keeps these inputs in forward. An activation checkpoint of a function f keeps only f's
input x, and none of the tensors inside f; when backward needs the first of those tensors, the
checkpoint calls f(x) again (scripts/checkpoint_from_scratch.py shows how). A policy chooses which
parts of a block run in activation checkpoints. Two rules determine the cost of a checkpoint:

- Recomputation stops as soon as the last tensor that backward needs exists (*early stop*). Backward
  of a linear layer needs only the layer's input, so the matmul of a linear layer at the end of f is
  not repeated: `activation_checkpoint(lambda wide: c_proj(gelu(wide)), wide, has_dropout=False)`
  recomputes a GELU but no matmul.
- Backward of dropout needs the dropout mask. If f ends in a linear layer and dropout, recomputation
  repeats that layer's matmul, because the mask is drawn after it. This is why a checkpoint around
  one half of a block (attention or MLP) ends before the dropout of that half, which `Block.forward`
  applies outside. A checkpoint around a whole block (`full`, `sdpa`), or around everything after
  attention (policy `qkv`), contains the last dropout: recomputation repeats the last c_proj if
  dropout is on, and stops before it if dropout is off. (`selective` keeps the result of that
  c_proj.)

Under every policy the loss and the gradients are bitwise equal.

A block makes the tensors below. The figures are bytes in units of B * T * C, under bfloat16
autocast (the residual stream stays float32), with d_ff = 4 C:

    x  4     ln_1  2     qkv  6     attention  2     x2  4     ln_2  2     c_fc  8     gelu  8

x is the block's input; qkv and attention are the results of `attn.qkv` and `attn.attend`; x2 is x
plus the result of the attention half. Each other tensor is the result of the layer or function with
that name. With fused attention and without dropout, `none` keeps all these tensors, 36 units, and
also the softmax's normaliser (4 H / C) and the means and deviations of the LayerNorms (16 / C).
`POLICIES` lists the tensors that each policy keeps.
"""

import math
import re
from collections.abc import Callable
from functools import cache, partial
from inspect import ismethod, signature
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts


def activation_checkpoint(
    call: Callable, *inputs: Tensor, has_dropout: bool, **options: Any
) -> Any:
    """Return `call(*inputs)`, computed in a non-reentrant activation checkpoint: the reentrant
    variant has no early stop, and fails in some DDP settings.

    `has_dropout`: keep the RNG's state, without which recomputation would draw other masks and
    compute wrong gradients without an error. `options`: more arguments of torch's checkpoint.
    """
    if has_dropout and checkpoint_loses_rng(inputs[0].device) and not torch.compiler.is_compiling():
        call = with_replayed_rng(call)
    return torch_checkpoint(
        call, *inputs, use_reentrant=False, preserve_rng_state=has_dropout, **options
    )


def checkpoint_loses_rng(device: torch.device) -> bool:
    """Return whether torch's checkpoint ignores this device's RNG, as on MPS (pytorch#127676)."""
    return device.type == "mps"


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default random generator of a device, to save and restore its state.

    (Not torch.cuda.set_rng_state: in some releases it runs an operator, and selective checkpoints
    raise an error if recomputation runs an operator that forward did not run.)
    """
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    return torch.default_generator


class SavedRNGState:
    """A state of a device's RNG: the first call of `save_or_restore` saves it, later calls restore
    it."""

    state: Tensor | None = None

    def save_or_restore(self, device: torch.device) -> None:
        if self.state is None:
            self.state = default_generator(device).get_state()
        else:
            default_generator(device).set_state(self.state)


def with_replayed_rng(call: Callable) -> Callable:
    """Wrap `call` so that later calls draw the same random numbers as the first call, and leave the
    RNG in the state in which they found it."""
    start = SavedRNGState()

    def replayable(x: Tensor, *more: Any, **named: Any) -> Any:
        is_replay, current = start.state is not None, SavedRNGState()
        current.save_or_restore(x.device)
        start.save_or_restore(x.device)
        try:
            return call(x, *more, **named)
        finally:
            if is_replay:
                current.save_or_restore(x.device)

    return replayable


# Default size of a chunk of the MLP half, in elements of its (tokens, d_ff) tensor: enough for fast
# matmuls, but only a small part of a long sequence.
MLP_CHUNK_ELEMENTS = 2**25
CHUNK_MULTIPLE = 64  # tokens; the length of each chunk except the last is a multiple of this

# A policy runs a model.Block, x (B, T, C) -> (B, T, C), on a `View` of the block, with activation
# checkpoints around some of its methods. All arithmetic is that of model.py. `block(x, ...,
# policy=p)` calls p inside the block's forward, so everything that wraps a block's forward
# (sharding of weights, a compiler) works with every policy. `run_policy` stores the block's other
# arguments in the view, so that a policy passes only x.
#
# `chunk_sizes` maps the number of tokens of a sequence to the numbers of tokens of its chunks,
# which backward recomputes one by one in the MLP half. None: the sequence is one chunk.
ChunkSizesFn = Callable[[int], list[int]] | None


class View:
    """A proxy of a module with some methods or layers `replaced`; the module does not change.

    A view's methods are those of the module's class with the view as `self`, so that `self.name` in
    them is the replacement of `name`, or else the module's own. A call of the view runs `forward`
    without the module's hooks, and adds the arguments `more` and `named`. A view of a view has the
    replacements and the arguments of both.
    """

    # (torch.compile looks up attributes before __init__ has run.)
    module: Any = None
    replaced: dict[str, Any] = {}

    def __init__(self, module: Any, more: tuple = (), named: Any = None, **replaced: Any):
        self.more, self.named = more, named or {}
        if isinstance(module, View):
            self.more, self.named = module.more + self.more, {**module.named, **self.named}
            replaced = {**module.replaced, **replaced}
            module = module.module
        self.module, self.replaced = module, replaced

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.module)  # for `super()` in a method of a subclass

    def __getattr__(self, name: str) -> Any:
        if name in self.replaced:
            return self.replaced[name]
        value = getattr(self.module, name)
        is_method = ismethod(value) and value.__self__ is self.module  # (no classmethod)
        return partial(value.__func__, self) if is_method else value

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.forward(*inputs, *self.more, **named, **self.named)


def run_policy(policy: Callable, block: Any, x: Tensor, *more: Any, **named: Any) -> Tensor:
    """Run a block under `policy`, with `more` and `named`, the other arguments of its forward."""
    return policy(View(block, more=more, named=named), x)


class Deferred(NamedTuple):
    """The result of `layer(x)`, not computed yet: the next layer's checkpoint computes it.

        y = defer(ln_1)(x)            # Deferred(ln_1, x)
        # One checkpoint around attn.qkv(ln_1(x)), which keeps x and not y:
        qkv = recompute_up_to_matmul(attn.qkv)(y)

    A layer may be deferred only if its result goes to a function that `recompute_up_to_matmul`
    returned.
    """

    layer: Callable[[Tensor], Any]
    x: Tensor


def defer(layer: Callable) -> Callable[[Any], Deferred]:
    """Return a function that returns `layer(x)` as a Deferred."""
    return lambda x: Deferred(layer, x)


def recompute_up_to_matmul(layer: Callable) -> Callable:
    """Return `layer`, which ends in a linear layer, in an activation checkpoint that also computes
    a Deferred input.

    Early stop leaves the last matmul out of recomputation. torch.compile has no early stop and
    would repeat that matmul if the next operator saves its result, so `options` keeps results of
    matmuls.
    """

    def checkpointed(x: Any, *more: Any, **named: Any) -> Any:
        contexts = partial(create_selective_checkpoint_contexts, MATMUL_OPS)
        options: dict = {"context_fn": contexts} if torch.compiler.is_compiling() else {}
        both, start = layer, x
        if isinstance(x, Deferred):
            both = lambda first, *more, **named: layer(x.layer(first), *more, **named)  # noqa: E731
            start = x.x
        return activation_checkpoint(both, start, *more, has_dropout=False, **named, **options)

    return checkpointed


def cheap(block: Any, x: Tensor) -> Tensor:
    """Recompute the LayerNorms and GELU, but no matmul (Megatron-LM: output-discarding recompute;
    llm.c: the flag -r 2)."""
    attn, mlp = block.attn, block.mlp
    # Each checkpoint ends in a matmul, which early stop leaves out of recomputation. The
    # returned view has only the halves, so that a LayerNorm is deferred only inside its half: where
    # a changed `Block.forward` calls a LayerNorm itself (post-norm), it needs a tensor.
    up, down = recompute_up_to_matmul(mlp.up_project), recompute_up_to_matmul(mlp.down_project)
    halves = View(
        block,
        ln_1=defer(block.ln_1),
        attn=View(attn, qkv=recompute_up_to_matmul(attn.qkv)),
        ln_2=defer(block.ln_2),
        mlp=View(mlp, up_project=up, down_project=down),
    )
    return View(block, attention=halves.attention, feed_forward=halves.feed_forward)(x)


def recompute_mlp(block: Any, x: Tensor, chunk_sizes: ChunkSizesFn = None) -> Tensor:
    """Recompute the MLP half, like --recompute-modules mlp of Megatron-LM."""
    return View(block, feed_forward=checkpointed_mlp(block, chunk_sizes))(x)


def checkpointed_mlp(block: Any, chunk_sizes: ChunkSizesFn) -> Callable[[Tensor], Tensor]:
    """Return a function (B, T, C) -> (B, T, C): the MLP half in an activation checkpoint.

    With `chunk_sizes`, each chunk of tokens has its own checkpoint. It keeps only its part of x2,
    which is a view, and backward recomputes one chunk at a time, so that only one chunk's (tokens,
    d_ff) tensors exist. The loss and the gradients of activations are bitwise equal, because a
    token's row of a matmul does not depend on other rows. The gradients of the weights of ln_2 and
    of the MLP are sums over tokens, and chunks change the rounding of these sums.

    All chunks are in one graph, so DDP or FSDP gets the gradient of a weight after autograd has
    summed it over the chunks. (An autograd.Function per chunk would pass on each chunk's gradient.)
    Autocast's cache of weights must be off. Otherwise all chunks would share one low-precision copy
    of a weight, and autograd would sum their gradients in that precision.
    """
    half = partial(activation_checkpoint, block.feed_forward, has_dropout=False)

    def mlp_in_chunks(x: Tensor) -> Tensor:
        sizes = chunk_sizes(x.size(1)) if chunk_sizes else []
        return torch.cat([half(part) for part in x.split(sizes, 1)], 1) if sizes[1:] else half(x)

    return mlp_in_chunks


def mlp_chunk_sizes(n_tokens: int, d_ff: int, n_chunks: int) -> list[int]:
    """Return the number of tokens of each chunk of a sequence of `n_tokens`.

    `n_chunks`: the maximal number of chunks; 0: chunks of about `MLP_CHUNK_ELEMENTS` elements. All
    chunks except the last have the same length, a multiple of CHUNK_MULTIPLE, and the last has at
    least CHUNK_MULTIPLE tokens, unless the sequence is shorter. Other lengths could change the
    results, because some kernels round differently if a matmul has few rows, or in its last rows.
    """
    units = max(1, n_tokens // CHUNK_MULTIPLE)
    each = math.ceil(units / (n_chunks or math.ceil(n_tokens * d_ff / MLP_CHUNK_ELEMENTS)))
    size, before_last = each * CHUNK_MULTIPLE, math.ceil(units / each) - 1
    return [size] * before_last + [n_tokens - size * before_last]


def recompute_attention(block: Any, x: Tensor) -> Tensor:
    """Recompute the attention half (Megatron-LM's --recompute-modules core_attn keeps qkv)."""
    half = partial(activation_checkpoint, block.attention, has_dropout=block_has_dropout(block))
    return View(block, attention=half)(x)


class AttentionCalled(Exception):
    """Ends a block's forward where it calls `attention`; has the arguments of that call."""


def raise_attention_called(*inputs: Any, **named: Any) -> Tensor:
    """Raise AttentionCalled, in the place of `attention`."""
    raise AttentionCalled(inputs, named)


def keep_qkv_and_attention(block: Any, x: Tensor) -> Tensor:
    """Keep x, qkv and attention's result; recompute LayerNorms, attn.c_proj and the MLP half."""
    half = partial(View, block, ln_1=defer(block.ln_1))
    # The attention half without c_proj.
    attn = View(block.attn, qkv=recompute_up_to_matmul(block.attn.qkv), c_proj=lambda y: y)
    without_c_proj = half(attn=attn).attention
    # Run forward only to learn which arguments it gives to `attention`. (A changed block may never
    # call that.)
    try:
        return View(block, attention=raise_attention_called)(x)
    except AttentionCalled as call:
        inputs, named = call.args
    attended = without_c_proj(*inputs, **named)

    def rest(x: Tensor, attended: Tensor) -> Tensor:
        # The attention half with a known result: only c_proj runs, neither ln_1 nor qkv.
        known = View(block.attn, qkv=lambda x: None, attend=lambda *_, **__: attended)
        return View(block, attention=half(attn=known).attention)(x)

    return activation_checkpoint(rest, x, attended, has_dropout=block_has_dropout(block))


# A *selective checkpoint* around a whole block keeps x and the results of the operators that a list
# names, which recomputation reuses. The lists must name overloads (.default). A linear layer with a
# bias is addmm, not mm, and each kind of device has its own attention operators.
#
# torch keeps the results in the checkpoint, not as saved tensors, so offload's hooks do not get
# them and offload moves only x. (Compiled code saves results as tensors, which offload moves.)
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


# From torch 2.14 on, this argument of torch's checkpoint decides whether hooks get the results that
# a selective checkpoint keeps. Without it torch warns that a later release will give them to hooks
# by default: offload would then move more tensors than the planner predicts.
HAS_RESPECT_HOOKS_ARGUMENT = "respect_saved_tensors_hooks" in signature(torch_checkpoint).parameters
HIDE_FROM_HOOKS_KWARGS = (
    {"respect_saved_tensors_hooks": False} if HAS_RESPECT_HOOKS_ARGUMENT else {}
)


def keep_results_of(operators: list) -> Callable[..., Tensor]:
    """Return a policy that keeps x and the results of `operators`, and recomputes the rest."""
    contexts = partial(create_selective_checkpoint_contexts, operators)

    def policy(block: Any, x: Tensor, chunk_sizes: ChunkSizesFn = None) -> Tensor:
        has_dropout = block_has_dropout(block)
        halves: dict[str, Any] = {}
        # (Not for compiled code, in which each random operator has its own RNG state.)
        if has_dropout and not torch.compiler.is_compiling():
            halves["attention"] = with_same_rng_after_attention(block.attention)
        if chunk_sizes:
            halves["feed_forward"] = checkpointed_mlp(block, chunk_sizes)
        view = View(block, **halves)
        return activation_checkpoint(
            view, x, has_dropout=has_dropout, context_fn=contexts, **HIDE_FROM_HOOKS_KWARGS
        )

    return policy


def with_same_rng_after_attention(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a block's attention half, (B, T, C) -> (B, T, C): save the RNG's state after attention,
    and restore it in recomputation.

    On a GPU, attention draws its mask inside one operator. A recomputation that reuses the
    operator's result draws no mask, and the next dropout would get attention's random numbers.
    """
    rng_after_attention = SavedRNGState()

    def attention_with_saved_rng(x: Tensor, *more: Any, **named: Any) -> Tensor:
        attended = attention(x, *more, **named)
        rng_after_attention.save_or_restore(x.device)
        return attended

    return attention_with_saved_rng


def block_has_dropout(block: Any) -> bool:
    """Return whether dropout is on in a model.Block."""
    return block.dropout.p > 0


class Policy(NamedTuple):
    """The description of a policy for formulas, tables and pages.

    Tensors have the names in the docstring of this file, and three more: `c_proj_cast` is the
    low-precision copy of attn.c_proj's weight, `mask` the masks of both dropouts, `results` the
    results of attn.c_proj and mlp.c_proj. `sizes` in planner/formulas.py has each name's bytes.
    """

    saved_tensor_names: str  # names of the tensors that a block keeps
    description: str  # text for users: what is kept or done again
    forward: Callable[..., Tensor] | None = None  # (block, x) -> result; None: block(x)
    # True: a selective checkpoint decides operator by operator, so it keeps attention's result only
    # if attention is one fused operator.
    needs_fused_attention: bool = False
    supports_mlp_chunks: bool = False  # can recompute the MLP half in chunks (`mlp_chunks`)


ATTENTION_TENSORS, MLP_TENSORS = "x ln_1 qkv attention c_proj_cast mask", "x2 ln_2 c_fc gelu"
POLICIES = {  # comments: kept bytes per block (BTC: B * T * C bytes); libraries with that policy
    "none": Policy(f"{ATTENTION_TENSORS} {MLP_TENSORS}",  # 36 BTC
        "every intermediate is kept; the head runs in chunks of tokens"),
    "cheap": Policy("x qkv attention c_proj_cast mask x2 c_fc",  # 24 BTC
        "LayerNorms and GELU are done again in backward, no matrix product is", cheap),
    "selective": Policy("x qkv attention c_fc results",  # 24 BTC; torchtune; JAX dots_saveable
        "what matrix products and attention made is kept, the rest is done again",
        keep_results_of(ATTENTION_OPS + MATMUL_OPS), needs_fused_attention=True),
    "mlp": Policy(f"{ATTENTION_TENSORS} x2",  # 18 BTC
        "the MLP half of each block is done again in backward", recompute_mlp,
        supports_mlp_chunks=True),
    "attn": Policy(f"x mask {MLP_TENSORS}",  # 26 BTC
        "the attention half of each block is done again in backward", recompute_attention),
    "qkv": Policy("x qkv attention",  # 12 BTC
        "LayerNorms, attention's output layer and the MLP half are done again in backward",
        keep_qkv_and_attention),
    # (to repeat attention would be slow for long sequences)
    "sdpa": Policy("x attention",  # 6 BTC; axolotl
        "of each block only its input and attention's result are kept",
        keep_results_of(ATTENTION_OPS), needs_fused_attention=True, supports_mlp_chunks=True),
    "full": Policy("x",  # 4 BTC
        "an activation checkpoint around each block: only its input is kept",
        supports_mlp_chunks=True),  # MiniGPT.forward itself calls `checkpoint` for this policy
}  # fmt: skip
POLICY_NAMES = tuple(POLICIES)


# ---- the policy string: a policy for each block


POLICY_GRAMMAR = "POLICY[:N][,POLICY][/K][+nested][+offload]"
POLICY_STRING = re.compile(
    r"(\w+)(?::(\d{1,9})(?:,(\w+))?)?(?:/(\d{1,9}))?(\+nested)?(\+offload)?", re.ASCII
)


class RecomputePlan(NamedTuple):
    """A policy string, parsed for a model by `parse_recompute_plan`; `format_recompute_plan` does
    the reverse."""

    policies: tuple[str, ...]  # one for each block
    group_size: int = 1  # number of blocks in each shared checkpoint; only `full` blocks share one
    nested: bool = False  # each block of a group has a checkpoint of its own inside the shared one
    offload: bool = False  # CPU memory holds the tensors that the policies keep

    @property
    def supports_mlp_chunks(self) -> bool:
        """Return whether some block can recompute its MLP half in chunks."""
        return any(POLICIES[policy].supports_mlp_chunks for policy in self.policies)

    @property
    def group_policies_and_sizes(self) -> list[tuple[str, int]]:
        """Return (policy, number of blocks) for each call in MiniGPT.forward. A call runs one
        block, or a group of blocks that share a checkpoint."""
        whole = takewhile(lambda policy: policy == "full" and self.group_size > 1, self.policies)
        n = len(list(whole))
        groups = [("full", min(self.group_size, n - i)) for i in range(0, n, self.group_size)]
        return groups + [(policy, 1) for policy in self.policies[n:]]


@cache
def parse_recompute_plan(text: str, n_layers: int) -> RecomputePlan:
    """Parse a policy string for a model of `n_layers` blocks.

    `full`       this policy in all blocks
    `mlp:7`      `mlp` in the first 7 blocks, `none` in the others
    `mlp:7,full` `mlp` in the first 7 blocks, `full` in the others
    `full/2`     `full`, with a checkpoint around every 2 blocks; `full:8/2`: in the first 8 blocks
    `+nested`    also one checkpoint around each block in a group: see `run_group_in_checkpoint`
    `+offload`   CPU memory holds the tensors that the policies keep

    Raises ValueError if the string is invalid, with a message of one line that has the grammar.
    """
    match = POLICY_STRING.fullmatch(text)
    first, n, rest, group, nested, offload = match.groups() if match else [""] * 6
    n, group, rest = n_layers if n is None else int(n or 0), int(group or 1), rest or "none"
    wrong = ""
    if match is None:
        wrong = "N and K are whole numbers, and ,POLICY may only follow N"
    elif first not in POLICY_NAMES or rest not in POLICY_NAMES:
        wrong = f"a POLICY is one of {', '.join(POLICY_NAMES)}"
    elif n > n_layers:
        wrong = f"N must be in 0..{n_layers}"
    elif first == "none" and text != "none":
        wrong = "none stands alone"
    elif group < 1 or group > 1 and first != "full":
        wrong = "only blocks that are full can share a checkpoint, and K is at least 1"
    elif nested and group == 1:
        wrong = "+nested is only for groups of 2 or more blocks: full/2+nested"
    if wrong:
        raise ValueError(f"recompute must be {POLICY_GRAMMAR}, not {text[:40]!r}: {wrong}")
    policies = (first,) * n + (rest,) * (n_layers - n)
    nothing = set(policies) == {"none"}
    group = group if n else 1
    return RecomputePlan(policies, group, bool(nested) and group > 1, bool(offload) and not nothing)


def recompute_plan_of_config(config: Any) -> RecomputePlan:
    """Parse the policy string of a model.MiniGPTConfig."""
    return parse_recompute_plan(config.recompute, config.n_layers)


def format_recompute_plan(recompute: RecomputePlan) -> str:
    """Return the shortest policy string for `recompute`, or raise ValueError if none exists."""
    policies, group, nested, offload = recompute
    first, rest = policies[0], policies[-1]
    n = policies.index(rest) if rest != first else len(policies)
    has_form = policies == (first,) * n + (rest,) * (len(policies) - n)
    if not has_form or (first == "none" and rest != "none"):
        raise ValueError(f"no policy string says {policies}")
    text = first if n == len(policies) else f"{first}:{n}"
    text += f",{rest}" if rest not in (first, "none") else ""
    text += f"/{group}" if group > 1 else ""
    return text + "+nested" * nested + "+offload" * offload


@cache  # return the same object again: torch.compile would compile again for a new object
def make_policy_function(policy: str, d_ff: int, mlp_chunks: int) -> Callable[..., Tensor] | None:
    """Return the function for `block(x, policy=...)`, or None for `block(x)` without a policy."""
    entry = POLICIES[policy]
    call = entry.forward
    if entry.supports_mlp_chunks and mlp_chunks != 1:
        chunk_sizes = partial(mlp_chunk_sizes, d_ff=d_ff, n_chunks=mlp_chunks)
        call = partial(call or recompute_mlp, chunk_sizes=chunk_sizes)
    return call and partial(run_policy, call)


def run_group_in_checkpoint(
    blocks: list, nested: bool, x: Tensor, *more: Any, **named: Any
) -> Tensor:
    """Run a group of K blocks, x (B, T, C) -> (B, T, C); MiniGPT.forward puts this call, like that
    of one block, in a checkpoint. `more`, `named`: other arguments of each block's call.

    When the checkpoint recomputes, the tensors of all K blocks exist at once. If `nested`, each
    block has a checkpoint of its own inside: the group's recomputation keeps only the inputs of its
    blocks, and backward recomputes one block at a time.

    With L blocks, `full` keeps L inputs, but nested groups keep L / K inputs in forward and K more
    in backward, a sum that is least for K = sqrt(L) (Chen et al., 2016, arXiv 1604.06174). They
    repeat (K - 1) / K of a forward more than `full`: a group runs again without its last block.
    """
    for block in blocks:
        call = partial(block, **named)
        x = (
            activation_checkpoint(call, x, *more, has_dropout=block_has_dropout(block))
            if nested
            else call(x, *more)
        )
    return x
