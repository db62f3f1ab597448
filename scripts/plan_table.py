"""The ways to run a step that scripts/plan_memory.py compares: what each takes, and what it costs.

Three searches find them: the table of policies, the longest sequence (`longest_sequence`), the
fastest micro-batch (`search_settings`). `--at-peak` lists what is alive at a peak, by name: some
hundred tensors, but blocks are alike, so that they make a few dozen groups (`group_of` in
planner/record.py), and the largest nine of them are nearly all of it.
"""

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import mode
from typing import Any

from memory import recompute_plan
from planner import StepMemory
from planner.choose import nested_policies, uniform_steps
from planner.formulas import recompute_cost
from planner.op_recorder import Storage
from planner.record import ALIKE, StepRecord, code_of, group_of
from scripts.style import relative_flops
from trainer.flags import MAX_COUNT, to_argv, with_flags
from trainer.metrics import format_bytes
from trainer.plan import AFTER_RESTART, PlanRequest, next_policy

OFFLOADED = "full+offload"
STEP = 64  # tokens; lengths are multiples of it
TRIES = 6  # lengths, found by lines; then by halves
SETTINGS = 5  # shown of --all-knobs
LINES = 10  # of the list of what is alive


@dataclass(frozen=True)
class Candidate:
    """One way to run what was asked for, with the step that is simulated for it."""

    request: PlanRequest  # its flags ask for this way
    step: StepMemory
    seconds: float | None  # of a training step, all its micro-batches; None: no card
    tokens_per_s: float | None  # of all processes
    fits: bool | None  # without a margin; None: unknown
    fits_safely: bool  # and leaves the margin
    longest: int | None = None  # tokens of the longest sequence that fits; None: not asked

    @property
    def name(self) -> str:
        """The policy."""
        return self.step.config.recompute

    @property
    def offloaded(self) -> bool:
        return recompute_plan(self.step.config).offload

    @property
    def largest_batch(self) -> int | None:
        """Sequences that fit with the margin; None: unknown. (It takes some more simulations.)"""
        return (
            None if self.request.memory_budget.total_bytes is None else self.request.largest_batch
        )

    @property
    def replayed(self) -> float:
        """FLOPs done twice, in units of what the step needs."""
        args = self.request.args
        return relative_flops(self.step.config, args.seq_len, args.compile) - 1

    @property
    def cost(self) -> tuple[float, float]:
        """Smaller is better: time, then memory; without a card FLOPs done twice."""
        if self.seconds is None:
            return recompute_cost(self.step.config, self.step.seq_len)
        return self.seconds, self.step.peak

    def changes(self, args: argparse.Namespace) -> dict[str, Any]:
        """Flags to type instead of those in `args`. (Positions follow --seq-len by themselves,
        unless a model by name has its own.)"""
        own = vars(self.request.args)
        names = ["batch_size", "grad_accum_steps", "seq_len", "mlp_chunks"]
        names += ["max_position_embeddings"] * bool(args.model)
        found = {name: own[name] for name in names if own[name] != getattr(args, name)}
        return found | {"use_activation_checkpoint": self.name}

    def as_json(self, args: argparse.Namespace) -> dict[str, Any]:
        """A row of the JSON file; `flags` are to be typed instead of those in `args`."""
        step = self.step
        return {
            "name": self.name,
            "policy": self.name,
            "flags": to_argv(self.changes(args)),
            "batch_size": step.batch_size,
            "grad_accum_steps": self.request.args.grad_accum_steps,
            "seq_len": step.seq_len,
            "peak_bytes": step.peak,
            "at_peak": step.at_peak,
            "where": step.peak_location,
            "host_bytes": step.host_bytes,
            "kept_bytes": step.kept,
            "kept_bytes_per_block": step.kept_per_block,
            "replayed": self.replayed,
            "fits": self.fits,
            "fits_safely": None if self.fits is None else self.fits_safely,
            "largest_batch": self.largest_batch,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "longest_sequence_safely": self.longest,
        }


