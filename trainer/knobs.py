"""Out of memory, or about to be: what to change. One list, the least cost first.

A run that did run out takes the first that changes anything (`next_knob`); a prediction can ask the
planner, and takes the first that fits (`nearest`).
"""

import argparse
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from model import MiniGPTConfig

from .flags import SHAPES

USUAL = ("use_activation_checkpoint", "full")  # which needs no word after the flag
Count = Callable[[argparse.Namespace], int]  # what a run with these flags takes, in bytes


@dataclass(frozen=True)
class Knob:
    """Flags to change, all at a time."""

    flags: dict[str, Any]  # by their names in args; None = leave it out
    words: str  # what it costs
    trainer: str = ""  # another one to start, if it takes that

    def command(self, args: argparse.Namespace) -> str:
        """ "--batch-size 3 --grad-accum-steps 4" """
        words, without = [self.trainer] * bool(self.trainer), []
        for name, value in self.flags.items():
            flag = "--" + name.replace("_", "-")
            if value is None:
                without += [flag] * (getattr(args, name) is not None)
            elif value is False:
                words.append(f"--no-{flag[2:]}")
            elif value is True or (name, value) == USUAL and getattr(args, name) == "none":
                words.append(flag)
            else:
                words.append(f"{flag} {value}")
        return " ".join(words) + (f" without {' '.join(without)}" if without else "")

    def with_policy(self, args: argparse.Namespace, config: MiniGPTConfig) -> "Knob":
        """The same, but for the way to recompute, which is that of `config`."""
        rest = None if config.recompute_rest == "none" else config.recompute_rest
        policy = policy_flags(args, config.recompute, config.recompute_layers, rest)
        policy["recompute_group"] = config.recompute_group
        changed = {name: value for name, value in policy.items() if value != getattr(args, name)}
        others = {name: value for name, value in self.flags.items() if name not in policy}
        return replace(self, flags=changed | others)

    def change(self, args: argparse.Namespace) -> argparse.Namespace:
        """The flags with this change, and with the defaults that follow from it."""
        changed = argparse.Namespace(**vars(args) | self.flags)
        if "max_position_embeddings" not in args.typed and args.model is None:
            changed.max_position_embeddings = changed.seq_len
        if "d_ff" not in args.typed:
            changed.d_ff = 4 * changed.d_model
        return changed


@dataclass(frozen=True)
class Family:
    """Knobs of one kind, each of which takes less memory than the one before."""

    kept: dict[str, Any]  # flags that all of them change
    changes: Sequence[Any]  # what each of them changes besides: flags, or a value of `name`
    words: str
    name: str = ""

    def __len__(self) -> int:
        return len(self.changes)

    def __getitem__(self, i: int) -> Knob:
        change = self.changes[i]
        return Knob(self.kept | ({self.name: change} if self.name else change), self.words)


def policy_flags(
    args: argparse.Namespace, policy: str, layers: int | None = None, rest: str | None = None
) -> dict[str, Any]:
    """The flags that ask for a policy."""
    flags: dict[str, Any] = {"use_activation_checkpoint": policy}
    flags |= {"recompute_layers": layers, "recompute_rest": rest}
    if args.use_activation_checkpoint == "auto":
        flags |= {"memory_budget": None, "card": None}  # they are for auto
    return flags


