"""scripts/benchmark.py: do its figures mean what they say? (Not: are they good.)"""

import json
import subprocess
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from planner import CARDS, Card
from scripts import benchmark
from trainer.plan import card_for

SHAPE = (
    "--device cpu --no-amp --vocab-size 211 --n-layers 3 --n-heads 2 --d-model 64 --seq-len 32 "
    "--batch-size 8 --loss-chunks 2"
).split()


def arguments(flags: str = "", policy: str = "none"):
    settings = benchmark.parse([*SHAPE, "--steps", "1", *flags.split()])
    return settings.replace(use_activation_checkpoint=policy)


# 1 TFLOP/s and 1 GB/s: steps of SHAPE wait for bytes.
CARD = Card("a card", 2**30, (1e12, 1e12, 1e12), 1e9)


@pytest.fixture(autouse=True)
def no_measured_card(monkeypatch):
    """It takes three seconds."""
    monkeypatch.setattr(benchmark, "card_for", lambda *_: CARD)


def fake_worker(argv, policy):
    return {"step_s_all": [9.0, 0.5, float(len(policy))], "peak_bytes": 3 << 20}


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """bench(flags): what it writes, and what it prints."""

    def run(flags: str, worker=fake_worker, code: int = 0) -> SimpleNamespace:
        monkeypatch.setattr(benchmark, "run_worker", worker)
        file = tmp_path / "rows.json"
        assert benchmark.main([*SHAPE, *flags.split(), "--json", str(file)]) == code
        out, err = capsys.readouterr()
        result = json.loads(file.read_text()) if file.exists() else {"rows": []}
        return SimpleNamespace(json=result, rows=result["rows"], out=out, err=err)

    return run


@pytest.mark.slow
def test_measured_in_processes_of_their_own(bench, monkeypatch):
    monkeypatch.setattr(benchmark, "card_for", card_for)
    monkeypatch.setattr(subprocess, "run", partial(subprocess.run, timeout=240))
    flags = "--policies none full --steps 2"
    done = bench(flags, worker=benchmark.run_worker)
    assert {"torch", "date", "device", "command"} < done.json.keys()
    assert done.json["card"]["name"] == done.json["predicted for"] == "this machine"
    assert [row["policy"] for row in done.rows] == ["none", "full"]
    for row in done.rows:
        assert len(row["step_s_all"]) == 2 and min(*row["step_s_all"], row["predicted_s"]) > 0
        assert row["peak_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.02)
        assert row["mfu"] is row["hfu"] is None


@pytest.mark.parametrize(
    ("policy", "accumulate"), [("cheap", 1), ("full:1,mlp", 1), ("full+offload", 2)]
)
def test_the_allocators_record_agrees_with_the_planner(policy, accumulate):
    args = arguments(f"--grad-accum-steps {accumulate}", policy)
    measured = benchmark.measure(args)["peak_bytes"]
    assert measured == pytest.approx(benchmark.make_plan(args).peak, rel=0.02)


def test_medians_stand_beside_predictions(bench):
    order = []

    def worker(argv, policy):
        order.append(policy)
        return None if policy == "mlp" else fake_worker(argv, policy)  # None: out of memory

    done = bench("--policies none mlp selective mlp --grad-accum-steps 2", worker=worker)
    assert order == ["none", "mlp", "selective"]
    assert [row["policy"] for row in done.rows] == ["none", "selective"]
    assert (done.json["runs"], done.json["out of memory"]) == ("3 of 3", "mlp")
    assert done.out.endswith("\nout of memory: mlp\n")
    planner = benchmark.make_plan(arguments("--grad-accum-steps 2")).planner
    for row in done.rows:
        step = planner.step(8, recompute=row["policy"])
        assert row["step_s"] == len(row["policy"])  # the median
        assert row["tokens_per_s"] == pytest.approx(2 * 8 * 32 / row["step_s"])
        # two micro-batches share one update
        assert step.seconds(CARD) < row["predicted_s"] < 2 * step.seconds(CARD)
        assert (row["peak_bytes"], row["predicted_bytes"]) == (3 << 20, step.peak)
    _, _, first, second = (line.strip("| ").split(" | ") for line in done.out.splitlines()[:4])
    assert first[:2] == ["none", "4,000.0 ms"] and second[:2] == ["selective", "9,000.0 ms"]
    assert "+125.0%" in second and second[6] == "3.0 MiB"


def test_a_worker_that_runs_out_of_memory_is_no_crash(monkeypatch, capsys):
    def full(args):
        assert args.use_activation_checkpoint == "mlp"
        raise MemoryError

    monkeypatch.setattr(benchmark, "measure", full)
    code = benchmark.main([*SHAPE, "--worker", "mlp"])
    assert code == 4 and capsys.readouterr().err == "error: out of memory with mlp\n"
    done = subprocess.CompletedProcess([], returncode=code, stdout="", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *command, **how: done)
    for done.returncode in (code, -9):  # Linux kills the process that takes too much
        assert benchmark.run_worker([], "none") is None
    done.returncode = 1
    with pytest.raises(RuntimeError, match="benchmark"):
        benchmark.run_worker([], "none")


def test_ctrl_c_keeps_what_was_measured(bench):
    def worker(argv, policy):
        if policy == "mlp":
            raise KeyboardInterrupt
        return fake_worker(argv, policy)

    done = bench("--policies none cheap mlp full", worker=worker, code=130)
    assert done.err.splitlines()[-1] == "stopped after 2 of 4 runs"
    assert [row["policy"] for row in done.rows] == ["none", "cheap"]
    assert "runs: 2 of 4\n" in done.out and "| none |" in done.out


def test_shares_of_what_a_gpu_can_do(monkeypatch):
    """`mfu` of the FLOPs that a step needs, `hfu` of those that it does."""
    here = SimpleNamespace(
        name="NVIDIA A100-SXM4-40GB", total_memory=CARDS["A100 40GB"].memory, major=8
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: here)
    asked, cuda = benchmark.make_plan(arguments("--tf32", "full")), torch.device("cuda")
    card = card_for(asked.settings, cuda)
    question = replace(asked, device=cuda, precision=torch.float32, card=card)
    row, step = benchmark.make_row(question, fake_worker([], "full")), question.step
    needed, replayed = (flops / 32 / step.batch_size for flops in step.needed_and_replayed_flops)
    assert row["mfu"] == pytest.approx(row["tokens_per_s"] * needed / 156e12)
    assert row["hfu"] == pytest.approx(row["mfu"] * (1 + replayed / needed))
