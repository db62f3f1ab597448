"""studies/results/ is what the code says today, documents say it too, and one script makes it all.

Here are the pictures, the ladder and the studies of trainings; other results have their own tests.
"""

import argparse
import json
import shlex
import sys
from collections import Counter
from dataclasses import replace
from statistics import mean
from unittest.mock import Mock

import pytest
import torch
from harness.runs import ROOT, TINY
from test_model import TINY as OF_MODEL
from test_readme import DOCS, README, cells

from data import find_dataset
from memory import RECOMPUTE_POLICIES
from model import MiniGPTConfig
from planner.formulas import count_parameters, step_flops
from scripts import benchmark
from scripts.kept_tensors import kept_by_one_block
from scripts.style import relative_flops
from studies import (
    block_picture,
    compiler,
    fine_tuning,
    ladder,
    long,
    make_results,
    memory_timeline,
    optimizers,
)
from studies.block_picture import BATCH_SIZE, GPT2_SMALL, SEQ_LEN

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
    drawn |= {"long", *(f"memory_{name}" for name in ("timeline", "frontier", "made_of"))}
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
        wanted = {"column": column, "rung": rung, "value": peak / 2**20, "raw": peak}
        assert wanted in file["figures"], f"{rung}: made with torch {file['torch']}; {REMAKE}"
    found = {(figure["column"], figure["rung"]) for figure in file["figures"]}
    columns = [*ladder.CONFIGURATIONS, *ladder.TIMES]
    assert found == {(column, rung) for column in columns for rung in ladder.RUNGS}


# ---- The ladder: a row a policy

SMALL = MiniGPTConfig(**{**OF_MODEL, "n_layers": 4, "loss_chunks": 4})


