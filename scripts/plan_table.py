"""The tables of scripts/plan_memory.py: plans with different policies or flags, compared.

Three searches find the plans: the table of policies (`plans_for_each_policy`), the longest sequence
(`longest_sequence`) and the fastest micro-batch (`search_fastest_plans`). `--at-peak` lists by name
what is alive at a peak: hundreds of tensors, which make a few dozen groups because blocks are equal
(`group_name_and_kind` in planner/record.py); the largest nine groups take most of the bytes.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from statistics import mode
from typing import Any

import torch

from planner import Card, StepMemory
from planner.cards import is_before_ampere, other_sizes
from planner.choose import nested_checkpoint_policies, recomputed_flops_key, uniform_policies
from planner.op_recorder import Storage
from planner.operators import MATMUL_DTYPES
from planner.record import GROUP_NAME_BY_KIND, StepRecord, group_name_and_kind
from planner.units import format_bytes, format_sizes
from scripts.plans import Change, CommandPlan
from trainer.device import MemoryBudget
from trainer.flags import MAX_COUNT
from trainer.plan import OFFLOAD_POLICY, POLICY_FLAG
from trainer.settings import Settings

STEP = 64  # tokens; the longest sequence is a multiple of this
TRIES = 6  # lengths to try by linear interpolation, before bisection
SETTINGS = 5  # rows that --all-knobs prints
LINES = 10  # lines that --at-peak prints
# A printed time is a range from the prediction to SLOWER times as long: real steps took 1.15 to
# 1.22 times their predicted time on two CPU cores (docs/evidence.md, "The clock"; no GPU is
# measured).
SLOWER = 1.25
Row = dict[str, Any]  # of the JSON file; the printed table shows the same


# ---- one plan


def offloads(plan: CommandPlan) -> bool:
    return plan.settings.recompute_plan.offload


def fits_within(plan: CommandPlan, limit: int | None) -> bool | None:
    """Return whether the step fits in `limit` bytes (None: unknown), and what it offloads in the
    CPU's memory."""
    if limit is None:
        return None
    host_bytes = plan.memory_budget.host_usable_bytes
    return plan.peak <= limit and (host_bytes is None or plan.step.host_bytes <= host_bytes)


def fits_safely(plan: CommandPlan) -> bool:
    """Return whether the step fits in the budget minus the margin."""
    return bool(fits_within(plan, plan.memory_budget.bytes_within_margin))


def cost_key(plan: CommandPlan) -> tuple[float, float]:
    """Return a sort key, of which smaller is better: (seconds, peak bytes) with a card, else
    `recomputed_flops_key`."""
    return (plan.seconds, plan.peak) if plan.card else recomputed_flops_key(plan.step)


def changed_flags(plan: CommandPlan, settings: Settings) -> Change:
    """Return the flags of the plan that differ from `settings`, and always the policy.
    (--max-position-embeddings is compared only if --model has set it, because otherwise it follows
    --seq-len.)"""
    names = ["batch_size", "grad_accum_steps", "seq_len"]
    names += ["max_position_embeddings"] if settings.model else []
    wanted = {name: getattr(plan.settings, name) for name in names}
    changed = {name: v for name, v in wanted.items() if v != getattr(settings, name)}
    return changed | {POLICY_FLAG: plan.policy}


def step_row(step: StepMemory, name: str) -> Row:
    """Return what a row has of a step of any model; sizes in bytes."""
    return {
        "name": name,
        "policy": name,
        "batch_size": step.batch_size,
        "seq_len": step.seq_len,
        "peak_bytes": step.peak,
        "at_peak": step.bytes_by_kind_at_peak,
        "where": step.peak_location,
        "host_bytes": step.host_bytes,
        "kept_bytes": step.kept,
        "kept_bytes_per_block": step.kept_per_block,
        "recomputed_flops_share": step.relative_flops - 1,
    }


def fit_fields(budget: MemoryBudget, fits: Callable[[int], bool | None]) -> Row:
    """Return what a row says of a budget. `fits(limit)`: whether the step takes at most `limit`
    bytes. None: the budget is unknown."""
    limits = {
        "fits": budget.limit_bytes,
        "fits_beside_context": budget.bytes_left_by_context,
        "fits_safely": budget.bytes_within_margin,
    }
    return {key: None if limit is None else fits(limit) for key, limit in limits.items()}


