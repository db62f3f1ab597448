"""Plan a run: the memory of its step before it runs, and the recompute policy for
--use-activation-checkpoint auto.

planner/ simulates steps and finds the fastest policy. A `StepPlan` asks the planner about the
settings of a run with one policy, and each other policy has a StepPlan of its own.
(scripts/plans.py has what only commands need.)
"""

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import TypeVar

import torch

from data import MiniGPTError, Tokenizer
from data.tokenizer import load_tokenizer
from model import MiniGPTConfig
from planner import Card, Layout, PlanError, Planner, StepMemory
from planner.cards import choose_card
from planner.choose import (
    nested_checkpoint_policies,
    pareto_frontier,
    pick_fastest_fitting_step,
    simulate_policies_fastest_first,
)

from .device import (
    MemoryBudget,
    budget_on,
    check_gather_dtype_flag,
    free_and_total_memory,
)
from .flags import AUTO
from .metrics import format_bytes
from .optimizer import make_optimizer
from .process import OneProcess
from .settings import Rule, Settings, flags_with_rule

P = TypeVar("P", bound="StepPlan")
OFFLOAD_POLICY = "full+offload"
POLICY_FLAG = "use_activation_checkpoint"
# After memory ran out, torchrun may start the run again, with a policy whose predicted peak is at
# most this share of the failed policy's, so that the first restart, which takes long, suffices.
RESTART_SHARE_OF_FAILED_PEAK = 0.75


def describe_memory_flags(settings: Settings) -> str:
    """Return the flags that a step's memory depends on most, as text."""
    return (
        f"--batch-size {settings.batch_size} --seq-len {settings.seq_len}, "
        f"recompute {settings.use_activation_checkpoint}"
    )


def plan_memory_command(settings: Settings, layout: Layout) -> str:
    """Return the command that tells which changes of flags make a step fit: plan_memory with the
    run's own flags."""
    n, kind = layout.world_size, layout.kind
    processes = [f"--nproc-per-node={n}"] * (n > 1) + [f"--{kind}"] * (kind in ("fsdp", "sp"))
    words = settings.words(**dict.fromkeys(flags_with_rule(Rule.THIS_START)))
    return "what fits: " + shlex.join(["python", "-m", "scripts.plan_memory", *words, *processes])


# ---- the plan


@cache
def make_planner(
    settings: Settings,
    vocab_size: int,
    device: torch.device,
    precision: torch.dtype,
    layout: Layout,
    card: Card | None,
    on_simulate: Callable[[int], object] | None,
) -> Planner:
    """Return the planner of these settings, or raise MiniGPTError as `check_gather_dtype_flag`
    does."""
    sharded, in_tree = layout.shard_degree > 1, settings.reproducible_sums
    n, copies = settings.grad_accum_steps, torch.bfloat16 if settings.compress_gradients else None
    if in_tree and layout.world_size > 1:
        copies = torch.float32
    if sharded:
        check_gather_dtype_flag(settings, precision)
    return Planner(
        settings.model_config(vocab_size),
        settings.seq_len,
        precision=precision,
        make_optimizer=partial(
            make_optimizer, settings=settings, device=device, precision=precision, sharded=sharded
        ),
        clip_gradients=OneProcess(device).clip_gradients,
        device_type=device.type,
        accumulates_gradients=n > 1 and not (sharded and in_tree),
        layout=layout,
        # log2(n) partial sums are alive; for unsharded weights `.grad` holds one of them.
        n_pending_sums=in_tree * max(0, n.bit_length() - 1 - (not sharded)),
        gradient_copies=copies,
        gather_in_bfloat16=sharded and settings.gather_dtype == "bfloat16",
        card_name=card.name if card and card.memory else None,  # memory 0: a measured card
        on_simulate=on_simulate or (lambda n: None),
    )


