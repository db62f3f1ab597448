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
from itertools import chain
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
    own_memory,
    room_on,
    set_matmul_precision,
    total_memory,
)
from .flags import (
    AUTO,
    UsageError,
    changed,
    flag,
    model_config,
    moot_chunks,
    recompute_of,
    words_of,
)
from .metrics import format_bytes
from .optimizer import make_optimizer, optimizer_name
from .pretrained import vocabulary_of
from .process import OneProcess

Flags = argparse.Namespace
OFFLOADED = "full+offload"
POLICY, FOR_AUTO = "use_activation_checkpoint", ("memory_budget", "card")
SMALLER = "a smaller --d-model, --n-layers or vocabulary"
AFTER_RESTART = 0.75  # of the peak that was too much; a restart is dear: take much less at once

# What a change costs.
SLOWER = "same results, some more time"
UNCHUNKED = "never holds all logits, at about the same speed"
SAME, MOVED = "the same sequences", "what backward needs waits in CPU memory"
FEWER = "fewer sequences a step: to accumulate them, gradients would have to wait"


# ---- what to change, in the order of docs/planning.md ("which knob first")


@dataclass(frozen=True)
class Knob:
    """Flags to change, all at a time."""

    flags: dict[str, Any]  # by their names in args
    words: str = ""  # what it costs
    trainer: str = ""  # another one to start, if it takes that

    def command(self, args: Flags) -> str:
        """ "--batch-size 3 --grad-accum-steps 4" """
        words = [self.trainer] * bool(self.trainer) + words_of(self.flags)
        # What is for `auto` goes with it.
        chosen = POLICY in self.flags and args.use_activation_checkpoint in AUTO
        moot = [flag(name) for name in FOR_AUTO if chosen and getattr(args, name) is not None]
        return " ".join(words + ["without"] * bool(moot) + moot)

    def change(self, args: Flags) -> Flags:
        """The flags with this change, and with the defaults that follow from it."""
        then = changed(args, **self.flags)
        if "max_position_embeddings" not in args.typed and args.model is None:
            then.max_position_embeddings = then.seq_len
        return then


def next_knob(
    args: Flags,
    device: torch.device | None,
    way_back: str | None,
    policy: str = "",
    is_least: bool = False,
) -> str:
    """The settings that memory ran out with, and the first change that could help.

    `device`: None if the run was not even set up. `way_back`: how to go on from what was saved.
    `policy`: the one in use, if not as typed; `is_least`: no other is predicted to need less.
    """
    used = changed(args, use_activation_checkpoint=policy or args.use_activation_checkpoint)
    now, asked = settings(used), recompute_of(used)
    if device is None:
        return f"{now}; try a smaller model (--n-layers, --d-model), or less data (--max-tokens)"
    own = policy_flags(args, used.use_activation_checkpoint)
    is_full = {*asked.policies} == {"full"} and used.use_activation_checkpoint not in AUTO
    if args.loss_chunks == 1:
        knob = Knob(own | {"loss_chunks": 0}, UNCHUNKED)
    elif not is_least and not is_full:
        knob = Knob({POLICY: "full"}, SLOWER)
    elif batches := smaller_batches(args):
        knob = Knob(own | batches[0], SAME)
    elif device.type == "cuda" and not asked.offload:
        knob = Knob({POLICY: OFFLOADED}, MOVED)
    else:
        return f"{now}; try a shorter --seq-len or a smaller model"
    return f"{now}; try {knob.command(args)} ({knob.words}){f'; {way_back}' if way_back else ''}"


def settings(args: Flags) -> str:
    """Of the flags, those that a step's memory depends on most."""
    policy = args.use_activation_checkpoint
    return f"--batch-size {args.batch_size} --seq-len {args.seq_len}, recompute {policy}"


def policy_flags(args: Flags, policy: str) -> dict[str, Any]:
    """What to type for that policy; nothing, if it was typed."""
    if policy == args.use_activation_checkpoint:
        return {}
    return {POLICY: policy} | moot_chunks(args, policy)


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
    if device_type == "cuda":
        for batch in [{}, *batches]:
            words = f"{SAME}, {MOVED}" if batch else MOVED
            yield Knob(kept | {POLICY: OFFLOADED} | batch, words)


def other_training(question: "Question") -> Iterator[Knob]:
    """Yield what makes it another training, or another trainer; the least change first."""
    args = question.args
    full = changed(args, loss_chunks=0, use_activation_checkpoint="full")
    most = question.about(full).largest_batch
    if args.grad_accum_steps == 1 and 0 < most < args.batch_size:
        yield Knob({"batch_size": most}, FEWER)
    for n in range(1, args.seq_len.bit_length() - 3):  # down to 8 tokens
        yield Knob({"seq_len": args.seq_len >> n}, "the model sees less at a time")
    moments = list(less_moments(args))
    if question.ddp and question.processes > 1:
        own = {"compress_gradients": False, "gather_dtype": "float32"}
        refused = {name: value for name, value in own.items() if getattr(args, name) != value}
        dealt = Knob(refused, "the processes hold the model between them", "train_fsdp.py")
        yield dealt
        for knob in moments:
            words = f"{dealt.words}; {knob.words}"
            yield Knob(refused | knob.flags, words, dealt.trainer)
    yield from moments


