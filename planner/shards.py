"""Add to a step the memory that a process takes when several processes shard one model.

train_fsdp.py shards with `fully_shard` (FSDP2): each of n processes keeps 1 / n of every weight,
gradient and moment, and computes with the full weights of one *group* at a time. A group is a
block, or a table of positions; all other weights, those of the token embedding and of ln_f, are the
*root group*. Beside its shards a process has this memory for each group:

    when                             memory
    the group is about to run        - an all-gather buffer, in which the shards of all processes
                                       arrive. In forward the buffer stays until the shards of the
                                       next group have arrived
                                     - the full weights, which are copied from this buffer
    the group has run                none: the full weights are freed. (Only the full weights of the
                                     root group stay until backward ends.)
    backward is about to run         - the full weights again (except for a table of positions: its
                                       gradient does not need its weights)
                                     - the all-gather buffer of block i - 1, if this group is block
                                       i, so that backward of block i - 1 need not wait for weights
    recomputation of the group runs  the full weights, until backward of the group ends. (With
    some time before its backward    full/K+nested, K blocks are recomputed before their backward.)
    backward has run                 the full weights are freed. The full gradients are copied to a
                                     reduce-scatter buffer and freed. This process's 1 / n of the
                                     summed gradients arrives. The reduce-scatter buffer stays until
                                     that of the next group exists
    more micro-batches follow        the full gradients of the group stay (with --reproducible-sums
                                     they are summed over processes in each micro-batch)

With --gather-dtype bfloat16, the group of a block has only the block's linear layers, while the
block's LayerNorms stay in float32 and belong to the root group. A process rounds its shards to
bfloat16 before it sends them. Backward makes the full gradients of linear layers in bfloat16, but
they are float32 while they wait for more micro-batches, and when they are summed over processes.

`add_fsdp_storages` adds this memory to the record of a step, whose operators show when each block
runs. The planned memory equals what torch's FSDPMemTracker counts, to the byte, except for gloo's
buffers, which the tracker does not see. The table above follows
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py; torch 2.11 and torch 2.13 were measured,
and take the same number of bytes. The table also holds on a GPU, where the copies run on separate
streams, because Python allocates in the same order as on a CPU. The few full matrices that Muon
gathers at a time for its update are not counted.
"""

from collections.abc import Iterable
from itertools import chain, pairwise
from typing import cast

import torch
from torch import Tensor, nn

from memory import MemorySavingGPT
from model import MiniGPT, MiniGPTConfig

from .op_recorder import OpRecorder

AVERAGED, GLOO = "gradients to be averaged", "gloo's own buffer"
RECEIVED = "gradients of all processes, to be summed"
GATHERED_REASON = "gathered from all processes, for as long as the group of layers runs"


