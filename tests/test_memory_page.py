"""scripts.memory_page: each number on the page is the planner's; and how it is used in Chromium:
mouse, keys, touch, narrow, dark."""

import json
import math
import random
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from harness.pages import opened, shown

from planner import Layout, StepMemory
from planner.choose import pick_fastest_fitting_step
from planner.record import StepRecord, group_name_and_kind, read_source_line
from scripts import memory_page
from scripts.plans import CommandPlan, plan_for_command
from scripts.style import COLORS, LEGEND, POLICIES, record_steps
from trainer.metrics import format_bytes


def browser(test):
    return pytest.mark.browser(pytest.mark.slow(test))


FLAGS = (
    "--n-layers 3 --n-heads 4 --d-model 64 --seq-len 64 --vocab-size 512 --batch-size 4 "
    "--device cuda"
)
Made = tuple[Path, CommandPlan, dict[str, StepRecord]]


def make(flags: str, folder: Path) -> Made:
    """A page, and what it shows: policy -> record of a step."""
    plan = plan_for_command(memory_page.parse(flags.split()), Layout())
    settings, first = memory_page.policies_of_page(plan)
    records = record_steps(plan, settings)
    file, data = folder / "page.html", memory_page.plan_data(plan, records, first)
    file.write_text(memory_page.render_page(data, "python"), "utf-8")
    return file, plan, records


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    return make(FLAGS, tmp_path_factory.mktemp("page"))


def alive_by_kind(record: StepRecord, at: int) -> list:
    """What is alive, from the bottom of the picture up."""
    return sorted(record.alive(at), key=lambda storage: [*COLORS].index(storage.kind))


def grouped(record: StepRecord, at: int) -> dict[tuple[str, str], list[int]]:
    """(kind, name but for the block) -> the bytes of each that is alive, the largest first."""
    found = defaultdict(list)
    for storage in record.alive(at):
        found[LEGEND[storage.kind], group_name_and_kind(storage)[0]].append(storage.nbytes)
    return {name: sorted(sizes, reverse=True) for name, sizes in found.items()}


# ---- Its numbers

PLANS = [  # flags, the policy shown first, those that only one of page and list has, about the step
    (
        "--device cpu --no-amp --optimizer muon --use-activation-checkpoint",
        *("full", set()),
        r", batch of \d x \d+ tokens, float32 on a CPU, predicted, no budget given \(",
    ),
    (
        "--card RTX-4090 --memory-budget 30MiB --dropout 0.1 --use-activation-checkpoint auto",
        *("mlp:1", {"mlp:1"}),
        r", bfloat16 on a GPU, predicted for RTX 4090, tensors may take 22.5 MiB \(",
    ),
    (
        "--device cuda --memory-budget 1GiB --loss-chunks 128 --grad-accum-steps 3 "
        "--use-activation-checkpoint mlp:1",
        *("mlp:1", {"plain", "mlp:1"}),
        r", one of 3 micro-batches of \d x .*, showing three of the head's \d+ chunks$",
    ),
    (
        "--card A100 --n-layers 1 --loss-chunks 3 --use-activation-checkpoint full+offload",
        *("full+offload", {"plain", "full/2", "full+offload"}),
        r", tensors may take [^,]*$",
    ),
]
SAID = """() => steps.map((step, i) => {
    choose(i);
    return {
        name: step.name, total: [...step.total], x: [...step.x],
        words: $("policies").children[i].innerText, label: $("chart").getAttribute("aria-label"),
        storages: [...step.label.keys()].map((i) => ({born: step.born[i], ...step.describe(i)})),
        lists: [0, 1, 2, 3, 4].map((i) => i * step.length / 5 | 0).concat(step.peakAt).map((at) =>
            [at, step.groups(at).map(({name, kind, storages}) =>
                [DATA.kinds[kind][2], name, storages.map((i) => step.bytes[i])])]),
    };
})"""


def drawn_shape(seed: int) -> str:
    draw = random.Random(seed)
    heads, layers, batch = (draw.randint(low, 4) for low in (1, 2, 3))
    shape = f"--n-heads {heads} --n-layers {layers} --batch-size {batch}"
    width, length = 16 * heads * draw.randint(1, 3), draw.choice([64, 100])
    return f"{shape} --d-model {width} --seq-len {length} --vocab-size {draw.randint(300, 900)}"


