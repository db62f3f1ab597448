"""scripts.memory_page: each number on the page is the planner's; and how it is used in Chromium:
mouse, keys, touch, narrow, dark."""

import json
import math
import re
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import fields

import numpy as np
import pytest

from model import MiniGPTConfig
from planner.choose import pick_fastest_fitting_step
from planner.record import StepRecord, group_name_and_kind, read_source_line
from scripts import memory_page, memory_timeline
from scripts.style import COLORS, LEGEND, POLICIES

browser = pytest.mark.browser
FLAGS = ["--n-layers", "4", "--n-heads", "4", "--d-model", "64", "--seq-len", "64",
         "--vocab-size", "512", "--batch-size", "4", "--device", "cuda"]  # fmt: skip
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


class Made:
    """A page, and what the planner says about the same flags."""

    def __init__(self, flags: list[str], folder):
        self.file, self.records = folder / "page.html", {}
        step_data = memory_page.step_data

        def note(record: StepRecord, name: str, *more):
            self.records[name] = record
            return step_data(record, name, *more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory_page, "step_data", note)
            assert memory_page.main([*flags, "--out", str(self.file)]) == 0
        self.asked = memory_page.make_request(memory_page.parse(flags))

    def verdict(self, budget: float) -> str:
        """How the page's verdict begins: with what `auto` takes."""
        step = pick_fastest_fitting_step(
            self.asked.planner, self.asked.args.batch_size, int(budget)
        )
        fits = step.peak <= budget
        return f"cheapest that fits: {step.config.recompute} (" if fits else "nothing fits"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(FLAGS, tmp_path_factory.mktemp("page"))


@contextmanager
def opened(chromium, file, **how):
    """A page in Chromium, 1,400 x 900; in the end nothing was complained of, nothing was asked."""
    how = {"viewport": {"width": 1400, "height": 900}, "reduced_motion": "reduce"} | how
    context, complaints, asked = chromium.new_context(**how), [], []
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.set_default_timeout(20_000)
    page.goto(file.as_uri())
    yield page  # (the browser's end ends the context of a test that failed)
    context.close()
    # (Only tests read pixels.)
    assert [text for text in complaints if not text.startswith("Canvas2D: Multiple readback")] == []
    assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]


@pytest.fixture
def page(made, chromium):
    with opened(chromium, made.file) as page:
        yield page


def text(page, name: str) -> str:
    return page.locator(f"#{name}").inner_text()


