"""Encoded text is kept, and found again by what it was made from.

A damaged cache is built anew, processes that race build it once, and a builder that is killed or
fails leaves nothing that could be read. A second start that only reads: test_data_corpus.py.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness.corpora import ids, load
from harness.rows import row
from harness.runs import ROOT

from data import DataError, Tokenizer


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "x.txt").write_text("words and words\n" * 100)
    return tmp_path / "x.txt"


def test_fingerprint_follows_content_tokenizer_and_split(cache, text, tmp_path) -> None:
    moved = tmp_path / "elsewhere.txt"
    moved.write_bytes(text.read_bytes())
    first = load(cache, text).fingerprint
    assert load(cache, moved).fingerprint == first
    others = [load(cache, text, val_ratio=0.2), load(cache, text, tokenizer_name="bpe")]
    others.append(load(cache, text, max_tokens=50))
    text.write_text("words and swords\n" * 100)
    others.append(load(cache, text))
    assert len({first, *(other.fingerprint for other in others)}) == 5


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json", "tokenizer.tiktoken"])
@pytest.mark.parametrize("damage", ["cut off", "added", "removed"])
def test_a_damaged_cache_is_built_anew(cache, text, name: str, damage: str) -> None:
    data = load(cache, text)
    before = ids(data.train)
    victim = cache / data.fingerprint / name
    content = victim.read_bytes()
    changed = {"cut off": content[:-3], "added": content + b"1\n"}.get(damage)
    victim.unlink() if changed is None else victim.write_bytes(changed)
    lines: list[str] = []
    again = load(cache, text, say=lines.append)
    assert ids(again.train) == before and any("damaged" in line for line in lines)
    assert load(cache, text, say=lines.remove).fingerprint == data.fingerprint  # nothing to say


CHILD = """
import os, signal, sys, time
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
print(data.fingerprint, data.tokenizer.fingerprint)
"""


@row(
    "several processes on an empty token cache; the builder killed half-way",
    "built once, byte-identical, nothing poisonous left",
)
@pytest.mark.skipif(sys.platform == "win32", reason="the lock is POSIX's; there the rename decides")
def test_processes_that_race_build_once_also_after_one_was_killed(cache, text, tmp_path) -> None:
    def child(fate: str) -> subprocess.Popen:
        command = [sys.executable, "-c", CHILD, str(text), str(cache), fate]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    killed = child("die")
    assert killed.wait(60) == -signal.SIGKILL
    left = [path.name for path in cache.iterdir() if path.name != ".lock"]
    assert len(left) == 1 and left[0].startswith(".tmp-")  # nothing that a reader would open
    processes = [child("live") for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 2
    assert sum("training a BPE" in output for output in outputs) == 1
    assert sum("encoding" in output for output in outputs) == 1
    (names,) = {output.splitlines()[-1] for output in outputs}
    assert sorted(os.listdir(cache)) == [".lock", names.split()[0]]
    there, fresh = (load(where, text, tokenizer_name="bpe") for where in (cache, tmp_path / "new"))
    assert ids(fresh.train) == ids(there.train) and fresh.fingerprint == names.split()[0]


def test_a_failed_build_leaves_no_folder(cache, text, monkeypatch) -> None:
    def full(self: Tokenizer, text: str) -> np.ndarray:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Tokenizer, "encode", full)
    with pytest.raises(DataError, match=f"{cache}: No space left"):
        load(cache, text)
    assert os.listdir(cache) == [".lock"]
