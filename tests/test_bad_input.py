"""Bad input costs its user one line: what is wrong and the way out. No traceback, no file touched.

Each case is some files, a command line that is run where they lie, and what the line must say. Most
run inside this process, which is fast; a few need one of their own, as what libraries print on
stderr by themselves shows only there.
"""

import hashlib
import io
import re
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from runs import TINY, run, snapshot

import train_ddp
import train_minimal
from data import load_dataset
from data.tokenizer import format_ranks, load_tokenizer
from scripts import generate, kept_tensors, ladder, plot_metrics

Write = bytes | Callable[[Path], object] | None  # content, or what writes it; None: a folder
Programs = dict[str, tuple[Callable[[list[str]], int], list[str]]]

# The tiny run without its toy data, for the cases that bring data of their own.
N_TOY = TINY.index("--n-layers")
TRAINER = ["train_minimal.py", *TINY]
PROGRAMS: Programs = {
    "toy": (train_minimal.main, [*TINY, "--checkpoint-path=run.pt"]),
    "text": (train_minimal.main, [*TINY[N_TOY:], "--checkpoint-path=run.pt"]),
    "ddp": (train_ddp.main, [*TINY, "--checkpoint-path=run.pt"]),
    "generate": (generate.main, ["--checkpoint-path=run.pt", "--device=cpu"]),
    "plot": (plot_metrics.main, []),
    "kept_tensors": (kept_tensors.main, []),
    "ladder": (ladder.main, []),
}


class Case(NamedTuple):
    """One mistake. `says` are regular expressions, each of which the line must match."""

    program: str
    flags: str  # words between blanks
    says: tuple[str, ...]
    files: dict[str, Write] = {}
    env: dict[str, str | None] = {}  # None: not set


# ---- Flags of the trainers


def flags(words: str, *says: str) -> Case:
    return Case("toy", words, says)


FLAGS = {
    "zero": flags("--batch-size=0", "--batch-size: must be a whole number of at least 1"),
    "negative": flags("--num-steps=-3", "--num-steps: must be a whole number"),
    "nan": flags("--lr=nan", "--lr: must be a number above 0"),
    "infinite": flags("--weight-decay=inf", "--weight-decay: must be a number"),
    "too small for a float": flags("--lr=1e-400", "--lr: must be a number above 0"),
    "text": flags("--seq-len=long", "--seq-len: must be a whole number"),
    "a float where an int belongs": flags("--num-steps=1e3", "--num-steps: must be a whole number"),
    "no value": flags("--seq-len", "--seq-len: expected one argument"),
    "empty value": flags("--seq-len=", "--seq-len: must be a whole number"),
    "ratio": flags("--val-ratio=1", "--val-ratio: must be a number above 0 and below 1"),
    "dropout": flags("--dropout=1", "--dropout: must be a number .* at most 0.99"),
    "unknown flag": flags("--learning-rate=1", "unrecognized arguments: --learning-rate=1"),
    "abbreviated flag": flags("--num-step=1", "unrecognized arguments: --num-step=1"),
    "unknown policy": flags(
        "--use-activation-checkpoint=some", "--use-activation-checkpoint: invalid choice: 'some'"
    ),
    "unknown device": flags("--device=gpu", "--device: invalid choice: 'gpu'", "cuda"),
    "heads": flags("--n-heads=3", r"--d-model \(16\) must be divisible by --n-heads \(3\)"),
    "positions": flags(
        "--max-position-embeddings=8", "--seq-len 16 is above --max-position-embeddings 8: raise"
    ),
    "layers": flags("--recompute-layers=9", "--recompute-layers must be in 0..2, not 9"),
    "min above max": flags("--min-lr=1", "--min-lr 1 is above --lr"),
    "contradiction": flags("--no-amp --amp-dtype=float16", "--no-amp"),
    "no cuda": flags("--device=cuda", "--device cuda: .* try --device cpu"),
    "window": flags("--seq-len=999", "--seq-len 999 needs 1000 .* lower --seq-len"),
    "no folder is made": flags("--seq-len=999 --checkpoint-path=new/run.pt", "--seq-len 999"),
    "window in a file": Case(
        "text",
        "--train-data=x.txt --tokenizer-name=byte --seq-len=99",
        ("--seq-len 99 needs 100 .* lower --seq-len",),
        {"x.txt": b"a few words"},
    ),
    "huge": flags("--n-layers=1000000000", "--n-layers: must be a whole number"),
    "huger": flags("--seed=1" + "0" * 400, "--seed: must be a whole number"),
    "two lines": flags("--no\nsuch", "unrecognized arguments: --no such"),
    "group": flags("--use-activation-checkpoint=mlp --recompute-group=2", "--recompute-group 2"),
    "offload of nothing": flags("--offload-activations", "--offload-activations needs"),
    "toy and text": flags("--train-data=x.txt", "--use-toy-data .* drop --train-data"),
    "toy and a tokenizer": flags("--tokenizer-name=byte", "--tokenizer-name byte"),
    "too few toy ids": flags("--vocab-size=7", "--vocab-size 7: must be 8 to"),
    "vocabulary of a fixed tokenizer": Case(
        "text",
        "--train-data=x.txt --tokenizer-name=byte --vocab-size=300",
        ("--vocab-size 300: .* byte is fixed; drop the flag",),
        {"x.txt": b"text"},
    ),
}

