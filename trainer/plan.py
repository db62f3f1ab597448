"""The planner, asked by flags: what `auto` takes, what a run will need, what would fit.

planner/ tells what a step takes and which way to recompute is the cheapest; here are the flags that
ask (`PlanRequest`), what to change when nothing fits (`FlagChange`), and the sentences for the
user.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from data.tokenizer import load_tokenizer
from model import MiniGPTConfig
from planner import Card, Planner, StepMemory
from planner.cards import CARDS, THIS_MACHINE, clock_card, device_type
from planner.choose import nested_policies, pick_recompute
from planner.formulas import count_parameters, recompute_cost, state_bytes
from planner.shards import state_bytes_per_rank

from .bootstrap import ROOT
from .device import (
    MemoryBudget,
    budget_on,
    check_gather_dtype,
    choose_device,
    choose_precision,
    is_here,
    set_matmul_precision,
    total_memory,
)
from .flags import (
    AUTO,
    UsageError,
    model_config,
    recompute_plan_of,
    to_argv,
    with_flags,
)
from .metrics import format_bytes
from .optimizer import make_optimizer, optimizer_name
from .pretrained import vocabulary_of
from .process import OneProcess

Flags = argparse.Namespace
OFFLOADED = "full+offload"
POLICY = "use_activation_checkpoint"
OTHER_TRAINING = (
    "what changes the training: a smaller --batch-size, a shorter --seq-len, --moments-dtype "
    "bfloat16, --optimizer muon, a smaller model (--d-model, --n-layers, --vocab-size)"
)
AFTER_RESTART = 0.75  # of the peak that was too much; a restart is dear: take much less at once

# What a change costs.
SLOWER = "same results, some more time"
UNCHUNKED = "never holds all logits, at about the same speed"
SAME, MOVED = "the same sequences", "what backward needs waits in CPU memory"

# ---- what to change, in the order of docs/planning.md ("which knob first")


class FlagChange(NamedTuple):
    """Flags to change, all at a time."""

    flags: dict[str, Any]  # by their names in args
    cost: str  # what it costs

    @property
    def command(self) -> str:
        """ "--batch-size 3 --grad-accum-steps 4" """
        return " ".join(to_argv(self.flags))


def suggest_change(args: Flags, device_type: str, less: StepMemory | None) -> str:
    """The first change that could help a run that has run out of memory. `less`: a step with the
    next policy that is predicted to need less, if one is."""
    first, *others = changes_with_same_training(args, device_type)
    if less is not None and not first.flags:
        first = FlagChange({POLICY: less.config.recompute}, SLOWER)
    knob = next((knob for knob in (first, *others) if knob.flags), None)
    return f"{knob.command} ({knob.cost})" if knob else OTHER_TRAINING


def settings(args: Flags) -> str:
    """Of the flags, those that a step's memory depends on most."""
    policy = args.use_activation_checkpoint
    return f"--batch-size {args.batch_size} --seq-len {args.seq_len}, recompute {policy}"


