"""Shards: several processes hold one model between them, and what that adds to a step's memory.

train_fsdp.py shards with `fully_shard` (FSDP2): each process keeps 1 / n of every weight, gradient
and moment, and computes with whole weights, one block at a time. A block is a *group*, and so is a
table (of the positions); and what is in none, the root: token embedding and ln_f. A process has,
beside its shards:

    when                          what
    a group is about to run       a flat buffer in which all processes' shards arrive, and the
                                  weights, copied out of it. In forward the buffer stays until the
                                  next group's has arrived
    it has run                    the weights go; but the root's stay until backward is over
    its backward is about to run  its weights again (not a table's: its gradient does not
                                  need them); and the buffer of the block before it, so that
                                  backward need not wait for that
    it is replayed ahead of that  its weights, until its backward is over: in full/K+nested
    its backward is over          the weights go; its whole gradients are copied to a flat buffer
                                  and go; 1 / n of the sums arrives. The buffer stays until the next
                                  group is there
    more micro-batches come       the whole gradients of all groups wait

Gathered in bfloat16 (--gather-dtype), a block's group is its linear layers; its LayerNorms stay in
float32, and are the root's. A process rounds its shards, then sends them. Whole gradients of linear
layers are made in bfloat16; they wait and are summed over processes in float32.

All that is added to the log of a step (`add_shards`), whose operators tell when a block runs. It
agrees with real processes within 2 %. The source is
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py; torch 2.11 and 2.13 were measured, and
take the same. A GPU copies on streams of its own, but Python allocates in this order there, too.
What an optimizer gathers (Muon: a few whole matrices at a time) is not followed.
"""

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from memory.head import parse_release
from model import MiniGPT, MiniGPTConfig

from .op_recorder import OpRecorder

AVERAGED, GLOO = "gradients to be averaged", "gloo's own buffer"
GATHERED = "gathered from all processes, for as long as the group of layers runs"


