"""How long the whole run takes: the recommended step, as often as asked."""

import json
import re

import pytest
from test_plan_card import SHAPE

from scripts import plan_memory
from scripts.plan_run import format_hours

OF_STEP = 64 * 32  # tokens
CARD = "--card=H100"


def plan(tmp_path, capsys, *flags: str) -> tuple[dict, str]:
    assert plan_memory.main([*SHAPE, *flags, "--json", str(tmp_path / "plan.json")]) == 0
    return json.loads((tmp_path / "plan.json").read_text()), capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "tokens", "steps", "words"),
    [
        (f"{CARD} --num-tokens=2.5M", 2_500_000, 1221, r"2\.5M tokens, 1,221 steps: about "),
        (f"{CARD} --num-steps=70", 70 * OF_STEP, 70, "70 steps: about "),
        (f"{CARD} --num-steps=70 --nproc-per-node=4", 4 * 70 * OF_STEP, 70, "70 steps: about "),
        (f"{CARD} --num-tokens=1M --nproc-per-node=4", 10**6, 123, "1M tokens, 123 steps: about "),
        (CARD, 10**9, 488_282, "1B tokens, 488,282 steps: about "),  # what people compare by
        (f"{CARD} --num-epochs=2", 10**9, 488_282, "1B tokens, 488,282 steps: about "),
        ("--num-tokens=1M", 10**6, 489, "1M tokens, 489 steps; --card tells how long they take"),
        ("--num-steps=70", 70 * OF_STEP, 70, None),  # nobody knows, nobody asked
    ],
)
def test_the_whole_run(flags, tokens, steps, words, tmp_path, capsys):
    result, out = plan(tmp_path, capsys, "--device=cuda", "--memory-budget=1GiB", *flags.split())
    run = result["run"]
    assert (run["tokens"], run["steps"]) == (tokens, steps)
    said = re.findall(r"^run      (.*)$", out, re.M)
    assert ("note     how many steps --num-epochs 2 are is up to the data" in out) == (
        "epochs" in flags
    )
    if words is None:
        assert not said
    else:
        assert re.match(words, said[0]) and len(said) == 1
    if "--card" in flags:
        (taken,) = (row for row in result["rows"] if row["name"] == result["takes"])
        assert run["seconds"] == pytest.approx(steps * taken["seconds"], rel=1e-9)
        about, without = said[0].split(": about ")[1].split("; ")
        assert about == format_hours(run["seconds"])
        assert without == "without data, communication, evaluation"
    else:
        assert run["seconds"] is None


def test_copies_and_other_settings(tmp_path, capsys):
    knobs, out = plan(tmp_path, capsys, CARD, "--all-knobs", "--num-steps=10")
    assert knobs["run"]["seconds"] == pytest.approx(10 * knobs["all_knobs"][0]["seconds"], rel=1e-9)
    assert "run      10 steps: about " in out
    _, out = plan(tmp_path, capsys, CARD, "--longest-sequence", "--memory-budget=1GiB")
    assert "\nrun " not in out  # the command has other steps than the rows


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0016, "0.0016 s"),
        (20, "20 s"),
        (91, "1.5 min"),
        (1500, "25 min"),
        (5399, "90 min"),
        (5401, "1.5 h"),
        (61_000, "17 h"),
    ]
    + [(359_000, "100 h"), (450_000, "5.2 days"), (10**8, "1,200 days")],
)
def test_as_exact_as_an_estimate(seconds, words):
    assert format_hours(seconds) == words
