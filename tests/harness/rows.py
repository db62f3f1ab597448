"""Connect tests with the table of docs/reliability.md. A row has an event in a run and the wanted
outcome. `python -m pytest -m reliability` runs all tests that check a row."""

from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/reliability.md").read_text("utf-8")
TABLE = PAGE.split("| what happens | what is wanted |\n|---|---|\n")[1].split("\n\n")[0]


def row(begin: str) -> pytest.MarkDecorator:
    """Return a pytest mark for a test or a case of a test. The mark says that the test belongs to
    the row that begins with `begin`."""
    assert [line.startswith(f"| {begin}") for line in TABLE.splitlines()].count(True) == 1, begin
    return pytest.mark.reliability(begin)
