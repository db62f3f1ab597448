"""python -m scripts.plan_memory answers before the run, in the trainers' own flags."""

import json
import re
import shlex

import pytest

from scripts import plan_memory
from trainer.flags import build_parser, byte_count

SHAPE = (
    "--use-toy-data --vocab-size 61 --n-layers 2 --n-heads 2 --d-model 16 --seq-len 32 "
    "--batch-size 8 --device cpu"
).split()


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict:
    return plan(tmp_path_factory.mktemp("plain"), "--memory-budget=1GiB")


def plan(tmp_path, *flags: str) -> dict:
    path = tmp_path / "plan.json"
    assert plan_memory.main([*SHAPE, "--json", str(path), *flags]) == 0
    return json.loads(path.read_text())


def test_a_row_for_each_policy_and_the_cheapest_that_fits_is_marked(tmp_path, capsys, plain):
    names = [row["name"] for row in plain["rows"]]
    assert names == [
        *("none", "cheap", "selective", "mlp", "attn", "sdpa", "full"),
        *("full in groups of 2", "full, offloaded"),
    ]
    peaks = {row["name"]: row["peak_bytes"] for row in plain["rows"]}
    assert plain["takes"] == "none" and all(row["fits"] for row in plain["rows"])
    capsys.readouterr()

    budget = (peaks["none"] + peaks["full"]) // 2
    tight = plan(tmp_path, f"--memory-budget={budget / 1024}KiB")
    for row in tight["rows"]:
        assert row["fits"] == (row["peak_bytes"] <= tight["budget_bytes"])
        assert (row["largest_batch"] >= 8) == row["fits"]
        assert sum(row["at_peak"].values()) == row["peak_bytes"]
        assert peaks.get(row["name"], row["peak_bytes"]) == row["peak_bytes"]
    (taken,) = (row for row in tight["rows"] if row["name"] == tight["takes"])
    assert taken["fits"] and taken["name"] != "none"
    out = capsys.readouterr().out
    (marked,) = re.findall(r"^>  (.*?)   ", out, re.M)
    assert marked == taken["name"]
    assert out.splitlines()[-1].endswith(shlex.join(taken["flags"]))


def test_the_command_runs_what_was_planned(tmp_path, capsys, plain):
    budget = plain["rows"][1]["peak_bytes"]
    flags = ["--use-activation-checkpoint", "--recompute-group=2", "--lr", "1e-3", "--grad-accum=2"]
    flags[-1] = "--grad-accum-steps=2"
    capsys.readouterr()
    plan(tmp_path, *flags, "--memory-budget", f"{budget / 1024 + 10}KiB")
    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command[:2] == ["python", "train_minimal.py"]
    args = build_parser("test", "x.pt").parse_args(command[2:])
    assert (args.lr, args.grad_accum_steps, args.recompute_group) == (1e-3, 2, 1)
    assert args.use_activation_checkpoint != "none" and args.memory_budget is None
    asked = build_parser("test", "x.pt").parse_args([*SHAPE, *flags])
    for name in ("n_layers", "batch_size", "seq_len", "vocab_size", "device"):
        assert getattr(args, name) == getattr(asked, name)


def test_ddp_and_accumulation_are_planned(tmp_path, capsys, plain):
    ddp = plan(tmp_path, "--nproc-per-node", "2")
    assert ddp["rows"][0]["at_peak"]["gradients"] > plain["rows"][0]["at_peak"]["gradients"]
    assert "torchrun --nproc-per-node=2 train_ddp.py" in capsys.readouterr().out
    several = plan(tmp_path, "--grad-accum-steps=2")
    assert several["rows"][0]["peak_bytes"] > plain["rows"][0]["peak_bytes"]


def test_a_gpu_that_is_not_here(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = plan(tmp_path, "--device=cuda")
    assert result["precision"] == "bfloat16" and result["budget_bytes"] is None
    assert {row["fits"] for row in result["rows"]} == {None}
    assert "no cuda here and no --memory-budget" in capsys.readouterr().out
    assert plan(tmp_path, "--device=cuda", "--amp-dtype=float16")["precision"] == "float16"
    assert plan(tmp_path, "--device=cuda", "--no-amp")["precision"] == "float32"


def test_nothing_fits(tmp_path, capsys):
    result = plan(tmp_path, "--memory-budget=200KiB")
    assert result["takes"] is None and not any(row["fits"] for row in result["rows"])
    assert re.search(r"nothing fits; .*(fits|alone take)", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "vocabulary"),
    [
        ("", 1024),
        ("--vocab-size 300", 300),
        ("--train-data x.txt", 50257),
        ("--train-data x.txt --tokenizer-name byte", 257),
        ("--use-toy-data", 256),
    ],
)
def test_vocabulary_is_known_without_data(flags, vocabulary):
    args = plan_memory.parse(flags.split())
    assert plan_memory.vocabulary(args) == vocabulary


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--memory-budget 8", "--memory-budget: must be a number with a unit"),
        ("--memory-budget -1GiB", "--memory-budget"),
        ("--memory-budget 8QiB", "--memory-budget: must be a number with a unit"),
        ("--n-heads 3", "must be divisible by --n-heads"),
        ("--json nowhere/plan.json", "--json: there is no folder nowhere"),
        ("--model gpt3", "--model: invalid choice: 'gpt3'"),
        ("--tokenizer-name nonsense.tiktoken", "nonsense.tiktoken"),
        ("--nproc-per-node 0", "--nproc-per-node"),
    ],
)
def test_bad_input_gets_one_line(flags, message, capsys):
    try:
        code = plan_memory.main(flags.split())
    except SystemExit as stop:
        code = stop.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and line.startswith("error: ") and message in line


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 2**33),
        ("8gib", 2**33),
        ("1.5 MiB", 3 * 2**19),
        ("8GB", 8 * 10**9),
        ("500b", 500),
        ("8G", 2**33),
        ("500 m", 500 * 2**20),
    ],
)
def test_sizes(text, count):
    assert byte_count(text) == count
