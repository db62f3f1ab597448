"""Choose how a run spends its memory, before it starts: `--use-activation-checkpoint auto`.

memory.py tells what a step would take; here the cheapest way that fits is picked, put into words,
or, if nothing fits, the nearest thing that would.
"""

import argparse
import math
import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from model import RECOMPUTE_POLICIES, MiniGPT, MiniGPTConfig
from planner.formulas import recompute_cost
from planner.step import Planner, StepMemory
from trainer.flags import UsageError
from trainer.metrics import format_bytes

if TYPE_CHECKING:  # for the reader and the type checker only: imports point the other way
    from trainer.run import OneProcess

MakePlanner = Callable[[argparse.Namespace], Planner]


def make_planner(
    args: argparse.Namespace,
    config: MiniGPTConfig,
    *,
    device_type: str,
    precision: torch.dtype,
    make_optimizer: Callable[[MiniGPT], torch.optim.Optimizer],
    ddp: bool,
) -> Planner:
    """The planner of the run that the flags ask for."""
    return Planner(
        config,
        args.seq_len,
        precision=precision,
        make_optimizer=make_optimizer,
        device_type=device_type,
        accumulate=args.grad_accum_steps > 1,
        ddp=ddp,
    )


RUNGS: list[dict[str, Any]] = [
    {"recompute": "none", "offload_activations": False},  # (there is nothing to offload)
    *({"recompute": policy} for policy in RECOMPUTE_POLICIES[1:]),
    {"recompute": "full", "recompute_group": 2},
]


def pick_recompute(planner: Planner, batch_size: int, budget: int) -> StepMemory:
    """The cheapest way to recompute whose peak stays within `budget` bytes.

    Cheapest: the fewest FLOPs of matrix products done twice, then the least of anything replayed. A
    policy stops after as many layers as are needed. If nothing fits, the smallest peak is returned.
    """
    config, n_layers = planner.config, planner.config.n_layers
    rungs = [{"recompute_group": 1, "recompute_layers": None, **rung} for rung in RUNGS]
    rungs.sort(key=lambda rung: recompute_cost(replace(config, **rung), planner.seq_len))
    smallest = best = planner.step(batch_size, **rungs[0])  # none
    if best.peak <= budget:
        return best
    for rung in rungs[1:]:

        def first_layers(n: int, rung: dict[str, Any] = rung) -> dict[str, Any]:
            return {**rung, "recompute_layers": None if n == n_layers else n}

        def cost(n: int) -> tuple[float, int]:
            return recompute_cost(replace(config, **first_layers(n)), planner.seq_len)

        def peak(n: int) -> int:
            return planner.step(batch_size, **(first_layers(n) if n else rungs[0])).peak

        most = n_layers
        if best.peak <= budget:  # only what is cheaper is of interest now
            most = bisect_left(
                range(1, n_layers + 1), recompute_cost(best.config, planner.seq_len), key=cost
            )
        if most > 0 and peak(most) <= budget:
            best = planner.step(batch_size, **first_layers(fewest_layers(peak, most, budget)))
        elif most == n_layers:
            smallest = min(smallest, planner.step(batch_size, **rung), key=lambda step: step.peak)
    return best if best.peak <= budget else smallest


def fewest_layers(peak: Callable[[int], int], most: int, budget: int) -> int:
    """The first n in 1..most with peak(n) within the budget; n = 0 is over it, `most` is not.

    The peak falls with n, nearly along a line: so interpolate, and look on both sides.
    """
    low, high = 0, most
    while high - low > 1:
        share = (peak(low) - budget) / (peak(low) - peak(high))
        n = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
        low, high = (low, n) if peak(n) <= budget else (n, high)
    return high


