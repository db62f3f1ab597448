"""What a trained model is good for: scripts/evaluate.py counts each token once, and
scripts/generate.py writes from the snapshot alone. What they refuse: test_bad_input.py."""

import json
import math
import random
import re
import shutil
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness.runs import TINY, metrics, snapshot, train_here
from hypothesis import example, given, settings
from hypothesis import strategies as st

import train_minimal
from data import DataError, find_dataset
from data.tokenizer import Tokenizer, ToyTokenizer, load_tokenizer
from model import MiniGPT, MiniGPTConfig
from scripts import evaluate, export_hf, generate
from trainer.pretrained import load_model

RUN = [*TINY[TINY.index("--n-layers") :], "--no-amp", "--num-steps=8"]
T = 16
WORDS = "wörter und andere Wörter, one after the other; 1 2 3 \n".split(" ")
BYTE = load_tokenizer("byte")


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
def toy(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "run.pt"
    assert train_here(path, "--no-amp") == 0
    return path


@pytest.fixture(scope="module")
def model(run):
    return load_model(run, torch.device("cpu"))[0]


def fail(error: BaseException, *_, **__):
    raise error


# ---- Evaluate


def evaluated(path: Path, *flags: str) -> dict:
    file = path.with_name("found.json")
    assert evaluate.main([f"--checkpoint-path={path}", f"--json={file}", *flags]) == 0
    return json.loads(file.read_text())


def test_the_trainers_own_number(run, toy, capfd):
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
    capfd.readouterr()
    found = evaluated(toy, "--max-tokens=193")  # it has no bytes
    assert found["bits_per_byte"] is None and found["bytes"] == 0
    assert found["loss"] == pytest.approx(metrics(toy)[-1]["val_loss"], rel=1e-6)
    out, err = capfd.readouterr()
    assert err == "" and "bits" not in out
    assert f"loss          {found['loss']:.4f}\n" in out and "tokens        192\n" in out


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


def test_whatever_the_files_are(run, tmp_path):
    """Texts, documents and ids give one row of ids, and bytes are those of the text; in a folder
    of transformers' the model is the same, whose windows are all the positions it was made for."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.txt").write_text("für Elise", encoding="utf-8")
    (tmp_path / "a" / "b.jsonl").write_text('{"text": "one"}\n\n{"text": ""}\n{"text": "two"}\n')
    ids = [256, *"für Elise".encode(), 256, *b"one", 256, 256, *b"two"]
    np.array(ids, np.uint16).tofile(tmp_path / "all.bin")
    with open(tmp_path / "PART.NPY", "wb") as file:
        np.save(file, np.array(ids[5:], np.uint32))
    (tmp_path / "start.txt").write_text("für", encoding="utf-8")  # 256 and 4 bytes
    folder, whole, *parts = (
        str(tmp_path / name) for name in "a all.bin start.txt PART.NPY".split()
    )
    all_found = [evaluated(run, "--val-data", *some) for some in ([folder], [whole], parts)]
    assert len({found["loss"] for found in all_found}) == 1
    for found in all_found:
        assert (found["tokens"], found["bytes"]) == (19, 16)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * 19 / math.log(2) / 16)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["data"] == ", ".join(parts)
    rest = evaluated(run, "--val-data", parts[1])
    assert (rest["tokens"], rest["bytes"]) == (14, 11)  # its first one is a byte, not counted
    first = evaluated(run, "--val-data", *parts, "--max-tokens=7")
    assert (first["tokens"], first["bytes"]) == (6, 6)

    assert export_hf.main([f"--checkpoint-path={run}", f"--out={tmp_path}/hf"]) == 0
    of_folder = evaluated(tmp_path / "hf", "--val-data", whole)
    assert (of_folder["seq_len"], of_folder["step"]) == (17, None)
    exact = evaluated(run, "--val-data", whole, "--seq-len=17")["loss"]
    rounded = evaluated(run, "--val-data", whole, "--seq-len=17", "--amp-dtype=bfloat16")
    assert rounded["precision"] == "bfloat16 on cpu"
    assert of_folder["loss"] == exact != rounded["loss"] == pytest.approx(exact, rel=0.02)


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


def test_what_ends_it_costs_one_line_and_no_number(run, tmp_path, monkeypatch, capsys):
    """Out of memory, out of range, a disk that is full, and a reader who goes."""
    found = tmp_path / "x.json"
    command = [f"--checkpoint-path={run}", "--max-tokens=20", f"--json={found}"]

    def ends(code: int, says: str, place: object, name: str, act: object) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, act)
            assert evaluate.main([*command, "--amp-dtype=float16"]) == code
        out, err = capsys.readouterr()
        assert err == f"error: {says}\n"
        return out

    says = "out of memory: lower --batch-size 8, or take fewer tokens with --max-tokens"
    for name, error in (("sum_loss", torch.OutOfMemoryError()), ("read_data", MemoryError())):
        assert ends(4, says, evaluate, name, partial(fail, error)) == ""
    says = "the loss is nan: --amp-dtype float16 overflows"
    assert ends(2, says, evaluate, "sum_loss", lambda *_: math.nan) == "" and not found.exists()
    with pytest.raises(RuntimeError, match="a bug"):
        ends(2, "", evaluate, "load_model", partial(fail, RuntimeError("a bug")))
    with monkeypatch.context() as patch, pytest.raises(BrokenPipeError):
        patch.setattr("builtins.print", partial(fail, BrokenPipeError()))
        evaluate.main(command)
    assert json.loads(found.read_text())["tokens"] == 19
    full = partial(fail, OSError(28, "No space left on device"))
    out = ends(3, f"--json {found}: No space left on device", Path, "write_text", full)
    assert "tokens        19\n" in out


def test_a_token_takes_two_bytes_unless_its_vocabulary_is_large(tmp_path):
    """And of a small one, ids beyond two bytes are a mistake: they are not cut."""

    def read(tokenizer: Tokenizer) -> np.ndarray:
        args = SimpleNamespace(val_data=[str(path)], max_tokens=None)
        return evaluate.read_data(args, {}, tokenizer, SimpleNamespace(say=print))[1]

    path, n = tmp_path / "long.npy", 2**21  # tokens: twice what is read at a time
    np.save(path, np.arange(n, dtype=np.uint32) % 256)
    tokens = read(BYTE)
    assert tokens.dtype == np.uint16 and (tokens == np.arange(n) % 256).all()
    assert evaluate.count_bytes(tokens, BYTE) == n
    np.save(path, np.array([1, 65536 + 2, 3], np.uint32))
    with pytest.raises(DataError, match=r"long\.npy: holds id 65538, but the model's end at 256"):
        read(BYTE)
    assert read(ToyTokenizer(70000)).tolist() == [1, 65538, 3]


# ---- Generate


def test_generate_needs_the_snapshot_only(toy, tmp_path, capsys, monkeypatch):
    shutil.copy(toy, tmp_path / "alone.pt")
    monkeypatch.chdir(tmp_path)
    flags = ["--checkpoint-path", "alone.pt", "--max-new-tokens", "7", "--prompt"]
    outputs = []
    for seed in ("1", "1", "2"):
        assert generate.main([*flags, "3 1 2", "--seed", seed, "--num-samples", "2"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    first, second = outputs[0].removesuffix("\n").split("\n----------------\n")
    assert all(re.fullmatch(r"\d+( \d+){9}", sample) for sample in (first, second))
    assert first.startswith("3 1 2 ") and first != second
    for n, says in ((16, ""), (17, "note: --prompt has 17 tokens; the model sees the last 16 of")):
        assert generate.main([*flags, "1 " * n]) == 0
        out, err = capsys.readouterr()
        assert err.startswith(says) and len(err.splitlines()) == bool(says)
        assert len(out.split()) == n + 7  # shown it is as a whole


class Scripted:
    """A model that writes what it is told to: a column of ids for all samples at a time."""

    config = MiniGPTConfig(max_position_embeddings=4)

    def __init__(self, *samples) -> None:
        self.columns = iter(torch.tensor([list(sample) for sample in samples]).t())

    def stream(self, ids, max_new_tokens, **how):
        return (column[:, None] for column in islice(self.columns, max_new_tokens))


def written(model, *flags: str, tokenizer=BYTE) -> list[str]:
    args = generate.build_parser().parse_args([*flags])
    pieces = generate.write(args, model, tokenizer, torch.device("cpu"))
    return [piece for piece in pieces if piece]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.sampled_from(b"a\xe2\x82\xac\xf0\x9f\x98\x80\xc3\xff\xed\xa0"), min_size=1))
@example([*"a€😀é".encode()])
@example([*b"a\xffb\xe2\x82"])  # what never becomes a character, and half of one at the end
@example([*("a€ é" * 50).encode()])
def test_in_parts_or_as_a_whole_it_is_the_same_text(sample):
    """In whole characters; and no token is decoded anew for each one behind it: that would be
    quadratic."""
    decoded, tokenizer = [], load_tokenizer("byte")
    decode = tokenizer.decode
    tokenizer.decode = lambda ids: decoded.append(len(ids)) or decode(ids)
    flags = ["--max-new-tokens", str(len(sample)), "--num-samples", "2", "--prompt", "pp"]
    pieces = written(Scripted(sample, sample), *flags, tokenizer=tokenizer)
    text = "pp" + bytes(sample).decode(errors="replace")
    assert "".join(pieces) == f"{text}{generate.SEPARATOR}{text}\n"
    if "\ufffd" not in text:
        assert pieces[: len(text) - 1] == ["pp", *text[2:]]
        assert sum(decoded) <= 2 * 2 * len(text.encode())


def test_a_sample_ends_at_endoftext():
    eot = 256
    first, second = [*b"ab", eot, *b"cd"], [*b"vwxyz"]
    separator = generate.SEPARATOR
    flags = ["--max-new-tokens", "5", "--num-samples", "2"]
    pieces = written(Scripted(first, second), *flags)
    assert pieces == ["a", "b", separator, "vwx", "y", "z", "\n"]
    assert "".join(written(Scripted(second, first), *flags)) == f"vwxyz{separator}ab\n"
    pieces = written(Scripted(first, second), *flags, "--ignore-eot")
    assert "".join(pieces) == f"ab<|endoftext|>cd{separator}vwxyz\n"
    model = Scripted([*b"a", eot, *b"bcd"])
    assert "".join(written(model, "--max-new-tokens", "5")) == "a\n"
    assert len(list(model.columns)) == 3  # nothing is computed that nobody sees
    toy = written(Scripted([1, 0, 2]), "--max-new-tokens", "3", tokenizer=ToyTokenizer(4))
    assert "".join(toy) == "1 0 2\n"  # its numbers are numbers, 0 too


def test_the_samples_are_those_of_one_batch(model):
    """The same seed has always given the same text, whether it is streamed or not."""
    flags = ["--num-samples", "3", "--max-new-tokens", "30", "--prompt", "né", "--seed", "7"]
    text = "".join(written(model, *flags, "--ignore-eot"))
    start = torch.tensor([[256, *"né".encode()]] * 3)
    torch.manual_seed(7)
    rows = model.generate(start, 30, temperature=0.8, top_k=40)
    samples = [BYTE.decode(row[1:].tolist()) for row in rows]
    assert text == generate.SEPARATOR.join(samples) + "\n"


def test_what_ends_generate_is_one_line(toy, capsys, monkeypatch):
    """Out of memory, as a CPU says it, comes with no traceback; Ctrl-C neither."""
    flags = ["--checkpoint-path", str(toy), "--prompt", "1 2", "--num-samples", "2"]

    def ends(error: BaseException) -> int:
        """In the third step."""
        with monkeypatch.context() as patch:
            steps, stream = iter([None, None, error]), MiniGPT.stream

            def stop_third(*args, **how):
                for column in stream(*args, **how):
                    yield fail(error) if next(steps) else column

            patch.setattr(MiniGPT, "stream", stop_third)
            return generate.main(flags)

    assert ends(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 B")) == 4
    out, err = capsys.readouterr()
    assert re.fullmatch(r"1 2 \d+ \d+\n", out)  # what was written until then
    words = "--num-samples 2 and --max-new-tokens 200"
    assert err == f"error: out of memory with {words}: lower them\n"
    assert ends(KeyboardInterrupt()) == 130 and capsys.readouterr().err == "stopped\n"
    with pytest.raises(RuntimeError, match="a bug"):
        ends(RuntimeError("a bug"))
