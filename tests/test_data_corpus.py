"""Paths to tokens: each format is read whole, each split is clean, each bad flag costs one line.

Also the data that need no file. The cache: test_data_cache.py; bad files: test_bad_input.py.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from harness.corpora import ids, load, texts
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from data import DataError, Tokenizer
from data import documents as documents_module
from data.documents import at_safe_cuts, read_text
from data.tokenizer import GPT2_PATTERN, train_bpe

law = settings(deadline=None, derandomize=True, max_examples=40)

# ---- Reading in chunks

WORDS = "the|The|it's|don't|HE'S|x1|2024|12.5|é|日本|a\u0301|<|endoftext|>|\U0001f600"
MARKS = "\n|\n\n|\r\n|\r\n\r\n|\t|    |);\n|//\n|}\n |/*|\u3000|'|\"|,|\u00a0| |  |\n"
PIECES = WORDS.split("|") + MARKS.split("|")


@pytest.fixture(scope="module")
def tokenizers() -> list[Tokenizer]:
    """Of every pattern; with tokens that only another split into words would use, so that shows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *args, **kwargs: {})
        names = ("r50k_base", "cl100k_base", "o200k_base")
        patterns = [getattr(openai_public, name)()["pat_str"] for name in names]
    ranks = train_bpe([" ".join(PIECES) * 3, "".join(PIECES) * 3], 400)
    others = ["\n\n\n", "\r\n\r\n", "\n ", "  ", " \n", ";\n", "\n/", "it's", "don't", "HE'S"]
    for other in map(str.encode, others):
        for end in range(2, len(other) + 1):
            ranks.setdefault(other[:end], len(ranks))
    return [Tokenizer("x", ranks, pattern) for pattern in (GPT2_PATTERN, *patterns)]


@law
@given(
    st.lists(st.lists(st.sampled_from(PIECES), max_size=4), min_size=5, max_size=25),
    st.integers(60, 150),
)
def test_chunks_encode_as_the_whole(tokenizers, tmp_path_factory, groups, size) -> None:
    text = "a,".join(map("".join, groups))  # so there is a place to cut in any 60 bytes
    path = tmp_path_factory.getbasetemp() / "chunks.txt"
    path.write_bytes(text.encode())
    pieces = [text[first : first + size] for first in range(0, len(text), size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "CHUNK", size)
        for chunks in (read_text(path, 0, path.stat().st_size), at_safe_cuts(pieces)):
            parts = list(chunks)
            assert "".join(parts) == text and len(parts) >= len(pieces)
            for tokenizer in tokenizers:
                wanted = tokenizer.encode(text).tolist()
                assert [i for part in parts for i in tokenizer.encode(part).tolist()] == wanted


# ---- Documents and splits


@law
@given(
    st.lists(st.text("a b\n\ré\U0001f600", min_size=1), min_size=1, max_size=12),
    st.floats(0.05, 0.95),
    st.sampled_from(["lines", "files", "files with a mark"]),
)
@example(["é" * 1000], 0.1, "files")  # no place to cut
@example(["first\r\nsecond <|endoftext|> é\n\n" * 50], 0.1, "files with a mark")
@example([f"line {i}\nü" for i in range(30)], 0.1, "lines")
def test_every_byte_in_the_split_of_the_rule(tmp_path_factory, documents, ratio, layout) -> None:
    """And no character is cut."""
    folder = tmp_path_factory.mktemp("texts")
    if layout == "lines":
        lines = [json.dumps({"id": 3, "text": document}) for document in documents]
        (folder / "x.jsonl").write_text("\n\n".join(lines))
    else:
        for i, document in enumerate(documents):
            mark = b"\xef\xbb\xbf" * ("mark" in layout)
            (folder / f"{i:02}.txt").write_bytes(mark + document.encode())
    n, wholes = len(documents), [document.encode() for document in documents]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "CHUNK", 50)
        if layout == "lines" and n * ratio < 1:
            with pytest.raises(DataError, match=r"too few documents \(\d+\)"):
                load(folder / "cache", folder, val_ratio=ratio)
            return
        data = load(folder / "cache", folder, val_ratio=ratio)
    train, val = texts(data.train), texts(data.val)
    if n * ratio >= 1:  # every 1 / ratio-th
        turns = [int((i + 1) * ratio) > int(i * ratio) for i in range(n)]
        assert val == [whole for whole, turn in zip(wholes, turns, strict=True) if turn]
        assert train == [whole for whole, turn in zip(wholes, turns, strict=True) if not turn]
        return
    assert [a + b for a, b in zip(train, val, strict=True)] == wholes
    for whole, first, tail in zip(wholes, train, val, strict=True):
        size = len(whole) + 3 * ("mark" in layout)
        about = size - int(size * (1 - ratio))
        assert first.decode() + tail.decode() and len(tail) <= about
        newline = whole[len(whole) - about :].find(b"\n") + 1  # cut after it, if there is one
        if 0 < newline < about:
            assert first.endswith(b"\n") and len(tail) == about - newline
        else:
            assert len(tail) > about - 4


LAYOUTS = ["nanoGPT uint16", "llm.c uint16", "llm.c uint32", "npy uint16", "npy uint32"]