def plan_row(plan: CommandPlan) -> Row:
    known = plan.memory_budget.limit_bytes is not None
    return step_row(plan.step, plan.policy) | {
        "grad_accum_steps": plan.settings.grad_accum_steps,
        **fit_fields(plan.memory_budget, partial(fits_within, plan)),
        "largest_batch": plan.largest_batch if known else None,
        "seconds": plan.seconds if plan.card else None,
        "tokens_per_s": plan.tokens_per_s if plan.card else None,
        "longest_sequence_safely": longest_sequence(plan),
    }


# ---- the table


def plans_for_each_policy(
    plan: CommandPlan, taken: CommandPlan | None, with_nested: bool
) -> list[CommandPlan]:
    """Return the plan with each policy of `uniform_policies`, and with OFFLOAD_POLICY.

    The policy of `taken` has a row, also if it is a mix of two policies or a nested group
    (`full/K+nested`). `with_nested`: True: nested groups have rows in any case.
    """
    names = [*uniform_policies(plan.planner), OFFLOAD_POLICY]
    if with_nested:
        names[-1:-1] = nested_checkpoint_policies(plan.settings.n_layers)
    if taken and taken.policy not in names:
        mix = taken.settings.recompute_plan
        before = OFFLOAD_POLICY if mix.nested else mix.policies[0]
        names.insert(names.index(before), taken.policy)
    return [plan.with_policy(name) for name in names]


def recommended_plan(plan: CommandPlan) -> CommandPlan | None:
    """Return the fastest plan that fits with the margin, or None if none fits; offload comes last,
    because no predicted time includes its copies."""
    ways = plan.with_fastest_policy(), plan.with_policy(OFFLOAD_POLICY)
    return next(filter(fits_safely, ways), None)


def format_table(rows: list[Row], takes: str | None) -> str:
    """Return the rows in aligned columns; ">" marks the policy `takes`.

    A row has the keys of `step_row`, and `fits_beside_context`, `fits_safely`, `largest_batch`
    (None: unknown), `seconds`, `tokens_per_s` (None: no card). If no row has a
    `longest_sequence_safely`, the column is left out. Neighbouring rows that offer the same choice
    (`choice_key`) are one line.
    """
    lines = []
    for _, group in groupby(rows, choice_key):
        row, *others = group
        names = [row["policy"], *(other["policy"] for other in others)]
        between = " or " if len(names) == 2 else " to "
        line = {
            " <": ">" if takes in names else "",
            "policy<": between.join(dict.fromkeys([names[0], names[-1]])),
            "peak>": row["peak_bytes"],
        }
        if row["seconds"] is None:
            line |= {
                "where<": row["where"],
                "kept per block>": row["kept_bytes_per_block"],
                "extra FLOPs>": f"{row['recomputed_flops_share']:.1%}",
            }
        else:
            line |= time_and_speed_cells(row, rows[0])
        tight = {True: "tight", False: "no", None: "?"}[row["fits_beside_context"]]
        line["fits<"] = "yes" if row["fits_safely"] else tight
        line["largest batch>"] = (
            "?" if row["largest_batch"] is None else f"{row['largest_batch']:,}"
        )
        if (longest := row.get("longest_sequence_safely")) is not None:
            line["longest sequence>"] = f"{longest:,}"
        lines.append(line)
    return format_columns(lines)


def choice_key(row: Row) -> tuple:
    """Return a key that is equal for rows that offer the same choice: equal rows, and
    rows that do not fit with the margin and have the same printed peak and largest batch."""
    if row["fits_safely"] is False:
        return row["fits_beside_context"], format_bytes(row["peak_bytes"]), row["largest_batch"]
    keys = "peak_bytes kept_bytes recomputed_flops_share largest_batch longest_sequence_safely"
    return tuple(map(row.get, keys.split()))


def time_and_speed_cells(row: Row, first: Row) -> dict[str, str]:
    """Return the cells for time and tokens/s, as ranges up to SLOWER.

    The first row shows its time, and each other row how much more time it takes. The prediction
    leaves out the copies of offload, so an offloaded plan shows bounds, with ">" and "<".
    """
    more = f"{row['seconds'] / first['seconds'] - 1:+.0%}"
    if "+offload" in row["policy"]:
        return {
            "time>": f"> {more}",
            "tokens/s>": f"< {significant_digits(2, row['tokens_per_s'])}",
        }
    time = format_time(row["seconds"], SLOWER) if row is first else more
    return {"time>": time, "tokens/s>": format_speed_range(row["tokens_per_s"])}


# ---- the longest sequence


def flags_for_seq_len(settings: Settings, seq_len: int) -> Change:
    """Return the change to sequences of `seq_len` tokens. `max_position_embeddings` becomes
    `seq_len`, but a value that was typed or set by --model is never reduced."""
    follows = "max_position_embeddings" not in settings.typed and settings.model is None
    positions = 0 if follows else settings.max_position_embeddings
    return {"seq_len": seq_len, "max_position_embeddings": max(seq_len, positions)}


