"""The planner, asked by flags: what `auto` takes, what a run will need, what would fit.

planner/ tells what a step takes and which way to recompute is the cheapest; here are the flags that
ask (`Question`), and the sentences for the user. knobs.py knows what to change.
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
from memory import expanded
from model import MiniGPTConfig
from planner import Card, Planner, StepMemory
from planner.cards import CARDS, THIS_MACHINE, clock_card, device_type
from planner.choose import pick_recompute
from planner.formulas import count_parameters, recompute_cost, state_bytes
from planner.shards import share_of

from .bootstrap import ROOT
from .device import (
    Room,
    check_gather_dtype,
    choose_device,
    choose_precision,
    is_here,
    own_memory,
    room_on,
    set_matmul_precision,
    total_memory,
)
from .flags import AUTO, UsageError, changed, model_config, recompute_of
from .knobs import (
    POLICY,
    Knob,
    candidates,
    less_moments,
    settings,
    shards,
    smaller_batches,
    smaller_models,
)
from .knobs import next_knob as next_knob  # endings.py takes it from here
from .metrics import format_bytes
from .optimizer import make_optimizer, optimizer_name
from .pretrained import vocabulary_of
from .process import OneProcess

SMALLER = "a smaller --d-model, --n-layers or vocabulary"
AFTER_RESTART = 0.75  # of the peak that was too much; a restart is dear: take much less at once


# ---- the question


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
        shards=shards,
        sharing=sharing,
        gather_in_low=shards > 1 and args.gather_dtype == "bfloat16",
    )


@dataclass(frozen=True)
class Question:
    """What does a step take, and what fits? For these flags, on that device."""

    args: argparse.Namespace
    vocab_size: int
    device: torch.device  # it need not be there
    precision: torch.dtype
    room: Room = Room(None, "cpu")
    card: Card | None = None  # whose clock tells what is fastest; None: the fewest FLOPs are
    ddp: bool = False
    processes: int = 1  # with `ddp`, that hold the whole model each
    shards: int = 1  # processes that hold one between them
    sharing: int = 1  # processes that share each sequence
    watch: Callable[[], object] = lambda: None  # called before each step that is simulated
    made: dict[tuple, Any] = field(default_factory=dict)  # what other flags asked for, too

    def about(self, args: argparse.Namespace) -> "Question":
        """The same of other flags."""
        return replace(self, args=args)

    def turned(self, knob: Knob) -> "Question":
        """The same after this change."""
        then = self.about(knob.change(self.args))
        return replace(then, ddp=False, shards=self.processes) if knob.trainer else then

    @property
    def config(self) -> MiniGPTConfig:
        return model_config(self.args, self.vocab_size)

    @property
    def planner(self) -> Planner:
        """The same one for all flags that differ in batch size and recompute only."""
        args, config = self.args, self.config
        state = args.optimizer, args.moments_dtype, args.grad_accum_steps > 1, args.gather_dtype
        way = self.ddp, self.shards, self.sharing
        key = replace(config, recompute="none"), args.seq_len, state, *way
        if key not in self.made:
            self.watch()
            planner = make_planner(args, config, self.device, self.precision, *way)
            planner.watch, self.made[key] = self.watch, planner
        return self.made[key]

    @property
    def state(self) -> int:
        """Bytes of weights, gradients and moments; nothing is simulated for that."""
        args, moments = self.args, getattr(torch, self.args.moments_dtype)
        whole = state_bytes(self.config, args.optimizer, moments)
        return share_of(whole, self.config, self.shards)

    @property
    def step(self) -> StepMemory:
        """As asked for; for `auto`, with full."""
        return self.planner.step(self.args.batch_size, recompute=self.config.recompute)

    @property
    def budget(self) -> int:
        """Bytes that tensors may take; as many as they like, where nobody knows."""
        return sys.maxsize if self.room.safe is None else self.room.safe

    @property
    def largest_batch(self) -> int:
        """Sequences of the largest micro-batch that fits; 0: not even one does."""
        if self.state >= self.budget:  # then nothing needs to be simulated
            return 0
        planner, recompute = self.planner, self.config.recompute
        if planner.step(1, recompute=recompute).peak > self.budget:
            return 0
        key = planner, recompute, self.budget
        if key not in self.made:
            asked, host = self.args.batch_size, self.room.host
            self.made[key] = planner.largest_batch(self.budget, asked, host, recompute=recompute)
        return self.made[key]

    @property
    def fits(self) -> bool:
        return self.args.batch_size <= self.largest_batch

    def pick(self) -> StepMemory:
        """The fastest way to recompute that fits, else the smallest peak."""
        args, offload = self.args, recompute_of(self.args).offload
        return pick_recompute(self.planner, args.batch_size, self.budget, self.card, offload)

    def instead_of(self, step: StepMemory) -> str:
        """Name the largest smaller micro-batches in which the same sequences fit without recompute:
        "4 x 4 sequences with none: 5 % faster (...)" than `step`. Without a clock it says only that
        they fit. "" if none fits, or none is faster."""
        replays_products = recompute_cost(step.config, step.seq_len)[0] > 0
        if step.config.recompute == "none" or not (self.card or replays_products):
            return ""  # (without a clock: smaller matrix products may cost more than that saves)
        args = changed(self.args, use_activation_checkpoint="none")
        most = self.about(args).largest_batch  # parts are no larger: beside them gradients wait
        knobs = (Knob(batch) for batch in smaller_batches(args) if batch["batch_size"] <= most)
        fits = (knob for knob in knobs if self.about(knob.change(args)).step.peak <= self.budget)
        if not (knob := next(fits, None)):
            return ""
        words = "{grad_accum_steps} x {batch_size} sequences with none".format_map(knob.flags)
        typed = {POLICY: "none"} | knob.with_policy(args, "none").flags
        flags = Knob(typed).command(self.args)
        if self.card is None:
            return f"{words} fit as well ({flags})"
        parts = self.about(knob.change(args))
        faster = self.seconds(step) / parts.seconds(parts.step) - 1
        return f"{words}: {100 * faster:.0f} % faster ({flags})" * (faster > 0.005)

    def way_out(self, is_auto: bool = False) -> tuple[str, Knob | None]:
        """The least change that makes a step fit, with the fastest policy then; first why, if that
        is plain. `is_auto`: the run will choose its policy by itself."""
        why = ""
        if self.state >= self.budget:
            each = f" in each of {self.shards} processes" if self.shards > 1 else ""
            why = (
                f"weights, gradients and {optimizer_name(self.args)}'s state alone take "
                f"{format_bytes(self.state)}{each}, more than the {format_bytes(self.budget)} "
                "that tensors may take: "
            )
        knob = next((knob for knob in changes(self) if self.turned(knob).fits), None)
        if knob and not expanded((then := self.turned(knob)).config).offload:
            same = self.args.use_activation_checkpoint  # which `auto` will find by itself
            knob = knob.with_policy(self.args, same if is_auto else then.pick().config.recompute)
        return why, knob

    @property
    def replicas(self) -> int:
        """Micro-batches at the same time."""
        return self.processes // self.sharing

    def seconds(self, step: StepMemory) -> float:
        """Predicted for a training step. `step`: one of its micro-batches and the update of the
        weights, which all of them share. (Gathering shards takes no time here.)"""
        assert self.card
        one, micro_batches = step.seconds(self.card), self.args.grad_accum_steps
        # Clipping reads the gradients twice and writes them; AdamW reads weights, gradients and two
        # moments, and writes all but the gradients: ten times 4 bytes a parameter.
        moved = 40 * count_parameters(step.config) / self.shards
        update = moved / (self.card.reached_bytes * self.card.bytes_per_s)
        return micro_batches * one - (micro_batches - 1) * min(update, one)

    def tokens_per_s(self, step: StepMemory) -> float:
        """Of all processes."""
        sequences = self.replicas * self.args.grad_accum_steps * step.batch_size
        return sequences * step.seq_len / self.seconds(step)


def changes(question: Question) -> Iterator[Knob]:
    """First what leaves the training what it is; then that as well where several processes share
    one model, with less moments, or in a smaller model."""
    args, kind = question.args, question.device.type
    groups = question.shards == 1 and args.n_layers > 1
    yield from candidates(args, kind, lambda then: question.about(then).largest_batch, groups)
    bases = list(shards(args)) if question.ddp and question.processes > 1 else []
    for base in (*less_moments(args), *smaller_models(args)):
        if question.turned(base).state < question.state:
            bases.append(base)
    for base in bases:
        for knob in (Knob({}), *candidates(base.change(args), kind)):
            yield replace(base, flags=base.flags | knob.flags)


def ask(
    args: argparse.Namespace,
    processes: int | None = None,
    sharded: bool = False,
    shared: bool = False,
) -> Question:
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
        check_card(args, known)
        kind, budget = device_type(known), budget or known.memory
        native = known.flops[1] >= known.flops[2]  # (not before Ampere)
    elif not is_here(kind) and args.card is None:
        native = True
    if native is None:
        device = choose_device(kind)
        room = room_on(device, budget, n if device.type == "cpu" else 1, here=n)
    else:
        device, room = torch.device(kind), Room(budget, kind)
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
    return Question(args, vocabulary(args), device, precision, room, card, ddp, n, shards, sharing)


def check_card(args: argparse.Namespace, card: Card) -> None:
    """Raises UsageError where --device or --memory-budget contradict a card of the table."""
    kind, budget = device_type(card), args.memory_budget or 0
    if args.device not in ("auto", kind):
        raise UsageError(f"--device {args.device}: {card.name} is {kind}; leave --device out")
    if budget > card.memory and kind == "cuda":  # (Apple sells each chip with more memory, too)
        raise UsageError(
            f"--memory-budget {format_bytes(budget)} is more than the {format_bytes(card.memory)} "
            f"of {card.name}: leave it out, or name another --card"
        )


def vocabulary(args: argparse.Namespace) -> int:
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


class Plan(NamedTuple):
    """Of a run."""

    config: MiniGPTConfig  # with what `auto` takes
    words: str
    peaks: tuple[int, int] | None  # of a step, and without recompute; None: nobody could tell
    next_policy: Callable[..., StepMemory | None] = lambda *_: None  # the function of that name


class TooLarge(MemoryError):
    """A step is predicted to take more than the device has in all: one line, with what would fit.

    Nothing has run out yet. It would; on a CPU the system then ends the process without a word.
    """


def plan_memory(
    args: argparse.Namespace,
    process: OneProcess,
    config: MiniGPTConfig,
    precision: torch.dtype,
    held: int = 0,
) -> Plan:
    """What `auto` takes, and what memory a step will need.

    `held`: bytes of CPU memory that a snapshot has now and gives back (or to the optimizer).
    Raises UsageError if `auto` finds nothing that fits, TooLarge if the device can never hold it.
    """
    # All go by one clock, that of process 0. Where all need the same policy, they go by the memory
    # of the process that has least.
    card = process.exchange(process.by_first(lambda: clock_card(args, process.device)))[0]
    processes = process.processes_on_device, held, process.processes_here
    try:
        free = room_on(process.device, None, *processes)
    except UsageError:  # nobody knows
        free = Room(None, process.device.type)
    n, shards, ddp = process.world_size, process.shards, process.keeps_gradients
    what = args, config.vocab_size, process.device, precision, free, card
    question = Question(*what, ddp, n, shards, process.sharing)
    words = ""
    if args.use_activation_checkpoint in AUTO:
        room = process.by_all(lambda: room_on(process.device, args.memory_budget, *processes))
        if not process.own_policy:
            room = replace(room, budget=min(process.exchange(room.budget or 0)))
        asked = replace(question, room=room)
        chosen = process.by_all(lambda: choose_recompute(asked))
        config = chosen.config
        least = f"the least time (predicted for {card.name})" if card else "the least recompute"
        words = f"auto takes {config.recompute}: {least} that fits in {room}\nmemory   "
        if instead := process.by_first(lambda: asked.instead_of(chosen)):
            words += f"{instead}\nmemory   "
    failed = process.last_shortage()
    if failed:
        config = after_restart(question, config, failed)
    of_each = process.exchange(config.recompute)
    if not process.own_policy:
        config = replace(config, recompute=of_each[0])
    if failed:
        words += f"memory ran out with {failed}; it goes on with {config.recompute}\nmemory   "
    if process.own_policy and len(set(of_each)) > 1:
        words += f"each process has a policy of its own, by rank: {', '.join(of_each)}\nmemory   "
    told = process.by_first(lambda: predict(question, process, config, held))
    said, peaks = told or ("", None)
    return Plan(config, words + said, peaks, partial(next_policy, question))


def after_restart(question: Question, config: MiniGPTConfig, failed: str) -> MiniGPTConfig:
    """Return the config of a run that torchrun starts again because memory ran out with the policy
    `failed`. If nothing needs less, or nothing can be planned, it tries that policy again."""
    policy, step = failed, partial(question.planner.step, question.args.batch_size)
    with suppress(Exception):
        if less := next_policy(question, failed, share=AFTER_RESTART):
            policy = less.config.recompute
        # (`auto` may need less already.)
        policy = min(policy, config.recompute, key=lambda way: step(recompute=way).peak)
    return replace(config, recompute=policy)


def next_policy(
    question: Question, policy: str, seen: int | None = None, share: float = 1.0
) -> StepMemory | None:
    """Return the fastest way to recompute that is predicted to need less than `policy`, which was
    too much: a `share` of it at most, less the usual margin, if any does; else the least that there
    is. Only if that is no less, what is kept waits in CPU memory (on CUDA). None: nothing needs
    less. Raises what planning raises, where fake tensors do not work or memory is short for it.

    `seen`: bytes that it took, if they were counted.
    """
    planner, batch_size, kind = question.planner, question.args.batch_size, question.device.type
    failed = planner.step(batch_size, recompute=policy).peak
    budget = Room(int(share * min(failed, seen or failed)), kind).safe or 0
    taken = pick_recompute(planner, batch_size, budget, question.card).config.recompute
    ways = [taken] + ["full+offload"] * (kind == "cuda")
    steps = (planner.step(batch_size, recompute=way) for way in ways)
    return next((step for step in steps if step.peak < failed), None)


def choose_recompute(question: Question) -> StepMemory:
    """What `auto` takes. Raises UsageError, with what would fit, if nothing does."""
    room, smallest = question.room, f"above {format_bytes(question.state)}"
    if question.state < question.budget:
        step = question.pick()
        if step.peak <= question.budget:
            return step
        smallest = f"{format_bytes(step.peak)} ({step.config.recompute})"
    policy = question.args.use_activation_checkpoint
    flag = f"--use-activation-checkpoint {policy}" if room.is_free else "--memory-budget"
    most_of_it = changed(question.args, use_activation_checkpoint=policy.replace("auto", "full"))
    most = question.about(most_of_it)
    why, knob = most.way_out(is_auto=True)
    fits = f"{knob.command(most.args)} fits ({knob.words})" if knob else SMALLER
    raise UsageError(
        f"{flag}: tensors may take {room}, but the smallest peak is {smallest}; {why}{fits}"
    )


def predict(
    question: Question, process: OneProcess, config: MiniGPTConfig, held: int
) -> tuple[str, tuple[int, int] | None]:
    """What a step will need; a warning if that is more than is free. Raises TooLarge."""
    try:
        check_room(question, process, question.state, held)  # before anything is simulated
        step, plain = (
            question.planner.step(question.args.batch_size, recompute=policy)
            for policy in (config.recompute, "none")
        )
        note = question.planner.note
        words = describe_plan(step, plain) + (note and f"\nnote     {note}")
        words += check_room(question, process, step.peak, held)
        if question.room.host is not None:
            words += check_room(question, process, step.host, held, of_cpu=True)
        return words, (step.peak, plain.peak)
    except TooLarge:
        raise
    except Exception as error:  # an aside: where fake tensors do not work, train anyway
        what = f"{type(error).__name__} at {place_of(error)}"
        return f"the peak could not be predicted ({what})", None


def place_of(error: Exception) -> str:
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


def check_room(
    question: Question, process: OneProcess, needed: int, held: int, of_cpu: bool = False
) -> str:
    """A line of warning if `needed` bytes are more than tensors may take of what is free now; else
    nothing. `of_cpu`: that offload has beside the device.

    Raises TooLarge if they are more than there are in all.
    """
    device, room, what = process.device, question.room, "predicted"
    processes = process.processes_on_device
    if of_cpu:
        device, processes = torch.device("cpu"), process.processes_here
        room, what = room_on(device, None, processes, held), "of CPU memory for +offload"
    if room.budget is None or room.safe is None or of_cpu and needed <= room.safe:
        return ""
    total, own = total_memory(device), own_memory() - held if device.type == "cpu" else 0
    need = f"{processes} processes, each " if processes > 1 else ""
    need += f"{format_bytes(needed)} {what}"
    has = f"the {'GPU' if device.type == 'cuda' else 'machine'} has {format_bytes(total or 0)}"
    if total is not None and processes * (needed + own) > total:
        beside = f" beside the {format_bytes(own)} that Python, PyTorch and data take" * bool(own)
        raise TooLarge(
            f"out of memory before the first step: {need}{beside}, {has}; with "
            f"{settings(question.args)}; {what_to_try(question)}"
        )
    if needed <= room.safe:
        return ""
    in_all = f"; {has} in all" * (total is not None)
    return f"\nwarning  {need}, but tensors may take {room}{in_all}; {what_to_try(question)}"


def what_to_try(question: Question) -> str:
    """With which a step fits in what is free."""
    why, knob = question.way_out()
    if knob is None:
        return f"{why}try {SMALLER}"
    return f"{why}try {knob.command(question.args)} ({knob.words}), which fits"
