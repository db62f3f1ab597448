"""Bad input costs its user one line: what is wrong and the way out. No traceback, no file touched.

Each case is some files, a command line that is run where they lie, and what the line must say: see
bad_input.py and bad_snapshots.py. Most run inside this process, which is fast; a few need one of
their own, as what libraries print on stderr by themselves shows only there.
"""

import hashlib
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from cases import bad_snapshots
from cases.bad_folders import FOLDERS
from cases.bad_input import (
    CACHES,
    ENVIRONMENTS,
    FLAGS,
    PROGRAMS,
    TEXTS,
    TOKEN_FILES,
    TOKENIZERS,
    TOOLS,
    Case,
)
from cases.bad_snapshots import PLACES, RESUMED, SCRIPTS, SNAPSHOTS
from harness.rows import row
from harness.runs import TINY, run

import train_minimal
from data import find_dataset

TRAINER = ["train_minimal.py", *TINY]
TABLES = {
    "flags": FLAGS,
    "tool": TOOLS,
    "text": TEXTS,
    "tokens": TOKEN_FILES,
    "tokenizer": TOKENIZERS,
    "snapshot": SNAPSHOTS,
    "resumed with another": RESUMED,
    "folder": FOLDERS,
    "place": PLACES,
    "environment": ENVIRONMENTS,
    "cache": CACHES,
    "script": SCRIPTS,
}
CASES = {f"{t}: {name}": case for t, table in TABLES.items() for name, case in table.items()}
ROWS = {
    "snapshot: code": row("a snapshot that"),
    **dict.fromkeys(
        (f"resumed with another: {name}" for name in RESUMED),
        row("resume with other"),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def trained(tmp_path_factory):
    folder = bad_snapshots.TRAINED = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(find_dataset.__kwdefaults__, "cache_dir", folder / "cache")
        argv = [*TINY, "--num-steps=2", f"--checkpoint-path={folder}/run.pt"]
        assert train_minimal.main(argv) == 0


@pytest.fixture
def deadline():
    """For what would wait for ever (where there is no such signal, there are no pipes either)."""

    def ring(*_):
        raise TimeoutError

    has_alarm = hasattr(signal, "SIGALRM")
    if has_alarm:
        signal.signal(signal.SIGALRM, ring)
        signal.alarm(120)
    yield
    if has_alarm:
        signal.alarm(0)


def contents(folder: Path) -> dict[str, str]:
    """What lies below `folder`: each name, and the hash of a file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "no file"
        for path in sorted(folder.rglob("*"))
    }


def prepare(case: Case, folder: Path) -> None:
    for name, content in case.files.items():
        if content is None:
            (folder / name).mkdir()
        elif isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            content(folder / name)


def check(code: object, stderr: str, case: Case) -> None:
    assert code == 2, stderr
    (line,) = stderr.splitlines()
    assert line.startswith("error: ")
    for words in case.says:
        assert re.search(words, line), line


@row("malformed input")
@pytest.mark.filterwarnings("error::UserWarning")  # outside of pytest: more lines on stderr
@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("name", [pytest.param(name, marks=ROWS.get(name, ())) for name in CASES])
def test_bad_input_costs_one_line(name, tmp_path, capfd, monkeypatch):
    case = CASES[name]
    prepare(case, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cache = (tmp_path if "cache" in case.files else bad_snapshots.TRAINED) / "cache"
    monkeypatch.setitem(find_dataset.__kwdefaults__, "cache_dir", cache)
    for variable, value in case.env.items():
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
    main, always = PROGRAMS[case.program]
    before = contents(tmp_path)
    capfd.readouterr()
    try:
        code = main([*always, *case.flags.split(" ")] if case.flags else always)
    except SystemExit as stop:  # argparse leaves that way
        code = stop.code
    check(code, capfd.readouterr().err, case)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([*TRAINER, "--d-model=15"], r"--d-model \(15\) must be divisible by --n-heads \(2\)"),
        ([*TRAINER, "--train-data=none.txt"], "--use-toy-data"),
    ],
    ids=["flags", "data"],
)
def test_bad_input_in_a_process_of_its_own(command, says, tmp_path):
    """With the exit code and the stderr that a shell sees."""
    path = ["--checkpoint-path", str(tmp_path / "run.pt")]
    result = run([sys.executable, *command, *path])
    check(result.returncode, result.stderr, Case("", "", (says,)))
    assert contents(tmp_path) == {}
