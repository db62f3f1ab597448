"""The tables of scripts/gpu_report.py, from lines that are given."""

import json

import pytest

from scripts.gpu_report import SECTIONS
from scripts.gpu_report_markdown import merge_turns, report, show, tables
from scripts.gpu_report_results import collect

REPORTED = {name: section.about for name, section in SECTIONS.items()}


def test_turns_become_medians():
    def record(ms):
        return {"values": {"ms": ms, "allocated": 2**20, "ms_all": [ms], "where": "x"}}

    turns = {f"full, turn {i + 1}": record(ms) for i, ms in enumerate((3.0, 1.0, 2.5))}
    rows = merge_turns({**turns, "none": {"error": "no"}, "mlp, turn 1": record(7.0)})
    assert rows["full"]["ms"] == 2.5 and rows["full"]["turns"] == 3
    assert rows["full"]["ms apart"] == 2.0 and rows["full"]["where"] == "x"
    assert [*rows] == ["full", "mlp"] and rows["mlp"]["ms"] == 7.0


def test_predicted_beside_measured():
    rows = {"full": {"predicted": 3 * 2**20, "allocated": 4 * 2**20, "active": None, "raw": [1.0]}}
    head, _, line = tables(rows).splitlines()
    assert head == "|  | predicted | allocated | predicted / allocated |"
    assert line == "| full | 3.0 MiB | 4.0 MiB | 0.750 |"


def test_rows_with_other_values_are_other_tables():
    text = tables({"a": {"ms": 1.0}, "b": {"GB/s": 2.0}, "c": {"ms": 3.0}})
    assert [line for line in text.splitlines() if "---" not in line] == [
        "|  | ms |",
        "| a | 1.000 |",
        "| c | 3.000 |",
        "",
        "|  | GB/s |",
        "| b | 2.000 |",
    ]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, None, ""),
        (True, None, "yes"),
        (1536, "bytes", "1.5 KiB"),
        (0.123, "share", "12.3%"),
        (1234567, None, "1,234,567"),
        (12.3456, "ms", "12.346"),
        (1234.56, None, "1,234.6"),
        (1.5e-7, None, "1.50e-07"),
        (0.0, None, "0.000"),
        ("a | b\nc", None, "a / b c"),
    ],
)
def test_cells(value, unit, text):
    assert show(value, unit) == text


def test_a_line_that_was_cut_short_is_left_out():
    good = {"section": "head", "name": "a", "values": {"ms": 1.0}, "units": {}, "run": "r"}
    results = collect([json.dumps(good), '{"section": "head", "name": "b", "val', "[]"])
    assert [*results.records["head"]] == ["a"]
    assert "| a | 1.000 |" in report(results, REPORTED)
