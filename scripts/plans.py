"""Plan for a command, such as scripts/plan_memory.py, on a device that need not exist here.

A `CommandPlan` is a trainer's `StepPlan` with what only commands need: the bytes of the state, the
largest batch that fits, the time of a step. `advice` finds the cheapest change of flags that makes
a step fit, in the order of docs/planning.md ("Out of memory: which knob first"). A simulation
proves this change, or, if the state alone is too large, the bytes of the changed state.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, product, repeat
from typing import Any, TypeVar

import torch

from data import MiniGPTError
from memory import MemorySavingGPT
from model import MiniGPTConfig
from planner import Layout
from planner.cards import CARDS, THIS_MACHINE, is_before_ampere
from planner.choose import nested_checkpoint_policies
from planner.roofline import LINK_EFFICIENCY, LINKS
from planner.shards import state_bytes
from planner.units import format_sizes
from trainer.device import (
    MemoryBudget,
    budget_on,
    choose_device,
    choose_precision,
    is_available,
    set_matmul_precision,
)
from trainer.optimizer import initial_param_state, make_param_groups
from trainer.plan import OFFLOAD_POLICY, POLICY_FLAG, StepPlan, card_for, largest_vocab_size
from trainer.settings import Settings, to_words

ADVICE_OPS = 20_000  # number of simulated operators after which the search ends
OTHER_WAYS = "a smaller model (--n-layers, --d-model), or more cards with train_fsdp.py"
Change = dict[str, Any]  # flags that are changed together: name in Settings -> new value
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
class CommandPlan(StepPlan):
    """A StepPlan with what only commands need."""

    link: str | None = None  # key of LINKS; None: leave the time of communication out

    def with_flags(self: P, **flags: Any) -> P:
        """Return the plan with other values of `flags`."""
        return replace(self, settings=self.settings.replace(**flags))

    # ---- memory

    @property
    def meta_model(self) -> MemorySavingGPT:
        """The model on "meta", whose parameters do not depend on the recompute policy."""
        return make_meta_model(replace(self.config, recompute="none"))

    @property
    def n_parameters(self) -> int:
        """Number of parameters of the whole model; one that blocks share counts once."""
        return sum(parameter.numel() for parameter in self.meta_model.parameters())

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and the optimizer's state in a process, and of the weights
        that the process gathers. Every step takes at least these; no simulation is needed."""
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
        if self.state_bytes >= self.bytes_within_margin:  # no simulation needed
            return 0
        return self.planner.largest_batch(
            self.bytes_within_margin,
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
        return computing + self.exposed_communication_seconds

    @property
    def exposed_communication_seconds(self) -> float:
        """Predicted seconds in which a training step only communicates; 0: no link.

        Each process of N sends (N - 1) / N of the bytes of an all-gather, of a reduce-scatter and
        of an all-to-all, and twice as many in an all-reduce. Communication runs beside computation,
        and only the seconds by which it takes longer count: DDP's all-reduce runs beside the last
        backward of a step, the all-gathers of shards beside each forward and backward, and their
        reduce-scatters beside the last backward (with --reproducible-sums, beside each). Attention
        of a shared sequence waits for all-to-alls of q, k, v and its result, in forward and in
        backward. (Those that a policy repeats, because it recomputes attention, are left out.)
        """
        n, step, settings = self.layout.world_size, self.step, self.settings
        if self.link is None or n == 1 or self.card is None:
            return 0
        config, micro_batches = step.config, settings.grad_accum_steps
        rate = LINK_EFFICIENCY * LINKS[self.link] * n / (n - 1)
        whole = 4 * self.n_parameters
        gathered = whole // (2 if settings.gather_dtype == "bfloat16" else 1)
        backward, all_phases = step.backward_and_total_seconds(self.card)
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
    n = layout.world_size
    device, budget, native = device_and_budget(settings, n)
    if settings.card == THIS_MACHINE:
        if device.type == "cpu" and n > 1:
            raise MiniGPTError(
                f"--card {THIS_MACHINE} measures one process, and {n} would share the CPU: leave "
                "out --nproc-per-node"
            )
        set_matmul_precision(device, settings.tf32)
    precision = choose_precision(settings, device, native)
    card = card_for(settings, device) if settings.card else None
    return CommandPlan(
        settings, largest_vocab_size(settings), device, precision, budget, card, layout
    )


def device_and_budget(settings: Any, n: int = 1) -> tuple[torch.device, MemoryBudget, bool | None]:
    """Return the device to plan for, its memory budget, and whether it has bfloat16 in hardware
    (None: ask the device).

    `settings`: --card, --device and --memory-budget as attributes. `n`: number of processes on this
    machine. Raises MiniGPTError as `plan_for_command`.
    """
    named = CARDS.get(settings.card or "")
    kind = named.device_type if named else settings.device
    if settings.device not in ("auto", kind):
        raise MiniGPTError(
            f"--device {settings.device}: {settings.card} is {kind}; leave --device out"
        )
    if named or settings.card is None and not is_available(kind):
        memory = named.memory if named else None
        native = not named or not is_before_ampere(named)
        budget = MemoryBudget(settings.memory_budget or memory, kind)
        return torch.device(kind), budget, native
    device = choose_device(kind)
    n_sharing = n if device.type == "cpu" else 1
    return device, budget_on(device, settings.memory_budget, n_sharing, here=n), None


# ---- advice


def smaller_batches(settings: Settings) -> list[Change]:
    """Return all changes that split the sequences of a step into smaller micro-batches
    (--batch-size / n, --grad-accum-steps x n), the largest micro-batch first."""
    size, steps = settings.batch_size, settings.grad_accum_steps
    return [
        {"batch_size": size // n, "grad_accum_steps": steps * n}
        for n in range(2, size + 1)
        if size % n == 0 and settings.can_sum_reproducibly(steps * n)
    ]


def changes_with_same_training(settings: Settings, device_type: str) -> Iterator[Change]:
    """Yield changes that keep the training the same, the cheapest first. Each is combined with
    another policy, so the first may change no other flag."""
    chunked_loss = {"loss_chunks": 0} if settings.loss_chunks == 1 else {}
    policies: list[Change] = [{}]
    if device_type == "cuda" and not settings.recompute_plan.offload:
        policies.append({POLICY_FLAG: OFFLOAD_POLICY})
    for policy, batch in product(policies, [{}, *smaller_batches(settings)]):
        yield chunked_loss | policy | batch


def changes_of_training(settings: Settings) -> Iterator[Change]:
    """Yield changes that change the training, each to values that the flags do not have yet."""
    moments, optimizer = {"moments_dtype": "bfloat16"}, {"optimizer": "muon"}
    changes = [
        *({"batch_size": batch["batch_size"]} for batch in smaller_batches(settings)),
        *({"seq_len": settings.seq_len // n} for n in (2, 4, 8) if settings.seq_len >= n),
        *(moments, optimizer, moments | optimizer),
    ]
    for change in changes:
        if all(getattr(settings, name) != value for name, value in change.items()):
            yield change


def with_fitting_policy(plan: CommandPlan) -> CommandPlan | None:
    """Return the plan with the fastest policy that fits, or None if no policy fits.

    If neither `full` nor nested groups (`full/K+nested`) fit, no policy fits, because these have
    the smallest peaks. If the policy has offload, only this policy is tried, because predicted
    times leave out offload's copies, and so cannot be compared.
    """
    if plan.settings.recompute_plan.offload:
        return plan if plan.fits else None
    smallest = ["full", *nested_checkpoint_policies(plan.settings.n_layers)[-1:]]
    fits = any(plan.with_policy(name).peak <= plan.bytes_within_margin for name in smallest)
    return plan.with_fastest_policy() if fits else None


def advice(plan: CommandPlan) -> tuple[str, Change | None]:
    """Return the cheapest change that makes a step fit, in words and as flags, with the fastest
    policy that fits. The flags are None if the search finds none before it has simulated ADVICE_OPS
    operators, or if the state alone exceeds the budget: in that case nothing is simulated, and the
    words name changes whose state fits."""
    settings, usable, n_ops = plan.settings, plan.bytes_within_margin, 0
    if plan.state_bytes >= usable:
        return advice_on_state(plan), None
    changes = chain(
        zip(changes_with_same_training(settings, plan.device.type), repeat("the same training")),
        zip(changes_of_training(settings), repeat("another training")),
    )
    for change, training in changes:
        changed = plan.with_flags(**change)
        before = changed.planner.n_simulated_ops
        if fits := with_fitting_policy(changed):
            flags = {POLICY_FLAG: ""} | change | {POLICY_FLAG: fits.policy}
            flags = {k: v for k, v in flags.items() if v != getattr(settings, k)}
            return f"{' '.join(to_words(flags))} fits ({training})", flags
        n_ops += changed.planner.n_simulated_ops - before
        if n_ops > ADVICE_OPS:
            break
    return f"plan {OTHER_WAYS}", None


def advice_on_state(plan: CommandPlan) -> str:
    """Return why no step fits in less than the state, and which changes have less state. A step
    with them may still not fit: nothing is simulated."""
    usable = plan.bytes_within_margin
    changes = ((c, plan.with_flags(**c).state_bytes) for c in changes_of_training(plan.settings))
    sizes = {" ".join(to_words(c)): size for c, size in changes if size < usable}
    state, room, *texts = format_sizes([plan.state_bytes, usable, *sizes.values()])
    ways = [f"{flags} ({size})" for flags, size in zip(sizes, texts, strict=True)]
    return (
        f"weights, gradients and {optimizer_name(plan.settings)}'s state alone take "
        f"{state}, more than the {room} that tensors may take: plan what has less state, "
        f"{', or '.join([*ways, OTHER_WAYS])}"
    )
