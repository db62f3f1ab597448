"""Cards: figures that fit each other, names that mean one card or none, and the documents' tables
of what they train (studies/results/cards.json), which are true."""

import json
import shlex

import pytest
import torch
from harness.runs import ROOT

from planner import CARDS
from planner.cards import APPLE, GIB, SAME, card_named, find_card, peak_flops, plain
from studies import cards
from studies.make_results import FOLDER
from trainer.flags import SHAPES, build_parser, fill_in

# What torch.cuda.get_device_name() says -> the card
REPORTED = {
    "NVIDIA GeForce RTX 3060": "RTX 3060 12GB",
    "NVIDIA GeForce RTX 3080": "RTX 3080 10GB",
    "GeForce RTX 3090": "RTX 3090",  # (drivers of 2020)
    "NVIDIA GeForce RTX 4060 Ti": "RTX 4060 Ti 16GB",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA RTX A6000": "RTX A6000",
    "Tesla V100-SXM2-16GB": "V100 16GB",
    "Tesla V100-SXM2-32GB": "V100 32GB",
    "Tesla T4": "T4",
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100-PCIE-40GB": "A100 40GB",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100 PCIe",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
}


def test_figures_are_of_the_right_size():
    for name, card in CARDS.items():
        assert card.name == name
        float32, bfloat16, float16 = card.flops
        assert 2e12 < float32 <= bfloat16 <= float16 < 3e15
        assert bfloat16 in (float32, float16)  # (older ones have no unit for it)
        assert 60e9 < card.bytes_per_s < 10e12
        assert 7 * GIB < card.memory < 256 * GIB
        assert 2 * 2**20 < card.cache <= 128 * 2**20
        # FLOPs for each byte: tensor cores want some hundred, a GPU without them some ten.
        low, high = (20, 50) if card in APPLE else (70, 410)
        assert low < float16 / card.bytes_per_s < high


def test_a_device_is_found_by_its_name():
    for name, known in REPORTED.items():
        card = CARDS[known]
        assert find_card(name, card.memory) is card
        assert find_card(name, round(1.1 * card.memory)) is card
        assert find_card(name, 6 * 2**30) is None  # the same name on a smaller card
        float32, bfloat16, float16 = card.flops  # and MFU is of the same peak
        full = f"NVIDIA {name}" if name.startswith("GeForce") else name
        assert peak_flops(full, torch.float16) == float16
        assert peak_flops(full, torch.bfloat16) == (bfloat16 if bfloat16 > float32 else None)
    for name in [
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A10"),
        *(
            "NVIDIA GeForce RTX 4070 Ti",
            "Tesla V100-PCIE-16GB",
            "AMD Instinct MI300X",
            "NVIDIA",
            "",
        ),
    ]:
        assert all(find_card(name, card.memory) is None for card in CARDS.values())


def test_a_person_may_be_brief():
    brief = {
        "RTX 4090": ("rtx-4090", "rtx4090", "4090", "Rtx_4090"),
        "A100 40GB": ("a100-40gb", "A100_40GB", "NVIDIA A100-SXM4-40GB"),
        "A100": ("a100", "a100-80gb"),
        "T4": ("Tesla T4",),
        "M4 Max 40-core": ("m4 max 40 core", "Apple M4 Max 40-core"),
    }
    for card in CARDS:
        for name in (card, card.lower().replace(" ", "-"), *brief.get(card, ())):
            assert card_named(name) is CARDS[card], name
    assert len({plain(name) for name in (*CARDS, *SAME)}) == len(CARDS) + len(SAME)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("4070 ti", ""),  # there is an RTX 4070, another card
        ("v100", "did you mean V100 16GB or V100 32GB? "),
        ("rtx", ""),  # that says nothing
        ("", ""),
    ],
)
def test_but_not_unclear(name, near):
    with pytest.raises(ValueError) as caught:
        card_named(name)
    assert str(caught.value) == f"unknown card {name!r}; {near}known: {', '.join(CARDS)}"


# ---- what they train

FILE = json.loads((ROOT / FOLDER / "cards.json").read_text())
ROWS = {row["card"]: row for row in FILE["rows"]}
SECTION = (ROOT / "docs/planning.md").read_text().split("## What fits on which card")[1]
REMAKE = "if the change is meant: python -m studies.make_results --only cards"


@pytest.fixture(scope="module")
def plan() -> cards.Plan:
    return cards.Plan()


def test_the_tables_in_the_docs():
    for table in (cards.format_fastest(FILE["rows"]), cards.format_batches(FILE["rows"])):
        assert f"\n{table}\n" in SECTION, REMAKE
    assert list(ROWS) == cards.SHOWN


@pytest.mark.parametrize(
    ("card", "model"),
    [("RTX 3060 12GB", "gpt2"), ("RTX 4090", "gpt2")]
    + [pytest.param("A100", model, marks=pytest.mark.slow) for model in list(SHAPES)[1:]],
)
def test_the_largest_batches(card, model, plan):
    assert plan.largest_batches(card, model) == ROWS[card]["largest_batch"][model], REMAKE


def test_the_step_of_a_row(plan):
    """Alone; the slow test below also finds it again."""
    best = ROWS["RTX 3060 12GB"]["fastest"]
    asked = plan.ask("RTX 3060 12GB", best["model"], cards.STEP)
    words = ["--model", best["model"], *best["flags"]]
    asked = asked.about(fill_in(build_parser("test", "x.pt").parse_args(words)))
    assert asked.step.peak == best["peak_bytes"] <= asked.budget, REMAKE
    assert asked.seconds(asked.step) == pytest.approx(best["seconds"], rel=1e-9), REMAKE
    assert asked.tokens_per_s(asked.step) == pytest.approx(best["tokens_per_s"], rel=1e-9)


@pytest.mark.slow
def test_the_fastest_step_of_a_small_card(plan):
    found, wanted = plan.row("RTX 3060 12GB"), dict(ROWS["RTX 3060 12GB"])
    best, shown = found.pop("fastest"), wanted.pop("fastest")
    assert found == wanted, REMAKE
    for name, value in best.items():
        same = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
        assert shown[name] == same, REMAKE


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cards.Plan, "row", lambda plan, card: ROWS[card])
    words = ["--cards", "4090", "h100", "--json", str(tmp_path / "cards.json")]
    assert cards.main(words) == 0
    out, found = capsys.readouterr().out, json.loads((tmp_path / "cards.json").read_text())
    assert [row["card"] for row in found["rows"]] == ["RTX 4090", "H100"]
    assert shlex.split(found["command"])[3:] == words
    assert cards.format_fastest(found["rows"]) in out
    assert cards.main(["--cards", "M1"]) == 2
    assert "--cards: M1 is no NVIDIA card" in capsys.readouterr().err


def test_a_card_on_which_nothing_trains():
    row = {"card": "Voodoo2", "memory_bytes": 1, "fastest": None}
    row["largest_batch"] = dict.fromkeys(SHAPES, dict.fromkeys(cards.WAYS, 0))
    assert "| Voodoo2 | - |  |" in cards.format_fastest([row])
    assert "| Voodoo2 | - | - | - | - |" in cards.format_batches([row])
