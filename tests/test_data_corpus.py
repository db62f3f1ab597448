"""Paths to tokens: each format is read whole, each split is clean, each bad flag costs one line.

Also the data that need no file: toy data and the built-in corpus. The cache: test_data_cache.py;
bad files: test_bad_input.py.
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

from data import DataError, Dataset, Tokenizer
from data import documents as documents_module
from data.documents import read_text, split_text
from data.tokenizer import GPT2_PATTERN, train_bpe

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


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    st.lists(st.lists(st.sampled_from(PIECES), max_size=5), min_size=20, max_size=50),
    st.integers(80, 200),
)
def test_chunks_encode_as_the_whole(tokenizers, tmp_path_factory, groups, size) -> None:
    text = "a,".join(map("".join, groups))  # so there is a place to cut in any 80 bytes
    path = tmp_path_factory.getbasetemp() / "chunks.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "CHUNK", size)
        for chunks in (read_text(path, 0, path.stat().st_size), split_text(text)):
            parts = list(chunks)
            assert "".join(parts) == text and len(parts) >= len(text) // (size + 80)
            for tokenizer in tokenizers:
                wanted = tokenizer.encode(text).tolist()
                assert [i for part in parts for i in tokenizer.encode(part).tolist()] == wanted


# ---- Formats


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.text("a b\n\r\u00e9\U0001f600", min_size=1), st.floats(0.05, 0.95), st.booleans())
@example("é" * 1000, 0.1, False)  # no place to cut
@example("first\r\nsecond <|endoftext|> é\n\n" * 50, 0.1, True)
def test_a_text_keeps_every_byte_but_the_mark_and_no_character_is_cut(
    tmp_path_factory, text, ratio, mark
) -> None:
    folder = tmp_path_factory.mktemp("text")
    (folder / "x.txt").write_bytes(b"\xef\xbb\xbf" * mark + text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "CHUNK", 50)
        data = load(folder / "cache", folder / "x.txt", val_ratio=ratio)
    parts = [*texts(data.train), *texts(data.val)]
    assert b"".join(parts) == text.encode() and all(part.decode() or part == b"" for part in parts)


def test_jsonl_is_one_document_a_line(cache, tmp_path) -> None:
    lines = [json.dumps({"id": i, "text": f"line {i}\nü"}) for i in range(30)]
    (tmp_path / "x.jsonl").write_text("\n\n".join(lines))
    data = load(cache, tmp_path / "x.jsonl")
    assert texts(data.val) == [f"line {i}\nü".encode() for i in (9, 19, 29)]
    assert len(texts(data.train)) == 27
    assert "30 documents" in data.description


def write_tokens(path: Path, tokens: np.ndarray, layout: str) -> Path:
    if layout == "npy":
        np.save(path := path.with_suffix(".npy"), tokens)
        return path
    header = np.zeros(256, dtype=np.int32)
    magic = {"uint16": (20240520, 1), "uint32": (20240801, 7)}[tokens.dtype.name]
    header[:3] = *magic, len(tokens)
    path.write_bytes(header.tobytes() * (layout == "llm.c") + tokens.tobytes())
    return path


LAYOUTS = ["nanoGPT uint16", "llm.c uint16", "llm.c uint32", "npy uint16", "npy uint32"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_files_are_read_in_place(cache, tmp_path, layout: str) -> None:
    layout, dtype = layout.split()
    tokens = np.random.default_rng(0).integers(0, 257, 1000).astype(dtype)
    path = write_tokens(tmp_path / "x.bin", tokens, layout)
    data = load(cache, path)
    assert ids(data.train) == tokens[:900].tolist() and ids(data.val) == tokens[900:].tolist()
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


# ---- Splits


@pytest.mark.parametrize("n", [1, 3, 25])  # a few texts are each split at their tail
def test_a_text_is_split_at_its_tail_after_a_newline_and_many_by_file(cache, tmp_path, n) -> None:
    for i in range(n):
        lines = [f"line {j} of file {i}\n" for j in range(100)]
        (tmp_path / f"{i:02}.txt").write_text("".join(lines))
    data = load(cache, tmp_path, val_ratio=0.2 if n < 25 else 0.1)
    if n == 25:
        files = [text.split(b"\n")[0] for text in texts(data.val)]
        assert files == [b"line 0 of file 9", b"line 0 of file 19"]
        assert len(texts(data.train)) == 23
        return
    for i, (train, val) in enumerate(zip(texts(data.train), texts(data.val), strict=True)):
        assert (train + val).decode() == "".join(f"line {j} of file {i}\n" for j in range(100))
        assert val.startswith(b"line") and 0.18 < len(val) / (len(train) + len(val)) <= 0.2
    assert len(texts(data.val)) == n


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
    def toy(seed: int, where: Path = cache) -> Dataset:
        options = {"vocab_size": vocab_size, "max_tokens": 60_000, "seed": seed}
        return load(where, toy=True, tokenizer_name=None, **options)

    data = toy(3)
    walk = np.array(ids(data.train) + ids(data.val))
    assert len(walk) == 120_000 and walk.max() < vocab_size == data.tokenizer.vocab_size
    successors: dict[int, set[int]] = {}
    for a, b in zip(walk[:-1].tolist(), walk[1:].tolist(), strict=True):
        successors.setdefault(a, set()).add(b)
    assert max(len(s) for s in successors.values()) == 4
    if vocab_size == 70000:
        return
    pairs = np.zeros((256, 256))
    np.add.at(pairs, (walk[:-1], walk[1:]), 1)
    chance = pairs / pairs.sum(1, keepdims=True)
    loss = -(pairs[pairs > 0] * np.log(chance[pairs > 0])).sum() / pairs.sum()
    assert abs(loss - math.log(4)) < 0.01 and "1.386" in data.description
    assert walk[:4].tolist() == [121, 232, 191, 231]  # as in every run before
    again, other = toy(3, cache / "again"), toy(4)
    assert ids(again.train) == ids(data.train) != ids(other.train)


def test_the_built_in_corpus_is_python_source_and_a_second_start_reads_the_cache(
    cache, monkeypatch
) -> None:
    monkeypatch.setattr("data.corpus.BPE_TRAINING_CHARS", 500_000)  # of 9 million
    lines: list[str] = []
    options = {"tokenizer_name": None, "vocab_size": 260, "max_tokens": 100_000}
    data = load(cache, **options)
    assert data.tokenizer.name == "bpe" and data.tokenizer.vocab_size == 260
    assert "standard library" in data.description and " MB; " in data.description
    sample = data.tokenizer.decode(ids(data.train)[:50_000])
    assert "def " in sample and "import " in sample
    meta = json.loads((cache / data.fingerprint / "meta.json").read_text())
    assert meta["bytes"] > 1_000_000 and meta["documents"] > 100
    assert (meta["train_tokens"], meta["val_tokens"]) == (100_000, 100_000)

    monkeypatch.setattr(Tokenizer, "encode", None)
    monkeypatch.setattr("data.corpus.train_bpe", None)
    again = load(cache, say=lines.append, **options)
    assert lines == [] and again.fingerprint == data.fingerprint
    assert again.train == data.train and again.description == data.description
    assert again.tokenizer.fingerprint == data.tokenizer.fingerprint


def test_a_python_without_its_library_says_so(monkeypatch, tmp_path, cache) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="--train-data"):
        load(cache, tokenizer_name=None)
    assert not cache.exists()


# ---- What test_bad_input.py does not ask through the trainer


def test_an_unreadable_file_is_one_line(cache, tmp_path, monkeypatch) -> None:
    (tmp_path / "x.txt").write_text("text")

    def refuse(paths: list[Path]) -> str:
        raise PermissionError(13, "Permission denied", str(paths[0]))

    monkeypatch.setattr("data.corpus.hash_files", refuse)
    with pytest.raises(DataError, match="x.txt: Permission denied"):
        load(cache, tmp_path / "x.txt")


BAD = {
    "--vocab-size 300: .*gpt2": {"vocab_size": 300},
    "--vocab-size 256: must be 257 to": {"tokenizer_name": "bpe", "vocab_size": 256},
    "--val-ratio 0.0": {"val_ratio": 0.0},
    "--val-ratio nan": {"val_ratio": math.nan},
    "--max-tokens 0": {"max_tokens": 0},
}


@pytest.mark.parametrize(("message", "options"), BAD.items())
def test_a_bad_option_is_named(cache, tmp_path, message: str, options: dict) -> None:
    (tmp_path / "x.txt").write_text("text\n" * 100)
    with pytest.raises(DataError, match=message):
        load(cache, tmp_path / "x.txt", **({"tokenizer_name": None} | options))
    assert not cache.exists()
