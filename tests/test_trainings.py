"""Studies of trainings, optimizers and fine_tuning: what they compare, and what documents say."""

import json
import os
import subprocess
import sys
from statistics import mean

import pytest
from harness.runs import ROOT, TINY
from test_readme import DOCS, cells

from data import find_dataset
from studies import clock_check, fine_tuning, optimizers
from studies.make_results import FOLDER

KINDS = [(name, dtype) for name in optimizers.OPTIMIZERS for dtype in optimizers.MOMENTS]


def words_of(document: str) -> str:
    return " ".join(DOCS[document].split())


def results(study: str) -> dict:
    return json.loads((ROOT / FOLDER / f"{study}.json").read_text())


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
        assert {r["lr"] for kind, r in moments.items() if kind[0] == name} == {best["lr"]}


def test_when_a_run_is_where_another_ends():
    def row(name: str, *curve: float) -> dict:
        steps = [(10 * i, loss) for i, loss in enumerate(curve, 1)]
        return {"optimizer": name, "val_loss": curve[-1], "num_steps": 30, "curve": steps}

    rates = [row("adamw", 5, 4, 3), row("adamw", 5, 4, 3.5), row("muon", 4, 4)]
    assert "3.0000 after 30 steps; Muon's best is there never" in optimizers.describe_match(
        rates, []
    )
    rates.append(row("muon", 3.1, 3, 2))
    times = [{"precision": "float32", "ratio": 1.2}]
    assert "at step 20: 0.67 of steps, 0.80 (float32) of" in optimizers.describe_match(rates, times)
    runs = [row("random", 5, 3), row("trained", 4, 3.1), row("trained", 3, 2)]
    assert fine_tuning.steps_to_match(runs) == [None, 10]


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A folder of five files; its name may be one that stdout cannot spell."""
    monkeypatch.setitem(find_dataset.__kwdefaults__, "cache_dir", tmp_path / "cache")
    folder = tmp_path / "wörter"
    folder.mkdir()
    for i in range(5):
        text = f"file {i} has words of its own, {'ab' * i}\n" * 40
        (folder / f"{i}.txt").write_text(text)
    return folder


def test_weights_are_compared_like_with_like(texts, tmp_path, capsys):
    file = tmp_path / "found.json"
    flags = (
        "--n-layers 1 --n-heads 2 --d-model 16 --seq-len 16 --batch-size 4 --vocab-size 270 "
        "--no-amp --num-steps 12 --share 0.5 --eval-interval 3 --eval-batches 1 --factors 1 0.1 "
        f"--device cpu --json={file} --train-data {texts}"
    ).split()
    halves = fine_tuning.halves(fine_tuning.parse(flags))
    names = [[path[-5:] for path in half] for half in halves]
    assert names == [["0.txt", "2.txt", "4.txt"], ["1.txt", "3.txt"]]
    assert fine_tuning.main(flags) == 0
    out, found = capsys.readouterr().out, json.loads(file.read_text())
    runs = [(run["from"], round(run["lr"], 5), run["steps"]) for run in found["runs"]]
    assert runs == [("random weights", 0.025, 12), ("trained", 0.025, 6), ("trained", 0.0025, 6)]
    for run in found["runs"]:
        assert [step for step, _ in run["curve"]] == list(range(3, run["steps"] + 1, 3))
    random, *trained = (dict(run["curve"]) for run in found["runs"])
    assert all(curve[3] < 0.95 * random[3] for curve in trained)  # they do know something
    assert "bits/byte, the end of random weights, reached after step: " in out
    assert len(list(texts.iterdir())) == 5  # and nothing else


CHOSEN = {  # by the study itself
    fine_tuning: "--init-from=x --resume --use-toy-data --val-data=x",
    optimizers: "--optimizer=muon --moments-dtype=bfloat16 --lr=1",
    clock_check: "--card=H100 --use-activation-checkpoint=mlp",
}


@pytest.mark.parametrize("study", CHOSEN, ids=lambda study: study.__name__)
def test_what_a_study_chooses_itself_is_refused(study, capsys):
    for flag in CHOSEN[study].split():
        assert study.main([flag]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {flag.split('=')[0]}: this script chooses it")


def test_one_file_is_too_few(texts):
    for path in sorted(texts.iterdir())[1:]:
        path.rename(path.with_suffix(".pdf"))
    command = [sys.executable, "-m", "studies.fine_tuning", f"--train-data={texts}"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert "w?rter: 1 file taken, 4 skipped" in result.stdout
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "one file only" in result.stderr


# ---- What stands in the documents


def test_evidence_says_what_optimizers_found():
    found, text = results("optimizers"), words_of("evidence.md")
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
    runs = results("fine_tuning")["runs"]
    curves = [dict(run["curve"]) for run in runs]
    for step, *shown in cells(DOCS["weights.md"], "| step | random weights"):
        wanted = [curve.get(int(step.replace(",", ""))) for curve in curves]
        assert shown == ["" if bits is None else f"{bits:.3f}" for bits in wanted]
    *_, of_default = fine_tuning.steps_to_match(runs)
    assert f"is there after {of_default}, at the default rate" in words_of("weights.md")
    assert of_default <= runs[0]["steps"] / 3
