"""The ladder of recompute policies: what a block keeps for backward, and what it replays instead.

Backward of a linear layer needs the layer's input, backward of GELU needs GELU's input, and so on:
autograd keeps a tensor as soon as it goes *into* the operator whose backward will need it.
`checkpoint(f, x)` keeps x alone, and calls f(x) once more when backward asks for the first of the
others (scripts/checkpoint_from_scratch.py tells how). A policy is a choice of what to wrap in it.
Two facts make it interesting:

- The replay ends as soon as the last tensor that backward needs is there (*early stop*). A linear
  layer's input is kept before the layer runs: if f ends in one, that matmul is not done again. So
  `checkpoint(lambda wide: c_proj(gelu(wide)), wide)` replays a GELU, and no matmul at all.
- Dropout makes a mask, which backward needs, after the matmul before it. If f ends in dropout, that
  matmul is done again. So the checkpoints around a half of a block end before its dropout, which
  `block.add` does. Those around a whole block (`full`, `sdpa`), or around all that is behind
  attention (`qkv`), do the last c_proj again with dropout, and end before it without.

No policy changes one bit of the loss or of a gradient. What a block makes, in units of B * T * C
bytes under bfloat16 autocast (where the residual stream stays float32), with d_ff = 4 C:

    x  4     ln_1  2     qkv  6     attention  2     x2  4     ln_2  2     c_fc  8     gelu  8

x goes in, x2 is x after attention's half, the others are results of the layers of that name. With
fused attention and no dropout `none` keeps all of them, 36 (and 4 H / C for the softmax's
normaliser, 16 / C for mean and deviation of the LayerNorms). What the others keep: `POLICIES`.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from inspect import signature
from itertools import islice, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from .offload import HostMemory, Offload


def checkpoint(run: Callable, *inputs: Tensor, random: bool, **options: Any) -> Any:
    """Never the reentrant variant: it replays all (no early stop) and fails in some DDP settings.
    `random`: there is dropout in `run`. The RNG's state is kept, else the replay would draw other
    masks: wrong gradients, without an error."""
    if random and forgets_numbers(inputs[0].device) and not torch.compiler.is_compiling():
        run = drawing_alike(run)
    return torch_checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=random, **options)


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


# Elements that a chunk of the MLP half has of what is d_ff wide, if nobody says how many chunks:
# little beside a long sequence, enough tokens for fast matmuls.
WIDE = 2**25
ROWS_ALIKE = 64

# A policy is called by the block itself, `block(x, policy=cheap)`, in place of its plain forward:
# what hangs on a block's forward (sharded weights, a compiler) then works with every policy. It
# calls the parts of `block`, a model.Block, and spells no arithmetic of its own. `cut`: tokens of a
# sequence -> those of the chunks in which the MLP half is replayed; None: all in one.
Cut = Callable[[int], list[int]] | None


def cheap(block: Any, x: Tensor) -> Tensor:
    """Replay what is pointwise. Megatron-LM: output-discarding recompute; llm.c: -r 2."""

    def attention(before: Tensor) -> Tensor:
        return block.attn.c_proj(block.attn.attend(up_to_matmul(block.qkv, before)))

    def feed_forward(before: Tensor) -> Tensor:
        return up_to_matmul(block.narrow, up_to_matmul(block.widen, before))

    return block.add(x, attention, feed_forward)


def replay_mlp(block: Any, x: Tensor, cut: Cut = None) -> Tensor:
    """Replay the MLP half. Megatron-LM: --recompute-modules mlp."""
    return block.add(x, block.attention, in_chunks(block, cut))


def in_chunks(block: Any, cut: Cut) -> Callable[[Tensor], Tensor]:
    """The MLP half in an activation checkpoint; or in chunks of tokens, as `cut` says, each in one
    of its own.

    Backward then replays chunk by chunk, and never has more of what is d_ff wide than one chunk's.
    A chunk keeps its part of x2, a view. The loss and what flows back through the blocks keep their
    bits, as a token's row of a matmul does not depend on the others'. But the gradients of ln_2 and
    of the MLP's two layers are sums over tokens, and those are rounded otherwise.

    All chunks stand in one graph, where autograd sums up each weight's gradients before DDP or FSDP
    see them. (An autograd.Function with a backward a chunk would show them one by one.) Autocast's
    cache of weights has to be off: chunks would share a copy, and be summed up in its precision.
    """
    chunk = partial(checkpoint, block.feed_forward, random=False)
    return lambda x: by_chunks(chunk, x, cut(x.size(1)) if cut else [x.size(1)])


def by_chunks(run: Callable[[Tensor], Tensor], x: Tensor, sizes: list[int]) -> Tensor:
    """Apply `run` to chunks of x (B, T, C) along T."""
    if len(sizes) == 1:
        return run(x)
    return torch.cat([run(part) for part in x.split(sizes, dim=1)], dim=1)


def sizes_of_chunks(n_tokens: int, d_ff: int, asked: int) -> list[int]:
    """Tokens of a sequence's chunks. `asked`: how many, or fewer; 0 = as `WIDE` says.

    All but the last are as long, a multiple of ROWS_ALIKE, and the last has that many at least: of
    a few rows, and of those at the end of a matmul, some kernels round otherwise.
    """
    units = max(1, n_tokens // ROWS_ALIKE)
    each = math.ceil(units / (asked or math.ceil(n_tokens * d_ff / WIDE)))
    size, before_last = each * ROWS_ALIKE, math.ceil(units / each) - 1
    return [size] * before_last + [n_tokens - size * before_last]


def replay_attention(block: Any, x: Tensor) -> Tensor:
    """Replay the attention half. Megatron-LM: --recompute-modules core_attn, and its linears."""
    random = has_dropout(block)

    def attention(before: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return checkpoint(block.attention, before, random=random)
        # A compiler knows no early stop: c_proj, inside, would be done again for x2.
        attended = checkpoint(lambda x: block.attn.attend(block.qkv(x)), before, random=random)
        return block.attn.c_proj(attended)

    return block.add(x, attention, block.feed_forward)


def keep_qkv(block: Any, x: Tensor) -> Tensor:
    """Replay all but c_attn and attention."""
    attended = block.attn.attend(up_to_matmul(block.qkv, x))

    def rest(x: Tensor, attended: Tensor) -> Tensor:
        return block.add(x, lambda _: block.attn.c_proj(attended), block.feed_forward)

    return checkpoint(rest, x, attended, random=has_dropout(block))


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


# From 2.14 on torch asks whether hooks are to see those results, too, and warns where nothing is
# said, because it will show them one day. Then offload would move more than the planner says.
KNOWS_HOOKS = "respect_saved_tensors_hooks" in signature(torch_checkpoint).parameters
HIDDEN_FROM_HOOKS = {"respect_saved_tensors_hooks": False} if KNOWS_HOOKS else {}


def keep_results_of(operators: list) -> Callable[..., Tensor]:
    contexts = partial(create_selective_checkpoint_contexts, operators)

    def run(block: Any, x: Tensor, cut: Cut = None) -> Tensor:
        random, attention = has_dropout(block), block.attention
        # (Compiled, each operator that draws has a state of its own.)
        if random and not torch.compiler.is_compiling():
            attention = with_same_masks(block.attention)
        feed_forward = in_chunks(block, cut) if cut else block.feed_forward
        forward = partial(block.add, attention=attention, feed_forward=feed_forward)
        return checkpoint(forward, x, random=random, context_fn=contexts, **HIDDEN_FROM_HOOKS)

    return run


def with_same_masks(attention: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A block's attention half, for a replay that is handed attention's result. A GPU's attention
    draws its masks inside of one operator: handed out, it draws nothing, and the mask behind it
    would be made of the numbers that attention had in forward."""
    behind_attention = Bookmark()

    def marked(x: Tensor) -> Tensor:
        attended = attention(x)
        behind_attention(x.device)
        return attended

    return marked


