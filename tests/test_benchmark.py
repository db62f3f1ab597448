"""scripts/benchmark.py, and its worker: do its figures mean what they say? (Not: are they good.)"""

import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness.runs import ROOT, children_of, is_alive, wait_until

from model import MiniGPT
from planner import CARDS, Card
from planner.formulas import step_flops
from scripts import benchmark, benchmark_worker
from scripts.benchmark_worker import Job
from trainer import card
from trainer.card import clock_card
from trainer.pretrained import THEIRS, renamed

SHAPE = (
    "--device cpu --no-amp --vocab-size 211 --n-layers 3 --n-heads 2 --d-model 64 --seq-len 32 "
    "--batch-size 8 --loss-chunks 2"
).split()


def arguments(*flags: str):
    args = benchmark.build_parser().parse_args([*SHAPE, "--steps", "1", *flags])
    benchmark.check(args)
    return args


# 1 TFLOP/s and 1 GB/s: steps of SHAPE wait for bytes.
CARD = Card("a card", 2**30, (1e12, 1e12, 1e12), 1e9, 0)


@pytest.fixture(autouse=True)
def no_measured_card(monkeypatch):
    """It takes three seconds."""
    monkeypatch.setattr(benchmark, "clock_card", lambda args, device: CARD)


SECONDS = itertools.count(1)


def fake_worker(argv, job):
    return {
        "step_s_all": [float(next(SECONDS)), 0.5],  # each process is slower than the one before
        "peak_bytes": 1000 * job.batch_size,
        "peak_kind": "cpu allocator",
        "reserved_bytes": None,
        "rss_bytes": 5 << 20,
    }


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """bench(*flags): what it writes, and what it prints."""

    def run(*flags: str, worker=fake_worker, code: int = 0) -> SimpleNamespace:
        monkeypatch.setattr(benchmark, "run_worker", worker)
        file = tmp_path / "rows.json"
        assert benchmark.main([*SHAPE, *flags, "--json", str(file)]) == code
        out, err = capsys.readouterr()
        result = json.loads(file.read_text()) if file.exists() else {"rows": []}
        return SimpleNamespace(json=result, rows=result["rows"], out=out, err=err)

    return run


