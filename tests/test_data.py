"""Names to files, files to documents, documents to tokens: nothing is passed over or taken for text
without a word, each format is read whole, each split is clean, the result is kept; and ids to
batches. Also the data that need no file. What is refused besides: cases/bad_input.py.
"""

import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cases.bad_input import llmc, npy
from harness import oracle
from harness.rows import row
from harness.runs import Forks
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from data import (
    DataError,
    Dataset,
    TokenFile,
    Tokenizer,
    TrainBatches,
    ValBatches,
    find_dataset,
)
from data import documents as documents_module
from data.batches import hash_ids, slice_files
from data.documents import read_text
from data.files import find_files
from data.tokenizer import GPT2_PATTERN, ToyTokenizer, format_ranks, train_bpe

CPU = torch.device("cpu")
law = settings(max_examples=40)

EOT = 256  # of the byte tokenizer, whose ids are otherwise the bytes themselves


def load(cache: Path, *paths: Path | str, val: list[str] | None = None, **options) -> Dataset:
    options = {"tokenizer_name": "byte", "say": lambda line: None} | options
    names = [str(path) for path in paths] or None
    return find_dataset(names, val, cache_dir=cache, **options)


def ids(files: Iterable[TokenFile]) -> list[int]:
    parts = [np.fromfile(f.path, f.dtype, f.count, offset=f.offset) for f in files]
    return np.concatenate(parts).tolist()


def texts(files: Iterable[TokenFile]) -> list[bytes]:
    """The documents behind ids of the byte tokenizer."""
    assert ids(files)[0] == EOT  # before each document, so also before the first
    found: list[list[int]] = []
    for i in ids(files):
        if i == EOT:
            found.append([])
        else:
            found[-1].append(i)
    return [bytes(document) for document in found]


# ---- Which files are meant


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*names: str) -> None:
    for path in map(Path, names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {path}")


def find(*names: str) -> tuple[list[str], list[str]]:
    """The files that are found, and what is said about the others."""
    lines: list[str] = []
    found = find_files(names, "--train-data", lines.append)
    return [path.as_posix() for path in found], lines


def test_folders_and_globs() -> None:
    write("b.txt", "a.md", "sub/c.py", "sub/.hidden.txt", ".git/d.txt", "e.png", "[x].txt")
    Path("empty.txt").touch()
    for names, found in {
        (".",): ["[x].txt", "a.md", "b.txt", "sub/c.py"],
        ("b*.txt", "b.txt", "a.md"): ["b.txt", "a.md"],
        ("**/*.py",): ["sub/c.py"],
        ("[x].txt",): ["[x].txt"],
        ("e.png",): ["e.png"],  # named on purpose: whether it is text, its bytes tell
    }.items():
        assert find(*names)[0] == found


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "some document"}\n' * 20),
        ("a.bin", np.arange(200, dtype=np.uint16).tobytes()),
        ("a.txt", b"word\n" * 20),
    ],
)
def test_a_suffix_says_the_same_in_any_case(cache, name, content) -> None:
    prints = set()
    for path in (Path("lower", name), Path("upper", name.upper())):
        path.parent.mkdir()
        path.write_bytes(content)
        prints |= {load(cache, path).fingerprint, load(cache, path.parent).fingerprint}
    assert len(prints) == 1


