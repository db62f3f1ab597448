"""Weights from elsewhere: trainer/hf.py and trainer/pretrained.py against transformers, and what
--init-from makes of them. What is refused: bad_folders.py."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness.gpt2_folder import CONFIG, gpt2_tensors, safetensors, write_folder
from harness.runs import (
    TINY,
    Crash,
    crash_after,
    same,
    snapshot,
    torchrun,
    train_here,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import train_minimal
from data import find_dataset
from data.tokenizer import format_ranks, load_tokenizer
from scripts import export_hf
from trainer.agree import check_alike, facts
from trainer.flags import UsageError, build_parser
from trainer.hf import read_tensors
from trainer.plan import vocabulary
from trainer.pretrained import load_model, open_init_from, open_pretrained
from trainer.process import OneProcess
from trainer.setup import start_run
from trainer.snapshot import SnapshotError

CPU = torch.device("cpu")
N_TOY = TINY.index("--n-layers")
N_MODEL = TINY.index("--batch-size")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setitem(find_dataset.__kwdefaults__, "cache_dir", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(tmp_path / "gpt2")


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "x.txt"
    path.write_text("a few words that a model can learn, again and again\n" * 100)
    return path


SHAPES = [
    dict(n_layer=3, n_head=4, n_embd=64, n_positions=48, n_inner=100),
    dict(n_layer=1, n_head=3, n_embd=48, n_positions=80, activation_function="gelu_pytorch_tanh"),
]


@pytest.fixture(params=SHAPES, ids=["odd MLP", "one layer"])
def theirs(request, tmp_path):
    """transformers' GPT-2, saved in tmp_path/"hf" with a tokenizer of ours for its 257 ids."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.GPT2Config(**request.param, vocab_size=257, attn_implementation="eager")
    config.embd_pdrop = config.attn_pdrop = config.resid_pdrop = 0.0
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():  # no zero biases and unit gains, which hide mistakes
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    write_folder(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer.json").rename(tmp_path / "hf" / "tokenizer.json")
    return model


def test_logits_loss_and_gradients_are_those_of_transformers(theirs, tmp_path):
    ours, tokenizer = load_model(tmp_path / "hf", CPU)
    assert tokenizer.vocab_size == 257 and not ours.training
    ids = torch.randint(0, 257, (2, theirs.config.n_positions + 1))
    expected = theirs.eval()(ids[:, :-1]).logits
    assert (ours(ids[:, :-1]) - expected).abs().max() <= 1e-5 * expected.abs().max()

    theirs.train()(ids[:, :-1])
    expected = F.cross_entropy(theirs(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()
    loss = ours.train()(ids[:, :-1], ids[:, 1:])
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    h, block = theirs.transformer.h[-1], ours.blocks[-1]
    for found, wanted in [
        (ours.token_embedding.weight.grad, theirs.transformer.wte.weight.grad),
        (ours.position_embedding.weight.grad, theirs.transformer.wpe.weight.grad),
        (block.attn.c_attn.weight.grad, h.attn.c_attn.weight.grad.T),
        (block.mlp.c_proj.weight.grad, h.mlp.c_proj.weight.grad.T),
        (block.mlp.c_fc.bias.grad, h.mlp.c_fc.bias.grad),
        (ours.ln_f.bias.grad, theirs.transformer.ln_f.bias.grad),
    ]:
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_what_older_folders_hold_besides(tmp_path):
    """A prefix, the causal masks as tensors, the head a second time, other dtypes, odd addresses
    of numbers."""
    expected = load_model(write_folder(tmp_path / "gpt2"), CPU)[0].state_dict()
    more = {f"h.{i}.attn.bias": np.ones((1, 1, 32, 32), np.float32) for i in range(2)}
    more |= {f"h.{i}.attn.masked_bias": np.array(-1e4, np.float32) for i in range(2)}
    more["lm_head.weight"] = gpt2_tensors()["wte.weight"]
    prefixed = gpt2_tensors(prefix="transformer.")
    variants = [gpt2_tensors() | more, prefixed | {"lm_head.weight": more["lm_head.weight"]}]
    for i, tensors in enumerate(variants):
        found = load_model(write_folder(tmp_path / f"{i}", CONFIG, tensors), CPU)[0].state_dict()
        assert same(found, expected)
    odd = write_folder(tmp_path / "odd", CONFIG, weights=safetensors(gpt2_tensors(), pad=3))
    assert same(load_model(odd, CPU)[0].state_dict(), expected)
    half = {name: array.astype(np.float16) for name, array in gpt2_tensors().items()}
    found = load_model(write_folder(tmp_path / "half", CONFIG, half), CPU)[0].state_dict()
    assert all(
        weight.dtype == torch.float32 and torch.equal(weight, expected[name].half().float())
        for name, weight in found.items()
    )


SMALL = safetensors({"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float32)})


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.integers(0, 8 * len(SMALL) - 1), st.integers(1, len(SMALL) + 9))
def test_any_damage_to_a_file_is_one_line_or_harmless(tmp_path_factory, bit, length):
    """A flipped bit, a cut: never another exception, never memory that is not the file's."""
    content = bytearray(SMALL)
    content[bit // 8] ^= 1 << bit % 8
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(bytes(content)[:length])
    try:
        for tensor in read_tensors(path).values():
            tensor.clone()  # every byte can be read
    except SnapshotError as error:
        assert len(str(error).splitlines()) == 1 and str(path) in str(error)
    else:
        assert length >= len(SMALL)


def test_without_the_library(folder, text, tmp_path, monkeypatch, capfd):
    first = tmp_path / "first.pt"
    words = ["--init-from", str(folder), "--train-data", str(text), "--num-steps=1"]
    assert train_here_without_toy(first, *words) == 0
    monkeypatch.setitem(sys.modules, "safetensors", None)
    capfd.readouterr()
    assert train_here_without_toy(tmp_path / "run.pt", *words) == 2
    assert export_hf.main([f"--checkpoint-path={first}", f"--out={tmp_path}/hf"]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2 and not (tmp_path / "hf").exists()
    assert all(line.endswith("safetensors: pip install safetensors") for line in lines)


def flags(*words: str) -> list[str]:
    """The tiny run, without its data and without its shape."""
    return [*TINY[N_MODEL:], *words]


def start(tmp_path, *words: str):
    argv = flags("--checkpoint-path", str(tmp_path / "run.pt"), *words)
    args = build_parser("test", "x.pt").parse_args(argv)
    return start_run(args, OneProcess.alone)


def test_a_run_starts_from_a_folder(folder, text, tmp_path, capsys):
    run = start(tmp_path, "--init-from", str(folder), "--train-data", str(text))
    assert same(run.model.state_dict(), load_model(folder, CPU)[0].state_dict())
    assert (run.step, run.args.seq_len, run.data.tokenizer.vocab_size) == (0, 32, 257)
    assert run.model.config.dropout == 0.1  # the flag's
    assert run.args.lr == pytest.approx(0.04 / 16)
    assert not run.optimizer.state
    assert f"weights  {folder}, as transformers writes them" in capsys.readouterr().out


def test_a_run_starts_from_a_snapshot(text, tmp_path):
    """With other data, on which its tokenizer stays what it was; and it goes on to the bit."""
    other = tmp_path / "y.txt"
    other.write_text("some other words, of which no pair has been merged before\n" * 100)
    first, path = tmp_path / "first.pt", tmp_path / "run.pt"
    bpe = ["--tokenizer-name=bpe", "--vocab-size=270"]
    shape = [*TINY[N_TOY:N_MODEL], *bpe]
    assert train_here_without_toy(first, *shape, "--train-data", str(text)) == 0
    source = snapshot(first)

    run = start(tmp_path, "--init-from", str(first), "--train-data", str(other))
    assert same(run.model.state_dict(), source["model"])
    assert run.data.tokenizer.fingerprint == open_pretrained(first).tokenizer.fingerprint
    assert run.step == 0 and not run.optimizer.state and run.best_val_loss == float("inf")
    del run

    words = ["--init-from", str(first), "--train-data", str(other), "--num-steps=6"]
    assert train_here_without_toy(path, *words, "--save-interval=3") == 0
    whole, half = snapshot(path), tmp_path / "half.pt"
    assert whole["args"]["init_from"] == str(first) and whole["step"] == 6
    (tmp_path / "run.prev.pt").rename(half)
    assert snapshot(half)["step"] == 3
    first.unlink()  # a run that goes on does not need it any more
    assert train_minimal.main([f"--checkpoint-path={half}", "--resume"]) == 0
    for part in ("model", "optimizer"):
        assert same(snapshot(half)[part], whole[part])


def train_here_without_toy(path: Path, *words: str) -> int:
    return train_minimal.main(flags("--checkpoint-path", str(path), *words))


def test_toy_data_goes_on_with_toy_data(tmp_path, capfd):
    first = tmp_path / "first.pt"
    assert train_here(first, "--num-steps=2") == 0
    words = ["--init-from", str(first), "--num-steps=2", "--max-tokens=200"]
    assert train_here_without_toy(tmp_path / "run.pt", *words) == 0
    assert snapshot(tmp_path / "run.pt")["args"]["use_toy_data"]
    capfd.readouterr()
    words += ["--train-data", str(first)]
    assert train_here_without_toy(tmp_path / "run.pt", *words) == 2
    assert "toy data only, no text" in capfd.readouterr().err


def test_the_planner_follows_and_needs_no_tokenizer_file(folder, text, tmp_path):
    """It asks for the shape and the vocabulary alone, and those are in the weights."""
    ranks, first = tmp_path / "own.tiktoken", tmp_path / "first.pt"
    ranks.write_text(format_ranks(load_tokenizer("byte").ranks))
    words = [*TINY[N_TOY:N_MODEL], f"--tokenizer-name={ranks}", "--train-data", str(text)]
    assert train_here_without_toy(first, *words, "--num-steps=1") == 0
    ranks.unlink()
    for path, d_model, seq_len in ((folder, 16, 32), (first, 16, 16)):
        args = build_parser("test", "x.pt").parse_args([f"--init-from={path}"])
        open_init_from(args)
        assert (args.n_layers, args.n_heads, args.d_model) == (2, 2, d_model)
        assert (args.seq_len, vocabulary(args)) == (seq_len, 257)


def test_it_says_how_good_the_weights_are(text, tmp_path, capsys):
    first = tmp_path / "first.pt"
    words = ["--tokenizer-name=byte", "--train-data", str(text), "--num-steps=3", "--lr=0.01"]
    assert train_here_without_toy(first, *TINY[N_TOY:N_MODEL], *words) == 0
    out = capsys.readouterr().out
    assert "before   val" not in out
    (found,) = re.findall(r"step 3/3 .* (val [\d.]+ ppl [\d.]+ \([\d.]+ bits/byte\))", out)
    words = ["--init-from", str(first), "--train-data", str(text), "--num-steps=1"]
    assert train_here_without_toy(tmp_path / "run.pt", *words) == 0
    assert f"before   {found}\n" in capsys.readouterr().out


def test_started_again_it_needs_no_source(folder, text, tmp_path, monkeypatch):
    """As torchrun starts it again: with the same id and the same flags."""
    words = ["--init-from", str(folder), "--train-data", str(text), "--num-steps=8"]
    words += ["--save-interval=2"]
    assert train_here_without_toy(tmp_path / "whole.pt", *words) == 0
    monkeypatch.setattr("trainer.process.uuid.uuid4", lambda: SimpleNamespace(hex="the run"))
    with monkeypatch.context() as once, pytest.raises(Crash):
        crash_after(5, once)
        train_here_without_toy(tmp_path / "run.pt", *words)
    shutil.rmtree(folder)
    assert train_here_without_toy(tmp_path / "run.pt", *words) == 0
    whole, again = (snapshot(tmp_path / f"{name}.pt") for name in ("whole", "run"))
    assert same(again["model"], whole["model"]) and again["step"] == 8


def test_what_a_restart_could_not_find_is_refused(folder, text, tmp_path, monkeypatch, capfd):
    path = tmp_path / "run.pt"
    words = ["--train-data", str(text), "--num-steps=2"]
    assert train_here_without_toy(path, "--init-from", str(folder), *words) == 0
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    capfd.readouterr()
    for name in ("run.pt", "run.best.pt"):
        assert train_here_without_toy(path, "--init-from", str(tmp_path / name), *words) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert f"{name} is of the run that this one replaces" in line
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS")
    assert train_here_without_toy(path, "--init-from", str(path), *words) == 0


def test_processes_with_other_weights_do_not_start(folder, text, tmp_path):
    tensors = gpt2_tensors()
    tensors["ln_f.bias"][3] += 1e-6
    (tmp_path / "b").mkdir()
    other = write_folder(tmp_path / "b" / "gpt2", CONFIG, weights=safetensors(tensors))
    of_each = []
    for path in (folder, folder, other):
        source = open_pretrained(path)
        run = start(tmp_path, "--init-from", str(path), "--train-data", str(text))
        of_each.append(facts(run.args, run.process, run.precision, None, source))
        del run
    check_alike(of_each[:2])
    with pytest.raises(UsageError, match="--init-from: rank 0 has .*, rank 2 has .*same w"):
        check_alike(of_each)


@pytest.mark.slow
def test_all_trainers_start_from_the_same(tmp_path):
    """Two processes, with a model each or half of one, as one with two micro-batches."""
    first = tmp_path / "first.pt"
    assert train_here(first, "--num-steps=2", "--lr=0.05") == 0
    words = (f"--init-from={first}", "--num-steps=3")
    assert train_here(tmp_path / "one.pt", *words, "--grad-accum-steps=2") == 0
    assert train_here(tmp_path / "random.pt", "--num-steps=3", "--grad-accum-steps=2") == 0
    one, random = (snapshot(tmp_path / f"{name}.pt")["model"] for name in ("one", "random"))
    assert not same(one, random)
    for script in ("train_ddp.py", "train_fsdp.py"):
        torchrun(tmp_path / f"{script}.pt", *words, script=script)
        assert same(snapshot(tmp_path / f"{script}.pt")["model"], one)
