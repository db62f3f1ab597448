"""The tables of scripts/plan_memory.py: plans with different policies or flags, compared.

Three searches find the plans: the table of policies (`policy_table`), the longest sequence
(`longest_sequence`) and the fastest micro-batch (`search_settings`). `--at-peak` lists by name what
is alive at a peak. These are hundreds of tensors. But blocks are equal, so the tensors make a few
dozen groups (`group_name_and_kind` in planner/record.py), and the largest nine groups take most of
the bytes.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from statistics import mode
from typing import Any

from planner.choose import nested_checkpoint_policies, recomputed_flops_key, uniform_policies
from planner.op_recorder import Storage
from planner.record import GROUP_NAME_BY_KIND, StepRecord, group_name_and_kind, read_source_line
from scripts.advice import Change
from scripts.plans import CommandPlan as Plan
from trainer.flags import MAX_COUNT
from trainer.metrics import format_bytes
from trainer.plan import OFFLOAD_POLICY, POLICY_FLAG, RESTART_SHARE_OF_FAILED_PEAK, plans_to_try
from trainer.settings import Settings, to_words

STEP = 64  # tokens; the longest sequence is a multiple of this
TRIES = 6  # lengths to try by linear interpolation, before bisection
SETTINGS = 5  # rows that --all-knobs prints
LINES = 10  # lines that --at-peak prints


# ---- one plan


def offloads(plan: Plan) -> bool:
    return plan.settings.recompute_plan.offload


def fits_tightly(plan: Plan) -> bool | None:
    """Return whether the step fits in the whole budget, without a margin; None: unknown."""
    budget, step = plan.memory_budget, plan.step
    if budget.limit_bytes is None:
        return None
    host_bytes = math.inf if budget.host_usable_bytes is None else budget.host_usable_bytes
    return step.peak <= budget.limit_bytes and step.host_bytes <= host_bytes


def fits_safely(plan: Plan) -> bool:
    """Return whether the step fits in the budget minus the margin."""
    return bool(fits_tightly(plan)) and plan.peak <= plan.usable_bytes


def largest_batch(plan: Plan) -> int | None:
    """Return the sequences of the largest batch that fits with the margin; None: the budget is
    unknown."""
    return None if plan.memory_budget.limit_bytes is None else plan.largest_batch


def cost(plan: Plan) -> tuple[float, float]:
    """Return a sort key; smaller is better. With a card: (seconds, peak bytes). Without a card:
    `recomputed_flops_key`."""
    if plan.card:
        return plan.seconds, plan.peak
    return recomputed_flops_key(plan.step)


def changes(plan: Plan, settings: Settings) -> Change:
    """Return the flags of the plan that differ from `settings`, and always the policy.
    (--max-position-embeddings is compared only with --model, which sets it. Without --model it
    follows --seq-len.)"""
    names = ["batch_size", "grad_accum_steps", "seq_len", "mlp_chunks"]
    names += ["max_position_embeddings"] if settings.model else []
    wanted = {name: getattr(plan.settings, name) for name in names}
    changed = {name: v for name, v in wanted.items() if v != getattr(settings, name)}
    return changed | {POLICY_FLAG: plan.policy}


def as_json(plan: Plan, settings: Settings) -> dict[str, Any]:
    """Return a row of the JSON file. Its `flags` are `changes(plan, settings)` as words of a
    command line."""
    step, fits = plan.step, fits_tightly(plan)
    return {
        "name": plan.policy,
        "policy": plan.policy,
        "flags": to_words(changes(plan, settings)),
        "batch_size": step.batch_size,
        "grad_accum_steps": plan.settings.grad_accum_steps,
        "seq_len": step.seq_len,
        "peak_bytes": step.peak,
        "at_peak": step.bytes_by_kind_at_peak,
        "where": step.peak_location,
        "host_bytes": step.host_bytes,
        "kept_bytes": step.kept,
        "kept_bytes_per_block": step.kept_per_block,
        "replayed": step.relative_flops - 1,
        "fits": fits,
        "fits_safely": None if fits is None else fits_safely(plan),
        "largest_batch": largest_batch(plan),
        "seconds": plan.seconds if plan.card else None,
        "tokens_per_s": plan.tokens_per_s if plan.card else None,
        "longest_sequence_safely": longest_sequence(plan),
    }


# ---- the table


def policy_table(plan: Plan, taken: Plan | None, with_nested: bool) -> list[Plan]:
    """Return the plan with each policy of `uniform_policies`, and with OFFLOAD_POLICY.

    The policy of `taken` has a row, also if it is a mix of two policies or a nested group
    (`full/K+nested`). `with_nested`: nested groups always have rows.
    """
    names = [*uniform_policies(plan.planner), OFFLOAD_POLICY]
    if with_nested:
        names[-1:-1] = nested_checkpoint_policies(plan.settings.n_layers)
    if taken and taken.policy not in names:
        mix = taken.settings.recompute_plan
        before = OFFLOAD_POLICY if mix.nested else mix.policies[0]
        names.insert(names.index(before), taken.policy)
    return [plan.with_policy(name) for name in names]


def recommend(plan: Plan) -> Plan | None:
    """Return the fastest plan that fits with the margin; None if none fits. Offload comes last,
    because no predicted time includes its copies."""
    ways = plan.with_fastest_policy(), plan.with_policy(OFFLOAD_POLICY)
    return next(filter(fits_safely, ways), None)


def format_table(plans: list[Plan], taken: Plan | None) -> str:
    """Return the plans in aligned columns; ">" marks `taken`."""
    fits = {True: "tight", False: "no", None: "?"}
    lines = []
    for plan in plans:
        largest, longest = largest_batch(plan), longest_sequence(plan)
        line = {
            " <": ">" if taken and plan.policy == taken.policy else "",
            "policy<": plan.policy,
            "peak>": format_bytes(plan.peak),
        }
        if plan.card:
            line |= estimates(plan, plans[0])
        else:
            line |= {
                "where<": plan.step.peak_location,
                "kept per block>": format_bytes(plan.step.kept_per_block),
                "extra FLOPs>": f"{plan.step.relative_flops - 1:.1%}",
            }
        line["fits<"] = "yes" if fits_safely(plan) else fits[fits_tightly(plan)]
        line["largest batch>"] = "?" if largest is None else f"{largest:,}"
        if longest is not None:
            line["longest sequence>"] = f"{longest:,}"
        lines.append(line)
    return align(lines)


def estimates(plan: Plan, first: Plan) -> dict[str, str]:
    """Return the cells for time and tokens/s; "~" marks them as estimates.

    The first row shows its time. The other rows show how much more time they take than the first
    row. The prediction leaves out the copies of offload, so an offloaded plan shows bounds, with
    ">" and "<".
    """
    speed = digits(3, plan.tokens_per_s)
    more = f"{plan.seconds / first.seconds - 1:+.0%}"
    if offloads(plan):
        return {"time>": f"> {more}", "tokens/s>": f"<{speed}"}
    return {
        "time>": f"~{format_time(plan.seconds)}" if plan is first else more,
        "tokens/s>": f"~{speed}",
    }


def describe_host(plan: Plan) -> str:
    """Return a line with the CPU memory that all processes of an offloaded plan pin together.
    Return "" if the plan pins no memory, or if its device is the CPU."""
    processes, host = plan.layout.world_size, plan.step.host_bytes
    if plan.device.type == "cpu" or not host:
        return ""
    several = f" in {processes} processes" if processes > 1 else ""
    return f"offload  pins {format_bytes(processes * host)} of CPU memory{several}"


def if_memory_runs_out(plan: Plan | None) -> Iterator[Plan]:
    """Yield the plans that a run falls back to. The run uses the first of them when memory runs
    out with `plan`, and each later one when memory runs out with the one before. (With several
    processes, the policy changes only when torchrun restarts the run; its flag is --max-restarts.)
    """
    if plan and longest_sequence(plan) is None and plan.settings.on_out_of_memory == "deeper":
        share = RESTART_SHARE_OF_FAILED_PEAK if plan.layout.kind != "one" else 1
        plans: Iterator[Plan] = chain([plan], plan.deeper())
        while following := next(plans := plans_to_try(plans, share=share), None):
            yield following
            plans = chain([following], plans)


# ---- the longest sequence


def with_length(settings: Settings, seq_len: int) -> Change:
    """Return the change to sequences of `seq_len` tokens.

    `max_position_embeddings` becomes `seq_len`. But a value that was typed or set by --model is
    never reduced.
    """
    follows = "max_position_embeddings" not in settings.typed and settings.model is None
    positions = 0 if follows else settings.max_position_embeddings
    return {"seq_len": seq_len, "max_position_embeddings": max(seq_len, positions)}


@cache
def longest_sequence(plan: Plan) -> int | None:
    """Return the length, in tokens, of the longest sequence that fits with the margin; 0: none;
    None: without --longest-sequence."""
    settings = plan.settings
    if not getattr(settings, "longest_sequence", False):
        return None

    def peak(n: int) -> int:
        return plan.with_flags(**with_length(settings, n * STEP)).peak

    if plan.state_bytes >= plan.usable_bytes:
        return 0
    # With fused attention, activations depend only on the number of tokens. So guess by the largest
    # batch, which is rounded down, and by the positions that a longer sequence adds to the state.
    longer = plan.with_flags(**with_length(settings, settings.seq_len + STEP))
    room, each = plan.usable_bytes - plan.state_bytes, longer.state_bytes - plan.state_bytes
    tokens = (plan.largest_batch + 0.5) * settings.seq_len / settings.batch_size
    guess = int(room / (room * STEP / tokens + each))
    typed = "max_position_embeddings" in settings.typed
    max_n = (settings.max_position_embeddings if typed else MAX_COUNT) // STEP
    return STEP * most_that_fit(peak, plan.state_bytes, plan.usable_bytes, guess, max_n)


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


# ---- the fastest settings (--all-knobs)


def search_settings(plan: Plan) -> list[Plan]:
    """Return the plans of the micro-batch sizes that divide the number of sequences in a step, each
    with the fastest policy that fits, the fastest plan first. Sizes that do not fit are left out,
    and so are large sizes that can only be slower. (All give the same training: a step has the same
    sequences, and policies change no result.)"""
    typed_size = plan.settings.batch_size
    sequences = typed_size * plan.settings.grad_accum_steps
    plans: list[Plan] = []
    for size in range(1, sequences + 1):
        if sequences % size or not plan.settings.can_sum(sequences // size):
            continue
        parts = {"batch_size": size, "grad_accum_steps": sequences // size}
        fastest = plan.with_flags(**parts).with_fastest_policy()
        if fastest.peak > plan.usable_bytes:
            break
        plans.append(fastest)
        # All larger sizes are slower, because they recompute more.
        if size >= typed_size and cost(fastest) > min(map(cost, plans)):
            break
    return sorted(plans, key=cost)


def format_settings(plans: list[Plan]) -> str:
    """Return the fastest few plans in aligned columns; ">" marks the first one."""
    lines = [
        {
            " <": ">" if plan is plans[0] else "",
            "a step is<": f"{settings.grad_accum_steps} x {settings.batch_size} x "
            f"{settings.seq_len:,} tokens",
            "policy<": plan.policy,
            "peak>": format_bytes(plan.peak),
            "time>": f"~{format_time(plan.seconds)}",
            "tokens/s>": f"~{digits(3, plan.tokens_per_s)}",
        }
        for plan in plans[:SETTINGS]
        for settings in [plan.settings]
    ]
    return align(lines)


# ---- the storages alive at the peak


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


def cells_of(group: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return the cells of a group: ("12 x blocks.*.mlp.c_fc: output", "12288x3072 bf16", line,
    why)."""
    times = f"{group['count']} x " if group["count"] > 1 else ""
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
    rows = [(group["bytes"], *cells_of(group)) for group in shown]
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