def begins(record: StepRecord, plan: CommandPlan) -> np.ndarray:
    """(operators + 1,) where each stands on the axis."""
    card = plan.card
    axis = (
        memory_page.op_positions_by_seconds(record, card)
        if card
        else memory_page.op_positions_by_flops(record)
    )
    return np.interp(np.arange(len(record.operator_names) + 1), *axis)


def check_storages(said: dict, record: StepRecord) -> None:
    """Every storage in words; and the lists of what is alive at some instants."""
    for storage, words in zip(record.storages, said["storages"], strict=True):
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
        assert comes.endswith(f"(operator {storage.born:,})" if storage.born else "before the step")
        assert not storage.replayed or "recomputation" in comes
        freed = {math.inf: "no, stays for the next step", storage.born: "at once"}
        assert goes.endswith(freed.get(storage.died) or f"(operator {storage.died:,})")
    for at, groups in said["lists"]:
        assert {(kind, name): sizes for kind, name, sizes in groups} == grouped(record, at)
        sizes = [sum(sizes) for _, _, sizes in groups]
        assert sizes == sorted(sizes, reverse=True)


@browser
@pytest.mark.parametrize("seed", range(len(PLANS)))
def test_the_page_says_what_the_planner_says(chromium, tmp_path, seed):
    """For drawn shapes: every policy and storage; which fit a budget, and what auto takes."""
    flags, first, odd, about = PLANS[seed]
    file, plan, records = make(f"{drawn_shape(seed)} {flags}", tmp_path)
    card, batch_size = plan.card, plan.settings.batch_size
    assert records.keys() ^ POLICIES.keys() == odd
    peaks = {name: record.step_memory.peak for name, record in records.items()}
    with opened(chromium, file, reduced_motion="reduce") as page:
        assert re.search(about, shown(page, "#about")[0])
        budget = None if "no budget" in about else plan.memory_budget.bytes_within_margin
        wanted = [first, "seconds" if card else "FLOPs", budget]
        assert page.evaluate("[chart.step.name, DATA.axis, DATA.budget]") == wanted

        def cost(step: StepMemory) -> float:
            return step.seconds(card) if card else step.relative_flops

        none = cost(records["none"].step_memory)
        for said, (name, record) in zip(page.evaluate(SAID), records.items(), strict=True):
            step, peak = record.step_memory, format_bytes(record.step_memory.peak)
            assert said["total"] == step.bytes_after_each_op.tolist()
            assert said["x"] == pytest.approx(begins(record, plan), rel=1e-6, abs=1e-9)
            more = f"{100 * (cost(step) / none - 1):+.1f}%".replace("-", "−")
            time = f"{1000 * cost(step):.3g} ms, {more}"
            words = [name, peak, time if card else f"{more} FLOPs"]
            assert said["words"].split("\n")[:3] == words
            assert f"its peak is {peak} in {step.peak_location}" in said["label"]
            check_storages(said, record)

        least, *_, middle, most = sorted(peaks.values())
        for room in (least - 2**15, least + 2**14, middle + 2**14, most + 2**14):
            page.locator("#budget").fill(str(room / page.evaluate("SIZE")))
            takes = pick_fastest_fitting_step(plan.planner, batch_size, room, card)
            fits = f"cheapest that fits: {takes.config.recompute} ("
            assert shown(page, "#verdict")[0].startswith(fits if room > least else "nothing fits")
            assert shown(page, "#policies i") == [
                "fits" if peak <= room else "does not fit" for peak in peaks.values()
            ]


def test_along_flops(made):
    """A block's forward is as wide as its products: 2 FLOPs a weight and token, and attention."""
    record = made[-1]["none"]
    starts, x = memory_page.op_positions_by_flops(record)
    C, F, T, V = 64, 256, 64, 512
    block = 2 * (4 * C * C + 2 * C * F) + 2 * T * C
    needed = 3 * (3 * block + 2 * V * C)
    marks = record.step_memory.phase_marks
    at = starts.index(next(begin for begin, *place in marks if place == ["forward", 2]))
    assert x[at + 1] - x[at] == pytest.approx(block / needed)
    assert marks[-1][1] == "optimizer" and x[-1] - x[-2] == pytest.approx(1 / 50)


# ---- How it is used

ON_SCREEN = """([x, bytes]) => {
    const box = $("chart").getBoundingClientRect();
    return [box.x + chart.toX(x) + 0.5, box.y + chart.toY(bytes)];
}"""