def test_what_a_folder_leaves_out_is_counted() -> None:
    write("docs/a.txt", "docs/b.md", "docs/1.pdf", "docs/2.PDF", "docs/sub/3.pdf", "docs/x.docx")
    write("docs/LICENSE", "plain/z.txt", *(f"many/x.kind{i}" for i in range(6)))
    # One line for all names, in which a file that is named besides is not of the skipped.
    (line,) = find("docs", "docs/x.docx", "plain/z.txt")[1]
    assert "docs and 2 more: files taken: 4, skipped: 4 (.pdf 3, without suffix 1)" in line
    # A pattern may match a folder without any beside others; five kinds are enough.
    found, (line,) = find("[mp][al]*")
    assert found == ["plain/z.txt"] and line.count(".kind") == 5
    with pytest.raises(DataError, match=r"no text or token file in this folder \(.kind0 1, .kind1"):
        find("many")
    # What nobody would train on is no news; nor is a run's own log beside its text.
    write("a/a.txt", "a/.DS_Store", "a/.git/config", "a/__pycache__/a.pyc", "a/run.metrics.jsonl")
    Path("a/empty.pdf").touch()
    os.symlink("nowhere", "a/broken.pdf")
    assert find("a") == (["a/a.txt"], [])


def test_validation_that_is_trained_on_is_noticed(cache) -> None:
    """By its path, links followed."""
    write("docs/a.txt", "docs/b.txt", "other/c.txt")
    os.symlink("docs/a.txt", "link.txt")
    for train, val, says in [
        ("docs/a.txt", ["link.txt"], ["link.txt"]),
        ("docs", ["docs"], ["docs/a.txt and 1 more"]),
        ("docs", ["other"], []),
    ]:
        lines: list[str] = []
        load(cache, train, val=val, say=lines.append)
        said = "\n".join(lines)
        assert re.findall("^warning  --val-data (.*): in --train-data, too: ", said, re.M) == says


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "CHUNK", size)
        parts = list(read_text(path, 0, path.stat().st_size))
    assert "".join(parts) == text and len(parts) >= len(text) / size
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
@example(["ab\n" * 10] * 4, 0.2, "files")  # a fifth would validate
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
            with pytest.raises(DataError, match="validation tokens .* has 0: .* raise --val-ratio"):
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


@pytest.mark.parametrize("left", [0, 15, 16, 17, 18, 24])
def test_a_token_file_that_becomes_shorter_is_not_read_on(left, tmp_path) -> None:
    """Nor if it has one token of a window: that is no window of it alone."""
    path = tmp_path / "x.bin"
    np.arange(100, dtype=np.uint16).tofile(path)
    batches = TrainBatches((TokenFile.open(path),), 1, 8, 0, torch.device("cpu"))
    os.truncate(path, 2 * left)
    with pytest.raises(DataError, match="shorter than it was"):
        batches.read(np.array([2]))  # tokens 16 to 24


