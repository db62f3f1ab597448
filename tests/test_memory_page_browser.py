"""The memory page in Chromium: each number on it is the planner's."""

import math
import random

import numpy as np
import pytest
from harness.pages import (
    FLAGS,
    Made,
    choose,
    details,
    first_that_fits,
    frame,
    grouped,
    opened,
    stacked,
)

from planner.record import code_of
from scripts import memory_page
from scripts.style import COLORS

GPT2 = ["--model", "gpt2", "--batch-size", "8", "--device", "cuda"]

pytestmark = pytest.mark.browser


@pytest.fixture
def page(made_page, chromium):
    with opened(chromium, made_page.file) as page:
        yield page


def test_policies(page, made_page):
    for name, record in made_page.records.items():
        choose(page, name)
        checked = page.locator("[role=radio][aria-checked=true]")
        assert checked.count() == 1
        size = f"{record.step.peak / 2**20:.1f} MiB"
        assert size in checked.inner_text()
        assert size in page.locator("#alive-title").inner_text()
        label = page.locator("#chart").get_attribute("aria-label")
        assert size in label and record.step.where in label
        assert page.evaluate("chart.step.name") == name
    page.locator("#chart").focus()
    page.keyboard.press("2")
    assert page.evaluate("chart.step.name") == "none"
    page.locator("[role=radio][aria-checked=true]").press("ArrowRight")
    assert page.evaluate("[chart.step.name, document.activeElement.firstChild.textContent]") == [
        "cheap",
        "cheap",
    ]


def test_what_is_under_the_pointer(page, made_page):
    """At 100 places."""
    draw, inside = random.Random(0), frame(page)
    found = 0
    while found < 100:
        name = draw.choice([*made_page.records])
        choose(page, name)
        if draw.random() < 0.5:  # nearer
            page.locator("#zoom").get_by_text(draw.choice(["forward", "head", "backward"])).click()
        for _ in range(5):
            column, row = draw.randrange(int(inside["width"])), draw.uniform(0, inside["height"])
            page.mouse.move(inside["x"] + column + 0.5, inside["y"] + row)
            place = page.evaluate("[chart.cursor, chart.view, chart.range, chart.columns.length]")
            cursor, (left, right), (low, high), n = place
            record = made_page.records[name]
            starts, x = memory_page.along_flops(record)
            begins = np.interp(np.arange(len(record.operators) + 1), starts, x)
            if left + (right - left) * (column + 1) / n >= begins[-1]:
                continue  # after the step
            # The fullest instant of those that the column covers.
            edges = left + (right - left) * np.array([column, column + 0.999]) / n
            first, last = np.searchsorted(begins[:-1], edges, "right") - 1
            total = record.step.total
            assert total[cursor["at"]] == total[first : last + 1].max()
            assert first <= cursor["at"] <= last
            height = low + (high - low) * (1 - row / inside["height"])
            below, expected = 0, None
            for storage in stacked(record, cursor["at"]):
                below += storage.bytes
                if height < below:
                    expected = storage
                    break
            if abs(below - height) < 2 * (high - low) / 1e4 or expected is None:
                continue  # an edge, which a pixel may round; or the sky
            said = details(page)
            assert said["name"] == expected.name
            assert f"({expected.bytes:,} bytes)" in said["bytes"]
            shape = " x ".join(f"{n:,}" for n in expected.shape) or "one number"
            assert said["what"] == f"{shape}, {str(expected.dtype).removeprefix('torch.')}"
            assert said.get("block") == (None if expected.block is None else str(expected.block))
            assert said.get("line", "") == "\n".join(
                filter(None, (expected.line, code_of(expected.line)))
            )
            assert said["why"] == expected.why
            if expected.died == math.inf:
                assert said["goes"] == "stays for the next step"
            else:
                assert f"(operator {int(expected.died):,})" in said["goes"] + "(operator at once"
            found += 1
        page.get_by_role("button", name="whole step").click()