def make_local_model(config: MiniGPTConfig, n: int) -> MiniGPT:
    """What the first of n processes holds: the same parameters, with an n-th of the rows each.

    Rounded up: no process has more rows, and those with fewer have room for as many.
    """
    shard = MiniGPT(config)
    for module in shard.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            rows = -(-len(weight) // n)
            setattr(module, name, nn.Parameter(weight.new_empty(rows, *weight.shape[1:])))
    return shard


def position_tables(model: MiniGPT) -> list[nn.Embedding]:
    """The embeddings beside that of the tokens: of the positions, and what a changed model.py has;
    none where positions are rotated."""
    found = [module for module in model.children() if isinstance(module, nn.Embedding)]
    return [table for table in found if table is not model.token_embedding]


def state_bytes_per_rank(state: int, config: MiniGPTConfig, n: int) -> int:
    """Of `state` bytes of weights, gradients and moments, what one of n processes has at least.

    An n-th, and the root's whole weights, which are there from forward to the end of backward.
    """
    root = (config.vocab_size + 2) * config.d_model
    return state if n == 1 else state // n + 4 * root


def add_shards(
    log: OpRecorder,
    model: MiniGPT,
    own: MiniGPT,
    n: int,
    gloo: bool,
    in_low: bool,
    sums: dict[nn.Parameter, Tensor],
) -> None:
    """Add to the log of a forward and backward what fully_shard allocates, and end what it frees.

    `own`: the shards, with their gradients. `gloo`: and what that takes, which CPUs use. `in_low`:
    blocks are gathered in bfloat16. `sums`: gradients of earlier micro-batches in float32, of
    weights that have others in bfloat16.
    """
    times, now = times_of(log), log.n_ops

    def add(kind: str, name: str, size: int, born: int, died: int) -> None:
        if born <= died:
            log.add_bytes(size, name, GATHERED, born, died, kind)

    def gather(size: int, arrives: int, used: int, begin: int, end: int) -> None:
        """Weights arrive in a buffer, which is there up to operator `used`. They are whole from
        `begin` to `end`."""
        add("parameters", "weights as they arrive", size, arrives, used)
        add("temporaries", GLOO, size * gloo, arrives, arrives)
        add("parameters", "gathered weights", size, begin, end)

    def average(
        whole: list[nn.Parameter], shards: list[nn.Parameter], end: int, at: int, then: int
    ) -> None:
        """Behind operator `end` whole gradients go. Their copies are in a buffer, which is there
        from operator `at`, when shares of the sums come, up to `then`."""
        size = n * sum(shard.nbytes for shard in shards)
        add("gradients", AVERAGED, size, at, then)
        add("temporaries", GLOO, size * gloo, at, min(at, then))
        share_gradients(log, whole, shards, sums, end)

    # The root, until backward is over; tables, until the blocks begin.
    begin, first = times["forward", None][0], times["forward", 0][0]
    root, shards = params_in_root_group(model, in_low), params_in_root_group(own, in_low)
    size = n * sum(shard.nbytes for shard in shards)
    gather(size, begin, begin + 1 if position_tables(model) else first, begin, now)
    average(root, shards, now, now + 1, now)  # (the buffer takes the place of its weights)
    # Before 2.15 torch's loop has the last one until it is reduced.
    early = parse_release(torch.__version__) >= (2, 15)
    for table, its in zip(position_tables(model), position_tables(own), strict=True):
        gather(n * its.weight.nbytes, begin + 1, first - 1, begin + 2, first - 1)
        average([*table.parameters()], [*its.parameters()], now - early, now, now)
    last_block = len(model.blocks) - 1
    for i, (block, part) in enumerate(zip(model.blocks, own.blocks, strict=False)):
        whole, shards = (
            params_gathered_by_block(block, in_low),
            params_gathered_by_block(part, in_low),
        )
        size = n * sum(shard.nbytes for shard in shards) // (1 + in_low)
        (begin, _, end), (again, _, done) = times["forward", i], times["backward", i]
        # In backward it arrives while the block behind it is at work.
        if i < last_block:
            used, ahead = end, times["backward", i + 1][1]
        else:
            used, ahead = log.forward_end, log.forward_end + 1
        gather(size, begin, used, begin, end)
        gather(size, ahead, again - 1, again, done)
        then = times["backward", i - 1][2] if i > 0 else now - 1
        average(whole, shards, done, done + 1, then)


def share_gradients(
    log: OpRecorder,
    whole: list[nn.Parameter],
    shards: list[nn.Parameter],
    sums: dict[nn.Parameter, Tensor],
    end: int,
) -> None:
    """Behind operator `end` whole gradients go, and shares of them come."""
    gradients: list[Tensor] = [cast(Tensor, parameter.grad) for parameter in whole]
    gradients += [sums.pop(parameter) for parameter in {*whole} & {*sums}]
    gone = [log.storage_of(gradient) for gradient in gradients]
    gradients.clear()
    for parameter in whole:
        parameter.grad = None
    for storage in gone:
        storage.kind, storage.name, storage.died = "gradients", "whole gradient", end
    for shard in shards:
        log.storage_of(cast(Tensor, shard.grad)).born = min(end + 1, log.n_ops)


def times_of(log: OpRecorder) -> dict[tuple[str, int | None], tuple[int, int, int]]:
    """(phase, block) -> the operators with which it begins, begins for the last time, and ends."""
    times: dict[tuple[str, int | None], tuple[int, int, int]] = {}
    for (at, phase, block), (then, *_) in pairwise([*log.places, (log.n_ops + 1, "", None)]):
        begin, _, _ = times.get((phase, block), (at, 0, 0))
        times[phase, block] = begin, at, then - 1
    return times


def params_gathered_by_block(blocks: nn.Module, in_low: bool) -> list[nn.Parameter]:
    """The weights that are gathered when a block runs: all of them or, in bfloat16, those that
    autocast rounds to it."""
    layers = [layer for layer in blocks.modules() if not in_low or isinstance(layer, nn.Linear)]
    return [weight for layer in layers for weight in layer.parameters(recurse=False)]


def params_in_root_group(model: MiniGPT, in_low: bool) -> list[nn.Parameter]:
    in_tables = nn.ModuleList(position_tables(model)).parameters()
    inside = {*params_gathered_by_block(model.blocks, in_low), *in_tables}
    return [parameter for parameter in model.parameters() if parameter not in inside]
