"""studies/results/ is what the code says today, documents say it too, and studies/README.md has the
commands that make it.

Here are the tables but that of cards, a block's picture and the studies of trainings; other results
have their own tests.
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

import pytest
from harness.runs import ROOT
from test_readme import DOCS, README, cells

from memory import RECOMPUTE_POLICIES
from model import MiniGPTConfig
from planner.formulas import count_parameters, step_flops
from scripts import benchmark, memory_timeline
from scripts.kept_tensors import kept_by_one_block
from scripts.style import relative_flops
from studies import block_picture, tables
from studies.block_picture import BATCH_SIZE, SEQ_LEN
from trainer.flags import build_parser, fill_in

FOLDER = ROOT / "studies/results"
PAGE = (ROOT / "studies/README.md").read_text("utf-8")
# And the page has a section for each.
MADE_ONCE = "optimizers", "fine_tuning", "compiler", "benchmark_cpu_124m_b2_peer"
GPT2_SMALL = MiniGPTConfig(dropout=0.0)
REMAKE = "if the change is meant: studies/README.md has the command"


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def words(text: str) -> str:
    return " ".join(text.split())


def words_of(document: str) -> str:
    return words(DOCS[document])


def listed() -> list[list[str]]:
    """The commands of the page's first block."""
    block = PAGE.split("```bash\n")[1].split("```")[0].replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in block.splitlines() if line[0] != "#"]


def test_the_page_has_the_command_of_each_file():
    names = {path.name for path in FOLDER.iterdir()} - {f"{name}.json" for name in MADE_ONCE}
    made = {word.removeprefix("studies/results/"): words for words in listed() for word in words}
    assert names - {"memory_page.png"} == {
        name for name in made if name.endswith((".png", ".json"))
    }
    assert "memory_page.png" in PAGE and all(find_spec(words[2]) for words in listed())
    for words in listed():
        if words[2] == "scripts.benchmark":  # (of the others the files say that they ran)
            benchmark.build_parser().parse_args(words[3:])
    for name in tables.TABLES:
        assert shlex.split(read(name)["command"]) == made[f"{name}.json"]


def test_the_pictures_peaks_are_what_the_planner_says():
    """(Else: make them anew, and commit.)"""
    (flags,) = (words[3:] for words in listed() if words[2] == "scripts.memory_timeline")
    args = memory_timeline.parse([*flags, "--policies", "plain", "full"])
    picture = (FOLDER / "memory_timeline.png").read_bytes()
    for name, record in memory_timeline.record_all(args)[1].items():
        assert f"{name}: {record.step.peak:,} bytes".encode() in picture, REMAKE


# ---- The tables of what is planned


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_table_is_printed_and_written(name, tmp_path, monkeypatch, capsys):
    """Here of the rows that were made; below some are made again. docs/ has it."""
    rows, file = read(name)["rows"], tmp_path / "rows.json"
    _, write, made_of = tables.TABLES[name]
    monkeypatch.setitem(tables.TABLES, name, (rows.__getitem__, write, [*range(len(rows))]))
    assert len(rows) == len(made_of)
    assert tables.main([name, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert capsys.readouterr().out == f"{write(rows)}\n" and found["rows"] == rows
    assert found["command"] == f"python -m studies.tables {name} --json {file}"
    (page,) = (page for page in DOCS.values() if f"studies.tables {name}" in words(page))
    for shown in write(rows).split("\n\n") if name != "ladder" else ():
        assert f"\n{shown}\n" in page, REMAKE


@pytest.mark.parametrize("name", ["plain", "full"])
def test_a_rung_is_found_again(name):
    (wanted,) = (row for row in read("ladder")["rows"] if row["name"] == name)
    found = tables.ladder_row(name)
    assert found["peak_bytes"] == wanted["peak_bytes"], REMAKE
    assert found["seconds"] == pytest.approx(wanted["seconds"], rel=1e-9), REMAKE


@pytest.mark.slow
@pytest.mark.parametrize("way", [("sdpa", 0, 1), ("full", 1, 4)])
def test_a_length_is_found_again(way):
    found = tables.length_row((way, "gpt2"))
    seconds = pytest.approx(found.pop("seconds"), rel=1e-9)  # added up in another order
    rows = [row for row in read("long")["rows"] if found.items() <= row.items()]
    assert [row["seconds"] for row in rows] == [seconds], REMAKE


def figures_of(column: str) -> dict[str, float]:
    """Of each rung: MiB, or time in units of that without recompute."""
    rows = {row["name"]: row for row in read("ladder")["rows"]}
    if column in tables.PEAKS:
        return {name: row["peak_bytes"][column] / 2**20 for name, row in rows.items()}
    none = rows["none"]["seconds"][column]
    return {name: row["seconds"][column] / none for name, row in rows.items()}


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
        assert times == [f"{figures_of(column)[rung]:.2f}" for column in tables.CLOCKS]


def test_the_head_and_the_flops_of_full_are_explained():
    text = words_of("ladder.md")
    peak, time = figures_of("124M, B=12"), figures_of("RTX 4090")
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
    return {policy: block_picture.look(policy) for policy in RECOMPUTE_POLICIES}


def test_kept_as_listed(blocks):
    """By what a model of two blocks keeps more than one of one; autocast's copies of the weights
    are not drawn."""
    flags = {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "d_model": 768, "n_heads": 12}
    for policy, tensors in blocks.items():
        listed = kept_by_one_block(policy, argparse.Namespace(**flags, no_amp=False))
        listed = [s for s in listed if s.shape[0] in (BATCH_SIZE, BATCH_SIZE * SEQ_LEN)]
        kept = [tensor for tensor in tensors if tensor.state == "#"]
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
    """The picture carries the table that it was drawn from. docs/ladder.md has its
    sums, in whole BTC."""
    drawn = block_picture.text_table(blocks).encode("latin-1")
    assert drawn in (FOLDER / "block_policies.png").read_bytes()
    keeps = {row[0]: row[1] for row in cells(DOCS["ladder.md"], "| policy | keeps")}
    for policy, tensors in blocks.items():
        assert keeps[f"`{policy}`"] == f"{block_picture.kept_btc(tensors):.0f}"


def test_draws_or_prints(tmp_path, capsys, blocks, monkeypatch, plt):
    monkeypatch.setattr(block_picture, "look", blocks.get)
    file, text = tmp_path / "block.png", block_picture.text_table(blocks)
    assert block_picture.main(["--out", str(file)]) == 0
    assert capsys.readouterr().out == f"{text}\n" and text.encode("latin-1") in file.read_bytes()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert block_picture.main([]) == 0
    assert capsys.readouterr().out == f"{text}\n"


# ---- Made once: the numbers stay, and studies/README.md says how


def typed_in(name: str) -> list[list[str]]:
    """The commands of a result's section, as bash expands them, none of which runs."""
    section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
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
    (command,) = typed_in("benchmark_cpu_124m_b2_peer")
    made = shlex.split(read("benchmark_cpu_124m_b2_peer")["command"])
    assert command[command.index("--policies") :] == made[made.index("--policies") :]


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
        more = [f"{100 * row[key]:+.1f} %" for key in ("over_none", "predicted_over_none")]
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
