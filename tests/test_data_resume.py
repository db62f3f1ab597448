"""A run that goes on brings its tokenizer, and its ids keep their meaning.

The text that a BPE was trained on may have changed since: then it is encoded with the BPE that the
run has, and nothing is trained. If it has not changed, the data are those of the run, to the name.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.corpora import ids, load

from data import DataError, Dataset, Tokenizer
from data import corpus as corpus_module
from data.tokenizer import format_ranks

TEXT = "the quick brown fox jumps over the lazy dog\n" * 50
MORE = "zebras buzz, zealots zigzag in a zeppelin\n" * 50  # words that TEXT has not


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "x.txt").write_text(TEXT)
    return tmp_path / "x.txt"


def start(cache: Path, path: Path, **options: Any) -> Dataset:
    return load(cache, path, **({"tokenizer_name": "bpe", "vocab_size": 300} | options))


def go_on(cache: Path, path: Path, run: Dataset, **options: Any) -> tuple[Dataset, list[str]]:
    """What `run` has when it goes on, and what was said."""
    lines: list[str] = []
    saved = Tokenizer.from_state(run.tokenizer.state())
    options = {"tokenizer": saved, "fingerprint": run.fingerprint, "say": lines.append} | options
    return start(cache, path, **options), lines


def encodes(data: Dataset, text: str) -> None:
    """All of `text` lies there, as the ids of the tokenizer of `data`."""
    eot, tokenizer = data.tokenizer.eot_id, data.tokenizer
    got = [i for i in ids(data.train) + ids(data.val) if i != eot]
    assert tokenizer.decode(got) == text
    train = tokenizer.decode([i for i in ids(data.train) if i != eot])
    assert ids(data.train) == [eot, *tokenizer.encode(train).tolist()]


def never(*args: Any) -> None:
    raise AssertionError("called")


def test_unchanged_data_are_the_same_and_come_from_the_cache(cache, path, monkeypatch) -> None:
    run = start(cache, path)
    before = sorted(cache.iterdir())
    monkeypatch.setattr(corpus_module, "train_bpe", never)
    monkeypatch.setattr(Tokenizer, "encode", never)
    for options in ({}, {"fingerprint": None}):
        again, lines = go_on(cache, path, run, **options)
        assert lines == [] and sorted(cache.iterdir()) == before
        assert (again.fingerprint, again.description) == (run.fingerprint, run.description)
        assert (again.train, again.val) == (run.train, run.val)
        assert again.tokenizer.fingerprint == run.tokenizer.fingerprint


def test_a_deleted_cache_comes_back_the_same_and_nothing_is_trained(
    cache, path, monkeypatch
) -> None:
    run = start(cache, path)
    files = {p.name: p.read_bytes() for p in (cache / run.fingerprint).iterdir()}
    shutil.rmtree(cache)
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "train_bpe", never)
        again, lines = go_on(cache, path, run)
    assert again.fingerprint == run.fingerprint and [line.split()[0] for line in lines] == [
        "encoding"
    ]
    assert {p.name: p.read_bytes() for p in (cache / run.fingerprint).iterdir()} == files
    # It is what training gives: a new run finds it there.
    assert start(cache, path).tokenizer.fingerprint == run.tokenizer.fingerprint
    assert start(cache, path, say=never).fingerprint == run.fingerprint


@pytest.mark.parametrize("name", ["train.bin", "tokenizer.tiktoken", "meta.json"])
def test_a_damaged_cache_comes_back_the_same(cache, path, name: str) -> None:
    run = start(cache, path)
    before = ids(run.train)
    victim = cache / run.fingerprint / name
    victim.write_bytes(victim.read_bytes()[:-9])
    again, lines = go_on(cache, path, run)
    assert again.fingerprint == run.fingerprint and ids(again.train) == before
    assert any("damaged" in line for line in lines)


def test_a_changed_text_is_encoded_with_the_tokenizer_of_the_run(cache, path, monkeypatch) -> None:
    run = start(cache, path)
    path.write_text(TEXT + MORE)
    monkeypatch.setattr(corpus_module, "train_bpe", never)
    changed, lines = go_on(cache, path, run)
    assert changed.tokenizer.fingerprint == run.tokenizer.fingerprint
    assert changed.fingerprint != run.fingerprint and [line.split()[0] for line in lines] == [
        "encoding"
    ]
    encodes(changed, TEXT + MORE)
    # The next time it comes from the cache, of a run that has gone on with it or of the first.
    for before in (run, changed):
        again, lines = go_on(cache, path, before)
        assert lines == [] and again.fingerprint == changed.fingerprint
    # And the text as it was is found again as it was, whatever has been in between.
    path.write_text(TEXT)
    for before in (run, changed):
        again, lines = go_on(cache, path, before)
        assert lines == [] and again.fingerprint == run.fingerprint
    encodes(again, TEXT)


@pytest.mark.parametrize("first", ["the new run", "the old run"])
def test_a_new_run_of_the_changed_text_has_a_tokenizer_of_its_own(cache, path, first) -> None:
    run = start(cache, path)
    path.write_text(TEXT + MORE)
    if first == "the old run":
        go_on(cache, path, run)
    new = start(cache, path)
    assert new.tokenizer.fingerprint != run.tokenizer.fingerprint
    changed, _ = go_on(cache, path, run)
    assert changed.tokenizer.fingerprint == run.tokenizer.fingerprint
    assert changed.fingerprint != new.fingerprint
    encodes(changed, TEXT + MORE)
    encodes(start(cache, path), TEXT + MORE)  # which is still its own
    assert start(cache, path, say=never).tokenizer.fingerprint == new.tokenizer.fingerprint


def test_another_bpe_in_the_place_of_the_run_is_not_taken_for_its_own(
    cache, path, monkeypatch
) -> None:
    """The key names the text. Another version of the word splitter trains another BPE on it."""
    run = start(cache, path)
    shutil.rmtree(cache)
    real = corpus_module.train_bpe
    monkeypatch.setattr(corpus_module, "train_bpe", lambda texts, size: real(texts, size - 9))
    other = start(cache, path)
    assert other.fingerprint == run.fingerprint and len(other.tokenizer.ranks) < 299
    again, _ = go_on(cache, path, run)
    assert again.tokenizer.fingerprint == run.tokenizer.fingerprint
    encodes(again, TEXT)


def test_a_split_of_its_own_has_a_place_of_its_own(cache, path) -> None:
    run = start(cache, path)
    path.write_text(TEXT + MORE)
    names = {
        go_on(cache, path, run, **options)[0].fingerprint
        for options in ({}, {"val_ratio": 0.3}, {"max_tokens": 20}, {"val": [str(path)]})
    }
    assert len(names) == 4


def test_a_tokenizer_of_another_name_is_left_aside(cache, path) -> None:
    run = start(cache, path)
    new, _ = go_on(cache, path, run, tokenizer_name="byte", vocab_size=None)
    assert new.tokenizer.name == "byte" and new.tokenizer.vocab_size == 257


def test_a_tokenizer_is_not_looked_for_when_the_run_brings_it(cache, path, tmp_path) -> None:
    """A file that has gone, or a vocabulary that would be downloaded."""
    saved = tmp_path / "mine.tiktoken"
    saved.write_text(format_ranks(start(cache, path).tokenizer.ranks))
    options = {"tokenizer_name": str(saved), "vocab_size": None}
    run = start(cache, path, **options)
    tokens = np.array(ids(run.train), np.uint16)
    tokens.tofile(tmp_path / "x.bin")
    from_tokens = start(cache, tmp_path / "x.bin", **options)
    saved.unlink()
    for given, before in ((path, run), (tmp_path / "x.bin", from_tokens)):
        again, lines = go_on(cache, given, before, **options)
        assert lines == [] and again.fingerprint == before.fingerprint
        with pytest.raises(DataError, match="mine.tiktoken: no such file"):
            start(cache, given, **options)


@pytest.mark.parametrize(
    "change",
    [
        {"name": None, "ranks": 3},
        {"ranks": "AA== 0\n"},
        {"ranks": None},
        {"special_tokens": {}},
        {"pattern": 3},
        {"pattern": "("},
        {"name": "toy"},
    ],
)
def test_a_state_that_no_run_has_saved_is_one_line(cache, path, change: dict) -> None:
    state = start(cache, path).tokenizer.state()
    with pytest.raises(DataError, match="a tokenizer that no run has saved"):
        Tokenizer.from_state(state | change)
    with pytest.raises(DataError, match="a tokenizer that no run has saved"):
        Tokenizer.from_state({})
