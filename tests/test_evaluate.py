"""scripts/evaluate.py counts each token once. What it refuses: test_bad_input.py."""

import json
import math
import random
import shutil
import tracemalloc
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness.runs import TINY, metrics, snapshot
from hypothesis import example, given, settings
from hypothesis import strategies as st

import train_minimal
from data import DataError, find_dataset
from data.tokenizer import Tokenizer, ToyTokenizer, load_tokenizer
from scripts import evaluate, export_hf
from trainer.pretrained import load_model

RUN = [*TINY[TINY.index("--n-layers") :], "--no-amp", "--num-steps=8"]
T = 16
WORDS = "wörter und andere Wörter, one after the other; 1 2 3 \n".split(" ")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(find_dataset.__kwdefaults__, "cache_dir", folder)
        yield folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Of 165 validation tokens the trainer takes 161: what fills windows of 16, and the first."""
    folder = tmp_path_factory.mktemp("run")
    text = " ".join(random.Random(0).choices(WORDS, k=3000))
    (folder / "x.txt").write_text(text, encoding="utf-8")
    words = [f"--train-data={folder}/x.txt", "--tokenizer-name=byte", "--lr=0.03"]
    words += [f"--checkpoint-path={folder}/run.pt", "--max-tokens=165"]
    assert train_minimal.main([*RUN, *words, "--max-position-embeddings=17"]) == 0
    return folder / "run.pt"


@pytest.fixture(scope="module")
def model(run):
    return load_model(run, torch.device("cpu"))[0]


def evaluated(path: Path, *flags: str) -> dict:
    file = path.with_name("found.json")
    assert evaluate.main([f"--checkpoint-path={path}", f"--json={file}", *flags]) == 0
    return json.loads(file.read_text())


def tokens_file(folder: Path, n: int) -> str:
    """A flag for `n` tokens."""
    with open(folder / "TOKENS.NPY", "wb") as file:
        np.save(file, np.random.default_rng(n).integers(0, 256, n).astype(np.uint16))
    return f"--val-data={folder}/TOKENS.NPY"


def test_the_trainers_own_number(run):
    """By default: the validation part of the run's own data, in its windows."""
    found, last = evaluated(run, "--max-tokens=161"), metrics(run)[-1]
    assert (found["tokens"], found["seq_len"], found["stride"], found["step"]) == (160, T, T, 8)
    assert found["loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert found["perplexity"] == pytest.approx(last["val_ppl"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(last["val_bits_per_byte"], rel=1e-6)
    assert found["precision"] == "float32 on cpu" and found["data"].startswith("validation part of")
    whole = evaluated(run)
    assert evaluated(run, "--stride=5")["stride"] == 5
    assert whole["tokens"] == 164 and abs(whole["loss"] / found["loss"] - 1) > 1e-6  # the tail


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.integers(2, 40), st.integers(1, T), st.integers(1, T), st.integers(1, 5))
@example(2 * T + 1, T, T, 3)
@example(T + 1, T, T, 1)
@torch.no_grad()
def test_every_token_once_with_as_much_context_as_fits(model, n, seq_len, stride, batch_size):
    """Each token by itself, behind the context that it should have."""
    stride = min(stride, seq_len)
    ids = np.random.default_rng(n).integers(0, 256, n).astype(np.uint16)
    tokens, nats = torch.from_numpy(ids.astype(np.int64))[None], 0.0
    for t in range(1, n):
        rounds = max(0, math.ceil((t - seq_len) / stride))  # windows before that which predicts it
        last = min(seq_len + rounds * stride, n - 1)  # what its window predicts last
        logits = model(tokens[:, max(0, last - seq_len) : t])
        nats += F.cross_entropy(logits[:, -1], tokens[:, t]).item()
    args, seen = SimpleNamespace(seq_len=seq_len, stride=stride, batch_size=batch_size), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(model), "__call__", lambda *a: seen.append(a[1]) or model.forward(*a[1:])
        )
        assert evaluate.sum_loss(model, ids, args) == pytest.approx(nats, rel=1e-5)
    windows = 1 + max(0, math.ceil((n - 1 - seq_len) / stride))
    assert sum(map(len, seen)) == windows and max(map(len, seen)) == min(batch_size, windows)
    assert not model.training