@cache
def longest_sequence(plan: CommandPlan) -> int | None:
    """Return the length, in tokens, of the longest sequence that fits with the margin; 0: none;
    None: without --longest-sequence."""
    settings = plan.settings
    if not getattr(settings, "longest_sequence", False):
        return None
    if plan.state_bytes >= plan.bytes_within_margin:
        return 0
    # With fused attention, activations depend only on the number of tokens, so the longest sequence
    # has about as many tokens as the largest batch, and less than twice as many.
    tokens = (plan.largest_batch + 1) * settings.seq_len // settings.batch_size
    typed = "max_position_embeddings" in settings.typed
    positions = settings.max_position_embeddings if typed else MAX_COUNT
    return STEP * largest_n_that_fits(
        lambda n: plan.with_flags(**flags_for_seq_len(settings, n * STEP)).peak,
        plan.state_bytes,
        plan.bytes_within_margin,
        min(2 * tokens + STEP, positions) // STEP,
    )


def largest_n_that_fits(peak: Callable[[int], int], nothing: int, budget: int, most: int) -> int:
    """Return the largest n in 0 .. most with peak(n) <= budget.

    `nothing`: peak(0), which fits. The peak grows almost linearly with n, so only a few n need to
    be simulated.
    """
    low, high, guess, tries = 0, most + 1, most // 2, 0
    while high - low > 1:
        n = min(max(guess, low + 1), high - 1)
        size = peak(n)
        low, high = (n, high) if size <= budget else (low, n)
        guess = n * (budget - nothing) // max(size - nothing, 1)
        tries += 1
        if tries >= TRIES:  # the peak is not linear: bisect
            guess = (low + high) // 2
    return low


# ---- the fastest settings (--all-knobs)


