"""Train a MiniGPT on several devices with DistributedDataParallel (DDP): only the differences.

Two GPUs; without GPUs two CPU processes:
    torchrun --nproc-per-node=2 train_ddp.py --use-activation-checkpoint

Two machines with eight GPUs each: run this on both, with --node-rank=0 on HOST and --node-rank=1 on
the other. Both need the same data and, for --resume, a shared disk (see docs/reliability.md):
    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=HOST --master-port=29500 \
        train_ddp.py --use-activation-checkpoint

Let torchrun restart the job when a process dies; the job continues from its last snapshot:
    torchrun --nproc-per-node=2 --max-restarts=3 train_ddp.py --use-activation-checkpoint

torchrun starts this file once per device and gives each process a rank. Every process holds the
whole model and computes the gradients of its own micro-batches. DDP averages the gradients while
backward runs. So all processes make the same update, and their weights stay equal.

The loop is train_minimal.py's. It calls a `process` for everything that depends on the number of
processes (trainer/process.py). This file has the methods that are different with DDP.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # `python -I` omits this folder
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
    """One of the processes that torchrun started, each with a device and the whole model.

    Raises UsageError if torchrun did not start it.
    """

    script, default_checkpoint_path = "train_ddp.py", "checkpoints/minigpt_ddp.pt"
    gradients_persist = True  # in DDP's communication buckets, which stay allocated
    buckets_are_final = False  # after the first step DDP makes its buckets anew, once
    rehearses_first_steps = True
    # `averages`: backward of this micro-batch is to average gradients. `is_armed`: the same, but
    # True only after its forward: from then on DDP sends the gradients that backward computes.
    will_average = is_armed = False

    def wrap(self, model: MiniGPT) -> nn.Module:
        # Gradients are views of DDP's communication buckets, which saves 4 bytes a parameter.
        # DDP copies existing gradients into its buckets, so the first step allocates no others.
        set_expanded_zero_grads(model)
        group = self.new_device_group()
        self.wrapper: Any = DDP(model, process_group=group, gradient_as_bucket_view=True)
        # This hook runs when the model's forward ends. Then DDP's forward ends, and arms DDP.
        model.register_forward_hook(lambda *_: setattr(self, "is_armed", self.will_average))
        if self.args.compress_gradients and self.world_size > 1:
            # (DDP rejects this hook by its name without NCCL. A lambda works, also on gloo.)
            self.wrapper.register_comm_hook(group, lambda g, bucket: bf16_compress_hook(g, bucket))
        return self.wrapper

    def gradient_sync(self, now: bool) -> AbstractContextManager[Any]:
        # DDP decides in *forward* whether the next backward averages gradients.
        self.will_average, self.is_armed = now, False
        return nullcontext() if now else self.wrapper.no_sync()

    def can_retry_alone(self) -> bool:
        # The other processes wait for my gradients, however often I try and with any policy. But
        # once it is armed, DDP sends gradients during backward, and they cannot be sent twice. And
        # if memory ran out while DDP made its buckets, some gradients are not in a bucket: they are
        # still expanded zeros, which are not contiguous.
        gradients = (p.grad for p in self.wrapper.parameters() if p.grad is not None)
        return not self.is_armed and all(g.is_contiguous() for g in gradients)

    def clear_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        # After the first step DDP knows in which order backward computes gradients. The next
        # forward makes new buckets in that order. Free the old buckets here, with the gradients in
        # them. Later steps keep the buckets, and set the gradients in them to zero.
        self.will_average = self.is_armed = False  # (an evaluation calls the forward hook, too)
        if self.buckets_are_final:
            self.discard_gradients(optimizer)
        else:
            set_expanded_zero_grads(self.wrapper)
            self.buckets_are_final = True

    def all_reduce_max(self, values: list[int]) -> list[int]:
        largest = torch.tensor(values)  # on the CPU: see Torchrun.init_process_group
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.tolist()

    def all_gather_object(self, mine: T) -> list[T]:
        gathered = [mine] * self.world_size
        dist.all_gather_object(gathered, mine)
        return gathered

    def print0(self, line: str) -> None:
        if self.rank == 0:
            super().print0(line)

    def close(self) -> None:
        # The wrapper's threads must end before the connections that they use. In the other order a
        # run that has finished can still abort at exit.
        del self.wrapper
        gc.collect()
        dist.destroy_process_group()

    @classmethod
    def main(cls, argv: list[str] | None = None) -> int:
        """Train as one of torchrun's processes; return the exit code of this process."""
        args = build_parser(cls.script, cls.default_checkpoint_path).parse_args(argv)
        return run_safely(args, cls, train, print_error_once)


def set_expanded_zero_grads(model: nn.Module) -> None:
    """Set each `.grad` to zeros of the parameter's shape that take the memory of one element.

    DDP copies these zeros into its buckets, and replaces each `.grad` by a view of its bucket.
    """
    for parameter in model.parameters():
        parameter.grad = parameter.new_zeros(()).expand_as(parameter)


main = DDPProcess.main

if __name__ == "__main__":
    main_and_exit(main)
