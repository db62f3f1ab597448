"""Weights in and out, as docs/weights.md tells: the folder that scripts/export_hf.py writes and
--init-from reads (trainer/pretrained.py), with transformers itself as a witness; the
loss that scripts/evaluate.py finds in them; and the text that scripts/generate.py lets them write.

What is refused: cases/bad_folders.py, cases/bad_snapshots.py.
"""

import json
import math
import os
import re
import shutil
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness.faults import broken, raising
from harness.gpt2_folder import TOKENIZER, gpt2_tensors, write_folder
from harness.runs import TINY, metrics, same, snapshot, train_here, typed
from hypothesis import example, given, settings
from hypothesis import strategies as st

import train_minimal
from data import DataError, Tokenizer, load_dataset
from data.errors import MiniGPTError
from data.tokenizer import load_tokenizer
from model import MiniGPTConfig
from scripts import evaluate, export_hf, generate
from trainer.build import (
    build_run,
    choose_settings_and_origin,
    facts_that_must_agree,
    raise_if_ranks_differ,
)
from trainer.pretrained import (
    TRANSFORMERS_TO_MINIGPT,
    load_model_and_tokenizer,
    read_config,
    read_pretrained,
    renamed_and_transposed,
)
from trainer.process import OneProcess
from trainer.snapshot import save_snapshot

CPU = torch.device("cpu")
N_TOY, N_MODEL = TINY.index("--n-layers"), TINY.index("--batch-size")
TEXT = "def function(x):\n    return x + 1\r\n\n# ünï 😀 <|endoftext|>\n" * 200
FILES = set("config.json generation_config.json model.safetensors".split())
FILES |= set("tokenizer.json tokenizer_config.json".split())

SHAPE = TINY[N_TOY:N_MODEL]
T = 16
BYTE = load_tokenizer("byte")


def train(path: Path, *words: str) -> int:
    """The tiny run, without its data and without its shape."""
    return train_minimal.main([*TINY[N_MODEL:], f"--checkpoint-path={path}", *words])


def export(snapshot: Path, out: Path | str) -> int:
    return export_hf.main([f"--checkpoint-path={snapshot}", f"--out={out}"])


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setitem(load_dataset.__kwdefaults__, "cache_dir", folder)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The flag for it."""
    path = tmp_path_factory.mktemp("text") / "x.txt"
    path.write_text(TEXT, encoding="utf-8")
    return f"--train-data={path}"


@pytest.fixture(scope="module")
def run(text) -> Path:
    """Of a run on that text; its BPE is trained on it, too. Of 165 validation tokens it takes 161:
    what fills windows of 16, and the first."""
    path = Path(text.partition("=")[2]).with_name("run.pt")
    words = (
        "--tokenizer-name=bpe --vocab-size=290 --max-tokens=165 --max-position-embeddings=64 "
        "--num-steps=3 --eval-interval=1 --lr=0.03 --dropout=0.2 --no-amp"
    )
    assert train(path, *SHAPE, *words.split(), text) == 0
    return path


@pytest.fixture(scope="module")
def exported(run) -> Path:
    assert export(run, run.with_name("hf")) == 0
    return run.with_name("hf")


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(tmp_path / "gpt2")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "run.pt"
    assert train_here(path, "--no-amp") == 0
    return path


@pytest.fixture(scope="module")
def model(run):
    return load_model_and_tokenizer(run, CPU)[0]


# ---- The folder that export_hf writes


def test_transformers_and_ours_find_the_same_model(run, exported, capsys):
    """The same weights, ids and greedy text. (No tokenizer.json is read here.)"""
    model, tokenizer = load_model_and_tokenizer(run, CPU)
    with pytest.raises(DataError, match="290 ids, but no tokenizer is read from a folder"):
        load_model_and_tokenizer(exported, CPU)
    transformers = pytest.importorskip("transformers")
    theirs, about = transformers.AutoModelForCausalLM.from_pretrained(
        exported, output_loading_info=True
    )
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(theirs.eval()).__name__ == "GPT2LMHeadModel" and theirs.config.attn_pdrop == 0.2
    their_state = {name: p.data for name, p in theirs.transformer.named_parameters()}
    ours = renamed_and_transposed(their_state, TRANSFORMERS_TO_MINIGPT)
    assert same({name: ours[name] for name in model.state_dict()}, model.state_dict())
    words = transformers.AutoTokenizer.from_pretrained(exported)
    assert words(TEXT).input_ids == tokenizer.encode(TEXT).tolist()
    assert words.eos_token_id == words.bos_token_id == tokenizer.eot_id
    start = torch.tensor([[tokenizer.eot_id, *tokenizer.encode("def ").tolist()]])
    how = {"do_sample": False, "max_new_tokens": 50, "max_length": None, "eos_token_id": None}
    row = theirs.generate(start, attention_mask=torch.ones_like(start), **how)[0].tolist()
    flags = f"--checkpoint-path={run} --max-new-tokens=50 --temperature=0 --ignore-eot"
    assert generate.main([*flags.split(), "--prompt=def ", "--device=cpu"]) == 0
    assert capsys.readouterr().out == tokenizer.decode(row[1:]) + "\n"


def test_logits_are_those_of_transformers(tmp_path):
    """Of a model that transformers has written, with an MLP of another width."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            **dict(n_layer=3, n_head=4, n_embd=64, n_positions=48, n_inner=100, vocab_size=257),
            **dict(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0),
        )
    )
    for parameter in theirs.parameters():  # no zero biases and unit gains, which hide mistakes
        parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    ours, _ = load_model_and_tokenizer(tmp_path / "hf", CPU)
    ids = torch.randint(0, 257, (2, 48))
    logits = theirs(ids).logits
    assert (ours(ids) - logits).abs().max() <= 1e-5 * logits.abs().max()