def search_fastest_plans(plan: CommandPlan) -> list[CommandPlan]:
    """Return the plans of the micro-batch sizes that divide the number of sequences in a step, each
    with the fastest policy that fits, the fastest plan first. Sizes that do not fit are left out,
    and so are large sizes that can only be slower, because they recompute more. (All give the same
    training: a step has the same sequences, and policies change no result.)"""
    sequences = plan.settings.batch_size * plan.settings.grad_accum_steps
    plans: list[CommandPlan] = []
    for size in range(1, sequences + 1):
        if sequences % size or not plan.settings.can_sum_reproducibly(sequences // size):
            continue
        parts = {"batch_size": size, "grad_accum_steps": sequences // size}
        fastest = plan.with_flags(**parts).with_fastest_policy()
        if fastest.peak > plan.bytes_within_margin:
            break
        plans.append(fastest)
        if size >= plan.settings.batch_size and cost_key(fastest) > min(map(cost_key, plans)):
            break
    return sorted(plans, key=cost_key)


def format_fastest_plans(plans: list[CommandPlan]) -> str:
    """Return the fastest few plans in aligned columns; ">" marks the first one."""
    lines = [
        {
            " <": ">" if plan is plans[0] else "",
            "a step is<": f"{settings.grad_accum_steps} x {settings.batch_size} x "
            f"{settings.seq_len:,} tokens",
            "policy<": plan.policy,
            "peak>": plan.peak,
            "time>": format_time(plan.seconds, SLOWER),
            "tokens/s>": format_speed_range(plan.tokens_per_s),
        }
        for plan in plans[:SETTINGS]
        for settings in [plan.settings]
    ]
    return format_columns(lines)


# ---- the storages alive at the peak


def at_peak(record: StepRecord) -> list[Row]:
    """Return the groups of storages that are alive at the peak, the largest first, in the form of
    the JSON file. The sum of their bytes is exactly the peak."""
    return [*map(describe_storage_group, record.groups_at_peak)]


def describe_storage_group(storages: list[Storage]) -> Row:
    """Describe a group of at least one storage: the storages are equal except for their block or,
    for example, all weights. The shape is a text such as "12288x3072 bf16", or "" if the shapes
    differ. The line is the one that made most of the storages, or "" for a kind such as all
    weights."""
    first, n = storages[0], len(storages)
    shapes = {
        f"{'x'.join(map(str, s.shape))} {str(s.dtype).removeprefix('torch.').replace('float', 'f')}"
        for s in storages
    }
    is_kind = n > 1 and first.kind in GROUP_NAME_BY_KIND
    return {
        "name": first.name if n == 1 else group_name_and_kind(first)[0],
        "kind": first.kind,
        "count": n,
        "bytes": sum(storage.nbytes for storage in storages),
        "shape": shapes.pop().strip() if len(shapes) == 1 else "",
        "line": "" if is_kind else mode(storage.line for storage in storages),
        "why": mode(re.sub(r"\bblocks\.\d+\.", "", storage.reason_alive) for storage in storages),
    }


def format_peak(record: StepRecord, name: str) -> str:
    """Return a table of the groups that are alive at the peak, with at most LINES rows. The title
    above the table has `name`, the row's name, and the phase and the block of the peak."""
    groups, peak = at_peak(record), record.step_memory.peak
    shown = groups if len(groups) <= LINES else groups[: LINES - 1]
    if others := groups[len(shown) :]:
        rest, n = (sum(group[key] for group in others) for key in ("bytes", "count"))
        more = {"name": f"and {n} others", "count": 1, "bytes": rest}
        shown = [*shown, more | dict.fromkeys(("shape", "line", "why"), "")]
    lines = [
        {
            "bytes>": group["bytes"],
            "share>": f"{group['bytes'] / peak:.1%}",
            "what<": f"{group['count']} x {group['name']}".removeprefix("1 x "),
            "shape<": group["shape"],
            "line<": group["line"],
            "why<": group["why"],
        }
        for group in shown
    ]
    title = f"alive at the peak of {name}: {format_bytes(peak)}"
    return f"{title}, {record.step_memory.peak_location}\n\n{format_columns(lines)}"


# ---- Formatting


def describe_card_and_budget(
    card: Card | None, precision: torch.dtype, budget: MemoryBudget
) -> list[str]:
    """Return the lines of the card, if there is one, with notes on it, and of the budget."""
    lines = []
    if card:
        flops = significant_digits(3, card.flops[MATMUL_DTYPES.index(precision)] / 1e12)
        speed = f"{flops} TFLOP/s in {str(precision).removeprefix('torch.')}"
        how = "at most" if card.memory else "measured"
        rate = f"{significant_digits(3, card.bytes_per_s / 1e9)} GB/s {how}"
        lines.append(f"card     {card.name}: {speed}, {rate}; times are estimates")
        names = " or ".join(f"--card {name.replace(' ', '-')}" for name in other_sizes(card))
        lines += [f"note     also sold with another size of memory: {names}"] * bool(names)
        lines += is_before_ampere(card) * [
            "note     older than Ampere: no bfloat16 in hardware, and no FlashAttention, though "
            "its time and workspace are planned"
        ]
    kind = budget.device_type
    unknown = f"no {kind} here: --memory-budget 8GiB, for example, shows what fits"
    limit = unknown if budget.limit_bytes is None else f"tensors may take {budget}"
    return [*lines, f"budget   {limit}"]


def format_columns(lines: Sequence[Mapping[str, str | float]]) -> str:
    """Return lines (column name -> cell) as a table with a header. "<" at the end of a column's
    name aligns it left, ">" aligns it right. Numbers are bytes: a column of them has one unit."""
    columns = []
    for name in lines[0]:
        cells: list[Any] = [line[name] for line in lines]
        texts = [name[:-1], *(cells if isinstance(cells[0], str) else format_sizes(cells))]
        columns.append([f"{text:{name[-1]}{max(map(len, texts))}}" for text in texts])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def significant_digits(n: int, x: float) -> str:
    """Return x rounded to n significant digits, as text: "54", "6.1", "358,000"."""
    rounded = float(f"{x:.{n - 1}e}")
    return f"{rounded:,.{max(0, n - 1 - math.floor(math.log10(rounded)))}f}"


def format_speed_range(tokens_per_s: float) -> str:
    """Return predicted tokens/s as a range: "14,000 to 18,000"."""
    return (
        f"{significant_digits(2, tokens_per_s / SLOWER)} to {significant_digits(2, tokens_per_s)}"
    )


def format_time(seconds: float, slower: float = 1) -> str:
    """Return a time as text with two significant digits, because it is an estimate: "54 ms",
    "1.2 s", "25 min", "17 h", "5.2 days"; or the range up to `slower` times as long: "16 to 20 h".
    """
    units = ((0.001, "ms", 1000), (1, "s", 90), (60, "min", 90), (3600, "h", 100))
    found = (unit for unit in units if seconds < unit[0] * unit[2])
    size, name, _ = next(found, (86400, "days", None))
    ends = dict.fromkeys(significant_digits(2, end / size) for end in (seconds, slower * seconds))
    return f"{' to '.join(ends)} {name}"
