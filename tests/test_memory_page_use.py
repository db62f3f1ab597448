"""The memory page in Chromium, used: mouse, keys, touch, narrow, dark."""

import re

import numpy as np
import pytest
from pages import choose, details, first_that_fits, frame, opened, stacked

from scripts import memory_page

pytestmark = pytest.mark.browser


@pytest.fixture
def page(made_page, chromium):
    with opened(chromium, made_page.file) as page:
        yield page


def test_a_group_opens(page):
    choose(page, "none")
    button = page.locator("#alive button[aria-expanded]").first
    n = int(button.inner_text().split()[0])
    before = page.locator("#alive tr").count()
    button.click()
    assert page.locator("#alive tr.one").count() == n
    sizes = page.evaluate(
        "[...document.querySelectorAll('#alive tr.one')].map((row) => Number(row.dataset.bytes))"
    )
    group = page.locator("#alive tr", has=page.locator("button[aria-expanded]")).first
    assert sum(sizes) == int(group.get_attribute("data-bytes"))
    page.locator("#alive tr.one button").nth(1).click()
    assert details(page)["name"] == page.locator("#alive tr.one button").nth(1).inner_text()
    button.click()
    assert page.locator("#alive tr").count() == before


def test_budget(page, made_page):
    """Typed, and dragged by its line."""
    inside = frame(page)
    peaks = sorted(record.step.peak for record in made_page.records.values())
    for budget in (peaks[0] - 2**15, *(peak + 2**14 for peak in peaks)):
        page.locator("#budget").fill(str(budget / 2**20))
        expected = first_that_fits(made_page, budget)
        verdict = page.locator("#verdict").inner_text()
        assert verdict.startswith(f"first that fits: {expected} (" if expected else "nothing fits")
        for name, record in made_page.records.items():
            button = page.get_by_role("radio").filter(has=page.get_by_text(name, exact=True))
            fits = record.step.peak <= budget
            assert button.inner_text().endswith("fits" if fits else "does not fit")
            assert ("does not fit" in button.inner_text()) == (not fits)
    choose(page, "none")
    page.locator("#budget").fill(str(peaks[-2] / 2**20 / 2))
    y = page.evaluate("chart.budgetY()") + inside["y"] - page.evaluate("chart.frame.top")
    right = inside["x"] + inside["width"]
    page.mouse.move(right, y)
    page.mouse.down()
    page.mouse.move(right, inside["y"] + 0.2 * inside["height"], steps=4)
    page.mouse.up()
    now = page.evaluate("chart.budget")
    low, high = page.evaluate("chart.range")
    assert now == pytest.approx(low + 0.8 * (high - low), rel=0.01)
    assert float(page.locator("#budget").input_value()) == pytest.approx(now / 2**20, abs=0.06)
    expected = first_that_fits(made_page, now)
    verdict = page.locator("#verdict").inner_text()
    assert verdict.startswith(f"first that fits: {expected} (" if expected else "nothing fits")


def test_keys(page, made_page):
    choose(page, "full")
    record = made_page.records["full"]
    page.locator("#chart").focus()
    page.keyboard.press("p")
    at = int(record.step.total.argmax())
    assert page.evaluate("[chart.cursor.at, pinned]") == [at, at]
    page.keyboard.press("ArrowRight")
    alive = stacked(record, at + 1)
    page.evaluate("chart.cursor.storage = -1")
    for key, place in (("Up", -1), ("Up", -1), ("Down", -2), ("Down", -3), ("Up", -2)):
        page.keyboard.press(f"Arrow{key}")  # from the sky down to the highest, and on
        said, there = details(page), alive[place]
        assert said["name"] == there.name and f"({there.bytes:,} bytes)" in said["bytes"]
        assert there.name in page.locator("#spoken").inner_text()
    page.keyboard.press("Enter")
    assert page.evaluate("pinned") == at + 1
    assert "Alive here" in page.locator("#alive-title").inner_text()
    page.keyboard.press("Home")
    assert page.evaluate("chart.cursor.at") == 0
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    at = page.evaluate("chart.cursor.at")
    assert (at, "forward", 1) in [tuple(place) for place in record.step.places]
    page.keyboard.press("+")
    width = page.evaluate("chart.view[1] - chart.view[0]")
    assert width == pytest.approx(page.evaluate("chart.longest") / 2)
    page.keyboard.press("0")
    assert page.evaluate("chart.view") == [0, page.evaluate("chart.longest")]
    page.keyboard.press("End")
    assert page.evaluate("chart.cursor.at") == len(record.operators) - 1


