"""Train a MiniGPT on sequences that several devices share: the differences from train_fsdp.py.

Train on two GPUs or, on a machine without GPUs, with two CPU processes:
    torchrun --nproc-per-node=2 train_sp.py --use-activation-checkpoint

With train_ddp.py and train_fsdp.py each process has its own sequences: more processes allow a
larger batch, but not a longer sequence. Here N processes compute each sequence together (sequence
parallelism), each with 1/N of the tokens and, in attention, 1/N of the heads (memory/sequence.py).
Each process therefore keeps 1/N of the activations, and sequences can be N times as long, although
attention's time grows with the length squared. The price is two all-to-alls in each attention and
two in its backward. The model is sharded, and --resume and restarts work, as in train_fsdp.py.

A step minimizes the mean loss over all tokens, as with one process. (FSDP averages gradients over
ranks, but here their sum is needed: SequenceParallelGPT, in memory/gpt.py, multiplies by N.)
Without dropout the results are the same up to rounding; with dropout they differ, because each
process draws its own masks.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # `python -I` omits this folder
import trainer.bootstrap  # noqa: F401  # sets signal handlers and environment variables

# isort: split
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from memory import MemorySavingGPT, SequenceParallelGPT
from memory.sequence import SequenceShard
from model import MiniGPT, MiniGPTConfig
from train_fsdp import FSDPProcess
from train_minimal import train
from trainer.build import run_safely
from trainer.settings import Settings
from trainer.torchrun import main_and_exit


class SPProcess(FSDPProcess):
    """One of N processes that torchrun started, each with 1/N of the model and of every sequence.

    Raises MiniGPTError if torchrun did not start this process, or for a flag that cannot work here.
    """

    script = "train_sp.py"
    kind = "sp"
    sp_group: dist.ProcessGroup | None = None  # until weights have memory: gloo's default group

    def init_process_group(self) -> None:
        # Each GPU has two NCCL communicators: one gathers weights, the other runs attention's
        # all-to-alls. Two processes that ran these operations in different orders could wait for
        # each other forever. With this variable, NCCL (2.26 and later) runs them in the order of
        # their calls, which is the same in all processes.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        super().init_process_group()

    def make_model(self, config: MiniGPTConfig) -> MemorySavingGPT:
        """Return a model that gets whole sequences, computes this rank's tokens of them, with
        all-to-alls around attention, and returns the mean loss of all tokens."""
        if self.layout.sp_degree == 1:
            return super().make_model(config)
        shard = SequenceShard(self.rank, self.layout.sp_degree, config.n_heads, self.all_to_all)
        return SequenceParallelGPT(config, shard, self.all_reduce_sum)

    def allocate_parameters(self, model: MiniGPT) -> None:
        super().allocate_parameters(model)
        # Attention has a second process group. In FSDP's group, which gathers the weights of the
        # next block ahead of time, attention's all-to-alls would wait for those weights.
        self.sp_group = self.new_nccl_group() or dist.new_group(timeout=self.timeout)

    def all_to_all(self, x: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Tensor:
        """Send `send_sizes[i]` elements of x to each rank i; return the elements sent to this rank.

        x (sum(send_sizes),) and the result (sum(receive_sizes),) are in the order of the ranks.
        """
        received = x.new_empty(sum(receive_sizes))
        dist.all_to_all_single(received, x, receive_sizes, send_sizes, group=self.sp_group)
        return received

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the sum of the `x` of all ranks."""
        total = x.clone()
        dist.all_reduce(total, group=self.sp_group)
        return total

    def sum_over_replicas(self, values: list[float]) -> list[float]:
        """Return `values`: all ranks evaluated the same sequences, so each rank has the totals."""
        return values


def main(argv: list[str] | None = None) -> int:
    """Train as one of torchrun's processes; return its exit code."""
    path = Path("checkpoints/minigpt_sp.pt")
    settings = Settings.parse(argv, SPProcess.script, checkpoint_path=path)
    return run_safely(settings, SPProcess, train)


if __name__ == "__main__":
    main_and_exit(main)