def same_sequences(
    args: argparse.Namespace, device_type: str, groups: bool = False
) -> Iterator[Family]:
    """Knobs that leave the training what it is, each beside all the cheaper ones.

    `groups`: of two blocks as well, which take less in some models.
    """
    kept: dict[str, Any] = {}
    if args.loss_chunks == 1:
        kept = {"loss_chunks": 0}
        yield Family(kept, [{}], "never holds all logits, at about the same speed")
    if args.use_activation_checkpoint != "full" or args.recompute_layers is not None:
        kept = kept | policy_flags(args, "full")
        yield Family(kept, [{}], "same results, some more time")
    if groups and args.recompute_group == 1:
        yield Family(kept, [{"recompute_group": 2}], "same results, some more time")
    size, steps = args.batch_size, args.grad_accum_steps
    cuts = [n for n in range(2, size + 1) if size % n == 0]
    smaller = [{"batch_size": size // n, "grad_accum_steps": steps * n} for n in cuts]
    yield Family(kept, smaller, "the same sequences")
    if device_type == "cuda" and not args.offload_activations:
        kept = kept | {"offload_activations": True}
        yield Family(kept, [{}], "what backward needs waits in CPU memory")
        yield Family(kept, smaller, "the same sequences, what backward needs waits in CPU memory")


def other_sequences(args: argparse.Namespace, device_type: str) -> Iterator[Family]:
    """Knobs that change what the model learns from, each beside all that do not."""
    *_, last = same_sequences(args, device_type)
    moved = {"offload_activations": True} if "offload_activations" in last.kept else {}
    stay = {name: value for name, value in last.kept.items() if name not in moved}
    size, steps = args.batch_size, args.grad_accum_steps
    if steps == 1:  # else gradients are there during forward already
        words = "fewer sequences a step: to accumulate them, gradients would have to wait"
        for kept in (stay, last.kept) if moved else (stay,):
            yield Family(kept, range(size - 1, 0, -1), words, "batch_size")
    kept = last.kept | ({"batch_size": 1, "grad_accum_steps": steps * size} if size > 1 else {})
    halves = [args.seq_len >> n for n in range(1, args.seq_len.bit_length() - 3)]  # down to 8
    yield Family(kept, halves, "the model sees less at a time", "seq_len")


def next_knob(args: argparse.Namespace, device: torch.device | None, way_back: str | None) -> str:
    """The settings that memory ran out with, and the next change: what helps most at least cost.

    `device`: None if the run was not even set up. `way_back`: how to go on from what was saved; all
    changes but the last leave a run that can: the same sequences make the same step.
    """
    now, back = settings(args), f"; {way_back}" if way_back else ""
    if device is None:
        return f"{now}; try a smaller model (--n-layers, --d-model), or less data (--max-tokens)"
    for family in same_sequences(args, device.type):
        if family:
            return f"{now}; try {family[0].command(args)} ({family.words}){back}"
    return f"{now}; try a shorter --seq-len or a smaller model"


def settings(args: argparse.Namespace) -> str:
    """Of the flags, those that a step's memory depends on most."""
    policy = args.use_activation_checkpoint
    return f"--batch-size {args.batch_size} --seq-len {args.seq_len}, recompute {policy}"


def nearest(
    args: argparse.Namespace,
    device_type: str,
    budget: int,
    state: Count,
    peak: Count,
    of_shards: tuple[Count, Count] | None = None,
    groups: bool = False,
) -> Knob | None:
    """The least change to these flags with which a step fits in `budget` bytes, if there is one.

    `state` tells the bytes of weights, gradients and optimizer, at once; `peak` asks the planner.
    `of_shards`: both of one of the processes that could hold the model between them.
    """

    def fits(flags: argparse.Namespace) -> bool:
        return peak(flags) <= budget

    if state(args) < budget:  # else none of these helps
        same = same_sequences(args, device_type, groups)
        families = chain(same, other_sequences(args, device_type))
        if knob := first_that_fits(args, families, fits):
            return knob
    if of_shards and (knob := with_shards(args, device_type, budget, *of_shards)):
        return knob
    for flags, implied, words in (*less_moments(args), *smaller_models(args)):
        less = Knob(flags | implied, "").change(args)
        if state(less) < state(args):
            if knob := as_it_is_or_less(less, device_type, budget, state, peak):
                return Knob(flags | knob.flags, words)
    return None


def as_it_is_or_less(
    args: argparse.Namespace, device_type: str, budget: int, state: Count, peak: Count
) -> Knob | None:
    """No change, or the least that leaves the training what it is, with which a step fits."""
    if state(args) >= budget:
        return None
    families = chain([Family({}, [{}], "")], same_sequences(args, device_type))
    return first_that_fits(args, families, lambda flags: peak(flags) <= budget)


# Flags with which weights, gradients and moments take less, what they imply, what that costs.
LessState = tuple[dict[str, Any], dict[str, Any], str]


def less_moments(args: argparse.Namespace) -> Iterator[LessState]:
    """The least change to the training first."""
    half, muon = {"moments_dtype": "bfloat16"}, {"optimizer": "muon"}
    rounded, other = "moments rounded to bfloat16", "another optimizer"
    if args.moments_dtype == "float32":
        yield half, {}, rounded
    if args.optimizer == "adamw" and not args.resume:
        yield muon, {}, other
        yield muon | half, {}, f"{other}, {rounded}"


def smaller_models(args: argparse.Namespace) -> Iterator[LessState]:
    for name, shape in reversed(SHAPES.items()):
        yield model_flags(args, name), shape, f"a smaller model, {name}"


def with_shards(
    args: argparse.Namespace, device_type: str, budget: int, state: Count, peak: Count
) -> Knob | None:
    """train_fsdp.py, with the least change that fits then; `state`, `peak`: of one of its shards.

    It is no knob like the others: it only helps where there are several processes.
    """
    kept: dict[str, Any] = {"recompute_group": 1} if args.recompute_group > 1 else {}
    kept |= {"compress_gradients": False} if args.compress_gradients else {}
    dealt = "the processes hold the model between them"
    without = Knob(kept, "").change(args)
    for flags, _, cost in ({}, {}, ""), *less_moments(without):
        less = Knob(flags, "").change(without)
        if knob := as_it_is_or_less(less, device_type, budget, state, peak):
            words = f"{dealt}; {cost}" if cost else dealt
            return Knob(kept | flags | knob.flags, words, "train_fsdp.py")
    return None


def model_flags(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """The flags that ask for the shape called `name` instead of theirs."""
    if args.model and SHAPES[args.model].items() <= vars(args).items():
        return {"model": name}
    shape = SHAPES[name]
    return shape | ({"d_ff": 4 * shape["d_model"]} if "d_ff" in args.typed else {})


def first_that_fits(
    args: argparse.Namespace,
    families: Iterable[Family],
    fits: Callable[[argparse.Namespace], bool],
) -> Knob | None:
    for family in families:

        def fit(knob: Knob) -> bool:
            return fits(knob.change(args))

        if family and fit(family[-1]):  # somewhere it begins to fit, at the last one's the latest
            return family[bisect_left(family, True, hi=len(family) - 1, key=fit)]
    return None
