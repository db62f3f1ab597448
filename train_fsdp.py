"""Train a MiniGPT that is sharded over several devices: only the differences to train_ddp.py.

Two GPUs; without GPUs two CPU processes:
    torchrun --nproc-per-node=2 train_fsdp.py --use-activation-checkpoint

Several machines and restarts work as with train_ddp.py. Every trainer, train_minimal.py too, can
resume the snapshots of the others, with any number of processes:
    torchrun --nproc-per-node=4 train_fsdp.py --resume --checkpoint-path checkpoints/minigpt_ddp.pt

With DDP each of N processes holds all weights, gradients and moments: 16 bytes a parameter. Fully
sharded data parallel (FSDP; ZeRO-3: Rajbhandari et al., 2020) shards them: each process keeps 1/N
of the rows of each tensor, a *shard*, and updates only its shard.

To compute, a process needs whole weights, but only those of the block that is running. So an
all-gather collects a block's weights before the block runs, and they are freed after it. Backward
gathers them once more. Then a reduce-scatter adds up the block's gradients over all processes and
gives each process the rows that it keeps. The price is traffic: the weights travel twice in each
micro-batch; with DDP they stay in place. Gradients travel once a step.

Everything else is as in train_ddp.py: the same data in the same order, and the same results. With
two processes the results are equal to the bit (docs/reliability.md); with more they are equal up
to the order in which gradients are summed.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # `python -I` omits this folder
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

    Raises UsageError if torchrun did not start it, or if a flag does not work with shards.
    """

    script, default_checkpoint_path = "train_fsdp.py", "checkpoints/minigpt_fsdp.pt"
    # A rehearsal of the first steps would not help: `can_retry_alone` is False anyway.
    gradients_persist = has_own_policy = rehearses_first_steps = False

    def __init__(self, args: argparse.Namespace):
        super().__init__(args)
        self.shard_degree = self.world_size
        check_sharded(args, self.world_size, self.script)
        check_gather_dtype(args, choose_precision(args, self.device))
        if self.device.type == "cuda" and not dist.is_nccl_available():
            raise UsageError(f"{self.script} needs NCCL on GPUs, which Windows lacks: train_ddp.py")

    def materialize(self, model: MiniGPT) -> None:
        """Shard a model on device "meta", and allocate the memory of this rank's shards."""
        # FSDP gathers these weights together:
        # - a block, when it runs
        # - a table of positions, which grows with T, for its lookup only (the gradient of a lookup
        #   does not need the table)
        # - the rest (token embedding, ln_f), which stays whole from the beginning of forward to the
        #   end of backward, for the lookup and the head
        # With --gather-dtype bfloat16 the weights of a block's linear layers are rounded before
        # they travel; autocast would round them anyway. LayerNorms compute in float32, so their
        # weights belong to the rest then.
        self.group = cast(dist.ProcessGroup, self.new_device_group() or dist.group.WORLD)
        mesh = DeviceMesh.from_group(self.group, self.device.type)
        in_bfloat16 = self.args.gather_dtype == "bfloat16"
        bfloat16_policy = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, cast_forward_inputs=False
        )
        policy = bfloat16_policy if in_bfloat16 else MixedPrecisionPolicy()
        in_tables = nn.ModuleList(position_tables(model)).parameters()
        gathered_apart = {*in_tables, *params_gathered_by_block(model.blocks, in_bfloat16)}
        fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=gathered_apart)
        for table in position_tables(model):
            fully_shard(table, mesh=mesh).set_unshard_in_backward(False)
        for block in model.blocks:
            fully_shard(
                block,
                mesh=mesh,
                mp_policy=policy,
                ignored_params={*block.parameters()} - gathered_apart,
            )
        # gloo returned the sum for AVG (pytorch#162338). So reduce by SUM; FSDP divides by itself.
        for module in (model, *position_tables(model), *model.blocks):
            cast(FSDPModule, module).set_force_sum_reduction_for_comms(True)
        # Allocate memory only now, and for shards only: no process ever holds the whole model.
        super().materialize(model)

    def local_shard(self, whole: Tensor, like: Tensor) -> Tensor:
        mesh, rows = cast(DTensor, like).device_mesh, cast(DTensor, like).placements
        # (src_data_rank=None: every process has the whole tensor, so none has to send parts of it.)
        return distribute_tensor(whole.to(self.device), mesh, rows, src_data_rank=None)

    def wrap(self, model: MiniGPT) -> nn.Module:
        self.wrapper = model  # not a wrapper: FSDP works by hooks around each forward
        return model

    def gradient_sync(self, now: bool) -> AbstractContextManager[Any]:
        # Until the last micro-batch each process adds up whole gradients, as with DDP.
        self.wrapper.set_requires_gradient_sync(now)
        return nullcontext()

    def grad_norm(self, gradients: list[Tensor]) -> Tensor:
        square = super().grad_norm([cast(DTensor, g).to_local() for g in gradients]) ** 2
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    clear_gradients = OneProcess.clear_gradients  # (only DDP has buckets)

    def can_retry_alone(self) -> bool:
        return False  # forward gathers weights, and the other processes have gone on

    def full_state_dict(self, model: MiniGPT, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        # Gather one tensor at a time: all whole tensors together would not fit on the device.
        return tree_map_only(
            DTensor, self.full_tensor_on_rank0, super().full_state_dict(model, optimizer)
        )

    def full_tensor_on_rank0(self, shard: DTensor) -> Tensor | None:
        """Gather a sharded tensor; return it whole, on the CPU, on rank 0, and None elsewhere.

        All processes must call this together.
        """
        tensor = shard.full_tensor()
        return tensor.cpu() if self.rank == 0 else None


main = FSDPProcess.main

if __name__ == "__main__":
    main_and_exit(main)
