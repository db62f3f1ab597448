"""studies/results/ is what the code says today, documents say it too, and one script makes it all.

Here are the pictures, the ladder and the studies of trainings; other results have their own tests.
"""

import json
import shlex
import sys
from dataclasses import asdict, replace
from statistics import mean
from unittest.mock import Mock

import pytest
from harness.runs import ROOT, TINY
from test_readme import DOCS, cells

from data import find_dataset
from studies import fine_tuning, ladder, make_results, memory_timeline, optimizers

FOLDER = ROOT / make_results.FOLDER
CHEAP = ("plain", "none", "full")  # rungs whose GPT-2 small is simulated here, with 2 sequences
REMAKE = "if the change is meant: python -m studies.make_results"
KINDS = [(name, dtype) for name in optimizers.OPTIMIZERS for dtype in optimizers.MOMENTS]


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def words_of(document: str) -> str:
    return " ".join(DOCS[document].split())


def test_each_file_has_the_command_that_makes_it():
    known = make_results.commands()
    for file in FOLDER.glob("*.json"):
        assert f"--json {make_results.FOLDER}/{file.name}" in known[file.stem][-1]
    drawn = {name for name in known if not (FOLDER / f"{name}.json").exists()}
    drawn |= {f"memory_{name}" for name in ("timeline", "frontier", "made_of")}
    assert {file.stem for file in FOLDER.glob("*.png")} == drawn


def test_the_script_runs_the_commands_and_passes_a_failure_on(monkeypatch, capsys):
    run = Mock(side_effect=[Mock(returncode=code) for code in (2, 0, 0, 0)])
    monkeypatch.setattr(make_results.subprocess, "run", run)
    assert make_results.main(["--list"]) == 0 and not run.called
    assert "    python -m studies.ladder --json " in capsys.readouterr().out
    assert make_results.main([]) == 2 and make_results.main(["--only", "fine_tuning"]) == 0
    assert all(call.kwargs == {"cwd": ROOT} for call in run.call_args_list)
    *quick, last = ([*call.args[0]] for call in run.call_args_list)
    of_quick = "scripts.memory_timeline studies.block_picture studies.ladder".split()
    assert [words[2] for words in quick] == of_quick
    command = "-m studies.fine_tuning --json studies/results/fine_tuning.json".split()
    assert last == [sys.executable, *command]


