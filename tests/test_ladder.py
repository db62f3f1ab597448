"""The studies of policies, ladder and block_picture: do they say what the code does, and the
documents what they found?"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from harness.runs import ROOT
from test_model import TINY
from test_readme import DOCS, README
from test_readme import cells as cells_of

from model import RECOMPUTE_POLICIES, MiniGPTConfig
from planner.formulas import count_parameters, step_flops
from scripts.kept_tensors import kept_by_one_block
from studies import block_picture, ladder
from studies.block_picture import BATCH_SIZE, SEQ_LEN
from studies.make_results import FOLDER

SMALL = MiniGPTConfig(**{**TINY, "n_layers": 4, "loss_chunks": 4})


def test_script_prints_and_writes_the_same_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ladder, "SEQ_LEN", 16)
    monkeypatch.setattr(ladder, "GPT2_SMALL", SMALL)
    monkeypatch.setattr(ladder, "CONFIGURATIONS", {"tiny": (SMALL, 2)})
    monkeypatch.setattr(ladder, "TIMED", (SMALL, 2))
    rungs = {rung: ladder.RUNGS[rung] for rung in ("plain", "none", "full")}
    monkeypatch.setattr(ladder, "RUNGS", rungs)
    columns, path = ["tiny", *ladder.TIMES], tmp_path / "ladder.json"
    assert ladder.main(["--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    about = f"command: python -m studies.ladder --json {path}", f"torch: {torch.__version__}"
    assert {*about} <= {*lines} and [row[0] for row in rows[2:]] == [*rungs]
    result = json.loads(path.read_text())["figures"]
    figures = {(f["column"], f["rung"]): f for f in result}
    assert len(figures) == len(result) == 3 * 4
    for rung, *cells in rows[2:]:
        mib, *ratios = (figures[column, rung]["value"] for column in columns)
        assert cells == [f"{mib:.0f}", *(f"{ratio:.3f}" for ratio in ratios)]
    none, full = (figures["time, H100", rung] for rung in ("none", "full"))
    assert none["value"] == 1 and full["value"] == full["raw"] / none["raw"] > 1
    assert result[0]["raw"] == ladder.step_peak(replace(SMALL, loss_chunks=1), 2, 16)


# ---- what the documents say of it

GPT2_SMALL = MiniGPTConfig(dropout=0.0)


def figures_of(column: str) -> dict[str, float]:
    figures = json.loads((ROOT / FOLDER / "ladder.json").read_text())["figures"]
    return {figure["rung"]: figure["value"] for figure in figures if figure["column"] == column}


def test_the_first_table_is_what_was_predicted():
    rows = {"2": figures_of("124M, B=2"), "12": figures_of("124M, B=12")}
    for (_, *found), rung in zip(
        cells_of(README, "| | 2 seq"), ("plain", "none", "full"), strict=True
    ):
        assert found == [f"{figures[rung]:,.0f}" for figures in rows.values()]
    floor = 16 * count_parameters(GPT2_SMALL) / 2**20
    assert f"\n{floor:,.0f} MiB of each are weights" in README
    assert f"[{block_picture.step_cost('full'):.2f} times the FLOPs]" in README


def test_the_ladder_is_what_was_predicted():
    rows = cells_of(DOCS["ladder.md"], "| policy | keeps")
    assert len(rows) == len(RECOMPUTE_POLICIES) + 1
    small, large = figures_of("124M, B=12"), figures_of("1.5B, B=4")
    for name, _, of_small, of_large, flops, *times in rows:
        rung = name.strip("`")
        assert (of_small, of_large) == (f"{small[rung]:,.0f}", f"{large[rung]:,.0f}")
        assert flops == f"{block_picture.step_cost(rung):.2f}"
        assert times == [f"{figures_of(column)[rung]:.2f}" for column in ladder.TIMES]


def test_the_head_and_the_flops_of_full_are_explained():
    text = " ".join(DOCS["ladder.md"].split())
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
    assert drawn in (ROOT / FOLDER / "block_policies.png").read_bytes()
    keeps = {row[0]: row[1] for row in cells_of(DOCS["ladder.md"], "| policy | keeps")}
    for policy, tensors in blocks.items():
        assert keeps[f"`{policy}`"] == f"{block_picture.kept_btc(tensors):.0f}"


def test_draws_or_prints(tmp_path, capsys, blocks, monkeypatch, plt):
    monkeypatch.setattr(block_picture, "look_at_all", lambda: blocks)
    file = tmp_path / "new/folder/block_policies.png"
    assert block_picture.main(["--out", str(file.parent)]) == 0
    assert capsys.readouterr().out == f"wrote {file}\n"
    assert block_picture.text_table(blocks).encode("latin-1") in file.read_bytes()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert block_picture.main(["--out", str(tmp_path / "other")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "pip install matplotlib" in line and "--text" in line
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert block_picture.main(["--text"]) == 0
    assert "kept (BTC)" in capsys.readouterr().out
