"""The planner, asked by flags: what `auto` takes, what a run will need, what would fit.

planner/ tells what a step takes and which way to recompute is the cheapest; here are the flags that
ask (`Question`), what to change when nothing fits (`Knob`), and the sentences for the user.
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
from planner.choose import nested_groups, pick_recompute
from planner.formulas import count_parameters, recompute_cost, state_bytes
from planner.shards import share_of

from .bootstrap import ROOT
from .device import (
    Room,
    check_gather_dtype,
    choose_device,
    choose_precision,
    is_here,
    room_on,
    set_matmul_precision,
    total_memory,
)
from .flags import (
    AUTO,
    UsageError,
    changed,
    model_config,
    recompute_of,
    words_of,
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


class Knob(NamedTuple):
    """Flags to change, all at a time."""

    flags: dict[str, Any]  # by their names in args
    words: str  # what it costs

    @property
    def command(self) -> str:
        """ "--batch-size 3 --grad-accum-steps 4" """
        return " ".join(words_of(self.flags))


def next_knob(args: Flags, device_type: str, less: StepMemory | None) -> str:
    """The first change that could help a run that has run out of memory. `less`: a step with the
    next policy that is predicted to need less, if one is."""
    first, *others = same_training(args, device_type)
    if less is not None and not first.flags:
        first = Knob({POLICY: less.config.recompute}, SLOWER)
    knob = next((knob for knob in (first, *others) if knob.flags), None)
    return f"{knob.command} ({knob.words})" if knob else OTHER_TRAINING


def settings(args: Flags) -> str:
    """Of the flags, those that a step's memory depends on most."""
    policy = args.use_activation_checkpoint
    return f"--batch-size {args.batch_size} --seq-len {args.seq_len}, recompute {policy}"


