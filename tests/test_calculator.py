"""The calculator in docs/ says what planner/ says: peaks, parts, counts and commands. And its page
shows what its script says, whatever is moved."""

from decimal import ROUND_HALF_UP, Decimal
from urllib.parse import urlencode

import pytest
from harness.calculator import PAGE, SCRIPT, evaluate, random_states
from harness.runs import parse

from memory import recompute_plan_of_config
from planner import CARDS
from planner.formulas import count_parameters, flops_per_token
from scripts import memory_page, plan_memory
from studies.calculator_tables import OFFERED, tables
from trainer.device import without_margin
from trainer.plan import vocab_size_of

DRAWN = random_states(60)
# Peaks that are drawn rarely: in the optimizer (of few tokens, one or both moments at a time; with
# tables that are one piece, or several; and beside the head at once), of a narrow MLP in
# attention's backward, or where a replay with dropout ends, and behind all blocks.
SMALL = DRAWN[0] | {"length": 64, "batch": 64, "vocabulary": 257, "head": "chunks", "card": "H100"}
SMALL |= {"layers": 2, "blocks": 2, "heads": 4, "width": 96, "mlp": 96, "processes": 1}
SMALL |= {
    "precision": "bfloat16",
    "optimizer": "adamw",
    "moments": "float32",
    "dropout": "off",
    "trainer": "ddp",
}
LEAN = SMALL | {"moments": "bfloat16", "batch": 1, "policy": "none", "head": "once"}
RARE = [
    LEAN | {"vocabulary": 10007, "width": 200, "mlp": 800, "optimizer": "muon"},
    LEAN | {"vocabulary": 10007, "width": 152, "mlp": 464, "length": 7},
    LEAN | {"vocabulary": 50257, "width": 152, "mlp": 464, "length": 7},
    LEAN | {"vocabulary": 50257, "width": 1152, "mlp": 4608, "batch": 6, "optimizer": "muon"},
    LEAN | {"precision": "float32", "width": 1152, "mlp": 4608, "optimizer": "muon"},
    SMALL | {"policy": "full"},
    SMALL | {"policy": "selective", "layers": 1, "blocks": 1, "dropout": "on", "processes": 2},
    SMALL | {"policy": "qkv", "dropout": "on", "width": 256, "mlp": 256},
    SMALL | {"policy": "full", "width": 120, "mlp": 480, "length": 7, "batch": 19},
]
SAME = "batch_size", "seq_len", "optimizer", "moments_dtype", "no_amp", "amp_dtype"


def merged(parts: dict[str, int]) -> dict[str, int]:
    """Of two instants with as many bytes, in GELU's backward, either may be said to be the peak."""
    passing = ("activations", "recomputed", "temporaries")
    return {k: n for k, n in parts.items() if k not in passing} | {
        "passing": sum(parts[kind] for kind in passing)
    }


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))]
)
def test_formulas_and_commands_are_the_planners(part, request):
    """Of a drawn state: all three commands mean it; and the peak is that of the planner, to two
    thousandths, in the same place, made of the same, as page and documents promise."""
    states = DRAWN[10 * part : 10 * part + 10] + RARE * (part == 0)
    said = "[peak(shapeOf(s)), countParameters(shapeOf(s)), stepFlops(shapeOf(s))]"
    said = f"x.map((s) => [...{said}, runCommand(s), planCommand(s), seeCommand(s)])"
    for state, answer in zip(states, evaluate(said, states, request), strict=True):
        peak, parameters, flops, *commands = answer
        n, trainer = state["processes"], state["trainer"] if state["processes"] > 1 else "minimal"
        start = f"torchrun --nproc-per-node={n}" if n > 1 else "python"
        starts = (
            f"{start} train_{trainer}.py",
            *(f"python -m scripts.{name}" for name in ("plan_memory", "memory_page")),
        )
        words = [
            command.removeprefix(start).split()
            for start, command in zip(starts, commands, strict=True)
        ]
        run, see, card = parse(*words[0]), memory_page.parse(words[2]), words[1].index("--card")
        assert see.card == state["card"] and words[1][card + 1] == see.card.replace(" ", "-")
        words[1][card : card + 2] = "--device", "cuda"  # (the page knows a card by its size alone)
        asked, _ = plan_memory.parse_request(words[1])
        asked = asked.with_args(
            asked.args.replace(use_activation_checkpoint=run.use_activation_checkpoint)
        )
        config, step = asked.config, asked.predicted_step
        for args in (run, see):  # (the plan has a row for each policy)
            assert config == args.model_config(vocab_size_of(args))
            assert all(getattr(args, name) == getattr(asked.args, name) for name in SAME)
        assert (asked.processes, asked.ddp) == (n, trainer == "ddp")
        assert asked.shard_degree == (n if trainer == "fsdp" else 1)
        assert str(asked.precision) == f"torch.{state['precision']}"
        assert config.dropout == 0.1 * (state["dropout"] == "on")
        policies = [state["policy"]] * state["blocks"] + ["none"] * state["layers"]
        assert [*recompute_plan_of_config(config).policies] == policies[: state["layers"]]

        assert parameters == count_parameters(config)
        assert tuple(flops) == flops_per_token(config, state["length"])
        assert peak["bytes"] == sum(peak["parts"].values())
        assert peak["where"] == step.peak_location, state
        assert peak["bytes"] == pytest.approx(step.peak, rel=0.002), state
        parts = merged(step.bytes_by_kind_at_peak)
        assert merged(peak["parts"]) == pytest.approx(parts, abs=0.002 * step.peak), state