# ---- Text


def text(name: str, content: bytes, *says: str) -> Case:
    return Case("text", f"--tokenizer-name=byte --train-data={name}", says, {name: content})


def data(words: str, *says: str, **files: Write) -> Case:
    return Case("text", f"--tokenizer-name=byte {words}", says, files)


TEXTS = {
    "empty": text("x.txt", b"", "--train-data x.txt: the file is empty"),
    "latin-1": text("x.txt", b"caf\xe9 au lait", "x.txt: not UTF-8 at byte 3; save it as UTF-8"),
    "half a character at the end": text("x.txt", "né".encode()[:-1], "x.txt: not UTF-8 at byte 1"),
    "far inside": text("x.txt", b"a b " * 2**19 + b"\xff", "x.txt: not UTF-8 at byte 2097152"),
    "surrogate in UTF-8": text("x.txt", b"ab\xed\xa0\x80", "x.txt: not UTF-8 at byte 2"),
    "UTF-16": text("x.txt", "hello".encode("utf-16"), "x.txt: the text is UTF-16; save it as"),
    "UTF-16 without a mark": text("x.txt", "hi".encode("utf-16-le"), "x.txt: a binary file"),
    "UTF-32": text("x.txt", "hello".encode("utf-32"), "x.txt: "),
    "a program": text("x.txt", b"\x7fELF\x00\x01", "x.txt: a binary file, .*NUL at byte 4"),
    "a picture": text("x.png", b"\x89PNG\r\n", "x.png: not UTF-8 at byte 0"),
    "gzip": text("x.txt.gz", b"\x1f\x8b\x08\x00abc", "x.txt.gz: "),
    "jsonl cut off": text("x.jsonl", b'{"text": "a"}\n{"text": \n', 'x.jsonl:2: want .* "text"'),
    "jsonl with another key": text("x.jsonl", b'{"content": "a"}\n', "x.jsonl:1: want"),
    "jsonl with a number": text("x.jsonl", b'{"text": 3}\n', "x.jsonl:1: want"),
    "jsonl of lists": text("x.jsonl", b"[1]\n", "x.jsonl:1: want"),
    "jsonl without end": text("x.jsonl", b"[" * 100_000, "x.jsonl:1: want"),
    "jsonl in UTF-16": text("x.jsonl", '{"text": "a"}\n'.encode("utf-16"), "x.jsonl:1: want"),
    "jsonl with too many digits": text("x.jsonl", b"1" * 9999, "x.jsonl:1: want"),
    "jsonl of blank lines": text("x.jsonl", b"\n\n\n", "x.jsonl: .*--val-data"),
    "too few documents": text(
        "x.jsonl", b'{"text": "a"}\n' * 3, r"x.jsonl: .*\(3\).*--val-ratio.*--val-data"
    ),
    "no such file": data("--train-data=no/such.txt", "--train-data no/such.txt: no such file"),
    "no match": data("--train-data=*.none", r"--train-data \*.none: no file matches"),
    "empty name": data("--train-data=", "--train-data: an empty name"),
    "a very long name": data("--train-data=" + "n" * 5000, "nnn: File name too long"),
    "a device": data("--train-data=/dev/zero", "--train-data /dev/zero: not a regular file"),
    "an empty folder": data("--train-data=x", "--train-data x: no text or token file", x=None),
    "a folder of pictures": data(
        "--train-data=.", "--train-data .: no text or token file", **{"x.png": b"\x89PNG"}
    ),
    "a link to itself": data(
        "--train-data=x.txt",
        "--train-data x.txt: not a regular file",
        **{"x.txt": lambda path: path.symlink_to(path)},
    ),
    "no validation file": data(
        "--train-data=x.txt --val-data=y.txt",
        "--val-data y.txt: no such file",
        **{"x.txt": b"text"},
    ),
    "bad validation file": data(
        "--train-data=x.txt --val-data=y.txt",
        "y.txt: not UTF-8 at byte 1",
        **{"x.txt": b"text", "y.txt": b"a\xff"},
    ),
    "text and tokens": data(
        "--train-data x.txt y.bin",
        "--train-data, --val-data: found both text and token files",
        **{"x.txt": b"text", "y.bin": b"\1\0"},
    ),
}