def test_without_the_library_it_costs_one_line(exported, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert train(tmp_path / "run.pt", f"--init-from={exported}", "--num-steps=1") == 2
    assert capfd.readouterr().err.endswith("safetensors: pip install safetensors\n")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("n_bytes", [2_000, 20_000])  # of the tokenizer and of the weights
def test_a_folder_is_filled_or_has_no_file(n_bytes, run, tmp_path, monkeypatch, capfd):
    """Wherever room ends. What it is recognized by comes last: a process may be killed between two
    files."""
    resource = pytest.importorskip("resource")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limit[1]))
    code = export(run, tmp_path / "my model")
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert code == 3 and not any(path.is_file() for path in tmp_path.rglob("*"))
    assert re.match("error: cannot save .*my model: .*File too large", capfd.readouterr().err)
    with patch.object(os, "replace", wraps=os.replace) as replace:
        assert export(run, tmp_path / "my model") == 0
    moved = [call.args[1].name for call in replace.call_args_list]
    assert set(moved) == set(os.listdir(tmp_path / "my model")) == FILES
    assert moved[-1] == "config.json"


# ---- Folders of others


def test_what_older_folders_hold_besides(tmp_path):
    """A prefix, the causal masks as tensors, the head a second time, another dtype."""
    plain, more = gpt2_tensors(), {"h.1.attn.masked_bias": np.array(-1e4, np.float32)}
    more |= {f"h.{i}.attn.bias": np.ones((1, 1, 32, 32), np.float32) for i in range(2)}
    more["lm_head.weight"] = plain["wte.weight"]
    half = {f"transformer.{name}": array.astype(np.float16) for name, array in plain.items()}
    folders = write_folder(tmp_path / "new", plain), write_folder(tmp_path / "old", half | more)
    new, old = (load_model_and_tokenizer(folder, CPU)[0].state_dict() for folder in folders)
    assert same(old, {name: weight.half().float() for name, weight in new.items()})
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')  # the rest is GPT-2's
    assert read_config(tmp_path) == MiniGPTConfig(50257, 1024, 12, 12, 768, 3072, dropout=0.0)


# ---- Runs that start from weights


def test_a_run_starts_from_a_folder(folder, text, tmp_path, capsys):
    """And does not, if another process has other weights."""
    argv = [*TINY[N_MODEL:], f"--checkpoint-path={tmp_path}/run.pt", f"--init-from={folder}", text]
    run = build_run(*choose_settings_and_origin(typed(*argv), OneProcess.from_settings))
    assert same(run.model.state_dict(), load_model_and_tokenizer(folder, CPU)[0].state_dict())
    assert (run.step, run.settings.seq_len, run.data.tokenizer.vocab_size) == (0, 32, 257)
    assert run.model.config.dropout == 0.1 and not run.optimizer.state  # the run's own
    assert run.settings.lr == pytest.approx(0.04 / 16)
    assert f"weights  {folder}\n" in capsys.readouterr().out

    tensors = gpt2_tensors()
    tensors["ln_f.bias"][3] += 1e-6
    paths = (folder, folder, write_folder(tmp_path / "other", tensors))
    common = (run.settings, run.process, run.precision)
    with pytest.raises(MiniGPTError, match="--init-from: rank 0 has .*, rank 2 has .*the same"):
        raise_if_ranks_differ(
            [facts_that_must_agree(*common, read_pretrained(path)) for path in paths]
        )