def test_script_prints_and_writes_the_same_figures(tmp_path, monkeypatch, capsys):
    rungs = {rung: ladder.RUNGS[rung] for rung in ("plain", "none", "full")}
    tiny = {"SEQ_LEN": 16, "CONFIGURATIONS": {"tiny": (SMALL, 2)}, "TIMED": (SMALL, 2)}
    for name, value in (tiny | {"RUNGS": rungs}).items():
        monkeypatch.setattr(ladder, name, value)
    columns, path = ["tiny", *ladder.TIMES], tmp_path / "ladder.json"
    assert ladder.main(["--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    about = f"command: python -m studies.ladder --json {path}", f"torch: {torch.__version__}"
    assert {*about} <= {*lines} and [row[0] for row in rows[2:]] == [*rungs]
    result = json.loads(path.read_text())["figures"]
    figures = {(f["column"], f["rung"]): f for f in result}
    assert len(figures) == len(result) == 3 * 4
    for rung, *shown in rows[2:]:
        mib, *ratios = (figures[column, rung]["value"] for column in columns)
        assert shown == [f"{mib:.0f}", *(f"{ratio:.3f}" for ratio in ratios)]
    none, full = (figures["time, H100", rung] for rung in ("none", "full"))
    assert none["value"] == 1 and full["value"] == full["raw"] / none["raw"] > 1
    assert result[0]["raw"] == ladder.step_peak(replace(SMALL, loss_chunks=1), 2, 16)


# ---- Long sequences


def test_the_document_has_the_studys_table():
    assert long.report(read("long")["found"]) in (ROOT / "docs/long.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("way", [("sdpa", 0, 1), ("full", 1, 4)])
def test_a_length_is_found_again(way):
    found = long.longest("gpt2", *way)
    assert found in read("long")["found"]


# ---- The compiler's own choice


def test_a_budget_is_compared_with_the_best_mix_that_needs_no_more():
    ours = [compiler.Counted(f"{peak}", peak, flops, True) for peak, flops in
            [(100, 10.0), (50, 14.0), (40, 12.0), (20, 20.0)]]  # fmt: skip
    for peak, flops in [(100, 10), (999, 10), (70, 11), (40, 12), (30, 16), (20, 20), (19, None)]:
        assert compiler.ours_at(peak, ours) == flops


@pytest.mark.slow
def test_what_the_compiler_does_is_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "CONFIG", SMALL)
    monkeypatch.setattr(compiler, "POLICIES", ("none", "full"))
    monkeypatch.setattr(compiler, "BUDGETS", (0.5,))
    file = tmp_path / "compiler.json"
    assert compiler.main(["--json", str(file)]) == 0
    none, full, half = json.loads(file.read_text())["counted"]
    # `full` replays each block to its end, as compiled code cannot stop half-way.
    config, tokens = SMALL, compiler.BATCH * SMALL.max_position_embeddings
    weights = 4 * config.d_model**2 + 2 * config.d_model * config.d_ff
    attention = 2 * tokens * config.max_position_embeddings * config.d_model
    block = 2 * tokens * weights + attention
    assert full["flops"] - none["flops"] == config.n_layers * block
    assert max(full["peak"], half["peak"]) < none["peak"]
    assert "| budget 0.5 |" in capsys.readouterr().out and none["same_bits"]


def figures_of(column: str) -> dict[str, float]:
    figures = read("ladder")["figures"]
    return {figure["rung"]: figure["value"] for figure in figures if figure["column"] == column}


def test_the_first_table_is_what_was_predicted():
    rows = {"2": figures_of("124M, B=2"), "12": figures_of("124M, B=12")}
    for (_, *found), rung in zip(
        cells(README, "| | 2 seq"), ("plain", "none", "full"), strict=True
    ):
        assert found == [f"{figures[rung]:,.0f}" for figures in rows.values()]
    floor = 16 * count_parameters(GPT2_SMALL) / 2**20
    assert f"\n{floor:,.0f} MiB of each figure are weights" in README
    assert f"[{block_picture.step_cost('full'):.2f} times the FLOPs]" in README


def test_the_ladder_is_what_was_predicted():
    rows = cells(DOCS["ladder.md"], "| policy | keeps")
    assert len(rows) == len(RECOMPUTE_POLICIES) + 1
    small, large = figures_of("124M, B=12"), figures_of("1.5B, B=4")
    for name, _, of_small, of_large, flops, *times in rows:
        rung = name.strip("`")
        assert (of_small, of_large) == (f"{small[rung]:,.0f}", f"{large[rung]:,.0f}")
        assert flops == f"{block_picture.step_cost(rung):.2f}"
        assert times == [f"{figures_of(column)[rung]:.2f}" for column in ladder.TIMES]


def test_the_head_and_the_flops_of_full_are_explained():
    text = words_of("ladder.md")
    peak, time = figures_of("124M, B=12"), figures_of("time, RTX 4090")
    assert (
        f"`full` takes the peak from {peak['plain']:,.0f} MiB to {peak['full, head at once']:,.0f} "
        f"and no further" in text
    )
    assert f"at once takes {time['plain']:.2f} times as long" in text
    needed, replayed = step_flops(replace(GPT2_SMALL, recompute="full"), 1024)
    last_matmuls = 12 * 2 * GPT2_SMALL.d_model * GPT2_SMALL.d_ff
    head = 2 * GPT2_SMALL.vocab_size * GPT2_SMALL.d_model
    assert replayed == needed / 3 - last_matmuls - head
    for flops in (needed, needed / 3, last_matmuls, head, replayed):
        assert f" {flops / 1e6:.1f}" in text
    assert f"or {100 * replayed / needed:.1f} %" in text


def test_the_ladder_says_what_dropout_costs_and_shows_a_policy_as_it_is():
    without = {rung: block_picture.step_cost(rung) for rung in (*RECOMPUTE_POLICIES, "full/2")}
    dropout = replace(GPT2_SMALL, dropout=0.1)
    cost = {rung: relative_flops(replace(dropout, recompute=rung), SEQ_LEN) for rung in without}
    said = "`full` and `full/2` cost {full:.2f}, `sdpa` {sdpa:.2f}, `qkv` {qkv:.2f}. The others"
    assert said.format(**cost) in words_of("ladder.md")
    assert f"{cost['full'] - without['full']:.1%}".replace("%", " %") in words_of("ladder.md")
    more = {rung for rung in cost if cost[rung] > without[rung]}
    assert more == {"full", "full/2", "sdpa", "qkv"}
    body = DOCS["ladder.md"].partition("def cheap(block, x):\n")[2].partition("```")[0]
    assert body and body in (ROOT / "memory/policies.py").read_text("utf-8")


# ---- the picture of a block: each tensor kept, replayed, or neither


@pytest.fixture(scope="module")
def blocks():
    return block_picture.look_at_all()


def test_kept_as_listed(blocks):
    """By what a model of two blocks keeps more than one of one; autocast's copies of the weights
    are not drawn."""
    flags = {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "d_model": 768, "n_heads": 12}
    for policy, tensors in blocks.items():
        listed = kept_by_one_block(policy, argparse.Namespace(**flags, no_amp=False))
        listed = [s for s in listed if s.shape[0] in (BATCH_SIZE, BATCH_SIZE * SEQ_LEN)]
        kept = [tensor for tensor in tensors if tensor.kept]
        assert sum(tensor.bytes for tensor in kept) == sum(tensor.bytes for tensor in listed)
        # and not only in sum: mean and deviation are one entry here, and two there
        sizes = Counter(tensor.bytes for tensor in kept if "mean" not in tensor.name)
        assert sizes == Counter(s.bytes for s in listed if s.shape[-1] != 1)


def test_replayed_matmuls_are_those_of_the_formula(blocks):
    """FLOPs of the tensors that are drawn as multiplied once more = what step_flops says."""
    C = GPT2_SMALL.d_model
    inner = {"q, k, v": C, "attn.c_proj": C, "c_fc": C, "mlp.c_proj": 4 * C}  # summed over
    inner["attention"] = SEQ_LEN  # two products, half of them masked
    for policy, tensors in blocks.items():
        again = {tensor.name: tensor.bytes // 2 for tensor in tensors if tensor.state == "X"}
        flops = sum(2 * elements * inner.get(name, 0) for name, elements in again.items())
        config = replace(GPT2_SMALL, n_layers=1, recompute=policy)
        assert flops == step_flops(config, SEQ_LEN)[1] * BATCH_SIZE * SEQ_LEN


def test_the_committed_picture_and_page_are_of_this_code(blocks):
    """The picture carries the table that it was drawn from. (Else: --out studies/results, and
    commit.) docs/ladder.md has its sums, in whole BTC."""
    drawn = block_picture.text_table(blocks).encode("latin-1")
    assert drawn in (FOLDER / "block_policies.png").read_bytes()
    keeps = {row[0]: row[1] for row in cells(DOCS["ladder.md"], "| policy | keeps")}
    for policy, tensors in blocks.items():
        assert keeps[f"`{policy}`"] == f"{block_picture.kept_btc(tensors):.0f}"


def test_draws_or_prints(tmp_path, capsys, blocks, monkeypatch, plt):
    monkeypatch.setattr(block_picture, "look_at_all", lambda: blocks)
    file = tmp_path / "new/folder/block_policies.png"
    assert block_picture.main(["--out", str(file.parent)]) == 0
    assert capsys.readouterr().out == f"wrote {file}\n"
    assert block_picture.text_table(blocks).encode("latin-1") in file.read_bytes()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert block_picture.main(["--text"]) == 0
    assert "kept (BTC)" in capsys.readouterr().out


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
        "--no-amp --num-steps 12 --share 0.5 --eval-interval 3 --eval-tokens 64 --factors 1 0.1 "
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


def test_the_clocks_table_is_what_was_measured():
    rows = read("clock_cpu_124m")["rows"]
    for found, row in zip(cells(DOCS["evidence.md"], "| | step | predicted"), rows, strict=True):
        seconds = [f"{1000 * row[key]:,.0f} ms" for key in ("step_s", "predicted_s")]
        more = [f"{100 * ratio - 100:+.1f} %" for ratio in benchmark.in_units_of(rows[0], row)]
        assert found == [f"`{row['policy']}`", *seconds, *more]
    short = [100 - 100 * row["predicted_s"] / row["step_s"] for row in rows]
    assert f"predicted {min(short):.0f} to {max(short):.0f} % too short" in words_of("evidence.md")


def test_weights_says_what_fine_tuning_found():
    runs = read("fine_tuning")["runs"]
    curves = [dict(run["curve"]) for run in runs]
    for step, *shown in cells(DOCS["weights.md"], "| step | random weights"):
        wanted = [curve.get(int(step.replace(",", ""))) for curve in curves]
        assert shown == ["" if bits is None else f"{bits:.3f}" for bits in wanted]
    *_, of_default = fine_tuning.steps_to_match(runs)
    assert f"is there after {of_default}, at the default rate" in words_of("weights.md")
    assert of_default <= runs[0]["steps"] / 3