def candidate_of(request: PlanRequest, **flags: Any) -> Candidate:
    """Simulate the step that the request's flags ask for, with these changes."""
    request = request.with_args(with_flags(request.args, **flags))
    step, room, seconds, speed, fits = request.step, request.memory_budget, None, None, None
    if request.card:
        seconds, speed = request.seconds(step), request.tokens_per_s(step)
    if room.total_bytes is not None:
        fits = step.peak <= room.total_bytes and step.host_bytes <= (
            room.host_usable_bytes or math.inf
        )
    return Candidate(
        request, step, seconds, speed, fits, bool(fits) and step.peak <= request.usable_bytes
    )


# ---- the table


def policy_table(request: PlanRequest) -> list[Candidate]:
    """Every policy, and the cheapest that fits (a row of its own if it is a mix); for long
    sequences nested groups and lengths as well."""
    names, taken = [*uniform_steps(request.planner), OFFLOADED], request.pick_recompute().config
    if request.args.longest_sequence:
        names[-1:-1] = nested_policies(request.args.n_layers)
    if taken.recompute not in names:
        plan = recompute_plan(taken)
        before = OFFLOADED if plan.nested else plan.policies[0]
        names.insert(names.index(before), taken.recompute)
    ways = [candidate_of(request, use_activation_checkpoint=name) for name in names]
    if request.args.longest_sequence:
        ways = [replace(way, longest=longest_sequence(way.request)) for way in ways]
    return ways


def recommend(ways: list[Candidate]) -> Candidate | None:
    """The cheapest that fits and leaves a margin. Offload, whose copies no clock tells, is last."""
    safe = [way for way in ways if way.fits_safely]
    return min(safe, key=lambda way: (way.offloaded, way.cost), default=None)


def format_table(ways: list[Candidate], taken: Candidate | None) -> str:
    """Aligned columns; `taken` is marked."""
    fits = {True: "tight", False: "no", None: "?"}
    lines = []
    for way in ways:
        step, largest = way.step, way.largest_batch
        line = {" <": ">" * (way is taken), "policy<": way.name, "peak>": format_bytes(step.peak)}
        if way.seconds:
            line |= estimates(way, ways[0])
        else:
            line |= {
                "where<": step.peak_location,
                "kept a block>": format_bytes(step.kept_per_block),
                "FLOPs twice>": f"{way.replayed:.1%}",
            }
        line["fits<"] = "yes" if way.fits_safely else fits[way.fits]
        line["up to a batch of>"] = "?" if largest is None else f"{largest:,}"
        if way.longest is not None:
            line["longest sequence>"] = f"{way.longest:,}"
        lines.append(line)
    return align(lines)


def estimates(way: Candidate, first: Candidate) -> dict[str, str]:
    """Cells of a table with times, shown as estimates: that of the first row, and what the others
    are more. Of offloaded ways the clock knows all but the copies."""
    time, speed = way.seconds or 0, digits(3, way.tokens_per_s or 0)
    more = f"{time / (first.seconds or 1) - 1:+.0%}"
    if way.offloaded:
        return {"time>": f"> {more}", "tokens/s>": f"<{speed}"}
    return {"time>": f"~{format_time(time)}" if way is first else more, "tokens/s>": f"~{speed}"}


def describe_host(way: Candidate) -> str:
    """CPU memory that an offloaded way takes beside the GPUs; "": none."""
    processes, host = way.request.processes, way.step.host_bytes
    if way.request.device.type == "cpu" or not host:
        return ""
    several = f" in {processes} processes" * (processes > 1)
    return f"offload  pins {format_bytes(processes * host)} of CPU memory{several}"


