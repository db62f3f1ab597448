"""The memory page in Chromium: each number on it is the planner's; and how it is used: mouse, keys,
touch, narrow, dark."""

import math
import random
import re

import numpy as np
import pytest
from harness.pages import FLAGS, Made, choose, details, frame, grouped, opened, stacked, verdict_on

from planner.record import code_of
from scripts import memory_page
from scripts.style import COLORS

pytestmark = pytest.mark.browser


@pytest.fixture
def page(made_page, chromium):
    with opened(chromium, made_page.file) as page:
        yield page


def test_policies(page, made_page):
    page.evaluate(
        "() => { window.said = []; const draw = chart.context.fillText;"
        " chart.context.fillText = function (words, ...at) {"
        " said.push(words); return draw.call(this, words, ...at); } }"
    )
    for name, record in made_page.records.items():
        page.evaluate("said.length = 0")
        choose(page, name)
        assert f"peak {record.step.peak / 2**20:.1f} MiB, {record.step.where}" in (
            page.evaluate("said")
        )
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
    """At 60 places."""
    draw, inside = random.Random(0), frame(page)
    found = 0
    while found < 60:
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
    """At 10 instants: by a click, and all of it."""
    draw, inside = random.Random(1), frame(page)
    for i in range(10):
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
def test_gpt2_small(chromium, tmp_path):
    """A page of many blocks stays below 3 MB, and works."""
    made = Made("--model gpt2 --batch-size 8 --device cuda".split(), tmp_path)
    assert made.file.stat().st_size < 3e6
    with opened(chromium, made.file) as page:
        for name, record in made.records.items():
            choose(page, name)
            assert f"{record.step.peak:,} bytes" in page.locator("#alive-about").inner_text()
        page.locator("#budget").fill("4")
        assert page.locator("#verdict").inner_text().startswith(verdict_on(made, 4 * 2**30))


# ---- How it is used


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
    for budget in (peaks[0] - 2**15, *(peaks[i] + 2**14 for i in (0, 4, -1))):
        page.locator("#budget").fill(str(budget / 2**20))
        assert page.locator("#verdict").inner_text().startswith(verdict_on(made_page, budget))
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
    assert now == pytest.approx(low + 0.8 * (high - low), rel=0.02)
    assert page.evaluate("chart.budget % chart.snap") == 0 and page.locator("#tip").is_hidden()
    assert float(page.locator("#budget").input_value()) == pytest.approx(now / 2**20, abs=0.06)
    assert page.locator("#verdict").inner_text().startswith(verdict_on(made_page, now))


def test_keys(page, made_page):
    choose(page, "full")
    record = made_page.records["full"]
    page.locator("#chart").focus()
    page.keyboard.press("p")
    at = int(record.step.total.argmax())
    assert page.evaluate("[chart.cursor.at, pinned.at]") == [at, at]
    assert "Alive at the peak" in page.locator("#spoken").inner_text()
    page.keyboard.press("ArrowRight")
    alive = stacked(record, at + 1)
    page.evaluate("chart.cursor.storage = -1")
    for key, place in (("Up", -1), ("Up", -1), ("Down", -2), ("Down", -3), ("Up", -2)):
        page.keyboard.press(f"Arrow{key}")  # from the sky down to the highest, and on
        said, there = details(page), alive[place]
        assert said["name"] == there.name and f"({there.bytes:,} bytes)" in said["bytes"]
        assert there.name in page.locator("#spoken").inner_text()
    page.keyboard.press("Enter")
    assert page.evaluate("pinned.at") == at + 1
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
    page.evaluate("chart.zoom(0.99 * chart.longest, 9)")
    assert page.evaluate("chart.view[1] === chart.longest")
    page.evaluate("chart.show(steps.find((step) => step.name === 'none'))")  # over before that
    low, high = page.evaluate("chart.range")
    assert 0 < low < state < high
    choose(page, "full")
    choose(page, "none")  # whose peak is elsewhere
    assert page.evaluate("chart.view") == [0, page.evaluate("chart.longest")]