def test_lists_of_what_is_alive(page, made_page):
    """At 20 instants: by a click, and all of it."""
    draw, inside = random.Random(1), frame(page)
    for i in range(20):
        name = draw.choice([*made_page.records])
        choose(page, name)
        end = page.evaluate("chart.step.x[chart.step.length] / chart.longest")
        x = inside["x"] + draw.uniform(0.01, 0.98) * inside["width"] * end
        if i:  # the first one is the peak, without a click
            page.mouse.click(x, inside["y"] + 5)
        at, record = page.evaluate("pinned.at"), made_page.records[name]
        expected = grouped(record, at)
        if more := len(expected) > 12:
            rest = sorted(sum(sizes) for sizes in expected.values())[:-12]
            left = f"{sum(rest)} bytes" if sum(rest) < 1024 else f"{sum(rest) / 1024:.1f} KiB"
            words = page.locator("#more").inner_text()
            assert sum(rest) < 2**20 and words == f"and {len(rest)} more: {left}"
            page.locator("#more").click()
        assert page.locator("#more").is_visible() == more
        rows = page.evaluate(
            "[...document.querySelectorAll('#alive tr')].map((row) => [Number(row.dataset.bytes),"
            " Number(row.dataset.count), row.querySelector('button').textContent])"
        )
        bytes_of = sorted(((sum(sizes), len(sizes)) for sizes in expected.values()), reverse=True)
        assert sorted(((size, n) for size, n, _ in rows), reverse=True) == bytes_of
        assert [size for size, _, _ in rows] == sorted((r[0] for r in rows), reverse=True)
        for (kind, what), sizes in expected.items():
            if len(sizes) > 1:
                assert [sum(sizes), len(sizes), f"{len(sizes)} × {what}"] in rows, (kind, what)
        about = page.locator("#alive-about").inner_text()
        assert f"{record.step.total[at]:,} bytes in {len(record.alive(at)):,} storages" in about
        made_here = [s for s in record.alive(at) if s.born]
        if made_here:
            most = max(storage.bytes for storage in made_here)
            largest = [s for s in made_here if s.bytes == most]
            said = page.locator("#largest").inner_text()
            assert any(f": {s.name}, " in said and f", {s.line}" in said for s in largest)


def test_the_picture_has_the_kinds_heights(page, made_page):
    """Read from the pixels: how much of a column has each kind's colour."""
    choose(page, "none")
    page.locator("#budget").fill("0")
    record = made_page.records["none"]
    at = int(record.step.total.argmax())
    page.evaluate("point({at: 0, storage: -1})")
    column = page.evaluate("chart.columns.indexOf(chart.step.peakAt)")
    pixels = page.evaluate(
        """(column) => {
      const {left, top, height} = chart.frame;
      return Array.from(chart.context.getImageData(left + column, top, 1, height).data);
    }""",
        column,
    )
    rgb = np.array(pixels).reshape(-1, 4)[:, :3]
    low, high = page.evaluate("chart.range")
    for kind, color in COLORS.items():
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        found = (abs(rgb - wanted).max(axis=1) < 12).sum() / len(rgb) * (high - low)
        size = record.step.at_peak[kind]
        # (Lines between storages have another colour.)
        assert 0.75 * size - 0.01 * high < found < size + 0.01 * high, kind
    assert sum(record.step.at_peak.values()) == record.step.total[at]


def test_a_block_lights_up(page, made_page):
    """Its forward, its backward and what that replays."""
    choose(page, "full")
    record = made_page.records["full"]
    i = next(i for i, s in enumerate(record.storages) if s.replayed and s.block == 2)
    at = record.storages[i].born
    page.evaluate(f"point({{at: {at}, storage: -1}})")

    def colors() -> list[list[int]]:
        return page.evaluate(
            """() => chart.step.parts.filter((part) => part.block !== null).map((part) => {
          const x = (chart.toX(chart.step.x[part.from]) + chart.toX(chart.step.x[part.to + 1])) / 2;
          return [part.block, ...chart.context.getImageData(x, chart.frame.top + 2, 1, 1).data];
        })"""
        )

    before = colors()
    page.evaluate(f"point({{at: {at}, storage: {i}}})")
    lit = [a[0] for a, b in zip(colors(), before, strict=True) if a != b]
    assert lit == [2, 2]
    assert "replay" in details(page)["comes"]


def test_seconds(chromium, tmp_path):
    file = tmp_path / "page.html"
    flags = [*FLAGS[:-2], "--card", "RTX 4090", "--memory-budget", "30MiB"]
    assert memory_page.main([*flags, "--out", str(file)]) == 0
    with opened(chromium, file) as page:
        assert page.evaluate("[DATA.axis, chart.budget]") == ["seconds", 22.5 * 2**20]
        longest, every = page.evaluate("[chart.longest, steps.map((step) => step.seconds)]")
        assert longest == pytest.approx(max(every), rel=1e-6)
        slow = "costWords(1.2345)"
        assert page.evaluate(slow).startswith("1,230 ms, ")
        room = "setBudget(1e12), $('verdict').textContent"  # plain is the fastest here
        assert "plain" not in page.evaluate(room)
        first = page.get_by_role("radio").nth(1).inner_text()
        assert f"{1000 * every[1]:.3g} ms, +0.0%" in first


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "most"), [(GPT2, 3), (["--model", "gpt2-xl", *GPT2[2:]], 10)])
def test_large_models(chromium, tmp_path, flags, most):
    made_page = Made(flags, tmp_path, steps=True)
    assert made_page.file.stat().st_size < most * 1e6
    with opened(chromium, made_page.file) as page:
        for name, step in made_page.steps.items():
            choose(page, name)
            assert f"{step.peak:,} bytes" in page.locator("#alive-about").inner_text()
        page.locator("#budget").fill("4")
        expected = first_that_fits(made_page, 4 * 2**30)
        verdict = page.locator("#verdict").inner_text()
        assert verdict.startswith(
            f"cheapest that fits: {expected} (" if expected else "nothing fits"
        )