@dataclass(frozen=True)
class StepPlan:
    """The memory of a training step with these settings, before it runs."""

    settings: Settings
    vocab_size: int
    device: torch.device  # need not exist on this machine
    precision: torch.dtype
    memory_budget: MemoryBudget = MemoryBudget(None, "cpu")
    # Policies are ranked by their predicted time on this card. None: by their recomputed FLOPs.
    card: Card | None = None
    layout: Layout = Layout()
    on_simulate: Callable[[int], object] | None = None  # gets each simulation's operators

    def with_policy(self: P, policy: str) -> P:
        return replace(self, settings=self.settings.replace(**{POLICY_FLAG: policy}))

    @cached_property
    def config(self) -> MiniGPTConfig:
        """The config of the model, which has `full` for the policy `auto`."""
        return self.settings.model_config(self.vocab_size)

    @property
    def policy(self) -> str:
        """The recompute policy; `full` for `auto`."""
        return self.config.recompute

    @property
    def planner(self) -> Planner:
        """The planner of these settings, which caches its results. Plans that differ only in batch
        size and recompute policy share it."""
        settings, steps = self.settings, self.settings.grad_accum_steps
        shared = settings.replace(
            batch_size=1,
            grad_accum_steps=steps if settings.reproducible_sums else min(steps, 2),
            use_activation_checkpoint="none",
        )
        where = self.device, self.precision, self.layout, self.card
        return make_planner(shared, self.vocab_size, *where, self.on_simulate)

    @property
    def step(self) -> StepMemory:
        """One micro-batch and the update of the weights, simulated."""
        return self.planner.step(self.settings.batch_size, recompute=self.policy)

    @cached_property
    def peak(self) -> int:
        """Bytes at the peak of the step."""
        return self.step.peak

    @cached_property
    def without_recompute(self: P) -> P:
        return self if self.policy == "none" else self.with_policy("none")

    @property
    def bytes_within_margin(self) -> int:
        """Bytes that tensors may take; sys.maxsize if the budget is unknown."""
        usable = self.memory_budget.bytes_within_margin
        return sys.maxsize if usable is None else usable

    def with_fastest_policy(self: P) -> P:
        """Return the plan with the fastest policy that fits; if none fits, with the policy that has
        the smallest peak."""
        size, card = self.settings.batch_size, self.card
        step = pick_fastest_fitting_step(self.planner, size, self.bytes_within_margin, card)
        return self.with_policy(step.config.recompute)

    def deeper_plans(self: P) -> Iterator[P]:
        """Yield the plans that a run may switch to when memory runs out.

        Each needs less memory than this plan and all plans before it. The fastest policies for
        their peaks come first, the fastest first, and then nested groups; on CUDA full+offload
        comes last, with which saved tensors wait in CPU memory. Raises PlanError.
        """
        steps = simulate_policies_fastest_first(self.planner, self.settings.batch_size, self.card)
        names = [
            *(step.config.recompute for step in pareto_frontier(steps)),
            *nested_checkpoint_policies(self.settings.n_layers),
            *[OFFLOAD_POLICY] * (self.device.type == "cuda"),
        ]
        least = self.peak
        for plan in map(self.with_policy, names):
            if plan.peak < least:  # each plan has cached its peak now
                least = plan.peak
                yield plan


def plans_to_try(plans: Iterable[P], share: float = 1.0) -> Iterator[P]:
    """Yield, in order, the plans to try when the first of `plans` does not fit.

    `plans`: a plan and its `deeper_plans`. The limit is the peak of the first plan times `share`,
    minus the margin of a MemoryBudget. The result begins with the fastest plan whose peak is within
    this limit, or else with the plan that needs the least memory; full+offload comes last in any
    case. The result is empty if no plan needs less memory than the first.
    """
    deeper = iter(plans)
    failed = next(deeper)
    usable = MemoryBudget(int(share * failed.peak), failed.device.type).bytes_within_margin or 0
    too_large = []
    for plan in deeper:
        if plan.peak <= usable and plan.policy != OFFLOAD_POLICY:
            yield from chain([plan], deeper)  # each needs less memory than the one before
            return
        too_large.append(plan)
    yield from [plan for plan in too_large if plan.policy != OFFLOAD_POLICY][-1:]
    yield from (plan for plan in too_large if plan.policy == OFFLOAD_POLICY)


def card_for(settings: Settings, device: torch.device, name: str | None = None) -> Card | None:
    """Return the card that --card or `name` names, else this machine's GPU: see `choose_card`."""
    head_size = settings.d_model // settings.n_heads
    return choose_card(name or settings.card, device, settings.tf32, settings.seq_len, head_size)


def largest_vocab_size(settings: Settings, tokenizer: Tokenizer | None = None) -> int:
    """Return the largest vocabulary size that the run can have, without reading the run's data.

    `tokenizer`: that of the snapshot or of the weights from which the run starts. Raises DataError
    if the tokenizer that a flag names cannot be loaded.
    """
    if tokenizer is not None:
        return tokenizer.vocab_size
    if settings.use_toy_data:
        return settings.vocab_size or 256
    name = settings.tokenizer_name or ("gpt2" if settings.train_data else "bpe")
    if name == "bpe":
        return settings.vocab_size or 1024  # with a short text the tokenizer has fewer ids
    return 50257 if name == "gpt2" else load_tokenizer(name).vocab_size


# ---- the plan of a training run


def plan_run(
    settings: Settings, vocab_size: int, process: OneProcess, precision: torch.dtype
) -> tuple[str, list[StepPlan], str]:
    """Choose the policy of `auto`, and predict the memory that a step will need.

    `precision`: the dtype of the model's matmuls. Returns the recompute policy, the plan in use and
    its `deeper_plans` ([]: the prediction failed), and text for the user. Raises MiniGPTError if
    `auto` finds no policy that fits, and, with exit code 4, if the step needs more memory than the
    device has in total.
    """
    # All processes rank policies by the card of rank 0. If all must have the same policy, the plan
    # is for the smallest of their budgets.
    layout, device = process.layout, process.device
    card = process.broadcast_from_rank0(lambda: card_for(settings, device))
    here = layout.local_world_size
    budget = budget_on(device, settings.memory_budget, process.processes_on_device, here=here)
    if layout.shard_degree > 1:
        budget = min(process.all_gather_object(budget), key=lambda budget: budget.limit_bytes or 0)
    plan = StepPlan(settings, vocab_size, device, precision, budget, card, layout)
    plan_here = partial(plan_on_this_rank, plan, process)
    chooses_alone = settings.use_activation_checkpoint == AUTO and layout.shard_degree == 1
    policy, plans, words = (
        process.run_on_all_ranks(plan_here)
        if chooses_alone
        else process.broadcast_from_rank0(plan_here)
    )
    make_planner.cache_clear()  # the plans have cached their peaks, the run needs no more
    policies = process.all_gather_object(policy)
    if len(set(policies)) > 1:
        words += f"\nmemory   each process has a policy of its own, by rank: {', '.join(policies)}"
    return policy, plans, words


