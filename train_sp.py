"""Train a MiniGPT on sequences that several devices share: only the differences to train_fsdp.py.

Two GPUs; without GPUs two CPU processes:
    torchrun --nproc-per-node=2 train_sp.py --use-activation-checkpoint

Several machines and restarts work as with train_ddp.py. Every trainer can resume the snapshots of
the others:
    python train_minimal.py --resume --checkpoint-path checkpoints/minigpt_sp.pt

With train_ddp.py and train_fsdp.py each process has its own sequences: more processes allow a
larger batch, but no longer sequence. Here all N processes compute each sequence together (sequence
parallelism). Each process has 1/N of the tokens, and in attention 1/N of the heads
(memory/sequence.py). So each process keeps 1/N of the activations, and sequences can be N times as
long. (The time of attention grows with the square of the length.) The model is sharded over the
same processes, as in train_fsdp.py.

A step minimizes the mean loss over all tokens, as with one process. The results are the same up to
the order in which numbers are added. With dropout they differ: each process draws its own masks.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # `python -I` omits this folder
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

    Raises UsageError if torchrun did not start it, or if a flag does not work with shared
    sequences.
    """

    script, default_checkpoint_path = "train_sp.py", "checkpoints/minigpt_sp.pt"

    def __init__(self, args: argparse.Namespace):
        super().__init__(args)
        self.sp_degree = self.world_size

    def init_process_group(self) -> None:
        check_shared(self.args, self.world_size)  # each process needs a token and a head
        # Two NCCL communicators share each GPU: one gathers weights while the other exchanges
        # tokens for attention. If processes ran the two in different orders, they could wait for
        # each other forever. With this variable NCCL (2.26 and later) runs them in the order of the
        # calls, which is the same in all processes.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        super().init_process_group()

    def materialize(self, model: MiniGPT) -> None:
        """Shard a model on device "meta", and make its forward share each sequence."""
        super().materialize(model)
        if self.world_size == 1:
            return
        # Use a second group. In the group that gathers weights, the exchange of tokens would wait
        # behind the weights of the next block, which are gathered ahead.
        group = self.new_device_group() or dist.new_group(timeout=self.timeout)
        self.peers, n_heads = group, model.config.n_heads
        self.sequence = SequenceShard(self.rank, self.world_size, n_heads, self.all_to_all)
        self.sequence.wrap_attention(model)
        model.forward = partial(self.forward_shard, model.forward)  # type: ignore[method-assign]

    def all_to_all(self, sent: Tensor, send: list[int], take: list[int]) -> Tensor:
        """Exchange elements with all ranks: send `send[i]` to rank i, receive `take[i]` from it.

        `sent`, (sum(send),), and the result, (sum(take),), are in the order of the ranks.
        """
        received = sent.new_empty(sum(take))
        dist.all_to_all_single(received, sent, take, send, group=self.peers)
        return received

    def forward_shard(
        self,
        forward: Callable[..., Tensor],
        ids: Tensor,
        labels: Tensor | None = None,
        **kwargs: int,
    ) -> Tensor:
        """Run `forward`, MiniGPT's own, on this rank's tokens; return the mean loss of all tokens.

        `ids` and `labels`, (B, T), are whole sequences, the same on all ranks. The loss is ().

        Without labels the call generates text, token by token, and each process does that alone:
        return the logits of all `ids`, (B, T, vocab_size). `kwargs`: passed on to `forward`.
        """
        if labels is None:
            self.sequence.stop_sharding()
            return forward(ids, **kwargs)
        # Labels were shifted before the split: my last label is the next rank's first token.
        my_tokens, has_label = self.sequence.start_sharding(ids.size(1)), labels != -100
        # The position of my first token is `start`. (If you add rotary positions in `attend`, count
        # from 0 there: attention sees whole sequences.)
        loss = forward(ids[:, my_tokens], labels[:, my_tokens], start=my_tokens.start)
        # `loss` is the mean over my labels. The mean of all ranks' means would be wrong: some ranks
        # have more labels than others.
        n_mine, n_all = has_label[:, my_tokens].sum(), has_label.sum()
        share = loss.where(n_mine > 0, 0.0) * n_mine / n_all
        # FSDP averages gradients over the ranks, and the sum is needed: multiply by their number.
        return WithBackward.apply(
            share, self.all_reduce_loss, lambda gradient: gradient * self.world_size
        )

    def all_reduce_loss(self, share: Tensor) -> Tensor:
        """Return the sum of all ranks' `share`, ()."""
        total = share.clone()
        dist.all_reduce(total, group=self.peers)
        return total

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """Return `values`: all ranks computed the same sequences, so each has the totals."""
        return values


main = SPProcess.main

if __name__ == "__main__":
    main_and_exit(main)