def test_tables_are_those_of_the_project(request):
    assert tables() in SCRIPT.read_text(), "stale: python -m studies.calculator_tables"
    asked = "Object.keys(CARDS).map((c) => [c, memoryOf(c), forTensors(memoryOf(c))])"
    for name, size, safe in evaluate(asked, None, request):
        assert size == CARDS[name].memory and safe == without_margin(size, "cuda")


# ---- In a browser


SAID = """(batches) => {
    const [s] = mended(state), policy = advice(s), run = policy && runCommand({...s, policy});
    const rows = POLICIES.map((policy, i) => {
        const shape = shapeOf({...s, policy}), [needed, again] = stepFlops(shape);
        const sizes = [s.batch, batches[i], batches[i] + 1].map((B) => peak({...shape, B}).bytes);
        return [policy, 1 + again / needed, ...sizes];
    });
    return {state: s, peak: peak(shapeOf(s)), parameters: countParameters(shapeOf(s)), rows,
            commands: [run, planCommand(s), seeCommand(s)].filter((command) => command)};
}"""


def text(size: int) -> str:
    unit, digits = ("GiB", "0.01") if size >= 2**30 else ("MiB", "0.1")
    number = Decimal(size) / {"GiB": 2**30, "MiB": 2**20}[unit]  # JavaScript rounds halves up
    return f"{number.quantize(Decimal(digits), ROUND_HALF_UP)} {unit}" if size else "0"