@pytest.mark.parametrize(
    ("name", "dtype", "content"),
    [
        ("nanoGPT.bin", "uint16", np.ndarray.tobytes),
        ("llm.c.bin", "uint16", partial(llmc, magic=20240520, version=1)),
        ("llm.c.bin", "uint32", partial(llmc, magic=20240801, version=7)),
        ("x.npy", "uint16", npy),
        ("x.npy", "uint32", npy),
    ],
)
def test_token_files_are_read_in_place(cache, tmp_path, name, dtype, content) -> None:
    for n in (*range(2, 9), 1000):  # the first are shorter than llm.c's header
        tokens = np.random.default_rng(0).integers(0, 257, n).astype(dtype)
        (tmp_path / name).write_bytes(content(tokens))
        data, cut = load(cache, tmp_path / name), n - max(1, n // 10)
        assert ids(data.train) == tokens[:cut].tolist() and ids(data.val) == tokens[cut:].tolist()
        assert {file.path for file in data.train + data.val} == {tmp_path / name}
    assert not cache.exists()


def test_token_files_named_val_validate_and_a_tail_spans_files(cache, tmp_path) -> None:
    for name, first in (("fineweb_train_1", 0), ("fineweb_train_2", 50), ("fineweb_val_0", 100)):
        tokens = np.arange(first, first + 50, dtype=np.uint16)
        (tmp_path / f"{name}.bin").write_bytes(tokens.tobytes())
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
    assert ": 2 documents, 1.55 kB; " in data.description  # 15 and 16 bytes, 50 times each
    assert b" words" in data.tokenizer.ranks and b"quibble" not in data.tokenizer.ranks
    size = data.tokenizer.vocab_size
    assert size < 1024  # so little text has no more pairs: and it is said
    assert f"no pair of ids repeats any more: the BPE ends at {size}" in str(lines)


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
    options = {"use_toy_data": True, "vocab_size": vocab_size, "tokenizer_name": None}
    data = load(cache, data_seed=3, max_tokens=60_000, **options)
    walk = np.array(ids(data.train) + ids(data.val))
    assert len(walk) == 120_000 and walk.max() < vocab_size == data.tokenizer.vocab_size
    pairs, counts = np.unique(np.stack([walk[:-1], walk[1:]]), axis=1, return_counts=True)
    assert np.unique(pairs[0], return_counts=True)[1].max() == 4
    if vocab_size == 256:
        chance = counts / np.bincount(walk[:-1])[pairs[0]]
        assert abs(-(counts * np.log(chance)).sum() / counts.sum() - math.log(4)) < 0.01
        assert walk[:4].tolist() == [121, 232, 191, 231]  # as in every run before


def test_the_built_in_corpus_is_python_source(cache, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("data.corpus.BPE_TRAINING_CHARS", 500_000)  # of 9 million
    options = {"tokenizer_name": None, "vocab_size": 260, "max_tokens": 100_000}
    data = load(cache, **options)
    assert data.tokenizer.name == "bpe" and data.tokenizer.vocab_size == 260
    assert re.search(r"standard library: \d{3} documents, \d.\d\d MB; 100,000 ", data.description)
    assert "def " in data.tokenizer.decode(ids(data.train)[:50_000])
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="--train-data"):  # a Python without its library
        load(cache, **options)


# ---- The cache


# A damaged cache is built anew, processes that race build it once, and a builder that is killed or
# fails leaves nothing that could be read. A run that goes on brings its tokenizer, and its ids keep
# their meaning: a text that has changed since is encoded with the BPE that the run has.

TEXT = "the quick brown fox jumps over the lazy dog\n" * 50
MORE = TEXT + "zebras buzz, zealots zigzag in a zeppelin\n" * 50  # words that TEXT has not
TAIL = TEXT[:-9] + "hazy dog\n"  # it validates: the BPE is the same
FILES = ["train.bin", "val.bin", "meta.json", "tokenizer.tiktoken"]


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "x.txt").write_text(TEXT)
    return tmp_path / "x.txt"


def start(cache: Path, path: Path, **options: Any) -> Dataset:
    return load(cache, path, **({"tokenizer_name": "bpe", "vocab_size": 300} | options))


def go_on(run: Dataset, cache: Path, path: Path, **options: Any) -> Dataset:
    """What `run` has when it goes on."""
    return start(cache, path, tokenizer=Tokenizer.from_state(run.tokenizer.state()), **options)


def never(*args: Any) -> None:
    raise AssertionError(f"called with {args}")


