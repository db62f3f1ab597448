"""The candidates that scripts/plan_memory.py compares: ways to run a step, their memory and cost.

Three searches find them: the table of policies (`policy_table`), the longest sequence
(`longest_sequence`) and the fastest micro-batch (`search_settings`). `--at-peak` lists by name what
is alive at a peak. These are hundreds of tensors. But blocks are equal, so the tensors make a few
dozen groups (`group_name_and_kind` in planner/record.py), and the largest nine groups take most of
the bytes.
"""

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import mode
from typing import Any

from memory import recompute_plan_of_config
from planner import StepMemory
from planner.choose import nested_checkpoint_policies, recomputed_flops_key, uniform_policies
from planner.op_recorder import Storage
from planner.record import GROUP_NAME_BY_KIND, StepRecord, group_name_and_kind, read_source_line
from scripts.style import relative_flops
from trainer.flags import MAX_COUNT, to_argv, with_flags
from trainer.metrics import format_bytes
from trainer.plan import (
    OFFLOAD_POLICY,
    RESTART_SHARE_OF_FAILED_PEAK,
    PlanRequest,
    deeper_policies,
    policies_to_try,
)

STEP = 64  # tokens; the longest sequence is a multiple of this
TRIES = 6  # lengths to try by linear interpolation, before bisection
SETTINGS = 5  # rows that --all-knobs prints
LINES = 10  # lines that --at-peak prints


