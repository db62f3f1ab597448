"""What is known without tokens is refused before a text is encoded, which may take long and fills
data/cache. And what a text alone can tell changes the plan."""

import pytest
from harness.runs import TINY, snapshot

import train_minimal
from data import find_dataset

pytestmark = pytest.mark.usefixtures("plans_memory")
TEXT = "the quick brown fox jumps over the lazy dog\n" * 40


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(find_dataset.__kwdefaults__, "cache_dir", tmp_path / "cache")
    (tmp_path / "x.txt").write_text(TEXT)
    return tmp_path


def train(*flags: str) -> int:
    own = [word for word in TINY if word != "--use-toy-data"]
    words = ["--train-data=x.txt", "--tokenizer-name=bpe", "--vocab-size=300", "--max-tokens=900"]
    return train_minimal.main([*own, *words, "--checkpoint-path=new/run.pt", *flags])


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ("--checkpoint-path=README.md", 2, "README.md is there and is no snapshot"),
        ("--max-position-embeddings=8", 2, "--seq-len 16 is above --max-position-embeddings 8"),
        ("--n-layers=900 --d-model=16000", 4, "weights, gradients and AdamW's state alone take"),
        pytest.param(
            "--batch-size=900000 --grad-accum-steps=3",
            4,
            "out of memory before the first step",
            marks=pytest.mark.slow,  # a search for the flags that fit: see test_knobs.py
        ),
        ("--use-activation-checkpoint=auto --memory-budget=9KiB", 2, "the smallest peak is above"),
    ],
)
def test_before_a_text_is_encoded(folder, capsys, flags, code, says):
    (folder / "README.md").write_text("mine")
    before = sorted(folder.rglob("*"))
    assert train(*flags.split()) == code
    out, err = capsys.readouterr()
    assert says in err and out == "" and sorted(folder.rglob("*")) == before


def test_a_bpe_that_ends_early_is_planned_anew(folder, capsys):
    """Its ids are known when it is trained only; the model has as many, and no more."""
    assert train("--vocab-size=9000", "--num-steps=1") == 0
    config = snapshot(folder / "new/run.pt")["config"]
    assert 257 < config["vocab_size"] < 400
    assert train(f"--vocab-size={config['vocab_size']}", "--num-steps=1") == 0
    out = capsys.readouterr().out.splitlines()
    early, exact = (line for line in out if line.endswith("(predicted)"))
    assert early == exact
    # So it may fit where as many ids as were asked for would not.
    budget = "--use-activation-checkpoint=auto", "--memory-budget=300KiB"
    assert train("--vocab-size=9000", "--num-steps=1", *budget) == 0
    assert "that fits in 270.0 KiB" in capsys.readouterr().out
