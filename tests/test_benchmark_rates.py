"""What the device can do at most, in scripts/benchmark.py: MFU, and predicted times."""

import json

import pytest
import torch
from test_benchmark import CARD, SHAPE, arguments, fake_worker

from model import MiniGPTConfig
from planner.formulas import step_flops
from scripts import benchmark, benchmark_worker
from scripts.benchmark_worker import Job
from scripts.peak_flops import peak_flops
from scripts.plan_table import Clock


def test_predicted_times_stand_beside_measured_ones(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "run_worker", fake_worker)
    monkeypatch.setattr(benchmark, "clock_card", lambda args, device: CARD)
    file = tmp_path / "rows.json"
    flags = ["--policies", "none", "full", "--repeats", "1", "--json", str(file)]

    def predict(*more: str) -> list[dict]:
        assert benchmark.main([*SHAPE, *flags, *more]) == 0
        return json.loads(file.read_text())["rows"]

    args = arguments()
    planner = benchmark.plan(args, torch.device("cpu"), torch.float32)
    none, full = predict("--compile")[:2]
    for row in (none, full):
        assert row["predicted_s"] == planner.step(8, recompute=row["policy"]).seconds(CARD)
    header, _, first, second = capsys.readouterr().out.splitlines()[2:6]
    columns = header.split(" | ")
    assert columns[3] == columns[6] == "predicted" and columns[2] == "step"
    assert first.split(" | ")[3] == f"{1000 * none['predicted_s']:,.1f} ms"
    more = full["predicted_s"] / none["predicted_s"] - 1
    assert second.split(" | ")[6] == f"{more:+.1%}" != "+0.0%" and first.split(" | ")[6] == "+0.0%"
    both = {(row["policy"], row["compiled"]): row["predicted_s"] for row in predict("--compile")}
    assert both["none", True] < both["none", False]
    # Three micro-batches share one update, as they do in what is measured.
    three, planner.accumulate, planner.steps = predict("--grad-accum-steps", "3")[0], True, {}
    assert three["predicted_s"] == Clock(CARD, False, 3, 1).seconds(planner.step(8))
    assert 2 * none["predicted_s"] < three["predicted_s"] < 3 * none["predicted_s"]
    card = json.loads(file.read_text())["card"]
    assert (card["name"], card["bytes_per_s"]) == ("a card", 1e9)


def test_mfu_and_hfu():
    config = benchmark_worker.config_of(arguments(), Job("full", 8))
    needed, replayed = step_flops(config, 32)
    # A card that does exactly what 1000 tokens/s need is at 100 %.
    shares = benchmark.utilization(config, 32, 1000.0, 1000 * needed)
    assert shares["mfu"] == pytest.approx(1.0)
    assert shares["hfu"] == pytest.approx(1 + replayed / needed) and shares["hfu"] > 1.1
    # GPT-2 small at 150,000 tokens/s on an A100: 6 x 124M x 150,000 / 312e12 = 36 %, and attention.
    small = MiniGPTConfig(dropout=0.0)
    peak = peak_flops("NVIDIA A100-SXM4-40GB", torch.bfloat16)
    assert 0.36 < benchmark.utilization(small, 1024, 150_000.0, peak)["mfu"] < 0.40
    assert benchmark.utilization(small, 1024, 150_000.0, None) == {"mfu": None, "hfu": None}