# ---- Token files


def llmc(tokens: np.ndarray, magic: int, version: int, count: int | None = None) -> bytes:
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + tokens.tobytes()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


NINE = np.zeros(9, np.uint16)
TOKEN_FILES = {
    "half a token": text("x.bin", b"\x01\x00\x02", "x.bin: 3 bytes is odd"),
    "an id beyond": text("x.bin", b"\x01\x00\x01\x01", "x.bin: holds id 257, .*ends at 256; name"),
    "llm.c cut off": text("x.bin", llmc(NINE, 20240520, 1)[:-2], "x.bin: .*9 tokens.*cut off"),
    "llm.c header cut off": text("x.bin", llmc(NINE, 20240520, 1)[:100], "x.bin: .*cut off"),
    "llm.c version": text("x.bin", llmc(NINE, 20240520, 3), "x.bin: .*unknown version 3"),
    "llm.c of -9 tokens": text(
        "x.bin", llmc(NINE, 20240520, 1, count=-9), "x.bin: its header promises"
    ),
    "llm.c of no tokens": text("x.bin", llmc(NINE[:0], 20240520, 1), "--seq-len 16 needs 17"),
    "junk .npy": text("x.npy", b"junk", "x.npy: not a complete .npy file"),
    "an .npz": text("x.npy", b"PK\3\4" + bytes(60), "x.npy: not a complete .npy file"),
    ".npy cut off": text("x.npy", npy(NINE)[:-2], "x.npy: not a complete .npy file"),
    ".npy of no tokens": text("x.npy", npy(NINE[:0]), "--seq-len 16 needs 17"),
    ".npy of objects": text("x.npy", npy(np.array([{}])), "x.npy: "),
    "two dimensions": text("x.npy", npy(np.zeros((3, 3), np.uint16)), r"x.npy: holds .*\(3, 3\)"),
    "int64": text("x.npy", npy(np.zeros(9, np.int64)), "x.npy: holds int64 .*want .*uint16"),
    "big-endian": text("x.npy", npy(np.zeros(9, ">u2")), "x.npy: holds .*big-endian"),
    "tokens for a bpe": Case(
        "text",
        "--tokenizer-name=bpe --train-data=x.bin",
        ("--tokenizer-name bpe: x.bin holds ids already",),
        {"x.bin": NINE.tobytes()},
    ),
}

# ---- Tokenizers


def tokenizer(change: Callable[[str], str] | None) -> Case:
    ranks = format_ranks(load_tokenizer("byte").ranks)
    content = b"\x00\xff\n" if change is None else change(ranks).encode()
    return Case(
        "text",
        "--train-data=x.txt --tokenizer-name=bad.tiktoken",
        ("bad.tiktoken:(1|257|.* of the 256)",),
        {"x.txt": b"text", "bad.tiktoken": content},
    )


def offline(name: str, *says: str) -> Case:
    words = f"--train-data=x.txt --tokenizer-name={name}"
    nowhere = {"TIKTOKEN_CACHE_DIR": "none", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}
    return Case("text", words, says, {"x.txt": b"text"}, {**nowhere, "https_proxy": None})