def smaller_batches(args: Flags) -> list[dict[str, int]]:
    """The same sequences a step in micro-batches of fewer, the largest of them first."""
    size, steps = args.batch_size, args.grad_accum_steps
    cuts = (n for n in range(2, size + 1) if size % n == 0)
    return [{"batch_size": size // n, "grad_accum_steps": steps * n} for n in cuts]


def changes_with_same_training(args: Flags, device_type: str) -> Iterator[FlagChange]:
    """Yield what leaves the training what it is, beside the best policy; the least cost first."""
    kept = {"loss_chunks": 0} if args.loss_chunks == 1 else {}
    yield FlagChange(kept, UNCHUNKED if kept else SLOWER)
    batches = smaller_batches(args)
    for batch in batches:
        yield FlagChange(kept | batch, SAME)
    if device_type == "cuda" and not recompute_plan_of(args).offload:
        for batch in [{}, *batches]:
            words = f"{SAME}, {MOVED}" if batch else MOVED
            yield FlagChange(kept | {POLICY: OFFLOADED} | batch, words)


# ---- the request


def make_planner(
    args: argparse.Namespace,
    config: MiniGPTConfig,
    device: torch.device,
    precision: torch.dtype,
    ddp: bool = False,
    shards: int = 1,
    sharing: int = 1,
) -> Planner:
    """The planner of the run that the flags ask for, on a device that need not be there. Raises
    UsageError as `check_gather_dtype` does."""
    if shards > 1:
        check_gather_dtype(args, precision)
    return Planner(
        config,
        args.seq_len,
        precision=precision,
        make_optimizer=partial(make_optimizer, args=args, device=device, precision=precision),
        clip=OneProcess(device).clip_gradients,
        device_type=device.type,
        accumulate=args.grad_accum_steps > 1,
        ddp=ddp,
        compress=ddp and args.compress_gradients,
        shard_degree=shards,
        sp_degree=sharing,
        gather_in_low=shards > 1 and args.gather_dtype == "bfloat16",
    )


@dataclass(frozen=True)
class PlanRequest:
    """What does a step take, and what fits? For these flags, on that device."""

    args: argparse.Namespace
    vocab_size: int
    device: torch.device  # it need not be there
    precision: torch.dtype
    memory_budget: MemoryBudget = MemoryBudget(None, "cpu")
    card: Card | None = None  # whose clock tells what is fastest; None: the fewest FLOPs are
    ddp: bool = False
    processes: int = 1  # with `ddp`, that hold the whole model each
    shard_degree: int = 1  # processes that hold one between them
    sp_degree: int = 1  # processes that share each sequence
    on_simulate: Callable[[], object] = lambda: None  # called before each step that is simulated
    cache: dict[tuple, Any] = field(default_factory=dict)  # what other flags asked for, too

    def with_args(self, args: argparse.Namespace) -> "PlanRequest":
        """The same of other flags."""
        return replace(self, args=args)

    @property
    def config(self) -> MiniGPTConfig:
        return model_config(self.args, self.vocab_size)

    @property
    def planner(self) -> Planner:
        """The same one for all flags that differ in batch size and recompute only."""
        args, config = self.args, self.config
        state = args.optimizer, args.moments_dtype, args.grad_accum_steps > 1, args.gather_dtype
        way = self.ddp, self.shard_degree, self.sp_degree
        key = replace(config, recompute="none"), args.seq_len, state, *way
        if key not in self.cache:
            self.on_simulate()
            planner = make_planner(args, config, self.device, self.precision, *way)
            planner.on_simulate, self.cache[key] = self.on_simulate, planner
        return self.cache[key]

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and moments; nothing is simulated for that."""
        args, moments = self.args, getattr(torch, self.args.moments_dtype)
        whole = state_bytes(self.config, args.optimizer, moments)
        return state_bytes_per_rank(whole, self.config, self.shard_degree)

    @property
    def step(self) -> StepMemory:
        """As asked for; for `auto`, with full."""
        return self.planner.step(self.args.batch_size, recompute=self.config.recompute)

    @property
    def usable_bytes(self) -> int:
        """Bytes that tensors may take; as many as they like, where nobody knows."""
        return (
            sys.maxsize
            if self.memory_budget.usable_bytes is None
            else self.memory_budget.usable_bytes
        )

    @property
    def largest_batch(self) -> int:
        """Sequences of the largest micro-batch that fits; 0: not even one does."""
        if self.state_bytes >= self.usable_bytes:  # then nothing needs to be simulated
            return 0
        planner, recompute = self.planner, self.config.recompute
        if planner.step(1, recompute=recompute).peak > self.usable_bytes:
            return 0
        key = planner, recompute, self.usable_bytes
        if key not in self.cache:
            asked, host = self.args.batch_size, self.memory_budget.host_usable_bytes
            self.cache[key] = planner.largest_batch(
                self.usable_bytes, asked, host, recompute=recompute
            )
        return self.cache[key]

    @property
    def fits(self) -> bool:
        return self.args.batch_size <= self.largest_batch

    def pick_recompute(self) -> StepMemory:
        """The fastest way to recompute that fits, else the smallest peak."""
        return pick_recompute(self.planner, self.args.batch_size, self.usable_bytes, self.card)

    def pick_fitting(self) -> StepMemory | None:
        """The fastest way to recompute that fits, where one fits that takes little; with offload,
        which no clock knows, the way that was asked for."""
        if recompute_plan_of(self.args).offload:
            return self.step if self.fits else None
        ways = ["full", *nested_policies(self.args.n_layers)[-1:]]
        deeper = (
            self.with_args(with_flags(self.args, use_activation_checkpoint=way)) for way in ways
        )
        return self.pick_recompute() if any(one.fits for one in deeper) else None

    def describe_smaller_batches(self, step: StepMemory) -> str:
        """Name the largest smaller micro-batches in which the same sequences fit without recompute:
        "4 x 4 sequences with none: 5 % faster (...)" than `step`. Without a clock it says only that
        they fit. "" if none fits, or none is faster."""
        replays_products = recompute_cost(step.config, step.seq_len)[0] > 0
        if step.config.recompute == "none" or not (self.card or replays_products):
            return ""  # (without a clock: smaller matrix products may cost more than that saves)
        for batch in smaller_batches(self.args):
            flags = {POLICY: "none"} | batch
            part = self.with_args(with_flags(self.args, **flags))
            if part.fits:
                words = f"{batch['grad_accum_steps']} x {batch['batch_size']} sequences with none"
                faster = self.seconds(step) / part.seconds(part.step) - 1 if self.card else 0
                speed = f": {100 * faster:.0f} % faster" if self.card else " fit as well"
                is_worth_it = faster > 0.005 or not self.card
                return f"{words}{speed} ({FlagChange(flags, SAME).command})" * is_worth_it
        return ""

    def fitting_change(self) -> tuple[str, FlagChange | None]:
        """The least change that makes a step fit and the training stay what it is, with the fastest
        policy then: in words, and its flags. If there is none, the words say what is left."""
        why = ""
        if self.state_bytes >= self.usable_bytes:
            each = f" in each of {self.shard_degree} processes" if self.shard_degree > 1 else ""
            dealt = " (train_fsdp.py deals them out)" * (self.ddp and self.processes > 1)
            why = (
                f"weights, gradients and {optimizer_name(self.args)}'s state alone take "
                f"{format_bytes(self.state_bytes)}{each}, more than the "
                f"{format_bytes(self.usable_bytes)} "
                f"that tensors may take{dealt}: "
            )
        for knob in [] if why else changes_with_same_training(self.args, self.device.type):
            step = self.with_args(with_flags(self.args, **knob.flags)).pick_fitting()
            if step is None:
                continue
            flags = {POLICY: step.config.recompute} | knob.flags
            found = FlagChange(flags, knob.cost)
            return f"{found.command} fits ({found.cost})", found
        return f"{why}try {OTHER_TRAINING}", None

    @property
    def replicas(self) -> int:
        """Micro-batches at the same time."""
        return self.processes // self.sp_degree

    def seconds(self, step: StepMemory) -> float:
        """Predicted for a training step. `step`: one of its micro-batches and the update of the
        weights, which all of them share. (Gathering shards takes no time here.)"""
        assert self.card
        one, micro_batches = step.seconds(self.card), self.args.grad_accum_steps
        # Clipping reads the gradients twice and writes them; AdamW reads weights, gradients and two
        # moments, and writes all but the gradients: ten times 4 bytes a parameter.
        moved = 40 * count_parameters(step.config) / self.shard_degree
        update = moved / (self.card.bandwidth_efficiency * self.card.bytes_per_s)
        return micro_batches * one - (micro_batches - 1) * min(update, one)

    def tokens_per_s(self, step: StepMemory) -> float:
        """Of all processes."""
        sequences = self.replicas * self.args.grad_accum_steps * step.batch_size
        return sequences * step.seq_len / self.seconds(step)


def make_request(
    args: argparse.Namespace,
    processes: int | None = None,
    sharded: bool = False,
    shared: bool = False,
) -> PlanRequest:
    """What the tools ask, about a device that need not be there.

    A card of the table has all of its memory; a device that is not here cannot be asked how much it
    has free. `processes`: of train_ddp.py; `sharded`: of train_fsdp.py; with `shared` sequences: of
    train_sp.py; on one machine.
    Raises UsageError or DataError.
    """
    n, kind, budget = processes or 1, args.device, args.memory_budget
    native: bool | None = None  # has it bfloat16?
    if args.card not in (None, THIS_MACHINE):
        known = CARDS[args.card]
        kind, budget = device_type(known), budget or known.memory
        if args.device not in ("auto", kind):
            raise UsageError(f"--device {args.device}: {args.card} is {kind}; leave --device out")
        native = known.flops[1] >= known.flops[2]  # (not before Ampere)
    elif not is_here(kind) and args.card is None:
        native = True
    if native is None:
        device = choose_device(kind)
        room = budget_on(device, budget, n if device.type == "cpu" else 1, here=n)
    else:
        device, room = torch.device(kind), MemoryBudget(budget, kind)
    precision = choose_precision(args, device, native)
    if args.card == THIS_MACHINE:
        if device.type == "cpu" and n > 1:
            raise UsageError(
                f"--card {THIS_MACHINE} measures one process, and {n} would share the CPU: leave "
                "out --nproc-per-node"
            )
        set_matmul_precision(device, args.tf32)
    card = clock_card(args, device) if args.card else None
    ddp, shards = processes is not None and not sharded, n if sharded else 1
    sharing = n if shared else 1
    return PlanRequest(
        args, vocab_size_of(args), device, precision, room, card, ddp, n, shards, sharing
    )


def vocab_size_of(args: argparse.Namespace) -> int:
    """Ids of the tokenizer that the run would have, without its data. Raises DataError.

    With --init-from: after `open_init_from`, which looks whether all is well there.
    """
    if args.init_from is not None:
        return vocabulary_of(args.init_from)
    if args.use_toy_data:
        return args.vocab_size or 256
    name = args.tokenizer_name or ("gpt2" if args.train_data else "bpe")
    if name == "bpe":
        return args.vocab_size or 1024  # if the text is long enough to train as many
    return 50257 if name == "gpt2" else load_tokenizer(name).vocab_size


# ---- of a run


class MemoryPlan(NamedTuple):
    """Of a run."""

    config: MiniGPTConfig  # with what `auto` takes
    words: str
    peaks: tuple[int, int] | None  # of a step, and without recompute; None: nobody could tell
    next_policy: Callable[..., StepMemory | None]  # the function of that name


class PredictedOutOfMemory(MemoryError):
    """A step is predicted to take more than the device has in all: one line, with what would fit.

    Nothing has run out yet. It would; on a CPU the system then ends the process without a word.
    """


def plan_memory(
    args: argparse.Namespace,
    process: OneProcess,
    config: MiniGPTConfig,
    precision: torch.dtype,
    held: int = 0,
) -> MemoryPlan:
    """What `auto` takes, and what memory a step will need.

    `held`: bytes of CPU memory that a snapshot has now and gives back (or to the optimizer). Raises
    UsageError if `auto` finds nothing that fits, PredictedOutOfMemory if the device can never hold
    it.
    """
    # All go by one clock, that of process 0. Where all need the same policy, they go by the memory
    # of the process that has least, too.
    card = process.all_gather_object(
        process.run_on_rank0(lambda: clock_card(args, process.device))
    )[0]
    n, here = process.processes_on_device, process.local_world_size
    room = budget_on(process.device, args.memory_budget, n, held, here)
    if not process.has_own_policy:
        room = min(process.all_gather_object(room), key=lambda room: room.total_bytes or 0)
    n, shards, ddp = process.world_size, process.shard_degree, process.gradients_persist
    what = args, config.vocab_size, process.device, precision, room, card
    request = PlanRequest(*what, ddp, n, shards, process.sp_degree)
    chooses = args.use_activation_checkpoint in AUTO and process.has_own_policy
    alone = partial(plan_on_this_rank, request, process, config)
    plan = (
        process.run_on_all_ranks(alone)
        if chooses
        else process.all_gather_object(process.run_on_rank0(alone))[0]
    )
    assert plan
    config, words, peaks = plan
    of_each = process.all_gather_object(config.recompute)
    if len(set(of_each)) > 1:
        words += f"\nmemory   each process has a policy of its own, by rank: {', '.join(of_each)}"
    return MemoryPlan(config, words, peaks, partial(next_policy, request))


def plan_on_this_rank(
    request: PlanRequest, process: OneProcess, config: MiniGPTConfig
) -> tuple[MiniGPTConfig, str, tuple[int, int] | None]:
    """Of `plan_memory`, what one process finds out for all."""
    words, card = "", request.card
    if request.args.use_activation_checkpoint in AUTO:
        chosen = choose_recompute(request)
        config = chosen.config
        least = f"the least time (predicted for {card.name})" if card else "the least recompute"
        words = f"auto takes {config.recompute}: {least} that fits in {request.memory_budget}"
        words += "\nmemory   "
        if instead := request.describe_smaller_batches(chosen):
            words += f"{instead}\nmemory   "
    if failed := process.last_out_of_memory():
        config = config_after_restart(request, config, failed)
        words += f"memory ran out with {failed}; it goes on with {config.recompute}\nmemory   "
    said, peaks = predict_peak(request, process, config)
    return config, words + said, peaks


def config_after_restart(request: PlanRequest, config: MiniGPTConfig, failed: str) -> MiniGPTConfig:
    """Return the config of a run that torchrun starts again because memory ran out with the policy
    `failed`. If nothing needs less, or nothing can be planned, it tries that policy again."""
    policy, step = failed, partial(request.planner.step, request.args.batch_size)
    with suppress(Exception):
        if less := next_policy(request, failed, share=AFTER_RESTART):
            policy = less.config.recompute
        # (`auto` may need less already.)
        policy = min(policy, config.recompute, key=lambda way: step(recompute=way).peak)
    return replace(config, recompute=policy)


def next_policy(
    request: PlanRequest, policy: str, seen: int | None = None, share: float = 1.0
) -> StepMemory | None:
    """Return the fastest way to recompute that is predicted to need less than `policy`, which was
    too much: a `share` of it at most, less the usual margin, if any does; else the least that there
    is. Only if that is no less, what is kept waits in CPU memory (on CUDA). None: nothing needs
    less. Raises what planning raises, where fake tensors do not work or memory is short for it.

    `seen`: bytes that it took, if they were counted.
    """
    planner, batch_size, kind = request.planner, request.args.batch_size, request.device.type
    failed = planner.step(batch_size, recompute=policy).peak
    budget = MemoryBudget(int(share * min(failed, seen or failed)), kind).usable_bytes or 0
    taken = pick_recompute(planner, batch_size, budget, request.card).config.recompute
    ways = [taken] + ["full+offload"] * (kind == "cuda")
    steps = (planner.step(batch_size, recompute=way) for way in ways)
    return next((step for step in steps if step.peak < failed), None)


def choose_recompute(request: PlanRequest) -> StepMemory:
    """What `auto` takes. Raises UsageError, with what would fit, if nothing does."""
    if request.memory_budget.total_bytes is None:
        raise UsageError("--memory-budget: this system does not tell what is free")
    budget, smallest = request.memory_budget, f"above {format_bytes(request.state_bytes)}"
    if request.state_bytes < request.usable_bytes:
        step = request.pick_recompute()
        if step.peak <= request.usable_bytes:
            return step
        smallest = f"{format_bytes(step.peak)} ({step.config.recompute})"
    typed = f"--use-activation-checkpoint {request.args.use_activation_checkpoint}"
    raise UsageError(
        f"{typed if budget.is_free else '--memory-budget'}: tensors may take {budget}, but the "
        f"smallest peak is {smallest}; {request.fitting_change()[0]}"
    )


def predict_peak(
    request: PlanRequest, process: OneProcess, config: MiniGPTConfig
) -> tuple[str, tuple[int, int] | None]:
    """Return in words the memory of a step, with a warning if less is free, and the peaks. Raises
    PredictedOutOfMemory."""
    try:
        check_memory(request, process, request.state_bytes)  # before anything is simulated
        step, plain = (
            request.planner.step(request.args.batch_size, recompute=policy)
            for policy in (config.recompute, "none")
        )
        note = request.planner.note
        words = describe_plan(step, plain) + (note and f"\nnote     {note}")
        words += check_memory(request, process, step.peak)
        host = request.memory_budget.host_usable_bytes
        if host is not None and step.host_bytes > host:
            has = f"may take {format_bytes(host)}; {request.fitting_change()[0]}"
            need = f"each process needs {format_bytes(step.host_bytes)} of CPU memory for +offload"
            words += f"\nwarning  {need}, and {has}"
        return words, (step.peak, plain.peak)
    except PredictedOutOfMemory:
        raise
    except Exception as error:  # an aside: where fake tensors do not work, train anyway
        what = f"{type(error).__name__} at {code_line_of(error)}"
        return f"the peak could not be predicted ({what})", None


def code_line_of(error: Exception) -> str:
    """Return the innermost line of this project that raised the error: "model.py:181"."""
    ours = [  # (the planner's log stands between the model and each operator)
        f"{frame.filename[len(ROOT) + 1 :]}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(ROOT + os.sep)
        and not frame.filename.startswith(torch.__path__[0])  # a virtual environment in here
        and frame.name != "__torch_dispatch__"
    ]
    return ours[-1] if ours else "an unknown line"


def describe_plan(step: StepMemory, plain: StepMemory) -> str:
    """Predicted memory of a step as chosen, beside that without recompute."""
    steps = {"without recompute": plain}
    if step.config.recompute != "none":
        steps = {step.config.recompute: step} | steps
    words = [
        f"{name}: peak {format_bytes(step.peak)}, backward keeps {format_bytes(step.kept)}"
        for name, step in steps.items()
    ]
    return "; ".join(words) + " (predicted)"


def check_memory(request: PlanRequest, process: OneProcess, needed: int) -> str:
    """A line of warning if `needed` bytes are more than tensors may take; else nothing. Raises
    PredictedOutOfMemory if they are more than the device has in all."""
    budget, processes = request.memory_budget, process.processes_on_device
    if budget.usable_bytes is None:
        return ""
    total = total_memory(process.device)
    need = f"{processes} processes, each " * (processes > 1) + f"{format_bytes(needed)} predicted"
    on_gpu = process.device.type == "cuda"
    has = f"the {'GPU' if on_gpu else 'machine'} has {format_bytes(total or 0)}"
    if total is not None and processes * needed > total:
        most = replace(budget, total_bytes=min(request.usable_bytes, total))
        raise PredictedOutOfMemory(
            f"out of memory before the first step: {need}, {has}; with "
            f"{settings(request.args)}; {replace(request, memory_budget=most).fitting_change()[0]}"
        )
    if needed <= budget.usable_bytes:
        return ""
    change = request.fitting_change()[0]
    return f"\nwarning  {need}, but tensors may take {budget}; {has} in all; {change}"
