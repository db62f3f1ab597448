"""The table of cards in docs/planning.md is what `python -m scripts.cards` prints."""

import json

import pytest
from runs import ROOT

from scripts import cards

TABLE = (ROOT / "docs/planning.md").read_text().split("## What fits on which card")[1]


@pytest.mark.parametrize(
    "model",
    ["gpt2", *(pytest.param(m, marks=pytest.mark.slow) for m in list(cards.SHAPES)[1:])],
)
def test_the_table_in_the_docs(model, capsys, tmp_path):
    path = tmp_path / "cards.json"
    assert cards.main(["--models", model, "--json", str(path)]) == 0
    printed = capsys.readouterr().out.strip()
    head, rule, row = printed.splitlines()
    assert f"\n{head}\n{rule}\n" in TABLE and f"\n{row}\n" in TABLE
    (found,) = json.loads(path.read_text())["rows"]
    for batches in found["largest_batch"].values():
        assert f"{batches[-1]:,}" in row.split("|")[-2].replace("/", " ").split()


def test_a_batch_fits_on_its_card_with_a_margin_and_no_larger_one_does():
    planner = cards.make_planner("gpt2", cards.tqdm(disable=True))
    most = cards.largest_batches(planner)["full"][0]
    room = 7 * 2**30
    assert planner.step(most, recompute="full").peak <= room
    assert planner.step(most + 1, recompute="full").peak > room


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cards, "largest_batches", interrupt)
    assert cards.main(["--models", "gpt2"]) == 130
    assert capsys.readouterr().err == "stopped\n"