def test_the_pictures_numbers_are_what_the_planner_says():
    file = read("memory_timeline")
    _, _, _, *flags = shlex.split(file["command"])
    args = memory_timeline.parse([*flags, "--out", str(ROOT / "out")])
    asked, rows = memory_timeline.prepare(args), file["rows"]
    assert {row["batch_size"] for row in rows} == {args.batch_size // 4, args.batch_size} == {2, 8}
    for name in CHEAP:
        step = memory_timeline.step_of(asked, name, 2)
        wanted = json.loads(json.dumps(memory_timeline.row(asked, step)))
        wanted["predicted_s"] = pytest.approx(wanted["predicted_s"], rel=1e-9)  # a sum of floats
        assert wanted in rows, f"{name}: made with torch {file['torch']}; {REMAKE}"


def test_the_ladders_numbers_are_what_its_tracker_counts():
    file, column = read("ladder"), "124M, B=2"
    config, batch = ladder.CONFIGURATIONS[column]
    for rung in CHEAP:
        peak = ladder.step_peak(replace(config, **ladder.RUNGS[rung]), batch, ladder.SEQ_LEN)
        wanted = asdict(ladder.Figure(column, rung, peak / 2**20, peak))
        assert wanted in file["figures"], f"{rung}: made with torch {file['torch']}; {REMAKE}"
    found = {(figure["column"], figure["rung"]) for figure in file["figures"]}
    columns = [*ladder.CONFIGURATIONS, *ladder.TIMES]
    assert found == {(column, rung) for column in columns for rung in ladder.RUNGS}


# ---- Trainings


def test_optimizers_are_compared_like_with_like(tmp_path, capsys):
    file = tmp_path / "found.json"
    quick = "--num-steps 10 --eval-interval 2 --seeds 2 --rounds 2 --factors 1 3 --no-amp".split()
    assert optimizers.main([*TINY, *quick, f"--json={file}"]) == 0
    found, out = json.loads(file.read_text()), capsys.readouterr().out
    rates = [(r["optimizer"], r["num_steps"], round(r["lr"], 4)) for r in found["rates"]]
    assert rates == [(n, s, lr) for n, s in (("adamw", 10), ("muon", 6)) for lr in (0.025, 0.075)]
    for row in found["rates"]:
        assert [step for step, _ in row["curve"]] == list(range(2, row["num_steps"] + 1, 2))
        assert row["val_loss"] == row["curve"][-1][1] < 4
        assert f"lr {row['lr']}, num_steps {row['num_steps']}: validation loss" in out
    assert [(t["precision"], len(t["step_s_all"])) for t in found["times"]] == [("float32", 2)]
    moments = {(r["optimizer"], r["moments_dtype"], r["seed"]): r for r in found["moments"]}
    assert [*moments] == [(*kind, seed) for kind in KINDS for seed in (1337, 1338)]
    for name in optimizers.OPTIMIZERS:  # the sweep's best run is one of them
        best = optimizers.best(found["rates"], name)
        assert moments[name, "float32", 1337]["val_loss"] == best["val_loss"]
        losses = {moments[name, dtype, 1338]["val_loss"] for dtype in optimizers.MOMENTS}
        assert len(losses) == 2 and max(losses) - min(losses) < 0.05


def test_when_a_run_is_where_another_ends():
    def row(name: str, *curve: float) -> dict:
        steps = [(10 * i, loss) for i, loss in enumerate(curve, 1)]
        return {"optimizer": name, "val_loss": curve[-1], "num_steps": 30, "curve": steps}

    rates = [row("adamw", 5, 4, 3), row("adamw", 5, 4, 3.5), row("muon", 4, 4)]
    never = "3.0000 after 30 steps; Muon's best is there never"
    assert never in optimizers.describe_match(rates, [])
    rates.append(row("muon", 3.1, 3, 2))
    times = [{"precision": "float32", "ratio": 1.2}]
    assert "at step 20: 0.67 of steps, 0.80 (float32) of" in optimizers.describe_match(rates, times)
    runs = [row("random", 5, 3), row("trained", 4, 3.1), row("trained", 3, 2)]
    assert fine_tuning.steps_to_match(runs) == [None, 10]


def test_weights_are_compared_like_with_like(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(find_dataset.__kwdefaults__, "cache_dir", tmp_path / "cache")
    file, texts = tmp_path / "found.json", tmp_path / "texts"
    texts.mkdir()
    for i in range(5):
        (texts / f"{i}.txt").write_text(f"file {i} has words of its own, {'ab' * i}\n" * 40)
    flags = (
        "--n-layers 1 --n-heads 2 --d-model 16 --seq-len 16 --batch-size 4 --vocab-size 270 "
        "--no-amp --num-steps 12 --share 0.5 --eval-interval 3 --eval-batches 1 --factors 1 0.1 "
        f"--device cpu --json={file} --train-data {texts}"
    ).split()
    halves = fine_tuning.halves(fine_tuning.parse(flags))
    assert [[path[-5] for path in half] for half in halves] == [["0", "2", "4"], ["1", "3"]]
    assert fine_tuning.main(flags) == 0
    out, found = capsys.readouterr().out, json.loads(file.read_text())
    runs = [(run["from"], round(run["lr"], 5), run["steps"]) for run in found["runs"]]
    assert runs == [("random weights", 0.025, 12), ("trained", 0.025, 6), ("trained", 0.0025, 6)]
    random, *trained = (dict(run["curve"]) for run in found["runs"])
    assert [*random] == [3, 6, 9, 12] and [*trained[0]] == [*trained[1]] == [3, 6]
    assert all(curve[3] < 0.95 * random[3] for curve in trained)  # they do know something
    assert "bits/byte, the end of random weights, reached after step: " in out
    assert len(list(texts.iterdir())) == 5  # and nothing else
    assert fine_tuning.main([*flags, "--train-data", str(texts / "0.txt")]) == 2
    assert capsys.readouterr().err.startswith("error: --train-data: one file only")


def test_evidence_says_what_optimizers_found():
    found, text = read("optimizers"), words_of("evidence.md")
    ends = {name: optimizers.best(found["rates"], name)["val_loss"] for name in ("adamw", "muon")}
    step = optimizers.steps_to_match(found["rates"])
    assert f"ends at a validation loss of {ends['adamw']:.4f} after 1,000 steps" in text
    assert f"is there at step {step} and ends at {ends['muon']:.4f}" in text
    for row in found["times"]:
        assert f"{row['ratio']:.2f} times" in text and f"{row['ratio'] * step / 1000:.2f}" in text
    losses: dict[tuple, list[float]] = {kind: [] for kind in KINDS}
    for row in found["moments"]:
        losses[row["optimizer"], row["moments_dtype"]].append(row["val_loss"])
    for name in optimizers.OPTIMIZERS:
        means = [mean(losses[name, dtype]) for dtype in optimizers.MOMENTS]
        spread = max(losses[name, "float32"]) - min(losses[name, "float32"])
        assert abs(means[0] - means[1]) < spread and f"{spread:.3f}" in text
        assert all(f"{one:.4f}" in text for one in means)


def test_weights_says_what_fine_tuning_found():
    runs = read("fine_tuning")["runs"]
    curves = [dict(run["curve"]) for run in runs]
    for step, *shown in cells(DOCS["weights.md"], "| step | random weights"):
        wanted = [curve.get(int(step.replace(",", ""))) for curve in curves]
        assert shown == ["" if bits is None else f"{bits:.3f}" for bits in wanted]
    *_, of_default = fine_tuning.steps_to_match(runs)
    assert f"is there after {of_default}, at the default rate" in words_of("weights.md")
    assert of_default <= runs[0]["steps"] / 3