@dataclass(frozen=True)
class Candidate:
    """One way to run a request, with its simulated step."""

    request: PlanRequest  # its flags select this candidate
    step: StepMemory
    seconds: float | None  # of a training step with all micro-batches; None: no card
    tokens_per_s: float | None  # of all processes
    fits: bool | None  # in the whole budget; None: unknown
    fits_safely: bool  # in the budget minus the margin
    longest: int | None = None  # tokens of the longest sequence that fits; None: not asked

    @property
    def name(self) -> str:
        """The policy string."""
        return self.step.config.recompute

    @property
    def offloaded(self) -> bool:
        return recompute_plan_of_config(self.step.config).offload

    @property
    def largest_batch(self) -> int | None:
        """Sequences of the largest batch that fits with the margin; None: the budget is unknown.
        (This simulates some more steps.)"""
        return (
            None if self.request.memory_budget.limit_bytes is None else self.request.largest_batch
        )

    @property
    def replayed(self) -> float:
        """Recomputed FLOPs, as a share of the FLOPs of the step without recompute."""
        args = self.request.args
        return relative_flops(self.step.config, args.seq_len, args.compile) - 1

    @property
    def cost(self) -> tuple[float, float]:
        """Sort key; smaller is better. With a card: (seconds, peak bytes). Without a card:
        `recomputed_flops_key`."""
        if self.seconds is None:
            return recomputed_flops_key(self.step)
        return self.seconds, self.step.peak

    def changes(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the flags of this candidate that differ from those in `args`, and always the
        policy. (--max-position-embeddings is compared only if `args` has --model, which sets it.
        Without --model it follows --seq-len.)"""
        wanted = vars(self.request.args)
        names = ["batch_size", "grad_accum_steps", "seq_len", "mlp_chunks"]
        names += ["max_position_embeddings"] * bool(args.model)
        changed = {name: wanted[name] for name in names if wanted[name] != getattr(args, name)}
        return changed | {"use_activation_checkpoint": self.name}

    def as_json(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return a row of the JSON file. Its `flags` are `changes(args)` as words of a command
        line."""
        step = self.step
        return {
            "name": self.name,
            "policy": self.name,
            "flags": to_argv(self.changes(args)),
            "batch_size": step.batch_size,
            "grad_accum_steps": self.request.args.grad_accum_steps,
            "seq_len": step.seq_len,
            "peak_bytes": step.peak,
            "at_peak": step.bytes_by_kind_at_peak,
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
    """Simulate the step of the request with `flags` changed; return it as a candidate."""
    request = request.with_args(with_flags(request.args, **flags))
    step, budget, seconds, speed, fits = (
        request.predicted_step,
        request.memory_budget,
        None,
        None,
        None,
    )
    if request.card:
        seconds, speed = request.seconds(step), request.tokens_per_s(step)
    if budget.limit_bytes is not None:
        fits = step.peak <= budget.limit_bytes and step.host_bytes <= (
            budget.host_usable_bytes or math.inf
        )
    return Candidate(
        request, step, seconds, speed, fits, bool(fits) and step.peak <= request.usable_bytes
    )


# ---- The table


def policy_table(request: PlanRequest) -> list[Candidate]:
    """Return a candidate for each policy of `uniform_policies`, and for OFFLOAD_POLICY.

    If the cheapest policy that fits is a mix of two policies or a nested group (`full/K+nested`),
    it has a candidate, too. With --longest-sequence, nested groups always have candidates, and
    `longest` of each candidate is set.
    """
    names = [*uniform_policies(request.planner), OFFLOAD_POLICY]
    taken = request.step_with_best_policy().config
    if request.args.longest_sequence:
        names[-1:-1] = nested_checkpoint_policies(request.args.n_layers)
    if taken.recompute not in names:
        plan = recompute_plan_of_config(taken)
        before = OFFLOAD_POLICY if plan.nested else plan.policies[0]
        names.insert(names.index(before), taken.recompute)
    candidates = [candidate_of(request, use_activation_checkpoint=name) for name in names]
    if request.args.longest_sequence:
        candidates = [
            replace(candidate, longest=longest_sequence(candidate.request))
            for candidate in candidates
        ]
    return candidates


def recommend(ways: list[Candidate]) -> Candidate | None:
    """Return the cheapest candidate that fits with the margin; None if none fits. Offloaded
    candidates come last, because no predicted time includes their copies."""
    safe = [candidate for candidate in ways if candidate.fits_safely]
    return min(safe, key=lambda candidate: (candidate.offloaded, candidate.cost), default=None)


def format_table(candidates: list[Candidate], taken: Candidate | None) -> str:
    """Return the candidates in aligned columns; ">" marks `taken`."""
    fits = {True: "tight", False: "no", None: "?"}
    lines = []
    for candidate in candidates:
        step, largest = candidate.step, candidate.largest_batch
        line = {
            " <": ">" * (candidate is taken),
            "policy<": candidate.name,
            "peak>": format_bytes(step.peak),
        }
        if candidate.seconds:
            line |= estimates(candidate, candidates[0])
        else:
            line |= {
                "where<": step.peak_location,
                "kept per block>": format_bytes(step.kept_per_block),
                "extra FLOPs>": f"{candidate.replayed:.1%}",
            }
        line["fits<"] = "yes" if candidate.fits_safely else fits[candidate.fits]
        line["largest batch>"] = "?" if largest is None else f"{largest:,}"
        if candidate.longest is not None:
            line["longest sequence>"] = f"{candidate.longest:,}"
        lines.append(line)
    return align(lines)


def estimates(candidate: Candidate, first: Candidate) -> dict[str, str]:
    """Return the cells for time and tokens/s; "~" marks them as estimates.

    The first row shows its time. The other rows show how much more time they take than the first
    row. The prediction leaves out the copies of offload, so an offloaded candidate shows bounds,
    with ">" and "<".
    """
    time, speed = candidate.seconds or 0, digits(3, candidate.tokens_per_s or 0)
    more = f"{time / (first.seconds or 1) - 1:+.0%}"
    if candidate.offloaded:
        return {"time>": f"> {more}", "tokens/s>": f"<{speed}"}
    return {
        "time>": f"~{format_time(time)}" if candidate is first else more,
        "tokens/s>": f"~{speed}",
    }


def describe_host(candidate: Candidate) -> str:
    """Return a line with the CPU memory that all processes of an offloaded candidate pin together.
    Return "" if the candidate pins no memory, or if its device is the CPU."""
    processes, host = candidate.request.processes, candidate.step.host_bytes
    if candidate.request.device.type == "cpu" or not host:
        return ""
    several = f" in {processes} processes" * (processes > 1)
    return f"offload  pins {format_bytes(processes * host)} of CPU memory{several}"


def if_memory_runs_out(candidate: Candidate | None) -> Iterator[Candidate]:
    """Yield the candidates that a run falls back to. The run uses the first of them when memory
    runs out with `candidate`. It uses each later candidate when memory runs out with the candidate
    before. (With shards, the policy changes only when torchrun restarts the run; its flag is
    --max-restarts.)"""
    if (
        candidate
        and candidate.longest is None
        and candidate.request.args.on_out_of_memory == "deeper"
    ):
        request, share = (
            candidate.request,
            RESTART_SHARE_OF_FAILED_PEAK if candidate.request.shard_degree > 1 else 1,
        )
        policies, kind = deeper_policies(request, candidate.name), request.device.type
        while policies := policies_to_try(policies, kind, share=share):
            yield candidate_of(request, use_activation_checkpoint=policies[0][0])


# ---- The longest sequence


def with_length(args: argparse.Namespace, seq_len: int) -> argparse.Namespace:
    """Return the flags with sequences of `seq_len` tokens.

    `max_position_embeddings` becomes `seq_len`. But a value that was typed or set by --model is
    never reduced.
    """
    follows = "max_position_embeddings" not in args.typed and args.model is None
    positions = 0 if follows else args.max_position_embeddings
    return with_flags(args, seq_len=seq_len, max_position_embeddings=max(seq_len, positions))


def longest_sequence(request: PlanRequest) -> int:
    """Return the length, in tokens, of the longest sequence that fits with the margin; 0: none."""
    args = request.args

    def peak(n: int) -> int:
        return request.with_args(with_length(args, n * STEP)).predicted_step.peak

    if request.state_bytes > request.usable_bytes:
        return 0
    # With fused attention, memory depends only on the number of tokens. So the guess is the number
    # of tokens in the largest batch, divided by --batch-size.
    guess = request.largest_batch * args.seq_len // (args.batch_size * STEP)
    typed = "max_position_embeddings" in args.typed
    max_n = (args.max_position_embeddings if typed else MAX_COUNT) // STEP
    return STEP * most_that_fit(peak, request.state_bytes, request.usable_bytes, guess, max_n)


def most_that_fit(
    peak: Callable[[int], int], nothing: int, budget: int, guess: int, most: int
) -> int:
    """Return the largest n in 0 .. most with peak(n) <= budget.

    `nothing`: peak(0), which fits. `guess`: the n to try first. The peak grows almost linearly with
    n, so only a few n need to be simulated.
    """
    low, high, tries = 0, most + 1, 0
    while high - low > 1:
        n = min(max(guess, low + 1), high - 1)
        peak_bytes = peak(n)
        low, high = (n, high) if peak_bytes <= budget else (low, n)
        guess = n * (budget - nothing) // max(peak_bytes - nothing, 1)
        tries += 1
        if tries >= TRIES:  # the peak is not linear: bisect
            guess = (low + high) // 2 if high <= most else 2 * low
    return low


# ---- The fastest settings (--all-knobs)


def search_settings(request: PlanRequest) -> list[Candidate]:
    """Return the micro-batch sizes that divide the number of sequences in a step, each as a
    candidate with the fastest policy that fits. The fastest candidate comes first. Sizes that do
    not fit are left out, and so are large sizes that can only be slower. (All candidates give the
    same training: a step has the same sequences, and policies change no result.)"""
    typed_size = request.args.batch_size
    sequences = typed_size * request.args.grad_accum_steps
    candidates: list[Candidate] = []
    for size in range(1, sequences + 1):
        if sequences % size:
            continue
        parts = {"batch_size": size, "grad_accum_steps": sequences // size}
        step = request.with_args(with_flags(request.args, **parts)).step_with_best_policy()
        if step.peak > request.usable_bytes:
            break
        candidates.append(
            candidate_of(request, **parts, use_activation_checkpoint=step.config.recompute)
        )
        # All larger sizes are slower, because they recompute more.
        if size >= typed_size and candidates[-1].cost > min(
            candidate.cost for candidate in candidates
        ):
            break
    return sorted(candidates, key=lambda candidate: candidate.cost)


def format_settings(settings: list[Candidate]) -> str:
    """Return the fastest few candidates in aligned columns; ">" marks the first one."""
    lines = [
        {
            " <": ">" * (candidate is settings[0]),
            "a step is<": "{grad_accum_steps} x {batch_size} x {seq_len:,} tokens".format_map(
                vars(candidate.request.args)
            ),
            "policy<": candidate.name,
            "peak>": format_bytes(candidate.step.peak),
            "time>": f"~{format_time(candidate.seconds or 0)}",
            "tokens/s>": f"~{digits(3, candidate.tokens_per_s or 0)}",
        }
        for candidate in settings[:SETTINGS]
    ]
    return align(lines)


# ---- The storages alive at the peak


def record_step(request: PlanRequest, taken: Candidate | None) -> StepRecord:
    """Return the record of a step with the typed policy, else with the recommended policy, else
    without recompute."""
    policy = request.args.typed_policy
    if policy is None and taken:
        request, policy = taken.request, taken.name
    return request.planner.record(request.args.batch_size, recompute=policy or "none")


def at_peak(record: StepRecord) -> list[dict[str, Any]]:
    """Return the groups of storages that are alive at the peak, the largest first, in the form of
    the JSON file. Their bytes add up to exactly the peak."""
    by_group = defaultdict[tuple[str, str], list[Storage]](list)
    for storage in record.at_peak:
        by_group[group_name_and_kind(storage)].append(storage)
    groups = [describe(name, storages) for (name, _), storages in by_group.items()]
    return sorted(groups, key=lambda group: -group["bytes"])


def describe(name: str, storages: list[Storage]) -> dict[str, Any]:
    """Describe a group: storages that are equal except for their block, or (for example) all
    weights. The group has at least one storage."""
    first, n = storages[0], len(storages)
    equal = len({(storage.shape, storage.dtype) for storage in storages}) == 1
    # The line that made most of the storages; none for a group such as all weights.
    line = (
        ""
        if n > 1 and first.kind in GROUP_NAME_BY_KIND
        else mode(storage.line for storage in storages)
    )
    return {
        "name": first.name if n == 1 else name,
        "kind": first.kind,
        "count": n,
        "bytes": sum(storage.nbytes for storage in storages),
        "shape": list(first.shape) if equal else None,
        "dtype": str(first.dtype).removeprefix("torch.") if equal else None,
        "line": line,
        "code": read_source_line(line) if line else "",
        "why": mode(re.sub(r"\bblocks\.\d+\.", "", storage.reason_alive) for storage in storages),
    }


def in_words(group: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return the cells of a group: ("12 x blocks.*.mlp.c_fc: output", "12288x3072 bf16", line,
    why)."""
    times = f"{group['count']} x " * (group["count"] > 1)
    shape = ""
    if group["dtype"]:
        sides = "x".join(map(str, group["shape"]))
        shape = f"{sides} {group['dtype'].replace('float', 'f')}".strip()
    return times + group["name"], shape, group["line"], group["why"]


def format_peak(record: StepRecord) -> str:
    """Return a table of the groups that are alive at the peak, with at most LINES rows. The title
    above the table names the phase and the block of the peak."""
    groups, peak = at_peak(record), record.step_memory.peak
    shown = groups if len(groups) <= LINES else groups[: LINES - 1]
    rows = [(group["bytes"], *in_words(group)) for group in shown]
    if others := groups[len(shown) :]:
        rest, n = (sum(group[key] for group in others) for key in ("bytes", "count"))
        rows.append((rest, f"and {n} others", "", "", ""))
    names = ("bytes>", "share>", "what<", "shape<", "line<", "why<")
    lines = [(format_bytes(size), f"{size / peak:.1%}", *words) for size, *words in rows]
    title = f"alive at the peak of {record.step_memory.config.recompute}: {format_bytes(peak)}"
    table = align([dict(zip(names, line, strict=True)) for line in lines])
    return f"{title}, {record.step_memory.peak_location}\n\n{table}"


# ---- Formatting


def align(lines: list[dict[str, str]]) -> str:
    """Return lines (column name -> cell) as a table with a header. "<" at the end of a column's
    name aligns it left, ">" aligns it right."""
    columns = []
    for name in lines[0]:
        cells = [name[:-1], *(line[name] for line in lines)]
        width = max(map(len, cells))
        columns.append([f"{cell:{name[-1]}{width}}" for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def digits(n: int, x: float) -> str:
    """Return x rounded to n significant digits, as text: "54", "6.1", "358,000"."""
    rounded = float(f"{x:.{n - 1}e}")
    return f"{rounded:,.{max(0, n - 1 - math.floor(math.log10(rounded)))}f}"


def format_time(seconds: float) -> str:
    """Return a time as text with two significant digits, because it is an estimate: "54 ms",
    "1.2 s", "25 min", "17 h", "5.2 days"."""
    units = ((0.001, "ms", 1000), (1, "s", 90), (60, "min", 90), (3600, "h", 100))
    found = (unit for unit in units if seconds < unit[0] * unit[2])
    size, name, _ = next(found, (86400, "days", None))
    return f"{digits(2, seconds / size)} {name}"
