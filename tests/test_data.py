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
from itertools import chain
from pathlib import Path
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

from data import DataError, Dataset, Tokenizer, Tokens, TrainBatches, ValBatches, load_dataset
from data import documents as documents_module
from data.documents import iter_chunked_documents
from data.files import find_files
from data.tokenizer import GPT2_PATTERN, format_ranks, load_tokenizer

CPU = torch.device("cpu")
law = settings(max_examples=40)

EOT = 256  # of the byte tokenizer, whose ids are otherwise the bytes themselves


def load(cache: Path, *paths: Path | str, val: list[str] | None = None, **options) -> Dataset:
    options = {"tokenizer_name": "byte", "say": lambda line: None} | options
    return load_dataset([*map(str, paths)] or None, val, cache_dir=cache, **options)


def ids(tokens: Tokens) -> list[int]:
    return np.fromfile(tokens.path, tokens.dtype).tolist()


def never(*args: object) -> None:
    raise AssertionError(f"called with {args}")


# ---- Which files are meant


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*names: str) -> None:
    for path in map(Path, names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {path}")


def test_folders_and_globs() -> None:
    """What a folder leaves out is named in one line for all names; but hidden files, and a run's
    own log, are no news. A file to which several paths lead is taken once."""
    write("../out/f.txt", "[x].txt", "a.md", "b.txt", "sub/c.PY", "sub/.hidden.txt", ".git/d.txt")
    write("e.png", "1.pdf", "sub/2.PDF", "LICENSE", "__pycache__/a.pyc", "sub/run.metrics.jsonl")
    for link, target in {"sub/up": "..", "d": "../out", "no.bin": "nowhere"}.items():
        os.symlink(target, link)
    for names, found in {
        ("b*.txt", "b.txt", "a.md"): ["b.txt", "a.md"],
        ("**/*.PY",): ["sub/c.PY"],
        ("[x].txt",): ["[x].txt"],
        ("./e.png",): ["e.png"],  # named on purpose: whether it is text, its bytes tell
        ("su[b]",): ["sub/c.PY"],
        ("d", "../out"): ["d/f.txt"],
    }.items():
        assert find_files(names, "", lambda line: None) == [Path(name) for name in found]
    lines: list[str] = []
    assert len(find_files((".", "e.png"), "--train-data", lines.append)) == 5
    (line,) = lines
    assert "--train-data . and 1 more: 5 files; skipped for their suffix: ./1.pdf and 5 mo" in line


def test_what_a_name_says(cache) -> None:
    """JSON Lines have several suffixes, and a .json file may have them, too; a file that is named
    so validates."""
    rows, lines = [json.dumps({"text": f"row {i}", "url": "x"}) for i in range(3)], []
    Path("a.json").write_text(array := '[\n{"no text": 1},\n{"no text": 2}]')
    for name in ("b.jsonl", "b.ndjson", "b.JSONLINES", "b.json"):
        Path(name).write_text("\n".join(rows))
        found = ["".join(chunks) for chunks in iter_chunked_documents(Path(name))]
        assert found == ["row 0", "row 1", "row 2"]
    assert ["".join(chunks) for chunks in iter_chunked_documents(Path("a.json"))] == [array]
    write("in/train.txt", "in/my_VAL.md", "in/validation-2.txt", "in/values.txt", "in/interval.txt")
    train, val = read(load(cache, "in", say=lines.append))
    assert val == "this is in/my_VAL.md<|endoftext|>this is in/validation-2.txt"
    assert train.count("<|endoftext|>") == 2
    assert "note     for validation, by its name: in/my_VAL.md and 1 more" in lines


def read(data: Dataset) -> list[str]:
    """The text of each part, without its first <|endoftext|>."""
    parts = ids(data.train_tokens), ids(data.val_tokens)
    return [data.tokenizer.decode(part).removeprefix("<|endoftext|>") for part in parts]


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
    st.sampled_from([".txt", ".jsonl"]),
)
def test_chunks_have_the_words_of_the_whole(patterns, tmp_path_factory, groups, size, kind) -> None:
    """And so they have its ids."""
    text = "a,".join(map("".join, groups))  # so there is a place to cut in any 60 characters
    path = tmp_path_factory.getbasetemp() / f"chunks{kind}"
    path.write_bytes((text if kind == ".txt" else json.dumps({"text": text})).encode())
    with patch.object(documents_module, "CHUNK", size):
        ((*parts,),) = iter_chunked_documents(path)
    assert "".join(parts) == text and len(parts) >= len(text) / size
    for pattern in patterns:
        words = [word for part in parts for word in regex.findall(pattern, part)]
        assert words == regex.findall(pattern, text)


# ---- Splits

texts = st.lists(st.text("a b\n\ré\U0001f600"), min_size=1, max_size=12)


