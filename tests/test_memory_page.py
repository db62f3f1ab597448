"""scripts.memory_page: the page gets what the planner says."""

import json
import re
import shutil
import subprocess

import pytest
import torch
from harness.pages import FLAGS
from harness.runs import ROOT
from tqdm import tqdm

from planner.cards import CARDS, card_named
from planner.choose import RUNGS
from planner.clock import seconds
from planner.record import code_of
from scripts import memory_page
from scripts.style import in_legend
from trainer.plan import make_planner
from trainer.room import for_tensors


def test_bad_input(tmp_path, capsys):
    for flags, word in (
        (["--out", str(tmp_path / "no" / "page.html")], "--out"),
        (["--out", str(tmp_path)], "--out"),
        (["--n-heads", "7"], "--n-heads"),
        (["--use-activation-checkpoint", "some"], "--use-activation-checkpoint"),
        (["--card", "H1000"], "H1000"),
    ):
        try:
            code = memory_page.main(flags)
        except SystemExit as ended:
            code = ended.code
        error = capsys.readouterr().err
        assert code == 2 and error.count("\n") == 1 and word in error, error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_reads_the_steps_as_they_were(made_page):
    """Every storage of every policy: born, died, kind, bytes, in words."""
    data = made_page.file.read_text().partition("const DATA = ")[2].partition(";\n")[0]
    program = f"""const DATA = {data};
{(ROOT / "scripts/page/step.js").read_text()}
const said = DATA.steps.map((data) => {{
  const step = new Step(data, DATA);
  return {{
    name: step.name, total: Array.from(step.total), peakAt: step.peakAt, x: Array.from(step.x),
    storages: step.label.map((_, i) => [step.born[i], step.died[i], ...Object.values(
      (({{name, why, kind, bytes, block, dtype, where, code}}) =>
        ({{name, why, kind, bytes, block, dtype, where, code}}))(step.describe(i)))]),
  }};
}});
console.log(JSON.stringify(said));"""
    found = subprocess.run(["node", "-"], input=program, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    assert [step["name"] for step in said] == [*made_page.records]
    for step, record in zip(said, made_page.records.values(), strict=True):
        total = record.step.total
        assert step["total"] == total.tolist() and step["peakAt"] == total.argmax()
        assert step["x"] == sorted(step["x"])
        for storage, words in zip(record.storages, step["storages"], strict=True):
            born, died, name, why, kind, size, block, dtype, where, code = words
            assert (born, name) == (storage.born, storage.name)
            assert died == min(storage.died, len(total) - 1)
            assert why == storage.why
            assert kind == in_legend(storage.kind)
            assert (size, dtype) == (storage.bytes, str(storage.dtype).removeprefix("torch."))
            assert block == (-1 if storage.block is None else storage.block)
            assert (where, code) == (storage.line, code_of(storage.line))


def test_along_flops(made_page):
    """A block's forward is as wide as its products: 2 FLOPs a weight and token, and attention."""
    record = made_page.records["none"]
    starts, x = memory_page.along_flops(record)
    C, F, T, V = 64, 256, 64, 512
    block = 2 * (4 * C * C + 2 * C * F) + 2 * T * C
    needed = 3 * (4 * block + 2 * V * C)
    at = next(begin for begin, phase, i in record.step.places if (phase, i) == ("forward", 2))
    width = x[starts.index(at) + 1] - x[starts.index(at)]
    assert width == pytest.approx(block / needed)
    assert x[-1] == pytest.approx(1, abs=0.05)  # and what has no products
    assert record.step.places[-1][1] == "optimizer" and x[-1] - x[-2] == pytest.approx(1 / 50)
    longer = memory_page.along_flops(made_page.records["full"])[1][-1]
    replayed = (block - 2 * C * F) * 4 / needed
    assert longer - x[-1] == pytest.approx(replayed, rel=1e-6)


def test_along_seconds(made_page):
    card = card_named("RTX 4090")
    for record in made_page.records.values():
        for compiled in (False, True):
            starts, x = memory_page.along_seconds(record, card, compiled)
            assert len(starts) == len(x) and starts == sorted(starts)
            work = record.step.compiled_work if compiled else record.step.work
            assert x[-1] == pytest.approx(seconds(work, card)) and x == sorted(x)


@pytest.mark.parametrize(
    ("flags", "first", "n"),
    [
        ([], "none", 9),
        (["--use-activation-checkpoint"], "full", 9),
        (["--use-activation-checkpoint", "mlp"], "mlp", 9),
        (
            ["--use-activation-checkpoint", "mlp", "--recompute-layers", "2"],
            "mlp in 2 of 4 blocks",
            10,
        ),
        (
            ["--use-activation-checkpoint", "full", "--offload-activations", "--card", "A100"],
            "full, offloaded",
            10,
        ),
        (["--use-activation-checkpoint", "auto", "--memory-budget", "1GiB"], "none", 9),
        (["--loss-chunks", "3"], "none", 8),
    ],
)
def test_what_was_asked_is_shown_first(flags, first, n):
    args = memory_page.parse([*FLAGS, *flags])
    config = memory_page.model_config(args, 512)
    planner = make_planner(args, config, torch.device("cuda"), torch.bfloat16)
    found, name = memory_page.ways(planner, args)
    assert (name, len(found)) == (first, n)


def test_nothing_ends_the_script():
    """Neither a name nor a line of code."""
    page = memory_page.write_page({"lines": [["model.py:1", "x = '</script>' // <!--"]]}, "python")
    inside = page.partition("const DATA = ")[2].partition(";\n")[0]
    assert "<" not in inside
    assert json.loads(inside)["lines"][0][1] == "x = '</script>' // <!--"
    assert not re.search(r"(src|href)=\"(?!data:)", page) and "http" not in page


def test_a_budget_is_what_auto_would_take():
    """What was typed; of a card, what is left of it beside the margin."""
    for words, budget in (
        (["--card", "RTX 3060 12GB"], for_tensors(CARDS["RTX 3060 12GB"].memory, "cuda")),
        (["--card", "RTX 3060 12GB", "--memory-budget", "3GiB"], for_tensors(3 * 2**30, "cuda")),
        (["--device", "cpu"], None),
    ):
        args = memory_page.parse([*FLAGS[:-2], *words])
        found = memory_page.target(args)[2].safe
        assert found == budget if budget else found is None or found > 0


def test_a_head_of_many_chunks_is_said_to_be_shortened(monkeypatch):
    monkeypatch.setattr(memory_page, "POLICIES", {"none": RUNGS[0]})  # no others
    for chunks, said in (("30", False), ("128", True)):
        args = memory_page.parse([*FLAGS, "--loss-chunks", chunks])
        with tqdm(disable=True) as bar:
            about = memory_page.page_data(args, bar)["about"]
        assert about.endswith("three of the head's 128 chunks") == said
