"""The calculator in docs/ says what planner/ says: peaks, parts, counts and commands. And its page
shows what its script says, whatever is moved."""

from urllib.parse import urlencode

import pytest
from harness.calculator import PAGE, SCRIPT, random_states
from harness.pages import opened, shown
from harness.runs import parse

from planner import CARDS
from planner.formulas import count_parameters, flops_per_token
from scripts import memory_page, plan_memory
from studies.calculator_tables import OFFERED, tables
from trainer.device import without_margin
from trainer.plan import Plan, vocab_size_of

pytestmark = pytest.mark.browser
DRAWN = random_states(60)
# Peaks that are drawn rarely: in the optimizer (of few tokens, one or both moments at a time; with
# tables that are one piece, or several; and beside the head at once), of a narrow MLP in
# attention's backward, or where a replay with dropout ends, and behind all blocks.
SMALL = DRAWN[0] | {
    **{"layers": 2, "blocks": 2, "heads": 4, "width": 96, "mlp": 96, "length": 64, "batch": 64},
    **{"vocabulary": 257, "head": "chunks", "precision": "bfloat16", "dropout": "off"},
    **{"optimizer": "adamw", "moments": "float32", "processes": 1, "trainer": "ddp"},
    "card": "H100",
}
LEAN = SMALL | {"moments": "bfloat16", "batch": 1, "policy": "none", "head": "once"}
RARE = [
    LEAN | {"vocabulary": 10007, "width": 200, "mlp": 800, "optimizer": "muon"},
    LEAN | {"vocabulary": 10007, "width": 152, "mlp": 464, "length": 16},
    LEAN | {"vocabulary": 50257, "width": 152, "mlp": 464, "length": 16},
    LEAN | {"vocabulary": 50257, "width": 1152, "mlp": 4608, "batch": 6, "optimizer": "muon"},
    LEAN | {"width": 1152, "mlp": 4608, "optimizer": "muon"},
    LEAN | {"precision": "float32", "width": 1152, "mlp": 4608, "optimizer": "muon"},
    SMALL | {"policy": "full"},
    SMALL | {"policy": "selective", "layers": 1, "blocks": 1, "dropout": "on", "processes": 2},
    SMALL | {"policy": "qkv", "dropout": "on", "width": 256, "mlp": 256},
    SMALL | {"policy": "full", "width": 120, "mlp": 480, "length": 16, "batch": 8},
]
# Parts of the peak. (The others differ between two instants with as many bytes, in GELU's backward,
# of which either may be said to be the peak.)
PARTS = "parameters", "optimizer", "gradients", "head"
SAME = "batch_size", "seq_len", "optimizer", "moments_dtype", "no_amp", "amp_dtype"


@pytest.fixture(scope="module")
def page(chromium):
    with opened(chromium, PAGE, SCRIPT) as page:
        yield page


def visit(page, state: dict) -> None:
    page.goto(f"{PAGE.as_uri()}#{urlencode(state)}")


def set_by_hand(page, **values) -> None:
    for name, value in values.items():
        act = page.fill if isinstance(value, int) else page.select_option
        if page.locator(f"#{name}").is_enabled():
            act(f"#{name}", str(value))


def text(size: int) -> str:
    unit, digits, of = ("GiB", 2, 2**30) if size >= 2**30 else ("MiB", 1, 2**20)
    return f"{size / of + 1e-9:.{digits}f} {unit}" if size else "0"  # JavaScript rounds halves up


CONTROLS = "#card, #controls :is(select, [type=number]):not(#preset), [name=policy]:checked"
VALUES = "(all) => Object.fromEntries(all.map((one) => [one.name || one.id, one.value]))"
SAID = """(batches) => {
    const [s] = mended(state), shape = shapeOf(s), policy = advice(s);
    const rows = POLICIES.map((policy, i) => {
        const shape = shapeOf({...s, policy}), [needed, again] = stepFlops(shape);
        const sizes = [s.batch, batches[i], batches[i] + 1].map((B) => peak({...shape, B}).bytes);
        return [1 + again / needed, policy, ...sizes];
    });
    return {state: s, peak: peak(shape), parameters: countParameters(shape),
            flops: stepFlops(shape), rows, run: policy && runCommand({...s, policy}),
            commands: [runCommand(s), planCommand(s), seeCommand(s)]};
}"""


def check(page, **wanted) -> dict:
    """Each number shown is that of what the controls stand at, which is what is wanted. Returns
    what the script says."""
    numbers = shown(page, "label.policy .number")
    batches = [int(words.replace(",", "")) for words in numbers[2::3]]
    said = page.evaluate(SAID, batches)
    state, size = said["state"], said["peak"]["bytes"]
    stand = page.locator(CONTROLS).evaluate_all(VALUES)
    assert stand == {name: str(value) for name, value in state.items()}
    assert state.items() >= wanted.items()

    (place,) = shown(page, "#place")
    assert said["peak"]["where"].replace(", block", " of block") in place
    assert f"{said['parameters']:,} parameters" in place and shown(page, "#peak") == [text(size)]
    sizes = *said["peak"]["parts"].values(), size
    assert shown(page, "#table td") == [word for n in sizes for word in (text(n), f"{n:,}")]
    commands = [said["run"], *said["commands"][1:]]
    assert shown(page, ".command:visible code") == [command for command in commands if command]

    safe = without_margin(CARDS[state["card"]].memory, "cuda")
    for i, (flops, _, now, fits, more) in enumerate(said["rows"]):
        assert numbers[3 * i : 3 * i + 2] == [text(now), f"× {flops:.2f}"]
        assert (batches[i] == 0 or fits <= safe) and more > safe
    fitting = [row[1] for row in sorted(said["rows"], key=lambda row: row[0]) if row[2] <= safe]
    assert shown(page, ".policy .first") == fitting[:1]

    cells = shown(page, "#cards span")
    verdicts = [
        (name, words)
        for names, words in zip(cells[::2], cells[1::2], strict=True)
        for name in names.split(", ")
    ]
    assert {name for name, _ in verdicts} == {*OFFERED}
    for name, words in verdicts:
        memory, left = CARDS[name].memory, without_margin(CARDS[name].memory, "cuda") - size
        tight = "tight" if size <= memory else f"✗ {text(size - memory)} too much"
        assert words == (f"✓ {text(left)} left" if left >= 0 else tight)
    return said