@law
@given(texts, st.floats(0.05, 0.95), st.none() | st.integers(1, 20), st.booleans())
@example(["é" * 1000], 0.1, None, False)
@example(["first\r\nsecond <|endoftext|> é\n\n" * 50], 0.1, None, False)
@example(["", " \n" * 20, *"abcdefgh"], 0.5, None, False)
def test_the_end_of_all_text_validates(tmp_path_factory, documents, ratio, limit, in_lines) -> None:
    """Every byte is in one split, but a byte order mark. Documents without text are left out, and
    counted. Numbers in JSON may have more digits than an int of Python has."""
    folder, said = tmp_path_factory.mktemp("texts"), []
    for i, text in enumerate(documents):
        (folder / f"{i:02}.txt").write_text(text, encoding="utf-8-sig", newline="")
    paths, options = [folder], {"val_ratio": ratio, "max_tokens": limit}
    if in_lines:
        lines = [f'{{"id": {"7" * 5000}, "a key": {json.dumps(text)}}}' for text in documents]
        paths, options["text_key"] = [folder / "x.JSONL"], "a key"
        paths[0].write_text("\n\n".join(lines))
    with patch.object(documents_module, "CHUNK", 50):
        data = load(folder / "cache", *paths, say=said.append, **options)
    whole = [id for text in documents if text.strip() for id in (EOT, *text.encode())]
    if limit:
        whole = whole[: int(limit / min(ratio, 1 - ratio)) + 1]
    n_train = max(0, len(whole) - max(1, int(len(whole) * ratio)))
    assert ids(data.train_tokens) == whole[:n_train][:limit]
    assert ids(data.val_tokens) == whole[n_train:][:limit]
    n = sum(not text.strip() for text in documents)
    assert limit or (f"documents without text: {n}; left out" in "".join(said)) == (n > 0)
    twins = 0 if in_lines else len(documents) - len({*documents})
    assert (f"files with the content of another one: {twins}" in "".join(said)) == (twins > 0)


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
)
@example([(layout, 300, False) for layout in LAYOUTS], 0.1)
def test_token_files_are_read_whole(tmp_path_factory, files, ratio) -> None:
    """Those named val validate, or the end of all. The fingerprint is of the ids alone, however
    they are stored."""
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
    with patch("data.tokens.CHUNK_TOKENS", 7):
        data = load(cache, folder, val_ratio=ratio)
    assert ids(data.train_tokens) == train and ids(data.val_tokens) == val
    for more in ([], [7]):
        np.save(folder / "a.npy", np.array(train + more))
        np.save(folder / "b.npy", np.array(val))
        again = load(cache, folder / "a.npy", val=[str(folder / "b.npy")])
        assert (again.fingerprint == data.fingerprint) == (not more)


def test_val_data_leaves_all_of_train_data_on_which_alone_bpe_is_trained(cache) -> None:
    """What is in both is refused, under whatever name."""
    Path("a.txt").write_text(trains := "training words\n" * 50)
    Path("b.txt").write_text(validates := "quibble quibble\n" * 50)
    os.symlink("a.txt", "link.txt")
    shutil.copy("a.txt", "copy.txt")
    for twin in ("a.txt", "link.txt", "copy.txt"):
        with pytest.raises(DataError, match=f"--val-data {twin}: the same content as a.txt of --t"):
            load(cache, "a.txt", val=["b.txt", twin])
    data = load(cache, "a.txt", val=["b.txt"], tokenizer_name="bpe")
    assert read(data) == [trains, validates]
    assert ": 2 documents, 1.55 kB; " in data.description  # 15 and 16 bytes, 50 times each
    assert b" words" in data.tokenizer.ranks and b"quibble" not in data.tokenizer.ranks
    assert data.tokenizer.vocab_size < 1024  # so little text has no more pairs


def test_a_limit_acts_before_the_encoding(cache) -> None:
    """On one line of JSON, too."""
    Path("x.jsonl").write_text(json.dumps({"text": "ab " * 999}))
    encoded: list[str] = []
    real = Tokenizer.encode
    with (
        patch.object(documents_module, "CHUNK", 100),
        patch.object(Tokenizer, "encode", lambda self, t: encoded.append(t) or real(self, t)),
    ):
        data = load(cache, "x.jsonl", val_ratio=0.5, max_tokens=150)
    assert len(data.train_tokens) == 150 and sum(map(len, encoded)) < 500


def test_a_million_blanks_in_a_row(cache) -> None:
    """tiktoken's regex engine fails on them in one piece."""
    Path("x.txt").write_text(text := "a" + " " * 1_500_000 + "x")
    assert "".join(read(load(cache, "x.txt"))) == text


# ---- Toy data and the built-in corpus


@pytest.mark.parametrize("vocab_size", [256, 70000])
def test_toy_data_can_be_learned_down_to_ln_4(cache, vocab_size: int) -> None:
    """Each id has four successors, which are as frequent as each other."""
    options = {"tokenizer_name": None, "vocab_size": vocab_size, "max_tokens": 60_000}
    data = load(cache, use_toy_data=True, **options)
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


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "x.txt").write_text(TEXT)
    return tmp_path / "x.txt"


def start(cache: Path, path: Path, **options) -> Dataset:
    return load(cache, path, **({"tokenizer_name": "bpe", "vocab_size": 300} | options))


