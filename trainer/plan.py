"""Plan a run: the memory and the time of its step before it runs, and the policy for
--use-activation-checkpoint auto. (scripts/advice.py finds changes of flags that make a step fit.)

planner/ simulates steps and finds the fastest recompute policy. A `Plan` asks it about the settings
of a run, on a device that need not exist here; a plan with other flags is another Plan. `plan_run`
makes the plan of a training run, `plan_for_command` that of a command such as
scripts/plan_memory.py.
"""

import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any

import torch

from data import MiniGPTError
from data.tokenizer import load_tokenizer
from memory import MemorySavingGPT
from model import MiniGPTConfig
from planner import Card, Layout, Planner, StepMemory
from planner.cards import CARDS, THIS_MACHINE, choose_card
from planner.choose import (
    nested_checkpoint_policies,
    pareto_frontier,
    pick_fastest_fitting_step,
    simulate_policies_fastest_first,
)
from planner.roofline import LINK_EFFICIENCY, LINKS
from planner.shards import state_bytes

from .bootstrap import PROJECT_FOLDER
from .device import (
    MemoryBudget,
    budget_on,
    check_gather_dtype_flag,
    choose_device,
    choose_precision,
    free_and_total_memory,
    is_available,
    set_matmul_precision,
)
from .flags import AUTO
from .metrics import format_bytes
from .optimizer import make_optimizer, optimizer_state
from .process import OneProcess
from .settings import Rule, Settings, names_with

OFFLOAD_POLICY = "full+offload"
POLICY_FLAG = "use_activation_checkpoint"
# After memory ran out, torchrun may start the run again. Then the new policy should have a
# predicted peak of at most this share of the failed policy's predicted peak. A restart takes long,
# so the first policy after a restart should already fit.
RESTART_SHARE_OF_FAILED_PEAK = 0.75


def describe_memory_flags(settings: Settings) -> str:
    """Return the flags that a step's memory depends on most, as text."""
    return (
        f"--batch-size {settings.batch_size} --seq-len {settings.seq_len}, "
        f"recompute {settings.use_activation_checkpoint}"
    )


def where_to_ask(settings: Settings, layout: Layout) -> str:
    """Return the command that tells which changes of flags make a step fit: plan_memory with the
    run's own flags."""
    n, kind = layout.world_size, layout.kind
    processes = [f"--nproc-per-node={n}"] * (n > 1) + [f"--{kind}"] * (kind in ("fsdp", "sp"))
    words = settings.words(**dict.fromkeys(names_with(Rule.THIS_START)))
    return "what fits: " + shlex.join(["python", "-m", "scripts.plan_memory", *words, *processes])


# ---- the plan


def do_nothing(n: int) -> None:
    """Ignore n. (This is no lambda, because ranks send each other their plans, pickled.)"""


@cache
def make_meta_model(config: MiniGPTConfig) -> MemorySavingGPT:
    """Return a model whose parameters have shapes but no memory, and need no simulation."""
    with torch.device("meta"):
        return MemorySavingGPT(config)


@cache
def make_planner(
    settings: Settings,
    vocab_size: int,
    device: torch.device,
    precision: torch.dtype,
    layout: Layout,
    card: Card | None,
    on_simulate: Callable[[int], object],
) -> Planner:
    """Return the planner of these settings. Raises MiniGPTError as `check_gather_dtype_flag`."""
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
        # Besides `.grad`, log2(n) sums are pending. The `.grad` of a whole weight is one of them.
        n_pending_sums=in_tree * max(0, n.bit_length() - 1 - (not sharded)),
        gradient_copies=copies,
        gather_in_bfloat16=sharded and settings.gather_dtype == "bfloat16",
        card_name=card.name if card and card.memory else None,  # memory 0: a measured card
        on_simulate=on_simulate,
    )


