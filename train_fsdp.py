"""Train a MiniGPT that is sharded over several devices (FSDP).

Train on two GPUs or, on a machine without GPUs, with two CPU processes:
    torchrun --nproc-per-node=2 train_fsdp.py --use-activation-checkpoint

Several machines and restarts work as with train_ddp.py. Every trainer, including train_minimal.py,
can resume the snapshots of every other trainer, with any number of processes:
    torchrun --nproc-per-node=4 train_fsdp.py --resume --checkpoint-path checkpoints/minigpt_ddp.pt

With DDP each of N processes has all weights, gradients and optimizer moments: 16 bytes per
parameter. Fully sharded data parallel (FSDP) shards them, like ZeRO-3 (Rajbhandari et al., 2020):
each process keeps 1/N of the rows of each tensor, a *shard*, and updates only its shard.

To run a block, a process needs all weights of this block. An all-gather collects them before the
block runs in forward and again in backward, and each time they are freed afterwards. A
reduce-scatter then averages the block's gradients over all processes and leaves each process the
rows that it keeps. The price is communication: weights, which DDP never sends, are all-gathered
twice in each micro-batch. Gradients are sent once per step, as with DDP; until then, a process has
whole gradients if --grad-accum-steps is above 1.

Everything else is as in train_ddp.py: results are bitwise equal with two processes or with
--reproducible-sums, and else equal up to the rounding of sums (docs/reliability.md).
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # `python -I` omits this folder
import trainer.bootstrap  # noqa: F401  # sets signal handlers and environment variables

# isort: split
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from model import MiniGPT
from planner.shards import block_group_params, find_position_embeddings
from train_minimal import train
from trainer.build import run_safely
from trainer.reproducible_sums import PairwiseReduceScatter
from trainer.settings import Settings
from trainer.torchrun import TorchrunProcess, main_and_exit


class FSDPProcess(TorchrunProcess):
    """One of N processes that torchrun started, each with one device and 1/N of the model. Raises
    MiniGPTError if torchrun did not start this process.
    """

    script = "train_fsdp.py"
    kind = "fsdp"

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self.gather_dtype = settings.gather_dtype
        self.reproducible_sums = settings.reproducible_sums

    def allocate_parameters(self, model: MiniGPT) -> None:
        """Shard a model on device "meta", and allocate the memory of this rank's shards."""
        # FSDP all-gathers the weights in these groups:
        # - each block: when the block runs
        # - each table of position embeddings (its size grows with T): only for the lookup, whose
        #   backward does not need the table
        # - the rest (token embedding, ln_f): once, when forward begins; whole until backward ends,
        #   because the lookup and the head both use the token embedding
        # With --gather-dtype bfloat16, the weights of a block's linear layers are rounded before
        # they are sent, as autocast would round them anyway. LayerNorms compute in float32, so with
        # this flag those of all blocks belong to the rest.
        self.group = cast(dist.ProcessGroup, self.new_nccl_group() or dist.group.WORLD)
        mesh = DeviceMesh.from_group(self.group, self.device.type)
        in_bfloat16, policy = self.gather_dtype == "bfloat16", MixedPrecisionPolicy()
        if in_bfloat16:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        in_tables = nn.ModuleList(find_position_embeddings(model)).parameters()
        gathered_apart = {*in_tables, *block_group_params(model.blocks, in_bfloat16)}
        # Shard the model before its blocks: `fully_shard(model)` skips all of a sharded block,
        # including LayerNorms that the block leaves to the rest.
        fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=gathered_apart)
        for table in find_position_embeddings(model):
            fully_shard(table, mesh=mesh).set_unshard_in_backward(False)
        for block in model.blocks:
            rest = {*block.parameters()} - gathered_apart
            fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=rest)
        # gloo may compute SUM instead of AVG (pytorch#162338), so FSDP has to sum and divide by N.
        groups: Any = (model, *find_position_embeddings(model), *model.blocks)
        for group in groups:
            group.set_force_sum_reduction_for_comms(True)
            if self.reproducible_sums:
                group.set_gradient_divide_factor(1.0)  # `accumulate_gradients` divides by N
                group.set_custom_reduce_scatter(PairwiseReduceScatter())
        # Allocate only after sharding, so that no process ever has the whole model.
        super().allocate_parameters(model)
        self.sharded_model = cast(FSDPModule, model)

    def shard_like(self, whole: Tensor, like: Tensor) -> Tensor:
        mesh, placements = cast(DTensor, like).device_mesh, cast(DTensor, like).placements
        # (src_data_rank=None: every process has the whole tensor, so none has to send parts.)
        return distribute_tensor(whole.to(self.device), mesh, placements, src_data_rank=None)

    def own_batch_ids(self, ids: range) -> range:
        # --reproducible-sums: processes sum neighbouring ids in each micro-batch, so that the sums
        # that are kept are shards.
        in_turn = ids[self.rank :: self.layout.replicas]
        return in_turn if self.reproducible_sums else super().own_batch_ids(ids)

    @contextmanager
    def gradient_sync(self, enabled: bool) -> Iterator[None]:
        # Before the last micro-batch, each process sums its own whole gradients, as with DDP.
        self.sharded_model.set_requires_gradient_sync(enabled or self.reproducible_sums)
        yield

    def grad_norm(self, gradients: list[Tensor]) -> Tensor:
        square = super().grad_norm([cast(DTensor, g).to_local() for g in gradients]) ** 2
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def full_state_dicts(self, model: MiniGPT, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        # Gather one tensor at a time: all whole tensors together might not fit on the device.
        return tree_map_only(
            DTensor, self.full_tensor_on_rank0, super().full_state_dicts(model, optimizer)
        )

    def full_tensor_on_rank0(self, shard: DTensor) -> Tensor | None:
        """Gather a sharded tensor, in all processes together: rank 0 returns the whole tensor on
        the CPU, others return None."""
        tensor = shard.full_tensor()
        return tensor.cpu() if self.rank == 0 else None


def main(argv: list[str] | None = None) -> int:
    """Train as one of torchrun's processes; return its exit code."""
    path = Path("checkpoints/minigpt_fsdp.pt")
    settings = Settings.parse(argv, FSDPProcess.script, checkpoint_path=path)
    return run_safely(settings, FSDPProcess, train)


if __name__ == "__main__":
    main_and_exit(main)