def press(page, *keys: str) -> None:
    for key in keys:
        page.locator("#chart").press(key)


def sizes_of(rows) -> list[int]:
    return rows.evaluate_all("(rows) => rows.map((row) => Number(row.dataset.bytes))")


@browser
def test_the_page_is_used(chromium, made):
    """By mouse and keys: the picture, the list of what is alive, one of them, and parts."""
    file, plan, records = made
    record, full, step = records["none"], records["full"], records["none"].step_memory
    window = {"viewport": {"width": 1400, "height": 900}, "reduced_motion": "reduce"}
    with opened(chromium, file, **window) as page:
        page.get_by_role("radio").filter(has=page.get_by_text("none", exact=True)).click()
        page.locator("#budget").fill("0")

        # A click on the largest activation when backward begins
        at = step.phase_slice("backward").start
        alive = alive_by_kind(record, at)
        i = max(range(len(alive)), key=lambda i: alive[i].nbytes * (alive[i].kind == "activations"))
        height = sum(storage.nbytes for storage in alive[:i]) + alive[i].nbytes / 2
        page.mouse.click(*page.evaluate(ON_SCREEN, [begins(record, plan)[at], height]))
        assert shown(page, "#storage-title") == [alive[i].name]
        at = page.evaluate("pinned.at")
        assert (
            f"{step.bytes_after_each_op[at]:,} bytes in {len(record.alive(at))} storages"
            in (shown(page, "#alive-about")[0])
        )
        page.locator("#more").click()
        expected = grouped(record, at).values()
        assert sorted(sizes_of(page.locator("#alive tr"))) == sorted(map(sum, expected))
        page.locator("#alive [aria-expanded]").first.click()
        sizes = sizes_of(page.locator("#alive tr.one"))
        assert sizes in expected and len(sizes) > 1

        # Keys: from the peak an instant on, from the sky down to the highest storage and on
        press(page, "9", "p", "ArrowRight")
        at = full.step_memory.bytes_after_each_op.argmax() + 1
        page.evaluate("chart.cursor.storage = -1")
        for key, place in (("Up", -1), ("Up", -1), ("Down", -2), ("Down", -3), ("Up", -2)):
            press(page, f"Arrow{key}")
            (name,) = shown(page, "#storage-title")
            assert name == alive_by_kind(full, at)[place].name in shown(page, "#spoken")[0]
        press(page, "Enter", "End")
        assert page.evaluate("[pinned.at, chart.cursor.at]") == [at, len(full.operator_names) - 1]

        # Parts of the picture
        page.get_by_role("button", name="backward").click()
        left, right = page.evaluate("chart.view")
        part, edges = full.step_memory.phase_slice("backward"), begins(full, plan)
        assert left < edges[part.start] < edges[part.stop] < right
        page.get_by_role("button", name="hide weights and moments").click()
        state = sum(s.nbytes for s in full.alive(0) if s.kind in ("parameters", "optimizer"))
        assert 0 < page.evaluate("chart.range[0]") < state


@browser
@pytest.mark.parametrize("width", [320, 1400])
def test_narrow_and_wide(chromium, tmp_path, width):
    """Nothing is cut off, and a finger finds what it touches."""
    file, window = tmp_path / "page.html", {"viewport": {"width": width, "height": 844}}
    assert memory_page.main([*FLAGS.split(), "--n-layers=1", "--out", str(file)]) == 0
    with opened(chromium, file, has_touch=True, is_mobile=True, **window) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        wide = "(all) => all.filter((e) => e.scrollWidth > e.clientWidth).length"
        assert page.locator("#policies button").evaluate_all(wide) == 0
        page.evaluate("$('chart').scrollIntoView({block: 'center'})")
        page.touchscreen.tap(*page.evaluate(ON_SCREEN, [0, 1]))
        assert LEGEND["parameters"] in shown(page, "#storage dd")


# ---- What is written into it


def test_nothing_ends_the_script():
    """Neither a name nor a line of code."""
    code = "x = '</script>' // <!--"
    page = memory_page.render_page({"lines": [["model.py:1", code]]}, "python")
    inside = page.partition("const DATA = ")[2].partition(";\n")[0]
    assert "<" not in inside and json.loads(inside)["lines"][0][1] == code
    assert not re.search(r"(src|href)=\"(?!data:)", page) and "http" not in page