def if_memory_runs_out(way: Candidate | None) -> Iterator[Candidate]:
    """Yield the ways that a run takes after `way`: each when memory has run out with the one before
    it. (With shards torchrun starts it again: --max-restarts.)"""
    if way and way.longest is None and way.request.args.on_out_of_memory == "deeper":
        request, share = way.request, AFTER_RESTART if way.request.shard_degree > 1 else 1
        while step := next_policy(request, way.name, share=share):
            way = candidate_of(request, use_activation_checkpoint=step.config.recompute)
            yield way


# ---- the longest sequence


def with_length(args: argparse.Namespace, seq_len: int) -> argparse.Namespace:
    """Flags for sequences of that length; positions grow with it, unless they were typed."""
    follows = "max_position_embeddings" not in args.typed and args.model is None
    positions = 0 if follows else args.max_position_embeddings
    return with_flags(args, seq_len=seq_len, max_position_embeddings=max(seq_len, positions))


def longest_sequence(request: PlanRequest) -> int:
    """Tokens of the longest sequence that fits and leaves the margin; 0: none does."""
    args = request.args

    def peak(n: int) -> int:
        return request.with_args(with_length(args, n * STEP)).step.peak

    if request.state_bytes > request.usable_bytes:
        return 0
    # Where attention is fused, tokens take as much in one sequence as in another.
    guess = request.largest_batch * args.seq_len // (args.batch_size * STEP)
    typed = "max_position_embeddings" in args.typed
    most = (args.max_position_embeddings if typed else MAX_COUNT) // STEP
    return STEP * most_that_fit(peak, request.state_bytes, request.usable_bytes, guess, most)


def most_that_fit(
    peak: Callable[[int], int], nothing: int, budget: int, guess: int, most: int
) -> int:
    """The largest n in 0..most with peak(n) within the budget, which is at least peak(0) =
    `nothing`. The peak grows with n, nearly along a line, so few of them need to be known."""
    low, high, tries = 0, most + 1, 0
    while high - low > 1:
        n = min(max(guess, low + 1), high - 1)
        found = peak(n)
        low, high = (n, high) if found <= budget else (low, n)
        guess = n * (budget - nothing) // max(found - nothing, 1)
        tries += 1
        if tries >= TRIES:  # it is no line
            guess = (low + high) // 2 if high <= most else 2 * low
    return low


# ---- all knobs


