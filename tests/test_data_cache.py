"""Encoded text is kept, and found again by what it was made from.

A damaged cache is built anew, processes that race build it once, and a builder that is killed or
fails leaves nothing that could be read. A second start that only reads: test_data_corpus.py.
"""

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness.corpora import ids, load
from harness.runs import ROOT

from data import DataError, Tokenizer


def test_fingerprint_follows_content_tokenizer_and_split(cache, tmp_path) -> None:
    path, moved = tmp_path / "x.txt", tmp_path / "elsewhere.txt"
    for p in (path, moved):
        p.write_text("words and words\n" * 100)
    first = load(cache, path).fingerprint
    assert load(cache, moved).fingerprint == first
    others = [load(cache, path, val_ratio=0.2), load(cache, path, tokenizer_name="bpe")]
    path.write_text("words and swords\n" * 100)
    others.append(load(cache, path))
    assert len({first, *(other.fingerprint for other in others)}) == 4


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json", "tokenizer.tiktoken"])
@pytest.mark.parametrize("damage", ["cut off", "one bit", "empty", "removed"])
def test_a_damaged_cache_is_built_anew(cache, tmp_path, name: str, damage: str) -> None:
    (tmp_path / "x.txt").write_text("words and words\n" * 100)
    data = load(cache, tmp_path / "x.txt")
    before = ids(data.train)
    victim = cache / data.fingerprint / name
    content = bytearray(victim.read_bytes())
    if damage == "cut off":
        victim.write_bytes(content[:-1] if name != "meta.json" else content[:-3])
    elif damage == "one bit":
        digits = re.search(rb'"train_tokens": \d*(\d)', content)  # still a number
        content[digits.start(1) if digits else len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif damage == "empty":
        victim.write_bytes(b"")
    else:
        victim.unlink()
    lines: list[str] = []
    again = load(cache, tmp_path / "x.txt", say=lines.append)
    assert ids(again.train) == before and any("damaged" in line for line in lines)


CHILD = """
import os, signal, sys
from pathlib import Path
from data import Tokenizer, load_dataset
real, calls = Tokenizer.encode, []
def encode(self, text):
    calls.append(text)
    if sys.argv[3] == "die" and len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, text)
Tokenizer.encode = encode
data = load_dataset([sys.argv[1]], None, tokenizer_name="bpe", cache_dir=Path(sys.argv[2]))
print(data.fingerprint, data.tokenizer.fingerprint)
"""


def child(text: Path, cache: Path, fate: str) -> subprocess.Popen:
    command = [sys.executable, "-c", CHILD, str(text), str(cache), fate]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def long_text(tmp_path) -> Path:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 8))) for _ in range(20_000)]
    (tmp_path / "long.txt").write_text(" ".join(rng.choices(words, k=1_000_000)))
    return tmp_path / "long.txt"


@pytest.mark.skipif(sys.platform == "win32", reason="the lock is POSIX's; there the rename decides")
def test_processes_that_race_build_once(cache, long_text) -> None:
    processes = [child(long_text, cache, "live") for _ in range(4)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert sum("training a BPE" in output for output in outputs) == 1
    assert sum("encoding" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert len([path for path in cache.iterdir() if path.name != ".lock"]) == 1


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_builder_leaves_nothing_poisonous(cache, long_text, tmp_path) -> None:
    killed = child(long_text, cache, "die")
    assert killed.wait(60) == -signal.SIGKILL
    left = [path.name for path in cache.iterdir() if path.name != ".lock"]
    assert len(left) == 1 and left[0].startswith(".tmp-")  # nothing that a reader would open
    data = load(cache, long_text, tokenizer_name="bpe")
    assert sorted(os.listdir(cache)) == [".lock", data.fingerprint]
    fresh = load(tmp_path / "fresh", long_text, tokenizer_name="bpe")
    assert ids(fresh.train) == ids(data.train) and fresh.fingerprint == data.fingerprint


def test_a_failed_build_leaves_no_folder(cache, tmp_path, monkeypatch) -> None:
    (tmp_path / "x.txt").write_text("words\n" * 100)

    def full(self: Tokenizer, text: str) -> np.ndarray:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Tokenizer, "encode", full)
    with pytest.raises(DataError, match=f"{cache}: No space left"):
        load(cache, tmp_path / "x.txt")
    assert os.listdir(cache) == [".lock"]
