"""The report of scripts/gpu_report.py, from the lines that it has written: tables in Markdown."""

import statistics
from typing import Any

from scripts.benchmark import markdown
from scripts.gpu_report_bench import PEAKS, UNITS
from scripts.gpu_report_results import Record, Results
from trainer.metrics import format_bytes

MEASURED = (*PEAKS, "extra")  # what stands beside "predicted"


def show(value: Any, unit: str | None = None) -> str:
    """A cell: 1.2345e-5, 12.3 MiB, yes."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return " ".join(value.replace("|", "/").split())
    if unit == "bytes":
        return format_bytes(value)
    if unit == "share":
        return f"{value:.1%}"
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or 0.001 <= abs(value) < 1e7:
        return f"{value:,.{3 if abs(value) < 100 else 1}f}"
    return f"{value:.2e}"


def with_ratios(values: dict[str, Any]) -> dict[str, Any]:
    """Behind each measured peak, the prediction in units of it."""
    if not values.get("predicted"):
        return values
    row: dict[str, Any] = {}
    for key, value in values.items():
        row[key] = value
        if key in MEASURED and value:
            row[f"predicted / {key}"] = values["predicted"] / value
    return row


def merge_turns(records: dict[str, Record]) -> dict[str, dict[str, Any]]:
    """Name -> values. What was measured in several turns ("full, turn 2") is one row: of each
    number the median, and of the times how far the turns are apart."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, record in records.items():
        if "values" in record:
            groups.setdefault(name.partition(", turn ")[0], []).append(record["values"])
    rows = {}
    for name, group in groups.items():
        rows[name] = row = dict(group[0])
        if len(group) == 1:
            continue
        for key, first in group[0].items():
            values = [values[key] for values in group if values.get(key) is not None]
            if isinstance(first, int | float) and not isinstance(first, bool) and values:
                row[key] = statistics.median(values)
        times = [values["ms"] for values in group if "ms" in values]
        if times:
            row["turns"], row["ms apart"] = len(times), max(times) - min(times)
    return rows


def tables(rows: dict[str, dict[str, Any]]) -> str:
    """A row for each measurement; a table for those that have the same values.

    Lists are not for tables: those of numbers are raw data, the others stand below (`lists`).
    """
    groups: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for name, values in rows.items():
        row = {k: v for k, v in with_ratios(values).items() if not isinstance(v, list)}
        groups.setdefault(tuple(k for k in row if "predicted / " not in k), {})[name] = row
    return "\n".join(table(group) for group in groups.values())


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Columns in which nothing stands are left out (a CPU's allocator has one count of four)."""
    columns = [
        key
        for key in dict.fromkeys(key for row in rows.values() for key in row)
        if any(row.get(key) is not None for row in rows.values())
    ]
    heads = [f"{key} ({UNITS[key]})" if shows_unit(key) else key for key in columns]
    lines = [
        [show(name), *(show(row.get(key), UNITS.get(key)) for key in columns)]
        for name, row in rows.items()
    ]
    return markdown("|".join(["", *heads]), lines)


def shows_unit(key: str) -> bool:
    """Not where the name or the cell says it."""
    return key in UNITS and UNITS[key] not in (key, "bytes", "share")


def lists(rows: dict[str, dict[str, Any]]) -> str:
    """The values that are tables of their own, or lines."""
    parts = []
    for name, values in rows.items():
        for key, value in values.items():
            if not isinstance(value, list) or not value:
                continue
            if isinstance(value[0], dict):
                title = next(iter(value[0]))
                entries = [[show(each.get(k), UNITS.get(k)) for k in value[0]] for each in value]
                heads = [
                    f"{k} ({UNITS[k]})" if shows_unit(k) else k for k in value[0] if k != title
                ]
                parts.append(f"{name}: {key.replace('_', ' ')}\n")
                parts.append(markdown("|".join([title, *heads]), entries))
            elif isinstance(value[0], str):
                parts.append(f"{name}: {key}\n")
                parts.append("\n".join(f"- `{line}`" for line in value) + "\n")
    return "\n".join(parts)


def section_part(name: str, about: str, results: Results) -> list[str]:
    records = results.records.get(name, {})
    rows = merge_turns(records)
    parts = [f"## {name}\n", f"{about}\n"]
    if not rows:
        parts.append("Nothing was measured.\n")
    elif name == "machine":  # hardly two rows have the same columns
        parts += [machine_part(rows)]
    else:
        parts += [tables(rows), lists(rows)]
    lines = [f"- failed: {show(n)}: {show(r['error'])}" for n, r in records.items() if "error" in r]
    lines += [f"- not finished: {show(n)}" for n in results.under_way(name)]
    if missing := results.missing(name):
        lines.append(f"- not measured: {show('; '.join(missing))}")
    parts += ["\n".join(lines) + "\n"] if lines else []
    return [part for part in parts if part]


def machine_part(rows: dict[str, dict[str, Any]]) -> str:
    """A line for each thing that there is to know."""
    lines = [
        [name, show(key), show(value, UNITS.get(key)), UNITS.get(key, "").replace("bytes", "")]
        for name, values in rows.items()
        for key, value in values.items()
        if value is not None and not isinstance(value, list)
    ]
    return markdown("||measured|unit", lines)


def failures(results: Results) -> list[str]:
    """One line for each measurement that has no result, though it was tried."""
    return [
        f"{section}: {name}: {record['error']}"
        for section, records in results.records.items()
        for name, record in records.items()
        if "error" in record
    ]


def report(results: Results, sections: dict[str, str]) -> str:
    """The whole of it. `sections`: name -> what it is about, in the order of the report."""
    parts = ["# GPU report\n"]
    for about in results.abouts:
        parts.append("\n".join(f"- {key}: {show(value)}" for key, value in about.items()) + "\n")
    measured = sum("values" in r for rs in results.records.values() for r in rs.values())
    seconds = sum(r.get("seconds", 0) for rs in results.records.values() for r in rs.values())
    failed = failures(results)
    parts.append(f"{measured} measured in {seconds:,.0f} s, {len(failed)} failed.\n")
    for name, words in sections.items():
        if name in results.names or name in results.records:
            parts += section_part(name, words, results)
        else:
            parts += [f"## {name}\n", "Not run.\n"]
    return "\n".join(parts).rstrip() + "\n"
