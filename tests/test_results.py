"""studies/results/ is what the code says today, and one script makes all of it."""

import json
import shlex
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from harness.runs import ROOT

from studies import ladder, make_results, memory_timeline

FOLDER = ROOT / make_results.FOLDER
CHEAP = ("plain", "none", "full")  # rungs whose GPT-2 small is simulated here, with 2 sequences


def read(name: str) -> dict:
    return json.loads((FOLDER / name).read_text())


def test_each_file_has_the_command_that_makes_it():
    known = make_results.commands()
    for file in FOLDER.glob("*.json"):
        assert f"--json {make_results.FOLDER}/{file.name}" in known[file.stem][-1]
    drawn = {name for name in known if not (FOLDER / f"{name}.json").exists()}
    drawn |= {f"memory_{name}" for name in ("timeline", "frontier", "made_of")}
    assert {file.stem for file in FOLDER.glob("*.png")} == drawn


def test_the_pictures_numbers_are_what_the_planner_says():
    file = read("memory_timeline.json")
    _, _, _, *flags = shlex.split(file["command"])
    args = memory_timeline.parse([*flags, "--out", str(ROOT / "out")])
    asked, rows = memory_timeline.prepare(args), file["rows"]
    assert {row["batch_size"] for row in rows} == {args.batch_size // 4, args.batch_size} == {2, 8}
    for name in CHEAP:
        step = memory_timeline.step_of(asked, name, 2)
        wanted = json.loads(json.dumps(memory_timeline.row(asked, step)))
        wanted["predicted_s"] = pytest.approx(wanted["predicted_s"], rel=1e-9)  # a sum of floats
        assert wanted in rows, f"{name}: made with torch {file['torch']}; {REMAKE}"


REMAKE = "if the change is meant: python -m studies.make_results"


@pytest.mark.parametrize("rung", CHEAP)
def test_the_ladders_numbers_are_what_its_tracker_counts(rung):
    file, column = read("ladder.json"), "124M, B=2"
    config, batch = ladder.CONFIGURATIONS[column]
    peak = ladder.step_peak(replace(config, **ladder.RUNGS[rung]), batch, ladder.SEQ_LEN)
    wanted = asdict(ladder.Figure(column, rung, peak / 2**20, peak))
    assert wanted in file["figures"], f"made with torch {file['torch']}; {REMAKE}"


def test_the_ladder_has_every_rung_and_column():
    found = {(figure["column"], figure["rung"]) for figure in read("ladder.json")["figures"]}
    columns = [*ladder.CONFIGURATIONS, *ladder.FLOPS, *ladder.TIMES]
    assert found == {(column, rung) for column in columns for rung in ladder.RUNGS}


def test_the_script_runs_the_commands_and_passes_a_failure_on(monkeypatch, capsys):
    started = []

    def note(words, cwd):
        assert cwd == ROOT
        started.append(words)
        return subprocess.CompletedProcess(words, returncode=2 if "studies.ladder" in words else 0)

    monkeypatch.setattr(make_results.subprocess, "run", note)
    assert make_results.main(["--list"]) == 0 and not started
    assert "    python -m studies.ladder --json " in capsys.readouterr().out
    assert make_results.main([]) == 2
    programs = [words[2] for words in started]
    assert programs == ["scripts.memory_timeline", *map("studies.".__add__, QUICK)]
    assert make_results.main(["--only", "fine_tuning"]) == 0
    assert started[-1][2:] == "studies.fine_tuning --json studies/results/fine_tuning.json".split()
    assert {words[0] for words in started} == {sys.executable}


QUICK = ("block_picture", "ladder")
