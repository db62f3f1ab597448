"""Make the table of docs/reliability.md with the results of tests. A row has an event in a run, the
wanted outcome, and the result of the tests that check this outcome. tests/conftest.py prints the
table after `python -m pytest -m reliability`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

Row = tuple[str, str]  # (what happens in a run, which outcome is wanted)

PAGE = (Path(__file__).parents[2] / "docs/reliability.md").read_text("utf-8")
TABLE = PAGE.split("| what happens | what is wanted |\n|---|---|\n")[1].split("\n\n")[0]
ROWS = [tuple(line.strip("| ").split(" | ")) for line in TABLE.splitlines()]


def row(begin: str) -> pytest.MarkDecorator:
    """Return a pytest mark for a test or a case of a test. The mark says that the test belongs to
    the row that begins with `begin`."""
    (found,) = (row for row in ROWS if row[0].startswith(begin))
    return pytest.mark.reliability(*found)


def table(reports: Iterable[Any]) -> list[str]:
    """Return the lines of the Markdown table. A row is "held" if it has cases and all its cases
    have passed. (`user_properties` of a test's report has the test's rows: see tests/conftest.py.)
    """
    cases: dict[Row, list[bool]] = {row: [] for row in ROWS}
    for report in reports:
        # (Reports of warnings have no `user_properties`.)
        for name, found in getattr(report, "user_properties", ()):
            if name == "row" and (report.when == "call" or report.failed):
                cases[tuple(found)].append(report.passed)
    lines = ["| what happens | what is wanted | |", "|---|---|---|"]
    for (what, wanted), passed in cases.items():
        verdict = "held" if passed and all(passed) else "**not held**"
        lines.append(f"| {what} | {wanted} | {verdict}, {sum(passed)} of {len(passed)} |")
    return lines