def write_tokens(path: Path, tokens: np.ndarray, layout: str) -> Path:
    if layout == "npy":
        np.save(path := path.with_suffix(".npy"), tokens)
        return path
    header = np.zeros(256, dtype=np.int32)
    magic = {"uint16": (20240520, 1), "uint32": (20240801, 7)}[tokens.dtype.name]
    header[:3] = *magic, len(tokens)
    path.write_bytes(header.tobytes() * (layout == "llm.c") + tokens.tobytes())
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_files_are_read_in_place(cache, tmp_path, layout: str) -> None:
    layout, dtype = layout.split()
    for n in (*range(2, 9), 1000):  # the first are shorter than llm.c's header
        tokens = np.random.default_rng(0).integers(0, 257, n).astype(dtype)
        path = write_tokens(tmp_path / "x.bin", tokens, layout)
        data, cut = load(cache, path), n - max(1, n // 10)
        assert ids(data.train) == tokens[:cut].tolist() and ids(data.val) == tokens[cut:].tolist()
        assert {file.path for file in data.train + data.val} == {path}
    assert not cache.exists()


def test_token_files_named_val_validate_and_a_tail_spans_files(cache, tmp_path) -> None:
    for name, first in (("fineweb_train_1", 0), ("fineweb_train_2", 50), ("fineweb_val_0", 100)):
        tokens = np.arange(first, first + 50, dtype=np.uint16)
        write_tokens(tmp_path / f"{name}.bin", tokens, "llm.c")
    for where in (tmp_path, tmp_path / "*.bin"):
        data = load(cache, where)
        assert ids(data.train) == list(range(100)) and ids(data.val) == list(range(100, 150))
    # --val-data decides otherwise, and then every file of --train-data trains.
    val = str(tmp_path / "fineweb_train_1.bin")
    assert len(ids(load(cache, tmp_path, val=[val]).train)) == 150
    (tmp_path / "fineweb_val_0.bin").rename(tmp_path / "fineweb_train_3.bin")
    for n in (75, 10):
        data = load(cache, tmp_path, val_ratio=0.5, max_tokens=None if n == 75 else n)
        assert ids(data.train) == list(range(n)) and ids(data.val) == list(range(75, 75 + n))


def test_val_data_leaves_all_of_train_data_on_which_alone_bpe_is_trained(cache, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("training words\n" * 50)
    (tmp_path / "b.txt").write_text("quibble quibble\n" * 50)
    where, val = tmp_path / "a.txt", [str(tmp_path / "b.txt")]
    data = load(cache, where, val=val)
    assert texts(data.train) == [b"training words\n" * 50]
    assert texts(data.val) == [b"quibble quibble\n" * 50]
    lines: list[str] = []
    data = load(cache, where, val=val, tokenizer_name="bpe", say=lines.append)
    tokens, size = data.tokenizer.ranks, data.tokenizer.vocab_size
    assert b" words" in tokens and b"quibble" not in tokens
    assert size < 1024  # so little text has no more pairs: and it is said
    assert f"no pair of ids repeats any more: the BPE ends at {size}" in str(lines)
    assert ids(data.val)[0] == data.tokenizer.eot_id
    assert "1.55 kB" in data.description  # 15 and 16 bytes, 50 times each


def test_max_tokens_caps_each_split_and_stops_early(cache, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(documents_module, "CHUNK", 1000)
    (tmp_path / "x.txt").write_text("some words here\n" * 6_250)
    encoded = []
    real = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda *a: encoded.append(len(a[1])) or real(*a))
    data = load(cache, tmp_path / "x.txt", max_tokens=50)
    assert len(ids(data.train)) == len(ids(data.val)) == 50 and ", 0.10 MB;" in data.description
    assert sum(encoded) < 0.4 * 100_000  # some chunks are in flight when the limit is reached


# ---- Toy data and the built-in corpus


@pytest.mark.parametrize("vocab_size", [256, 70000])
def test_toy_data_can_be_learned_down_to_ln_4(cache, vocab_size: int) -> None:
    options = {"toy": True, "tokenizer_name": None, "vocab_size": vocab_size, "max_tokens": 60_000}
    data, other = load(cache, seed=3, **options), load(cache, seed=4, **options)
    walk = np.array(ids(data.train) + ids(data.val))
    assert len(walk) == 120_000 and walk.max() < vocab_size == data.tokenizer.vocab_size
    successors: dict[int, set[int]] = {}
    for a, b in zip(walk[:-1].tolist(), walk[1:].tolist(), strict=True):
        successors.setdefault(a, set()).add(b)
    assert max(len(s) for s in successors.values()) == 4 and ids(other.train) != ids(data.train)
    if vocab_size == 256:
        pairs = np.zeros((256, 256))
        np.add.at(pairs, (walk[:-1], walk[1:]), 1)
        chance = pairs / pairs.sum(1, keepdims=True)
        loss = -(pairs[pairs > 0] * np.log(chance[pairs > 0])).sum() / pairs.sum()
        assert abs(loss - math.log(4)) < 0.01 and "1.386" in data.description
        assert walk[:4].tolist() == [121, 232, 191, 231]  # as in every run before


def test_the_built_in_corpus_is_python_source(cache, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("data.corpus.BPE_TRAINING_CHARS", 500_000)  # of 9 million
    options = {"tokenizer_name": None, "vocab_size": 260, "max_tokens": 100_000}
    data = load(cache, **options)
    assert data.tokenizer.name == "bpe" and data.tokenizer.vocab_size == 260
    assert "standard library" in data.description and " MB; " in data.description
    sample = data.tokenizer.decode(ids(data.train)[:50_000])
    assert "def " in sample and "import " in sample
    meta = json.loads((cache / data.fingerprint / "meta.json").read_text())
    assert meta["bytes"] > 1_000_000 and meta["documents"] > 100
    assert (meta["train_tokens"], meta["val_tokens"]) == (100_000, 100_000)

    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="--train-data"):  # a Python without its library
        load(cache, **options)