def up_to_matmul(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A checkpoint around what ends in a linear layer, whose result whoever comes next may keep.

    Early stop leaves that layer out of the replay. A compiler, which knows no early stop, would
    not keep the result, and multiply again: it has to be told.
    """
    compiled = torch.compiler.is_compiling()
    contexts = partial(create_selective_checkpoint_contexts, MATMUL_OPS)
    return checkpoint(run, x, random=False, **({"context_fn": contexts} if compiled else {}))


def has_dropout(block: Any) -> bool:
    return block.dropout.p > 0


class Policy(NamedTuple):
    """All that formulas, tables and pages know of a policy. (Tensors have the names above, and with
    each goes what comes along: `sizes` in planner/formulas.py. `c_proj` is the copy of its weight,
    `mask` those of both dropouts.)"""

    keeps: str  # tensors of a block; `results` are those of both c_proj
    # What is multiplied once more in backward. (With dropout, who keeps no mask and replays c_fc
    # does so with the last matmul, too.)
    twice: str
    words: str
    run: Callable[..., Tensor] | None = None  # (block, x); None: model.py has it
    by_operator: bool = False  # keeps attention's result where one operator makes it
    cuts_mlp: bool = False  # replays the MLP half in chunks, `mlp_chunks`, if it is told to


OF_ATTENTION, OF_MLP = "x ln_1 qkv attention c_proj mask", "x2 ln_2 c_fc gelu"
POLICIES = {  # the comments: B * T * C bytes a block, and where else it is found
    "none": Policy(f"{OF_ATTENTION} {OF_MLP}", "",  # 36
        "every intermediate is kept; the head runs in chunks of tokens"),
    "cheap": Policy("x qkv attention c_proj mask x2 c_fc", "",  # 24
        "LayerNorms and GELU are done again in backward, no matrix product is", cheap),
    "selective": Policy("x qkv attention c_fc results", "",  # 24; torchtitan, JAX dots_saveable
        "what matrix products and attention made is kept, the rest is done again",
        keep_results_of(ATTENTION_OPS + MATMUL_OPS), by_operator=True),
    "mlp": Policy(f"{OF_ATTENTION} x2", "c_fc",  # 18
        "the MLP half of each block is done again in backward", replay_mlp, cuts_mlp=True),
    "attn": Policy(f"x mask {OF_MLP}", "c_attn attention",  # 26
        "the attention half of each block is done again in backward", replay_attention),
    "qkv": Policy("x qkv attention", "c_proj c_fc",  # 12
        "LayerNorms, attention's output layer and the MLP half are done again in backward",
        keep_qkv),
    "sdpa": Policy("x attention", "c_attn c_proj c_fc",  # 6; axolotl: what costs most at long T
        "of each block only its input and attention's result are kept",
        keep_results_of(ATTENTION_OPS), by_operator=True, cuts_mlp=True),
    "full": Policy("x", "c_attn attention c_proj c_fc",  # 4; the line in MiniGPT.forward
        "an activation checkpoint around each block: only its input is kept", cuts_mlp=True),
}  # fmt: skip
RECOMPUTE_POLICIES = tuple(POLICIES)


# ---- the policy string: which block has which


GRAMMAR = "POLICY[:N][,POLICY][/K][+nested][+offload]"
STRING = re.compile(
    r"(\w+)(?::(\d{1,9})(?:,(\w+))?)?(?:/(\d{1,9}))?(\+nested)?(\+offload)?", re.ASCII
)


class Recompute(NamedTuple):
    """What a policy string says of each block of a model: `expand` makes it, `write` goes back."""

    policies: tuple[str, ...]  # of each block
    group: int = 1  # so many of the first blocks, which are `full` then, share a checkpoint
    nested: bool = False  # each block of a group has one of its own, too, inside of that
    offload: bool = False  # what the policies keep waits in CPU memory

    @property
    def cuts_mlp(self) -> bool:
        """Is there a block whose MLP half can be replayed in chunks?"""
        return any(POLICIES[policy].cuts_mlp for policy in self.policies)

    @property
    def calls(self) -> list[tuple[str, int]]:
        """(policy, blocks) of each call in MiniGPT.forward: a group of blocks is called as one."""
        whole = takewhile(lambda policy: policy == "full" and self.group > 1, self.policies)
        n = len(list(whole))
        groups = [("full", min(self.group, n - i)) for i in range(0, n, self.group)]
        return groups + [(policy, 1) for policy in self.policies[n:]]


@cache
def expand(text: str, n_layers: int) -> Recompute:
    """What a policy string says of `n_layers` blocks.

    `full`       the policy of all blocks
    `mlp:7`      of the first 7; the others have none
    `mlp:7,full` and another one of the others
    `full/2`     one checkpoint around every 2 of the `full` blocks that come first
    `+nested`    inside of it one around each of them: see `one_by_one`
    `+offload`   what the policies keep waits in CPU memory

    Raises ValueError, one line with the grammar, if it cannot be.
    """
    match = STRING.fullmatch(text)
    first, n, rest, group, nested, offload = match.groups() if match else [""] * 6
    n, group, rest = n_layers if n is None else int(n or 0), int(group or 1), rest or "none"
    wrong = ""
    if match is None:
        wrong = "N and K are whole numbers, and ,POLICY stands behind an N"
    elif first not in RECOMPUTE_POLICIES or rest not in RECOMPUTE_POLICIES:
        wrong = f"a POLICY is one of {', '.join(RECOMPUTE_POLICIES)}"
    elif n > n_layers:
        wrong = f"N must be in 0..{n_layers}"
    elif first == "none" and text != "none":
        wrong = "none stands alone"
    elif group < 1 or group > 1 and first != "full":
        wrong = "only blocks that are full can share a checkpoint, one or more of them"
    elif nested and group == 1:
        wrong = "only groups can be nested: full/2+nested, or more than 2"
    if wrong:
        raise ValueError(f"recompute must be {GRAMMAR}, not {text[:40]!r}: {wrong}")
    policies = (first,) * n + (rest,) * (n_layers - n)
    nothing = set(policies) == {"none"}
    group = group if n else 1
    return Recompute(policies, group, bool(nested) and group > 1, bool(offload) and not nothing)


def expanded(config: Any) -> Recompute:
    """What the policy string of a model.MiniGPTConfig says."""
    return expand(config.recompute, config.n_layers)


def written(config: Any) -> str:
    """Its policy string, the shortest that says the same."""
    return write(expanded(config))


def write(recompute: Recompute) -> str:
    """The shortest policy string that says it. Raises ValueError if none does."""
    policies, group, nested, offload = recompute
    first, rest = policies[0], policies[-1]
    n = policies.index(rest) if rest != first else len(policies)
    if policies != (first,) * n + (rest,) * (len(policies) - n) or first == "none" != rest:
        raise ValueError(f"no policy string says {policies}")
    text = first if n == len(policies) else f"{first}:{n}"
    text += f",{rest}" if rest not in (first, "none") else ""
    text += f"/{group}" if group > 1 else ""
    return text + "+nested" * nested + "+offload" * offload


# (x -> x after a block or a group of them; is the checkpoint of MiniGPT.forward around it?)
Call = tuple[Callable[..., Tensor], bool]


@cache  # (compiled code is for one function, and for another one it would be made anew)
def inside(policy: str, d_ff: int, mlp_chunks: int) -> Callable[..., Tensor] | None:
    """What a block is told of its policy; None: its plain forward runs."""
    found = POLICIES[policy]
    if not found.cuts_mlp or mlp_chunks == 1:
        return found.run
    return partial(
        found.run or replay_mlp, cut=partial(sizes_of_chunks, d_ff=d_ff, asked=mlp_chunks)
    )


class Schedule:
    """What MiniGPT.forward calls, one after the other: each block, or group of them, as the policy
    string of its config says. Evaluation recomputes nothing."""

    def __init__(self, plain: Callable[[Any], Iterable[Call]]):
        """`plain`: model.py's own, which knows none and full."""
        self.plain = plain
        self.host = HostMemory()  # that offload copies to

    def __call__(self, model: Any) -> Iterable[Call]:
        config = model.config
        # Where torch's checkpoint draws other masks, ours has to be around a block.
        redraws = config.dropout > 0 and forgets_numbers(next(model.parameters()).device)
        known = config.recompute in ("none", "full") and config.mlp_chunks == 1 and not redraws
        return self.plain(model) if known or not model.training else self.calls(model, redraws)

    def calls(self, model: Any, redraws: bool) -> Iterator[Call]:
        config, blocks, offload = model.config, iter(model.blocks), Offload(self.host)
        how = expanded(config)
        try:
            for i, (policy, size) in enumerate(how.calls):
                group, is_full = list(islice(blocks, size)), policy == "full"
                run = group[0] if size == 1 else partial(one_by_one, group, how.nested)
                if its := inside(policy, config.d_ff, config.mlp_chunks):
                    run = partial(run, policy=its)
                if is_full and (how.offload or redraws):  # (only hooks around it see its input)
                    run, is_full = partial(checkpoint, run, random=config.dropout > 0), False
                if how.offload:
                    # (The last one's backward comes first: it would have it all straight back.)
                    moves = policy != "none" and i + 1 < len(how.calls)
                    run = offload.around(run, moves, group)
                yield run, is_full
        finally:
            offload.settle()


def one_by_one(
    blocks: list, nested: bool, x: Tensor, past: None = None, policy: Callable | None = None
) -> Tensor:
    """Run several blocks, which MiniGPT.forward calls as if they were one.

    Around them is a checkpoint, whose replay would make all that K blocks keep, at a time.
    `nested`: each block is in a checkpoint of its own as well, so the group's replay keeps their
    inputs only, and then backward replays block by block. L blocks so keep L / K inputs in forward
    and K in backward, least for K = sqrt(L) (Chen et al., 2016, arXiv 1604.06174), where `full`
    keeps L. It costs (K - 1) / K of one more forward: the group's replay ends when it has the last
    block's input.
    """
    for block in blocks:
        run = partial(block, policy=policy) if policy else block
        x = checkpoint(run, x, random=has_dropout(block)) if nested else run(x)
    return x