def check(data: Dataset, text: str) -> None:
    """All of `text` lies there, as the ids of its tokenizer, behind that of a document's begin."""
    parts = [data.tokenizer.decode(ids(part)[1:]) for part in (data.train, data.val)]
    assert "".join(parts) == text
    for part, written in zip((data.train, data.val), parts, strict=True):
        assert ids(part) == [data.tokenizer.eot_id, *data.tokenizer.encode(written).tolist()]


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from(["start", "go on", "edit", "delete", *FILES]), max_size=7),
    st.booleans(),
)
@example(["go on", "delete", "go on", "start"], False)
@example(["edit", "start", "edit", "edit", "go on", "edit", "go on", "start"], False)
@example(["delete", "start", "go on"], True)
@example(["train.bin", "start", "meta.json", "go on", "tokenizer.tiktoken", "start"], False)
def test_whatever_happens_ids_are_those_of_the_run(tmp_path_factory, happens, upgraded) -> None:
    """A cache is deleted or damaged, the text is edited and edited back, other runs start on it.
    `upgraded`: another version of the word splitter trains another BPE on the same text. The
    fingerprint tells when the text is another one."""
    folder = tmp_path_factory.mktemp("run")
    cache, path, texts = folder / "cache", folder / "x.txt", [TEXT, MORE, TAIL]
    path.write_text(TEXT)
    run = start(cache, path)
    name_of = {TEXT: run.fingerprint}
    for what in happens:
        if what == "edit":
            texts.append(texts.pop(0))
            path.write_text(texts[0])
        elif what == "delete":
            shutil.rmtree(cache, ignore_errors=True)
        elif what in FILES:
            for victim in cache.glob(f"*/{what}"):
                content = victim.read_bytes()
                damaged = [b"", content[:-9], content + b"1\n", None][len(happens) % 4]
                victim.unlink() if damaged is None else victim.write_bytes(damaged)
        else:
            begin = (
                partial(start, cache, path) if what == "start" else partial(go_on, run, cache, path)
            )
            with pytest.MonkeyPatch.context() as patch:
                if what == "go on":
                    patch.setattr("data.corpus.train_bpe", never)
                elif upgraded:
                    patch.setattr("data.corpus.train_bpe", lambda some, n: train_bpe(some, n - 9))
                data = begin()
            check(data, texts[0])
            known = run.tokenizer if what == "go on" else start(folder / "alone", path).tokenizer
            is_another = data.tokenizer.fingerprint != known.fingerprint
            assert not is_another or upgraded and what == "start"
            assert data.fingerprint == name_of.setdefault(texts[0], data.fingerprint)
            assert begin(say=never).description == data.description
    assert len(set(name_of.values())) == len(name_of)


def flip(path: Path, position: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> tuple[Path, Path, Path, dict[Path, bytes]]:
    """A text, its cache, the folder of its ids there, and all files when they were new."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "x.txt").write_text(TEXT)
    cache = folder / "cache"
    data = start(cache, folder / "x.txt")
    files = {path: path.read_bytes() for path in sorted(cache.glob("*/*"))}
    assert len(files) == len(FILES) + 2  # the bpe's own folder: what it is, and its meta.json
    return folder / "x.txt", cache, data.train[0].path.parent, files


def check_kept(kept, times: int) -> None:
    """A run on it makes a folder anew so often, with a line each time; then all is as it was."""
    path, cache, _, files = kept
    lines: list[str] = []
    start(cache, path, say=lines.append)
    assert "".join(lines).count("is incomplete, damaged or of an older version: built an") == times
    assert {path: path.read_bytes() for path in cache.glob("*/*")} == files


@row("a bit of the token cache")
@settings(max_examples=80)
@given(st.integers(0, 5), st.integers(0, 10**6), st.integers(0, 7))
def test_a_flipped_bit_in_the_cache_is_noticed(kept, number, position, bit) -> None:
    flip(list(kept[3])[number], position, bit)
    check_kept(kept, 1)
    check_kept(kept, 0)


def become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


NO_META = [b"", b"[]", b"3", b"{}", b"[" * 99_999, b"\xff", b'{"sha256": 1}']
BROKEN = [(name, change) for name in FILES for change in (become_pipe, Path.unlink)]
BROKEN += [("meta.json", partial(Path.write_bytes, data=content)) for content in NO_META]
BROKEN += [("", lambda folder: shutil.rmtree(folder) or folder.symlink_to("nowhere"))]


@pytest.mark.parametrize(("name", "change"), BROKEN)
def test_what_is_no_cache_is_built_anew(kept, name, change) -> None:
    """Without waiting for a pipe."""
    change(kept[2] / name)
    check_kept(kept, 1)
    check_kept(kept, 0)
    assert {path.name for path in kept[1].iterdir()} == {".lock", *(p.parent.name for p in kept[3])}


def test_a_name_follows_from_content_tokenizer_and_split(cache, text, tmp_path) -> None:
    moved = Path(shutil.copy(text, tmp_path / "elsewhere.txt"))
    run = start(cache, text)
    copy = shutil.copytree(cache, tmp_path / "copy")
    assert start(copy, moved, say=never).fingerprint == run.fingerprint
    other = go_on(run, cache, text, tokenizer_name="byte", vocab_size=None)
    assert other.tokenizer.name == "byte"  # that of the run is left aside
    names = {run.fingerprint, other.fingerprint, start(cache, text, vocab_size=280).fingerprint}
    text.write_text(MORE)
    for options in ({}, {"val_ratio": 0.3}, {"max_tokens": 20}, {"val": [str(moved)]}):
        names.add(go_on(run, cache, text, **options).fingerprint)
    assert len(names) == 7


def test_a_tokenizer_is_not_looked_for_when_the_run_brings_it(cache, text, tmp_path) -> None:
    """A file that has gone, or a vocabulary that would be downloaded."""
    saved = tmp_path / "Mine.Tiktoken"
    saved.write_text(format_ranks(start(cache, text).tokenizer.ranks))
    options = {"tokenizer_name": str(saved), "vocab_size": None}
    run = start(cache, text, **options)
    saved.unlink()
    assert go_on(run, cache, text, say=never, **options).fingerprint == run.fingerprint
    with pytest.raises(DataError, match="Mine.Tiktoken: No such file"):
        start(cache, text, **options)


CHILD = """
import os, signal, sys, time
sys.path.insert(0, os.getcwd())
from pathlib import Path
from data import Tokenizer, find_dataset
real, fate = Tokenizer.encode, sys.argv[3]
def encode(self, text):
    time.sleep(0.5)  # the others come meanwhile
    if fate == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, text)
