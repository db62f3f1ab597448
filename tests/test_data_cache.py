"""Encoded text is kept, and found again by what it was made from.

A damaged cache is built anew, processes that race build it once, and a builder that is killed or
fails leaves nothing that could be read. A run that goes on brings its tokenizer, and its ids keep
their meaning: a text that has changed since is encoded with the BPE that the run has.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from harness.corpora import ids, load
from harness.rows import row
from harness.runs import Forks
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import DataError, Dataset, Tokenizer
from data.tokenizer import format_ranks, train_bpe

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


def go_on(cache: Path, path: Path, run: Dataset, **options: Any) -> Dataset:
    """What `run` has when it goes on."""
    saved = Tokenizer.from_state(run.tokenizer.state())
    return start(cache, path, **({"tokenizer": saved, "fingerprint": run.fingerprint} | options))


def never(*args: Any) -> None:
    raise AssertionError(f"called with {args}")


def check(data: Dataset, text: str) -> None:
    """All of `text` lies there, as the ids of its tokenizer, behind that of a document's begin."""
    parts = [data.tokenizer.decode(ids(part)[1:]) for part in (data.train, data.val)]
    assert "".join(parts) == text
    for part, written in zip((data.train, data.val), parts, strict=True):
        assert ids(part) == [data.tokenizer.eot_id, *data.tokenizer.encode(written).tolist()]


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    st.lists(st.sampled_from(["start", "go on", "edit", "delete", *FILES]), max_size=7),
    st.booleans(),
)
@example(["go on", "delete", "go on", "start"], False)
@example(["edit", "start", "edit", "edit", "go on", "edit", "go on", "start"], False)
@example(["edit", "go on", "start", "go on", "edit", "go on"], False)
@example(["edit", "edit", "go on", "start", "go on"], False)
@example(["delete", "start", "go on"], True)
@example(["train.bin", "start", "meta.json", "go on", "tokenizer.tiktoken", "start"], False)
def test_whatever_happens_ids_are_those_of_the_run(tmp_path_factory, happens, upgraded) -> None:
    """A cache is deleted or damaged, the text is edited and edited back, other runs start on it.
    `upgraded`: another version of the word splitter trains another BPE on the same text."""
    folder = tmp_path_factory.mktemp("run")
    cache, path, texts = folder / "cache", folder / "x.txt", [TEXT, MORE, TAIL]
    path.write_text(TEXT)
    run = start(cache, path)
    name_of, last = {TEXT: run.fingerprint}, TEXT  # where the run has had its data
    for what in happens:
        if what == "edit":
            texts.append(texts.pop(0))
            path.write_text(texts[0])
        elif what == "delete":
            shutil.rmtree(cache, ignore_errors=True)
        elif what in FILES and (victim := cache / run.fingerprint / what).exists():
            content = victim.read_bytes()
            damaged = [b"", content[:-9], content + b"1\n", None][len(happens) % 4]
            victim.unlink() if damaged is None else victim.write_bytes(damaged)
        elif what == "start":
            with pytest.MonkeyPatch.context() as patch:
                if upgraded:
                    patch.setattr("data.corpus.train_bpe", lambda some, n: train_bpe(some, n - 9))
                data = start(cache, path)
            check(data, texts[0])
            assert start(cache, path, say=never).fingerprint == data.fingerprint
            if not upgraded:  # its own tokenizer, whoever was here before
                alone = start(folder / "alone", path).tokenizer
                assert data.tokenizer.fingerprint == alone.fingerprint
        elif what == "go on":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("data.corpus.train_bpe", never)
                data = go_on(cache, path, run)
            check(data, texts[0])
            assert data.tokenizer.fingerprint == run.tokenizer.fingerprint
            if not upgraded and texts[0] == last:
                assert data.fingerprint == run.fingerprint
            if not upgraded and texts[0] != TAIL:
                assert data.fingerprint == name_of.setdefault(texts[0], data.fingerprint)
            again = go_on(cache, path, data, say=never)
            assert (again.train, again.val) == (data.train, data.val)
            assert again.description == data.description
            run, last = data, texts[0]
    assert len(set(name_of.values())) == len(name_of)


