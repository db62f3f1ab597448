"""Add the memory of sharding to a step: several processes share one model.

train_fsdp.py shards with `fully_shard` (FSDP2). Each of n processes keeps 1 / n of every weight,
gradient and moment. It computes with full weights, one group at a time. A *group* is a block, or a
table of positions. The root group has all other weights: token embedding and ln_f. Beside its
shards a process has:

    when                          memory
    a group is about to run       an all-gather buffer, in which the shards of all processes arrive,
                                  and the full weights, copied from it. In forward the buffer stays
                                  until the next group's buffer has arrived
    it has run                    its full weights are freed; the root's stay until backward ends
    its backward is about to run  its full weights again (not a table's: its gradient does not need
                                  them), and the all-gather buffer of the block before it, so that
                                  backward does not wait for it later
    it is recomputed before that  its full weights, until its backward ends (full/K+nested: the
                                  group's recomputation runs its blocks first)
    its backward has run          its full weights are freed; its full gradients are copied to a
                                  reduce-scatter buffer and freed; 1 / n of the sums arrives. The
                                  buffer stays until the next group's buffer exists
    more micro-batches follow     the full gradients of all groups stay

With --gather-dtype bfloat16 a block's group has only its linear layers. Its LayerNorms stay in
float32, in the root group. A process rounds its shards before it sends them. Backward makes full
gradients of linear layers in bfloat16. While they wait for more micro-batches, and in sums over
processes, they are float32.

`add_shards` adds this memory to the record of a step, whose operators show when each block runs.
The result agrees with real processes within 2 %. Source:
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py. torch 2.11 and 2.13 were measured, and
take the same. A GPU copies on separate streams, but Python allocates in the same order there. Left
out: weights that an optimizer gathers (Muon: a few full matrices at a time).
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
    """Return the model that rank 0 of n processes holds: 1 / n of each parameter's rows.

    The number of rows is rounded up. No rank has more, and ranks with fewer allocate as many.
    """
    shard = MiniGPT(config)
    for module in shard.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            rows = -(-len(weight) // n)
            setattr(module, name, nn.Parameter(weight.new_empty(rows, *weight.shape[1:])))
    return shard


def position_tables(model: MiniGPT) -> list[nn.Embedding]:
    """Return all embeddings except the token embedding: those of positions, or of a changed model.

    With rotary positions there is none.
    """
    tables = [module for module in model.children() if isinstance(module, nn.Embedding)]
    return [table for table in tables if table is not model.token_embedding]


def state_bytes_per_rank(state: int, config: MiniGPTConfig, n: int) -> int:
    """Return the bytes that one of n processes needs at least, of `state` bytes in all.

    `state`: bytes of weights, gradients and moments. A process has 1 / n of them, and the full
    float32 weights of the root group, which exist from forward to the end of backward.
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
    """Add to the record of forward and backward what fully_shard allocates; end what it frees.

    Args:
        log: a recorder; its step has run forward and backward with the full model.
        model: the full model, with its gradients.
        own: the model of this rank's shards, with their gradients.
        n: the number of processes.
        gloo: add gloo's buffers, too (the backend of CPUs).
        in_low: blocks are gathered in bfloat16.
        sums: weight -> gradient of earlier micro-batches in float32, for bfloat16 weights.
    """
    times, now = times_of(log), log.n_ops

    def add(kind: str, name: str, size: int, born: int, died: int) -> None:
        if born <= died:
            log.add_bytes(size, name, GATHERED, born, died, kind)

    def gather(size: int, arrives: int, used: int, begin: int, end: int) -> None:
        """Add a buffer of `size` bytes from operator `arrives` to `used`, and full weights of the
        same size from `begin` to `end`."""
        add("parameters", "weights as they arrive", size, arrives, used)
        add("temporaries", GLOO, size * gloo, arrives, arrives)
        add("parameters", "gathered weights", size, begin, end)

    def average(
        whole: list[nn.Parameter], shards: list[nn.Parameter], end: int, at: int, then: int
    ) -> None:
        """End full gradients after operator `end`. Add the buffer with their copies from operator
        `at`, when the shards of the sums arrive, to operator `then`."""
        size = n * sum(shard.nbytes for shard in shards)
        add("gradients", AVERAGED, size, at, then)
        add("temporaries", GLOO, size * gloo, at, min(at, then))
        share_gradients(log, whole, shards, sums, end)

    # The root stays until backward ends, tables until the blocks begin.
    begin, first = times["forward", None][0], times["forward", 0][0]
    root, shards = root_group_params(model, in_low), root_group_params(own, in_low)
    size = n * sum(shard.nbytes for shard in shards)
    gather(size, begin, begin + 1 if position_tables(model) else first, begin, now)
    average(root, shards, now, now + 1, now)  # (no buffer: the freed weights leave room for it)
    # Before 2.15 torch keeps the last gradient until it is reduced.
    early = parse_release(torch.__version__) >= (2, 15)
    for table, local_table in zip(position_tables(model), position_tables(own), strict=True):
        gather(n * local_table.weight.nbytes, begin + 1, first - 1, begin + 2, first - 1)
        average([*table.parameters()], [*local_table.parameters()], now - early, now, now)
    last_block = len(model.blocks) - 1
    for i, (block, local_block) in enumerate(zip(model.blocks, own.blocks, strict=False)):
        whole, shards = (
            params_gathered_by_block(block, in_low),
            params_gathered_by_block(local_block, in_low),
        )
        size = n * sum(shard.nbytes for shard in shards) // (1 + in_low)
        (begin, _, end), (again, _, done) = times["forward", i], times["backward", i]
        # In backward the weights arrive while the block after it runs.
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
    """Replace full gradients by their shards after operator `end`; set the full ones to None."""
    gradients: list[Tensor] = [cast(Tensor, parameter.grad) for parameter in whole]
    gradients += [sums.pop(parameter) for parameter in {*whole} & {*sums}]
    storages = [log.find_storage(gradient) for gradient in gradients]
    gradients.clear()
    for parameter in whole:
        parameter.grad = None
    for storage in storages:
        storage.kind, storage.name, storage.died = "gradients", "whole gradient", end
    for shard in shards:
        log.find_storage(cast(Tensor, shard.grad)).born = min(end + 1, log.n_ops)