Tokenizer.encode = encode
data = find_dataset([sys.argv[1]], None, tokenizer_name="bpe", cache_dir=Path(sys.argv[2]))
print("made", data.fingerprint, data.tokenizer.fingerprint, flush=True)
"""


@row("several processes on")
@pytest.mark.skipif(sys.platform == "win32", reason="the lock is POSIX's; there the rename decides")
def test_processes_that_race_build_once_also_after_one_was_killed(cache, text, tmp_path) -> None:
    def children(*fates: str) -> subprocess.CompletedProcess:
        words = [str(tmp_path / "child.py"), str(text), str(cache)]
        return Forks([([*words, fate], {}) for fate in fates]).end()

    (tmp_path / "child.py").write_text(CHILD)
    assert children("die").returncode == -signal.SIGKILL
    left, bpe = sorted(path for path in cache.iterdir() if path.name != ".lock")
    assert left.name.startswith(".tmp-") and not (bpe / "train.bin").exists()  # no ids to read
    shutil.rmtree(bpe)
    both = children("live", "live")
    assert both.returncode == 0, both.stderr
    assert both.stdout.count("training a BPE") == both.stdout.count("encoding") == 1
    first, second = re.findall("^made (.*) (.*)$", both.stdout, re.M)
    assert first == second and not list(cache.glob(".tmp-*"))
    there, fresh = (load(where, text, tokenizer_name="bpe") for where in (cache, tmp_path / "new"))
    assert ids(fresh.train) == ids(there.train) and fresh.fingerprint == first[0]


def test_what_cannot_be_read_or_written_is_one_line(cache, text, monkeypatch) -> None:
    for function, error, says in [
        ("data.store.hash_files", PermissionError(13, "Permission denied", "x"), "x: Permission"),
        ("data.tokenizer.Tokenizer.encode", OSError(28, "No space left"), "cache: No space left"),
    ]:
        with monkeypatch.context() as patch, pytest.raises(DataError, match=says):
            patch.setattr(function, Mock(side_effect=error))
            load(cache, text)
        assert not cache.exists() or os.listdir(cache) == [".lock"]


# ---- Batches: every window once an epoch, a pure function of the index

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Files of such lengths, of both kinds, whose ids count up through all of them."""
    folder = tmp_path_factory.mktemp("row")

    def make(lengths: list[int]) -> list[TokenFile]:
        files = []
        for i, (n, end) in enumerate(zip(lengths, accumulate(lengths), strict=True)):
            path, offset = folder / f"{i}.bin", 1024 * (i % 2)
            numbers = np.arange(end - n, end, dtype=("uint16", "uint32")[i % 2])
            path.write_bytes(b"\xff" * offset + numbers.tobytes())
            files.append(TokenFile(path, numbers.dtype, offset, n))
        return files

    return make