def test_what_was_clicked_comes_back(page):
    """The pointer shows what it is on; when it is gone, what the list is about."""
    choose(page, "none")
    inside = frame(page)
    x, low = inside["x"] + 0.2 * inside["width"], inside["y"] + 0.97 * inside["height"]
    page.mouse.click(x, low, button="right")
    assert "Alive at the peak" in page.locator("#alive-title").inner_text()
    page.mouse.click(x, low)
    clicked = page.evaluate("chart.cursor"), details(page), page.locator("#legend").inner_text()
    assert clicked[1]["kind"] == "parameters" and page.locator("#tip").is_visible()
    assert f"{page.evaluate('chart.step.total[pinned.at]'):,}" in (
        page.locator("#alive-about").inner_text()
    )
    page.mouse.move(x + 0.3 * inside["width"], low - 0.3 * inside["height"])
    assert page.evaluate("chart.cursor") != clicked[0]
    page.mouse.move(x, 1)
    found = page.evaluate("chart.cursor"), details(page), page.locator("#legend").inner_text()
    assert found == clicked and page.locator("#tip").is_hidden()
    page.get_by_role("button", name="peak", exact=True).click()
    at = page.evaluate("chart.step.peakAt")
    assert page.evaluate("[pinned.at, pinned.storage]") == [
        at,
        page.evaluate("chart.step.largest(chart.step.peakAt)"),
    ]
    assert "Alive at the peak" in page.locator("#alive-title").inner_text()


def test_the_tooltip_stays_in_the_picture(page):
    inside = frame(page)
    box = page.locator("#chart").bounding_box()
    choose(page, "none")
    shown = 0
    for x in (1, 0.5 * inside["width"], 0.97 * inside["width"]):
        for y in (0.5, 0.97):
            page.mouse.move(inside["x"] + x, inside["y"] + y * inside["height"])
            tip = page.locator("#tip").bounding_box()
            if tip is None:
                continue
            shown += 1
            assert box["x"] <= tip["x"] and tip["x"] + tip["width"] <= box["x"] + box["width"]
            assert box["y"] <= tip["y"] and tip["y"] + tip["height"] <= box["y"] + box["height"]
    assert shown >= 4
    page.locator("#chart").focus()
    page.keyboard.press("1")
    assert page.locator("#tip").is_hidden()


@pytest.mark.parametrize("width", [320, 390, 800, 1400])
def test_narrow_and_wide(chromium, made_page, width):
    """Nothing is cut off; and the picture stays where it is, whatever fits: it is dragged there."""
    size = {"width": width, "height": 844}
    with opened(chromium, made_page.file, viewport=size, has_touch=True, is_mobile=True) as page:
        tops, verdicts = set(), set()
        for budget in [0, *page.evaluate("DATA.ways.map(([peak]) => peak)")]:
            page.evaluate(f"setBudget({budget})")
            tops.add(frame(page)["y"])
            verdicts.add(page.locator("#verdict").inner_text())
        assert len(tops) == 1 and len(verdicts) >= 4
        for button in page.locator("#policies button").all():  # seconds are longer than FLOPs
            button.evaluate("(b) => { b.children[2].textContent = '12,300 ms, +123.4%'; }")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        wide = "(e) => e.scrollWidth > e.clientWidth"
        assert not page.evaluate(f"[...document.querySelectorAll('#policies button')].some({wide})")
        choose(page, "full")
        page.locator("#chart").scroll_into_view_if_needed()
        inside = frame(page)
        x, y = 0.4 * inside["width"], 0.97 * inside["height"]
        page.touchscreen.tap(inside["x"] + x, inside["y"] + y)
        assert details(page)["kind"] == "parameters"
        assert page.evaluate("pinned") == page.evaluate("chart.cursor")
        smallest = page.evaluate(
            "Math.min(...[...document.querySelectorAll('button, td, dd, p')]"
            ".map((e) => parseFloat(getComputedStyle(e).fontSize)))"
        )
        assert smallest >= 12


