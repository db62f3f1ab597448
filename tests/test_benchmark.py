"""scripts/benchmark.py: do its figures mean what they say? (Not: are they good.)"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from planner import CARDS, Card
from scripts import benchmark
from trainer.plan import card_for

SHAPE = (
    "--device cpu --no-amp --vocab-size 211 --n-layers 3 --n-heads 2 --d-model 64 --seq-len 32 "
    "--batch-size 8 --loss-chunks 2 --steps 3"
).split()
# 1 TFLOP/s and 1 GB/s: steps of SHAPE wait for bytes.
CARD = Card("a card", 2**30, (1e12, 1e12, 1e12), 1e9)


@pytest.fixture
def known_card(monkeypatch):
    """It takes three seconds to measure one."""
    monkeypatch.setattr(benchmark, "card_for", lambda *_: CARD)


@pytest.mark.parametrize(
    ("policy", "accumulate"), [("cheap", 1), ("full:1,mlp", 1), ("full+offload", 2)]
)
def test_the_measured_peak_is_the_planned_one(known_card, policy, accumulate):
    settings = benchmark.parse([*SHAPE, "--grad-accum-steps", str(accumulate)])
    plan = benchmark.make_plan(settings).with_policy(policy)
    seconds, peak = benchmark.measure(plan.settings, 1, plan.device)
    assert seconds > 0 and peak == pytest.approx(plan.peak, abs=64)  # a few numbers of the loop


def test_measured_stands_beside_predicted(known_card, monkeypatch, tmp_path, capsys):
    """A row for each policy, though memory runs out with one."""
    file, order, mean_step_seconds = tmp_path / "rows.json", [], benchmark.mean_step_seconds

    def timed(run, n=1):
        policy = run.model.config.recompute
        if policy == "mlp":
            raise torch.OutOfMemoryError("played")
        order.append(policy)
        mean_step_seconds(run, n)
        return [9.0, 0.5, float(len(policy))][len(order) % 3]  # three in a row: the last is between

    monkeypatch.setattr(benchmark, "mean_step_seconds", timed)
    flags = "--policies none mlp selective mlp --grad-accum-steps 2 --json".split()
    assert benchmark.main([*SHAPE, *flags, str(file)]) == 0
    assert order == [*["none"] * 5, *["selective"] * 5]  # warm-up, three steps, the peak
    found = json.loads(file.read_text())
    planner = benchmark.make_plan(benchmark.parse([*SHAPE, "--grad-accum-steps", "2"])).planner
    for row, policy in zip(found["rows"], ("none", "selective"), strict=True):
        step = planner.step(8, recompute=policy)
        assert row["policy"] == policy and row["step_s"] == len(policy)
        assert row["tokens_per_s"] == pytest.approx(2 * 8 * 32 / row["step_s"])
        # Two micro-batches share one update.
        assert step.seconds(CARD) < row["predicted_s"] < 2 * step.seconds(CARD)
        assert row["predicted_bytes"] == step.peak == pytest.approx(row["peak_bytes"], abs=64)
        assert row["mfu"] is row["hfu"] is None
    _, _, first, second, third, _, command, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("| none | 4,000.0 ms | ") and second == "| mlp | out of memory |"
    assert third.startswith("| selective | 9,000.0 ms | ") and " | +125.0% | " in third
    assert command == f"command: {found['command']}" and found["card"]["name"] == "a card"


def test_shares_of_what_a_gpu_can_do(known_card, monkeypatch):
    """`mfu` of the FLOPs that a step needs, `hfu` of those that it does."""
    here = SimpleNamespace(
        name="NVIDIA A100-SXM4-40GB", total_memory=CARDS["A100 40GB"].memory, major=8
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: here)
    asked, cuda = benchmark.make_plan(benchmark.parse([*SHAPE, "--tf32"])), torch.device("cuda")
    card = card_for(asked.settings, cuda)
    question = replace(asked, device=cuda, precision=torch.float32, card=card).with_policy("full")
    row, step = benchmark.make_row(question, 0.5, 2**20), question.step
    needed, replayed = (flops / 32 / step.batch_size for flops in step.needed_and_replayed_flops)
    assert row["mfu"] == pytest.approx(row["tokens_per_s"] * needed / 156e12)
    assert row["hfu"] == pytest.approx(row["mfu"] * (1 + replayed / needed))


@pytest.mark.slow
def test_this_machine_is_measured_first(capsys):
    assert benchmark.main([*SHAPE, "--policies", "full"]) == 0
    assert "\npredicted for: this machine\n" in capsys.readouterr().out