@dataclass(frozen=True)
class Plan:
    """The memory and the time of a training step with these settings, before it runs."""

    settings: Settings
    vocab_size: int
    device: torch.device  # need not exist on this machine
    precision: torch.dtype
    memory_budget: MemoryBudget = MemoryBudget(None, "cpu")
    # Policies are ranked by their predicted time on this card. None: by their recomputed FLOPs.
    card: Card | None = None
    layout: Layout = Layout()
    link: str | None = None  # key of LINKS; None: leave the time of communication out
    on_simulate: Callable[[int], object] = do_nothing  # gets each simulation's operators

    def with_flags(self, **flags: Any) -> "Plan":
        """Return the plan with other values of `flags`."""
        return replace(self, settings=self.settings.replace(**flags))

    def with_policy(self, policy: str) -> "Plan":
        return self.with_flags(**{POLICY_FLAG: policy})

    # ---- memory

    @cached_property
    def config(self) -> MiniGPTConfig:
        """For the policy `auto` the config has `full`."""
        return self.settings.model_config(self.vocab_size)

    @property
    def policy(self) -> str:
        """The recompute policy; `full` for `auto`."""
        return self.config.recompute

    @property
    def planner(self) -> Planner:
        """The planner of these settings. Plans that differ only in batch size and recompute policy
        share one, which remembers its answers."""
        settings, steps = self.settings, self.settings.grad_accum_steps
        shared = settings.replace(
            batch_size=1,
            grad_accum_steps=steps if settings.reproducible_sums else min(steps, 2),
            use_activation_checkpoint="none",
        )
        where = self.device, self.precision, self.layout, self.card
        return make_planner(shared, self.vocab_size, *where, self.on_simulate)

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
        model = self.meta_model
        return state_bytes(model, optimizer_state(model, self.settings), self.layout.shard_degree)

    @property
    def step(self) -> StepMemory:
        """One micro-batch and the update of the weights, simulated."""
        return self.planner.step(self.settings.batch_size, recompute=self.policy)

    @cached_property
    def peak(self) -> int:
        """Bytes at the peak of the step."""
        return self.step.peak

    @cached_property
    def without_recompute(self) -> "Plan":
        return self if self.policy == "none" else self.with_policy("none")

    @property
    def usable_bytes(self) -> int:
        """Bytes that tensors may take; sys.maxsize if the budget is unknown."""
        usable = self.memory_budget.usable_bytes
        return sys.maxsize if usable is None else usable

    @cached_property
    def largest_batch(self) -> int:
        """Number of sequences in the largest micro-batch that fits; 0: not even one fits."""
        if self.state_bytes >= self.usable_bytes:  # no simulation needed
            return 0
        if self.planner.step(1, recompute=self.policy).peak > self.usable_bytes:
            return 0
        return self.planner.largest_batch(
            self.usable_bytes,
            self.settings.batch_size,
            self.memory_budget.host_usable_bytes,
            recompute=self.policy,
        )

    @property
    def fits(self) -> bool:
        return self.settings.batch_size <= self.largest_batch

    # ---- other policies, other flags

    def with_fastest_policy(self) -> "Plan":
        """Return the plan with the fastest policy that fits; if none fits, with the policy that has
        the smallest peak."""
        step = pick_fastest_fitting_step(
            self.planner, self.settings.batch_size, self.usable_bytes, self.card
        )
        return self.with_policy(step.config.recompute)

    def deeper(self) -> Iterator["Plan"]:
        """Yield the plans that a run may switch to when memory runs out.

        Each needs less memory than this plan and all plans before it. They have the fastest
        policies for their peaks, the fastest first; nested groups are simulated only when they are
        asked for. On CUDA full+offload comes last, with which saved tensors wait in CPU memory.
        Raises all errors of planning: for example, fake tensors may not work with the model.
        """
        steps = simulate_policies_fastest_first(self.planner, self.settings.batch_size, self.card)
        names = [
            *(step.config.recompute for step in pareto_frontier(steps)),
            *nested_checkpoint_policies(self.settings.n_layers),
            *[OFFLOAD_POLICY] * (self.device.type == "cuda"),
        ]
        least = self.peak
        for plan in map(self.with_policy, names):
            if plan.peak < least:  # each remembers its peak now
                least = plan.peak
                yield plan

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


