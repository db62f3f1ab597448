"""Paths to tokens: each format is read whole, each split is clean, each bad path costs one line.

Also the data that need no file: toy data and the built-in corpus. The cache: test_data_cache.py.
"""

import json
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest
from harness.corpora import ids, load, texts
from tiktoken_ext import openai_public

from data import DataError, Dataset, Tokenizer, load_dataset
from data import documents as documents_module
from data import tokenizer as tokenizer_module
from data.documents import read_text, split_text
from data.tokenizer import train_bpe

# ---- Reading in chunks ---------------------------------------------------------------------------


def patterns(monkeypatch) -> dict[str, str]:
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *args, **kwargs: {})
    return {
        "gpt2": tokenizer_module.GPT2_PATTERN,
        "r50k_base": openai_public.r50k_base()["pat_str"],
        "cl100k_base": openai_public.cl100k_base()["pat_str"],
        "o200k_base": openai_public.o200k_base()["pat_str"],
    }


@pytest.mark.parametrize("name", ["gpt2", "r50k_base", "cl100k_base", "o200k_base"])
def test_chunks_encode_as_the_whole(monkeypatch, tmp_path, name: str) -> None:
    pattern = patterns(monkeypatch)[name]
    words = "the|The|it's|don't|HE'S|x1|2024|12.5|é|日本|a\u0301|<|endoftext|>|\U0001f600"
    marks = "\n|\n\n|\r\n|\r\n\r\n|\t|    |);\n|//\n|}\n |/*|\u3000|'|\"|,|\u00a0| |  |\n"
    pieces = words.split("|") + marks.split("|")
    rng = random.Random(0)
    text = "".join(rng.choice(pieces) for _ in range(20_000))
    ranks = train_bpe([text], 1500)
    # Tokens that only another split into words would use, so that it shows.
    for pair in (b"\n\n", b"\r\n", b"\n ", b"  ", b" \n", b"\r\n\r\n", b"\n\n\n", b";\n", b"\n/"):
        for end in range(2, len(pair) + 1):
            ranks.setdefault(pair[:end], len(ranks))
    tokenizer = Tokenizer(name, ranks, pattern)
    whole = tokenizer.encode(text).tolist()
    path = tmp_path / "x.txt"
    path.write_bytes(text.encode())
    for size in (64, 101, 1000):
        monkeypatch.setattr(documents_module, "CHUNK", size)
        for chunks in (read_text(path, 0, path.stat().st_size), split_text(text)):
            parts = list(chunks)
            assert len(parts) > len(text) / size / 2 and "".join(parts) == text
            assert [i for part in parts for i in tokenizer.encode(part).tolist()] == whole


def test_a_text_with_no_place_to_cut_is_read_whole(monkeypatch, cache, tmp_path) -> None:
    monkeypatch.setattr(documents_module, "CHUNK", 50)
    (tmp_path / "x.txt").write_text("é" * 1000)
    data = load(cache, tmp_path / "x.txt")
    assert b"".join(texts(data.train) + texts(data.val)).decode() == "é" * 1000


# ---- Formats -------------------------------------------------------------------------------------


def test_a_text_file_keeps_every_byte_but_the_bom(cache, tmp_path) -> None:
    text = "first\r\nsecond <|endoftext|> é\n\n" * 50
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    data = load(cache, tmp_path / "x.txt")
    assert b"".join(texts(data.train) + texts(data.val)) == text.encode()


def test_jsonl_is_one_document_a_line(cache, tmp_path) -> None:
    lines = [json.dumps({"id": i, "text": f"line {i}\nü"}) for i in range(30)]
    (tmp_path / "x.jsonl").write_text("\n\n".join(lines))
    data = load(cache, tmp_path / "x.jsonl")
    assert texts(data.val) == [f"line {i}\nü".encode() for i in (9, 19, 29)]
    assert len(texts(data.train)) == 27
    assert "30 documents" in data.description