def check(page, **wanted) -> None:
    """Each number shown is that of what the controls stand at, which is what is wanted."""

    def shown(selector: str) -> list[str]:
        return [words.strip() for words in page.locator(selector).all_text_contents()]

    numbers = shown("label.policy .number")
    batches = [int(words.replace(",", "")) for words in numbers[2::3]]
    said = page.evaluate(SAID, batches)
    state, rows, size, parts = (
        said["state"],
        said["rows"],
        *map(said["peak"].get, ("bytes", "parts")),
    )
    controls = page.locator("#card, #controls :is(select, [type=number]):not(#preset)").all()
    stand = {control.get_attribute("id"): control.input_value() for control in controls}
    stand["policy"] = page.locator("[name=policy]:checked").get_attribute("value")
    assert stand == {name: str(value) for name, value in state.items()}
    assert state.items() >= wanted.items()

    (place,) = shown("#place")
    assert said["peak"]["where"].replace(", block", " of block") in place
    assert f"{said['parameters']:,} parameters" in place and shown("#peak") == [text(size)]
    sizes = *parts.values(), size
    assert shown("#table td") == [word for n in sizes for word in (text(n), f"{n:,}")]
    assert shown(".command:visible code") == said["commands"]

    told = [word for _, flops, n, *_ in rows for word in (text(n), f"× {flops:.2f}")]
    assert told == [word for i, word in enumerate(numbers) if i % 3 < 2]
    safe = without_margin(CARDS[state["card"]].memory, "cuda")
    for batch, (*_, fits, more) in zip(batches, rows, strict=True):
        assert (batch == 0 or fits <= safe) and more > safe
    fitting = [(flops, i, name) for i, (name, flops, n, *_) in enumerate(rows) if n <= safe]
    assert shown(".policy .first") == [name for *_, name in sorted(fitting)[:1]]

    cells = shown("#cards span")
    verdicts = {names: words for names, words in zip(cells[::2], cells[1::2], strict=True)}
    found = {name: words for names, words in verdicts.items() for name in names.split(", ")}
    assert found.keys() == {*OFFERED}
    for name, words in found.items():
        memory, left = CARDS[name].memory, without_margin(CARDS[name].memory, "cuda") - size
        tight = "tight" if size <= memory else f"✗ {text(size - memory)} too much"
        assert words == (f"✓ {text(left)} left" if left >= 0 else tight)


@pytest.mark.browser
def test_the_page_shows_what_the_script_says(chromium):
    page, complaints, asked = chromium.new_page(), [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url.partition("#")[0]))
    page.goto(PAGE.as_uri())
    check(page, layers=24, width=1024)
    states = random_states(12, seed=7)
    for state in states:  # by a link
        page.goto(f"{PAGE.as_uri()}#{urlencode(state)}")
        check(page, **state)
    for state in states:  # by hand; and the link keeps it
        page.goto(f"{PAGE.as_uri()}#layers=1")
        page.locator(f"#policy-{state['policy']}").click()
        for name, value in state.items():
            act = page.fill if isinstance(value, int) else page.select_option
            if name != "policy" and page.locator(f"#{name}").is_enabled():
                act(f"#{name}", str(value))
        check(page, **state)
    before = page.locator("main").inner_text()
    page.reload()
    assert page.locator("main").inner_text() == before

    # What has no effect cannot be set. The MLP moves with the width, and blocks with layers.
    page.goto(f"{PAGE.as_uri()}#layers=24")
    assert page.locator("#blocks").is_disabled() and page.locator("#trainer").is_disabled()
    page.locator("[value=none]").focus()
    page.keyboard.press("ArrowDown")
    page.fill("#width", "2048")
    page.locator("#layers-slider").focus()
    page.keyboard.press("ArrowLeft")
    check(page, policy="cheap", mlp=8192, layers=23, blocks=23)
    for name, value in {"mlp": "1000", "blocks": "7", "width": "1024", "layers": "40"}.items():
        page.fill(f"#{name}", value)
    check(page, mlp=1000, blocks=7)

    # What is impossible is mended, in fields and in links.
    page.fill("#heads", "7")
    note = "1,024 channels do not divide into 7 heads: computed with 4"
    assert page.locator("#heads-note").inner_text() == note
    page.fill("#layers", "0")
    assert page.locator("#layers-note").inner_text() == "1 to 1,000: computed with 1"
    page.fill("#vocabulary", "9999999999")
    page.locator("#vocabulary").blur()
    check(page, heads=4, layers=1, vocabulary=2**20)
    broken = "layers=abc&heads=7&width=-1&policy=voodoo&card=voodoo&precision=1&length=1e99&x=1"
    page.goto(f"{PAGE.as_uri()}#{broken}&toString=1&__proto__=1&constructor=1")
    check(page)
    assert "NaN" not in page.locator("body").inner_text()

    page.goto(f"{PAGE.as_uri()}#layers=48&width=1600&heads=25&processes=16&policy=selective")
    for width, scheme in ((390, "light"), (800, "dark"), (1400, "light")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    page.close()
    assert complaints == [] and {*asked} == {PAGE.as_uri(), SCRIPT.as_uri()}
