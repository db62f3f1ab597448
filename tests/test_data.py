"""Names to files, files to documents, documents to tokens: nothing is passed over or taken for text
without a word, each format is read whole, each split is clean, the result is kept; and ids to
batches. Also the data that need no file. What is refused besides: cases/bad_input.py.
"""

import errno
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from functools import partial
from itertools import chain, compress
from operator import not_
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import regex
import torch
from cases.bad_input import llmc, npy
from harness import oracle
from harness.rows import row
from harness.runs import Forks
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from data import (
    DataError,
    Dataset,
    Tokenizer,
    Tokens,
    TrainBatches,
    ValBatches,
    load_dataset,
)
from data import documents as documents_module
from data.documents import iter_chunked_documents, iter_text_chunks
from data.files import find_files
from data.store import locked
from data.tokenizer import GPT2_PATTERN, format_ranks, load_tokenizer, train_bpe
from data.tokens import open_token_file

CPU = torch.device("cpu")
law = settings(max_examples=40)

EOT = 256  # of the byte tokenizer, whose ids are otherwise the bytes themselves


def load(cache: Path, *paths: Path | str, val: list[str] | None = None, **options) -> Dataset:
    options = {"tokenizer_name": "byte", "say": lambda line: None} | options
    return load_dataset([*map(str, paths)] or None, val, cache_dir=cache, **options)


def ids(tokens: Tokens) -> list[int]:
    """By way of numpy alone."""
    parts = (np.fromfile(f.path, f.dtype, f.count, offset=f.offset) for f in tokens.files)
    return [id for part in parts for id in part.tolist()][tokens.start : tokens.stop]


def texts(tokens: Tokens) -> list[bytes]:
    """The documents behind ids of the byte tokenizer."""
    documents = "".join(map(chr, ids(tokens))).split(chr(EOT))[1:]
    return [document.encode("latin-1") for document in documents]


# ---- Which files are meant

