"""The scripts work from what a run leaves behind. Their mistakes: test_bad_input.py."""

import os
import re
import shutil

import pytest
from runs import TINY, run

from model import RECOMPUTE_POLICIES
from scripts import generate, kept_tensors, plot_metrics
from train_minimal import main as train
from trainer.flags import build_parser


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "run.pt"
    assert train([*TINY, "--checkpoint-path", str(path), "--eval-interval", "5"]) == 0
    return path


def test_generate_needs_the_snapshot_only(trained, tmp_path, capsys, monkeypatch):
    alone = tmp_path / "alone.pt"
    shutil.copy(trained, alone)
    monkeypatch.chdir(tmp_path)
    flags = ["--checkpoint-path", str(alone), "--max-new-tokens", "7", "--prompt", "3 1 2"]
    outputs = []
    for seed in ("1", "1", "2"):
        assert generate.main([*flags, "--seed", seed, "--num-samples", "2"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    first, second = outputs[0].split("\n----------------\n")
    assert first.startswith("3 1 2 ") and len(first.split()) == 10 and first != second


def test_plot_draws_several_runs(trained, tmp_path):
    pytest.importorskip("matplotlib")
    metrics = trained.with_name("run.metrics.jsonl")
    other = tmp_path / "other.metrics.jsonl"
    shutil.copy(metrics, other)
    picture = tmp_path / "curves.png"
    assert plot_metrics.main([str(metrics), str(other), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("recipe", "program", "sequences"),
    [("gpt2_small", "python", 480), ("gpt2_small_ddp", "torchrun", 512)],
)
def test_recipes_run_and_know_their_flags(tmp_path, recipe, program, sequences):
    """With a stand-in for python and torchrun that only shows what it was started with."""
    stand_in = tmp_path / program
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", f"scripts/{recipe}.sh", "my text.txt", "--lr", "1"]
    result = run(command, PATH=path, GPUS="4")
    words = result.stdout.splitlines()
    args = build_parser("test", "x.pt").parse_args(words[words.index("--train-data") :])
    assert args.train_data == ["my text.txt"] and args.lr == 1
    processes = 4 if program == "torchrun" else 1
    assert args.batch_size * args.grad_accum_steps * processes == sequences
    assert run(["bash", f"scripts/{recipe}.sh"]).returncode == 2


def test_kept_tensors_lists_every_policy(capsys):
    flags = ["--batch-size", "1", "--seq-len", "64", "--d-model", "48", "--n-heads", "4"]
    assert kept_tensors.main(flags) == 0
    tables = capsys.readouterr().out.strip().split("\n\n")
    heads = [table.splitlines()[0] for table in tables]
    assert [head.split(":")[0] for head in heads] == list(RECOMPUTE_POLICIES)
    assert re.search(r"MiB|KiB", heads[0])
    none = tables[0]
    assert re.search(r"bfloat16 1x64x192 +mlp gelu +model.py:\d+ +return self.c_proj\(F.gelu", none)
    assert "gelu" not in tables[1].replace("F.gelu", "")  # cheap: replayed


def test_kept_tensors_leaves_weights_out(capsys):
    assert kept_tensors.main(["--policy", "full", "--no-amp", "--d-model", "48"]) == 0
    assert "full: 1 tensors" in capsys.readouterr().out
