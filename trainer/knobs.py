"""Out of memory, or about to be: what to change. One list, the least cost first.

A run that did run out takes the first of it (`next_knob`); a prediction can ask the planner, and
takes the first that fits (`way_out` in plan.py).
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from memory import write
from memory.policies import sizes_of_chunks
from planner.choose import nested_groups

from .flags import AUTO, SHAPES, changed, flag, moot_chunks, recompute_of, words_of

Flags = argparse.Namespace
POLICY, FOR_AUTO = "use_activation_checkpoint", ("memory_budget", "card")
SLOWER = "same results, some more time"
SLOWEST = "same results, at most one more forward"
CHUNKED = "other rounding of six gradients a block"
SAME, MOVED = "the same sequences", "what backward needs waits in CPU memory"
FEWER = "fewer sequences a step: to accumulate them, gradients would have to wait"


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

    def with_policy(self, args: Flags, policy: str) -> "Knob":
        """The same, but for the way to recompute."""
        new = {} if policy == args.use_activation_checkpoint else {POLICY: policy}
        others = {name: value for name, value in self.flags.items() if name != POLICY}
        return replace(self, flags=new | others | moot_chunks(self.change(args), policy))

    def change(self, args: Flags) -> Flags:
        """The flags with this change, and with the defaults that follow from it."""
        shape = SHAPES[self.flags["model"]] if "model" in self.flags else {}
        then = changed(args, **shape | self.flags)
        if "max_position_embeddings" not in args.typed and args.model is None:
            then.max_position_embeddings = then.seq_len
        if "d_ff" not in args.typed:
            then.d_ff = 4 * then.d_model
        return then


def candidates(
    args: Flags, device_type: str, most: Callable[[Flags], int] | None = None, groups: bool = False
) -> Iterator[Knob]:
    """What can be changed, the least cost first, each beside all that is cheaper.

    `most` tells how many sequences fit with some flags; without it there are only knobs that leave
    the training what it is, or round otherwise. `groups`: of two blocks as well, which take less in
    some models.
    """
    size, kept = args.batch_size, dict[str, Any]()
    asked = recompute_of(args)
    full = asked._replace(policies=("full",) * args.n_layers)
    smaller = smaller_batches(args)
    if args.loss_chunks == 1:
        kept = {"loss_chunks": 0}
        yield Knob(kept, "never holds all logits, at about the same speed")
    if asked != full or args.use_activation_checkpoint in AUTO:
        kept = kept | {POLICY: write(full)}
        yield Knob(kept, SLOWER)
    if groups and full.group == 1:
        yield Knob(kept | {POLICY: write(full._replace(group=2))}, SLOWER)
    yield from (Knob(kept | batch, SAME) for batch in smaller)
    ways, smallest = [kept], smaller[-1] if smaller else {}
    nested = [] if full.nested or full.offload else nested_groups(args.n_layers)[-1:]
    yield from (Knob(kept | smallest | {POLICY: way}, SLOWEST) for way in nested)
    if device_type == "cuda" and not full.offload:
        kept = kept | {POLICY: write(full._replace(offload=True))}
        ways.append(kept)
        yield Knob(kept, MOVED)
        yield from (Knob(kept | batch, f"{SAME}, {MOVED}") for batch in smaller)
    if cuts_mlp(args):
        kept = kept | {"mlp_chunks": 0}
        yield Knob(kept | smallest, CHUNKED)
        yield from (Knob(kept | smallest | {POLICY: way}, CHUNKED) for way in nested)
    if most is None:
        return
    # (Of several micro-batches gradients are there during forward already.)
    if args.grad_accum_steps == 1 and size > 1:
        for way in ways:
            fewer = Knob(way | {"batch_size": size - 1}).change(args)
            if n := min(size - 1, most(fewer)):
                yield Knob(way | {"batch_size": n}, FEWER)
    kept = kept | smallest
    for n in range(1, args.seq_len.bit_length() - 3):  # down to 8 tokens
        yield Knob(kept | {"seq_len": args.seq_len >> n}, "the model sees less at a time")


def smaller_batches(args: Flags) -> list[dict[str, int]]:
    """The same sequences a step in micro-batches of fewer, the largest of them first."""
    size, steps = args.batch_size, args.grad_accum_steps
    cuts = (n for n in range(2, size + 1) if size % n == 0)
    return [{"batch_size": size // n, "grad_accum_steps": steps * n} for n in cuts]


def cuts_mlp(args: Flags) -> bool:
    """Would --mlp-chunks 0 cut what it does not cut yet?"""
    fresh = args.mlp_chunks == 1 and not args.compile and args.gather_dtype == "float32"
    return fresh and len(sizes_of_chunks(args.seq_len, args.d_ff, 0)) > 1


def less_moments(args: Flags) -> Iterator[Knob]:
    """With which moments take less; the least change to the training first."""
    half, muon = {"moments_dtype": "bfloat16"}, {"optimizer": "muon"}
    rounded, other = "moments rounded to bfloat16", "another optimizer"
    if args.moments_dtype == "float32":
        yield Knob(half, rounded)
    if args.optimizer == "adamw" and not args.resume:
        yield Knob(muon, other)
        yield Knob(muon | half, f"{other}, {rounded}")


def smaller_models(args: Flags) -> Iterator[Knob]:
    by_name = args.model and SHAPES[args.model].items() <= vars(args).items()
    for name, shape in reversed(SHAPES.items()):
        width = {"d_ff": 4 * shape["d_model"]} if "d_ff" in args.typed else {}
        yield Knob({"model": name} if by_name else shape | width, f"a smaller model, {name}")


def shards(args: Flags) -> Iterator[Knob]:
    """train_fsdp.py, alone or with less moments."""
    policy, kept = recompute_of(args), dict[str, Any]()
    if policy.group > 1 and not policy.nested:  # they are gathered block by block
        kept[POLICY] = write(policy._replace(group=1))
    kept |= {"compress_gradients": False} if args.compress_gradients else {}
    kept |= {"gather_dtype": "float32"} if args.gather_dtype == "bfloat16" else {}
    dealt = Knob(kept, "the processes hold the model between them", "train_fsdp.py")
    yield dealt
    for knob in less_moments(args):
        yield Knob(kept | knob.flags, f"{dealt.words}; {knob.words}", dealt.trainer)


def next_knob(
    args: Flags,
    device: torch.device | None,
    way_back: str | None,
    policy: str = "",
    is_least: bool = False,
) -> str:
    """The settings that memory ran out with, and the next change: what helps most at least cost.

    `device`: None if the run was not even set up. `way_back`: how to go on from what was saved; all
    changes but the last leave a run that can: the same sequences make the same step. `policy`: the
    one in use, if not as typed; `is_least`: no other is predicted to need less.
    """
    used = changed(args, use_activation_checkpoint=policy or args.use_activation_checkpoint)
    now, back = settings(used), f"; {way_back}" if way_back else ""
    if device is None:
        return f"{now}; try a smaller model (--n-layers, --d-model), or less data (--max-tokens)"
    for knob in candidates(used, device.type):
        if not is_least or knob.flags.keys() != {POLICY}:
            if policy and (is_least or POLICY not in knob.flags):
                knob = knob.with_policy(args, policy)
            return f"{now}; try {knob.command(args)} ({knob.words}){back}"
    return f"{now}; try a shorter --seq-len or a smaller model"


def settings(args: Flags) -> str:
    """Of the flags, those that a step's memory depends on most."""
    policy = args.use_activation_checkpoint
    return f"--batch-size {args.batch_size} --seq-len {args.seq_len}, recompute {policy}"
