"""Train a MiniGPT on several devices: what DistributedDataParallel (DDP) changes, and only that.

Two GPUs; without GPUs two CPU processes:
    torchrun --nproc-per-node=2 train_ddp.py --use-activation-checkpoint

Two machines with eight GPUs each, the same command on both (0 and 1 are their --node-rank; both
need the same data, and a --checkpoint-path on a disk that both see if you want to --resume):
    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=HOST --master-port=29500 \
        train_ddp.py --use-activation-checkpoint

torchrun starts this file once per device and gives each process a rank. Every process holds the
whole model and computes the gradients of its own micro-batches; DDP averages gradients while
backward runs; so all take the same step and stay alike. The loop is train_minimal.py's. It asks
a `OneProcess` what the world looks like; this file has the other answer.
"""

import gc
import os
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from train_minimal import OneProcess, run_safely  # before torch: it starts the clock

# isort: split
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flags import UsageError, build_parser, choose_device
from model import MiniGPT


class TorchrunProcess(OneProcess):
    """One of `world_size` processes that torchrun started."""

    def __init__(self, device_name: str):
        if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
            raise UsageError(
                "train_ddp.py is started by torchrun: torchrun --nproc-per-node=2 train_ddp.py "
                "(for one device: python train_minimal.py)"
            )
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        device = choose_device(device_name)
        if device.type == "cuda":
            n_gpus = torch.cuda.device_count()
            if self.local_rank >= n_gpus:
                raise UsageError(f"--nproc-per-node: more processes than GPUs ({n_gpus})")
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        elif device.type == "mps":
            if device_name == "mps":
                raise UsageError("--device mps: no backend of torch.distributed has it; use cpu")
            device = torch.device("cpu")
        super().__init__(device)

    def start(self) -> None:
        # Only now, with data and flags in order: what was wrong with them ended each process with
        # its own message, and none waits for another that is gone.
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        self.on_cpu = dist.new_group(backend="gloo")  # for what must not wait for the GPUs

    def wrap(self, model: MiniGPT) -> nn.Module:
        # Gradients live in DDP's communication buckets instead of beside them: 4 bytes a parameter.
        device_ids = [self.local_rank] if self.device.type == "cuda" else None
        self.ddp = DistributedDataParallel(
            model, device_ids=device_ids, gradient_as_bucket_view=True
        )
        return self.ddp

    def sync_gradients(self, now: bool) -> AbstractContextManager[Any]:
        # DDP decides in *forward* whether the coming backward will average gradients.
        return nullcontext() if now else self.ddp.no_sync()

    def sum(self, values: list[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)  # the default operation is the sum
        return total.tolist()

    def largest(self, value: int) -> int:
        most = torch.tensor(value)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.on_cpu)
        return int(most)

    def say(self, line: str) -> None:
        if self.rank == 0:
            super().say(line)

    def close(self) -> None:
        # The wrapper's threads must be gone before the connections that they use: the other way
        # round, a run that has finished can still abort at exit.
        del self.ddp
        gc.collect()
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Train as one of torchrun's processes; returns the exit code of this one."""
    args = build_parser("train_ddp.py", "checkpoints/minigpt_ddp.pt").parse_args(argv)
    return run_safely(args, lambda: TorchrunProcess(args.device))


def main_and_exit() -> None:
    """`main`; if anything went wrong, end this process without further ado."""
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    if code != 0:
        # Not sys.exit: on its way out Python would wait for a conversation with processes that
        # in turn wait for this one. torchrun sees the exit code and ends the others.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main_and_exit()