def test_a_run_starts_from_a_snapshot(run, text, tmp_path, capsys):
    """It says how good the weights are. On other data the tokenizer stays what it was."""
    path, other = tmp_path / "run.pt", tmp_path / "y.txt"
    words = [f"--init-from={run}", "--num-steps=2", "--seq-len=16"]
    assert train(path, *words, text, "--max-tokens=165", "--no-amp") == 0
    assert f"before   val {metrics(run)[-1]['val_loss']:.4f} ppl " in capsys.readouterr().out

    other.write_text("some other words, of which no pair has been merged before\n" * 100)
    assert train(path, *words, f"--train-data={other}") == 0
    assert snapshot(path)["tokenizer"] == snapshot(run)["tokenizer"]


def test_started_again_it_needs_no_source(folder, text, tmp_path, monkeypatch, capfd):
    """As torchrun starts it again: with the same id and the same flags."""
    path, words = tmp_path / "run.pt", [f"--init-from={folder}", text]
    words += ["--num-steps=8", "--save-interval=2"]
    assert train(tmp_path / "whole.pt", *words) == 0
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "the job")
        patch.setattr("trainer.process.uuid.uuid4", lambda: SimpleNamespace(hex="the run"))
        assert broken(path, "error:0:6", *words, base=TINY[N_MODEL:]) is None
        shutil.rmtree(folder)
        assert train(path, *words) == 0
    whole, again = (snapshot(tmp_path / f"{name}.pt") for name in ("whole", "run"))
    assert same(again["model"], whole["model"]) and again["step"] == 8


# ---- Evaluate


def evaluated(path: Path, *flags: str) -> dict:
    file = path.with_name("found.json")
    assert evaluate.main([str(path), f"--json={file}", *flags]) == 0
    return json.loads(file.read_text())


def test_the_trainers_own_number(run, toy):
    """By default: the validation part of the run's own data, in its windows."""
    found, last = evaluated(run, "--max-tokens=161"), metrics(run)[-1]
    assert (found["tokens"], found["seq_len"], found["step"]) == (160, T, 3)
    for ours, trainers in (("loss", "loss"), ("perplexity", "ppl"), ("bits_per_byte",) * 2):
        assert found[ours] == pytest.approx(last[f"val_{trainers}"], rel=1e-6)
    assert found["precision"] == "float32 on cpu" and found["data"].startswith("validation part of")
    assert evaluated(run)["tokens"] == 164  # with the tail
    found = evaluated(toy, "--max-tokens=193")
    assert found["bits_per_byte"] is None and found["bytes"] == 0  # its text is numbers
    assert found["loss"] == pytest.approx(metrics(toy)[-1]["val_loss"], rel=1e-6)