def plans_to_try(plans: Iterable[Plan], share: float = 1.0) -> Iterator[Plan]:
    """Yield the plans to try after the first of `plans` did not fit, in this order.

    `plans`: a plan and its `deeper` plans. The limit is the peak of the first plan times `share`,
    less the margin of a MemoryBudget. The result begins with the fastest plan whose peak is within
    this limit. If no peak is within the limit, the result begins with the plan that needs the least
    memory. full+offload comes last in any case. If no plan needs less memory than the first, the
    result is empty.
    """
    deeper = iter(plans)
    failed = next(deeper)
    usable = MemoryBudget(int(share * failed.peak), failed.device.type).usable_bytes or 0
    too_large = []
    for plan in deeper:
        if plan.peak <= usable and plan.policy != OFFLOAD_POLICY:
            yield plan
            yield from deeper  # each needs less memory than the one before
            return
        too_large.append(plan)
    yield from [plan for plan in too_large if plan.policy != OFFLOAD_POLICY][-1:]
    yield from (plan for plan in too_large if plan.policy == OFFLOAD_POLICY)


# ---- the plan of a command


def plan_for_command(settings: Settings, layout: Layout) -> Plan:
    """Return the plan of a command, for a device that need not exist on this machine.

    For a card of CARDS, the default of --memory-budget is the card's whole memory, because a device
    that is not on this machine cannot report its free memory.

    Raises MiniGPTError if the flags contradict each other, or do not suit this machine, and
    DataError if the tokenizer cannot be loaded.
    """
    n, kind, budget = layout.world_size, settings.device, settings.memory_budget
    native: bool | None = None  # True: the hardware has bfloat16; None: ask the device
    if settings.card not in (None, THIS_MACHINE):
        named_card = CARDS[settings.card]
        kind, budget = named_card.device_type, budget or named_card.memory
        if settings.device not in ("auto", kind):
            raise MiniGPTError(
                f"--device {settings.device}: {settings.card} is {kind}; leave --device out"
            )
        # False for GPUs before Ampere, which multiply float16 faster than bfloat16.
        native = named_card.flops[1] >= named_card.flops[2]
    elif not is_available(kind) and settings.card is None:
        native = True
    if native is None:
        device = choose_device(kind)
        memory = budget_on(device, budget, n if device.type == "cpu" else 1, here=n)
    else:
        device, memory = torch.device(kind), MemoryBudget(budget, kind)
    precision = choose_precision(settings, device, native)
    if settings.card == THIS_MACHINE:
        if device.type == "cpu" and n > 1:
            raise MiniGPTError(
                f"--card {THIS_MACHINE} measures one process, and {n} would share the CPU: leave "
                "out --nproc-per-node"
            )
        set_matmul_precision(device, settings.tf32)
    card = card_for(settings, device) if settings.card else None
    return Plan(settings, vocab_size_of(settings), device, precision, memory, card, layout)


def card_for(settings: Settings, device: torch.device, name: str | None = None) -> Card | None:
    """Return the card that --card or `name` names, else this machine's GPU: see `choose_card`."""
    head_size = settings.d_model // settings.n_heads
    return choose_card(name or settings.card, device, settings.tf32, settings.seq_len, head_size)


def vocab_size_of(settings: Settings) -> int:
    """Return the vocabulary size that the run would have, without reading the run's data.

    If --init-from is given, the caller must first call `open_init_from`, which sets the tokenizer.
    Raises DataError if the tokenizer cannot be loaded.
    """
    if settings.use_toy_data:
        return settings.vocab_size or 256
    name = settings.tokenizer_name or ("gpt2" if settings.train_data else "bpe")
    if name == "bpe":
        return settings.vocab_size or 1024  # with a short text the tokenizer has fewer ids
    return 50257 if name == "gpt2" else load_tokenizer(name).vocab_size


# ---- the plan of a training run