def less_moments(args: Flags) -> Iterator[Knob]:
    """Yield with which moments take less; the least change to the training first."""
    half, muon = {"moments_dtype": "bfloat16"}, {"optimizer": "muon"}
    rounded, other = "moments rounded to bfloat16", "another optimizer"
    if args.moments_dtype == "float32":
        yield Knob(half, rounded)
    if args.optimizer == "adamw" and not args.resume:
        yield Knob(muon, other)
        yield Knob(muon | half, f"{other}, {rounded}")


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
        args = changed(self.args, use_activation_checkpoint="none")
        parts = (self.about(changed(args, **batch)) for batch in smaller_batches(args))
        part = next((part for part in parts if part.fits), None)
        if part is None:
            return ""
        batch = {name: getattr(part.args, name) for name in ("batch_size", "grad_accum_steps")}
        words = "{grad_accum_steps} x {batch_size} sequences with none".format_map(batch)
        flags = Knob({POLICY: "none"} | moot_chunks(args, "none") | batch).command(self.args)
        if self.card is None:
            return f"{words} fit as well ({flags})"
        faster = self.seconds(step) / part.seconds(part.step) - 1
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
        for base in chain([Knob({})], other_training(self)):
            there = self.turned(base)
            for knob in same_training(there.args, self.device.type):
                step = there.turned(knob).fitting()
                if step is None:
                    continue
                # (`auto` finds by itself what does not offload.)
                found = not is_auto or POLICY in knob.flags
                policy = policy_flags(self.args, step.config.recompute) if found else {}
                others = {k: v for k, v in (base.flags | knob.flags).items() if k != POLICY}
                return why, Knob(policy | others, base.words or knob.words, base.trainer)
        return why, None

    def advice(self, is_auto: bool = False) -> str:
        """`way_out`, in words."""
        why, knob = self.way_out(is_auto)
        return why + (f"{knob.command(self.args)} fits ({knob.words})" if knob else SMALLER)

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
    free = Room(None, process.device.type)
    with suppress(UsageError):  # (nobody knows)
        free = room_on(process.device, None, *processes)
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
    typed = f"--use-activation-checkpoint {question.args.use_activation_checkpoint}"
    raise UsageError(
        f"{typed if room.is_free else '--memory-budget'}: tensors may take {room}, but the "
        f"smallest peak is {smallest}; {question.advice(is_auto=True)}"
    )


def predict(
    question: Question, process: OneProcess, config: MiniGPTConfig, held: int
) -> tuple[str, tuple[int, int] | None]:
    """What a step will need; a warning if that is more than is free. Raises TooLarge."""
    try:
        check_room(
            question, process, process.device, question.state, held
        )  # before anything is simulated
        step, plain = (
            question.planner.step(question.args.batch_size, recompute=policy)
            for policy in (config.recompute, "none")
        )
        note = question.planner.note
        words = describe_plan(step, plain) + (note and f"\nnote     {note}")
        words += check_room(question, process, process.device, step.peak, held)
        if question.room.host is not None:
            words += check_room(question, process, torch.device("cpu"), step.host, held)
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
    question: Question, process: OneProcess, device: torch.device, needed: int, held: int
) -> str:
    """A line of warning if `needed` bytes are more than tensors may take of what is free now; else
    nothing. `device`: the run's, or the CPU, for what +offload has beside a GPU.

    Raises TooLarge if they are more than there are in all.
    """
    processes = process.processes_here if device.type == "cpu" else 1
    room, what = question.room, "predicted"
    if device != process.device:
        room, what = room_on(device, None, processes, held), "of CPU memory for +offload"
    if room.safe is None:
        return ""
    total, own = total_memory(device), own_memory() - held if device.type == "cpu" else 0
    need = f"{processes} processes, each " * (processes > 1) + f"{format_bytes(needed)} {what}"
    has = f"the {'GPU' if device.type == 'cuda' else 'machine'} has {format_bytes(total or 0)}"
    if total is not None and processes * (needed + own) > total:
        beside = f" beside the {format_bytes(own)} that Python, PyTorch and data take" * bool(own)
        raise TooLarge(
            f"out of memory before the first step: {need}{beside}, {has}; with "
            f"{settings(question.args)}; {question.advice()}"
        )
    if needed <= room.safe:
        return ""
    return f"\nwarning  {need}, but tensors may take {room}; {has} in all; {question.advice()}"
