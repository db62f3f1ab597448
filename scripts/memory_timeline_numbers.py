"""The numbers of scripts/memory_timeline.py's pictures: predicted, recorded or read from a file."""

import argparse
import json
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import profile, record_function

from model import MiniGPT
from planner import Card
from planner.choose import RUNGS
from planner.formulas import step_flops
from planner.step import Planner, follow
from planner.timeline import StepMemory
from scripts.allocator_trace import allocations, trace_events
from trainer.device import choose_device
from trainer.flags import UsageError
from trainer.optimizer import make_optimizer

PHASES = ("forward", "head", "backward", "optimizer")
# As the pictures name them -> what `Planner.step` is told.
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {"recompute": "none", "loss_chunks": 1},  # what every tutorial does
    **{rung["recompute"]: rung for rung in RUNGS if "recompute_group" not in rung},
    "full in groups of 2": {"recompute": "full", "recompute_group": 2},
}
PANELS = {  # of the timeline; --measure records these
    "plain": "all logits at once",
    "none": "the head in chunks of tokens",
    "cheap": "pointwise ops recomputed",
    "full": "blocks recomputed",
}
MIXED = ("cheap", "mlp", "full")  # the frontier has them in a part of the blocks, too
BARS = ("plain", "none", "cheap", "mlp", "full")


