"""Bad input costs its user one line: what is wrong and the way out. No traceback, no file touched.

Each case is some files, a command line that is run where they lie, and what the line must say: see
bad_input.py, bad_folders.py and bad_snapshots.py. All run inside this process, which is fast.
"""

import re

import pytest
import torch
from cases import bad_snapshots
from cases.bad_folders import FOLDERS
from cases.bad_input import (
    ENVIRONMENTS,
    FLAGS,
    PROGRAMS,
    TEXTS,
    TOKEN_FILES,
    TOKENIZERS,
)
from cases.bad_snapshots import PLACES, RESUMED, SCRIPTS, SNAPSHOTS
from harness.rows import row
from harness.runs import TINY, contents

import train_minimal
from data import find_dataset

TABLES = {"flags": FLAGS, "text": TEXTS, "tokens": TOKEN_FILES, "place": PLACES}
TABLES |= {"tokenizer": TOKENIZERS, "snapshot": SNAPSHOTS, "resumed with another": RESUMED}
TABLES |= {"folder": FOLDERS, "environment": ENVIRONMENTS, "script": SCRIPTS}
CASES = {f"{t}: {name}": case for t, table in TABLES.items() for name, case in table.items()}
ROWS = {
    "snapshot: code": row("a snapshot that"),
    **dict.fromkeys((f"resumed with another: {n}" for n in RESUMED), row("resume with other")),
}


@pytest.fixture(scope="module", autouse=True)
def trained(tmp_path_factory):
    folder = bad_snapshots.TRAINED = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(find_dataset.__kwdefaults__, "cache_dir", folder / "cache")
        argv = [*TINY, "--num-steps=2", f"--checkpoint-path={folder}/run.pt"]
        assert train_minimal.main(argv) == 0


@row("malformed input")
@pytest.mark.filterwarnings("error::UserWarning")  # outside of pytest: more lines on stderr
@pytest.mark.parametrize("name", [pytest.param(name, marks=ROWS.get(name, ())) for name in CASES])
def test_bad_input_costs_one_line(name, tmp_path, capfd, monkeypatch):
    case = CASES[name]
    for file, content in case.files.items():
        if isinstance(content, bytes):
            (tmp_path / file).write_bytes(content)
        else:
            content(tmp_path / file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cache = (tmp_path if "cache" in case.files else bad_snapshots.TRAINED) / "cache"
    monkeypatch.setitem(find_dataset.__kwdefaults__, "cache_dir", cache)
    for variable, value in case.env.items():
        monkeypatch.setenv(variable, value)
    main, always = PROGRAMS[case.program]
    before = contents(tmp_path)
    capfd.readouterr()
    try:
        code = main([*always, *case.flags.split(" ")] if case.flags else always)
    except SystemExit as stop:  # argparse leaves that way
        code = stop.code
    (line,) = capfd.readouterr().err.splitlines()
    assert code == 2 and line.startswith("error: ")
    for words in case.says:
        assert re.search(words, line), line
    assert contents(tmp_path) == before


# ---- before a text is encoded


@pytest.fixture
def folder(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return tmp_path


def train_on_text(*flags: str) -> int:
    own = [word for word in TINY if word != "--use-toy-data"]
    words = ["--train-data=x.txt", "--tokenizer-name=bpe"] * ("--use-toy-data" not in flags)
    words += ["--vocab-size=300", "--max-tokens=900"]
    return train_minimal.main([*own, *words, "--checkpoint-path=new/run.pt", *flags])


@pytest.mark.usefixtures("plans_memory")
@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ("--checkpoint-path=README.md", 2, "README.md is there and is no snapshot"),
        ("--n-layers=900 --d-model=16000", 4, "weights, gradients and AdamW's state alone take"),
        pytest.param(
            "--batch-size=900000 --grad-accum-steps=3",
            4,
            "out of memory before the first step",
            marks=pytest.mark.slow,  # a search for the flags that fit: see test_knobs.py
        ),
        ("--use-activation-checkpoint=auto --memory-budget=9KiB", 2, "the smallest peak is above"),
        # Of a text that is too short for one sequence no ids stay.
        ("--seq-len=999", 2, "--seq-len 999 needs 1000 training tokens in a row"),
        ("--seq-len=99", 2, "--seq-len 99 needs 100 validation tokens in a row"),
    ],
)
def test_what_needs_no_tokens_is_refused_before_a_text_is_read(folder, capsys, flags, code, says):
    """Which may take long, and fills data/cache."""
    (folder / "README.md").write_text("mine")
    assert train_on_text(*flags.split()) == code
    out, err = capsys.readouterr()
    assert says in err and ("training a BPE" in out) == ("--seq-len" in flags)
    assert not (folder / "new").exists() and not list(folder.rglob("*.bin"))