def llmc(tokens: np.ndarray, magic: int, version: int) -> bytes:
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(tokens)
    return header.tobytes() + tokens.tobytes()


def write_tokens(path: Path, tokens: np.ndarray, layout: str) -> Path:
    if layout == "npy":
        np.save(path.with_suffix(".npy"), tokens)
        return path.with_suffix(".npy")
    magic = {"uint16": (20240520, 1), "uint32": (20240801, 7)}[tokens.dtype.name]
    path.write_bytes(llmc(tokens, *magic) if layout == "llm.c" else tokens.tobytes())
    return path


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("nanoGPT", "uint16"),
        ("llm.c", "uint16"),
        ("llm.c", "uint32"),
        ("npy", "uint16"),
        ("npy", "uint32"),
    ],
)
def test_token_files_are_read_in_place(cache, tmp_path, layout: str, dtype: str) -> None:
    tokens = np.random.default_rng(0).integers(0, 257, 1000).astype(dtype)
    path = write_tokens(tmp_path / "x.bin", tokens, layout)
    data = load(cache, path)
    assert ids(data.train) == tokens[:900].tolist() and ids(data.val) == tokens[900:].tolist()
    assert {file.path for file in data.train + data.val} == {path}
    assert not cache.exists()


@pytest.mark.parametrize("form", ["folder", "glob"])
def test_token_files_named_val_validate(cache, tmp_path, form: str) -> None:
    for name, first in (("fineweb_train_1", 0), ("fineweb_train_2", 50), ("fineweb_val_0", 100)):
        tokens = np.arange(first, first + 50, dtype=np.uint16)
        write_tokens(tmp_path / f"{name}.bin", tokens, "llm.c")
    where = tmp_path if form == "folder" else tmp_path / "*.bin"
    data = load(cache, where)
    assert ids(data.train) == list(range(100)) and ids(data.val) == list(range(100, 150))
    # --val-data decides otherwise, and then every file of --train-data trains.
    val = str(tmp_path / "fineweb_train_1.bin")
    assert len(ids(load(cache, where, val=[val]).train)) == 150


def test_a_tail_of_token_shards_spans_files(cache, tmp_path) -> None:
    for i in range(3):
        np.arange(i * 50, i * 50 + 50, dtype=np.uint16).tofile(tmp_path / f"{i}.bin")
    data = load(cache, tmp_path, val_ratio=0.5)
    assert ids(data.train) == list(range(75)) and ids(data.val) == list(range(75, 150))
    data = load(cache, tmp_path, val_ratio=0.5, max_tokens=10)
    assert ids(data.train) == list(range(10)) and ids(data.val) == list(range(75, 85))


# ---- Splits --------------------------------------------------------------------------------------


def test_one_text_is_split_at_its_tail_after_a_newline(cache, tmp_path) -> None:
    lines = [f"line number {i}\n" for i in range(100)]
    (tmp_path / "x.txt").write_text("".join(lines))
    data = load(cache, tmp_path / "x.txt", val_ratio=0.2)
    (train,), (val,) = texts(data.train), texts(data.val)
    assert train.decode() + val.decode() == "".join(lines)
    assert val.startswith(b"line") and 0.18 < len(val) / (len(train) + len(val)) <= 0.2


def test_a_tail_never_cuts_a_character(cache, tmp_path) -> None:
    for n in range(1, 9):
        (tmp_path / "x.txt").write_text("\U0001f600" * n)
        data = load(cache, tmp_path / "x.txt", val_ratio=0.37)
        both = b"".join(texts(data.train) + texts(data.val))
        assert both.decode() == "\U0001f600" * n


def test_many_texts_are_split_by_file(cache, tmp_path) -> None:
    for i in range(25):
        (tmp_path / f"{i:02}.txt").write_text(f"file {i}")
    data = load(cache, tmp_path)
    assert texts(data.val) == [b"file 9", b"file 19"] and len(texts(data.train)) == 23


