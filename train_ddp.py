"""Train a MiniGPT on several devices: what DistributedDataParallel (DDP) changes, and only that.

Two GPUs; without GPUs two CPU processes:
    torchrun --nproc-per-node=2 train_ddp.py --use-activation-checkpoint

Two machines with eight GPUs each, the same command on both (0 and 1 are their --node-rank; both
need the same data, and to --resume a disk that both see; more in docs/reliability.md):
    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=HOST --master-port=29500 \
        train_ddp.py --use-activation-checkpoint

A job that torchrun starts again when a process has died; it goes on from its last snapshot:
    torchrun --nproc-per-node=2 --max-restarts=3 train_ddp.py --use-activation-checkpoint

torchrun starts this file once per device and gives each process a rank. Every process holds the
whole model and computes the gradients of its own micro-batches; DDP averages gradients while
backward runs; so all take the same step and stay alike. The loop is train_minimal.py's. It asks an
object what depends on the number of processes (trainer/process.py); this file has DDP's answers.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # (left out by `python -I`)
import trainer.bootstrap  # noqa: F401  # before torch: signals, the end of torchrun, OpenMP

# isort: split
import gc
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from model import MiniGPT
from train_minimal import train
from trainer.flags import build_parser
from trainer.process import T
from trainer.shutdown import run_safely
from trainer.torchrun import Torchrun, main_and_exit, print_error_once


class DDPProcess(Torchrun):
    """A process with the whole model. Raises UsageError if torchrun did not start it."""

    script, default_checkpoint_path = "train_ddp.py", "checkpoints/minigpt_ddp.pt"
    gradients_persist = True  # they live in DDP's communication buckets, which stay
    buckets_are_final = False  # they are after the first step
    reduces_in_backward = True
    averages = is_armed = False  # this micro-batch's gradients; from the end of its forward on

    def wrap(self, model: MiniGPT) -> nn.Module:
        # Gradients live in DDP's communication buckets instead of beside them: 4 bytes a parameter.
        # DDP takes in those that are there; so even the first step's are not made beside them.
        set_expanded_zero_grads(model)
        group = self.new_device_group()
        self.wrapper: Any = DDP(model, process_group=group, gradient_as_bucket_view=True)
        # Called before DDP's own forward ends, in which it arms its hooks to send gradients.
        model.register_forward_hook(lambda *_: setattr(self, "is_armed", self.averages))
        if self.args.compress_gradients and self.world_size > 1:
            # (By the hook's name DDP would refuse it without NCCL; but gloo can do it, too.)
            self.wrapper.register_comm_hook(group, lambda g, bucket: bf16_compress_hook(g, bucket))
        return self.wrapper

    def gradient_sync(self, now: bool) -> AbstractContextManager[Any]:
        # DDP decides in *forward* whether the coming backward will average gradients.
        self.averages, self.is_armed = now, False
        return nullcontext() if now else self.wrapper.no_sync()

    def can_retry(self) -> bool:
        # The others wait for my gradients, however often I try, and with which policy. But DDP,
        # once armed, sends what backward brings. And buckets that failed to be made stay half made.
        gradients = (p.grad for p in self.wrapper.parameters() if p.grad is not None)
        return not self.is_armed and all(g.is_contiguous() for g in gradients)

    def clear_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        # After the first step DDP knows in which order gradients come. In that order the next
        # forward makes new buckets. The old ones are freed here, with the gradients in them.
        self.averages = self.is_armed = False  # (an evaluation calls the model, too)
        if self.buckets_are_final:
            self.discard_gradients(optimizer)
        else:
            set_expanded_zero_grads(self.wrapper)
            self.buckets_are_final = True

    def all_reduce_max(self, values: list[int]) -> list[int]:
        most = torch.tensor(values)  # on the CPU: see Torchrun.init_process_group
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.tolist()

    def all_gather_object(self, mine: T) -> list[T]:
        of_each = [mine] * self.world_size
        dist.all_gather_object(of_each, mine)
        return of_each

    def print0(self, line: str) -> None:
        if self.rank == 0:
            super().print0(line)

    def close(self) -> None:
        # The wrapper's threads must be gone before the connections that they use: the other way
        # round, a run that has finished can still abort at exit.
        del self.wrapper
        gc.collect()
        dist.destroy_process_group()

    @classmethod
    def main(cls, argv: list[str] | None = None) -> int:
        """Train as one of torchrun's processes; returns the exit code of this one."""
        args = build_parser(cls.script, cls.default_checkpoint_path).parse_args(argv)
        return run_safely(args, cls, train, print_error_once)


def set_expanded_zero_grads(model: nn.Module) -> None:
    """Gradients that are zero, each of one element only, for DDP to copy into its buckets."""
    for parameter in model.parameters():
        parameter.grad = parameter.new_zeros(()).expand_as(parameter)


main = DDPProcess.main

if __name__ == "__main__":
    main_and_exit(main)
