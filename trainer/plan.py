"""The planner, asked by flags: what `auto` takes, what a run will need, what would fit.

planner/ tells what a step takes and which way to recompute is the cheapest; here are the flags that
ask, and the sentences for the user. room.py knows the device, knobs.py what to change.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from data.tokenizer import load_tokenizer
from model import MiniGPTConfig
from planner import Card, Planner, StepMemory
from planner.cards import card_named
from planner.choose import pick_recompute
from planner.formulas import state_bytes
from planner.shards import share_of

from .card import THIS_MACHINE, clock_card, device_type
from .device import choose_device, choose_precision, set_matmul_precision
from .flags import AUTO, UsageError, model_config, recompute_of
from .knobs import Knob, nearest, settings
from .knobs import next_knob as next_knob  # endings.py takes it from here
from .measured import Predicted
from .metrics import format_bytes
from .optimizer import make_optimizer, optimizer_name
from .pretrained import vocabulary_of
from .process import OneProcess
from .room import Room, host_room, own_memory, room_on, total_memory

SMALLER = "a smaller --d-model, --n-layers or vocabulary"


class Plan(NamedTuple):
    """Of a run."""

    config: MiniGPTConfig  # with what `auto` takes
    words: str
    peaks: Predicted | None  # None: they could not be predicted


class TooLarge(MemoryError):
    """A step is predicted to take more than the device has in all: one line, with what would fit.

    Nothing has run out yet. It would; on a CPU the system then ends the process without a word.
    """


def target(args: argparse.Namespace, processes: int = 1) -> tuple[str, torch.dtype, Room]:
    """What is planned for: (kind of device, precision, memory).

    A device that is not there can be planned for as well, only not be asked how much it has free;
    a card of the table has all of its memory. `processes`: on one machine.
    """
    if args.card not in (None, THIS_MACHINE):
        return card_target(args, card_named(args.card))
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if there.get(args.device, True):
        device = choose_device(args.device)
        share = processes if device.type == "cpu" else 1
        room = room_on(device, args.memory_budget, share)
        room = replace(room, host=host_room(device, processes))
        return device.type, choose_precision(args, device), room
    precision = choose_precision(args, torch.device(args.device), native=True)
    return args.device, precision, Room(args.memory_budget, args.device)


def card_target(args: argparse.Namespace, card: Card) -> tuple[str, torch.dtype, Room]:
    """What is planned for on a card of the table, which need not be there: as `target` says.

    Raises UsageError where --device or --memory-budget contradict the card.
    """
    kind, budget = device_type(card), args.memory_budget or card.memory
    if args.device not in ("auto", kind):
        raise UsageError(f"--device {args.device}: {card.name} is {kind}; leave --device out")
    if budget > card.memory and kind == "cuda":  # (Apple sells each chip with more memory, too)
        raise UsageError(
            f"--memory-budget {format_bytes(budget)} is more than the {format_bytes(card.memory)} "
            f"of {card.name}: leave it out, or name another --card"
        )
    _, bfloat16, float16 = card.flops  # before Ampere there is no bfloat16
    precision = choose_precision(args, torch.device(kind), native=bfloat16 >= float16)
    return kind, precision, Room(budget, kind)


def asked_card(args: argparse.Namespace) -> Card | None:
    """The card that --card asks about, measured if that is this machine; None: nobody asked."""
    if args.card is None:
        return None
    device = torch.device("cpu")  # (a card of the table is known by its name, wherever this runs)
    if args.card == THIS_MACHINE:
        device = choose_device(args.device)
        set_matmul_precision(device, args.tf32)
    return clock_card(args, device)


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


def make_planner(
    args: argparse.Namespace,
    config: MiniGPTConfig,
    device: torch.device,
    precision: torch.dtype,
    ddp: bool = False,
    shards: int = 1,
) -> Planner:
    """The planner of the run that the flags ask for, on a device that need not be there."""
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
    )


@dataclass(frozen=True)
class Plans:
    """What steps take on one device with one vocabulary, for whatever other flags."""

    vocab_size: int
    device: torch.device
    precision: torch.dtype
    ddp: bool = False
    processes: int = 1  # with `ddp`, that hold the whole model each
    shards: int = 1  # processes that hold one between them
    host: int | None = None  # bytes of CPU memory that offload may have; None: nobody knows
    card: Card | None = None  # whose clock tells what is fastest; None: the fewest FLOPs are
    watch: Callable[[], object] = lambda: None  # called before each step that is simulated
    made: dict[tuple, Planner] = field(default_factory=dict)
    largest: dict[tuple, int] = field(default_factory=dict)  # micro-batches

    def planner(self, args: argparse.Namespace) -> Planner:
        """The same one for all flags that differ in batch size and recompute only."""
        config = model_config(args, self.vocab_size)
        state = args.optimizer, args.moments_dtype
        key = replace(config, recompute="none"), args.seq_len, args.grad_accum_steps > 1, state
        if key not in self.made:
            self.watch()
            planner = make_planner(args, config, self.device, self.precision, self.ddp, self.shards)
            planner.watch, self.made[key] = self.watch, planner
        return self.made[key]

    def state(self, args: argparse.Namespace) -> int:
        """Bytes of weights, gradients and moments; nothing is simulated for that."""
        config, moments = model_config(args, self.vocab_size), getattr(torch, args.moments_dtype)
        return share_of(state_bytes(config, args.optimizer, moments), config, self.shards)

    def peak(self, args: argparse.Namespace) -> int:
        """Bytes at the peak of a step; for `auto`, of the most that it recomputes. (No device has
        as many as one takes for whose offload the CPU's memory is too small.)"""
        recompute = model_config(args, self.vocab_size).recompute
        step = self.planner(args).step(args.batch_size, recompute=recompute)
        return step.peak if self.host is None or step.host <= self.host else sys.maxsize

    def most(self, args: argparse.Namespace, budget: int) -> int:
        """Sequences of the largest micro-batch that fits in `budget` bytes with these flags."""
        one = argparse.Namespace(**vars(args) | {"batch_size": 1})
        if self.peak(one) > budget:
            return 0
        config, planner = model_config(args, self.vocab_size), self.planner(args)
        key = planner, config, budget
        if key not in self.largest:
            self.largest[key] = planner.largest_batch(
                budget, args.batch_size, self.host, recompute=config.recompute
            )
        return self.largest[key]

    def pick(self, args: argparse.Namespace, budget: int) -> StepMemory:
        """The fastest way to recompute that fits in `budget` bytes, else the smallest peak."""
        ask, offload = self.planner(args), recompute_of(args).offload
        return pick_recompute(ask, args.batch_size, budget, self.card, args.compile, offload)

    def way_out(
        self, args: argparse.Namespace, budget: int, is_auto: bool = False
    ) -> tuple[str, Knob | None]:
        """The least change that makes a step fit in `budget` bytes, with the fastest policy then;
        first why, if that is plain. `is_auto`: the run will choose its policy by itself."""
        why, state, shards = "", self.state(args), None
        if state >= budget:
            each = f" in each of {self.shards} processes" if self.shards > 1 else ""
            why = (
                f"weights, gradients and {optimizer_name(args)}'s state alone take "
                f"{format_bytes(state)}{each}, more than the {format_bytes(budget)} that tensors "
                "may take: "
            )
        if self.ddp and self.processes > 1:
            shards = replace(self, ddp=False, shards=self.processes, made={}, largest={})
        groups = self.shards == 1 and args.n_layers > 1
        knob = nearest(args, self.device.type, budget, self, shards, groups)
        if knob and not is_auto:
            then = knob.change(args)
            if not recompute_of(then).offload:
                of_whom = shards if shards and knob.trainer else self
                knob = knob.with_policy(args, of_whom.pick(then, budget).config.recompute)
        return why, knob


def choose_recompute(plans: Plans, args: argparse.Namespace, room: Room) -> StepMemory:
    """What `auto` takes. Raises UsageError, with what would fit, if nothing does."""
    state, budget = plans.state(args), room.safe or 0
    smallest = f"above {format_bytes(state)}"
    if state < budget:
        step = plans.pick(args, budget)
        if step.peak <= budget:
            return step
        smallest = f"{format_bytes(step.peak)} ({step.config.recompute})"
    asked = args.use_activation_checkpoint
    flag = f"--use-activation-checkpoint {asked}" if room.is_free else "--memory-budget"
    most = asked.replace("auto", "full")
    most = argparse.Namespace(**vars(args) | {"use_activation_checkpoint": most})
    why, knob = plans.way_out(most, budget, is_auto=True)
    fits = f"{knob.command(most)} fits ({knob.words})" if knob else SMALLER
    raise UsageError(
        f"{flag}: tensors may take {room}, but the smallest peak is {smallest}; {why}{fits}"
    )


def check_room(
    plans: Plans, args: argparse.Namespace, process: OneProcess, peak: int, held: int
) -> str:
    """A line of warning if `peak` bytes are more than tensors may take of what is free now; else
    nothing.

    Raises TooLarge if they are more than the device has in all.
    """
    device, processes = process.device, process.processes_on_device
    total, own = total_memory(device), own_memory() - held if device.type == "cpu" else 0
    try:
        room = room_on(device, None, processes, held)
    except UsageError:  # nobody knows
        return ""
    budget = room.safe or 0
    need = f"{of_each(processes)}{format_bytes(peak)} predicted"
    has = f"the {'GPU' if device.type == 'cuda' else 'machine'} has {format_bytes(total or 0)}"
    if total is not None and processes * (peak + own) > total:
        beside = f" beside the {format_bytes(own)} that Python, PyTorch and data take"
        raise too_large(plans, args, budget, need + beside * bool(own), has)
    if peak <= budget:
        return ""
    in_all = f"; {has} in all" if total else ""
    advice = what_to_try(plans, args, budget)
    return f"\nwarning  {need}, but tensors may take {room}{in_all}; {advice}"


def check_host(
    plans: Plans, args: argparse.Namespace, process: OneProcess, step: StepMemory, held: int
) -> str:
    """As `check_room`, of what offload takes of the CPU's memory, if that is not the device."""
    cpu, processes = torch.device("cpu"), process.processes_here
    if plans.host is None or step.host <= plans.host:
        return ""
    total, own = total_memory(cpu), own_memory() - held
    need = f"{of_each(processes)}{format_bytes(step.host)} of CPU memory for +offload"
    on_device = room_on(process.device, None, process.processes_on_device).safe or 0
    if total is not None and processes * (step.host + own) > total:
        has = f"the machine has {format_bytes(total)}"
        raise too_large(plans, args, on_device, need, has)
    room = room_on(cpu, None, processes, held)
    advice = what_to_try(plans, args, on_device)
    return f"\nwarning  {need}, but tensors may take {room}; {advice}"


def of_each(processes: int) -> str:
    return f"{processes} processes, each " if processes > 1 else ""


def too_large(plans: Plans, args: argparse.Namespace, budget: int, need: str, has: str) -> TooLarge:
    now = f"out of memory before the first step: {need}, {has}; with {settings(args)}"
    return TooLarge(f"{now}; {what_to_try(plans, args, budget)}")


def what_to_try(plans: Plans, args: argparse.Namespace, budget: int) -> str:
    """With which a step fits in `budget` bytes."""
    why, knob = plans.way_out(args, budget)
    way_out = f"{knob.command(args)} ({knob.words}), which fits" if knob else SMALLER
    return f"{why}try {way_out}"


def describe_plan(planner: Planner, chosen: MiniGPTConfig, batch_size: int) -> str:
    """Predicted memory of a step as chosen, beside that without recompute."""
    steps = {"without recompute": planner.step(batch_size, recompute="none")}
    if chosen.recompute != "none":
        steps = {chosen.recompute: planner.step(batch_size, **asdict(chosen))} | steps
    words = [
        f"{name}: peak {format_bytes(step.peak)}, backward keeps {format_bytes(step.kept)}"
        for name, step in steps.items()
    ]
    return "; ".join(words) + " (predicted)"


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
    # All go by one clock, that of process 0; and by the memory of the one that has least of it.
    card = process.exchange(process.by_first(lambda: clock_card(args, process.device)))[0]
    plans = Plans(
        config.vocab_size,
        process.device,
        precision,
        process.keeps_gradients,
        process.world_size,
        process.shards,
        host_room(process.device, process.processes_here, held),
        card,
    )
    words = ""
    if args.use_activation_checkpoint in AUTO:
        mine = room_on(process.device, args.memory_budget, process.processes_on_device, held)
        room = replace(mine, budget=min(process.exchange(mine.budget or 0)))
        config = choose_recompute(plans, args, room).config
        least = f"the least time (predicted for {card.name})" if card else "the least"
        words = f"auto takes {config.recompute}: {least} that fits in "
        words += f"{room}\nmemory   "
    told = process.by_first(lambda: predict(plans, args, process, config, held))
    said, peaks = told or ("", None)
    return Plan(config, words + said, peaks)


def predict(
    plans: Plans, args: argparse.Namespace, process: OneProcess, config: MiniGPTConfig, held: int
) -> tuple[str, Predicted | None]:
    """What a step will need; a warning if that is more than is free. Raises TooLarge."""
    try:
        check_room(plans, args, process, plans.state(args), held)  # before anything is simulated
        planner = plans.planner(args)
        words = describe_plan(planner, config, args.batch_size)
        step = planner.step(args.batch_size, **asdict(config))
        words += check_room(plans, args, process, step.peak, held)
        words += check_host(plans, args, process, step, held)
        plain = planner.step(args.batch_size, recompute="none").peak
        return words, Predicted(step.peak, plain)
    except TooLarge:
        raise
    except Exception as error:  # an aside: where fake tensors do not work, train anyway
        return f"the peak could not be predicted ({type(error).__name__})", None