def free_memory(device: torch.device) -> int:
    """Bytes that tensors can still take on the device. Raises UsageError if nobody knows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):  # not Linux: what is built in, as an upper limit
        if not hasattr(os, "sysconf"):
            raise UsageError("--memory-budget: this system does not tell what is free") from None
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:  # a container may have less than the machine
        limit, used = (
            int(Path("/sys/fs/cgroup", name).read_text())
            for name in ("memory.max", "memory.current")
        )
        free = min(free, limit - used)
    except (OSError, ValueError):  # none, or "max"
        pass
    return free


def choose_recompute(
    planner: Planner, make: MakePlanner, args: argparse.Namespace, budget: int
) -> StepMemory:
    """What `auto` takes. `make` plans for other flags, in case nothing fits with these.

    Raises UsageError, with the nearest thing that would fit, if no policy does.
    """
    step = pick_recompute(planner, args.batch_size, budget)
    if step.peak <= budget:
        return step
    limit = f"--memory-budget {format_bytes(budget)}"
    if args.memory_budget is None:
        limit = f"--use-activation-checkpoint auto: {format_bytes(budget)} are free"
    raise UsageError(
        f"{limit}, but the smallest peak is {format_bytes(step.peak)} "
        f"({describe_recompute(step.config)}); {way_out(make, args, step, budget)}"
    )


def way_out(make: MakePlanner, args: argparse.Namespace, step: StepMemory, budget: int) -> str:
    """The nearest thing to these flags that fits, when recompute is not enough."""

    def changed(**flags: Any) -> argparse.Namespace:
        return argparse.Namespace(**{**vars(args), **flags})

    names = ("recompute", "recompute_group", "recompute_layers", "offload_activations")
    memory = {name: getattr(step.config, name) for name in names}
    smaller = [n for n in range(args.batch_size - 1, 0, -1) if args.batch_size % n == 0]
    planner = make(changed(grad_accum_steps=2))  # any number: gradients are there during forward
    for size in smaller:
        if planner.step(size, **memory).peak <= budget:
            steps = args.grad_accum_steps * args.batch_size // size
            return f"--batch-size {size} --grad-accum-steps {steps} fits (the same sequences)"
    planner = make(args)
    if not planner.on_cpu and memory["recompute"] != "none":
        offloaded = memory | {"offload_activations": True}
        if planner.step(args.batch_size, **offloaded).peak <= budget:
            return "--use-activation-checkpoint --offload-activations fits"
    seq_len = args.seq_len // 2
    while seq_len >= 8:
        planner = make(changed(seq_len=seq_len, grad_accum_steps=2))
        if planner.step(1, **memory).peak <= budget:
            steps = args.grad_accum_steps * args.batch_size
            return f"--seq-len {seq_len} --batch-size 1 --grad-accum-steps {steps} fits"
        seq_len //= 2
    state = sum(step.timeline[-1]) + sum(p.nbytes for p in planner.model.parameters())
    return (
        f"weights, gradients and AdamW's state alone take {format_bytes(state)}: "
        "a smaller --d-model, --n-layers or vocabulary"
    )


def describe_recompute(config: MiniGPTConfig) -> str:
    """ "cheap in 7 of 12 blocks" """
    words = config.recompute
    if config.recompute_group > 1:
        words += f" in groups of {config.recompute_group}"
    if 0 < config.n_recomputed < config.n_layers:
        words += f" in {config.n_recomputed} of {config.n_layers} blocks"
    return words + (", offloaded" if config.offload_activations else "")


def recompute_flags(config: MiniGPTConfig) -> list[str]:
    """What to pass to a trainer to get the same."""
    flags = ["--use-activation-checkpoint", config.recompute]
    if config.n_recomputed not in (0, config.n_layers):
        flags += ["--recompute-layers", str(config.n_recomputed)]
    if config.recompute_group > 1:
        flags += ["--recompute-group", str(config.recompute_group)]
    return flags + ["--offload-activations"] * config.offload_activations


def describe_plan(planner: Planner, chosen: MiniGPTConfig, batch_size: int) -> str:
    """Predicted memory of a step as chosen, beside that without recompute."""
    none = planner.step(batch_size, **dict(RUNGS[0], recompute_group=1, recompute_layers=None))
    parts = [(none, "without recompute")]
    if chosen.recompute != "none":
        parts.insert(0, (planner.step(batch_size, **asdict(chosen)), describe_recompute(chosen)))
    return (
        "; ".join(
            f"{name}: peak {format_bytes(step.peak)}, backward keeps {format_bytes(step.kept)}"
            for step, name in parts
        )
        + " (predicted)"
    )


def default_budget(device: torch.device, processes: int) -> int:
    """What tensors may take if nobody says: most of what is free, shared by `processes`.

    Not all of it: kernels need room to work in, and an allocator cannot use every gap.
    """
    return int(0.9 * free_memory(device) / processes)


def plan_memory(
    args: argparse.Namespace,
    process: "OneProcess",
    config: MiniGPTConfig,
    precision: torch.dtype,
    make_optimizer: Callable[[MiniGPT], torch.optim.Optimizer],
) -> tuple[MiniGPTConfig, str]:
    """The config, with what `auto` takes, and in words what memory a step will need.

    Raises UsageError if `auto` finds nothing that fits.
    """
    make = partial(
        make_planner,
        config=config,
        device_type=process.device.type,
        precision=precision,
        make_optimizer=make_optimizer,
        ddp=process.ddp,
    )
    words, planner = "", None
    if args.use_activation_checkpoint == "auto":
        planner = make(args)
        budget = args.memory_budget or default_budget(process.device, process.processes_on_device)
        config = choose_recompute(planner, make, args, budget).config
        words = f"auto takes {describe_recompute(config)}: the least that fits "
        words += f"{format_bytes(budget)}\nmemory   "
    if process.rank > 0:
        return config, words
    try:
        words += describe_plan(planner or make(args), config, args.batch_size)
    except Exception as error:  # an aside: where fake tensors do not work, train anyway
        words += f"the peak could not be predicted ({type(error).__name__})"
    return config, words


def next_knob(args: argparse.Namespace, device: torch.device | None, way_back: str | None) -> str:
    """The settings that memory ran out with, and the next change: what helps most at least cost.

    `device`: None if the run was not even set up. `way_back`: how to go on from what was saved; all
    changes but the last leave a run that can: the same sequences make the same step.
    """
    policy = args.use_activation_checkpoint
    now = f"--batch-size {args.batch_size} --seq-len {args.seq_len}, recompute {policy}; try"
    back = f"; {way_back}" if way_back else ""
    if device is None:
        return f"{now} a smaller model (--n-layers, --d-model), or less data (--max-tokens)"
    if args.loss_chunks == 1:
        return f"{now} --loss-chunks 0 (never holds all logits, costs nothing){back}"
    if policy != "full" or args.recompute_layers is not None:
        knob = "--use-activation-checkpoint" + ("" if policy == "none" else " full")
        knob += "" if args.recompute_layers is None else " without --recompute-layers"
        return f"{now} {knob} (same results, some more time){back}"
    if args.batch_size > 1:
        part = next(n for n in range(2, args.batch_size + 1) if args.batch_size % n == 0)
        size, steps = args.batch_size // part, args.grad_accum_steps * part
        return f"{now} --batch-size {size} --grad-accum-steps {steps} (the same sequences){back}"
    if device.type == "cuda" and not args.offload_activations:
        return f"{now} --offload-activations{back}"
    return f"{now} a shorter --seq-len or a smaller model"
