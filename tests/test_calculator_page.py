"""docs/calculator.html in a browser: what it shows is what calculator.js says, whatever is moved.

(And that is what planner/ says: test_calculator.py.)
"""

from decimal import ROUND_HALF_UP, Decimal
from urllib.parse import urlsplit

import pytest
from harness.calculator import PAGE, SCRIPT

from memory import POLICY_NAMES
from planner import CARDS
from scripts.style import COLORS
from studies.calculator_tables import OFFERED
from trainer.device import without_margin

pytestmark = pytest.mark.browser


def open_page(browser, link: str = "", width: int = 1280, **context):
    """The page, which notes what it complains about (`complaints`) and asks for (`asked`)."""
    context = browser.new_context(viewport={"width": width, "height": 800}, **context)
    page = context.new_page()
    page.complaints, page.asked = [], []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(PAGE.as_uri() + link)
    return page


@pytest.fixture
def page(chromium):
    page = open_page(chromium)
    yield page
    assert page.complaints == []
    assert set(page.asked) == {PAGE.as_uri(), SCRIPT.as_uri()}
    page.context.close()


# ---- what is shown


def text(size: int) -> str:
    unit, digits = ("GiB", "0.01") if size >= 2**30 else ("MiB", "0.1")
    number = Decimal(size) / {"GiB": 2**30, "MiB": 2**20}[unit]  # JavaScript rounds halves up
    return f"{number.quantize(Decimal(digits), ROUND_HALF_UP)} {unit}" if size else "0"


def shape_on(page) -> dict:
    """What the controls stand at, as calculator.js calls it."""
    controls = page.locator("#controls select, #controls input[type=number]").all()
    state = {node.get_attribute("id"): node.input_value() for node in controls}
    state = {name: int(value) if value.isdecimal() else value for name, value in state.items()}
    state["policy"] = page.locator("[name=policy]:checked").get_attribute("value")
    return page.evaluate("shapeOf", state)


def policies(page, shape: dict) -> dict[str, tuple[dict, float]]:
    """policy -> (peak, FLOPs against none)"""
    asked = """s => POLICIES.map((policy) => ({...s, policy})).map(
        (s) => [s.policy, [peak(s), stepFlops(s).reduce((needed, again) => 1 + again / needed)]])"""
    return dict(page.evaluate(asked, shape))


def check(page) -> dict:
    """All figures are those of what the controls stand at; returns that."""
    shape = shape_on(page)
    found = policies(page, shape)
    peak, _ = found[shape["policy"]]
    size, place = peak["bytes"], page.locator("#place").inner_text()
    assert page.locator("#peak").inner_text() == text(size)
    assert peak["where"].replace(", block", " of block") in place
    assert f"{page.evaluate('countParameters', shape):,} parameters" in place
    rows = [*(peak["parts"][kind] for kind in COLORS), size]
    cells = page.locator("#table td").all_inner_texts()
    assert cells == [word for row in rows for word in (text(row), f"{row:,}")]

    fitting, safe = [], without_margin(CARDS[page.locator("#card").input_value()].memory, "cuda")
    for policy, (its, flops) in found.items():
        *told, batch = page.locator(f"#policy-{policy} .number").all_text_contents()
        assert told == [text(its["bytes"]), f"× {flops:.2f}"]
        assert (int(batch.replace(",", "")) >= shape["B"]) == (its["bytes"] <= safe)
        if its["bytes"] <= safe:
            fitting.append((flops, POLICY_NAMES.index(policy), policy))
    first = [f" {policy}" for *_, policy in sorted(fitting)[:1]]  # the least that is done twice
    assert page.locator(".first").all_inner_texts() == first
    return shape


# ---- what is moved


def test_each_control_moves_the_figures(page):
    page.select_option("#preset", "gpt2")
    page.locator("#policy-cheap").click()
    page.fill("#blocks", "5")
    assert check(page).items() >= {"C": 768, "policy": "cheap", "layers": 5}.items()
    chosen = [
        *("precision=float16", "moments=bfloat16", "dropout=on", "head=once", "optimizer=muon"),
        *("processes=8", "trainer=fsdp", "card=B200", "processes=1", "precision=float32"),
    ]
    for name, value in (words.split("=") for words in chosen):
        before = page.locator("#peak").inner_text()
        act = page.fill if name == "processes" else page.select_option
        act(f"#{name}", value)
        check(page)
        alike = value == "float16" or name == "card"
        assert (page.locator("#peak").inner_text() == before) == alike, name


def test_each_card_has_its_verdict(page):
    size = page.evaluate("peak", shape_on(page))["bytes"]
    cells = page.locator("#cards span").all_inner_texts()
    found = {
        name: words
        for names, words in zip(cells[::2], cells[1::2], strict=True)
        for name in names.split(", ")
    }
    assert found.keys() == {*OFFERED}
    for name, words in found.items():
        memory = CARDS[name].memory
        left = without_margin(memory, "cuda") - size
        tight = "tight" if size <= memory else f"✗ {text(size - memory)} too much"
        assert words == (f"✓ {text(left)} left" if left >= 0 else tight)


def test_what_belongs_together_moves_together(page):
    """The MLP with the width, blocks with layers, until somebody says otherwise; and what has no
    effect cannot be set."""
    blocks = page.locator("#blocks")
    assert blocks.is_disabled()  # `none`
    page.locator("[value=none]").focus()
    page.keyboard.press("ArrowDown")
    assert check(page)["policy"] == "cheap" and not blocks.is_disabled()
    page.fill("#width", "2048")
    page.locator("#layers-slider").focus()
    page.keyboard.press("ArrowLeft")
    assert check(page).items() >= {"F": 8192, "L": 23, "layers": 23}.items()
    for name, value in {"mlp": "1000", "blocks": "7", "width": "1024", "layers": "40"}.items():
        page.fill(f"#{name}", value)
    assert check(page).items() >= {"F": 1000, "layers": 7}.items()


def test_what_is_impossible_is_mended(page):
    page.fill("#heads", "7")
    note = "1,024 channels do not divide into 7 heads: computed with 4"
    assert page.locator("#heads-note").inner_text() == note
    page.fill("#layers", "0")
    assert page.locator("#layers-note").inner_text() == "1 to 1,000: computed with 1"
    page.fill("#vocabulary", "9999999999")
    page.locator("#vocabulary").blur()
    assert check(page).items() >= {"H": 4, "L": 1, "V": 2**20}.items()


def test_a_link_shares_what_is_seen(page, chromium):
    page.select_option("#preset", "gpt2-xl")
    page.locator("#policy-sdpa").click()
    page.fill("#blocks", "40")
    page.fill("#processes", "3")
    page.select_option("#trainer", "fsdp")
    page.select_option("#card", "L4")
    other = open_page(chromium, "#" + urlsplit(page.url).fragment)
    assert other.locator("main").inner_text() == page.locator("main").inner_text()
    assert check(other).items() >= {"L": 48, "layers": 40, "shards": 3}.items()


def test_a_broken_link_is_mended(chromium):
    link = "#layers=abc&heads=7&width=-1&policy=voodoo&card=voodoo&precision=1&length=1e99&x=1"
    page = open_page(chromium, link + "&toString=1&__proto__=1&constructor=1")
    check(page)
    assert page.complaints == [] and "NaN" not in page.locator("body").inner_text()


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (800, "dark"), (1400, "light")])
def test_it_fits_a_screen(chromium, width, scheme):
    link = "#layers=48&width=1600&heads=25&processes=16&policy=selective"
    page = open_page(chromium, link, width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