@law
@given(lengths, st.integers(1, 5), st.integers(1, 6), st.integers(0, 3), st.integers(0, 60))
def test_batches_are_those_of_a_plain_sampler(numbered, lengths, B, T, seed, max_tokens):
    """Which windows, in which order, and their labels, over three epochs; and a fixed validation,
    evenly spread if it is limited, which B cuts into batches, and no more."""
    files = numbered(lengths)
    windows = oracle.windows([ids([file]) for file in files], T)
    n, longest = len(windows), max(lengths)
    if not windows:
        for make, kind in ((TrainBatches, "training"), (ValBatches, "validation")):
            says = f"--seq-len {T} needs {T + 1} {kind} tokens in a row, the longest file has "
            with pytest.raises(DataError, match=f"{says}{longest}: lower --seq-len"):
                make(files, B, T, 0, CPU)
        return
    train, found = TrainBatches(files, B, T, seed, CPU), []
    numbers = [*range(-(-3 * n // B)), 0]  # epochs end inside of batches; of its number alone
    for number in numbers:
        wanted = oracle.training_batch(windows, B, seed, number)
        for tensor, other in zip(train[number], wanted, strict=True):
            assert tensor.dtype == torch.int64 and tensor.is_contiguous()
            assert torch.equal(tensor, other)
        found += train[number][0][:, 0].tolist()
    firsts = [window[0] for window in windows]
    assert [sorted(found[i : i + n]) for i in (0, n, 2 * n)] == [firsts] * 3
    assert train.epoch(n) == B and train.n_windows == n

    val = ValBatches(files, B, T, max_tokens, CPU)
    count = n if max_tokens == 0 else 1 if max_tokens < T else min(n, max_tokens // T)
    rows = [windows[i * n // count] for i in range(count)]
    parts = [oracle.shifted(rows[i : i + B]) for i in range(0, count, B)]
    assert len(val) == len(parts)
    for batch, part in zip(val, parts, strict=True):  # ends by IndexError
        assert all(map(torch.equal, batch, part))
    with pytest.raises(IndexError):
        val[-1]


@law
@given(lengths, st.integers(0, 210), st.integers(0, 210))
def test_slices_are_those_of_the_whole_row(numbered, lengths, start, size):
    parts = slice_files(numbered(lengths), start, start + size)
    assert all(part.count for part in parts)
    assert (ids(parts) if parts else []) == list(range(sum(lengths)))[start : start + size]


def test_the_fingerprint_is_of_the_tokens_and_of_where_files_end(numbered, monkeypatch) -> None:
    """Not of headers; by a rule that stays, as a run that goes on compares it."""
    monkeypatch.setattr("data.batches.SCAN", 3)  # so many tokens are read at a time
    files = numbered([5, 7])
    parts = [(file.dtype, np.array(ids([file]), file.dtype)) for file in files]
    content = b"".join(f"{dtype} {len(i)} ".encode() + i.tobytes() for dtype, i in parts)
    assert hash_ids(files, ToyTokenizer(12)) == hashlib.sha256(content).hexdigest()
    with pytest.raises(DataError, match="but the tokenizer .toy. ends at 10: another"):
        hash_ids(files, ToyTokenizer(11))