def plan_run(
    settings: Settings, vocab_size: int, process: OneProcess, precision: torch.dtype
) -> tuple[str, list[Plan], str]:
    """Choose the policy of `auto`, and predict the memory that a step will need.

    `precision`: the dtype of the model's matmuls. Returns the recompute policy, the plan in use and
    its `deeper` plans ([]: the prediction failed), and text for the user. Raises MiniGPTError with
    `auto`, if no policy fits, and with exit code 4 if the step needs more memory than the device
    has in total.
    """
    # All processes rank policies by the card of rank 0. If all processes must have the same policy,
    # the plan is for the smallest of their budgets.
    layout, device = process.layout, process.device
    card = process.from_rank0(lambda: card_for(settings, device))
    here = layout.local_world_size
    budget = budget_on(device, settings.memory_budget, process.processes_on_device, here=here)
    if layout.shard_degree > 1:
        budget = min(process.all_gather_object(budget), key=lambda budget: budget.limit_bytes or 0)
    plan = Plan(settings, vocab_size, device, precision, budget, card, layout)
    plan_here = partial(plan_on_this_rank, plan, process)
    chooses_alone = settings.use_activation_checkpoint == AUTO and layout.shard_degree == 1
    policy, plans, words = (
        process.run_on_all_ranks(plan_here) if chooses_alone else process.from_rank0(plan_here)
    )
    make_planner.cache_clear()  # the plans remember their peaks, the run needs no more
    policies = process.all_gather_object(policy)
    if len(set(policies)) > 1:
        words += f"\nmemory   each process has a policy of its own, by rank: {', '.join(policies)}"
    return policy, plans, words


def plan_on_this_rank(plan: Plan, process: OneProcess) -> tuple[str, list[Plan], str]:
    """Return the result of `plan_run` for this process, without a comparison of the processes."""
    words, policy = "", plan.policy
    if plan.settings.use_activation_checkpoint == AUTO:
        chosen = choose_fitting_policy(plan)
        policy = chosen.policy
        by_time = f"the least time (predicted for {plan.card.name})" if plan.card else ""
        criterion = by_time or "the least recompute"
        words = f"auto takes {policy}: {criterion} that fits in {plan.memory_budget}\nmemory   "
    if failed := process.failed_policy:
        policy = policy_after_out_of_memory(plan.with_policy(failed), policy)
        now = "the same, the smallest known" if policy == failed else policy
        words += f"memory ran out with {failed}; it goes on with {now}\nmemory   "
    plans, prediction = predict(plan.with_policy(policy), process)
    return policy, plans, words + prediction


def policy_after_out_of_memory(failed: Plan, policy: str) -> str:
    """Return the policy for a run that torchrun has started again, after memory ran out with the
    plan `failed`; `policy` is the one that the run would take otherwise. If no policy needs less
    memory, or planning fails, keep that of `failed`."""
    with suppress(Exception):
        deeper = chain([failed], failed.deeper())
        plans = plans_to_try(deeper, share=RESTART_SHARE_OF_FAILED_PEAK)
        names = [plan.policy for plan in plans]
        # `auto` may have chosen a policy that needs even less memory.
        return policy if policy in names else names[0]
    return failed.policy


def choose_fitting_policy(plan: Plan) -> Plan:
    """Return the plan with the policy that `auto` chooses.

    Raises MiniGPTError if no policy fits, or if the free memory is unknown. If no policy fits, the
    message names a change that would fit.
    """
    if plan.memory_budget.limit_bytes is None:
        raise MiniGPTError("--memory-budget: this system does not report its free memory")
    budget, smallest = plan.memory_budget, f"above {format_bytes(plan.state_bytes)}"
    if plan.state_bytes < plan.usable_bytes:
        chosen = plan.with_fastest_policy()
        if chosen.peak <= plan.usable_bytes:
            return chosen
        smallest = f"{format_bytes(chosen.peak)} ({chosen.policy})"
    typed = f"--use-activation-checkpoint {plan.settings.use_activation_checkpoint}"
    raise MiniGPTError(
        f"{typed if budget.is_free else '--memory-budget'}: tensors may take {budget}, but the "
        f"smallest peak is {smallest}; {where_to_ask(plan.settings, plan.layout)}"
    )