def test_a_name_follows_from_content_tokenizer_and_split(cache, text, tmp_path) -> None:
    moved = tmp_path / "elsewhere.txt"
    shutil.copy(text, moved)
    run = start(cache, text)
    assert start(cache, moved, say=never).fingerprint == run.fingerprint
    other = go_on(cache, text, run, tokenizer_name="byte", vocab_size=None)
    assert other.tokenizer.name == "byte"  # that of the run is left aside
    assert go_on(cache, text, run, fingerprint=None, say=never).fingerprint == run.fingerprint
    names = {run.fingerprint, other.fingerprint, start(cache, text, vocab_size=280).fingerprint}
    text.write_text(MORE)
    for options in ({}, {"val_ratio": 0.3}, {"max_tokens": 20}, {"val": [str(moved)]}):
        names.add(go_on(cache, text, run, **options).fingerprint)
    assert len(names) == 7


def test_a_tokenizer_is_not_looked_for_when_the_run_brings_it(cache, text, tmp_path) -> None:
    """A file that has gone, or a vocabulary that would be downloaded."""
    saved = tmp_path / "mine.tiktoken"
    saved.write_text(format_ranks(start(cache, text).tokenizer.ranks))
    options = {"tokenizer_name": str(saved), "vocab_size": None}
    run = start(cache, text, **options)
    np.array(ids(run.train), np.uint16).tofile(tmp_path / "x.bin")
    from_tokens = start(cache, tmp_path / "x.bin", **options)
    saved.unlink()
    for path, before in ((text, run), (tmp_path / "x.bin", from_tokens)):
        assert go_on(cache, path, before, say=never, **options).fingerprint == before.fingerprint
        with pytest.raises(DataError, match="mine.tiktoken: no such file"):
            start(cache, path, **options)


def test_a_state_that_no_run_has_saved_is_one_line(cache, text) -> None:
    state = start(cache, text).tokenizer.state()
    changes = [{"name": None, "ranks": 3}, {"ranks": "AA== 0\n"}, {"ranks": None}, {"name": "toy"}]
    changes += [{"special_tokens": {}}, {"pattern": 3}, {"pattern": "("}]
    for bad in ({}, *(state | change for change in changes)):
        with pytest.raises(DataError, match="a tokenizer that no run has saved"):
            Tokenizer.from_state(bad)


CHILD = """
import os, signal, sys, time
sys.path.insert(0, os.getcwd())
from pathlib import Path
from data import Tokenizer, find_dataset
real, fate = Tokenizer.encode, sys.argv[3]
def encode(self, text):
    time.sleep(1)  # the others come meanwhile
    if fate == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, text)
Tokenizer.encode = encode
data = find_dataset([sys.argv[1]], None, tokenizer_name="bpe", cache_dir=Path(sys.argv[2])).load()
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
    left = [path.name for path in cache.iterdir() if path.name != ".lock"]
    assert len(left) == 1 and left[0].startswith(".tmp-")  # nothing that a reader would open
    both = children("live", "live")
    assert both.returncode == 0, both.stderr
    assert both.stdout.count("training a BPE") == both.stdout.count("encoding") == 1
    first, second = re.findall("^made (.*) (.*)$", both.stdout, re.M)
    assert first == second and sorted(os.listdir(cache)) == [".lock", first[0]]
    there, fresh = (load(where, text, tokenizer_name="bpe") for where in (cache, tmp_path / "new"))
    assert ids(fresh.train) == ids(there.train) and fresh.fingerprint == first[0]


def test_what_cannot_be_read_or_written_is_one_line(cache, text, monkeypatch) -> None:
    for function, error, says in [
        ("data.corpus.hash_files", PermissionError(13, "Permission denied", "x"), "x: Permission"),
        ("data.tokenizer.Tokenizer.encode", OSError(28, "No space left"), "cache: No space left"),
    ]:
        with monkeypatch.context() as patch, pytest.raises(DataError, match=says):
            patch.setattr(function, Mock(side_effect=error))
            load(cache, text)
        assert not cache.exists() or os.listdir(cache) == [".lock"]
