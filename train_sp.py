"""Train a MiniGPT on sequences that several devices share: what that changes in train_fsdp.py.

Two GPUs; without GPUs two CPU processes:
    torchrun --nproc-per-node=2 train_sp.py --use-activation-checkpoint

Several machines, restarts: as with train_ddp.py. All trainers go on from each other's snapshots:
    python train_minimal.py --resume --checkpoint-path checkpoints/minigpt_sp.pt

With train_ddp.py and train_fsdp.py each process has sequences of its own: more processes make a
batch larger, but no sequence longer. Here all N of them compute each sequence together. Each has an
N-th of its tokens, and for attention an N-th of its heads (memory/sequence.py). So each keeps an
N-th of all activations, and sequences can be N times as long. (Attention's time grows with the
square of that.) The model is dealt out to the same processes, as in train_fsdp.py.

A step descends the mean loss over all tokens, as with one process: the same numbers, up to the
order in which they are added. With dropout the masks are others, as each process draws its own.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # (left out by `python -I`)
import trainer.bootstrap  # noqa: F401  # before torch: signals, the end of torchrun, OpenMP

# isort: split
import argparse
from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor

from memory.sequence import SequenceShard, WithBackward
from model import MiniGPT
from train_fsdp import FSDPProcess
from trainer.flags import check_shared
from trainer.torchrun import main_and_exit


class SPProcess(FSDPProcess):
    """One of `world_size` processes that torchrun started, each with a device, 1/N of the model and
    1/N of every sequence.

    Raises UsageError if torchrun did not start it, or if a flag does not go with that.
    """

    script, default_checkpoint_path = "train_sp.py", "checkpoints/minigpt_sp.pt"

    def __init__(self, args: argparse.Namespace):
        super().__init__(args)
        self.sp_degree = self.world_size

    def init_process_group(self) -> None:
        check_shared(self.args, self.world_size)  # each needs some tokens, and a head
        # Two communicators share each GPU: weights are gathered by one while attention exchanges
        # tokens by the other. This has NCCL (2.26 and later) run them in the order of the calls,
        # which is the same in all processes; in any order they could wait for each other for ever.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        super().init_process_group()

    def materialize(self, model: MiniGPT) -> None:
        super().materialize(model)
        if self.world_size == 1:
            return
        # Not the group that gathers weights: it would wait behind those that are gathered ahead.
        group = self.new_device_group() or dist.new_group(timeout=self.timeout)
        self.peers, n_heads = group, model.config.n_heads
        self.sequence = SequenceShard(self.rank, self.world_size, n_heads, self.all_to_all)
        self.sequence.wrap_attention(model)
        model.forward = partial(self.forward_shard, model.forward)  # type: ignore[method-assign]

    def all_to_all(self, sent: Tensor, send: list[int], take: list[int]) -> Tensor:
        """Numbers, `send[i]` of which go to process i; what came, `take[i]` from process i."""
        came = sent.new_empty(sum(take))
        dist.all_to_all_single(came, sent, take, send, group=self.peers)
        return came

    def forward_shard(
        self, forward: Callable[..., Tensor], ids: Tensor, labels: Tensor | None = None, **how: int
    ) -> Tensor:
        """MiniGPT.forward of my tokens; the mean loss that it returns is that of all tokens.

        Who wants no loss is about to write a text, token by token: that each does by itself.
        """
        if labels is None:
            self.sequence.stop_sharding()
            return forward(ids, **how)
        # They are cut only now that they are shifted: my last label is another's first token.
        mine, kept = self.sequence.shard(ids.size(1)), labels != -100
        # My first token is not the sequence's first: its position is `start`. (Attention sees whole
        # sequences, so positions that are rotated into q and k, in `attend`, begin with 0.)
        loss = forward(ids[:, mine], labels[:, mine], start=mine.start)
        # Mine is a mean, too. A mean of means would not do: some have more tokens than others.
        n_mine, n_all = kept[:, mine].sum(), kept.sum()
        share = loss.where(n_mine > 0, 0.0) * n_mine / n_all
        # FSDP takes the mean of the processes' gradients, of which they are to be the sum.
        return WithBackward.apply(
            share, self.all_reduce_loss, lambda gradient: gradient * self.world_size
        )

    def all_reduce_loss(self, share: Tensor) -> Tensor:
        total = share.clone()
        dist.all_reduce(total, group=self.peers)
        return total

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        return values  # all have computed the same sequences, and know the same losses


main = SPProcess.main

if __name__ == "__main__":
    main_and_exit(main)