TOP = "[x].txt", "a.md", "b.txt"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*names: str) -> None:
    for path in map(Path, names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {path}")


def test_folders_and_globs() -> None:
    """What a folder leaves out is named in one line for all names; but hidden files, and a run's
    own log, are no news. Folders that are links are searched, too, each once."""
    write("../out/f.txt", *TOP, "sub/c.PY", "sub/.hidden.txt", ".git/d.txt", "e.png", "1.pdf")
    write("sub/2.PDF", "LICENSE", "__pycache__/a.pyc", "sub/run.metrics.jsonl")
    for link, target in {"sub/up": "..", "d": "../out"}.items():
        os.symlink(target, link)
    for names, found in {
        ("b*.txt", "b.txt", "a.md"): ["b.txt", "a.md"],
        ("**/*.PY",): ["sub/c.PY"],
        ("[x].txt",): ["[x].txt"],
        ("./e.png",): ["e.png"],  # named on purpose: whether it is text, its bytes tell
        ("su[b]",): ["sub/c.PY", *(f"sub/up/{name}" for name in (*TOP, "d/f.txt"))],
    }.items():
        assert find_files(names, "", lambda line: None) == [Path(name) for name in found]
    lines: list[str] = []
    assert len(find_files((".", "e.png"), "--train-data", lines.append)) == 6
    (line,) = lines
    assert "--train-data . and 1 more: 6 files; skipped for their suffix: ./1.pdf and 3 mo" in line
    os.symlink("nowhere", "no.bin")
    with pytest.raises(DataError, match="--train-data ./no.bin: not a regular file, or a link to"):
        find_files(["."], "--train-data", never)


def test_what_a_name_says() -> None:
    """JSON Lines have several suffixes, and a .json file may have them, too; a file that is named
    so validates."""
    rows = [json.dumps({"text": f"row {i}", "url": "x"}) for i in range(3)]
    Path("a.json").write_text("[\n" + ",\n".join(rows) + "]")
    for name in ("b.jsonl", "b.ndjson", "b.JSONLINES", "b.json", "a.json"):
        Path("b" + name[1:]).write_text("\n".join(rows))
        found = ["".join(chunks) for chunks in iter_chunked_documents(Path(name))]
        assert found == (
            ["row 0", "row 1", "row 2"] if name != "a.json" else [Path(name).read_text()]
        )
    lines: list[str] = []
    names = "train.txt", "my_VAL.md", "validation-2.txt", "values.txt", "interval.txt"
    write(*(f"in/{name}" for name in names))
    data = load(Path("cache"), "in", say=lines.append)
    assert texts(data.val_tokens) == [f"this is in/{name}".encode() for name in names[1:3]]
    assert len(texts(data.train_tokens)) == 3
    assert "note     for validation, by its name: in/my_VAL.md and 1 more" in lines


# ---- Reading in chunks

WORDS = "the|The|it's|don't|HE'S|x1|2024|12.5|é|日本|a\u0301|<|endoftext|>|\U0001f600"
MARKS = "\n|\n\n|\r\n|\r\n\r\n|\t|    |);\n|//\n|}\n |/*|\u3000|'|\"|,|\u00a0| |  |\n"
PIECES = WORDS.split("|") + MARKS.split("|")


@pytest.fixture(scope="module")
def patterns() -> list[str]:
    """By which GPT-2, GPT-4 and later models split text into words."""
    with patch.object(openai_public, "load_tiktoken_bpe"):
        makers = openai_public.r50k_base, openai_public.cl100k_base, openai_public.o200k_base
        return [GPT2_PATTERN, *(make()["pat_str"] for make in makers)]


@law
@given(
    st.lists(st.lists(st.sampled_from(PIECES), max_size=4), min_size=5, max_size=25),
    st.integers(60, 150),
)
def test_chunks_have_the_words_of_the_whole(patterns, tmp_path_factory, groups, size) -> None:
    """And so they have its ids."""
    text = "a,".join(map("".join, groups))  # so there is a place to cut in any 60 bytes
    path = tmp_path_factory.getbasetemp() / "chunks.txt"
    path.write_bytes(text.encode())
    with patch.object(documents_module, "CHUNK", size):
        parts = list(iter_text_chunks(path, 0, path.stat().st_size))
    assert "".join(parts) == text and len(parts) >= len(text) / size
    path.with_suffix(".jsonl").write_text(json.dumps({"text": text}))
    with patch.object(documents_module, "CHUNK", size):
        ((*of_a_line,),) = iter_chunked_documents(path.with_suffix(".jsonl"))
    assert "".join(of_a_line) == text and len(of_a_line) >= len(text) / size
    for pattern in patterns:
        words = [word for part in of_a_line for word in regex.findall(pattern, part)]
        assert words == regex.findall(pattern, text)
        words = [word for part in parts for word in regex.findall(pattern, part)]
        assert words == regex.findall(pattern, text)


# ---- Documents and splits


@law
@given(
    st.lists(st.text("a b\n\ré\U0001f600"), min_size=1, max_size=12),
    st.floats(0.05, 0.95),
    st.sampled_from(["lines", "lines of a key", "files", "files with a mark"]),
)
@example(["é" * 1000], 0.1, "files")
@example(["ab\n" * 10] * 4, 0.2, "files")  # a fifth would validate
@example(["first\r\nsecond <|endoftext|> é\n\n" * 50], 0.1, "files with a mark")
@example([f"line {i}\nü" for i in range(30)], 0.1, "lines")
@example(["", " \n" * 40, " \n" * 40 + "x", *"abcdefgh"], 0.5, "files with a mark")
@example(["", "\n", *"abcdefgh"], 0.5, "lines")
def test_every_byte_in_the_split_of_the_rule(tmp_path_factory, documents, ratio, layout) -> None:
    """And no character is cut. Documents without text are left out, and counted."""
    assume("lines" not in layout or len(documents) * ratio >= 1)  # (else: cases/bad_input.py)
    folder = tmp_path_factory.mktemp("texts")
    key = "a key" if "key" in layout else None
    mark = b"\xef\xbb\xbf" if "mark" in layout else b""
    wholes = [document.encode() for document in documents]
    files = {f"{i:02}.txt": mark + whole for i, whole in enumerate(wholes)}
    if "lines" in layout:
        lines = [json.dumps({"text": 3, key or "text": document}) for document in documents]
        lines[0] = f'{{"id": {"7" * 5000},{lines[0][1:]}'  # more digits than an int of Python has
        files = {"x.JSONL": "\n\n".join(lines).encode()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with patch.object(documents_module, "CHUNK", 50):
        said: list[str] = []
        data = load(folder / "cache", folder, val_ratio=ratio, text_key=key, say=said.append)
    train, val = texts(data.train_tokens), texts(data.val_tokens)
    if len(wholes) * ratio >= 1:  # every 1 / ratio-th
        turns = [int((i + 1) * ratio) > int(i * ratio) for i in range(len(wholes))]
        wanted_val = [*compress(wholes, turns)]
        wanted_train = [*compress(wholes, map(not_, turns))]
    else:
        wanted_val = [tail(mark + whole, ratio).removeprefix(mark) for whole in wholes]
        ends = map(len, wanted_val)
        wanted_train = [whole[: len(whole) - n] for whole, n in zip(wholes, ends, strict=True)]
    assert train == [text for text in wanted_train if text.strip()]
    assert val == [text for text in wanted_val if text.strip()]
    if len(wholes) * ratio >= 1:
        n = sum(not whole.strip() for whole in wholes)
        assert (f"documents without text: {n}; left out" in "".join(said)) == (n > 0)


def tail(content: bytes, ratio: float) -> bytes:
    """It begins with a whole character."""
    return content[int(len(content) * (1 - ratio)) :].lstrip(bytes(range(0x80, 0xC0)))


LAYOUTS = [
    (".bin", "uint16", np.ndarray.tobytes),
    (".bin", "uint32", npy),  # by its first bytes
    ("_llm.c.bin", "uint16", partial(llmc, magic=20240520, version=1)),
    ("_llm.c.bin", "uint32", partial(llmc, magic=20240801, version=7)),
    (".NPY", "uint16", npy),
    *((".npy", dtype, npy) for dtype in ("uint32", ">u2", "int32", ">i8", "uint64")),
]
n_tokens = st.integers(2, 9) | st.just(300)  # the first are shorter than llm.c's header


@law
@given(
    st.lists(st.tuples(st.sampled_from(LAYOUTS), n_tokens, st.booleans()), min_size=1, max_size=4),
    st.floats(0.05, 0.95),
    st.none() | st.integers(1, 20),
)
@example([(layout, 300, False) for layout in LAYOUTS], 0.1, None)
def test_token_files_are_read_in_place(tmp_path_factory, files, ratio, limit) -> None:
    """Those named val validate, or a tail of all. At the next start they are not read again, and
    the fingerprint is of the ids alone, however they are stored."""
    folder, cache = (tmp_path_factory.mktemp(name) for name in ("tokens", "cache"))
    named, tokens = ([], []), np.random.default_rng(0).integers(0, 257, (len(files), 300))
    for i, ((suffix, dtype, content), n, is_val) in enumerate(files):
        name = f"{i}_{'val' if is_val else 'train'}{suffix}"
        (folder / name).write_bytes(content(tokens[i, :n].astype(dtype)))
        named[is_val].append(tokens[i, :n].tolist())
    train, val = (sum(parts, []) for parts in named)
    if not (train and val):
        train, n_val = train + val, max(1, int(len(train + val) * ratio))
        train, val = train[:-n_val], train[-n_val:]
    options = {"val_ratio": ratio, "max_tokens": limit}
    data = load(cache, folder, **options)
    with patch.object(Tokens, "read", never):
        assert load(cache, folder, **options).fingerprint == data.fingerprint
    assert ids(data.train_tokens) == train[:limit] and ids(data.val_tokens) == val[:limit]
    assert np.array_equal(data.train_tokens.read(), train[:limit])
    fewer = load(cache, folder, val_ratio=ratio, max_tokens=1)
    is_cut = len(data.train_tokens) > 1 or len(data.val_tokens) > 1
    assert (fewer.fingerprint != data.fingerprint) == is_cut
    for name, part in (("a_train.npy", train), ("a_val.npy", val)):
        np.save(folder / name, np.array(part[:limit]))
    again = load(cache, folder / "a_train.npy", val=[str(folder / "a_val.npy")])
    assert again.fingerprint == data.fingerprint
    np.save(folder / "a_train.npy", np.array(train[:limit] + [7]))
    again = load(cache, folder / "a_train.npy", val=[str(folder / "a_val.npy")])
    assert again.fingerprint != data.fingerprint


def test_val_data_leaves_all_of_train_data_on_which_alone_bpe_is_trained(cache) -> None:
    """What is in both is refused, under whatever name. A share far from --val-ratio is said."""
    Path("a.txt").write_text(trains := "training words\n" * 50)
    Path("b.txt").write_text(validates := "quibble quibble\n" * 50)
    os.symlink("a.txt", "link.txt")
    shutil.copy("a.txt", "copy.txt")
    for twin in ("a.txt", "link.txt", "copy.txt"):
        with pytest.raises(
            DataError, match=f"--val-data {twin}: the same content as a.txt of --tr"
        ):
            load(cache, "a.txt", val=["b.txt", twin])
    lines: list[str] = []
    data = load(cache, "a.txt", val=["b.txt"], tokenizer_name="bpe", say=lines.append)
    assert read(data) == [trains, validates] and not any("note" in line for line in lines)
    assert ": 2 documents, 1.55 kB; " in data.description  # 15 and 16 bytes, 50 times each
    assert b" words" in data.tokenizer.ranks and b"quibble" not in data.tokenizer.ranks
    assert data.tokenizer.vocab_size < 1024  # so little text has no more pairs
    Path("c.txt").write_text("long " * 2000)
    load(cache, "a.txt", "b.txt", "c.txt", val_ratio=0.34, say=lines.append)
    assert "note     86.6% of the tokens are for validation, --val-ratio is 0.34" in lines[-1]


def test_a_limit_acts_before_the_encoding(cache) -> None:
    """On one line of JSON, too."""
    Path("x.jsonl").write_text(json.dumps({"text": "ab " * 999}) + "\n" + '{"text": "val"}')
    encoded: list[str] = []
    real = Tokenizer.encode
    with (
        patch.object(documents_module, "CHUNK", 100),
        patch.object(Tokenizer, "encode", lambda self, t: encoded.append(t) or real(self, t)),
    ):
        data = load(cache, "x.jsonl", val_ratio=0.5, max_tokens=150)
    assert len(data.train_tokens) == 150 and sum(map(len, encoded)) < 300


# ---- Toy data and the built-in corpus


@pytest.mark.parametrize("vocab_size", [256, 70000])
def test_toy_data_can_be_learned_down_to_ln_4(cache, vocab_size: int) -> None:
    """Each id has four successors, which are as frequent as each other."""
    data = load_dataset(
        None, None, use_toy_data=True, vocab_size=vocab_size, max_tokens=60_000, cache_dir=cache
    )
    walk = np.array(ids(data.train_tokens) + ids(data.val_tokens))
    assert len(walk) == 120_000 and walk.max() < vocab_size == data.tokenizer.vocab_size
    pairs, counts = np.unique(np.stack([walk[:-1], walk[1:]]), axis=1, return_counts=True)
    assert np.unique(pairs[0], return_counts=True)[1].max() == 4
    assert vocab_size > 256 or abs(counts / counts.mean() - 1).max() < 0.5


def test_the_built_in_corpus_is_python_source(cache, monkeypatch) -> None:
    monkeypatch.setattr("data.corpus.BPE_TRAINING_CHARS", 500_000)  # of 9 million
    data = load(cache, tokenizer_name=None, vocab_size=260, max_tokens=100_000)
    assert data.tokenizer.name == "bpe" and data.tokenizer.vocab_size == 260
    assert re.search(r"standard library: \d+ documents, \d.\d\d MB; 100,000 ", data.description)
    assert "def " in data.tokenizer.decode(ids(data.train_tokens)[:50_000])


# ---- The cache


# A damaged cache is built anew, processes that race build it once, and a builder that is killed
# leaves nothing that could be read. A run that goes on brings its tokenizer; the fingerprint tells
# it that a text has changed.

TEXT = "the quick brown fox jumps over the lazy dog\n" * 50
MORE = TEXT + "zebras buzz, zealots zigzag in a zeppelin\n" * 50  # words that TEXT has not
TAIL = TEXT[:-9] + "hazy dog\n"  # it validates: the BPE is the same; so is the size


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


def read(data: Dataset) -> list[str]:
    """The text of each part, which must be one document."""
    parts = ids(data.train_tokens), ids(data.val_tokens)
    return [data.tokenizer.decode(part).removeprefix("<|endoftext|>") for part in parts]


def edit(path: Path, text: str) -> None:
    """In place, and mtime is set back; at another tick of the clock of ctime."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_text(text)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@settings(max_examples=25)
@given(st.lists(st.sampled_from(["start", "go on", "edit", "move", "delete"]), max_size=7))
@example(["go on", "delete", "go on", "start"])
@example(["edit", "start", "edit", "edit", "go on", "move", "edit", "go on", "start"])
def test_whatever_happens_ids_are_those_of_the_run(tmp_path_factory, happens) -> None:
    """A cache is deleted, the text is moved, edited and edited back, other runs start on it. The
    fingerprint tells when the ids are others. What has not changed is not read again."""
    folder = tmp_path_factory.mktemp("run")
    cache, path, texts = folder / "cache", folder / "x.txt", [TEXT, TAIL, MORE]
    path.write_text(TEXT)
    run = start(cache, path)
    name_of = {(TEXT, run.tokenizer.fingerprint): run.fingerprint}
    for what in happens:
        if what == "edit":
            texts.append(texts.pop(0))
            edit(path, texts[0])
        elif what == "move":
            path = path.rename(path.with_name(f"x{path.name}"))
        elif what == "delete":
            shutil.rmtree(cache, ignore_errors=True)
        else:
            is_new = what == "start"
            begin = partial(start, cache, path) if is_new else partial(go_on, run, cache, path)
            with patch("data.corpus.train_bpe", train_bpe if is_new else never):
                data = begin()
            assert "".join(read(data)) == texts[0]
            assert is_new or data.tokenizer.fingerprint == run.tokenizer.fingerprint
            key = texts[0], data.tokenizer.fingerprint
            assert data.fingerprint == name_of.setdefault(key, data.fingerprint)
            with patch("data.documents.open", never, create=True):
                assert begin(say=never).description == data.description
    assert len(set(name_of.values())) == len(name_of)


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> tuple[Path, Path, dict[Path, bytes]]:
    """A text, its cache, and all files of that when they were new."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "x.txt").write_text(TEXT)
    start(folder / "cache", folder / "x.txt")
    files = {path: path.read_bytes() for path in sorted(folder.glob("cache/*/*"))}
    assert len(files) == 6  # of the ids, and of the bpe: what it is, and its meta.json
    return folder / "x.txt", folder / "cache", files


@row("a bit of the token cache")
@settings(max_examples=160)
@given(
    st.integers(0, 5),
    st.integers(0, 10**7) | st.sampled_from([b"", b"[]", b"[" * 99_999, b'{"sha256": 1}', None]),
)
def test_what_is_no_cache_is_built_anew(kept, number, damage) -> None:
    """A folder in which a file is not as it was (one bit is another) is built anew, with a line
    for it; then all is as it was."""
    path, cache, files = kept
    damaged = list(files)[number]
    size = len(files[damaged])
    if isinstance(damage, int):
        flipped = int.from_bytes(files[damaged], "big") ^ 1 << damage % (8 * size)
        damage = flipped.to_bytes(size, "big")
    damaged.unlink()
    if damage is not None:
        damaged.write_bytes(damage)
    lines: list[str] = []
    start(cache, path, say=lines.append)
    assert "".join(lines).count("is incomplete, damaged or of an older version: built an") == 1
    assert {path: path.read_bytes() for path in cache.glob("*/*")} == files
    start(cache, path, say=never)


def test_a_name_follows_from_content_tokenizer_and_split(cache, text, tmp_path) -> None:
    """A tokenizer is not looked for when the run brings it."""
    moved = Path(shutil.copy(text, tmp_path / "elsewhere.txt"))
    run = start(cache, text)
    assert start(cache, moved).fingerprint == run.fingerprint
    saved = text.with_name("Mine.Tiktoken")
    saved.write_text(format_ranks(load_tokenizer("byte").ranks))
    by_name = {"tokenizer_name": str(saved), "vocab_size": None}
    other = go_on(run, cache, text, **by_name)
    assert other.tokenizer.name == str(saved)  # that of the run is left aside
    saved.unlink()  # (or a vocabulary that would be downloaded)
    assert go_on(other, cache, text, say=never, **by_name).fingerprint == other.fingerprint
    names = {run.fingerprint, other.fingerprint, start(cache, text, vocab_size=280).fingerprint}
    edit(text, MORE)
    splits = {"val_ratio": 0.3}, {"max_tokens": 20}, {"val": [str(moved)]}
    names |= {go_on(run, cache, text, **options).fingerprint for options in ({}, *splits)}
    assert len(names) == 7
    lines = text.with_suffix(".jsonl")
    lines.write_text("\n".join(json.dumps({"text": f"a{i}", "x": f"b{i}"}) for i in range(20)))
    a, b = (go_on(run, cache, lines, text_key=key) for key in (None, "x"))
    assert "a1" in "".join(read(a)) and "b1" in "".join(read(b))


CHILD = """
import os, signal, sys, time
sys.path.insert(0, os.getcwd())
from pathlib import Path
from data import Tokenizer, load_dataset
real, fate = Tokenizer.encode, sys.argv[3]
def encode(self, text):
    time.sleep(0.5)  # the others come meanwhile
    if fate == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, text)
Tokenizer.encode = encode
data = load_dataset([sys.argv[1]], None, tokenizer_name="bpe", cache_dir=Path(sys.argv[2]))
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
    left, bpe = sorted(path for path in cache.iterdir() if path.is_dir())
    assert left.name.startswith(".tmp-") and not (bpe / "train.bin").exists()  # no ids to read
    shutil.rmtree(bpe)
    both = children("live", "live")
    assert both.returncode == 0 and not left.exists(), both.stderr
    assert both.stdout.count("training a BPE") == both.stdout.count("encoding") == 1
    fresh = load(tmp_path / "new", text, tokenizer_name="bpe")
    made = re.findall("^made (.*) (.*)$", both.stdout, re.M)
    assert made == [(fresh.fingerprint, fresh.tokenizer.fingerprint)] * 2
    assert "".join(read(load(cache, text, tokenizer_name="bpe", say=never))) == TEXT


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the module is imported already
def test_the_cache_can_lie_elsewhere(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MINIGPT_CACHE", "elsewhere")
    assert runpy.run_module("data.files")["CACHE_DIR"] == tmp_path / "elsewhere"


@pytest.mark.parametrize(
    ("function", "error", "code", "says"),
    [
        ("fcntl.flock", OSError(errno.EIO, "I/O"), 2, "^cache: I/O; MINIGPT_CACHE names another f"),
        ("pathlib.Path.mkdir", OSError(errno.EROFS, "R/O", "cache"), 2, "^cache: R/O; MINIGPT_CAC"),
        ("pathlib.Path.mkdir", OSError(errno.ENOSPC, "Full"), 3, "^cache: Full; MINIGPT_CACHE"),
        ("os.scandir", OSError(errno.EACCES, "denied", "in/sub"), 2, "^in/sub: denied$"),
    ],
)
def test_errors_of_a_disk(monkeypatch, function, error, code, says) -> None:
    """An error that comes from the cache says how to move it. (And another text has another lock,
    and the folder that another process builds stays.)"""
    write("in/x.txt")
    cache = Path("cache")
    with locked(cache / "of another", never):
        start(cache, Path("in"), say=lambda line: "waiting" in line and never(line))
    shutil.rmtree(cache)
    (cache / ".tmp-of another-x").mkdir(parents=True)
    monkeypatch.setattr(function, Mock(side_effect=error))
    with pytest.raises(DataError, match=says) as raised:
        start(cache, Path("in"))
    assert raised.value.exit_code == code and (cache / ".tmp-of another-x").exists()


# ---- Batches: every window once an epoch, a pure function of the index

lengths = st.lists(st.integers(0, 40), min_size=1, max_size=5)


def numbered(folder: Path, lengths: list[int]) -> Tokens:
    """Files of such lengths, of several kinds, whose ids count up through all of them."""
    numbers = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    paths = []
    for i, (ids, (suffix, dtype, content)) in enumerate(zip(numbers, LAYOUTS, strict=False)):
        paths.append(folder / f"{i}{suffix}")
        paths[-1].write_bytes(content(ids.astype(dtype)))
    return Tokens.of_files(map(open_token_file, paths), sum(lengths))


@law
@given(lengths, st.integers(1, 5), st.integers(1, 6), st.integers(0, 3), st.integers(0, 60))
@example([7] * 5, 2, 6, 0, 0)  # windows cross files, so all but 4 ids are trained on
def test_batches_are_those_of_a_plain_sampler(tmp_path_factory, lengths, B, T, seed, max_tokens):
    """Which windows, in which order, and their labels, over three epochs; and a fixed validation,
    evenly spread if it is limited, which B cuts into batches, and no more."""
    files = numbered(tmp_path_factory.getbasetemp(), lengths)
    windows = oracle.windows([*range(sum(lengths))], T)
    n = len(windows)
    assume(windows)  # (What is said without one: cases/bad_input.py.)
    train = TrainBatches(files, B, T, seed, CPU)
    numbers = [*range(-(-3 * n // B)), 0]  # epochs end inside of batches; of its number alone
    batches = [train[number] for number in numbers]
    wanted = [oracle.training_batch(windows, B, seed, number) for number in numbers]
    assert all(map(torch.equal, chain(*batches), chain(*wanted)))
    assert train.epochs_before(n) == B and train.n_windows == n

    val = ValBatches(files, B, T, max_tokens, CPU)
    chosen = n if max_tokens == 0 else 1 if max_tokens < T else min(n, max_tokens // T)
    rows = [windows[i * n // chosen] for i in range(chosen)]
    parts = [oracle.shifted(rows[i : i + B]) for i in range(0, chosen, B)]
    assert len(val) == len([*val]) == len(parts)  # ends by IndexError
    assert all(map(torch.equal, chain(*val), chain(*parts)))
    with pytest.raises(IndexError):
        val[-1]


def test_ids_are_read_in_chunks_and_checked(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("data.tokens.CHUNK_TOKENS", 3)  # so many tokens are read at a time
    tokens = numbered(tmp_path, [5, 0, 7])
    part = tokens.part(1, 99)
    assert [*map(len, part.chunks())] == [3, 3, 3, 2] and ids(part) == [*range(1, 12)]
    assert part.part(3, 8).read().tolist() == [*range(4, 9)]
    hashes = {t.sha256() for t in (tokens, part, tokens.part(0, 11), part.part(0, 10))}
    assert len(hashes) == 4
    np.array([0, 11], "<u2").tofile(tokens.files[0].path)
    with pytest.raises(DataError, match="0.bin: it is shorter than it was; put it back"):
        tokens.read()
    np.array([0, 1, 2, 3, 12], "<u2").tofile(tokens.files[0].path)
    with pytest.raises(DataError, match="0.bin: holds id 12, but the tokenizer ends at 11"):
        tokens.read()
