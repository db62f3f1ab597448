"""studies/fine_tuning.py: what it compares, and what stands in docs/weights.md."""

import json
import os
import subprocess
import sys

import pytest
from harness.runs import ROOT
from test_readme import DOCS, cells

from data import find_dataset
from studies import fine_tuning, optimizers
from studies.make_results import FOLDER

QUICK = (
    "--n-layers 1 --n-heads 2 --d-model 16 --seq-len 16 --batch-size 4 --vocab-size 270 --no-amp "
    "--num-steps 12 --share 0.5 --eval-interval 3 --eval-batches 1 --factors 1 0.1 --device cpu"
).split()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setitem(find_dataset.__kwdefaults__, "cache_dir", tmp_path / "cache")


def test_it_compares_like_with_like(tmp_path, capsys):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"file {i} has words of its own, {'ab' * i}\n" * 40)
    path = tmp_path / "found.json"
    words = [f"--json={path}", "--train-data", str(tmp_path)]
    assert fine_tuning.main([*QUICK, *words]) == 0
    out, found = capsys.readouterr().out, json.loads(path.read_text())
    runs = [(run["from"], round(run["lr"], 5), run["steps"]) for run in found["runs"]]
    assert runs == [("random weights", 0.025, 12), ("trained", 0.025, 6), ("trained", 0.0025, 6)]
    for run in found["runs"]:
        assert [step for step, _ in run["curve"]] == list(range(3, run["steps"] + 1, 3))
    random, *trained = (dict(run["curve"]) for run in found["runs"])
    assert all(curve[3] < 0.95 * random[3] for curve in trained)  # they do know something
    assert "bits/byte, the end of random weights, reached after step: " in out
    assert sorted(path.name for path in tmp_path.glob("*.txt")) == [f"{i}.txt" for i in range(4)]


def test_every_second_file(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text("some text")
    args = fine_tuning.parse([*QUICK, "--train-data", str(tmp_path)])
    names = [[path[-5:] for path in half] for half in fine_tuning.halves(args)]
    assert names == [["0.txt", "2.txt", "4.txt"], ["1.txt", "3.txt"]]


def test_when_it_is_where_random_weights_end():
    runs = [{"curve": curve} for curve in ([(1, 5), (9, 3)], [(1, 4), (2, 3.1)], [(1, 3), (2, 2)])]
    assert fine_tuning.steps_to_match(runs) == [None, 1]


CHOSEN = {  # by the study itself
    fine_tuning: "--init-from=x --resume --use-toy-data --val-data=x",
    optimizers: "--optimizer=muon --moments-dtype=bfloat16 --lr=1",
}


@pytest.mark.parametrize("study", CHOSEN, ids=lambda study: study.__name__)
def test_what_a_study_chooses_itself_is_refused(study, capsys):
    for flag in CHOSEN[study].split():
        assert study.main([flag]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {flag.split('=')[0]}: this script chooses it")


def test_one_file_is_too_few(tmp_path):
    """And its name may be one that stdout cannot spell."""
    (tmp_path / "wörter").mkdir()
    for name in ("x.txt", "y.pdf"):
        (tmp_path / "wörter" / name).write_text("some text")
    command = [sys.executable, "-m", "studies.fine_tuning", f"--train-data={tmp_path}/wörter"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert "w?rter: 1 file taken, 1 skipped" in result.stdout
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "one file only" in result.stderr


def test_the_documents_say_what_was_found():
    runs = json.loads((ROOT / FOLDER / "fine_tuning.json").read_text())["runs"]
    curves = [dict(run["curve"]) for run in runs]
    rows = cells(DOCS["weights.md"], "| step | random weights")
    for step, *shown in rows:
        wanted = [curve.get(int(step.replace(",", ""))) for curve in curves]
        assert shown == ["" if bits is None else f"{bits:.3f}" for bits in wanted]
    *_, of_default = fine_tuning.steps_to_match(runs)
    assert f"is there after {of_default}, at the default rate" in " ".join(
        DOCS["weights.md"].split()
    )
    assert of_default <= runs[0]["steps"] / 3