def make_local_model(config: MiniGPTConfig, n: int) -> MemorySavingGPT:
    """Return a model with the shards of rank 0 of n processes: 1 / n of each parameter's rows.

    The number of rows is rounded up: no rank has more rows than rank 0, and a rank with fewer rows
    allocates as much memory as rank 0.
    """
    shard = MemorySavingGPT(config)
    for module in shard.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            rows = -(-len(weight) // n)
            setattr(module, name, nn.Parameter(weight.new_empty(rows, *weight.shape[1:])))
    return shard


def find_position_embeddings(model: MiniGPT) -> list[nn.Embedding]:
    """Return all embeddings of the model except the token embedding: in model.py the table of
    positions; a changed model.py may have more such tables, or none (with rotary positions)."""
    tables = [module for module in model.children() if isinstance(module, nn.Embedding)]
    return [table for table in tables if table is not model.token_embedding]


def root_group_bytes(model: MiniGPT, n: int) -> int:
    """Return the bytes of the full float32 weights of the root group, which each of n processes has
    from forward to the end of backward."""
    return 4 * sum(p.numel() for p in root_group_params(model, in_bfloat16=False)) * (n > 1)


def state_bytes(model: MiniGPT, optimizer_state: Iterable[Tensor], n: int) -> int:
    """Return the bytes that every step takes in each of n processes that share one model: weights,
    gradients, the optimizer's state, and the weights that a process gathers.

    `model` and `optimizer_state` are whole, and may be on "meta": nothing is simulated.
    """
    tensors = chain(model.parameters(), model.parameters(), optimizer_state)  # twice: gradients
    return root_group_bytes(model, n) + sum(shard_bytes(tensor, n) for tensor in tensors)


def shard_bytes(tensor: Tensor, n: int) -> int:
    """Return the bytes of 1 / n of a tensor's rows, rounded up to whole rows."""
    return -(-len(tensor) // n) * (tensor.nbytes // len(tensor)) if tensor.dim() else tensor.nbytes


def add_fsdp_storages(
    log: OpRecorder,
    model: MiniGPT,
    local_model: MiniGPT,
    n: int,
    sums: dict[nn.Parameter, Tensor],
    gloo: bool,
    in_bfloat16: bool,
    copies: bool,
) -> None:
    """Add the storages that fully_shard allocates to the record, and set when it frees full
    gradients.

    Args:
        log: the recorder of a step that has run forward and backward with the full model.
        model: the full model, with its gradients.
        local_model: a model with this rank's shards of all parameters, and their gradients.
        n: the number of processes.
        sums: weight in bfloat16, or shard -> sums of its gradients of earlier micro-batches.
        gloo: also add the buffers of gloo, the communication backend of CPUs.
        in_bfloat16: True: blocks are gathered in bfloat16.
        copies: True: gradients are received in copies (`Planner.gradient_copies`).
    """
    times, now = op_bounds_by_phase_and_block(log), log.n_ops

    def add(kind: str, name: str, size: int, born: int, died: int) -> None:
        if born <= died:
            log.add_non_tensor_storage(size, name, GATHERED_REASON, born, died, kind)

    def add_all_gather(size: int, arrives: int, used: int, begin: int, end: int) -> None:
        """Add an all-gather buffer of `size` bytes from operator `arrives` to operator `used`, and
        full weights of the same size from operator `begin` to operator `end`."""
        add("parameters", "weights as they arrive", size, arrives, used)
        add("temporaries", GLOO, size * gloo, arrives, arrives)
        add("parameters", "gathered weights", size, begin, end)

    def add_reduce_scatter(
        whole: list[nn.Parameter], shards: list[nn.Parameter], end: int, at: int, then: int
    ) -> None:
        """Free the full gradients of the weights `whole` after operator `end`, and add a
        reduce-scatter buffer with copies of these gradients from operator `at` to operator
        `then`."""
        size = n * sum(shard.nbytes for shard in shards)
        add("gradients", AVERAGED, size, at, then)
        buffer = (RECEIVED, size) if copies else (GLOO, size * gloo)
        add("temporaries", *buffer, at, min(at, then))
        replace_gradients_by_shards(log, whole, shards, sums, end)

    # The root group's full weights stay until backward ends, those of a table until blocks begin.
    begin, first = times["forward", None][0], times["forward", 0][0]
    root, shards = (root_group_params(each, in_bfloat16) for each in (model, local_model))
    size = n * sum(shard.nbytes for shard in shards)
    add_all_gather(size, begin, begin + 1 if find_position_embeddings(model) else first, begin, now)
    # The root group's reduce-scatter buffer fits where its full weights were freed: not counted.
    add_reduce_scatter(root, shards, now, now + 1, now)
    # torch before 2.15 keeps the last full gradient until it is reduced over the processes.
    early = torch.__version__ >= "2.15.dev0"
    for table, local_table in zip(
        find_position_embeddings(model), find_position_embeddings(local_model), strict=True
    ):
        add_all_gather(n * local_table.weight.nbytes, begin + 1, first - 1, begin + 2, first - 1)
        add_reduce_scatter(
            [*table.parameters()], [*local_table.parameters()], now - early, now, now
        )
    last_block = len(model.blocks) - 1
    for i, (block, local_block) in enumerate(zip(model.blocks, local_model.blocks, strict=False)):
        whole, shards = (block_group_params(each, in_bfloat16) for each in (block, local_block))
        size = n * sum(shard.nbytes for shard in shards) // (1 + in_bfloat16)
        (begin, _, end), (again, _, done) = times["forward", i], times["backward", i]
        # In backward the weights of block i arrive while backward of block i + 1 runs.
        used = end if i < last_block else log.forward_end
        ahead = times["backward", i + 1][1] if i < last_block else log.forward_end + 1
        add_all_gather(size, begin, used, begin, end)
        add_all_gather(size, ahead, again - 1, again, done)
        then = times["backward", i - 1][2] if i > 0 else now - 1
        add_reduce_scatter(whole, shards, done, done + 1, then)


def replace_gradients_by_shards(
    log: OpRecorder,
    whole: list[nn.Parameter],
    shards: list[nn.Parameter],
    sums: dict[nn.Parameter, Tensor],
    end: int,
) -> None:
    """Replace the full gradients of `whole` by those of `shards` after operator `end`, and set the
    `.grad` of each full parameter to None. `sums`: see `add_fsdp_storages`."""
    # (A frozen weight has no gradient, but the gradient of its shard is counted all the same.)
    gradients = [parameter.grad for parameter in whole if parameter.grad is not None]
    gradients += [sums.pop(parameter) for parameter in {*whole} & {*sums}]
    storages = [log.find_storage(gradient) for gradient in gradients]
    gradients.clear()
    for parameter in whole:
        parameter.grad = None
    for storage in storages:
        storage.kind, storage.name, storage.died = "gradients", "whole gradient", end
    for shard in shards:
        log.find_storage(cast(Tensor, shard.grad)).born = min(end + 1, log.n_ops)
        if shard in sums:
            storage = log.find_storage(sums.pop(shard))
            storage.died = min(end + 1, log.n_ops)


def op_bounds_by_phase_and_block(
    log: OpRecorder,
) -> dict[tuple[str, int | None], tuple[int, int, int]]:
    """Return a dict: (phase, block) -> the indices of three operators in the record: the first of
    the phase's first visit to the block, the first of its last visit, and the last of its last
    visit."""
    times: dict[tuple[str, int | None], tuple[int, int, int]] = {}
    for (at, phase, block), (then, *_) in pairwise([*log.phase_marks, (log.n_ops + 1, "", None)]):
        begin, _, _ = times.get((phase, block), (at, 0, 0))
        times[phase, block] = begin, at, then - 1
    return times


def block_group_params(blocks: nn.Module, in_bfloat16: bool) -> list[nn.Parameter]:
    """Return the weights that are gathered when a block runs. `blocks`: one block, or a list.

    `in_bfloat16`: only the weights of linear layers, because autocast rounds these to bfloat16.
    """
    layers = [
        layer for layer in blocks.modules() if not in_bfloat16 or isinstance(layer, nn.Linear)
    ]
    return [weight for layer in layers for weight in layer.parameters(recurse=False)]


def root_group_params(model: MiniGPT, in_bfloat16: bool) -> list[nn.Parameter]:
    """Return the weights of the root group: all that belong to no other group.

    `in_bfloat16`: blocks are gathered in bfloat16, so their LayerNorms belong to the root group.
    """
    in_tables = nn.ModuleList(find_position_embeddings(model)).parameters()
    in_groups = {*block_group_params(model.blocks, in_bfloat16), *in_tables}
    return [parameter for parameter in model.parameters() if parameter not in in_groups]