def test_a_few_texts_are_each_split_at_their_tail(cache, tmp_path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name}\n" * 100)
    data = load(cache, tmp_path)
    for name, train, val in zip("abc", texts(data.train), texts(data.val), strict=True):
        assert (train + val).decode() == f"{name}\n" * 100 and 16 <= len(val) <= 20


def test_val_data_leaves_all_of_train_data(cache, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("train\n" * 20)
    (tmp_path / "b.txt").write_text("valid\n" * 20)
    data = load(cache, tmp_path / "a.txt", val=[str(tmp_path / "b.txt")])
    assert texts(data.train) == [b"train\n" * 20] and texts(data.val) == [b"valid\n" * 20]


def test_max_tokens_caps_each_split_and_stops_early(cache, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(documents_module, "CHUNK", 1000)
    (tmp_path / "x.txt").write_text("some words here\n" * 10_000)
    encoded = []
    real = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda *a: encoded.append(len(a[1])) or real(*a))
    data = load(cache, tmp_path / "x.txt", max_tokens=50)
    assert len(ids(data.train)) == len(ids(data.val)) == 50
    assert sum(encoded) < 0.2 * 160_000  # some chunks are in flight when the limit is reached
    assert load(cache, tmp_path / "x.txt").fingerprint != data.fingerprint


# ---- Toy data and the built-in corpus ------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [256, 50257, 70000])
def test_toy_data_can_be_learned_down_to_ln_4(cache, tmp_path, vocab_size: int) -> None:
    def toy(where: Path, seed: int = 3) -> Dataset:
        return load_dataset(
            None,
            None,
            toy=True,
            vocab_size=vocab_size,
            max_tokens=60_000,
            seed=seed,
            cache_dir=where,
        )

    data = toy(cache)
    walk = np.array(ids(data.train) + ids(data.val))
    assert len(walk) == 120_000 and walk.max() < vocab_size == data.tokenizer.vocab_size
    successors: dict[int, set[int]] = {}
    for a, b in zip(walk[:-1].tolist(), walk[1:].tolist(), strict=True):
        successors.setdefault(a, set()).add(b)
    assert max(len(s) for s in successors.values()) == 4
    if vocab_size == 256:
        pairs = np.zeros((256, 256))
        np.add.at(pairs, (walk[:-1], walk[1:]), 1)
        chance = pairs / pairs.sum(1, keepdims=True)
        loss = -(pairs[pairs > 0] * np.log(chance[pairs > 0])).sum() / pairs.sum()
        assert abs(loss - math.log(4)) < 0.01 and "1.386" in data.description
    assert ids(toy(tmp_path / "again").train) == ids(data.train)
    assert ids(toy(cache, seed=4).train) != ids(data.train)


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory) -> tuple[Dataset, Path]:
    where = tmp_path_factory.mktemp("stdlib") / "cache"
    data = load_dataset(None, None, vocab_size=300, max_tokens=200_000, cache_dir=where)
    return data, where


def test_the_built_in_corpus_is_python_source(stdlib) -> None:
    data, where = stdlib
    assert data.tokenizer.name == "bpe" and data.tokenizer.vocab_size == 300
    assert "standard library" in data.description
    sample = data.tokenizer.decode(ids(data.train)[:50_000])
    assert "def " in sample and "import " in sample
    meta = json.loads((where / data.fingerprint / "meta.json").read_text())
    assert meta["bytes"] > 1_000_000 and meta["documents"] > 100
    assert (meta["train_tokens"], meta["val_tokens"]) == (200_000, 200_000)


def test_a_second_start_reads_the_cache(stdlib, monkeypatch) -> None:
    data, where = stdlib
    monkeypatch.setattr(Tokenizer, "encode", None)
    monkeypatch.setattr("data.corpus.train_bpe", None)
    lines: list[str] = []
    again = load_dataset(
        None, None, vocab_size=300, max_tokens=200_000, cache_dir=where, say=lines.append
    )
    assert lines == [] and again.fingerprint == data.fingerprint
    assert again.train == data.train and again.description == data.description
    assert again.tokenizer.fingerprint == data.tokenizer.fingerprint


