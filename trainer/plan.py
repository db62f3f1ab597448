"""Plan memory for a run, and for scripts such as scripts/plan_memory.py: choose the policy for
--use-activation-checkpoint auto, predict the peak, and find changes of flags that make a step fit.

planner/ predicts the memory and the time of a step, and finds the fastest recompute policy. This
file calls the planner for the flags of a command line (`PlanRequest`). If no policy fits, this file
finds flags to change (`FlagChange`). It also writes the texts for the user.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch

from data.tokenizer import load_tokenizer
from model import MiniGPTConfig
from planner import Card, Layout, Planner, StepMemory
from planner.cards import CARDS, THIS_MACHINE, choose_card
from planner.choose import (
    nested_checkpoint_policies,
    pareto_frontier,
    pick_fastest_fitting_step,
    recomputed_flops_key,
    simulate_policies_fastest_first,
)
from planner.roofline import LINK_EFFICIENCY, LINKS

from .bootstrap import PROJECT_FOLDER
from .device import (
    MemoryBudget,
    budget_on,
    check_gather_dtype_flag,
    choose_device,
    choose_precision,
    is_available,
    set_matmul_precision,
    total_memory,
)
from .flags import (
    AUTO,
    SHAPE_BY_MODEL,
    UsageError,
    model_config,
    recompute_plan_of,
    to_argv,
    with_flags,
)
from .metrics import format_bytes
from .optimizer import make_optimizer, optimizer_name
from .pretrained import read_vocab_size
from .process import OneProcess

Args = argparse.Namespace
OFFLOAD_POLICY = "full+offload"
POLICY_FLAG = "use_activation_checkpoint"
# After memory ran out, torchrun may start the run again. Then the new policy should have a
# predicted peak of at most this share of the failed policy's predicted peak. A restart takes long,
# so the first policy after a restart should already fit.
RESTART_SHARE_OF_FAILED_PEAK = 0.75

# The costs of changes, in words for the user.
SMALLER_MODEL = "a smaller model (--n-layers, --d-model)"
COST_OF_RECOMPUTE = "same results, some more time"
COST_OF_CHUNKED_LOSS = "never holds all logits, at about the same speed"
COST_OF_SMALLER_BATCH, COST_OF_OFFLOAD = (
    "the same sequences",
    "what backward needs waits in CPU memory",
)

# ---- flag changes, in the order of docs/planning.md ("Out of memory: which knob first")


class FlagChange(NamedTuple):
    """Flags that are changed together, and the cost of this change."""

    flags: dict[str, Any]  # name in args -> new value
    cost_in_words: str  # text for the user, e.g. COST_OF_RECOMPUTE

    @property
    def flags_as_text(self) -> str:
        """Return the flags as a user types them: "--batch-size 3 --grad-accum-steps 4"."""
        return " ".join(to_argv(self.flags))


def describe_suggested_change(
    args: Args,
    device_type: str,
    policy: str,
    smaller_policy: str = "",
    in_evaluation: bool = False,
) -> str:
    """Return the first change that could help after memory ran out, as text "FLAGS (COST)".

    `policy`: the recompute policy in use, which may need less memory than the policy in `args`.
    `smaller_policy`: a policy that is predicted to need less memory than `policy`; "": there is no
    such policy. `in_evaluation`: memory ran out without a backward, so no policy can help. If no
    change keeps the training the same, the text names flags that change it.
    """
    in_use = {POLICY_FLAG: policy} if policy != args.use_activation_checkpoint else {}
    first, *others = changes_with_same_training(with_flags(args, **in_use), device_type)
    if smaller_policy and not first.flags:
        first = FlagChange({POLICY_FLAG: smaller_policy}, COST_OF_RECOMPUTE)
    changes = (
        change
        for change in (first, *others)
        if change.flags and not (in_evaluation and POLICY_FLAG in change.flags)
    )
    change = next(changes, None)
    if change is None:
        ways = [some[0].cost_in_words for some in changes_of_training(args) if some]
        return f"what changes the training: {', '.join([*ways, SMALLER_MODEL])}"
    return f"{' '.join(to_argv(in_use | change.flags))} ({change.cost_in_words})"


def describe_memory_flags(args: Args) -> str:
    """Return the flags that a step's memory depends on most, as text."""
    policy = args.use_activation_checkpoint
    return f"--batch-size {args.batch_size} --seq-len {args.seq_len}, recompute {policy}"


