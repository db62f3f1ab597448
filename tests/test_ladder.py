"""The figures of studies/ladder.py: is its tracker right, and do the documents have them?"""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from harness.runs import ROOT
from test_model import TINY
from test_readme import DOCS, README
from test_readme import cells as cells_of
from torch._subclasses.fake_tensor import FakeTensorMode

from model import RECOMPUTE_POLICIES, MiniGPTConfig
from planner.formulas import count_parameters, step_flops
from studies import ladder
from trainer.measured import LiveStorages

SMALL = MiniGPTConfig(**{**TINY, "n_layers": 4, "loss_chunks": 4})


@pytest.mark.parametrize("fake", [True, False])
def test_peak_counted_by_hand(fake):
    with FakeTensorMode() if fake else nullcontext(), LiveStorages() as storages:
        a = torch.zeros(100)  # 400
        view = a.view(10, 10)[:5]  # of a's storage: still 400
        b = (view + 1).to(torch.bfloat16)  # 200, and 100 more: at once 700, then 500
        assert (storages.now, storages.peak) == (500, 700)
        del a
        assert storages.now == 500  # the view holds all of it
        view.add_(1)  # in place: no new storage
        del view
        assert storages.now == 100
        c = torch.empty(200)  # 900: the new peak
        del b, c
        assert storages.now == 0
        d = torch.empty(50)  # 200, maybe at an address used before
        assert (storages.now, storages.peak) == (200, 900)
        del d


def test_script_prints_and_writes_the_same_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ladder, "SEQ_LEN", 16)
    monkeypatch.setattr(ladder, "GPT2_SMALL", SMALL)
    monkeypatch.setattr(ladder, "CONFIGURATIONS", {"tiny": (SMALL, 2)})
    monkeypatch.setattr(ladder, "TIMED", (SMALL, 2))
    rungs = {rung: ladder.RUNGS[rung] for rung in ("plain", "none", "full")}
    monkeypatch.setattr(ladder, "RUNGS", rungs)
    columns, path = ["tiny", *ladder.FLOPS, *ladder.TIMES], tmp_path / "ladder.json"
    assert ladder.main(["--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    assert f"command: python -m studies.ladder --json {path}" in lines
    assert f"torch: {torch.__version__}" in lines
    result = json.loads(path.read_text())
    figures = {(f["column"], f["rung"]): f for f in result["figures"]}
    assert len(figures) == len(result["figures"]) == 3 * 6
    assert [row[0] for row in rows[2:]] == [*rungs]
    for rung, *cells in rows[2:]:
        mib, *ratios = (figures[column, rung]["value"] for column in columns)
        assert cells == [f"{mib:.0f}", *(f"{ratio:.3f}" for ratio in ratios)]
    for column in ladder.TIMES:
        plain, none, full = (f for f in result["figures"] if f["column"] == column)
        assert none["value"] == 1 and full["value"] == full["raw"] / none["raw"] > 1
    assert result["figures"][0]["raw"] == ladder.step_peak(replace(SMALL, loss_chunks=1), 2, 16)


# ---- What stands in the documents

GPT2_SMALL = MiniGPTConfig(dropout=0.0)


def figures_of(column: str) -> dict[str, float]:
    figures = json.loads((ROOT / "studies/results/ladder.json").read_text())["figures"]
    return {figure["rung"]: figure["value"] for figure in figures if figure["column"] == column}


def relative_flops(**memory) -> str:
    needed, replayed = step_flops(replace(GPT2_SMALL, **memory), 1024)
    return f"{(needed + replayed) / needed:.2f}"


def test_the_first_table_is_what_was_predicted():
    rows = {"2": figures_of("124M, B=2"), "12": figures_of("124M, B=12")}
    for (_, *found), rung in zip(
        cells_of(README, "| | 2 seq"), ("plain", "none", "full"), strict=True
    ):
        assert found == [f"{figures[rung]:,.0f}" for figures in rows.values()]
    floor = 16 * count_parameters(GPT2_SMALL) / 2**20
    assert f"\n{floor:,.0f} MiB of each are weights" in README
    assert f"[{relative_flops(recompute='full')} times the FLOPs]" in README


def test_the_ladder_is_what_was_predicted():
    rows = cells_of(DOCS["ladder.md"], "| policy | keeps")
    assert len(rows) == len(RECOMPUTE_POLICIES) + 1
    small, large = figures_of("124M, B=12"), figures_of("1.5B, B=4")
    for name, _, of_small, of_large, flops, *times in rows:
        rung = name.strip("`")
        assert (of_small, of_large) == (f"{small[rung]:,.0f}", f"{large[rung]:,.0f}")
        assert flops == relative_flops(recompute=rung)
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
