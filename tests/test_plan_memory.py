"""python -m scripts.plan_memory answers before the run, in the trainers' own flags."""

import json
import re
import shlex

import numpy as np
import pytest
import torch

from planner import Planner
from scripts import plan_memory
from trainer.flags import build_parser, byte_count, fill_in
from trainer.plan import Plans

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
    (marked,) = re.findall(r"^>  (.*?)  ", out, re.M)
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


def test_compressed_gradients_are_planned(tmp_path, plain):
    """Copies in bfloat16 at the end of backward, where processes average."""
    one = plan(tmp_path, "--compress-gradients", "--memory-budget=1GiB")
    assert one["rows"] == plain["rows"]
    several = ("--nproc-per-node=2", "--batch-size=1", "--seq-len=8", "--d-model=256")
    ddp, compressed = plan(tmp_path, *several), plan(tmp_path, *several, "--compress-gradients")
    full = [{row["name"]: row for row in p["rows"]}["full"] for p in (ddp, compressed)]
    assert full[1]["at_peak"]["gradients"] == 1.5 * full[0]["at_peak"]["gradients"]


def test_a_gpu_that_is_not_here(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = plan(tmp_path, "--device=cuda")
    assert result["precision"] == "bfloat16" and result["budget_bytes"] is None
    assert {row["fits"] for row in result["rows"]} == {None}
    out = capsys.readouterr().out
    assert "no cuda here and no --memory-budget" in out
    assert result["takes"] is None and not re.search("^>", out, re.M)  # nobody knows
    assert plan(tmp_path, "--device=cuda", "--amp-dtype=float16")["precision"] == "float16"
    assert plan(tmp_path, "--device=cuda", "--no-amp")["precision"] == "float32"


@pytest.mark.parametrize("flag", ["--optimizer=muon", "--moments-dtype=bfloat16"])
def test_an_optimizer_of_ours_on_an_apple(tmp_path, flag):
    shape = [word for word in SHAPE if word not in ("--device", "cpu")]
    path = tmp_path / "plan.json"
    flags = ["--n-layers=1", "--card=M1", flag, "--json", str(path)]
    assert plan_memory.main([*shape, *flags]) == 0
    assert json.loads(path.read_text())["takes"] == "none"


def test_nothing_fits(tmp_path, capsys):
    ways = {70: "AdamW's state alone take 75.1 KiB", 200: "--batch-size 2 --grad-accum-steps 4"}
    for budget, way_out in ways.items():
        result = plan(tmp_path, "--n-layers=1", f"--memory-budget={budget}KiB")
        assert result["takes"] is None and not any(row["fits"] for row in result["rows"])
        assert re.search(f"nothing fits; .*{way_out}", capsys.readouterr().out)


@pytest.mark.slow
def test_table_and_verdict_agree(tmp_path, capsys):
    """From the state alone to all that is asked for: what is recommended fits with a margin."""
    roomy = plan(tmp_path, "--device=cuda", "--memory-budget=1GiB")
    peaks = [row["peak_bytes"] for row in roomy["rows"]]
    safe_bytes = np.linspace(0.995 * min(peaks), 1.01 * max(peaks), 5)
    budgets = (safe_bytes / 0.75).astype(int)
    verdicts = set()
    for budget in budgets.tolist():
        capsys.readouterr()
        result = plan(tmp_path, "--device=cuda", f"--memory-budget={budget}b")
        head, table, verdict = capsys.readouterr().out.split("\n\n")
        assert "tensors may take " in head and " less a margin of a quarter)" in head
        safe = tight = False
        for row, line in zip(result["rows"], table.splitlines()[1:], strict=True):
            word = "yes" if row["peak_bytes"] <= budget - budget / 4 else "tight"
            word = word if row["peak_bytes"] <= budget else "no"
            safe, tight = safe or word == "yes", tight or word == "tight"
            assert f"  {word}  " in line
            assert (int(line.split()[-1].replace(",", "")) >= 8) == (word == "yes")
            assert (row["largest_batch"] >= 8) == row["fits"] == (word != "no")
            assert line.startswith(">") == (row["name"] == result["takes"])
            assert row["name"] != result["takes"] or word == "yes"
        assert (result["takes"] is not None) == safe
        assert ("nothing fits" in verdict) == (not safe)
        assert ("tight    " in verdict) == ("with a margin" in verdict) == (tight and not safe)
        verdicts.add(result["takes"] or "nothing")
        command = verdict.splitlines()[-1]
        if command.startswith("python"):  # it does what it promises
            again = fill_in(build_parser("test", "x.pt").parse_args(command.split()[2:]))
            assert Plans(61, torch.device("cuda"), torch.bfloat16).peak(again) <= 0.75 * budget
    assert {"none", "nothing"} < verdicts and len(verdicts) >= 4


@pytest.mark.slow
@pytest.mark.usefixtures("everything_travels")
def test_offload_is_taken_if_nothing_else_fits_and_what_else_there_is_is_said(tmp_path, capsys):
    flags = ("--device=cuda", "--batch-size=64", "--n-layers=4")
    peaks = {row["name"]: row["peak_bytes"] for row in plan(tmp_path, *flags)["rows"]}
    capsys.readouterr()
    budget = (peaks["full"] + peaks["full, offloaded"]) // 2 / 0.75
    result = plan(tmp_path, *flags, f"--memory-budget={budget / 1024}KiB")
    *_, instead, command = capsys.readouterr().out.splitlines()
    assert result["takes"] == "full, offloaded" and command.endswith("full --offload-activations")
    said = re.fullmatch(r"or, instead of offloading, (--use-.*) \(the same sequences\)", instead)
    again = plan(tmp_path, *flags[::2], *said[1].split(), f"--memory-budget={budget / 1024}KiB")
    assert again["takes"] and "offloaded" not in again["takes"] and again["batch_size"] < 64


def test_what_the_state_settles_is_answered_at_once(capsys, monkeypatch):
    monkeypatch.setattr(Planner, "__init__", lambda *args: pytest.fail("planned"))
    flags = "--use-toy-data --n-layers 48 --d-model 1600 --n-heads 25 --device cuda".split()
    assert plan_memory.main([*flags, "--memory-budget", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert "nothing fits; weights, gradients and AdamW's state alone take 22.0 GiB, more" in out
    assert out.count("\n\n") == 1  # no table


def test_compiled_code_replays_more(tmp_path, plain):
    compiled = plan(tmp_path, "--memory-budget=1GiB", "--compile")
    for ours, theirs in zip(compiled["rows"], plain["rows"], strict=True):
        assert (ours["replayed"] > theirs["replayed"]) == ("full" in ours["name"])


def test_a_giant_batch_is_answered(tmp_path, monkeypatch):
    simulate = Planner.simulate

    def count(self, batch_size, config):
        step = simulate(self, batch_size, config)
        assert len(step.work.flops) < 1000
        return step

    monkeypatch.setattr(Planner, "simulate", count)
    result = plan(tmp_path, "--n-layers=1", "--batch-size=1000000", "--memory-budget=1GiB")
    assert result["takes"] is None and result["rows"][0]["largest_batch"] > 1000


@pytest.mark.parametrize(
    ("flags", "assumed"),
    [
        ("", None),
        ("--batch-size 4 --device cuda", None),
        ("--model gpt2", None),
        ("--model gpt2 --n-layers 6", None),
        ("--n-layers 12 --d-model 768", "4 heads, a vocabulary of 1,024 (--tokenizer-name gpt2: "
         "50,257), 64 tokens (--seq-len)"),
        ("--seq-len 32 --tokenizer-name byte", "3 layers, 128 channels, 4 heads"),
        ("--n-layers 1 --n-heads 2 --d-model 32 --use-toy-data --seq-len 8",
         "a vocabulary of 256"),
        ("--n-layers 1 --n-heads 2 --d-model 32 --train-data x.txt --seq-len 8", None),
    ],
)  # fmt: skip
def test_what_was_assumed_is_said(flags, assumed):
    args = plan_memory.parse(flags.split())
    words = plan_memory.assumptions(args, plan_memory.vocabulary(args))
    assert ", ".join(words) == (assumed or "")


def test_it_says_what_was_assumed_in_the_head(capsys):
    assert plan_memory.main("--n-layers 1 --memory-budget 1MB --device cuda".split()) == 0
    assert "\nnote     assumed, as nothing else was asked: 128 channels," in capsys.readouterr().out


def test_redirected_output_has_no_progress_in_it(tmp_path, capsys):
    plan(tmp_path)
    assert capsys.readouterr().err == ""


def test_progress_is_shown_while_it_simulates(fresh_planners, monkeypatch):
    said = []

    class Bar:
        update, write = lambda self, n=1: said.append("step"), staticmethod(said.append)
        __enter__, __exit__ = lambda self: self, lambda *_: None

    monkeypatch.setattr(plan_memory, "tqdm", lambda **_: Bar())
    assert plan_memory.main(SHAPE) == 0
    assert said[0] != "step" and said[1:10] == 9 * ["step"]  # first what it is about


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Planner, "simulate", interrupt)
    assert plan_memory.main(SHAPE) == 130
    assert capsys.readouterr().err == "stopped\n"


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
        ("--memory-budget 0.5b", "--memory-budget: must be a number with a unit"),
        ("--n-heads 3", "must be divisible by --n-heads"),
        ("--json nowhere/plan.json", "--json: there is no folder nowhere"),
        ("--model gpt3", "--model: invalid choice: 'gpt3'"),
        ("--tokenizer-name nonsense.tiktoken", "nonsense.tiktoken"),
        ("--nproc-per-node 0", "--nproc-per-node"),
    ],
)
def test_bad_input_gets_one_line(flags, message, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)  # no bar before it either
    try:
        code = plan_memory.main(flags.split())
    except SystemExit as stop:
        code = stop.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and line.startswith("error: ") and message in line


def test_help_lists_what_changes_a_plan(tmp_path, capsys, monkeypatch, plain):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with pytest.raises(SystemExit):
        plan_memory.main(["--help"])
    out, err = capsys.readouterr()
    assert err == "" and re.match("usage: ", out)
    listed = set(re.findall(r"--[\w-]+", out))
    flags = {flag for action in build_parser("", "")._actions for flag in action.option_strings[:1]}
    others = sorted(flags - listed - {"-h"})
    values = {"--lr-scheduler": "=linear", "--log-to": "=wandb", "--num-epochs": "=0.3"}
    values |= dict.fromkeys(("--lr", "--min-lr", "--val-ratio"), "=0.03")
    values |= dict.fromkeys(("--resume", "--detect-anomaly"), "")
    words = [flag + values.get(flag, "=7") for flag in others]
    assert plan(tmp_path, *words, "--memory-budget=1GiB")["rows"] == plain["rows"]
    assert " ".join(words) in capsys.readouterr().out.splitlines()[-1]
    assert {"--loss-chunks", "--num-tokens", "--optimizer"} <= listed and "--seed" in others


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
