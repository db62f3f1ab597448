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

The planner's model does the same here on fake tensors, without processes. The source is
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py; torch 2.11 and 2.13 were measured, and
take the same. A GPU copies on streams of its own, but Python allocates in this order there, too.
What an optimizer gathers (Muon: a few whole matrices at a time) is not followed.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from memory.head import parse_release
from model import MiniGPT, MiniGPTConfig

from .log import Log

GATHERED = "gathered from all processes, for as long as the group of layers runs"


def shard_of(config: MiniGPTConfig, n: int) -> MiniGPT:
    """What the first of n processes holds: the same parameters, with an n-th of the rows each.

    Rounded up: no process has more rows, and those with fewer have room for as many.
    """
    shard = MiniGPT(config)
    for module in shard.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            rows = -(-len(weight) // n)
            setattr(module, name, nn.Parameter(weight.new_empty(rows, *weight.shape[1:])))
    return shard


def tables(model: MiniGPT) -> list[nn.Embedding]:
    """The embeddings beside that of the tokens: of the positions, and what a changed model.py has;
    none where positions are rotated."""
    found = [module for module in model.children() if isinstance(module, nn.Embedding)]
    return [table for table in found if table is not model.token_embedding]


def share_of(state: int, config: MiniGPTConfig, n: int) -> int:
    """Of `state` bytes of weights, gradients and moments, what one of n processes has at least.

    An n-th, and the root's whole weights, which are there from forward to the end of backward.
    """
    root = (config.vocab_size + 2) * config.d_model
    return state if n == 1 else state // n + 4 * root


class Group:
    """Parameters that are gathered together, and whose gradients are reduced together."""

    def __init__(
        self,
        whole: Iterable[nn.Parameter],
        shards: Iterable[nn.Parameter],
        n: int,
        in_low: bool = False,
    ):
        """`in_low`: it is gathered in bfloat16."""
        self.whole, self.shards = list(whole), list(shards)
        # Of a buffer for gradients, and of one for weights, padding included.
        self.bytes = n * sum(shard.nbytes for shard in self.shards)
        self.gathered = self.bytes // (1 + in_low)
        self.rounded = in_low * self.gathered // n  # bytes of the shards that are sent
        self.arrived: Tensor | None = None  # the buffer, ahead of its backward
        self.weights: Tensor | None = None  # gathered


class Gathering:
    """Allocates and frees, in a step of `model`, what fully_shard does, when it does."""

    def __init__(
        self,
        model: MiniGPT,
        shard: MiniGPT,
        n: int,
        log: Log,
        gloo: bool,
        in_low: bool,
        sums: dict[nn.Parameter, Tensor],
    ):
        """`shard`: what shard_of(config, n) gave. `gloo`: and what that takes, which CPUs use.
        `in_low`: blocks are gathered in bfloat16. `sums`: gradients of earlier micro-batches in
        float32, of weights that have others in bfloat16."""
        self.model, self.log, self.gloo, self.sums = model, log, gloo, sums
        pairs = zip(model.blocks, shard.blocks, strict=False)  # (the step may have fewer blocks)
        self.blocks = [
            Group(gathered_by_block(block, in_low), gathered_by_block(its, in_low), n, in_low)
            for block, its in pairs
        ]
        pairs = zip(tables(model), tables(shard), strict=True)
        self.tables = [Group(table.parameters(), its.parameters(), n) for table, its in pairs]
        self.root = Group(in_no_group(model, in_low), in_no_group(shard, in_low), n)
        self.arrived: Tensor | None = None  # the buffer of the last group, in forward
        self.reduced: Tensor | None = None  # the buffer of the last gradients

    # ---- what happens

    def buffer(self, size: int, kind: str, name: str, why: str = "") -> Tensor:
        tensor = torch.empty(size, dtype=torch.uint8)
        self.log.name(tensor, kind, name, why)
        return tensor

    def gather(self, group: Group) -> Tensor:
        arriving = self.buffer(group.gathered, "parameters", "weights as they arrive", GATHERED)
        self.buffer(group.rounded, "", "shards, rounded to be sent")
        if self.gloo:  # it receives in memory of its own
            self.buffer(group.gathered, "", "gloo's own buffer")
        return arriving

    def copy_out(self, group: Group) -> None:
        group.weights = self.buffer(group.gathered, "parameters", "gathered weights", GATHERED)

    def before_forward(self, group: Group, *_: object) -> None:
        arriving, self.arrived = self.gather(group), None
        self.copy_out(group)
        self.arrived = arriving

    def before_backward(self, i: int) -> None:
        group, before = self.blocks[i], self.blocks[i - 1] if i > 0 else None
        if group.weights is None:  # else a replay has gathered them
            self.copy_out(group)
        group.arrived = None
        if before and before.weights is None:
            before.arrived = self.gather(before)

    def before_replay(self, group: Group) -> None:
        """Of a block whose backward is still to come. (Else its weights are there.)"""
        if group.weights is None:
            if group.arrived is None:
                group.arrived = self.gather(group)
            self.copy_out(group)

    def after_backward(self, group: Group) -> None:
        whole = [self.sums.pop(weight, cast(Tensor, weight.grad)) for weight in group.whole]
        for weight in group.whole:  # where there is a sum, the gradient is in it
            weight.grad = None
        group.weights = self.reduced = None
        self.reduced = self.buffer(
            group.bytes, "gradients", "gradients to be averaged", "on their way"
        )
        for of_all in whole:
            self.log.name(of_all, "gradients", "whole gradient", "on its way to be averaged")
        whole.clear()
        # Before 2.15 torch's loop has the last one until it is reduced.
        if parse_release(torch.__version__) >= (2, 15):
            del of_all
        for shard in group.shards:
            shard.grad = torch.empty_like(shard)
            self.log.name(shard.grad, "gradients", "share of a gradient")
        if self.gloo:  # it adds up in a copy
            self.buffer(group.bytes, "temporaries", "gloo's own buffer")

    def end_backward(self) -> None:
        """These come last: what they are given, ids, has no gradient that would tell when."""
        for group in (self.root, *self.tables):
            self.after_backward(group)
        self.reduced = None

    # ---- when

    def hooks(self) -> list[RemovableHandle]:
        """From now on, the log counts what is gathered instead of the whole weights."""

        def gather_last(_: Tensor) -> None:
            self.blocks[-1].arrived = self.gather(self.blocks[-1])

        def after(model: nn.Module, args: tuple, loss: Tensor) -> None:
            self.arrived = None
            loss.register_hook(gather_last)

        def after_lookup(group: Group, *_: object) -> None:
            group.weights = None

        for parameter in self.model.parameters():
            self.log.add(parameter).bytes = 0
        model = self.model
        found = [
            model.register_forward_pre_hook(partial(self.before_forward, self.root)),
            model.register_forward_hook(after),
        ]
        for table, group in zip(tables(model), self.tables, strict=True):
            found.append(table.register_forward_pre_hook(partial(self.before_forward, group)))
            found.append(table.register_forward_hook(partial(after_lookup, group)))
        for i, block in enumerate(self.model.blocks):
            found += self.hook_block(block, i)
        return found

    def hook_block(self, block: nn.Module, i: int) -> list[RemovableHandle]:
        group = self.blocks[i]

        def before(block: nn.Module, args: tuple) -> None:
            if self.log.phase == "backward":
                return self.before_replay(group)
            self.before_forward(group)
            args[0].register_hook(lambda _: self.after_backward(group))

        def after(block: nn.Module, args: tuple, x: Tensor) -> None:
            if self.log.phase == "backward":
                group.arrived = None  # the weights stay for its backward
                return
            group.weights = None
            # (A hook of x itself would run before those of the next block, whose input x is: they
            # run in the order in which they were registered. Its `after_backward` comes first.)
            cast(Any, x.grad_fn).register_prehook(lambda _: self.before_backward(i))

        return [block.register_forward_pre_hook(before), block.register_forward_hook(after)]


def gathered_by_block(blocks: nn.Module, in_low: bool) -> list[nn.Parameter]:
    """The weights that are gathered when a block runs: all of them or, in bfloat16, those that
    autocast rounds to it."""
    layers = [layer for layer in blocks.modules() if not in_low or isinstance(layer, nn.Linear)]
    return [weight for layer in layers for weight in layer.parameters(recurse=False)]


def in_no_group(model: MiniGPT, in_low: bool) -> list[nn.Parameter]:
    in_tables = nn.ModuleList(tables(model)).parameters()
    inside = {*gathered_by_block(model.blocks, in_low), *in_tables}
    return [parameter for parameter in model.parameters() if parameter not in inside]