def details(page) -> dict[str, str]:
    terms, words = (page.locator(f"#storage {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(terms, words, strict=True)) | {"name": text(page, "storage-title")}


def choose(page, name: str) -> None:
    page.get_by_role("radio").filter(has=page.get_by_text(name, exact=True)).click()


def press(page, *keys: str) -> None:
    for key in keys:
        page.locator("#chart").press(key)


def frame(page) -> dict[str, float]:
    """The picture's inside, on the screen."""
    box, inside = page.locator("#chart").bounding_box(), page.evaluate("chart.frame")
    return inside | {"x": box["x"] + inside["left"], "y": box["y"] + inside["top"]}


def begins(record: StepRecord) -> np.ndarray:
    """(operators + 1,) where each stands on the axis."""
    return np.interp(np.arange(len(record.operator_names) + 1), *memory_page.along_flops(record))


def grouped(record: StepRecord, at: int) -> dict[tuple[str, str], list[int]]:
    """(kind, name but for the block) -> the bytes of each that is alive, the largest first."""
    found = defaultdict(list)
    for storage in record.alive(at):
        found[LEGEND[storage.kind], group_name_and_kind(storage)[0]].append(storage.nbytes)
    return {name: sorted(sizes, reverse=True) for name, sizes in found.items()}


# ---- Its numbers


@browser
def test_the_page_reads_the_steps_as_they_were(page, made):
    """Every storage of every policy, in words; and the lists of what is alive at some instants."""
    said = page.evaluate(
        """steps.map((step) => ({
      name: step.name, total: [...step.total], peakAt: step.peakAt, x: [...step.x],
      storages: [...step.label.keys()].map((i) => ({born: step.born[i], ...step.describe(i)})),
      lists: Array.from({length: 9}, (_, i) => i * 40).concat(step.peakAt).map((at) =>
        [at, step.groups(at).map(({name, kind, storages}) =>
          [DATA.kinds[kind][2], name, storages.map((i) => step.bytes[i])])]),
    }))"""
    )
    assert [step["name"] for step in said] == [*made.records]
    for step, record in zip(said, made.records.values(), strict=True):
        total = record.step_memory.bytes_by_op
        assert step["total"] == total.tolist() and step["peakAt"] == total.argmax()
        assert step["x"] == pytest.approx(begins(record), rel=1e-6, abs=1e-9)
        for storage, words in zip(record.storages, step["storages"], strict=True):
            comes, goes = words.pop("comes"), words.pop("goes")
            assert words == {
                "name": storage.name,
                "why": storage.reason_alive,
                "kind": LEGEND[storage.kind],
                "bytes": storage.nbytes,
                "shape": " x ".join(f"{n:,}" for n in storage.shape) or "one number",
                "dtype": str(storage.dtype).removeprefix("torch."),
                "block": -1 if storage.block_index is None else storage.block_index,
                "where": storage.line,
                "code": read_source_line(storage.line),
                "born": storage.born,
            }
            assert (f"(operator {storage.born:,})" in comes) == (storage.born > 0)
            assert not storage.replayed or "recomputation" in comes
            if storage.died == math.inf:
                assert goes == "no, stays for the next step"
            else:
                assert goes == "at once" or f"(operator {int(storage.died):,})" in goes
        for at, groups in step["lists"]:
            assert {(kind, name): sizes for kind, name, sizes in groups} == grouped(record, at)
            sizes = [sum(sizes) for _, _, sizes in groups]
            assert sizes == sorted(sizes, reverse=True)


@browser
def test_policies(page, made):
    """What is said of the peak; by mouse and keys."""
    checked = page.locator("[role=radio][aria-checked=true]")
    for name, record in made.records.items():
        choose(page, name)
        size, where = f"{record.step_memory.peak / 2**20:.1f} MiB", record.step_memory.peak_location
        label = page.locator("#chart").get_attribute("aria-label")
        assert size in label and where in label and size in checked.inner_text()
    press(page, "2")
    checked.press("ArrowRight")
    assert page.evaluate("chart.step.name") == "cheap"


@browser
def test_the_picture_has_the_kinds_heights(page, made):
    """Read from the pixels: how much of a column has each kind's colour."""
    choose(page, "none")
    page.locator("#budget").fill("0")
    pixels, (low, high) = page.evaluate(
        """() => {
      point({at: 0, storage: -1});
      const {left, top, height} = chart.frame, column = chart.columns.indexOf(chart.step.peakAt);
      const {data} = chart.context.getImageData(left + column, top, 1, height);
      return [Array.from(data), chart.range];
    }"""
    )
    rgb = np.array(pixels).reshape(-1, 4)[:, :3]
    for kind, size in made.records["none"].step_memory.bytes_by_kind_at_peak.items():
        wanted = [int(COLORS[kind][i : i + 2], 16) for i in (1, 3, 5)]
        found = (abs(rgb - wanted).max(axis=1) < 12).sum() / len(rgb) * (high - low)
        # (Lines between storages have another colour.)
        assert 0.75 * size - 0.01 * high < found < size + 0.01 * high, kind


@browser
def test_seconds(chromium, tmp_path):
    flags = [*FLAGS[:-2], "--card", "RTX 4090", "--memory-budget", "30MiB"]
    with opened(chromium, Made(flags, tmp_path).file) as page:
        wanted = ["seconds", 22.5 * 2**20, False]
        assert page.evaluate("[DATA.axis, chart.budget, chart.isExample]") == wanted
        every = page.evaluate("steps.map((step) => step.seconds)")
        first = page.get_by_role("radio").nth(1).inner_text()
        assert f"{1000 * every[1]:.3g} ms, +0.0%" in first


# ---- How it is used


@browser
def test_the_list_of_what_is_alive(page, made):
    """By a click on one of them, in full, and of one group."""
    choose(page, "none")
    record = made.records["none"]
    at = record.step_memory.phase_slice("backward").start
    alive = sorted(record.alive(at), key=lambda storage: [*COLORS].index(storage.kind))
    tops = np.cumsum([storage.nbytes for storage in alive])
    i = max(range(1, len(alive)), key=lambda i: alive[i].nbytes * (alive[i].kind == "activations"))
    x, (low, high), inside = begins(record)[at], page.evaluate("chart.range"), frame(page)
    y = 1 - ((tops[i - 1] + tops[i]) / 2 - low) / (high - low)
    left = inside["x"] + page.evaluate(f"chart.toX({x})") - page.evaluate("chart.frame.left")
    page.mouse.click(left + 0.5, inside["y"] + y * inside["height"])
    at = page.evaluate("pinned.at")
    alive, expected, clicked = record.alive(at), grouped(record, at), alive[i]
    assert details(page)["name"] == clicked.name and clicked in alive
    about = f"{record.step_memory.bytes_by_op[at]:,} bytes in {len(alive):,} storages"
    assert about in text(page, "alive-about")
    page.locator("#more").click()
    sizes_of = "rows => rows.map((row) => Number(row.dataset.bytes))"
    rows = page.locator("#alive tr").evaluate_all(sizes_of)
    assert sorted(rows) == sorted(sum(sizes) for sizes in expected.values())
    group = page.locator("#alive tr", has=page.locator("button[aria-expanded]")).first
    group.locator("button").click()
    sizes = page.locator("#alive tr.one").evaluate_all(sizes_of)
    assert sum(sizes) == int(group.get_attribute("data-bytes")) and len(sizes) > 1


@browser
def test_budget(page, made):
    peaks = sorted(record.step_memory.peak for record in made.records.values())
    for budget in (peaks[0] - 2**15, *(peaks[i] + 2**14 for i in (0, 4, -1))):
        page.locator("#budget").fill(str(budget / 2**20))
        assert text(page, "verdict").startswith(made.verdict(budget))
        said = [words.split("\n")[-1] for words in page.get_by_role("radio").all_inner_texts()]
        fits = [record.step_memory.peak <= budget for record in made.records.values()]
        assert said == [("fits" if fit else "does not fit") for fit in fits]


@browser
def test_keys(page, made):
    choose(page, "full")
    record = made.records["full"]
    at = int(record.step_memory.bytes_by_op.argmax())
    press(page, "p", "ArrowRight")
    alive = sorted(record.alive(at + 1), key=lambda s: [*COLORS].index(s.kind))
    page.evaluate("chart.cursor.storage = -1")
    for key, place in (("Up", -1), ("Up", -1), ("Down", -2), ("Down", -3), ("Up", -2)):
        press(page, f"Arrow{key}")  # from the sky down to the highest, and on
        assert details(page)["name"] == alive[place].name in text(page, "spoken")
    press(page, "Enter", "End", "+")
    pinned, now, width = page.evaluate(
        "[pinned.at, chart.cursor.at, (chart.view[1] - chart.view[0]) / chart.longest]"
    )
    assert (pinned, now) == (at + 1, len(record.operator_names) - 1) and width == pytest.approx(
        1 / 2
    )


@browser
def test_zoom(page, made):
    record = made.records["full"]
    choose(page, "full")
    page.get_by_role("button", name="backward").click()
    left, right = page.evaluate("chart.view")
    part, edges = record.step_memory.phase_slice("backward"), begins(record)
    assert left < edges[part.start] and edges[part.stop] < right
    assert right - left < 1.1 * (edges[part.stop] - edges[part.start])
    page.get_by_role("button", name="hide weights and moments").click()
    state = sum(s.nbytes for s in record.alive(0) if s.kind in ("parameters", "optimizer"))
    assert 0 < page.evaluate("chart.range[0]") < state


@browser
@pytest.mark.parametrize("width", [320, 1400])
def test_narrow_and_wide(chromium, made, width):
    """Nothing is cut off, and a finger finds what it touches."""
    screen = {"viewport": {"width": width, "height": 844}}
    with opened(chromium, made.file, **PHONE | screen) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        wide = "(e) => e.scrollWidth > e.clientWidth"
        assert not page.evaluate(f"[...document.querySelectorAll('#policies button')].some({wide})")
        page.evaluate("$('chart').scrollIntoView({block: 'center'})")
        inside = frame(page)
        page.touchscreen.tap(inside["x"] + 9, inside["y"] + 0.97 * inside["height"])
        assert details(page)["kind"] == "parameters"


# ---- What is written into it


def test_along_flops(made):
    """A block's forward is as wide as its products: 2 FLOPs a weight and token, and attention."""
    record = made.records["none"]
    starts, x = memory_page.along_flops(record)
    C, F, T, V = 64, 256, 64, 512
    block = 2 * (4 * C * C + 2 * C * F) + 2 * T * C
    needed = 3 * (4 * block + 2 * V * C)
    at = next(
        begin for begin, phase, i in record.step_memory.phase_marks if (phase, i) == ("forward", 2)
    )
    width = x[starts.index(at) + 1] - x[starts.index(at)]
    assert width == pytest.approx(block / needed)
    assert record.step_memory.phase_marks[-1][1] == "optimizer" and x[-1] - x[-2] == pytest.approx(
        1 / 50
    )


@pytest.mark.parametrize(
    ("flags", "first", "more"),
    [
        ("", "none", 0),
        ("--use-activation-checkpoint", "full", 0),
        ("--use-activation-checkpoint mlp:2", "mlp:2", 1),
        ("--use-activation-checkpoint full+offload --card A100", "full+offload", 1),
        ("--use-activation-checkpoint auto --memory-budget 1GiB", "none", 0),
        ("--loss-chunks 3", "none", -1),
    ],
)
def test_what_was_asked_is_shown_first(flags, first, more):
    found, name = memory_page.policies(
        memory_page.make_request(memory_page.parse([*FLAGS, *flags.split()]))
    )
    assert (name, len(found)) == (first, len(POLICIES) + more)


def test_nothing_ends_the_script():
    """Neither a name nor a line of code."""
    page = memory_page.write_page({"lines": [["model.py:1", "x = '</script>' // <!--"]]}, "python")
    inside = page.partition("const DATA = ")[2].partition(";\n")[0]
    assert "<" not in inside
    assert json.loads(inside)["lines"][0][1] == "x = '</script>' // <!--"
    assert not re.search(r"(src|href)=\"(?!data:)", page) and "http" not in page


@pytest.mark.parametrize(("chunks", "said"), [(30, False), (128, True)])
def test_what_is_left_out_of_the_picture_is_said(monkeypatch, chunks, said):
    """Chunks of the head; the other micro-batches; and a budget that was not given."""
    monkeypatch.setattr(memory_page, "POLICIES", {"plain": {}, "none": {"recompute": "none"}})
    more = ["--memory-budget=1GiB", "--grad-accum-steps=3"] if said else []
    args = memory_page.parse([*FLAGS, f"--loss-chunks={chunks}", *more])
    about = memory_page.page_data(args)["about"]
    assert about.endswith("three of the head's 128 chunks") == said
    assert (", one of 3 micro-batches of 4 x 64 tokens, " in about) == said
    assert (", tensors may take " in about) == said != ("no budget given" in about)


@pytest.mark.parametrize("tool", [memory_page, memory_timeline])
def test_help_lists_what_has_an_effect(tool, monkeypatch):
    """What is not listed, all of it typed at once, changes nothing; what is listed is read."""
    actions, typed, read = [], [], set()
    parse_args = ArgumentParser.parse_known_args

    def note(parser, *words):
        actions[:] = parser._actions
        return parse_args(parser, *words)

    class Noted(Namespace):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    def made(*words: str):
        args = Noted(**vars(tool.parse([*FLAGS, *words])))
        if tool is memory_page:
            return memory_page.page_data(args)
        request, records = tool.record_all(args)
        steps = {name: record.step_memory for name, record in records.items()}
        return [tool.title(*each, request.args.compile) for each in steps.items()]

    monkeypatch.setattr(ArgumentParser, "parse_known_args", note)
    plain = made()
    listed = {action.dest for action in actions if action.help != SUPPRESS}
    for action in actions:
        if action.dest not in listed | {"num_tokens", "num_epochs"}:  # (one length is allowed)
            value = [*(action.choices or ["0.5" if action.dest == "val_ratio" else "1"])][-1]
            typed += [action.option_strings[0], *[value][: action.nargs != 0]]
    assert made(*typed) == plain
    elsewhere = {"help", "model", "init_from", "train_data", "tf32", "out"}
    elsewhere |= {field.name for field in fields(MiniGPTConfig)}  # by model_config
    assert listed - read - elsewhere == set()