@settings(max_examples=25)
@given(st.integers(2, 40), st.integers(1, T), st.integers(1, 5))
@torch.no_grad()
def test_every_token_once_behind_those_of_its_window(model, n, seq_len, batch_size):
    ids = np.random.default_rng(n).integers(0, 256, n).astype(np.uint16)
    tokens, nats = torch.from_numpy(ids.astype(np.int64))[None], 0.0
    for t in range(1, n):
        logits = model(tokens[:, (t - 1) // seq_len * seq_len : t])
        nats += F.cross_entropy(logits[:, -1], tokens[:, t]).item()
    args = SimpleNamespace(seq_len=seq_len, batch_size=batch_size)
    assert evaluate.sum_loss(model, ids, args) == pytest.approx(nats, rel=1e-5)


def test_whatever_the_files_are(run, tmp_path, monkeypatch):
    """Texts, documents and ids give one row of ids, and bytes are those of the text."""
    monkeypatch.chdir(tmp_path)
    words, texts = Tokenizer.from_state(snapshot(run)["tokenizer"]), ["für Elise", "one", "two"]
    first, *others = ([words.eot_id, *words.encode(text).tolist()] for text in texts)
    Path("a.txt").write_text("für Elise", encoding="utf-8")
    Path("b.jsonl").write_text('{"other": "one"}\n\n{"other": ""}\n{"other": "two"}\n')
    np.array(sum(others, []), np.uint16).tofile("others.bin")
    np.save("all.npy", np.array(sum(others, first), np.uint64))
    documents = ["a.txt", "b.jsonl", "--text-key=other"]
    for names in (["a.txt", "others.bin"], ["all.npy"], documents):
        found = evaluated(run, "--val-data", *names)
        assert names[0] in found["data"] and found["tokens"] == len(sum(others, first)) - 1
        assert found["bytes"] == 16


def test_data_that_changed_or_went(run, tmp_path, capsys):
    text, path, state = tmp_path / "x.txt", tmp_path / "run.pt", snapshot(run)
    state["args"] += ["--train-data", str(text)]
    save_snapshot(path, state)
    text.write_text("another text. " * 300)
    evaluated(path)
    assert "note: the run's data changed" in capsys.readouterr().out
    text.unlink()
    assert evaluate.main([str(path)]) == 2
    line = f"error: the run's own data: --train-data {text}: no such file, or .*; --val-data names"
    assert re.match(line, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("place", "act", "code", "says"),
    [
        (
            "scripts.evaluate.sum_loss",
            raising(MemoryError()),
            4,
            "out of memory: lower --batch-size 8, or .*",
        ),
        ("scripts.evaluate.sum_loss", lambda *_: math.nan, 2, "the loss is nan: .* overflows"),
        (
            "pathlib.Path.write_text",
            raising(OSError(28, "No space")),
            2,
            "cannot write: No space",
        ),
    ],
)
def test_what_ends_it_costs_one_line(run, tmp_path, monkeypatch, capsys, place, act, code, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(place, act)
    words = [str(run), "--max-tokens=20", "--json=found.json", "--amp-dtype=bfloat16"]
    assert evaluate.main(words) == code
    assert re.fullmatch(f"error: {says}\n", capsys.readouterr().err)
    assert os.listdir() == []


# ---- Generate


def test_generate_needs_the_snapshot_only(toy, tmp_path, capsys, monkeypatch):
    """What it writes is what `generate` of the model does; the same seed gives the same text."""
    shutil.copy(toy, tmp_path / "alone.pt")
    monkeypatch.chdir(tmp_path)
    flags = "alone.pt --max-new-tokens=7 --num-samples=2 --seed=7 --top-k=9 --top-p=0.5".split()
    assert generate.main([*flags, "--prompt=3 1 2"]) == 0
    model, tokenizer = load_model_and_tokenizer(toy, CPU)
    torch.manual_seed(7)
    start, how = torch.tensor([[0, 3, 1, 2]]), {"temperature": 0.8, "top_k": 9, "top_p": 0.5}
    rows = [model.generate(start, 7, **how)[0] for _ in range(2)]
    samples = [tokenizer.decode(row[1:].tolist()) for row in rows]
    assert capsys.readouterr().out == generate.SEPARATOR.join(samples) + "\n"
    assert samples[0] != samples[1]
    assert generate.main([*flags, f"--prompt={'1 ' * 17}"]) == 0
    assert capsys.readouterr().out.startswith("1 " * 17)  # a prompt longer than the model sees


class Scripted:
    """A model that writes what it is told to, one sample after the other."""

    config = MiniGPTConfig(max_position_embeddings=4)

    def __init__(self, *samples) -> None:
        self.samples = iter(samples)

    def stream_tokens(self, ids, max_new_tokens, **how):
        self.left = iter(next(self.samples))
        return (torch.tensor([[new_id]]) for new_id in islice(self.left, max_new_tokens))


def written(model, *flags: str, tokenizer=BYTE) -> list[str]:
    args = generate.build_parser().parse_args([*flags])
    pieces = generate.generate_text(args, model, tokenizer, CPU)
    return [piece for piece in pieces if piece]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(b"a\xe2\x82\xac\xf0\x9f\x98\x80\xc3\xff\xed\xa0"), min_size=1))
@example([*"a€😀é".encode()])
@example([*b"a\xffb\xe2\x82"])  # what never becomes a character, and half of one at the end
def test_in_parts_or_as_a_whole_it_is_the_same_text(sample):
    """In whole characters."""
    flags = ["--max-new-tokens", str(len(sample)), "--num-samples", "2", "--prompt", "pp"]
    pieces = written(Scripted(sample, sample), *flags)
    text = "pp" + bytes(sample).decode(errors="replace")
    assert "".join(pieces) == f"{text}{generate.SEPARATOR}{text}\n"
    if "\ufffd" not in text:
        assert pieces[: len(text) - 1] == ["pp", *text[2:]]


@pytest.mark.parametrize(("flags", "left"), [("", 2), ("--ignore-eot", 0)])
def test_a_sample_ends_at_endoftext(flags, left):
    """And nothing is computed that nobody sees."""
    model = Scripted([*b"ab", 256, *b"cd"])
    text = "".join(written(model, "--max-new-tokens=5", *flags.split()))
    assert (text, len(list(model.left))) == ("ab<|endoftext|>cd\n" if flags else "ab\n", left)
