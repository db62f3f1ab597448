"""docs/lesson.md: its exercises are the script's, right answers pass, plausible mistakes do not."""

import re

import pytest
from harness.runs import ROOT

from scripts import checkpoint_from_scratch, kept_tensors, lesson
from scripts.lesson import EXERCISES, MEASURES, NOT_YET, sections

N_PARAMETERS = 124_439_808  # of GPT-2 small
PAGE = (ROOT / "docs" / "lesson.md").read_text()
PROGRAMS = {
    "scripts.lesson": lesson.main,
    "scripts.kept_tensors": kept_tensors.main,
    "scripts.checkpoint_from_scratch": checkpoint_from_scratch.main,
}
COMMANDS = re.findall(r"^    python -m (scripts\.\w+) ?(.*)$", PAGE, re.M)


@pytest.fixture(scope="module")
def measured():
    return {n: measure() for n, measure in MEASURES.items()}


@pytest.fixture
def known(measured, monkeypatch):
    """The answers; they are computed once for all tests."""
    for n, result in measured.items():
        monkeypatch.setitem(MEASURES, n, lambda result=result: result)
    return {n: answer for n, (answer, _) in measured.items()}


def ask(capsys, *words: str) -> tuple[int, str, str]:
    return lesson.main(list(words)), *capsys.readouterr()


def test_the_page_and_the_script_have_the_same_exercises(capsys):
    assert [*sections()] == [*EXERCISES] == [*MEASURES] == list(range(1, len(EXERCISES) + 1))
    for n in EXERCISES:
        code, out, _ = ask(capsys, str(n))
        assert code == 0 and out.strip() in PAGE and out.startswith(f"{n}. ")
    code, out, _ = ask(capsys)
    assert code == 0 and len(re.findall(r"^\d+\. ", out, re.M)) == len(EXERCISES)


@pytest.mark.parametrize(("program", "words"), COMMANDS)
def test_the_commands_of_the_page(program, words, capsys, known):
    code = PROGRAMS[program](words.split())
    assert code == (NOT_YET if words == "4 30" else 0)
    assert capsys.readouterr().out


# ---- The answers, by another way than the script's where there is one


def test_answers_are_those_that_stand_in_the_documents(known):
    """docs/ladder.md and docs/planning.md say the same, and have tests of their own."""
    ladder = (ROOT / "docs" / "ladder.md").read_text()
    whole = {n: round(answer) for n, answer in known.items() if isinstance(answer, float)}
    assert whole[2] == 8 * 4 + 2 * 16 and known[9] == 4 * N_PARAMETERS / 2**20
    assert f"\n| `none` | {whole[3]} |" in ladder and f"\n| `cheap` | {whole[4]} |" in ladder
    assert round(known[5], 2) == round(1 + 8 / 36, 2)
    assert f"{known[7] * 1024:,.0f} MiB for 12 sequences" in ladder
    assert [known[n] for n in (1, 6, 8, 10, 11, 12)] == [3, "c", 1, "mlp", 6, "b"]


# What people write: right, and wrong, besides the mistakes that an exercise knows.
WRITTEN = {
    1: (("3", "3."), ("1", "-3")),
    2: (("64", "64.08", "64 BTC"), ("36",)),
    3: (("36", "36 btc", "36.1"), ("18", "35", "37")),
    4: (("24", "24.06 BTC"), ("36",)),
    5: (("1.22", "1.222", "1.22x", "1.22 times"), ("1.33", "1.25", "1")),
    6: (("c", "C", "(c)"), ()),
    7: (("6.9", "6.9 GiB", "7"), ("7.4", "7067")),
    8: (("1",), ("2", "3.5", "1.2")),
    9: (("475", "474.7", "475 MiB", "475mib"), ("1899", "1.9")),
    10: (("mlp", "MLP", "`mlp`"), ()),
    11: (("6", "6.0"), ("4", "9")),
    12: (("b", "(b)"), ()),
}


@pytest.mark.parametrize("n", EXERCISES)
def test_right_answers_pass_and_mistakes_are_not_given_away(n, known, capsys):
    rights, wrongs = WRITTEN[n]
    for text in rights:
        code, out, err = ask(capsys, str(n), *text.split())
        assert code == 0 and out.startswith("right: ") and EXERCISES[n].why in out, text
    right = EXERCISES[n].answer(known[n]).split()[0].rstrip(".")
    known_mistakes = {str(wrong): words for wrong, words in EXERCISES[n].mistakes}
    for text in {*wrongs, *known_mistakes}:
        code, out, err = ask(capsys, str(n), *text.split())
        assert code == NOT_YET == 3 and out.startswith("not yet: "), text
        assert known_mistakes.get(text, "") in out and out.count("\n") == 1
        if n not in (1, 6, 8, 11, 12):  # (a single digit or letter stands in every sentence)
            assert not re.search(rf"\b{re.escape(right)}\b", out), text


def test_solutions(known, capsys):
    code, out, _ = ask(capsys, "--solution")
    third = out.splitlines()[2] + "\n"
    assert code == 0 and [int(line.split(":")[0]) for line in out.splitlines()] == [*EXERCISES]
    code, out, _ = ask(capsys, "3", "32", "--solution")
    assert code == NOT_YET and out.startswith("not yet: ") and out.endswith(third)