TOKENIZERS = {
    "three words a line": tokenizer(lambda ranks: ranks.replace("\n", " 1 2\n", 1)),
    "no base64": tokenizer(lambda ranks: ranks + "!!!! 256\n"),
    "negative rank": tokenizer(lambda ranks: ranks + "AAA= -1\n"),
    "huge rank": tokenizer(lambda ranks: ranks + "AAA= 9999999\n"),
    "a rank twice": tokenizer(lambda ranks: ranks + "AAA= 7\n"),
    "a token twice": tokenizer(lambda ranks: ranks + "AA== 256\n"),
    "a byte missing": tokenizer(lambda ranks: ranks.split("\n", 1)[1]),
    "nothing in it": tokenizer(lambda ranks: ""),
    "a binary": tokenizer(None),
    "no such file": offline("none.tiktoken", "--tokenizer-name none.tiktoken: no such file"),
    "unknown name": offline("gpt9", "--tokenizer-name gpt9: unknown; choose bpe, byte,"),
    "toy for a text": offline("toy", "--tokenizer-name toy: toy belongs to --use-toy-data"),
    "no network": offline("cl100k_base", "--tokenizer-name cl100k_base", "TIKTOKEN_CACHE_DIR"),
}

# ---- Snapshots


def resume(content: Write, *says: str, flags: str = "--resume") -> Case:
    return Case("toy", flags, says, {"run.pt": content, "run.lock": b""})


class Bomb:
    def __reduce__(self):
        return Path.mkdir, (Path("exploded"),)


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("novel.txt", "my only copy")


def torchscript(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has deprecated it; the files are still around
        torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.zeros(1, 1)), path)