def test_motion(page, chromium, made_page):
    """None where that is wanted; else a change ends where it should."""
    page.evaluate("choose(0)")
    drawn = page.evaluate("choose(steps.length - 1), chart.heights.map((row) => [...row])")
    assert drawn == page.evaluate("chart.stackHeights().map((row) => [...row])")
    with opened(chromium, made_page.file, reduced_motion="no-preference") as page:
        between = page.evaluate("choose(0), chart.range[1]")
        page.wait_for_function("chart.range[1] === chart.rangeOf(chart.step)[1]")
        page.wait_for_function(
            "chart.heights.every((row, k) => row.every((h, c) =>"
            " h === (chart.columns[c] < 0 ? 0 : chart.step.ofKind[k][chart.columns[c]])))"
        )
        assert page.evaluate("chart.range[1]") != between


def swipe(page, *ways, steps=8):
    """Fingers on a phone: each from (x, y) to (x, y), all at a time."""
    cdp = page.context.new_cdp_session(page)
    for i in range(steps + 1):
        points = [
            {"x": x + (to_x - x) * i / steps, "y": y + (to_y - y) * i / steps, "id": k}
            for k, ((x, y), (to_x, to_y)) in enumerate(ways)
        ]
        kind = "touchMove" if i else "touchStart"
        cdp.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    cdp.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def test_fingers(chromium, made_page):
    """They drag the budget, scroll the page, and zoom with two."""
    size = {"width": 390, "height": 844}
    with opened(chromium, made_page.file, viewport=size, has_touch=True, is_mobile=True) as page:
        choose(page, "none")
        page.evaluate("$('chart').scrollIntoView({block: 'center'})")
        inside = frame(page)
        before, scrolled = page.evaluate("[chart.budget, scrollY]")
        x = inside["x"] + inside["width"] - 1
        y = inside["y"] + page.evaluate("chart.budgetY() - chart.frame.top")
        swipe(page, ((x, y), (x, y + 80)))
        low, high = page.evaluate("chart.range")
        moved = 80 / inside["height"] * (high - low)
        after = page.evaluate("chart.budget")
        assert before - after == pytest.approx(moved, abs=page.evaluate("chart.snap"))
        assert page.evaluate("scrollY") == scrolled
        middle, cursor = inside["x"] + 0.5 * inside["width"], page.evaluate("chart.cursor")
        swipe(page, ((middle, inside["y"] + 150), (middle, inside["y"] + 50)))
        page.wait_for_function(f"scrollY > {scrolled}")
        assert page.evaluate("[chart.budget, chart.cursor]") == [after, cursor]
        page.evaluate(f"scrollTo(0, {scrolled})")
        y = inside["y"] + 0.3 * inside["height"]
        swipe(page, ((middle - 30, y), (middle - 90, y)), ((middle + 30, y), (middle + 90, y)))
        page.wait_for_function("chart.view[1] - chart.view[0] < 0.4 * chart.longest")


def test_a_model_of_kibibytes(chromium, tmp_path):
    shape = ["--n-layers=1", "--d-model=8", "--n-heads=1", "--seq-len=8", "--vocab-size=16"]
    file = tmp_path / "page.html"
    assert memory_page.main([*shape, "--batch-size=1", "--out", str(file)]) == 0
    with opened(chromium, file) as page:
        assert page.locator("#unit").inner_text() == "KiB"
        assert float(page.locator("#budget").input_value()) > 1
        assert "cheapest that fits" in page.locator("#verdict").inner_text()
        page.locator("#budget").fill("")
        assert "cheapest that fits" in page.locator("#verdict").inner_text()
        page.locator("#budget").fill("-5")
        page.locator("#budget").blur()
        assert float(page.locator("#budget").input_value()) > 1


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