def smaller_batch_flags(args: Args) -> list[dict[str, int]]:
    """Return all flag changes that split the sequences of a step into smaller micro-batches.

    Each entry of the list divides --batch-size by n and multiplies --grad-accum-steps by n. The
    entry with the largest micro-batch comes first.
    """
    size, steps = args.batch_size, args.grad_accum_steps
    divisors = (n for n in range(2, size + 1) if size % n == 0)
    return [{"batch_size": size // n, "grad_accum_steps": steps * n} for n in divisors]


def changes_with_same_training(args: Args, device_type: str) -> Iterator[FlagChange]:
    """Yield changes that keep the training the same, the cheapest first.

    A caller combines each change with the fastest recompute policy that fits with this change. The
    first change may have no flags. Then the caller changes the policy alone.
    """
    chunked_loss = {"loss_chunks": 0} if args.loss_chunks == 1 else {}
    yield FlagChange(chunked_loss, COST_OF_CHUNKED_LOSS if chunked_loss else COST_OF_RECOMPUTE)
    batches = smaller_batch_flags(args)
    for batch in batches:
        yield FlagChange(chunked_loss | batch, COST_OF_SMALLER_BATCH)
    if device_type == "cuda" and not recompute_plan_of(args).offload:
        for batch in [{}, *batches]:
            cost = f"{COST_OF_SMALLER_BATCH}, {COST_OF_OFFLOAD}" if batch else COST_OF_OFFLOAD
            yield FlagChange(chunked_loss | {POLICY_FLAG: OFFLOAD_POLICY} | batch, cost)


def changes_of_training(args: Args) -> Iterator[list[FlagChange]]:
    """Yield lists of changes that change the training. The changes of a list are alternatives, the
    smallest change first.

    A change never repeats the value that a flag has. `cost_in_words` is the text for the user.
    """

    def alternatives(*flags: dict[str, Any]) -> list[FlagChange]:
        new = [change for change in flags if all(vars(args)[n] != v for n, v in change.items())]
        return [FlagChange(change, " ".join(to_argv(change))) for change in new]

    yield alternatives(*({"batch_size": b["batch_size"]} for b in smaller_batch_flags(args)))
    yield alternatives(*({"seq_len": args.seq_len // n} for n in (2, 4, 8) if args.seq_len >= n))
    optimizer = {"moments_dtype": "bfloat16"}, {"optimizer": "muon"}
    yield alternatives(*optimizer, optimizer[0] | optimizer[1])
    shape = SHAPE_BY_MODEL.get(args.model, {})
    if shape and all(vars(args)[name] == value for name, value in shape.items()):
        smaller = [*SHAPE_BY_MODEL][: [*SHAPE_BY_MODEL].index(args.model)]
        yield [
            FlagChange(
                SHAPE_BY_MODEL[name]
                | ({} if "d_ff" in args.typed else {"d_ff": 4 * SHAPE_BY_MODEL[name]["d_model"]}),
                f"--model {name}",
            )
            for name in reversed(smaller)
        ]


# ---- the request


def card_of(args: Args, device: torch.device) -> Card | None:
    """Return the card for which these flags ask (`choose_card`)."""
    return choose_card(args.card, device, args.tf32, args.seq_len, args.d_model // args.n_heads)


def make_planner(
    args: argparse.Namespace,
    config: MiniGPTConfig,
    device: torch.device,
    precision: torch.dtype,
    ddp: bool = False,
    shard_degree: int = 1,
    sp_degree: int = 1,
    card: Card | None = None,
) -> Planner:
    """Return the planner of the run that the flags describe.

    Args:
        device: the device of the run, which need not exist on this machine.
        ddp: gradients are averaged by DDP (train_ddp.py).
        shard_degree: number of processes that shard one model (train_fsdp.py).
        sp_degree: number of processes that share each sequence (train_sp.py).
        card: the card of the run; None: unknown.
    Raises:
        UsageError: `check_gather_dtype_flag` refuses the flags.
    """
    if shard_degree > 1:
        check_gather_dtype_flag(args, precision)
    kind = "ddp" if ddp else "sp" if sp_degree > 1 else "fsdp"
    return Planner(
        config,
        args.seq_len,
        precision=precision,
        make_optimizer=partial(
            make_optimizer,
            args=args,
            device=device,
            precision=precision,
            sharded=shard_degree > 1,
        ),
        clip_gradients=OneProcess(device).clip_gradients,
        device_type=device.type,
        accumulates_gradients=args.grad_accum_steps > 1,
        layout=Layout(kind, world_size=shard_degree),
        compress_gradients=ddp and args.compress_gradients,
        gather_in_bfloat16=shard_degree > 1 and args.gather_dtype == "bfloat16",
        card_name=card.name if card and card.memory else None,  # memory 0: a measured card
    )


@dataclass(frozen=True)
class PlanRequest:
    """Flags, device and memory budget of a planned run. The methods predict the memory and the time
    of a step, and find policies and flags that fit."""

    args: argparse.Namespace
    vocab_size: int
    device: torch.device  # need not exist on this machine
    precision: torch.dtype
    memory_budget: MemoryBudget = MemoryBudget(None, "cpu")
    # Policies are ranked by their predicted time on this card. None: by their recomputed FLOPs.
    card: Card | None = None
    ddp: bool = False
    processes: int = 1  # number of all processes; with `ddp` each process has the whole model
    shard_degree: int = 1  # number of processes that shard one model
    sp_degree: int = 1  # number of processes that share each sequence
    link: str | None = None  # key of LINKS; None: leave the time of communication out
    on_simulate: Callable[[], object] = lambda: None  # called before each simulated step
    # Planners and largest batches; copies of the request share this cache.
    planner_cache: dict[tuple, Any] = field(default_factory=dict)

    def with_args(self, args: argparse.Namespace) -> "PlanRequest":
        """Return a copy of this request with other flags. The copy shares the cache."""
        return replace(self, args=args)

    @property
    def config(self) -> MiniGPTConfig:
        return model_config(self.args, self.vocab_size)

    @property
    def planner(self) -> Planner:
        """Return the planner of these flags. Requests that differ only in batch size and recompute
        policy share one planner."""
        args, config = self.args, self.config
        optimizer = args.optimizer, args.moments_dtype, args.grad_accum_steps > 1, args.gather_dtype
        layout = self.ddp, self.shard_degree, self.sp_degree, self.card
        key = replace(config, recompute="none"), args.seq_len, optimizer, *layout
        if key not in self.planner_cache:
            self.on_simulate()
            planner = make_planner(args, config, self.device, self.precision, *layout)
            planner.on_simulate, self.planner_cache[key] = self.on_simulate, planner
        return self.planner_cache[key]

    @property
    def state_bytes(self) -> int:
        """Bytes that every step takes in one process: see `Planner.state_bytes`."""
        return self.planner.state_bytes

    @property
    def predicted_step(self) -> StepMemory:
        """Simulate a step with these flags and return it. For `auto` the step has policy `full`."""
        return self.planner.step(self.args.batch_size, recompute=self.config.recompute)

    @property
    def usable_bytes(self) -> int:
        """Bytes that tensors may take; sys.maxsize if the budget is unknown."""
        return (
            sys.maxsize
            if self.memory_budget.usable_bytes is None
            else self.memory_budget.usable_bytes
        )

    @property
    def largest_batch(self) -> int:
        """Number of sequences in the largest micro-batch that fits; 0: not even one fits."""
        if self.state_bytes >= self.usable_bytes:  # no simulation needed
            return 0
        planner, recompute = self.planner, self.config.recompute
        if planner.step(1, recompute=recompute).peak > self.usable_bytes:
            return 0
        key = planner, recompute, self.usable_bytes
        if key not in self.planner_cache:
            batch_size, host_bytes = self.args.batch_size, self.memory_budget.host_usable_bytes
            self.planner_cache[key] = planner.largest_batch(
                self.usable_bytes, batch_size, host_bytes, recompute=recompute
            )
        return self.planner_cache[key]

    @property
    def fits(self) -> bool:
        return self.args.batch_size <= self.largest_batch

    def step_with_best_policy(self) -> StepMemory:
        """Return a step with the fastest policy that fits. If no policy fits, return a step with
        the policy that has the smallest peak."""
        return pick_fastest_fitting_step(
            self.planner, self.args.batch_size, self.usable_bytes, self.card
        )

    def step_with_fitting_policy(self) -> StepMemory | None:
        """Return a step with the fastest policy that fits, or None if no policy fits.

        If neither `full` nor nested groups (`full/K+nested`) fit, no policy fits, because these
        have the smallest peaks. If the policy of the flags has offload, only this policy is tried.
        Other policies cannot be compared with it, because a predicted time does not include
        offload's copies.
        """
        if recompute_plan_of(self.args).offload:
            return self.predicted_step if self.fits else None
        policies = ["full", *nested_checkpoint_policies(self.args.n_layers)[-1:]]
        requests = (
            self.with_args(with_flags(self.args, use_activation_checkpoint=name))
            for name in policies
        )
        return self.step_with_best_policy() if any(request.fits for request in requests) else None

    def advise_batch_without_recompute(self, step: StepMemory) -> str:
        """Return text on a smaller micro-batch with which a step fits without recompute.

        If several such micro-batches fit, the text is on the largest of them. The text compares
        this micro-batch with `step`: "4 x 4 sequences with none: 5 % faster (...)". Without a card
        the text says only that as many sequences per step fit. Return "" if no smaller micro-batch
        fits, or if the largest that fits is not faster than `step`.
        """
        replays_products = recomputed_flops_key(step)[0] > 0
        if step.config.recompute == "none" or not (self.card or replays_products):
            # Give no advice. Without a card no time is known. If `step` recomputes no matrix
            # product, `none` saves little time, and the matrix products of smaller micro-batches
            # may cost more time than it saves.
            return ""
        for batch in smaller_batch_flags(self.args):
            flags = {POLICY_FLAG: "none"} | batch
            request = self.with_args(with_flags(self.args, **flags))
            if request.fits:
                text = f"{batch['grad_accum_steps']} x {batch['batch_size']} sequences with none"
                faster = (
                    self.seconds(step) / request.seconds(request.predicted_step) - 1
                    if self.card
                    else 0
                )
                speed = f": {100 * faster:.0f} % faster" if self.card else " fit as well"
                is_worth_it = faster > 0.005 or not self.card
                return (
                    f"{text}{speed} ({FlagChange(flags, COST_OF_SMALLER_BATCH).flags_as_text})"
                    * is_worth_it
                )
        return ""

    def fitting_change(self, change: FlagChange) -> FlagChange | None:
        """Return `change` with the fastest policy with which it fits, without flags that have their
        value already. Return None if it does not fit."""
        # Weights and gradients of the blocks, which only flags of the model's shape change. A model
        # for which not even these fit may be so large that planning each change takes long.
        blocks = 8 * sum(weight.numel() for weight in self.planner.local_model.blocks.parameters())
        if blocks > self.usable_bytes and "n_layers" not in change.flags:
            return None
        step = self.with_args(with_flags(self.args, **change.flags)).step_with_fitting_policy()
        if step is None:
            return None
        flags = {POLICY_FLAG: ""} | change.flags | {POLICY_FLAG: step.config.recompute}
        new = {name: value for name, value in flags.items() if value != vars(self.args)[name]}
        return change._replace(flags=new)

    @property
    def shards_needed(self) -> int | None:
        """Smallest number of GPUs with which train_fsdp.py fits. None: more than 64, or several
        processes share the device. (A number is simulated only if the state alone fits.)"""
        policy = {POLICY_FLAG: "full", "gather_dtype": "float32"}
        more = range(self.shard_degree + 1, 65 if self.device.type == "cuda" else 1)
        plans = (
            replace(self, args=with_flags(self.args, **policy), ddp=False, shard_degree=n)
            for n in more
            if self.sp_degree == 1
        )
        whole = replace(self, ddp=False, shard_degree=1).planner
        possible = islice(
            (p for p in plans if whole.shard_state_bytes(p.shard_degree) < self.usable_bytes), 4
        )
        return next((plan.shard_degree for plan in possible if plan.fits), None)

    def advice_and_change(self) -> tuple[str, FlagChange | None]:
        """Return the cheapest change that makes a step fit and keeps the training the same.

        The result is (text for the user, change). The change has the fastest policy that fits with
        its other flags. If no such change exists, the change is None, and the text names changes of
        the training. Each change in the text fits by simulation.
        """
        same = changes_with_same_training(self.args, self.device.type)
        if change := next(filter(None, map(self.fitting_change, same)), None):
            return f"{change.flags_as_text} fits ({change.cost_in_words})", change
        reason, ways = "", []
        if self.state_bytes >= self.usable_bytes:
            each = f" in each of {self.shard_degree} processes" if self.shard_degree > 1 else ""
            advice = " (train_fsdp.py deals them out)" * (self.ddp and self.processes > 1)
            reason = (
                f"weights, gradients and {optimizer_name(self.args)}'s state alone take "
                f"{format_bytes(self.state_bytes)}{each}, more than the "
                f"{format_bytes(self.usable_bytes)} "
                f"that tensors may take{advice}: "
            )
        for alternatives in changes_of_training(self.args):
            if change := next(filter(None, map(self.fitting_change, alternatives)), None):
                policy = change.flags.get(POLICY_FLAG)
                ways.append(change.cost_in_words + f" with {policy}" * bool(policy))
        if n := self.shards_needed:
            ways.append(f"{n} of this card with train_fsdp.py")
        words = ", or ".join(ways or [SMALLER_MODEL])
        return f"{reason}try what changes the training: {words}", None

    @property
    def replicas(self) -> int:
        """Number of micro-batches that run at the same time, on all processes together."""
        return self.processes // self.sp_degree

    def seconds(self, step: StepMemory) -> float:
        """Return the predicted seconds of a training step: all its micro-batches and one update.

        `step`: one micro-batch and the update of the weights, as the planner simulates them.
        """
        assert self.card
        computing = step.seconds(self.card, self.args.grad_accum_steps)
        return computing + self.communication_seconds(step)

    def communication_seconds(self, step: StepMemory) -> float:
        """Return the predicted seconds in which a training step only communicates; 0: no link.

        Each process of N sends (N - 1) / N of the bytes of a gather, of a reduce-scatter and of an
        all-to-all, and twice as many in an all-reduce. DDP reduces the gradients of a step at the
        time of the last backward. Shards are gathered at the time of each forward and backward, and
        the gradients are scattered in the last backward. Only what takes longer than that counts.
        Attention of a shared sequence waits for its all-to-alls: of q, k, v and its result, in
        forward and in backward. (A policy that replays attention repeats them: left out.)
        """
        if self.link is None or self.processes == 1 or self.card is None:
            return 0
        n, config, micro_batches = self.processes, step.config, self.args.grad_accum_steps
        rate = LINK_EFFICIENCY * LINKS[self.link] * n / (n - 1)
        whole = 4 * self.planner.n_parameters
        gathered = whole // (2 if self.args.gather_dtype == "bfloat16" else 1)
        backward, all_phases = step.phase_seconds(self.card)
        if self.ddp:
            return max(0, 2 * whole / (1 + self.args.compress_gradients) / rate - backward)
        in_blocks = 8 * config.n_layers * config.d_model * self.precision.itemsize
        tokens = step.batch_size * self.planner.local_seq_len
        exchanges = (self.sp_degree > 1) * in_blocks * tokens / rate
        hidden = max(0, 2 * gathered / rate - all_phases)
        last = max(0, (2 * gathered + whole) / rate - all_phases)
        return micro_batches * exchanges + (micro_batches - 1) * hidden + last

    def tokens_per_s(self, step: StepMemory) -> float:
        """Return the predicted tokens per second of all processes together."""
        sequences = self.replicas * self.args.grad_accum_steps * step.batch_size
        return sequences * step.seq_len / self.seconds(step)


def make_request(
    args: argparse.Namespace,
    processes: int | None = None,
    sharded: bool = False,
    sequence_parallel: bool = False,
) -> PlanRequest:
    """Return the request of a script that plans a run. The planned device need not exist on this
    machine.

    For a card of CARDS, the default of --memory-budget is the card's whole memory, because a device
    that is not on this machine cannot report its free memory.

    Args:
        processes: number of processes on one machine, which run train_ddp.py by default; None: one
            process runs train_minimal.py.
        sharded: the processes run train_fsdp.py.
        sequence_parallel: the processes run train_sp.py; `sharded` must be True, too.
    Raises:
        UsageError: the flags contradict each other, or do not suit this machine.
        DataError: the tokenizer cannot be loaded.
    """
    n, kind, budget = processes or 1, args.device, args.memory_budget
    native: bool | None = None  # True: the hardware has bfloat16; None: ask the device
    if args.card not in (None, THIS_MACHINE):
        named_card = CARDS[args.card]
        kind, budget = named_card.device_type, budget or named_card.memory
        if args.device not in ("auto", kind):
            raise UsageError(f"--device {args.device}: {args.card} is {kind}; leave --device out")
        # False for GPUs before Ampere, which multiply float16 faster than bfloat16.
        native = named_card.flops[1] >= named_card.flops[2]
    elif not is_available(kind) and args.card is None:
        native = True
    if native is None:
        device = choose_device(kind)
        memory = budget_on(device, budget, n if device.type == "cpu" else 1, here=n)
    else:
        device, memory = torch.device(kind), MemoryBudget(budget, kind)
    precision = choose_precision(args, device, native)
    if args.card == THIS_MACHINE:
        if device.type == "cpu" and n > 1:
            raise UsageError(
                f"--card {THIS_MACHINE} measures one process, and {n} would share the CPU: leave "
                "out --nproc-per-node"
            )
        set_matmul_precision(device, args.tf32)
    card = card_of(args, device) if args.card else None
    ddp, shards = processes is not None and not sharded, n if sharded else 1
    sharing = n if sequence_parallel else 1
    return PlanRequest(
        args, vocab_size_of(args), device, precision, memory, card, ddp, n, shards, sharing
    )


def vocab_size_of(args: argparse.Namespace) -> int:
    """Return the vocabulary size that the run would have, without reading the run's data.

    If --init-from is given, the caller must first call `open_init_from`, which checks the files of
    the weights. Raises DataError if the tokenizer cannot be loaded.
    """
    if args.init_from is not None:
        return read_vocab_size(args.init_from)
    if args.use_toy_data:
        return args.vocab_size or 256
    name = args.tokenizer_name or ("gpt2" if args.train_data else "bpe")
    if name == "bpe":
        return args.vocab_size or 1024  # with a short text the tokenizer has fewer ids
    return 50257 if name == "gpt2" else load_tokenizer(name).vocab_size


# ---- the plan of a run


PolicyPeak = tuple[str, int]  # a recompute policy, and its predicted peak in bytes


class MemoryPlan(NamedTuple):
    """Policy and predicted memory of a run, and the policies that it may need later."""

    config: MiniGPTConfig  # config of the model; `auto` is replaced by the chosen policy
    words: str  # text for the user
    # Peak bytes of the planned step, and of a step without recompute; None: the prediction failed.
    planned_and_plain_peaks: tuple[int, int] | None
    # The result of `deeper_policies` for the policy of `config`; []: the prediction failed.
    policies: Iterable[PolicyPeak]


class PredictedOutOfMemory(MemoryError):
    """Error for a step that is predicted to take more memory than the device has in total.

    The message is one line and names a change that would fit. The error is raised before memory
    runs out, because the system ends a process without a message when a CPU's memory runs out.
    """


def plan_memory(
    args: argparse.Namespace,
    process: OneProcess,
    config: MiniGPTConfig,
    precision: torch.dtype,
) -> MemoryPlan:
    """Choose the policy of `auto`, and predict the memory that a step will need.

    Args:
        config: the config of the model. With --use-activation-checkpoint auto its policy is `full`.
        precision: the dtype of the model's matmuls.
    Raises:
        UsageError: with `auto`, if no policy fits.
        PredictedOutOfMemory: the step needs more than the device has in total.
    """
    # All processes rank policies by the card of rank 0. If all processes must have the same policy,
    # the plan is for the smallest of their budgets.
    card = process.all_gather_object(
        process.run_on_rank0_only(lambda: card_of(args, process.device))
    )[0]
    n, local_world_size = process.processes_on_device, process.local_world_size
    budget = budget_on(process.device, args.memory_budget, n, here=local_world_size)
    if not process.has_own_recompute_policy:
        budget = min(process.all_gather_object(budget), key=lambda budget: budget.limit_bytes or 0)
    n, shards, ddp = process.world_size, process.shard_degree, process.gradients_persist
    common = args, config.vocab_size, process.device, precision, budget, card
    request = PlanRequest(*common, ddp, n, shards, process.sp_degree)
    chooses_alone = args.use_activation_checkpoint == AUTO and process.has_own_recompute_policy
    plan_locally = partial(plan_on_this_rank, request, process, config)
    plan = (
        process.run_on_all_ranks(plan_locally)
        if chooses_alone
        else process.all_gather_object(process.run_on_rank0_only(plan_locally))[0]
    )
    assert plan
    policies = process.all_gather_object(plan.config.recompute)
    if len(set(policies)) == 1:
        return plan
    words = f"\nmemory   each process has a policy of its own, by rank: {', '.join(policies)}"
    return plan._replace(words=plan.words + words)


def plan_on_this_rank(
    request: PlanRequest, process: OneProcess, config: MiniGPTConfig
) -> MemoryPlan:
    """Return the result of `plan_memory` for this process, without a comparison of the processes.

    If each process chooses its own policy (`auto`), each process runs this function. Otherwise rank
    0 runs it for all processes.
    """
    words, card = "", request.card
    if request.args.use_activation_checkpoint == AUTO:
        chosen = choose_fitting_step(request)
        config = chosen.config
        criterion = f"the least time (predicted for {card.name})" if card else "the least recompute"
        words = f"auto takes {config.recompute}: {criterion} that fits in {request.memory_budget}"
        words += "\nmemory   "
        if advice := request.advise_batch_without_recompute(chosen):
            words += f"{advice}\nmemory   "
    if failed := process.last_failed_policy():
        config = config_after_out_of_memory(request, config, failed)
        now = "the same, the smallest known" if config.recompute == failed else config.recompute
        words += f"memory ran out with {failed}; it goes on with {now}\nmemory   "
    prediction, peaks, policies = predict_and_describe_peaks(request, process, config)
    return MemoryPlan(config, words + prediction, peaks, policies)


def config_after_out_of_memory(
    request: PlanRequest, config: MiniGPTConfig, failed: str
) -> MiniGPTConfig:
    """Return the config for a run that torchrun has started again, after memory ran out with the
    policy `failed`. If no policy needs less memory, or planning fails, keep `failed`."""
    policy = failed
    with suppress(Exception):
        policies, share = deeper_policies(request, failed), RESTART_SHARE_OF_FAILED_PEAK
        names = [name for name, _ in policies_to_try(policies, request.device.type, share=share)]
        # `auto` may have chosen a policy that needs even less memory: the policy of `config`.
        policy = config.recompute if config.recompute in names else names[0]
    return replace(config, recompute=policy)


def deeper_policies(request: PlanRequest, policy: str) -> list[PolicyPeak]:
    """Return `policy` and all policies that a run may switch to when memory runs out.

    The list begins with `policy`. Each further policy needs less memory than all policies before
    it. They are the fastest policies for their peaks, the fastest first. On CUDA full+offload comes
    last, with which saved tensors wait in CPU memory. Raises all errors of planning: for example,
    fake tensors may not work with the model.
    """
    planner, batch_size = request.planner, request.args.batch_size
    offload = [OFFLOAD_POLICY] if request.device.type == "cuda" else []
    steps = simulate_policies_fastest_first(planner, batch_size, request.card)
    last_resorts = nested_checkpoint_policies(request.args.n_layers) + offload
    steps += [planner.step(batch_size, recompute=name) for name in last_resorts]
    peak = planner.step(batch_size, recompute=policy).peak
    smaller = [step for step in pareto_frontier(steps) if step.peak < peak]
    return [(policy, peak), *((step.config.recompute, step.peak) for step in smaller)]


def policies_to_try(
    policies: Iterable[PolicyPeak], device_type: str, seen: int | None = None, share: float = 1.0
) -> list[PolicyPeak]:
    """Return the policies to try after the first of `policies` did not fit, in this order.

    `policies`: the result of `deeper_policies`. The limit is the peak of the first policy times
    `share`, less the margin of a MemoryBudget. The result begins with the fastest policy whose peak
    is within this limit. If no peak is within the limit, the result begins with the policy that
    needs the least memory. full+offload comes last in any case. If no policy needs less memory than
    the first, the result is empty.

    `seen`: measured peak of the first policy in bytes; None: not measured. If `seen` is smaller
    than the predicted peak, the limit is computed from `seen`.
    """
    (_, failed), *deeper = policies
    limit = MemoryBudget(int(share * min(failed, seen or failed)), device_type).usable_bytes or 0
    resident = [peak for policy, peak in deeper if policy != OFFLOAD_POLICY]
    least = min(resident or [peak for _, peak in deeper], default=0)
    return [(policy, peak) for policy, peak in deeper if peak <= max(limit, least)]


def choose_fitting_step(request: PlanRequest) -> StepMemory:
    """Return a step with the policy that `auto` chooses.

    Raises UsageError if no policy fits, or if the free memory is unknown. If no policy fits, the
    message names a change that would fit.
    """
    if request.memory_budget.limit_bytes is None:
        raise UsageError("--memory-budget: this system does not report its free memory")
    budget, smallest = request.memory_budget, f"above {format_bytes(request.state_bytes)}"
    if request.state_bytes < request.usable_bytes:
        step = request.step_with_best_policy()
        if step.peak <= request.usable_bytes:
            return step
        smallest = f"{format_bytes(step.peak)} ({step.config.recompute})"
    typed = f"--use-activation-checkpoint {request.args.use_activation_checkpoint}"
    raise UsageError(
        f"{typed if budget.is_free else '--memory-budget'}: tensors may take {budget}, but the "
        f"smallest peak is {smallest}; {request.advice_and_change()[0]}"
    )


def predict_and_describe_peaks(
    request: PlanRequest, process: OneProcess, config: MiniGPTConfig
) -> tuple[str, tuple[int, int] | None, list[PolicyPeak]]:
    """Predict the memory of a step. Return (text for the user, with warnings; predicted peaks;
    result of `deeper_policies`).

    The peaks are two numbers of bytes: the peak with the policy of `config`, and the peak with
    `none`. If the prediction fails, None replaces the two numbers, and the list is empty. Raises
    PredictedOutOfMemory.
    """
    try:
        check_memory(request, process, request.state_bytes)  # needs no simulation
        step, plain = (
            request.planner.step(request.args.batch_size, recompute=policy)
            for policy in (config.recompute, "none")
        )
        note = request.planner.inaccuracy_note
        words = describe_plan(step, plain) + (note and f"\nnote     {note}")
        words += check_memory(request, process, step.peak)
        host_bytes = request.memory_budget.host_usable_bytes
        if host_bytes is not None and step.host_bytes > host_bytes:
            limit = f"may take {format_bytes(host_bytes)}; {request.advice_and_change()[0]}"
            need = f"each process needs {format_bytes(step.host_bytes)} of CPU memory for +offload"
            words += f"\nwarning  {need}, and {limit}"
        return words, (step.peak, plain.peak), deeper_policies(request, config.recompute)
    except PredictedOutOfMemory:
        raise
    except Exception as error:  # a failed prediction must not stop training
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        failure = f"{type(cause).__name__} at {error_location(cause)}"
        return f"the peak could not be predicted ({failure})", None, []


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


def describe_plan(step: StepMemory, plain: StepMemory) -> str:
    """Return text on the predicted memory of the planned step, and of a step without recompute."""
    steps = {"without recompute": plain}
    if step.config.recompute != "none":
        steps = {step.config.recompute: step} | steps
    parts = [
        f"{name}: peak {format_bytes(step.peak)}, backward keeps {format_bytes(step.kept)}"
        for name, step in steps.items()
    ]
    return "; ".join(parts) + " (predicted)"


def check_memory(request: PlanRequest, process: OneProcess, needed: int) -> str:
    """Return a warning if `needed` is more than the tensors of a process may take, else "".

    `needed`: bytes that each process needs. Raises PredictedOutOfMemory if all processes on the
    device together need more memory than the device has in total.
    """
    budget, processes = request.memory_budget, process.processes_on_device
    if budget.usable_bytes is None:
        return ""
    total = total_memory(process.device)
    need = f"{processes} processes, each " * (processes > 1) + f"{format_bytes(needed)} predicted"
    on_gpu = process.device.type == "cuda"
    capacity = f"the {'GPU' if on_gpu else 'machine'} has {format_bytes(total or 0)}"
    if total is not None and processes * needed > total:
        limit = min(budget.limit_bytes or total, total // processes)
        full = replace(budget, limit_bytes=limit)
        raise PredictedOutOfMemory(
            f"out of memory before the first step: {need}, {capacity}; with "
            f"{describe_memory_flags(request.args)}; "
            f"{replace(request, memory_budget=full).advice_and_change()[0]}"
        )
    if needed <= budget.usable_bytes:
        return ""
    change = request.advice_and_change()[0]
    return f"\nwarning  {need}, but tensors may take {budget}; {capacity} in all; {change}"