def test_zoom(page, made_page):
    choose(page, "full")
    inside, record = frame(page), made_page.records["full"]
    page.get_by_role("button", name="backward").click()
    left, right = page.evaluate("chart.view")
    part = record.step.phase("backward")
    starts, x = memory_page.along_flops(record)
    begins = np.interp(np.arange(len(record.operators) + 1), starts, x)
    assert left < begins[part.start] and begins[part.stop] < right
    assert right - left < 1.1 * (begins[part.stop] - begins[part.start])
    # A block in the row under the picture.
    y = inside["y"] + inside["height"] + 4 + 15 + 7
    page.mouse.click(inside["x"] + inside["width"] / 2, y)
    nearer = page.evaluate("chart.view[1] - chart.view[0]")
    assert nearer < (right - left) / 3
    before = page.evaluate("chart.view")
    page.mouse.move(inside["x"] + 200, inside["y"] + 100)
    page.mouse.down()
    page.mouse.move(inside["x"] + 300, inside["y"] + 100, steps=3)
    page.mouse.up()
    after = page.evaluate("chart.view")
    assert after[0] - before[0] == pytest.approx(-100 / inside["width"] * nearer, rel=0.02)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    page.wait_for_function("(width) => chart.view[1] - chart.view[0] < 0.7 * width", arg=nearer)
    page.get_by_role("button", name="whole step").click()
    assert page.evaluate("chart.view[0]") == 0
    assert page.evaluate("chart.range[0]") == 0
    page.get_by_role("button", name="hide weights and moments").click()
    low, high = page.evaluate("chart.range")
    state = sum(s.bytes for s in record.alive(0) if s.kind in ("parameters", "optimizer"))
    assert 0 < low < state < record.step.peak < high


@pytest.mark.parametrize("width", [390, 800])
def test_phone(chromium, made_page, width):
    size = {"width": width, "height": 844}
    with opened(chromium, made_page.file, viewport=size, has_touch=True, is_mobile=True) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        choose(page, "full")
        page.locator("#chart").scroll_into_view_if_needed()
        inside = frame(page)
        page.touchscreen.tap(
            inside["x"] + 0.4 * inside["width"], inside["y"] + 0.97 * inside["height"]
        )
        assert details(page)["kind"] == "parameters"
        assert page.evaluate("pinned") == page.evaluate("chart.cursor.at")
        smallest = page.evaluate(
            "Math.min(...[...document.querySelectorAll('button, td, dd, p')]"
            ".map((e) => parseFloat(getComputedStyle(e).fontSize)))"
        )
        assert smallest >= 12


def test_animated_change_ends_where_it_should(chromium, made_page):
    with opened(chromium, made_page.file, reduced_motion="no-preference") as page:
        between = page.evaluate("choose(0), chart.range[1]")
        page.wait_for_function("chart.range[1] === chart.rangeOf(chart.step)[1]")
        page.wait_for_function(
            "chart.heights.every((row, k) => row.every((h, c) =>"
            " h === (chart.columns[c] < 0 ? 0 : chart.step.ofKind[k][chart.columns[c]])))"
        )
        assert page.evaluate("chart.range[1]") != between


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read(chromium, made_page, scheme):
    """A contrast of 4.5 to 1 at least (WCAG 2.2, 1.4.3), of all words outside of the picture."""
    with opened(chromium, made_page.file, color_scheme=scheme) as page:
        colors = page.evaluate(
            """() => [...document.querySelectorAll('body, body :not(script, style)')]
        .filter((e) => e.offsetParent && e.textContent.trim()).map((e) => {
          let under = e;
          while (under !== document.body &&
                 getComputedStyle(under).backgroundColor === 'rgba(0, 0, 0, 0)')
            under = under.parentElement;
          return [getComputedStyle(e).color, getComputedStyle(under).backgroundColor];
        })"""
        )

    def brightness(color: str) -> float:
        parts = [int(n) / 255 for n in re.findall(r"\d+", color)[:3]]
        parts = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    assert len(colors) > 50
    for ink, paper in set(map(tuple, colors)):
        light, dark = sorted((brightness(ink), brightness(paper)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, paper)