def planned(commands: list[str], state: dict) -> Plan:
    """The plan of the step that all three commands mean."""
    n, trainer = state["processes"], state["trainer"] if state["processes"] > 1 else "minimal"
    start = f"torchrun --nproc-per-node={n}" if n > 1 else "python"
    starts = (
        f"{start} train_{trainer}.py",
        *(f"python -m scripts.{name}" for name in ("plan_memory", "memory_page")),
    )
    train, plan, show = map(str.removeprefix, commands, starts)
    run, see = parse(train), memory_page.parse(show.split())
    card = f"--card {see.card.replace(' ', '-')}"
    assert see.card == state["card"] and card in plan
    # (The page knows a card by its size alone. The plan has a row for each policy.)
    words = plan.replace(card, "--device cuda").split()
    asked = plan_memory.make_plan(plan_memory.parse(words))[0]
    asked = asked.with_policy(run.use_activation_checkpoint)
    for other in (run, see):
        assert asked.config == other.model_config(vocab_size_of(other))
        assert all(getattr(other, name) == getattr(asked.settings, name) for name in SAME)
    assert asked.layout.world_size == n
    return asked


@pytest.mark.parametrize(
    "states",
    [
        DRAWN[:10] + RARE,
        *(pytest.param(DRAWN[i : i + 10], marks=pytest.mark.slow) for i in range(10, 60, 10)),
    ],
)
def test_the_page_says_what_the_planner_says(page, states):
    """Of a drawn state: all three commands mean it; and the peak is that of the planner, to two
    thousandths, in the same place, made of the same, as page and documents promise."""
    for state in states:
        visit(page, state)
        said = check(page, **state)
        asked, peak = planned(said["commands"], state), said["peak"]
        step = asked.step
        assert said["parameters"] == count_parameters(asked.config)
        assert tuple(said["flops"]) == flops_per_token(asked.config, state["length"])
        assert peak["where"] == step.peak_location, state
        assert peak["bytes"] == pytest.approx(step.peak, rel=0.002), state
        assert peak["bytes"] == sum(peak["parts"].values())
        for part in PARTS:
            wanted = pytest.approx(step.bytes_by_kind_at_peak[part], abs=0.002 * step.peak)
            assert peak["parts"][part] == wanted, state


def test_tables_are_those_of_the_project():
    assert tables() in SCRIPT.read_text(), "stale: python -m studies.calculator_tables"


def test_the_page_is_used(page):
    """By hand, from its first state to drawn ones, past what is impossible, and in all widths."""
    page.goto("about:blank")
    page.goto(PAGE.as_uri())
    check(page, layers=24, width=1024)
    for state in random_states(6, seed=7):
        visit(page, {"layers": 1})
        page.locator(f"#policy-{state['policy']}").click()
        set_by_hand(page, **{name: value for name, value in state.items() if name != "policy"})
        check(page, **state)
    page.reload()  # the link keeps it
    check(page, **state)

    # What has no effect cannot be set. The MLP moves with the width, and blocks with layers.
    visit(page, {"layers": 24})
    assert page.locator("#blocks").is_disabled() and page.locator("#trainer").is_disabled()
    page.locator("[value=none]").press("ArrowDown")
    set_by_hand(page, width=2048)
    page.locator("#layers-slider").press("ArrowLeft")
    check(page, policy="cheap", mlp=8192, layers=23, blocks=23)
    set_by_hand(page, mlp=1000, blocks=7, width=1024, layers=40)
    check(page, mlp=1000, blocks=7)

    # What is impossible is mended, in fields and in links.
    set_by_hand(page, heads=7)
    note = "1,024 channels do not divide into 7 heads: computed with 4"
    assert shown(page, "#heads-note") == [note]
    set_by_hand(page, layers=0)
    assert shown(page, "#layers-note") == ["1 to 1,000: computed with 1"]
    set_by_hand(page, vocabulary=9999999999)
    page.locator("#vocabulary").blur()
    check(page, heads=4, layers=1, vocabulary=2**20)
    broken = {"layers": "abc", "heads": 7, "width": -1, "precision": 1, "length": "1e99", "x": 1}
    strange = dict.fromkeys(("policy", "card", "toString", "__proto__", "constructor"), "voodoo")
    visit(page, broken | strange)
    check(page)
    assert "NaN" not in page.locator("body").inner_text()

    visit(page, {"layers": 48, "width": 1600, "heads": 25, "processes": 16, "policy": "selective"})
    for width, scheme in ((390, "light"), (800, "dark"), (1400, "light")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
