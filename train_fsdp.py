"""Train a MiniGPT that is dealt out to several devices: what sharding changes in train_ddp.py.

Two GPUs; without GPUs two CPU processes:
    torchrun --nproc-per-node=2 train_fsdp.py --use-activation-checkpoint

Several machines, restarts: as with train_ddp.py. Either goes on from the other's snapshots, and so
does train_minimal.py, on any number of processes:
    torchrun --nproc-per-node=4 train_fsdp.py --resume --checkpoint-path checkpoints/minigpt_ddp.pt

With DDP every process holds all weights, gradients and moments: 16 bytes a parameter, and N copies
of them. Fully sharded data parallel (FSDP; ZeRO-3: Rajbhandari et al., 2020) deals them out: each
process keeps 1/N of each tensor's rows, a *shard*, and updates that. To compute, a process needs
whole weights, but only those of the block that is at work. So they are gathered from all before the
block runs, and let go after it; once more in backward, and then the block's gradients are summed up
over all processes and scattered: each gets the rows that it keeps. What that costs is traffic: the
weights travel twice in each micro-batch, where with DDP they stay. Gradients travel once a step.

The rest is train_ddp.py's: the same data in the same order, and the same results; of two processes
to the bit (docs/reliability.md), of more up to the order in which gradients are summed.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # (left out by `python -I`)
import trainer.bootstrap  # noqa: F401  # before torch: signals, the end of torchrun, OpenMP

# isort: split
import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from model import MiniGPT
from planner.shards import params_gathered_by_block, position_tables
from train_ddp import DDPProcess
from trainer.device import check_gather_dtype, choose_precision
from trainer.flags import UsageError, check_sharded
from trainer.process import OneProcess
from trainer.torchrun import main_and_exit


class FSDPProcess(DDPProcess):
    """One of `world_size` processes that torchrun started, each with a device and 1/N of the model.

    Raises UsageError if torchrun did not start it, or if a flag does not go with shards.
    """

    script, default_checkpoint_path = "train_fsdp.py", "checkpoints/minigpt_fsdp.pt"
    gradients_persist = has_own_policy = reduces_in_backward = False

    def __init__(self, args: argparse.Namespace):
        super().__init__(args)
        self.shard_degree = self.world_size
        check_sharded(args, self.world_size, self.script)
        check_gather_dtype(args, choose_precision(args, self.device))
        if self.device.type == "cuda" and not dist.is_nccl_available():
            raise UsageError(f"{self.script} needs NCCL on GPUs, which Windows lacks: train_ddp.py")

    def materialize(self, model: MiniGPT) -> None:
        # What is gathered together: a block; a table, as of the positions, which grows with T, for
        # its lookup alone (whose gradient does not need it); and the rest (token embedding, ln_f),
        # which is whole from the beginning of forward to the end of backward, for lookup and head.
        # --gather-dtype bfloat16: autocast would round a block's linear layers anyway, so they are
        # rounded before they travel. LayerNorms compute in float32: they belong to the rest then.
        self.group = cast(dist.ProcessGroup, self.new_device_group() or dist.group.WORLD)
        mesh = DeviceMesh.from_group(self.group, self.device.type)
        in_low = self.args.gather_dtype == "bfloat16"
        low = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        policy = low if in_low else MixedPrecisionPolicy()
        in_tables = nn.ModuleList(position_tables(model)).parameters()
        own = {*in_tables, *params_gathered_by_block(model.blocks, in_low)}
        fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=own)
        for table in position_tables(model):
            fully_shard(table, mesh=mesh).set_unshard_in_backward(False)
        for block in model.blocks:
            fully_shard(
                block, mesh=mesh, mp_policy=policy, ignored_params={*block.parameters()} - own
            )
        for module in (model, *position_tables(model), *model.blocks):  # gloo: pytorch#162338
            cast(FSDPModule, module).set_force_sum_reduction_for_comms(True)
        # Only now memory, and for shards only: no process ever holds the whole model.
        super().materialize(model)

    def local_shard(self, whole: Tensor, like: Tensor) -> Tensor:
        mesh, rows = cast(DTensor, like).device_mesh, cast(DTensor, like).placements
        # (None: each process has the whole tensor, nobody has to send parts of it.)
        return distribute_tensor(whole.to(self.device), mesh, rows, src_data_rank=None)

    def wrap(self, model: MiniGPT) -> nn.Module:
        self.wrapper = model  # FSDP is in hooks of its own, around each forward
        return model

    def gradient_sync(self, now: bool) -> AbstractContextManager[Any]:
        # Until the last micro-batch whole gradients wait, as with DDP.
        self.wrapper.set_requires_gradient_sync(now)
        return nullcontext()

    def grad_norm(self, gradients: list[Tensor]) -> Tensor:
        square = super().grad_norm([cast(DTensor, g).to_local() for g in gradients]) ** 2
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    clear_gradients = OneProcess.clear_gradients  # (DDP's are in buckets)

    def can_retry(self) -> bool:
        return False  # forward gathers: the others have gone on

    def full_state_dict(self, model: MiniGPT, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        # One tensor at a time: together they would not fit on the device.
        return tree_map_only(
            DTensor, self.full_tensor_on_rank0, super().full_state_dict(model, optimizer)
        )

    def full_tensor_on_rank0(self, shard: DTensor) -> Tensor | None:
        tensor = shard.full_tensor()  # all take part, process 0 keeps it
        return tensor.cpu() if self.rank == 0 else None


main = FSDPProcess.main

if __name__ == "__main__":
    main_and_exit(main)