def bar_batches(batch_size: int) -> list[int]:
    """What the bars show beside the batch that was asked for: a quarter of it."""
    return sorted({max(1, batch_size // 4), batch_size})


def mixes(planner: Planner, name: str) -> list[dict[str, Any]]:
    """From `none` to the policy in all blocks, by quarters."""
    quarters = sorted({planner.config.n_layers * i // 4 for i in (1, 2, 3)} - {0})
    parts = [{"recompute": name, "recompute_layers": n} for n in quarters]
    return [POLICIES["none"], *parts, POLICIES[name]]


def ways(planner: Planner, batch_size: int) -> list[tuple[int, dict[str, Any]]]:
    """All that the three pictures ask the planner for: (sequences, what `Planner.step` is told)."""
    wanted = [(batch_size, memory) for memory in POLICIES.values()]
    wanted += [(batch_size, memory) for name in MIXED for memory in mixes(planner, name)]
    wanted += [(size, POLICIES[name]) for size in bar_batches(batch_size) for name in BARS]
    return [way for i, way in enumerate(wanted) if way not in wanted[:i]]


def n_parameters(planner: Planner) -> int:
    return sum(parameter.numel() for parameter in planner.model.parameters())


def n_state_bytes(planner: Planner) -> int:
    """Of weights, gradients and moments (and of AdamW's step counts)."""
    stored = planner.optimizer.state.values()
    return 8 * n_parameters(planner) + sum(t.nbytes for of_one in stored for t in of_one.values())


def relative_flops(step: StepMemory) -> float:
    """Of the step's matrix products, in units of those without recompute."""
    needed, replayed = step_flops(step.config, step.seq_len)
    return (needed + replayed) / needed


@dataclass(frozen=True)
class Cost:
    """What a step of `batch_size` sequences costs, in units of the one without recompute: seconds
    on a card, or, without one, FLOPs."""

    planner: Planner
    batch_size: int
    card: Card | None = None
    compiled: bool = False

    def __call__(self, step: StepMemory) -> float:
        if self.card is None:
            return relative_flops(step)
        none = self.planner.step(self.batch_size, **POLICIES["none"])
        return step.seconds(self.card, self.compiled) / none.seconds(self.card, self.compiled)

    @property
    def unit(self) -> str:
        return "FLOPs" if self.card is None else "time"

    @property
    def words(self) -> str:
        if self.card is None:
            return "FLOPs of a step, against none"
        compiled = ", compiled" if self.compiled else ""
        return f"predicted time of a step, against none ({self.card.name}{compiled})"


def flops_done(step: StepMemory) -> np.ndarray:
    """(operators + 1,) when each operator begins, in the units of `relative_flops`.

    A phase is as wide as its FLOPs are many, and its operators share the width. The optimizer has
    no matrix products; a fiftieth makes it visible.
    """
    needed, replayed = step_flops(step.config, step.seq_len)
    head = 6 * step.config.vocab_size * step.config.d_model  # forward and backward
    forward = (needed - head) / 3
    widths = np.array([forward, head, 2 * forward + replayed, needed / 50]) / needed
    starts = [step.phase(name).start for name in PHASES]
    n = len(step.timeline)
    return np.interp(np.arange(n), [*starts, n - 1], [0, *widths.cumsum()])


Points = dict[str, tuple[float, int]]  # name -> (cost of a step, bytes of its peak)
# Of one real step, by the allocator itself: (when, as in `flops_done`; bytes in use from then on).
Record = tuple[np.ndarray, np.ndarray]


class Marks:
    """What `planner.step.follow` tells a tracker, written into a profile: here a part begins."""

    phase = ""

    def enter(self, phase: str, block: int | None = None) -> None:
        self.phase = phase
        with record_function("## part"):
            pass


def record_step(planner: Planner, step: StepMemory, args: argparse.Namespace) -> Record:
    """Do what `Planner.simulate` pretends to do, on the device, under PyTorch's profiler.

    It notes each allocation, each release and their times. To stand over the prediction, whose
    unit is no time, the record is stretched part by part; heights stay as they were noted.
    """
    device = choose_device(args.device)
    marks: Any = Marks()
    model = MiniGPT(step.config).to(device).train()
    optimizer = make_optimizer(model, args, device, planner.precision)
    ids = torch.randint(step.config.vocab_size, (2, step.batch_size, step.seq_len), device=device)
    enabled = planner.precision != torch.float32
    autocast = torch.autocast(
        device.type, planner.precision if enabled else None, enabled=enabled, cache_enabled=False
    )

    def micro_batch() -> None:
        marks.enter("forward")
        with autocast:
            loss = model(*ids)
        loss.backward()

    def update() -> None:
        marks.enter("optimizer")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    micro_batch()
    update()  # the first one makes AdamW's moments
    state = chain(*(moments.values() for moments in optimizer.state.values()))
    before = ids.nbytes + sum(tensor.nbytes for tensor in chain(model.parameters(), state))
    if device.type == "cuda":  # which rounds up, and has room to work in
        before = torch.cuda.memory_allocated(device)
    with follow(model, marks), profile(profile_memory=True) as profiler:
        if planner.accumulate:
            micro_batch()
        micro_batch()
        update()
    events = trace_events(profiler)
    parts = [operator for operator, phase, _ in step.places if phase]
    begun = [event["ts"] for event in events if event["name"] == "## part"][-len(parts) :]
    times, changes = np.array(allocations(events, device.type)).T
    flops = np.interp(times, [*begun, times[-1]], flops_done(step)[[*parts, -1]])
    this_step = times >= begun[0]
    return flops[this_step], before + changes.cumsum()[this_step]


def load_measured(args: argparse.Namespace) -> tuple[Points, str]:
    """(name -> (seconds, bytes), where and when) of this batch size, from a benchmark's file.

    Raises UsageError.
    """
    points: Points = {}
    file = args.measured
    try:
        content = json.loads(file.read_text())
        about = f"measured on {content['device']}, torch {content['torch']}, {content['date']}"
        for row in content["rows"]:
            if row["batch_size"] == args.batch_size and row["peak_bytes"] is not None:
                name = " ".join(filter(None, [row.get("peer"), row.get("name", row["policy"])]))
                points[name] = float(row["step_s"]), int(row["peak_bytes"])
    except OSError as error:
        raise UsageError(f"--measured {file}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"--measured {file} is not scripts.benchmark's JSON ({reason})") from None
    if not points:
        raise UsageError(f"--measured {file} has no row with --batch-size {args.batch_size}")
    return points, about