def saved(value: Any, **options: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(value, path, **options)


def changed(**parts: Any) -> Callable[[Path], None]:
    """The fixture's snapshot, with parts that no run has written."""
    return lambda path: torch.save(snapshot(TRAINED / "run.pt") | parts, path)


def changed_config(**parts: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        state = snapshot(TRAINED / "run.pt")
        torch.save(state | {"config": state["config"] | parts}, path)

    return write


def moments(path: Path) -> None:
    state = snapshot(TRAINED / "run.pt")
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(2)
    torch.save(state, path)


def half(path: Path) -> None:
    state = snapshot(TRAINED / "run.pt")
    torch.save(state | {"model": {k: v.half() for k, v in state["model"].items()}}, path)


def first_bytes(count: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes((TRAINED / "run.pt").read_bytes()[:count])


NO_SNAPSHOT = "run.pt is no snapshot, or a damaged one"
STRANGE = "run.pt .*(strange|damaged|was trained|no sequences)"
SNAPSHOTS = {
    "none to resume": Case(
        "toy", "--resume", ("--resume: there is no snapshot run.pt; start without --resume",)
    ),
    "empty": resume(b"", NO_SNAPSHOT),
    "text": resume(b"no snapshot at all", NO_SNAPSHOT),
    "random bytes": resume(bytes(range(256)) * 8, NO_SNAPSHOT),
    "cut off": resume(first_bytes(3000), NO_SNAPSHOT),
    "a folder": resume(None, "run.pt"),
    "another zip": resume(zipped, NO_SNAPSHOT),
    "torch's old format": resume(saved({}, _use_new_zipfile_serialization=False), NO_SNAPSHOT),
    "TorchScript": resume(torchscript, "run.pt"),
    "a mere model": resume(saved({"weight": torch.zeros(3)}), "run.pt is no MiniGPT snapshot"),
    "a mere tensor": resume(saved(torch.zeros(3)), "run.pt is no MiniGPT snapshot"),
    "code": resume(saved({"model": Bomb()}), "run.pt holds more than plain data: refused"),
    "step": resume(changed(step="5"), STRANGE),
    "negative step": resume(changed(step=-5), STRANGE),
    "best_val_loss": resume(changed(best_val_loss=None), STRANGE),
    "config": resume(changed(config=[]), STRANGE),
    "tokenizer": resume(changed(tokenizer="gpt2"), STRANGE),
    "data": resume(changed(data={}), STRANGE),
    "model": resume(changed(model={}), STRANGE),
    "optimizer": resume(changed(optimizer={}), STRANGE),
    "moments": resume(moments, STRANGE),
    "dtype": resume(half, STRANGE),
}


def place(words: str, *says: str, **files: Write) -> Case:
    return Case("toy", words, says, files)


PLACES = {
    "in a file": place("--checkpoint-path=x/run.pt", "--checkpoint-path: .* x/run.pt", x=b""),
    "a folder": place("--checkpoint-path=.", "--checkpoint-path: . is not a file"),
    "the best one is a folder": place(
        "", "--checkpoint-path: run.best.pt is a folder", **{"run.best.pt": None}
    ),
    "the log is a folder": place(
        "", "--checkpoint-path: run.metrics.jsonl is a folder", **{"run.metrics.jsonl": None}
    ),
    "the lock is a folder": place("", "--checkpoint-path: .*run.lock", **{"run.lock": None}),
    "another run's log": place(
        "--checkpoint-path=run.ckpt", "share its log with run.pt", **{"run.pt": changed()}
    ),
    "the old one is no snapshot": place(
        "", "--checkpoint-path: run.old.pt is there and is no snapshot", **{"run.old.pt": b"mine"}
    ),
    "the old log is a folder": place(
        "", "run.old.metrics.jsonl is a folder", **{"run.old.metrics.jsonl": None}
    ),
    "a name too long to resume": place(
        f"--resume --checkpoint-path={'n' * 300}.pt", "--resume: there is no snapshot"
    ),
    "a name too long": place(f"--checkpoint-path={'n' * 300}.pt", "--checkpoint-path: .*too long"),
    "a text": place(
        "--checkpoint-path=novel.txt",
        "--checkpoint-path: novel.txt is there and is no snapshot; name another file",
        **{"novel.txt": b"my only copy"},
    ),
    "another zip": place(
        "--checkpoint-path=novel.zip",
        "--checkpoint-path: novel.zip is there and is no snapshot; name another file",
        **{"novel.zip": zipped},
    ),
    "somebody else's weights": place(
        "",
        "--checkpoint-path: run.pt is there and is no .*snapshot; name another file",
        **{"run.pt": saved({"model": {"weight": torch.zeros(3)}})},
    ),
    "the training text": Case(
        "text",
        "--tokenizer-name=byte --train-data=x.txt --checkpoint-path=x.txt",
        ("--checkpoint-path: x.txt is there and is no snapshot",),
        {"x.txt": b"word " * 400},
    ),
    "a read-only file system": place("--checkpoint-path=/proc/x/run.pt", "--checkpoint-path: "),
}

# ---- Environments


def environment(program: str, *says: str, **variables: str | None) -> Case:
    return Case(program, "", says, {}, variables)


def rank(*says: str, **variables: str | None) -> Case:
    alone: dict[str, str | None] = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    return Case("ddp", "", says, {}, alone | variables)


ENVIRONMENTS = {
    "no torchrun": rank(
        "torchrun --nproc-per-node=2 train_ddp.py",
        RANK=None,
        LOCAL_RANK=None,
        WORLD_SIZE=None,
    ),
    "WORLD_SIZE missing": rank("torchrun", WORLD_SIZE=None),
    "RANK=abc": rank("RANK.*abc.*torchrun", RANK="abc"),
    "LOCAL_RANK is empty": rank("LOCAL_RANK.*torchrun", LOCAL_RANK=""),
    "WORLD_SIZE=0": rank("WORLD_SIZE.*0.*torchrun", WORLD_SIZE="0"),
    "RANK beyond WORLD_SIZE": rank("RANK.*5.*torchrun", RANK="5"),
    "MASTER_ADDR missing": rank("MASTER_ADDR.*torchrun", MASTER_ADDR=None),
    "MASTER_PORT=abc": rank("MASTER_PORT.*torchrun", MASTER_PORT="abc"),
    "torchrun for one process": environment("toy", "torchrun starts train_ddp.py", WORLD_SIZE="2"),
    "WORLD_SIZE=abc for one process": environment("toy", "WORLD_SIZE.*abc", WORLD_SIZE="abc"),
}

# ---- Caches, which may not be written to


CACHES = {
    "a file": Case("toy", "", ("cache", "exists|directory"), {"cache": b"my only copy"}),
}

# ---- Scripts


def writes(content: Write, *says: str, flags: str = "") -> Case:
    return Case("generate", flags, says, {"run.pt": content})


def plots(name: str, content: Write, *says: str, output: str = "x.png") -> Case:
    return Case("plot", f"{name} --output={output}", says, {name: content})


RECORD = b'{"step": 1, "train_loss": 2.5}\n'
SCRIPTS = {
    "generate: no snapshot": Case("generate", "", ("there is no snapshot run.pt",)),
    "generate: a folder": writes(None, "cannot read run.pt"),
    "generate: text": writes(b"text", NO_SNAPSHOT),
    "generate: code": writes(saved({"model": Bomb()}), "run.pt holds more than plain data"),
    "generate: a config without sense": writes(changed_config(n_heads="2"), "run.pt holds no"),
    "generate: a config with more": writes(changed_config(rope=True), "run.pt holds no model"),
    "generate: no tokenizer": writes(changed(tokenizer={}), "run.pt holds no model"),
    "generate: NaN": writes(
        lambda path: changed(
            model={
                name: torch.full_like(weight, torch.nan)
                for name, weight in snapshot(TRAINED / "run.pt")["model"].items()
            }
        )(path),
        "run.pt .*NaN",
    ),
    "generate: temperature": Case("generate", "--temperature=-1", ("--temperature: must be",)),
    "generate: seed": Case("generate", f"--seed={2**70}", ("--seed: must be",)),
    "generate: top p": Case("generate", "--top-p=2", ("--top-p: must be",)),
    "generate: prompt": writes(
        changed(), "--prompt: the toy tokenizer reads numbers", flags="--prompt=words"
    ),
    "plot: nothing": plots("x.jsonl", b"", "x.jsonl has no line with a step"),
    "plot: text": plots("x.jsonl", b"not json", "x.jsonl has no line with a step"),
    "plot: a binary": plots("x.jsonl", b"\xff\x00\xfe" * 99, "x.jsonl has no line with a step"),
    "plot: lists": plots("x.jsonl", b"[1, 2]", "x.jsonl has no line with a step"),
    "plot: no step": plots("x.jsonl", b'{"loss": 3}', "x.jsonl has no line with a step"),
    "plot: a folder": plots("x.jsonl", None, "cannot read x.jsonl"),
    "plot: no such file": Case("plot", "x.jsonl", ("cannot read x.jsonl: No such file",)),
    "plot: numbers too large": plots(
        "x.jsonl", b'{"step": 1, "train_loss": 1' + b"0" * 999 + b"}", "x.jsonl"
    ),
    "plot: no picture format": plots("x.jsonl", RECORD, "--output x.jsonl", output="x.jsonl"),
    "plot: no folder": plots("x.jsonl", RECORD, "--output no/x.png", output="no/x.png"),
    "kept_tensors: heads": Case("kept_tensors", "--d-model=50", ("--d-model, --n-heads: ",)),
    "ladder: no folder": Case("ladder", "--json=no/x.json", ("--json: there is no folder no",)),
    "ladder: a folder": Case("ladder", "--json=.", ("--json: . is a folder",)),
}

TABLES = {
    "flags": FLAGS,
    "text": TEXTS,
    "tokens": TOKEN_FILES,
    "tokenizer": TOKENIZERS,
    "snapshot": SNAPSHOTS,
    "place": PLACES,
    "environment": ENVIRONMENTS,
    "cache": CACHES,
    "script": SCRIPTS,
}
CASES = {f"{t}: {name}": case for t, table in TABLES.items() for name, case in table.items()}
TRAINED = Path()  # the folder of a finished run; set by the fixture


@pytest.fixture(scope="module", autouse=True)
def trained(tmp_path_factory):
    global TRAINED
    TRAINED = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(load_dataset.__kwdefaults__, "cache_dir", TRAINED / "cache")
        argv = [*TINY, "--num-steps=2", f"--checkpoint-path={TRAINED}/run.pt"]
        assert train_minimal.main(argv) == 0


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


@pytest.mark.filterwarnings("error::UserWarning")  # outside of pytest: more lines on stderr
@pytest.mark.parametrize("name", CASES)
def test_bad_input_costs_one_line(name, tmp_path, capfd, monkeypatch):
    case = CASES[name]
    prepare(case, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cache = (tmp_path if "cache" in case.files else TRAINED) / "cache"
    monkeypatch.setitem(load_dataset.__kwdefaults__, "cache_dir", cache)
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
        (["train_ddp.py"], "train_ddp.py: start it with torchrun"),
        (["-m", "scripts.generate", "--checkpoint-path=none.pt"], "there is no snapshot none.pt"),
    ],
    ids=["flags", "data", "ddp", "generate"],
)
def test_bad_input_in_a_process_of_its_own(command, says, tmp_path):
    """With the exit code and the stderr that a shell sees."""
    if "train_minimal.py" in command:
        command = [*command, "--checkpoint-path", str(tmp_path / "run.pt")]
    result = run([sys.executable, *command])
    check(result.returncode, result.stderr, Case("", "", (says,)))
    assert contents(tmp_path) == {}