@pytest.mark.slow
def test_measured_in_processes_of_their_own(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "clock_card", card.clock_card)
    monkeypatch.chdir(tmp_path)  # from anywhere
    monkeypatch.setattr(subprocess, "run", partial(subprocess.run, timeout=240))
    ballast = torch.ones(2**27)  # 512 MiB of this process, which no worker must report as its own
    flags = "--policies none full --repeats 1 --steps 2"
    done = bench(*flags.split(), worker=benchmark.run_worker)
    del ballast
    assert done.json["torch"] == torch.__version__ and flags in done.json["command"]
    assert done.json["config"]["vocab_size"] == 211 and done.json["out_of_memory"] == []
    assert done.json["card"]["name"] == done.json["predicted for"] == "this machine"
    assert [row["policy"] for row in done.rows] == ["none", "full"]
    for row in done.rows:
        assert len(row["step_s_all"]) == 2 and min(*row["step_s_all"], row["predicted_s"]) > 0
        assert row["peak_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.02)
        assert row["peak_kind"] == "cpu allocator" and row["mfu"] is None and row["hfu"] is None
        assert 0 < row["rss_bytes"] < 2**29
    assert re.search(r"^\| full \| 8 x 32 \| .* MiB \| ", done.out, re.M)


@pytest.mark.parametrize(
    ("policy", "accumulate"), [("cheap", 1), ("full:1,mlp", 1), ("full+offload", 2)]
)
def test_the_allocators_record_agrees_with_the_planner(policy, accumulate):
    args, job = arguments("--grad-accum-steps", str(accumulate)), Job(policy, 8)
    predicted, _ = benchmark.predict(benchmark.ask(args), job)
    measured = benchmark_worker.measure(args, job)["peak_bytes"]
    assert measured == pytest.approx(predicted.peak, rel=0.02)


def run_of(job: Job, *flags: str):
    return benchmark_worker.make_run(arguments(*flags), job, torch.device("cpu"))


def test_what_is_compiled_and_what_runs_in_tf32(monkeypatch):
    """Each block of ours; of a peer, all, as its users do."""

    def compiled(**how):
        model = run_of(Job("none", 2, **how)).model
        return {type(m).__name__ for m in model.modules() if m._compiled_call_impl is not None}

    peer, asked = lambda config: torch.nn.Linear(config.d_model, config.d_model), []  # noqa: E731
    monkeypatch.setitem(benchmark_worker.PEERS, "transformers", peer)
    assert compiled() == compiled(peer="transformers") == set()
    assert compiled(compiled=True, peer="transformers") == {"Linear"}
    assert compiled(compiled=True) == {"Block"}
    monkeypatch.setattr(benchmark_worker, "set_matmul_precision", lambda *how: asked.append(how))
    assert run_of(Job("none", 1)) and run_of(Job("none", 1), "--tf32")
    assert [tf32 for _, tf32 in asked] == [False, True]


@pytest.mark.parametrize(
    ("device", "done", "values"),
    [("cpu", "step " * 4, 4), ("mps", "step wait step wait step step step step wait ", 1)],
)
def test_a_gpu_is_waited_for_once(device, done, values, monkeypatch):
    """Python runs ahead of it from step to step, as it does in training; a CPU waits by itself."""
    log, process = [], SimpleNamespace(device=torch.device(device))
    run = SimpleNamespace(step=0, process=process)
    for name, new in {
        "choose_device": lambda _: process.device,
        "make_run": lambda *_: run,
        "train_step": lambda _: log.append("step "),
        "recorded_peak": lambda _: 1,
    }.items():
        monkeypatch.setattr(benchmark_worker, name, new)
    monkeypatch.setattr("torch.accelerator.synchronize", lambda: log.append("wait "))
    found = benchmark_worker.measure(arguments("--steps=4"), Job("none", 1))
    assert "".join(log) == "step " * 2 * (device == "cpu") + done and run.step == 6
    assert len(found["step_s_all"]) == values and min(found["step_s_all"]) > 0


def test_all_models_see_the_same_tokens_and_every_step_others():
    def batches(policy):
        run, seen = run_of(Job(policy, 3)), []
        run.wrapped.register_forward_pre_hook(lambda _, ids_and_labels: seen.append(ids_and_labels))
        for _ in range(2):
            benchmark_worker.timed_step(run)
        return seen

    (ids, labels), (later, _) = batches("none")
    assert ids.shape == (3, 32) and torch.equal(ids[:, 1:], labels[:, :-1])
    assert not torch.equal(ids, later)
    assert torch.equal(batches("full")[1][0], later)


def test_processes_take_turns_and_medians_stand_beside_predictions(bench, capsys):
    order = []

    def worker(argv, job):
        if not order:  # the estimate comes first
            assert re.fullmatch(r"9 runs, about [\d:]+ in all\n", capsys.readouterr().err)
        order.append(job.policy)
        if job.policy == "mlp" and order.count("mlp") == 2:
            return None  # out of memory
        return fake_worker(argv, job)

    flags = "--policies none mlp full --repeats 3 --grad-accum-steps 2"
    done = bench(*flags.split(), worker=worker)
    assert order == "none mlp full none mlp full none full".split()
    assert [row["policy"] for row in done.rows] == ["none", "full"]
    assert [job["policy"] for job in done.json["out_of_memory"]] == ["mlp"]
    planner = benchmark.ask(arguments("--grad-accum-steps", "2")).planner
    for row in done.rows:
        assert len(row["step_s_all"]) == 6
        assert row["step_s"] == statistics.median(row["step_s_all"]) > 0.5
        assert row["tokens_per_s"] == pytest.approx(2 * 8 * 32 / row["step_s"])
        one = planner.step(8, recompute=row["policy"]).seconds(CARD)
        assert one < row["predicted_s"] < 2 * one  # two micro-batches share one update
    assert (done.json["card"]["name"], done.json["card"]["bytes_per_s"]) == ("a card", 1e9)
    header, _, first, second = (line.split(" | ") for line in done.out.splitlines()[2:6])
    # Each turn by itself: a machine that is slower in one of them changes no ratio.
    of_turns = zip(*(row["step_s_all"] for row in done.rows), strict=True)
    measured = statistics.median(full / none for none, full in of_turns)
    predicted = done.rows[1]["predicted_s"] / done.rows[0]["predicted_s"]
    said = ("step", "time per token", measured), ("predicted step", "predicted", predicted)
    for at, (name, more, ratio) in enumerate(said, 2):
        none = done.rows[0][f"{name.split()[0]}_s"]
        assert (header[at], header[at + 3]) == (name, f"{more}, over none")
        assert first[at] == f"{1000 * none:,.1f} ms"
        assert (first[at + 3], second[at + 3]) == ("+0.0%", f"{ratio - 1:+.1%}")
    assert "Out of memory: MiniGPT, mlp, batch 8" in done.out


def test_largest_batch_is_what_the_planner_says(bench):
    flags = "--policies none full --repeats 1 --compile --largest-batch --memory-budget".split()
    done = bench(*flags, "13.4MB")  # less a tenth
    equal, largest = done.rows[:4], done.rows[4:]
    ways = [(policy, way) for way in (False, True) for policy in ("none", "full")]
    assert [(row["policy"], row["compiled"]) for row in equal] == ways
    assert {row["batch_size"] for row in equal} == {8}
    sizes = {row["policy"]: row["batch_size"] for row in largest}
    assert sizes["full"] > sizes["none"] > 8
    for row in largest:
        assert row["largest"] and row["predicted_bytes"] == pytest.approx(12e6, rel=0.1)
    assert "### At the largest batch that fits" in done.out
    done = bench(*flags, "1kB")  # too small for one sequence: said, and gone on
    said = "none: not one sequence fits in 900 B (1000 B less a margin of a tenth)"
    assert said in done.err and len(done.rows) == 4


def test_where_nothing_fits_that_is_all_that_is_said(bench):
    done = bench("--policies", "none", worker=lambda argv, job: None)
    assert done.rows == [] and done.out.startswith("Out of memory: MiniGPT, none, batch 8\n")


def test_a_worker_that_runs_out_of_memory_is_no_crash(monkeypatch, capsys):
    def full(args, job):
        raise MemoryError

    monkeypatch.setattr(benchmark, "measure", full)
    assert benchmark.main([*SHAPE, "--worker", json.dumps(vars(Job("none", 8)))]) == 0
    assert json.loads(capsys.readouterr().out) is None
    killed = subprocess.CompletedProcess([], returncode=-9, stdout="", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *command, **how: killed)
    assert benchmark.run_worker([], Job("none", 8)) is None
    killed.returncode = 1
    with pytest.raises(RuntimeError, match="benchmark"):
        benchmark.run_worker([], Job("none", 8))


@pytest.mark.parametrize(("n_done", "kept"), [(0, []), (3, [4, 2])])
def test_ctrl_c_keeps_what_was_measured(bench, n_done, kept):
    left = iter(range(n_done))

    def worker(argv, job):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return fake_worker(argv, job)

    done = bench(*"--policies none full --repeats 2".split(), worker=worker, code=130)
    when = f"after {n_done} of 4 runs"
    assert done.err.splitlines()[-1] == f"stopped {when}"
    assert [len(row["step_s_all"]) for row in done.rows] == kept
    assert (f"interrupted: {when}" in done.out and "| none |" in done.out) == bool(kept)
    assert (done.out == "") == (not kept) and done.json.get("interrupted", when) == when


def is_worker(pid: int) -> bool:
    """And it has begun its own work: after exec, and with torch loaded."""
    words, files = (Path(f"/proc/{pid}/{name}").read_text() for name in ("cmdline", "maps"))
    return "--worker" in words and "libtorch" in files


@pytest.mark.slow
def test_no_worker_outlives_ctrl_c(tmp_path):
    """Also if the signal reached this process alone, not all of the terminal's."""
    file = tmp_path / "rows.json"
    flags = ["--policies", "none", "--steps", "1000000", "--json", str(file)]
    command = [sys.executable, "-m", "scripts.benchmark", *SHAPE, *flags]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        # Between fork and exec it is Popen itself that would be interrupted.
        wait_until(lambda: any(map(is_worker, children_of(process.pid))), "worker")
        workers = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 130 and err.splitlines()[1:] == ["stopped after 0 of 3 runs"]
        wait_until(lambda: not any(map(is_alive, workers)), "end of the worker")
    finally:
        for pid in filter(is_alive, workers):  # a test that fails must not take a core for ever
            os.kill(pid, signal.SIGKILL)


def test_the_peer_is_measured_beside_ours(bench, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "find_spec", lambda name: None)
    assert benchmark.main([*SHAPE, "--peer", "transformers"]) == 2
    assert "is not installed: pip install transformers" in capsys.readouterr().err
    monkeypatch.setattr(benchmark, "find_spec", lambda name: True)
    monkeypatch.setattr(benchmark, "version", lambda name: "5.0")
    done = bench(*"--policies cheap --repeats 1 --compile --peer transformers".split())
    ours, theirs = done.rows[:3], done.rows[6:]
    assert [row["policy"] for row in ours + theirs] == ["cheap", "none", "full", "none", "full"]
    assert [row["compiled"] for row in done.rows] == [False] * 3 + [True] * 3 + [False] * 2
    assert [row["peer"] for row in done.rows] == [None] * 6 + ["transformers"] * 2
    assert done.json["transformers"] == "5.0"
    assert theirs[0]["predicted_bytes"] is None and theirs[0]["predicted_s"] is None
    assert done.rows[3]["predicted_s"] == ours[0]["predicted_s"]  # also if compiled
    (line,) = [line for line in done.out.splitlines() if "| transformers none |" in line]
    cells = line.strip("| ").split(" | ")
    turns = zip(theirs[0]["step_s_all"], ours[0]["step_s_all"], strict=True)
    ratio = statistics.median(their / own for their, own in turns)
    assert cells[2:4] == [f"{1000 * theirs[0]['step_s']:,.1f} ms", ""]
    assert cells[5:7] == [f"{ratio - 1:+.1%}", ""]  # of what nobody predicts


@pytest.mark.slow
def test_the_peer_is_the_same_model():
    """With our weights it has our loss, on as many tokens."""
    pytest.importorskip("transformers")
    config = benchmark_worker.config_of(arguments(), Job("none", 8))
    ours, theirs = MiniGPT(config), benchmark_worker.Transformers(config)
    weights = renamed(ours.state_dict(), THEIRS)
    state = {f"transformer.{name}": weight for name, weight in weights.items()}
    theirs.gpt2.load_state_dict(state | {"lm_head.weight": ours.token_embedding.weight})
    assert theirs.gpt2.config._attn_implementation == "sdpa"
    rows = torch.randint(211, (3, 33))
    ids, labels = rows[:, :-1], rows[:, 1:].contiguous()
    torch.testing.assert_close(theirs(ids, labels), ours(ids, labels))
    assert len([*theirs.parameters()]) == len([*ours.parameters()])
    args = arguments("--loss-chunks", "1", "--n-layers", "6")
    none, full = (
        benchmark_worker.measure(args, Job(policy, 8, peer="transformers"))["peak_bytes"]
        for policy in ("none", "full")
    )
    assert full < 0.8 * none  # it recomputes when told to


def test_shares_of_what_a_gpu_can_do(monkeypatch):
    """`mfu` of the FLOPs that a step needs, `hfu` of those that it does."""
    here = SimpleNamespace(name="NVIDIA A100-SXM4-40GB", total_memory=CARDS["A100 40GB"].memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: here)
    job, peaks = Job("full", 8), {"": (torch.bfloat16, 312e12), "--tf32": (torch.float32, 156e12)}
    for flag, (precision, peak) in peaks.items():
        asked, cuda = benchmark.ask(arguments(*flag.split())), torch.device("cuda")
        card = clock_card(asked.args, cuda)
        question = replace(asked, device=cuda, precision=precision, card=card)
        row = benchmark.make_row(question, job, [fake_worker([], job)])
        needed, replayed = step_flops(benchmark_worker.config_of(arguments(), job), 32)
        assert row["mfu"] == pytest.approx(row["tokens_per_s"] * needed / peak)
        assert row["hfu"] == pytest.approx(row["mfu"] * (1 + replayed / needed))
