"""The table of docs/reliability.md. A row is an event in a run, the wanted outcome, and the tests
that check it. tests/conftest.py prints the table after `python -m pytest -m reliability`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

Row = tuple[str, str]  # what happens, what is wanted

PAGE = (Path(__file__).parents[2] / "docs/reliability.md").read_text("utf-8")
TABLE = PAGE.split("| what happens | what is wanted |\n|---|---|\n")[1].split("\n\n")[0]
ROWS = [tuple(line.strip("| ").split(" | ")) for line in TABLE.splitlines()]


def row(begin: str) -> pytest.MarkDecorator:
    """Return a mark: the test or case belongs to the row that begins with `begin`."""
    (found,) = (row for row in ROWS if row[0].startswith(begin))
    return pytest.mark.reliability(*found)


def table(reports: Iterable[Any]) -> list[str]:
    """Return the Markdown table. A row is held if it has cases and all of them have passed. (A
    test's report has its rows among its properties: see tests/conftest.py.)"""
    cases: dict[Row, list[bool]] = {row: [] for row in ROWS}
    for report in reports:
        for name, found in getattr(report, "user_properties", ()):  # (none if it was not selected)
            if name == "row" and (report.when == "call" or report.failed):
                cases[tuple(found)].append(report.passed)
    lines = ["| what happens | what is wanted | |", "|---|---|---|"]
    for (what, wanted), passed in cases.items():
        verdict = "held" if passed and all(passed) else "**not held**"
        lines.append(f"| {what} | {wanted} | {verdict}, {sum(passed)} of {len(passed)} |")
    return lines
