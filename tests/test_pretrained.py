"""Weights from elsewhere (trainer/hf.py, trainer/pretrained.py), and what --init-from makes of
them. What transformers makes of them: test_export_hf.py; what is refused: bad_folders.py."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness.gpt2_folder import CONFIG, gpt2_tensors, safetensors, write_folder
from harness.runs import TINY, Crash, crash_after, metrics, same, snapshot, torchrun, train_here
from hypothesis import given, settings
from hypothesis import strategies as st

import train_minimal
from data import find_dataset
from model import MiniGPTConfig
from scripts import export_hf
from trainer.agree import check_alike, facts
from trainer.flags import UsageError, build_parser
from trainer.hf import read_config, read_tensors
from trainer.plan import vocabulary
from trainer.pretrained import load_model, open_init_from, open_pretrained
from trainer.process import OneProcess
from trainer.setup import start_run
from trainer.snapshot import SnapshotError

CPU = torch.device("cpu")
N_TOY = TINY.index("--n-layers")
N_MODEL = TINY.index("--batch-size")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The flag for it."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "x.txt").write_text("a few words that a model can learn, again and again\n" * 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(find_dataset.__kwdefaults__, "cache_dir", folder / "cache")
        yield f"--train-data={folder}/x.txt"


@pytest.fixture
def folder(text, tmp_path) -> Path:
    return write_folder(tmp_path / "gpt2")


@pytest.fixture(scope="module")
def trained(text) -> Path:
    """Of a run on that text; its BPE is trained on it, too."""
    path = Path(text.partition("=")[2]).with_name("first.pt")
    words = [*TINY[N_TOY:N_MODEL], "--tokenizer-name=bpe", "--vocab-size=270", "--num-steps=3"]
    assert train(path, *words, text, "--lr=0.01") == 0
    return path


@pytest.fixture
def first(trained, tmp_path) -> Path:
    return Path(shutil.copy(trained, tmp_path))


def train(path: Path, *words: str) -> int:
    """The tiny run, without its data and without its shape."""
    return train_minimal.main([*TINY[N_MODEL:], f"--checkpoint-path={path}", *words])


def start(tmp_path, *words: str):
    argv = [*TINY[N_MODEL:], f"--checkpoint-path={tmp_path}/run.pt", *words]
    return start_run(build_parser("test", "x.pt").parse_args(argv), OneProcess.alone)


def test_what_older_folders_hold_besides(tmp_path):
    """A prefix, the causal masks as tensors, the head a second time, other dtypes, odd addresses
    of numbers."""

    def loaded(name: str, **options) -> dict[str, torch.Tensor]:
        return load_model(write_folder(tmp_path / name, CONFIG, **options), CPU)[0].state_dict()

    plain, expected = gpt2_tensors(), loaded("plain")
    more = {f"h.{i}.attn.bias": np.ones((1, 1, 32, 32), np.float32) for i in range(2)}
    more |= {f"h.{i}.attn.masked_bias": np.array(-1e4, np.float32) for i in range(2)}
    head = {"lm_head.weight": plain["wte.weight"]}
    assert same(loaded("more", tensors=plain | more | head), expected)
    prefixed = gpt2_tensors(prefix="transformer.")
    assert same(loaded("prefixed", tensors=prefixed | head), expected)
    assert same(loaded("odd", weights=safetensors(plain, pad=3)), expected)
    half = {name: array.astype(np.float16) for name, array in plain.items()}
    rounded = {name: weight.half().float() for name, weight in expected.items()}
    assert same(loaded("half", tensors=half), rounded)


def test_what_a_configuration_leaves_out_is_gpt2s(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert read_config(tmp_path) == MiniGPTConfig(50257, 1024, 12, 12, 768, 3072, dropout=0.0)


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


def test_without_the_library(folder, first, text, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert train(tmp_path / "run.pt", f"--init-from={folder}", text) == 2
    assert export_hf.main([f"--checkpoint-path={first}", f"--out={tmp_path}/hf"]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2 and not (tmp_path / "hf").exists()
    assert all(line.endswith("safetensors: pip install safetensors") for line in lines)


def test_a_run_starts_from_a_folder(folder, text, tmp_path, capsys):
    run = start(tmp_path, f"--init-from={folder}", text)
    assert same(run.model.state_dict(), load_model(folder, CPU)[0].state_dict())
    assert (run.step, run.args.seq_len, run.data.tokenizer.vocab_size) == (0, 32, 257)
    assert run.model.config.dropout == 0.1  # the flag's
    assert run.args.lr == pytest.approx(0.04 / 16)
    assert not run.optimizer.state
    assert f"weights  {folder}, as transformers writes them" in capsys.readouterr().out


def test_a_run_starts_from_a_snapshot(first, text, tmp_path, capsys):
    """With other data, on which its tokenizer stays what it was; and it goes on to the bit."""
    other, path = tmp_path / "y.txt", tmp_path / "run.pt"
    other.write_text("some other words, of which no pair has been merged before\n" * 100)
    words = [f"--init-from={first}", f"--train-data={other}", "--num-steps=6"]
    run = start(tmp_path, *words)
    assert same(run.model.state_dict(), snapshot(first)["model"])
    assert run.data.tokenizer.fingerprint == open_pretrained(first).tokenizer.fingerprint
    assert run.step == 0 and not run.optimizer.state and run.best_val_loss == float("inf")
    del run

    assert train(path, *words, "--save-interval=3") == 0
    whole, half = snapshot(path), tmp_path / "half.pt"
    assert whole["args"]["init_from"] == str(first) and whole["step"] == 6
    (tmp_path / "run.prev.pt").rename(half)
    assert snapshot(half)["step"] == 3
    first.unlink()  # a run that goes on does not need it any more
    assert train_minimal.main([f"--checkpoint-path={half}", "--resume"]) == 0
    for part in ("model", "optimizer"):
        assert same(snapshot(half)[part], whole[part])


def test_it_says_how_good_the_weights_are(trained, text, tmp_path, capsys):
    assert train(tmp_path / "run.pt", f"--init-from={trained}", text, "--num-steps=1") == 0
    (loss,) = (record["val_loss"] for record in metrics(trained) if record["step"] == 3)
    assert f"before   val {loss:.4f} ppl " in capsys.readouterr().out


def test_toy_data_goes_on_with_toy_data(tmp_path, capfd):
    first = tmp_path / "first.pt"
    assert train_here(first, "--num-steps=2") == 0
    words = [f"--init-from={first}", "--num-steps=2", "--max-tokens=200"]
    assert train(tmp_path / "run.pt", *words) == 0
    assert snapshot(tmp_path / "run.pt")["args"]["use_toy_data"]
    assert train(tmp_path / "run.pt", *words, f"--train-data={first}") == 2
    assert "toy data only, no text" in capfd.readouterr().err


def test_the_planner_asks_for_the_shape_and_the_vocabulary_alone(folder, first, monkeypatch):
    monkeypatch.setattr("trainer.plan.load_tokenizer", None)
    for path, seq_len, vocab_size in ((folder, 32, 257), (first, 16, 270)):
        args = build_parser("test", "x.pt").parse_args([f"--init-from={path}"])
        open_init_from(args)
        assert (args.n_layers, args.n_heads, args.d_model) == (2, 2, 16)
        assert (args.seq_len, vocabulary(args)) == (seq_len, vocab_size)


def test_started_again_it_needs_no_source(folder, text, tmp_path, monkeypatch):
    """As torchrun starts it again: with the same id and the same flags."""
    words = [f"--init-from={folder}", text, "--num-steps=8", "--save-interval=2"]
    assert train(tmp_path / "whole.pt", *words) == 0
    monkeypatch.setattr("trainer.process.uuid.uuid4", lambda: SimpleNamespace(hex="the run"))
    with monkeypatch.context() as once, pytest.raises(Crash):
        crash_after(5, once)
        train(tmp_path / "run.pt", *words)
    shutil.rmtree(folder)
    assert train(tmp_path / "run.pt", *words) == 0
    whole, again = (snapshot(tmp_path / f"{name}.pt") for name in ("whole", "run"))
    assert same(again["model"], whole["model"]) and again["step"] == 8


def test_what_a_restart_could_not_find_is_refused(folder, text, tmp_path, monkeypatch, capfd):
    path, words = tmp_path / "run.pt", [text, "--num-steps=2"]
    assert train(path, f"--init-from={folder}", *words) == 0
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    capfd.readouterr()
    for name in ("run.pt", "run.best.pt"):
        assert train(path, f"--init-from={tmp_path / name}", *words) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert f"{name} is of the run that this one replaces" in line
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS")
    assert train(path, f"--init-from={path}", *words) == 0


def test_processes_with_other_weights_do_not_start(folder, text, tmp_path):
    tensors = gpt2_tensors()
    tensors["ln_f.bias"][3] += 1e-6
    (tmp_path / "b").mkdir()
    other = write_folder(tmp_path / "b" / "gpt2", CONFIG, weights=safetensors(tensors))
    of_each = []
    for path in (folder, folder, other):
        source = open_pretrained(path)
        run = start(tmp_path, f"--init-from={path}", text)
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
