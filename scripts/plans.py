"""Plan for a command, such as scripts/plan_memory.py, on a device that need not exist here.

A `CommandPlan` is a trainer's Plan, and knows what only commands ask: the bytes of the state, the
largest batch that fits, the time of a step.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, TypeVar

import torch

from data import MiniGPTError
from memory import MemorySavingGPT
from model import MiniGPTConfig
from planner import Layout
from planner.cards import CARDS, THIS_MACHINE
from planner.roofline import LINK_EFFICIENCY, LINKS
from planner.shards import state_bytes
from trainer.device import (
    MemoryBudget,
    budget_on,
    choose_device,
    choose_precision,
    is_available,
    set_matmul_precision,
)
from trainer.optimizer import initial_param_state, make_param_groups
from trainer.plan import Plan, card_for, vocab_size_of
from trainer.settings import Settings

P = TypeVar("P", bound="CommandPlan")


def optimizer_name(settings: Settings) -> str:
    """Return the name of the optimizer, in words for the user."""
    return {"adamw": "AdamW", "muon": "Muon and AdamW"}[settings.optimizer]


@cache
def make_meta_model(config: MiniGPTConfig) -> MemorySavingGPT:
    """Return a model whose parameters have shapes but no memory, and need no simulation."""
    with torch.device("meta"):
        return MemorySavingGPT(config)


@dataclass(frozen=True)
class CommandPlan(Plan):
    """A Plan, and what only commands ask of it."""

    link: str | None = None  # key of LINKS; None: leave the time of communication out

    def with_flags(self: P, **flags: Any) -> P:
        """Return the plan with other values of `flags`."""
        return replace(self, settings=self.settings.replace(**flags))

    # ---- memory

    @property
    def meta_model(self) -> MemorySavingGPT:
        """The model on "meta". Its parameters do not depend on the recompute policy."""
        return make_meta_model(replace(self.config, recompute="none"))

    @property
    def n_parameters(self) -> int:
        """Number of parameters of the whole model. A parameter that blocks share counts once."""
        return sum(parameter.numel() for parameter in self.meta_model.parameters())

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and the optimizer's state in a process, and of the weights
        that it gathers. Every step takes at least these bytes. Nothing is simulated."""
        model, moments = self.meta_model, getattr(torch, self.settings.moments_dtype)
        state = (
            tensor
            for group in make_param_groups(model, self.settings)
            for parameter in group["params"]
            for tensor in initial_param_state(parameter, group, moments).values()
        )
        return state_bytes(model, state, self.layout.shard_degree)

    @cached_property
    def largest_batch(self) -> int:
        """Number of sequences in the largest micro-batch that fits; 0: not even one fits."""
        return self.planner.largest_batch(
            self.usable_bytes,
            self.settings.batch_size,
            self.memory_budget.host_usable_bytes,
            recompute=self.policy,
        )

    @property
    def fits(self) -> bool:
        return self.settings.batch_size <= self.largest_batch

    # ---- time

    @cached_property
    def seconds(self) -> float:
        """Predicted seconds of a training step: all its micro-batches and one update."""
        assert self.card
        computing = self.step.seconds(self.card, self.settings.grad_accum_steps)
        return computing + self.communication_seconds

    @property
    def communication_seconds(self) -> float:
        """Predicted seconds in which a training step only communicates; 0: no link.

        Each process of N sends (N - 1) / N of the bytes of a gather, of a reduce-scatter and of an
        all-to-all, and twice as many in an all-reduce. DDP reduces the gradients of a step at the
        time of the last backward. Shards are gathered at the time of each forward and backward, and
        the gradients are scattered in the last backward (with --reproducible-sums, in each). Only
        what takes longer than that counts.
        Attention of a shared sequence waits for its all-to-alls: of q, k, v and its result, in
        forward and in backward. (A policy that replays attention repeats them: left out.)
        """
        n, step, settings = self.layout.world_size, self.step, self.settings
        if self.link is None or n == 1 or self.card is None:
            return 0
        config, micro_batches = step.config, settings.grad_accum_steps
        rate = LINK_EFFICIENCY * LINKS[self.link] * n / (n - 1)
        whole = 4 * self.n_parameters
        gathered = whole // (2 if settings.gather_dtype == "bfloat16" else 1)
        backward, all_phases = step.phase_seconds(self.card)
        if self.layout.gradients_persist:
            return max(0, 2 * whole / (1 + settings.compress_gradients) / rate - backward)
        in_blocks = 8 * config.n_layers * config.d_model * self.precision.itemsize
        tokens = step.batch_size * self.planner.local_seq_len
        exchanges = (self.layout.sp_degree > 1) * in_blocks * tokens / rate
        hidden = max(0, 2 * gathered / rate - all_phases)
        scattered = max(0, (2 * gathered + whole) / rate - all_phases)
        n_scattered = micro_batches if settings.reproducible_sums else 1
        return (
            micro_batches * exchanges
            + (micro_batches - n_scattered) * hidden
            + n_scattered * scattered
        )

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens per second of all processes together."""
        return self.settings.tokens_per_step(self.layout.replicas) / self.seconds


def plan_for_command(settings: Settings, layout: Layout) -> CommandPlan:
    """Return the plan of a command, for a device that need not exist on this machine.

    For a card of CARDS, the default of --memory-budget is the card's whole memory, because a device
    that is not on this machine cannot report its free memory.

    Raises MiniGPTError if the flags contradict each other, or do not suit this machine, and
    DataError if the tokenizer cannot be loaded.
    """
    n, named = layout.world_size, CARDS.get(settings.card or "")
    kind, native = named.device_type if named else settings.device, None
    if settings.device not in ("auto", kind):
        raise MiniGPTError(
            f"--device {settings.device}: {settings.card} is {kind}; leave --device out"
        )
    if named or settings.card is None and not is_available(kind):
        device, memory = torch.device(kind), named.memory if named else None
        budget = MemoryBudget(settings.memory_budget or memory, kind)
        # False for GPUs before Ampere, which multiply float16 faster than bfloat16.
        native = not named or named.flops[1] >= named.flops[2]
    else:
        device = choose_device(kind)
        budget = budget_on(device, settings.memory_budget, n if device.type == "cpu" else 1, here=n)
    if settings.card == THIS_MACHINE:
        if device.type == "cpu" and n > 1:
            raise MiniGPTError(
                f"--card {THIS_MACHINE} measures one process, and {n} would share the CPU: leave "
                "out --nproc-per-node"
            )
        set_matmul_precision(device, settings.tf32)
    precision = choose_precision(settings, device, native)
    card = card_for(settings, device) if settings.card else None
    return CommandPlan(settings, vocab_size_of(settings), device, precision, budget, card, layout)