def predict(plan: Plan, process: OneProcess) -> tuple[list[Plan], str]:
    """Predict the memory of a step. Return the plan and its `deeper` plans, and text for the user,
    with warnings. If the prediction fails, the list is empty; far from the limit, and with
    several processes, it has no deeper plans. Raises MiniGPTError if the step needs more memory
    than the device has in total."""
    try:
        check_memory(plan, process, plan.state_bytes)  # needs no simulation
        words, note = describe_peaks(plan), plan.planner.inaccuracy_note
        words += f"\nnote     {note}" if note else ""
        words += check_memory(plan, process, plan.peak)
        host_bytes, needed = plan.memory_budget.host_usable_bytes, plan.step.host_bytes
        if host_bytes is not None and needed > host_bytes:
            words += (
                f"\nwarning  each process needs {format_bytes(needed)} of CPU memory for +offload, "
                f"and may take {format_bytes(host_bytes)}; "
            ) + where_to_ask(plan.settings, plan.layout)
        # To plan what is deeper takes longer than all else here. A run that is far from the limit
        # does it if memory runs out all the same (run.free_and_switch_policy). One of several
        # processes never switches.
        may_switch = plan.layout.kind == "one" and plan.peak > plan.usable_bytes // 4
        return [plan, *(plan.deeper() if may_switch else ())], words
    except MiniGPTError:
        raise
    except Exception as error:  # a failed prediction must not stop training
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        failure = f"{type(cause).__name__} at {error_location(cause)}"
        return [], f"the peak could not be predicted ({failure})"


def error_location(error: Exception) -> str:
    """Return the innermost line of this project in the error's traceback, as "FILE:LINE"."""
    lines = [  # (leave out the planner's OpRecorder: its `__torch_dispatch__` wraps all operators)
        f"{frame.filename[len(PROJECT_FOLDER) + 1 :]}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(PROJECT_FOLDER + os.sep)
        and not frame.filename.startswith(torch.__path__[0])  # torch may be inside PROJECT_FOLDER
        and frame.name != "__torch_dispatch__"
    ]
    return lines[-1] if lines else "an unknown line"


def describe_peaks(plan: Plan) -> str:
    """Return text on the predicted memory of the planned step, and of a step without recompute."""
    steps = {plan.policy: plan} if plan.policy != "none" else {}
    steps["without recompute"] = plan.without_recompute
    parts = (
        f"{name}: peak {format_bytes(each.peak)}, backward keeps {format_bytes(each.step.kept)}"
        for name, each in steps.items()
    )
    return "; ".join(parts) + " (predicted)"


def check_memory(plan: Plan, process: OneProcess, needed: int) -> str:
    """Return a warning if `needed` is more than the tensors of a process may take, else "".

    `needed`: bytes that each process needs. Raises MiniGPTError with exit code 4 if all processes
    on the device together need more memory than the device has in total.
    """
    budget, processes = plan.memory_budget, process.processes_on_device
    if budget.usable_bytes is None:
        return ""
    _, total = free_and_total_memory(process.device)
    each = f"{processes} processes, each " if processes > 1 else ""
    need = f"{each}{format_bytes(needed)} predicted"
    hint = where_to_ask(plan.settings, plan.layout)
    capacity = (
        f"the {'GPU' if process.device.type == 'cuda' else 'machine'} has "
        f"{format_bytes(total or 0)}"
    )
    if total is not None and processes * needed > total:
        raise MiniGPTError(
            f"out of memory before the first step: {need}, {capacity}; with "
            f"{describe_memory_flags(plan.settings)}; {hint}",
            exit_code=4,
        )
    if needed <= budget.usable_bytes:
        return ""
    return f"\nwarning  {need}, but tensors may take {budget}; {capacity} in all; {hint}"
