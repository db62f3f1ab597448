"""Bad input costs its user one line: what is wrong and the way out. No traceback, no file touched.

Each case is some files, a command line that is run where they lie, and what the line must say: see
bad_input.py and bad_snapshots.py. Most run inside this process, which is fast; a few need one of
their own, as what libraries print on stderr by themselves shows only there.
"""

import re
import sys

import pytest
import torch
from cases import bad_folders, bad_snapshots
from cases.bad_folders import FOLDERS
from cases.bad_input import (
    ENVIRONMENTS,
    FLAGS,
    PROGRAMS,
    TEXTS,
    TOKEN_FILES,
    TOKENIZERS,
    TOOLS,
    Case,
)
from cases.bad_snapshots import PLACES, RESUMED, SCRIPTS, SNAPSHOTS, altered
from harness.rows import row
from harness.runs import TINY, contents, run, snapshot

import train_minimal
from data import find_dataset

TABLES = {"flags": FLAGS, "tool": TOOLS, "text": TEXTS, "tokens": TOKEN_FILES, "place": PLACES}
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


def check(code: object, stderr: str, case: Case) -> None:
    assert code == 2, stderr
    (line,) = stderr.splitlines()
    assert line.startswith("error: ")
    for words in case.says:
        assert re.search(words, line), line


@row("malformed input")
@pytest.mark.filterwarnings("error::UserWarning")  # outside of pytest: more lines on stderr
@pytest.mark.parametrize("name", [pytest.param(name, marks=ROWS.get(name, ())) for name in CASES])
def test_bad_input_costs_one_line(name, tmp_path, capfd, monkeypatch):
    case = CASES[name]
    for file, content in case.files.items():
        if content is None:
            (tmp_path / file).mkdir()
        elif isinstance(content, bytes):
            (tmp_path / file).write_bytes(content)
        else:
            content(tmp_path / file)
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


def test_bad_input_in_a_process_of_its_own(tmp_path):
    """With the exit code and the stderr that a shell sees."""
    words = *TINY, "--train-data=none.txt", f"--checkpoint-path={tmp_path}/run.pt"
    result = run([sys.executable, "train_minimal.py", *words])
    check(result.returncode, result.stderr, Case("", "", ("--use-toy-data",)))
    assert contents(tmp_path) == {}


LIMITED = """
import resource, sys
import train_minimal
resource.setrlimit(resource.RLIMIT_AS, (6_000_000 * 1024,) * 2)
sys.exit(train_minimal.main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize(
    ("write", "says"),
    [
        (
            bad_folders.config(n_layer=2 * 10**9).files["gpt2"],
            "gpt2/config.json: n_layers is 2000000000, not a whole number of .* at most 10,000",
        ),
        (
            altered("config", "n_layers", to=2 * 10**9),
            "gpt2: n_layers is 2000000000, not a whole number",
        ),
    ],
)
def test_weights_of_an_absurd_shape_fill_no_memory(write, says, tmp_path):
    """In a process of its own, which may have 6 GB."""
    (tmp_path / "limited.py").write_text(LIMITED)
    write(tmp_path / "gpt2")
    words = ["--device=cpu", f"--init-from={tmp_path}/gpt2", f"--checkpoint-path={tmp_path}/run.pt"]
    result = run([sys.executable, f"{tmp_path}/limited.py", *words])
    check(result.returncode, result.stderr, Case("", "", ("--init-from", says)))


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
    ],
)
def test_before_a_text_is_encoded(folder, capsys, flags, code, says):
    """Which may take long, and fills data/cache: what needs no tokens is refused."""
    (folder / "README.md").write_text("mine")
    before = sorted(folder.rglob("*"))
    assert train_on_text(*flags.split()) == code
    out, err = capsys.readouterr()
    assert says in err and out == "" and sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--seq-len=999", "--seq-len 999 needs 1000 training tokens in a row"),
        ("--seq-len=99", "--seq-len 99 needs 100 validation tokens in a row"),
        ("--seq-len=901 --use-toy-data", "--seq-len 901 needs 902 training tokens in a row"),
    ],
)
def test_a_text_too_short_for_one_sequence_leaves_no_ids(folder, cache, capsys, flags, says):
    assert train_on_text(*flags.split()) == 2
    assert says in capsys.readouterr().err and not (folder / "new").exists()
    assert not list(cache.rglob("*.bin"))


def test_a_bpe_that_ends_early_gives_the_model_its_ids(folder):
    """The plan is for as many ids as were asked for; the model has those that are used."""
    assert train_on_text("--vocab-size=9000", "--num-steps=1") == 0
    assert 257 < snapshot(folder / "new/run.pt")["config"]["vocab_size"] < 400
