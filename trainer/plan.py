"""The planner, asked by flags: what `auto` takes, what a run will need, what would fit.

planner/ tells what a step takes and which way to recompute is the cheapest; here are the flags that
ask, what is free on this machine, and the sentences for the user.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.tokenizer import load_tokenizer
from model import MiniGPTConfig
from planner import Planner, StepMemory
from planner.choose import RUNGS, describe_recompute, pick_recompute

from .flags import UsageError, choose_device, choose_precision
from .metrics import format_bytes
from .process import OneProcess
from .run import make_optimizer

MakePlanner = Callable[[argparse.Namespace], Planner]


def target(args: argparse.Namespace, processes: int = 1) -> tuple[str, torch.dtype, int | None]:
    """What is planned for: (kind of device, precision, budget in bytes or None).

    A device that is not there can be planned for as well, only not be asked how much it has free.
    `processes`: on one machine.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if there.get(args.device, True):
        device = choose_device(args.device)
        share = processes if device.type == "cpu" else 1
        budget = args.memory_budget or default_budget(device, share)
        return device.type, choose_precision(args, device), budget
    precision = torch.float32 if args.no_amp or args.device == "mps" else torch.bfloat16
    if args.amp_dtype != "auto":
        precision = getattr(torch, args.amp_dtype)
    return args.device, precision, args.memory_budget


def vocabulary(args: argparse.Namespace) -> int:
    """Ids of the tokenizer that the run would have, without its data. Raises DataError."""
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
) -> Planner:
    """The planner of the run that the flags ask for, on a device that need not be there."""
    return Planner(
        config,
        args.seq_len,
        precision=precision,
        make_optimizer=partial(make_optimizer, args=args, device=device),
        device_type=device.type,
        accumulate=args.grad_accum_steps > 1,
        ddp=ddp,
    )


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


def default_budget(device: torch.device, processes: int) -> int:
    """What tensors may take if nobody says: most of what is free, shared by `processes`.

    Not all of it: kernels need room to work in, and an allocator cannot use every gap.
    """
    return int(0.9 * free_memory(device) / processes)


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


def plan_memory(
    args: argparse.Namespace,
    process: OneProcess,
    config: MiniGPTConfig,
    precision: torch.dtype,
) -> tuple[MiniGPTConfig, str]:
    """The config, with what `auto` takes, and in words what memory a step will need.

    Raises UsageError if `auto` finds nothing that fits.
    """
    make = partial(
        make_planner,
        config=config,
        device=process.device,
        precision=precision,
        ddp=process.keeps_gradients,
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