def test_a_folder_of_transformers_and_the_models_own_precision(run, tmp_path):
    """The same weights, the same number; its windows are all positions, which it was made for."""
    assert export_hf.main([f"--checkpoint-path={run}", f"--out={tmp_path}/hf"]) == 0
    flag = tokens_file(tmp_path, 50)
    of_folder = evaluated(tmp_path / "hf", flag)
    assert (of_folder["seq_len"], of_folder["step"]) == (17, None)
    exact = evaluated(run, flag, "--seq-len=17")["loss"]
    assert of_folder["loss"] == exact
    rounded = evaluated(run, flag, "--seq-len=17", "--amp-dtype=bfloat16")
    assert rounded["precision"] == "bfloat16 on cpu"
    assert exact != rounded["loss"] == pytest.approx(exact, rel=0.02)


def test_whatever_the_files_are(run, tmp_path):
    """Texts, documents and ids give one row of ids, and bytes are those of the text."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.txt").write_text("für Elise", encoding="utf-8")
    (tmp_path / "a" / "b.jsonl").write_text('{"text": "one"}\n\n{"text": ""}\n{"text": "two"}\n')
    ids = [256, *"für Elise".encode(), 256, *b"one", 256, 256, *b"two"]
    np.array(ids, np.uint16).tofile(tmp_path / "all.bin")
    np.save(tmp_path / "part.npy", np.array(ids[5:], np.uint32))
    (tmp_path / "start.txt").write_text("für", encoding="utf-8")  # 256 and 4 bytes
    parts = [str(tmp_path / name) for name in ("start.txt", "part.npy")]
    losses, names = set(), ([str(tmp_path / "a")], [str(tmp_path / "all.bin")], parts)
    for found in (evaluated(run, "--val-data", *some) for some in names):
        losses.add(found["loss"])
        assert (found["tokens"], found["bytes"]) == (19, 16)
    assert len(losses) == 1
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * 19 / math.log(2) / 16)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["data"] == ", ".join(parts)
    rest = evaluated(run, "--val-data", parts[1])
    assert (rest["tokens"], rest["bytes"]) == (14, 11)  # its first one is a byte, not counted
    first = evaluated(run, "--val-data", *parts, "--max-tokens=7")
    assert (first["tokens"], first["bytes"]) == (6, 6)


def test_toy_data_have_no_bytes(tmp_path, capfd):
    path = tmp_path / "run.pt"
    assert train_minimal.main([*TINY, "--no-amp", f"--checkpoint-path={path}"]) == 0
    capfd.readouterr()
    found = evaluated(path, "--max-tokens=193")
    assert found["bits_per_byte"] is None and found["bytes"] == 0
    assert found["loss"] == pytest.approx(metrics(path)[-1]["val_loss"], rel=1e-6)
    out, err = capfd.readouterr()
    assert err == "" and "bits" not in out
    assert f"loss          {found['loss']:.4f}\n" in out and "tokens        192\n" in out


def test_data_that_changed_or_went(run, tmp_path, capsys):
    text, path = tmp_path / "x.txt", tmp_path / "run.pt"
    state = snapshot(run)
    shutil.copy(state["args"]["train_data"][0], text)
    state["args"]["train_data"] = [str(text)]
    torch.save(state, path)
    evaluated(path)
    assert "note:" not in capsys.readouterr().out
    text.write_text("another text. " * 300)
    evaluated(path)
    assert "note: the run's data changed" in capsys.readouterr().out
    text.unlink()
    assert evaluate.main([f"--checkpoint-path={path}"]) == 2
    line = f"error: the run's own data: --train-data {text}: no such file or folder; --val-data"
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize(("text", "n"), [(b"\n\n", 0), (b'{"text": ""}\n', 1)])
def test_no_text(run, tmp_path, capsys, text, n):
    (tmp_path / "x.jsonl").write_bytes(text)
    flags = [f"--checkpoint-path={run}", f"--val-data={tmp_path}/x.jsonl"]
    assert evaluate.main([*flags, f"--json={tmp_path}/x.json"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path}/x.jsonl")
    assert f"{n} token(s), and the first one is not predicted" in line
    assert not (tmp_path / "x.json").exists()


def fail(error: Exception, *_, **__):
    raise error


def test_out_of_memory_and_out_of_range(run, monkeypatch, capsys):
    def fails(says: str, *flags: str, **changes) -> int:
        with monkeypatch.context() as patch:
            for name, act in changes.items():
                patch.setattr(evaluate, name, act)
            code = evaluate.main([f"--checkpoint-path={run}", *flags])
        assert capsys.readouterr().err == f"error: {says}\n"
        return code

    full = partial(fail, torch.OutOfMemoryError("CUDA out of memory."))
    assert fails("out of memory with --batch-size 8: lower it", sum_loss=full) == 4
    says = "out of memory while the data were read: take fewer with --max-tokens"
    assert fails(says, read_ids=partial(fail, MemoryError())) == 4
    says, flag = "the loss is nan: --amp-dtype float16 overflows", "--amp-dtype=float16"
    assert fails(says, flag, sum_loss=lambda *_: math.nan) == 2
    with pytest.raises(RuntimeError, match="a bug"):
        fails("", load_model=partial(fail, RuntimeError("a bug")))


def test_a_reader_who_goes_or_a_disk_that_is_full_does_not_cost_the_numbers(
    run, tmp_path, monkeypatch, capsys
):
    """(A letter that stdout cannot spell: test_trainings.py.)"""
    command, found = [f"--checkpoint-path={run}", tokens_file(tmp_path, 20)], tmp_path / "x.json"
    with monkeypatch.context() as patch, pytest.raises(BrokenPipeError):
        patch.setattr("builtins.print", partial(fail, BrokenPipeError()))
        evaluate.main([*command, f"--json={found}"])
    assert json.loads(found.read_text())["tokens"] == 19
    monkeypatch.setattr(Path, "write_text", partial(fail, OSError(28, "No space left on device")))
    assert evaluate.main([*command, f"--json={found}"]) == 3
    out, err = capsys.readouterr()
    assert "tokens        19\n" in out
    assert err == f"error: --json {found}: No space left on device\n"


# ---- Memory


def peak_of(act):
    """What `act` returns, and how many bytes it took at most."""
    tracemalloc.start()
    try:
        return act(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


N = 2**23  # tokens: 8 times what is read at a time


def read(path: Path, tokenizer: Tokenizer, max_tokens: int | None = None) -> np.ndarray:
    args = SimpleNamespace(val_data=[str(path)], max_tokens=max_tokens)
    return evaluate.read_data(args, {}, tokenizer, SimpleNamespace(say=print))[1]


def test_a_long_text_takes_two_bytes_a_token(tmp_path):
    """Of a vocabulary that fits; not what the file takes (4), and not twice. The first ones do not
    cost the others."""
    byte, path = load_tokenizer("byte"), tmp_path / "long.npy"
    np.save(path, (np.arange(N, dtype=np.uint32) % 256))
    tokens, peak = peak_of(lambda: read(path, byte))
    assert tokens.dtype == np.uint16 and len(tokens) == N
    assert (tokens[:1000] == np.arange(1000) % 256).all() and tokens[-1] == 255
    assert peak < 1.9 * 2 * N
    n_bytes, peak = peak_of(lambda: evaluate.count_bytes(tokens, byte))
    assert n_bytes == N and peak < 2 * N
    tokens, peak = peak_of(lambda: read(path, byte, 1000))
    assert tokens.tolist() == [i % 256 for i in range(1000)] and peak < 2 * N


def test_ids_beyond_two_bytes(tmp_path):
    """They are not cut: of a large vocabulary they are kept, of a small one they are a mistake."""
    np.save(tmp_path / "x.npy", np.array([1, 65536 + 2, 3], np.uint32))
    with pytest.raises(DataError, match=r"x\.npy: holds id 65538, but the model's end at 256"):
        read(tmp_path / "x.npy", load_tokenizer("byte"))
    assert read(tmp_path / "x.npy", ToyTokenizer(70000)).tolist() == [1, 65538, 3]