def search_settings(request: PlanRequest) -> list[Candidate]:
    """The fastest policy for each micro-batch into which the sequences of a step can be dealt out,
    the fastest first; none if none fits. (They are the same training: as many sequences a step, and
    policies change no result.)"""
    asked = request.args.batch_size
    sequences = asked * request.args.grad_accum_steps
    found: list[Candidate] = []
    for size in range(1, sequences + 1):
        if sequences % size:
            continue
        parts = {"batch_size": size, "grad_accum_steps": sequences // size}
        step = request.with_args(with_flags(request.args, **parts)).pick_recompute()
        if step.peak > request.usable_bytes:
            break
        found.append(
            candidate_of(request, **parts, use_activation_checkpoint=step.config.recompute)
        )
        # From some size on all are slower: they replay more.
        if size >= asked and found[-1].cost > min(way.cost for way in found):
            break
    return sorted(found, key=lambda way: way.cost)


def format_settings(settings: list[Candidate]) -> str:
    """The best few, the first one marked."""
    lines = [
        {
            " <": ">" * (way is settings[0]),
            "a step is<": "{grad_accum_steps} x {batch_size} x {seq_len:,} tokens".format_map(
                vars(way.request.args)
            ),
            "policy<": way.name,
            "peak>": format_bytes(way.step.peak),
            "time>": f"~{format_time(way.seconds or 0)}",
            "tokens/s>": f"~{digits(3, way.tokens_per_s or 0)}",
        }
        for way in settings[:SETTINGS]
    ]
    return align(lines)


# ---- what is alive at the peak


def record_step(request: PlanRequest, taken: Candidate | None) -> StepRecord:
    """The step with the policy that was typed, else the recommended one, else without recompute."""
    policy = request.args.typed_policy
    if policy is None and taken:
        request, policy = taken.request, taken.name
    return request.planner.record(request.args.batch_size, recompute=policy or "none")


def at_peak(record: StepRecord) -> list[dict[str, Any]]:
    """Groups, as the JSON file has them, the largest first. Their bytes are the peak, exactly."""
    found = defaultdict[tuple[str, str], list[Storage]](list)
    for storage in record.at_peak:
        found[group_of(storage)].append(storage)
    groups = [describe(name, storages) for (name, _), storages in found.items()]
    return sorted(groups, key=lambda group: -group["bytes"])


def describe(name: str, storages: list[Storage]) -> dict[str, Any]:
    """Describe storages that are equal but for their block, or all weights, say; at least one."""
    first, n = storages[0], len(storages)
    equal = len({(storage.shape, storage.dtype) for storage in storages}) == 1
    # The line where most of them were made; all weights, say, have none.
    line = "" if n > 1 and first.kind in ALIKE else mode(storage.line for storage in storages)
    return {
        "name": first.name if n == 1 else name,
        "kind": first.kind,
        "count": n,
        "bytes": sum(storage.nbytes for storage in storages),
        "shape": list(first.shape) if equal else None,
        "dtype": str(first.dtype).removeprefix("torch.") if equal else None,
        "line": line,
        "code": code_of(line) if line else "",
        "why": mode(re.sub(r"\bblocks\.\d+\.", "", storage.reason_alive) for storage in storages),
    }


def in_words(group: dict[str, Any]) -> tuple[str, str, str, str]:
    """("12 x blocks.*.mlp.c_fc: output", "12288x3072 bf16", line, why)"""
    times = f"{group['count']} x " * (group["count"] > 1)
    shape = ""
    if group["dtype"]:
        sides = "x".join(map(str, group["shape"]))
        shape = f"{sides} {group['dtype'].replace('float', 'f')}".strip()
    return times + group["name"], shape, group["line"], group["why"]


def format_peak(record: StepRecord) -> str:
    """Groups of storages alive at the peak, in ten lines under one that says where it is."""
    groups, peak = at_peak(record), record.step.peak
    shown = groups if len(groups) <= LINES else groups[: LINES - 1]
    rows = [(group["bytes"], *in_words(group)) for group in shown]
    if others := groups[len(shown) :]:
        rest, n = (sum(group[key] for group in others) for key in ("bytes", "count"))
        rows.append((rest, f"and {n} others", "", "", ""))
    names = ("bytes>", "share>", "what<", "shape<", "line<", "why<")
    lines = [(format_bytes(size), f"{size / peak:.1%}", *words) for size, *words in rows]
    title = f"alive at the peak of {record.step.config.recompute}: {format_bytes(peak)}"
    table = align([dict(zip(names, line, strict=True)) for line in lines])
    return f"{title}, {record.step.peak_location}\n\n{table}"


# ---- words


def align(lines: list[dict[str, str]]) -> str:
    """Cells by the names of their columns, below these. A name ends in "<" or ">": its column is
    flush left, or right."""
    columns = []
    for name in lines[0]:
        cells = [name[:-1], *(line[name] for line in lines)]
        width = max(map(len, cells))
        columns.append([f"{cell:{name[-1]}{width}}" for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def digits(n: int, x: float) -> str:
    """Rounded to n digits: "54", "6.1", "358,000"."""
    rounded = float(f"{x:.{n - 1}e}")
    return f"{rounded:,.{max(0, n - 1 - math.floor(math.log10(rounded)))}f}"


def format_time(seconds: float) -> str:
    """ "54 ms", "1.2 s", "25 min", "17 h", "5.2 days": as exact as an estimate is"""
    units = ((0.001, "ms", 1000), (1, "s", 90), (60, "min", 90), (3600, "h", 100))
    found = (unit for unit in units if seconds < unit[0] * unit[2])
    size, name, _ = next(found, (86400, "days", None))
    return f"{digits(2, seconds / size)} {name}"