def times_of(log: OpRecorder) -> dict[tuple[str, int | None], tuple[int, int, int]]:
    """Return (phase, block) -> operators: its first, the first of its last visit, and its last.

    A phase may visit a block several times.
    """
    times: dict[tuple[str, int | None], tuple[int, int, int]] = {}
    for (at, phase, block), (then, *_) in pairwise([*log.places, (log.n_ops + 1, "", None)]):
        begin, _, _ = times.get((phase, block), (at, 0, 0))
        times[phase, block] = begin, at, then - 1
    return times


def params_gathered_by_block(blocks: nn.Module, in_low: bool) -> list[nn.Parameter]:
    """Return the weights that are gathered when a block runs.

    `in_low`: only the linear layers', which autocast rounds to bfloat16; else all.
    """
    layers = [layer for layer in blocks.modules() if not in_low or isinstance(layer, nn.Linear)]
    return [weight for layer in layers for weight in layer.parameters(recurse=False)]


def root_group_params(model: MiniGPT, in_low: bool) -> list[nn.Parameter]:
    """Return the root group's weights: in no position table, and not gathered by a block.

    `in_low`: blocks are gathered in bfloat16, so their LayerNorms belong to the root group.
    """
    in_tables = nn.ModuleList(position_tables(model)).parameters()
    in_groups = {*params_gathered_by_block(model.blocks, in_low), *in_tables}
    return [parameter for parameter in model.parameters() if parameter not in in_groups]
