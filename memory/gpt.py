"""MiniGPT with all techniques that save memory, each in a method that overrides one of MiniGPT.
Results stay bitwise equal except for the rounding of chunks (`loss_chunks`, `mlp_chunks`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from model import MiniGPT, MiniGPTConfig

from .head import TiedEmbeddingFunction, chunked_head_loss
from .offload import Offload, PinnedPool
from .policies import (
    activation_checkpoint,
    checkpoint_loses_rng,
    format_recompute_plan,
    make_policy_function,
    recompute_plan_of_config,
    run_group_in_checkpoint,
)
from .sequence import CustomBackward, SequenceShard


class MemorySavingGPT(MiniGPT):
    """A MiniGPT with every recompute policy (memory/policies.py), chunks, and offload.

    Args:
        config: `recompute` may be any policy string; an invalid one raises ValueError.
        device_type: run the head's kernels for "cpu", "cuda" or "mps"; None: those for the device
            of the weights. (The planner simulates every device on a CPU.)
        shard: this rank's part of each sequence (train_sp.py); None: whole sequences.
    """

    def __init__(
        self,
        config: MiniGPTConfig,
        device_type: str | None = None,
        shard: SequenceShard | None = None,
    ):
        super().__init__(config)
        self.device_type, self.shard = device_type, shard
        self.compiled_softmax = False  # True: the head runs softmax as compiled code
        self.offload_pool = PinnedPool()  # CPU memory for offload

    def normalized_config(self, config: MiniGPTConfig) -> MiniGPTConfig:
        """Return `config` with the shortest policy string of the same meaning."""
        return replace(config, recompute=format_recompute_plan(recompute_plan_of_config(config)))

    def embed(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Look up ids as MiniGPT does, but with one gradient buffer for embedding and head.

        On a CPU, backward adds the vectors' gradients to that buffer row by row, in the same order
        in every run. A GPU would add the rows in a random order and round differently in each run,
        so there torch's own operator first sorts the ids.
        """
        embedding = self.token_embedding
        special = embedding.padding_idx is not None or embedding.max_norm is not None
        if not torch.is_grad_enabled() or special or type(embedding) is not nn.Embedding:
            return super().embed(input_ids)
        row_by_row = (self.device_type or input_ids.device.type) == "cpu"
        return TiedEmbeddingFunction.apply(embedding.weight, input_ids, row_by_row)

    def head_loss(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return MiniGPT's loss, computed in chunks of tokens (`config.loss_chunks`). Forward
        computes a chunk's gradients, too, so that no logits are kept for backward."""
        if self.config.loss_chunks == 1:
            return super().head_loss(x, weight, labels)
        how = self.config.loss_chunks, self.device_type or x.device.type, self.compiled_softmax
        return chunked_head_loss(x, weight, labels, *how)

    def block_calls(self) -> Iterator[tuple[Callable[..., Tensor], bool]]:
        """Yield (call, whether `forward` checkpoints it) for each block, or group of blocks in one
        checkpoint, in order. Evaluation recomputes nothing, but runs the MLP in chunks, too."""
        config, blocks, offload = self.config, iter(self.blocks), Offload(self.offload_pool)
        # Where torch's checkpoint ignores the RNG, `activation_checkpoint` takes its place.
        loses_rng = config.dropout > 0 and checkpoint_loses_rng(self.token_embedding.weight.device)
        plain = not self.training or (config.recompute in ("none", "full") and not loses_rng)
        if plain and self.shard is None and config.mlp_chunks == 1:
            yield from super().block_calls()
            return
        if not self.training:  # no autograd: "mlp" only means that the MLP runs in chunks
            config = replace(config, recompute="none" if config.mlp_chunks == 1 else "mlp")
        plan = recompute_plan_of_config(config)
        try:
            for i, (policy, size) in enumerate(plan.group_policies_and_sizes):
                group, checkpoint_in_forward = list(islice(blocks, size)), policy == "full"
                call: Any = (
                    group[0] if size == 1 else partial(run_group_in_checkpoint, group, plan.nested)
                )
                policy_function = make_policy_function(policy, config.d_ff, config.mlp_chunks)
                if self.shard is not None:
                    policy_function = partial(self.shard.run_block, policy=policy_function)
                if policy_function:
                    call = partial(call, policy=policy_function)
                # Checkpoint here, not in MiniGPT.forward: for the RNG (`loses_rng`), or because
                # offload's hooks must surround a checkpoint to get its input.
                if checkpoint_in_forward and (plan.offload or loses_rng):
                    call = partial(activation_checkpoint, call, has_dropout=config.dropout > 0)
                    checkpoint_in_forward = False
                if plan.offload:
                    # Tensors of the last call stay on the device: its backward comes first, and
                    # would copy them back at once.
                    moves = policy != "none" and i + 1 < len(plan.group_policies_and_sizes)
                    call = offload.wrap(call, moves, group)
                yield call, checkpoint_in_forward
        finally:
            offload.wait_for_copies()


class SequenceParallelGPT(MemorySavingGPT):
    """A MemorySavingGPT of which each rank computes its tokens of every sequence.

    `model(ids, labels)`, both whole sequences (B, T), the same on all ranks, returns the mean loss
    of all tokens, (). Without labels (when text is generated) each rank computes whole sequences.
    """

    shard: SequenceShard  # never None here

    def __init__(
        self, config: MiniGPTConfig, shard: SequenceShard, all_reduce: Callable[[Tensor], Tensor]
    ):
        """`all_reduce(x)` returns the sum of the `x` of all ranks."""
        super().__init__(config, shard=shard)
        self.all_reduce = all_reduce

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, kv_cache: Any = None, start: int = 0
    ) -> Tensor:
        if labels is None:
            self.shard.stop_sharding()
            return super().forward(input_ids, None, kv_cache, start)
        # Labels are shifted before the split: a rank's last label is the next rank's first token.
        mine, has_label = self.shard.start_sharding(input_ids.size(1)), labels != -100
        # `start` is the position of this rank's first token. (If you add rotary positions in
        # `attend`, count positions from 0: attention always computes whole sequences.)
        loss = super().forward(input_ids[:, mine], labels[:, mine], start=mine.start)
        # `loss` is the mean over this rank's labels (NaN if it has none). It is weighted by their
        # number, because some ranks have more labels than others.
        n_mine, n_all = has_label[:, mine].sum(), has_label.sum()
        share = loss.where(n_mine > 0, 0.0) * n_mine / n_all
        # FSDP averages gradients over the ranks, but their sum is needed. (`heads` has one
        # entry per rank.)
        times_n_ranks = partial(torch.mul, other=len(self.shard.heads))
        return CustomBackward.apply(share, self.all_reduce, times_n_ranks)