def test_a_python_without_its_library_says_so(monkeypatch, tmp_path, cache) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="--train-data"):
        load_dataset(None, None, cache_dir=cache)
    assert not cache.exists()


def test_bpe_is_trained_on_the_training_part_only(cache, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("training words\n" * 50)
    (tmp_path / "b.txt").write_text("quibble quibble\n" * 50)
    lines: list[str] = []
    data = load(
        cache,
        tmp_path / "a.txt",
        val=[str(tmp_path / "b.txt")],
        tokenizer_name="bpe",
        say=lines.append,
    )
    tokens = data.tokenizer.ranks
    assert b" words" in tokens and b"quibble" not in tokens
    assert data.tokenizer.vocab_size < 1024  # so little text has no more pairs: and it is said
    assert any(str(data.tokenizer.vocab_size) in line for line in lines)
    assert ids(data.val)[0] == data.tokenizer.eot_id


# ---- Bad input: what test_bad_input.py does not ask through the trainer -------------------------


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["none.txt"], "--train-data none.txt: no such file"),
        (["*.none"], r"--train-data \*.none: no file matches"),
        (["."], "--train-data .: no text or token file"),
        (["pipe"], "--train-data pipe: not a regular file"),
        (["a.weird", "b.bin"], "--train-data, --val-data: .*token files"),
    ],
)
def test_a_bad_path_names_the_flag(cache, tmp_path, monkeypatch, paths, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.weird").write_text("text")
    if "b.bin" in paths:
        (tmp_path / "b.bin").write_bytes(b"\1\0")
    if "pipe" in paths:
        getattr(os, "mkfifo", lambda path: pytest.skip("no named pipes here"))("pipe")
    with pytest.raises(DataError, match=message):
        load(cache, *paths)
    with pytest.raises(DataError, match=message.replace("--train-data ", "--val-data ")):
        load(cache, "a.weird", val=paths)
    assert not cache.exists()


def test_an_unreadable_file_is_one_line(cache, tmp_path, monkeypatch) -> None:
    (tmp_path / "x.txt").write_text("text")

    def refuse(paths: list[Path]) -> str:
        raise PermissionError(13, "Permission denied", str(paths[0]))

    monkeypatch.setattr("data.corpus.hash_files", refuse)
    with pytest.raises(DataError, match="x.txt: Permission denied"):
        load(cache, tmp_path / "x.txt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"toy": True}, "--use-toy-data"),
        ({"tokenizer_name": "toy"}, "--tokenizer-name toy"),
        ({"tokenizer_name": "gpt9"}, "--tokenizer-name gpt9"),
        ({"tokenizer_name": "byte", "vocab_size": 300}, "--vocab-size 300"),
        ({"vocab_size": 300}, "--vocab-size 300: .*gpt2"),
        ({"tokenizer_name": "bpe", "vocab_size": 256}, "--vocab-size 256"),
        ({"val_ratio": 0.0}, "--val-ratio 0.0"),
        ({"val_ratio": 1.0}, "--val-ratio 1.0"),
        ({"val_ratio": math.nan}, "--val-ratio nan"),
        ({"max_tokens": 0}, "--max-tokens 0"),
    ],
)
def test_a_bad_flag_is_named(cache, tmp_path, options: dict, message: str) -> None:
    (tmp_path / "x.txt").write_text("text\n" * 100)
    with pytest.raises(DataError, match=message):
        load(cache, tmp_path / "x.txt", **({"tokenizer_name": None} | options))
    assert not cache.exists()


def test_toy_data_takes_no_other_tokenizer(cache) -> None:
    with pytest.raises(DataError, match="--tokenizer-name byte"):
        load_dataset(None, None, toy=True, tokenizer_name="byte", cache_dir=cache)
    with pytest.raises(DataError, match="--vocab-size 7"):
        load_dataset(None, None, toy=True, vocab_size=7, cache_dir=cache)
