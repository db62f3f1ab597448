"""studies/results/ is what the code says today, documents say it too, and one script makes it all.

Here are the pictures, the ladder and the studies of trainings; other results have their own tests.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from importlib.util import find_spec
from statistics import mean
from unittest.mock import Mock

import pytest
import torch
from harness.runs import ROOT
from test_model import TINY as OF_MODEL
from test_readme import DOCS, README, cells

from memory import RECOMPUTE_POLICIES
from model import MiniGPTConfig
from planner.formulas import count_parameters, step_flops
from scripts import benchmark
from scripts.kept_tensors import kept_by_one_block
from scripts.style import relative_flops
from studies import block_picture, ladder, long, make_results, memory_timeline
from studies.block_picture import BATCH_SIZE, GPT2_SMALL, SEQ_LEN
from trainer.flags import build_parser, fill_in

FOLDER = ROOT / make_results.FOLDER
CHEAP = ("plain", "none", "full")  # rungs whose GPT-2 small is simulated here, with 2 sequences
REMAKE = "if the change is meant: python -m studies.make_results"


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def words_of(document: str) -> str:
    return " ".join(DOCS[document].split())


def test_each_file_has_the_command_that_makes_it():
    known, files = make_results.commands(), {*FOLDER.glob("*.json")}
    once = {file for file in files if file.stem in make_results.ONCE}
    assert len(once) == len(make_results.ONCE)
    for file in files - once:
        assert f"--json {make_results.FOLDER}/{file.name}" in known[file.stem][-1]
    assert all(find_spec(shlex.split(line)[2]) for lines in known.values() for line in lines)
    drawn = {name for name in known if not (FOLDER / f"{name}.json").exists()}
    drawn |= {"long", *(f"memory_{name}" for name in ("timeline", "frontier", "made_of"))}
    assert {file.stem for file in FOLDER.glob("*.png")} == drawn


def test_the_script_runs_the_commands_and_passes_a_failure_on(monkeypatch, capsys):
    run = Mock(side_effect=[Mock(returncode=code) for code in (2, 0, 0, 0)])
    monkeypatch.setattr(make_results.subprocess, "run", run)
    assert make_results.main(["--list"]) == 0 and not run.called
    assert "    python -m studies.ladder --json " in capsys.readouterr().out
    assert make_results.main([]) == 2 and make_results.main(["--only", "cards"]) == 0
    assert all(call.kwargs == {"cwd": ROOT} for call in run.call_args_list)
    *quick, last = ([*call.args[0]] for call in run.call_args_list)
    of_quick = "scripts.memory_timeline studies.block_picture studies.ladder".split()
    assert [words[2] for words in quick] == of_quick
    command = "-m studies.cards --json studies/results/cards.json".split()
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
    assert len(figures) == len(result) == 3 * len(columns)
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


# ---- Made once: the numbers stay, and studies/README.md says how


def typed_in(name: str) -> list[list[str]]:
    """The commands of a result's section, as bash expands them, none of which runs."""
    page = (ROOT / "studies/README.md").read_text("utf-8")
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert all(read(name)[key] in section for key in ("torch", "date"))
    stub = 'python() { if [ "$1" = -c ]; then "$PYTHON" "$@"; else printf "%s\\n" "$*"; fi; }\n'
    script = stub + section.split("```bash\n")[1].split("```")[0].replace("git ", ": ")
    how = {"capture_output": True, "text": True, "timeout": 60, "cwd": ROOT, "check": True}
    done = subprocess.run(["bash", "-eu", "-c", script], env={"PYTHON": sys.executable}, **how)
    return [shlex.split(line) for line in done.stdout.splitlines()]


def trainings_in(name: str) -> list[argparse.Namespace]:
    parser = build_parser("train_minimal.py", "unused")
    typed = [words for words in typed_in(name) if words[0] == "train_minimal.py"]
    return [fill_in(parser.parse_args(flags)) for _, *flags in typed]


def test_the_page_has_the_commands_that_made_them():
    found, keys = read("optimizers"), ("optimizer", "num_steps", "lr", "moments_dtype", "seed")
    made = [{"moments_dtype": "float32", "seed": 1337} | row for row in found["rates"]]
    wanted = {tuple(row[key] for key in keys) for row in made + found["moments"]}
    args = trainings_in("optimizers")
    assert {tuple(vars(one)[key] for key in keys) for one in args} == wanted
    curves = {tuple(step for step, _ in row["curve"]) for row in found["rates"]}
    assert curves == {tuple(range(args[0].eval_interval, n + 1, 50)) for n in (600, 1000)}
    timed = [words[2:] for words in typed_in("optimizers") if words[0] == "-m"]
    asked = [benchmark.build_parser().parse_args(flags) for flags in timed]
    assert [(one.optimizer, one.no_amp, one.steps) for one in asked] == [
        (name, row["precision"] == "float32", len(row["step_s_all"]))
        for row in found["times"]
        for name in row["step_s"]
    ]
    before, *args = trainings_in("fine_tuning")
    runs = [(pytest.approx(run["lr"]), run["steps"]) for run in read("fine_tuning")["runs"]]
    assert [(one.lr, one.num_steps) for one in args] == runs
    assert [one.init_from is not None for one in args] == [False, True, True, True]
    assert {*before.train_data}.isdisjoint(args[0].train_data)
    (command,) = typed_in("compiler")
    assert f"python {shlex.join(command)}" == read("compiler")["command"]


def best(rates: list[dict], optimizer: str) -> dict:
    return min((r for r in rates if r["optimizer"] == optimizer), key=lambda r: r["val_loss"])


def reached(run: dict, goal: float) -> int:
    """The step at which a run is down at the goal."""
    return next(step for step, loss in run["curve"] if loss <= goal)


def test_evidence_says_what_optimizers_found():
    found, text = read("optimizers"), words_of("evidence.md")
    runs = {name: best(found["rates"], name) for name in ("adamw", "muon")}
    ends = {name: run["val_loss"] for name, run in runs.items()}
    step = reached(runs["muon"], ends["adamw"])
    assert f"ends at a validation loss of {ends['adamw']:.4f} after 1,000 steps" in text
    assert f"is there at step {step} and ends at {ends['muon']:.4f}" in text
    for row in found["times"]:
        assert f"{row['ratio']:.2f} times" in text and f"{row['ratio'] * step / 1000:.2f}" in text
    losses = defaultdict[tuple, list[float]](list)
    for row in found["moments"]:
        losses[row["optimizer"], row["moments_dtype"]].append(row["val_loss"])
    for name in runs:
        means = [mean(losses[name, dtype]) for dtype in ("float32", "bfloat16")]
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
    of_default = reached(runs[-1], runs[0]["curve"][-1][1])
    assert f"is there after {of_default}, at the default rate" in words_of("weights.md")
    assert of_default <= runs[0]["steps"] / 3
