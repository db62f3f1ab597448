"""What scripts/gpu_report.py has measured: a file of JSON lines, and the worker that writes it.

A line is one of
    {"about": {...}, "run": ...}                        a run of the report begins
    {"section", "names": [...], "run"}                  all that a section will measure
    {"section", "name", "begun": "12:03:01", "run"}     a measurement begins
    {"section", "name", "values", "units", "seconds", "run"}    and ends
    {"section", "name", "error", "seconds", "run"}      ... without a result
and is on the disk before the next measurement begins. The last line of a name is the one that
counts: if that is "begun", whatever ran it is gone.
"""

import json
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.gpu_report_bench import UNITS, Bench, Jobs
from trainer.endings import is_out_of_memory

Record = dict[str, Any]


def append(file: Path, record: Record) -> None:
    """Written, and on the disk."""
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(json.dumps(plain(record)) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def plain(value: Any) -> Any:
    """JSON has no infinities, and no NaN: null."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class Results:
    """All lines of a file, by section and name."""

    abouts: list[Record] = field(default_factory=list)
    names: dict[str, list[str]] = field(default_factory=dict)
    records: dict[str, dict[str, Record]] = field(default_factory=dict)

    def settled(self, section: str, run: str) -> set[str]:
        """The names that are not to be measured: what has values, and what this very run tried."""
        return {
            name
            for name, record in self.records.get(section, {}).items()
            if "values" in record or ("error" in record and record["run"] == run)
        }

    def under_way(self, section: str, run: str | None = None) -> list[str]:
        """Measurements that began, in that run or in any, and did not end."""
        return [
            name
            for name, record in self.records.get(section, {}).items()
            if "begun" in record and run in (None, record["run"])
        ]

    def missing(self, section: str) -> list[str]:
        """What was to be measured, and was not even tried."""
        return [n for n in self.names.get(section, []) if n not in self.records.get(section, {})]


def read_results(file: Path) -> Results:
    """Raises OSError."""
    return collect(lines_of(file))


def lines_of(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8", errors="replace").splitlines()


def parse(lines: Iterable[str]) -> Iterator[Record]:
    """A line that a crash cut short is left out."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def collect(lines: Iterable[str]) -> Results:
    results = Results()
    for record in parse(lines):
        if "about" in record:
            results.abouts.append(record["about"])
        elif "names" in record:
            results.names[record["section"]] = record["names"]
        elif "name" in record:
            results.records.setdefault(record["section"], {})[record["name"]] = record
    return results


def forget(file: Path, sections: Collection[str]) -> None:
    """Take these sections' lines out; the file as it was stays, under another name."""
    number = len(list(file.parent.glob(f"{file.stem}.*{file.suffix}"))) + 1
    before = file.with_suffix(f".{number}{file.suffix}")
    os.replace(file, before)
    for record in parse(lines_of(before)):
        if record.get("section") not in sections:
            append(file, record)


def work(bench: Bench, section: str, jobs: Jobs, file: Path, run: str) -> int:
    """Measure what is left of a section. Exit code 1: the device is of no use to this process."""
    same = {"section": section, "run": run}
    measures = dict(jobs)
    append(file, {**same, "names": list(measures)})
    settled = read_results(file).settled(section, run)
    for name, measure in measures.items():
        if name in settled:
            continue
        append(file, {**same, "name": name, "begun": time.strftime("%H:%M:%S")})
        record: Record = {**same, "name": name}
        start, lost = time.perf_counter(), False
        try:
            bench.clear()
            values = measure()
            units = {key: UNITS[key] for key in values if key in UNITS}
            record |= {"values": values, "units": units}
        except Exception as error:
            if is_out_of_memory(error):  # a result like any other
                record |= {"values": {"out_of_memory": True}, "units": {}}
            else:
                record["error"] = one_line(error)
                lost = "CUDA error" in str(error)  # every call after it fails, too
        append(file, {**record, "seconds": round(time.perf_counter() - start, 3)})
        if lost:
            return 1
    return 0


def one_line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:500]}"