def smaller_batches(args: Flags) -> list[dict[str, int]]:
    """The same sequences a step in micro-batches of fewer, the largest of them first."""
    size, steps = args.batch_size, args.grad_accum_steps
    cuts = (n for n in range(2, size + 1) if size % n == 0)
    return [{"batch_size": size // n, "grad_accum_steps": steps * n} for n in cuts]


def same_training(args: Flags, device_type: str) -> Iterator[Knob]:
    """Yield what leaves the training what it is, beside the best policy; the least cost first."""
    kept = {"loss_chunks": 0} if args.loss_chunks == 1 else {}
    yield Knob(kept, UNCHUNKED if kept else SLOWER)
    batches = smaller_batches(args)
    for batch in batches:
        yield Knob(kept | batch, SAME)
    if device_type == "cuda" and not recompute_of(args).offload:
        for batch in [{}, *batches]:
            words = f"{SAME}, {MOVED}" if batch else MOVED
            yield Knob(kept | {POLICY: OFFLOADED} | batch, words)


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
        return pick_recompute(self.planner, self.args.batch_size, self.budget, self.card)

    def fitting(self) -> StepMemory | None:
        """The fastest way to recompute that fits, where one fits that takes little; with offload,
        which no clock knows, the way that was asked for."""
        if recompute_of(self.args).offload:
            return self.step if self.fits else None
        ways = ["full", *nested_groups(self.args.n_layers)[-1:]]
        deeper = (self.about(changed(self.args, use_activation_checkpoint=way)) for way in ways)
        return self.pick() if any(one.fits for one in deeper) else None

    def instead_of(self, step: StepMemory) -> str:
        """Name the largest smaller micro-batches in which the same sequences fit without recompute:
        "4 x 4 sequences with none: 5 % faster (...)" than `step`. Without a clock it says only that
        they fit. "" if none fits, or none is faster."""
        replays_products = recompute_cost(step.config, step.seq_len)[0] > 0
        if step.config.recompute == "none" or not (self.card or replays_products):
            return ""  # (without a clock: smaller matrix products may cost more than that saves)
        for batch in smaller_batches(self.args):
            flags = {POLICY: "none"} | batch
            part = self.about(changed(self.args, **flags))
            if part.fits:
                words = f"{batch['grad_accum_steps']} x {batch['batch_size']} sequences with none"
                faster = self.seconds(step) / part.seconds(part.step) - 1 if self.card else 0
                speed = f": {100 * faster:.0f} % faster" if self.card else " fit as well"
                is_worth_it = faster > 0.005 or not self.card
                return f"{words}{speed} ({Knob(flags, SAME).command})" * is_worth_it
        return ""

    def way_out(self) -> tuple[str, Knob | None]:
        """The least change that makes a step fit and the training stay what it is, with the fastest
        policy then: in words, and its flags. If there is none, the words say what is left."""
        why = ""
        if self.state >= self.budget:
            each = f" in each of {self.shards} processes" if self.shards > 1 else ""
            dealt = " (train_fsdp.py deals them out)" * (self.ddp and self.processes > 1)
            why = (
                f"weights, gradients and {optimizer_name(self.args)}'s state alone take "
                f"{format_bytes(self.state)}{each}, more than the {format_bytes(self.budget)} "
                f"that tensors may take{dealt}: "
            )
        for knob in [] if why else same_training(self.args, self.device.type):
            step = self.about(changed(self.args, **knob.flags)).fitting()
            if step is None:
                continue
            flags = {POLICY: step.config.recompute} | knob.flags
            found = Knob(flags, knob.words)
            return f"{found.command} fits ({found.words})", found
        return f"{why}try {OTHER_TRAINING}", None

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
        kind, budget = device_type(known), budget or known.memory
        if args.device not in ("auto", kind):
            raise UsageError(f"--device {args.device}: {args.card} is {kind}; leave --device out")
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
    next_policy: Callable[..., StepMemory | None]  # the function of that name


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
    # of the process that has least, too.
    card = process.exchange(process.by_first(lambda: clock_card(args, process.device)))[0]
    n, here = process.processes_on_device, process.processes_here
    room = room_on(process.device, args.memory_budget, n, held, here)
    if not process.own_policy:
        room = min(process.exchange(room), key=lambda room: room.budget or 0)
    n, shards, ddp = process.world_size, process.shards, process.keeps_gradients
    what = args, config.vocab_size, process.device, precision, room, card
    question = Question(*what, ddp, n, shards, process.sharing)
    chooses = args.use_activation_checkpoint in AUTO and process.own_policy
    alone = partial(plan_alone, question, process, config)
    plan = process.by_all(alone) if chooses else process.exchange(process.by_first(alone))[0]
    assert plan
    config, words, peaks = plan
    of_each = process.exchange(config.recompute)
    if len(set(of_each)) > 1:
        words += f"\nmemory   each process has a policy of its own, by rank: {', '.join(of_each)}"
    return Plan(config, words, peaks, partial(next_policy, question))


def plan_alone(
    question: Question, process: OneProcess, config: MiniGPTConfig
) -> tuple[MiniGPTConfig, str, tuple[int, int] | None]:
    """Of `plan_memory`, what one process finds out for all."""
    words, card = "", question.card
    if question.args.use_activation_checkpoint in AUTO:
        chosen = choose_recompute(question)
        config = chosen.config
        least = f"the least time (predicted for {card.name})" if card else "the least recompute"
        words = f"auto takes {config.recompute}: {least} that fits in {question.room}\nmemory   "
        if instead := question.instead_of(chosen):
            words += f"{instead}\nmemory   "
    if failed := process.last_shortage():
        config = after_restart(question, config, failed)
        words += f"memory ran out with {failed}; it goes on with {config.recompute}\nmemory   "
    said, peaks = predict(question, process, config)
    return config, words + said, peaks


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
    if question.room.budget is None:
        raise UsageError("--memory-budget: this system does not tell what is free")
    room, smallest = question.room, f"above {format_bytes(question.state)}"
    if question.state < question.budget:
        step = question.pick()
        if step.peak <= question.budget:
            return step
        smallest = f"{format_bytes(step.peak)} ({step.config.recompute})"
    typed = f"--use-activation-checkpoint {question.args.use_activation_checkpoint}"
    raise UsageError(
        f"{typed if room.is_free else '--memory-budget'}: tensors may take {room}, but the "
        f"smallest peak is {smallest}; {question.way_out()[0]}"
    )


def predict(
    question: Question, process: OneProcess, config: MiniGPTConfig
) -> tuple[str, tuple[int, int] | None]:
    """What a step will need; a warning if that is more than is free. Raises TooLarge."""
    try:
        check_room(question, process, question.state)  # before anything is simulated
        step, plain = (
            question.planner.step(question.args.batch_size, recompute=policy)
            for policy in (config.recompute, "none")
        )
        note = question.planner.note
        words = describe_plan(step, plain) + (note and f"\nnote     {note}")
        words += check_room(question, process, step.peak)
        if question.room.host is not None and step.host > question.room.host:
            has = f"may take {format_bytes(question.room.host)}; {question.way_out()[0]}"
            need = f"each process needs {format_bytes(step.host)} of CPU memory for +offload"
            words += f"\nwarning  {need}, and {has}"
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


def check_room(question: Question, process: OneProcess, needed: int) -> str:
    """A line of warning if `needed` bytes are more than tensors may take; else nothing. Raises
    TooLarge if they are more than the device has in all."""
    room, processes = question.room, process.processes_on_device
    if room.safe is None:
        return ""
    total = total_memory(process.device)
    need = f"{processes} processes, each " * (processes > 1) + f"{format_bytes(needed)} predicted"
    on_gpu = process.device.type == "cuda"
    has = f"the {'GPU' if on_gpu else 'machine'} has {format_bytes(total or 0)}"
    if total is not None and processes * needed > total:
        most = replace(room, budget=min(question.budget, total))
        raise TooLarge(
            f"out of memory before the first step: {need}, {has}; with "
            f"{settings(question.args)}; {replace(question, room=most).way_out()[0]}"
        )
    if needed <= room.safe:
        return ""
    return f"\nwarning  {need}, but tensors may take {room}; {has} in all; {question.way_out()[0]}"
