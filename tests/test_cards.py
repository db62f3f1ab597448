"""The tables of cards in docs/planning.md are studies/results/cards.json, and that is true."""

import json
import shlex

import pytest
from harness.runs import ROOT

from scripts.plan_knobs import changed
from studies import cards
from studies.make_results import FOLDER
from trainer.flags import SHAPES, build_parser, fill_in, model_config
from trainer.plan import policy_of

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
    flags = fill_in(build_parser("test", "x.pt").parse_args(words))
    batch = {name: best[name] for name in ("batch_size", "grad_accum_steps")}
    planner = asked.plans.planner(changed(asked.args, batch))
    step = planner.step(best["batch_size"], **policy_of(model_config(flags, vocab_size=1)))
    clock = cards.replace(asked.clock, micro_batches=best["grad_accum_steps"])
    assert step.peak == best["peak_bytes"] <= asked.room.safe, REMAKE
    assert clock.seconds(step) == pytest.approx(best["seconds"], rel=1e-9), REMAKE
    assert clock.tokens_per_s(step) == pytest.approx(best["tokens_per_s"], rel=1e-9)


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