def plan_on_this_rank(plan: StepPlan, process: OneProcess) -> tuple[str, list[StepPlan], str]:
    """Return the result of `plan_run` for this process, without a comparison of the processes."""
    words = ""
    if plan.settings.use_activation_checkpoint == AUTO:
        plan = choose_fitting_policy(plan)
        by_time = f"the least time (predicted for {plan.card.name})" if plan.card else ""
        criterion = by_time or "the least recompute"
        words = (
            f"auto takes {plan.policy}: {criterion} that fits in {plan.memory_budget}\nmemory   "
        )
    try:
        if policy := process.failed_policy:
            failed = plan.with_policy(policy)
            plans = [
                *plans_to_try([failed, *failed.deeper_plans()], share=RESTART_SHARE_OF_FAILED_PEAK)
            ]
            # `auto` may have chosen a policy that needs even less memory.
            if plan.policy not in [deeper.policy for deeper in plans]:
                plan = next(iter(plans), failed)
            now = "the same, the smallest known" if plan is failed else plan.policy
            words += f"memory ran out with {policy}; it goes on with {now}\nmemory   "
        words += describe_peaks(plan) + check_memory_and_warn(plan, process)
    except PlanError as error:
        return plan.policy, [], f"{words}the peak could not be predicted: {error}"
    # Planning the deeper policies takes longer than all else here. A run that is far from the limit
    # plans them only if memory runs out all the same (run.switch_policy), and a run of several
    # processes never, because it does not switch policies.
    may_switch = plan.layout.kind == "one" and plan.peak > plan.bytes_within_margin // 4
    return plan.policy, [plan, *(plan.deeper_plans() if may_switch else ())], words


def choose_fitting_policy(plan: StepPlan) -> StepPlan:
    """Return the plan with the policy that `auto` chooses. Raises MiniGPTError if no policy fits,
    or if the free memory is unknown."""
    budget = plan.memory_budget
    if budget.limit_bytes is None:
        raise MiniGPTError("--memory-budget: this system does not report its free memory")
    chosen = plan.with_fastest_policy()
    if chosen.peak <= plan.bytes_within_margin:
        return chosen
    raise MiniGPTError(
        f"{'--use-activation-checkpoint auto' if budget.is_free else '--memory-budget'}: tensors "
        f"may take {budget}, but the smallest peak is {format_bytes(chosen.peak)} "
        f"({chosen.policy}); {plan_memory_command(plan.settings, plan.layout)}"
    )


def describe_peaks(plan: StepPlan) -> str:
    """Return text on the predicted memory of the planned step, and of a step without recompute."""
    steps = {plan.policy: plan} if plan.policy != "none" else {}
    steps["without recompute"] = plan.without_recompute
    parts = (
        f"{name}: peak {format_bytes(each.peak)}, backward keeps {format_bytes(each.step.kept)}"
        for name, each in steps.items()
    )
    return "; ".join(parts) + " (predicted)"


def check_memory_and_warn(plan: StepPlan, process: OneProcess) -> str:
    """Return the lines, each after a newline, that the user should read about a planned step.

    Raises MiniGPTError with exit code 4 if all processes on the device together need more memory
    than the device has in total.
    """
    budget, processes, step = plan.memory_budget, process.processes_on_device, plan.step
    _, total = free_and_total_memory(process.device)
    each = f"{processes} processes, each " if processes > 1 else ""
    need = f"{each}{format_bytes(step.peak)} predicted"
    machine = "GPU" if process.device.type == "cuda" else "machine"
    capacity = f"the {machine} has {format_bytes(total or 0)}"
    hint = plan_memory_command(plan.settings, plan.layout)
    if total is not None and processes * step.peak > total:
        raise MiniGPTError(
            f"out of memory before the first step: {need}, {capacity}; with "
            f"{describe_memory_flags(plan.settings)}; {hint}",
            exit_code=4,
        )
    host, note = budget.host_usable_bytes, plan.planner.inaccuracy_note
    lines = [f"note     {note}"] if note else []
    if step.peak > plan.bytes_within_margin:
        lines.append(f"warning  {need}, but tensors may take {budget}; {capacity} in all; {hint}")
    if host is not None and step.host_bytes > host:
        lines.append(
            f"warning  each process needs {format_bytes(step.host_bytes)} of CPU memory for "
            f"+offload, and may take {format_bytes(host)}; {hint}"
        )
    return "".join(f"\n{line}" for line in lines)