def go_on(run: Dataset, cache: Path, path: Path, **options) -> Dataset:
    """What `run` has when it goes on."""
    return start(cache, path, tokenizer=Tokenizer.from_state(run.tokenizer.state()), **options)


def edit(path: Path, text: str) -> None:
    """In place, and mtime is set back; at another tick of the clock of ctime."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_text(text)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


OTHER = TEXT[:-9] + "hazy dog\n"  # of the same size


@pytest.mark.parametrize(
    ("same", "act", "options"),
    [
        (True, lambda path, cache: edit(path, OTHER) or edit(path, TEXT), {}),
        (True, lambda path, cache: edit(path, TEXT), {}),
        (True, lambda path, cache: shutil.rmtree(cache), {}),
        (False, lambda path, cache: edit(path, OTHER), {}),
        (False, lambda path, cache: None, {"val_ratio": 0.3}),
        (False, lambda path, cache: None, {"max_tokens": 20}),
        (False, lambda path, cache: None, {"val": ["other.txt"]}),
    ],
)
def test_a_fingerprint_follows_from_content_and_split(cache, text, same, act, options) -> None:
    """Whatever happened, a run that goes on has the ids of the text as it is, and the fingerprint
    tells whether they are others. What has not changed is not read again."""
    Path("other.txt").write_text(MORE)
    run = start(cache, text)
    act(text, cache)
    moved = text.rename("moved.txt")
    with patch("data.corpus.train_bpe", never):
        data = go_on(run, cache, moved, **options)
        with patch("data.documents.open", never, create=True):
            again = go_on(run, cache, moved, say=never, **options)
    assert options or "".join(read(data)) == moved.read_text()
    assert data.tokenizer.fingerprint == run.tokenizer.fingerprint
    assert (data.fingerprint == run.fingerprint) == same
    assert again.description == data.description


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
    if isinstance(damage, int):
        size = len(files[damaged])
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


def test_a_tokenizer_is_not_looked_for_when_the_run_brings_it(cache, text) -> None:
    run, saved = start(cache, text), Path("Mine.Tiktoken")
    saved.write_text(format_ranks(load_tokenizer("byte").ranks))
    by_name = {"tokenizer_name": str(saved), "vocab_size": None}
    other = go_on(run, cache, text, **by_name)
    assert other.tokenizer.name == str(saved)  # that of the run is left aside
    saved.unlink()  # (or a vocabulary that would be downloaded)
    assert go_on(other, cache, text, say=never, **by_name).fingerprint == other.fingerprint
    assert len({x.fingerprint for x in (run, other, start(cache, text, vocab_size=280))}) == 3


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
    ],
)
def test_errors_of_a_disk(monkeypatch, text, function, error, code, says) -> None:
    """An error that comes from the cache says how to move it."""
    monkeypatch.setattr(function, Mock(side_effect=error))
    with pytest.raises(DataError, match=says) as raised:
        start(Path("cache"), text)
    assert raised.value.exit_code == code


# ---- Batches: every window once an epoch, a pure function of the index


@law
@given(
    st.integers(1, 160),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(0, 60),
)
def test_batches_are_those_of_a_plain_sampler(tmp_path_factory, count, B, T, seed, max_tokens):
    """Which windows, in which order, and their labels, over three epochs; and a fixed validation,
    evenly spread if it is limited, which B cuts into batches, and no more."""
    tokens = Tokens(tmp_path_factory.getbasetemp() / "ids.bin", count)
    tokens.write([np.arange(count)])
    windows = oracle.windows([*range(count)], T)
    n = len(windows)
    assume(windows)  # (What is said without one: cases/bad_input.py.)
    train = TrainBatches(tokens, B, T, seed, CPU)
    numbers = [*range(-(-3 * n // B)), 0]  # epochs end inside of batches; of its number alone
    batches = [train[number] for number in numbers]
    wanted = [oracle.training_batch(windows, B, seed, number) for number in numbers]
    assert all(map(torch.equal, chain(*batches), chain(*wanted)))
    assert train.epochs_before(n) == B and train.n_windows == n

    val = ValBatches(tokens, B, T, max_tokens, CPU)
    chosen = n if max_tokens == 0 else 1 if max_tokens < T else min(n, max_tokens // T)
    rows = [windows[i * n // chosen] for i in range(chosen)]
    parts = [oracle.shifted(rows[i : i + B]) for i in range(0, chosen, B)]
    assert len(val) == len([*val]) == len(parts)  # ends by IndexError
    assert all(map(torch.equal, chain(*val), chain(*parts)))


@pytest.mark.parametrize("damage", [[0, 1], [0, 1, 9, 3]])  # cut off; an id of none
def test_ids_are_checked_when_they_are_read(damage) -> None:
    tokens = Tokens(Path("ids.bin"), 9)
    tokens.write([np.array(damage)])
    assert tokens.read(0, 2).tolist() == [0, 1]
    with pytest.raises(DataError, match="ids.bin: it is shorter than it was, or was overwritten"):
        tokens.read(1, 4)
