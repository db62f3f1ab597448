"""The table of docs/reliability.md: a row is what happens to a run, what is wanted of it then, and
the tests that say so. tests/conftest.py prints it after `python -m pytest -m reliability`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

Row = tuple[str, str]  # what happens, what is wanted

PAGE = (Path(__file__).parents[2] / "docs/reliability.md").read_text("utf-8")
TABLE = PAGE.split("| what happens | what is wanted |\n|---|---|\n")[1].split("\n\n")[0]
ROWS = [tuple(line.strip("| ").split(" | ")) for line in TABLE.splitlines()]


def row(begin: str) -> pytest.MarkDecorator:
    """This test, or this case of it, is (part of) the row that begins so."""
    (found,) = (row for row in ROWS if row[0].startswith(begin))
    return pytest.mark.reliability(*found)


def table(reports: Iterable[Any]) -> list[str]:
    """Markdown; a row is held if each of its cases has passed, and there is one. (A test's report
    has its rows among its properties: see tests/conftest.py.)"""
    cases: dict[Row, list[bool]] = {row: [] for row in ROWS}
    for report in reports:
        for name, found in getattr(report, "user_properties", ()):  # (none if it was not chosen)
            if name == "row" and (report.when == "call" or report.failed):
                cases[tuple(found)].append(report.passed)
    lines = ["| what happens | what is wanted | |", "|---|---|---|"]
    for (what, wanted), passed in cases.items():
        verdict = "held" if passed and all(passed) else "**not held**"
        lines.append(f"| {what} | {wanted} | {verdict}, {sum(passed)} of {len(passed)} |")
    return lines
