"""Bad input costs its user one line: what is wrong and the way out. No traceback, no file touched.

Each case is some files, a command line that is run where they lie, and what the line must say: see
bad_input.py, bad_folders.py and bad_snapshots.py. All run inside this process, which is fast.
"""

import os
import re
import subprocess
import sys

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
from harness.runs import ROOT, TINY, TINY_MODEL, contents, train_here

import train_minimal
from data import load_dataset
from trainer.process import OneProcess

TABLES = {
    "flags": FLAGS,
    "text": TEXTS,
    "tokens": TOKEN_FILES,
    "tokenizer": TOKENIZERS,
    "environment": ENVIRONMENTS,
    "folder": FOLDERS,
    "snapshot": SNAPSHOTS,
    "resumed with another": RESUMED,
    "place": PLACES,
    "script": SCRIPTS,
}
CASES = {f"{t}: {name}": case for t, table in TABLES.items() for name, case in table.items()}
ROWS = {
    "snapshot: code": row("a snapshot that"),
    **dict.fromkeys((f"resumed with another: {n}" for n in RESUMED), row("resume with other")),
}


@pytest.fixture(scope="module", autouse=True)
def trained(tmp_path_factory):
    folder = bad_snapshots.TRAINED = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(load_dataset.__kwdefaults__, "cache_dir", folder / "cache")
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
    monkeypatch.setitem(load_dataset.__kwdefaults__, "cache_dir", cache)
    for variable, value in case.env.items():
        monkeypatch.setenv(variable, value)
    if name.startswith("resumed") and "max-tokens" not in name:  # the flags alone decide
        for work in ("load_data_and_plan", "make_model_on_meta"):
            monkeypatch.setattr(
                f"trainer.build.{work}", lambda *given: pytest.fail("began to work")
            )
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


@pytest.mark.usefixtures("plans_memory")
def test_what_can_never_fit_ends_before_a_text_is_read(path, capsys):
    text = path.with_name("x.txt")
    text.write_bytes(b"\xff")
    flags = "--tokenizer-name=bpe --n-layers=90 --d-model=64000".split()
    assert train_here(path, f"--train-data={text}", *flags, base=TINY_MODEL) == 4
    assert "out of memory before the first step: 64.4 TiB predicted" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
def test_an_error_that_cannot_be_printed_keeps_its_exit_code():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "train_minimal.py", "--n-layers=0"]
        assert subprocess.run(command, cwd=ROOT, stderr=full, timeout=100).returncode == 2


def test_a_printed_line_clears_no_terminal(capsys):
    OneProcess(torch.device("cpu")).print0("a\x1b[2J\tb\nc\r\n")
    assert capsys.readouterr().out == "a\\x1b[2J\tb\nc\r\n\n"
