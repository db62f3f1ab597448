"""Train a MiniGPT on several devices with DistributedDataParallel (DDP).

Train on two GPUs or, on a machine without GPUs, with two CPU processes:
    torchrun --nproc-per-node=2 train_ddp.py --use-activation-checkpoint

Train on two machines with eight GPUs each, which need the same data and, for --resume, a shared
disk (docs/reliability.md). Run this command on both, with --node-rank=0 on the machine HOST and
with --node-rank=1 on the other:
    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=HOST --master-port=29500 \
        train_ddp.py --use-activation-checkpoint

Let torchrun restart the job when a process dies; the job continues from its last snapshot:
    torchrun --nproc-per-node=2 --max-restarts=3 train_ddp.py --use-activation-checkpoint

torchrun starts this file once per device and gives each process a rank. Every process has the whole
model and computes the gradients of its own micro-batches. DDP averages the gradients while backward
runs, so that all processes make the same update and their weights stay equal.

The training loop is in train_minimal.py and calls methods of a `process` (trainer/process.py) for
everything that depends on the number of processes. This file has the methods that differ with DDP;
trainer/torchrun.py has those of all trainers that torchrun starts.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # `python -I` omits this folder
import trainer.bootstrap  # noqa: F401  # sets signal handlers and environment variables

# isort: split
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from model import MiniGPT
from train_minimal import train
from trainer.build import run_safely
from trainer.reproducible_sums import pairwise_all_reduce_hook
from trainer.settings import Settings
from trainer.torchrun import TorchrunProcess, main_and_exit


class DDPProcess(TorchrunProcess):
    """One of the processes that torchrun started, each with one device and the whole model. Raises
    MiniGPTError if torchrun did not start this process.
    """

    script = "train_ddp.py"
    buckets_are_final = False  # True after the first update: see `clear_gradients`

    def wrap(self, model: MiniGPT, settings: Settings) -> nn.Module:
        # DDP replaces these zero gradients by views of its communication buckets. Without them, the
        # first backward would allocate gradients besides the buckets: 4 bytes more per parameter.
        set_expanded_zero_grads(model)
        group = self.new_nccl_group()
        self.wrapper: Any = DDP(model, process_group=group, gradient_as_bucket_view=True)
        # A communication hook replaces DDP's averaging of each bucket of gradients. (The lambdas:
        # DDP rejects pairwise_all_reduce_hook for its annotations, which are strings, and without
        # NCCL it rejects bf16_compress_hook for its name, although that works with gloo.)
        if settings.reproducible_sums and self.layout.world_size > 1:
            stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
            self.wrapper.register_comm_hook(
                (group, stream), lambda state, bucket: pairwise_all_reduce_hook(state, bucket)
            )
        if settings.compress_gradients and self.layout.world_size > 1:
            self.wrapper.register_comm_hook(group, lambda g, bucket: bf16_compress_hook(g, bucket))
        return self.wrapper

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        # DDP decides in *forward* whether the next backward averages gradients.
        return nullcontext() if enabled else self.wrapper.no_sync()

    def clear_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        # In the first step DDP learns in which order backward computes gradients, and the next
        # forward makes new buckets in that order. The gradients are views of the old buckets and
        # would keep them in memory, so drop them here once; later steps only zero them.
        if self.buckets_are_final:
            optimizer.zero_grad(set_to_none=False)
        else:
            set_expanded_zero_grads(self.wrapper)
            self.buckets_are_final = True


def set_expanded_zero_grads(model: nn.Module) -> None:
    """Set each `.grad` to zeros of the parameter's shape, in the memory of one element. DDP copies
    them into its buckets, and replaces each `.grad` by a view of a bucket. (A frozen parameter
    needs none.)"""
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        parameter.grad = parameter.new_zeros(()).expand_as(parameter)


def main(argv: list[str] | None = None) -> int:
    """Train as one of torchrun's processes; return its exit code."""
    path = Path("checkpoints/minigpt_ddp.pt")
    settings = Settings.parse(argv, DDPProcess.script, checkpoint_path=path)
    return run_safely(settings, DDPProcess, train)


if __name__ == "__main__":
    main_and_exit(main)
