"""Mistakes in what a run leaves behind, for test_bad_input.py: a table for each subject.

Snapshots that are none, or strange; places where none can lie; and the scripts that read them.
"""

import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases.bad_input import Case, Write
from harness.runs import snapshot

TRAINED = Path()  # the folder of a finished run; set by the fixture

# ---- Snapshots


def resume(content: Write, *says: str, flags: str = "--resume") -> Case:
    return Case("toy", flags, says, {"run.pt": content, "run.lock": b""})


class Bomb:
    def __reduce__(self):
        return Path.mkdir, (Path("exploded"),)


def pipe(path: Path) -> None:
    os.mkfifo(path)


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


def no_dictionary(path: Path) -> None:
    state = snapshot(TRAINED / "run.pt")
    state["optimizer"]["state"] = [state["optimizer"]["state"][0]]
    torch.save(state, path)


def sparse(path: Path) -> None:
    state = snapshot(TRAINED / "run.pt")
    moments = state["optimizer"]["state"][0]
    moments["exp_avg"] = moments["exp_avg"].to_sparse()
    torch.save(state, path)


def strange_weight(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        state = snapshot(TRAINED / "run.pt")
        state["model"]["ln_f.bias"] = make(state["model"]["ln_f.bias"])
        torch.save(state, path)

    return write


def groups(path: Path) -> None:
    state = snapshot(TRAINED / "run.pt")
    state["optimizer"]["param_groups"][0]["params"].reverse()
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
    "moments in a list": resume(no_dictionary, STRANGE),
    "sparse moments": resume(sparse, STRANGE),
    "groups": resume(groups, STRANGE),
    "dtype": resume(half, STRANGE),
    "record": resume(changed(record={"lr": "y"}), "run.pt .*strange record"),
    "record in a list": resume(changed(record=[1]), "run.pt .*strange record"),
    "another trainer's": Case(
        "toy",
        "--resume --checkpoint-path=minigpt_fsdp.pt",
        ("no snapshot minigpt_fsdp.pt; .* name minigpt_ddp.pt, of another trainer",),
        {"minigpt_ddp.pt": changed()},
    ),
}


def other(words: str, *says: str) -> Case:
    """A run that goes on as another one gives a result that belongs to no command line."""
    return resume(changed(), *says, flags=f"--resume {words}")


RESUMED = {
    "layers": other("--n-layers=3", "--n-layers: .* was trained with 2, this run has 3"),
    "channels": other("--d-model=32", "--d-model: .* was trained with 16, this run has 32"),
    "vocabulary": other("--vocab-size=32", "--vocab-size: .* was trained with 31, this run has 32"),
    "length": other("--seq-len=8 --max-position-embeddings=16", "--seq-len: .* 16, this run has 8"),
    "seed": other(
        "--seed=5", "--seed: .* was trained with 1337, this run has 5.*--init-from .*run.pt in"
    ),
    "data seed": other("--data-seed=5", "--data-seed: .* was trained with 3, this run has 5"),
    "dropout": other("--dropout=0", "--dropout: .* was trained with 0.1, this run has 0"),
    "data": other("--max-tokens=100", "--train-data.*--init-from .*run.pt in place of --resume"),
    "batch": other(
        "--batch-size=1", "--batch-size: .* 2 sequences .* --grad-accum-steps 2 fits; or --init"
    ),
}


def place(words: str, *says: str, **files: Write) -> Case:
    return Case("toy", words, says, files)


PLACES = {
    "in a file": place("--checkpoint-path=x/run.pt", "--checkpoint-path: .* x/run.pt", x=b""),
    "a folder": place("--checkpoint-path=.", "--checkpoint-path: . is not a file"),
    "the best one is a folder": place(
        "", "--checkpoint-path: run.best.pt is not a file", **{"run.best.pt": None}
    ),
    "the log is a folder": place(
        "", "--checkpoint-path: run.metrics.jsonl is not a file", **{"run.metrics.jsonl": None}
    ),
    "the lock is a folder": place("", "--checkpoint-path: .*run.lock", **{"run.lock": None}),
    "somebody's lock": place("", "run.lock is there and is no lock", **{"run.lock": b"poetry's"}),
    "a lock that leads elsewhere": place(
        "", "run.lock is a link", mine=b"work", **{"run.lock": lambda p: p.symlink_to("mine")}
    ),
    "somebody's log": place(
        "", "run.metrics.jsonl is there and is no log", **{"run.metrics.jsonl": b'{"step": 1}\n'}
    ),
    "somebody's log, to be gone on with": place(
        "--resume",
        "run.metrics.jsonl is there and is no log",
        **{"run.pt": changed(), "run.metrics.jsonl": b"[]"},
    ),
    "a pipe": place("", "run.pt is not a file", **{"run.pt": pipe}),
    "a pipe to resume": place("--resume", "run.pt is not a file", **{"run.pt": pipe}),
    "a pipe for the log": place(
        "", "run.metrics.jsonl is not a file", **{"run.metrics.jsonl": pipe}
    ),
    "a pipe for the lock": place("", "run.lock is there and is no", **{"run.lock": pipe}),
    "another run's lock": place(
        "--checkpoint-path=r2.lock", "r2.lock is the name of another", **{"r2.lock": changed()}
    ),
    "another run's log by name": place(
        "--checkpoint-path=r2.metrics.jsonl", "r2.metrics.jsonl is the name of another run's"
    ),
    "the one before": place(
        "--checkpoint-path=run.prev.pt",
        "is the name of another run's second file",
        **{"run.prev.pt": changed()},
    ),
    "the best one": place(
        "--checkpoint-path=run.best.pt",
        "is the name of another run's second file",
        **{"run.best.pt": changed()},
    ),
    "no room for a date": place(f"--checkpoint-path={'n' * 230}.pt", "too long"),
    "the one before, to resume": place(
        "--resume --checkpoint-path=run.prev.pt",
        "run.prev.pt is the name of another run's .*copy it",
        **{"run.prev.pt": changed()},
    ),
    "a best one whose copy is another's": place(
        "--resume --checkpoint-path=run.best.pt",
        "--resume: run-best.pt is there and does not go on from run.best.pt; copy that",
        **{"run.best.pt": changed(), "run-best.pt": changed(run="other")},
    ),
    "another run's log": place(
        "--checkpoint-path=run.ckpt", "share its log with run.pt", **{"run.pt": changed()}
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

# ---- Scripts


def writes(content: Write, *says: str, flags: str = "") -> Case:
    return Case("generate", flags, says, {"run.pt": content})


def plots(name: str, content: Write, *says: str, output: str = "x.png") -> Case:
    return Case("plot", f"{name} --output={output}", says, {name: content})


def nan(path: Path) -> None:
    weights = snapshot(TRAINED / "run.pt")["model"]
    changed(model={name: torch.full_like(w, torch.nan) for name, w in weights.items()})(path)


def evaluates(words: str, *says: str, content: Write = None, **files: Write) -> Case:
    """The fixture's snapshot, unless there is other `content`; files: x_txt is x.txt."""
    named = {name.replace("_", "."): written for name, written in files.items()}
    return Case("evaluate", words, says, {"run.pt": content or changed(), **named})


RECORD = b'{"step": 1, "train_loss": 2.5}\n'
SCRIPTS = {
    "generate: no snapshot": Case("generate", "", ("there is no snapshot and no folder run.pt",)),
    "generate: a folder": writes(None, "run.pt is no folder of a transformers model"),
    "generate: text": writes(b"text", NO_SNAPSHOT),
    "generate: code": writes(saved({"model": Bomb()}), "run.pt holds more than plain data"),
    "generate: a config without sense": writes(changed_config(n_heads="2"), "run.pt holds no"),
    "generate: a config with more": writes(changed_config(rope=True), "run.pt holds no model"),
    "generate: no tokenizer": writes(changed(tokenizer={}), "run.pt holds no model"),
    "generate: sparse weights": writes(strange_weight(torch.Tensor.to_sparse), "strange"),
    "generate: weights of no memory": writes(strange_weight(lambda w: w.to("meta")), "damaged"),
    "generate: whole numbers": writes(strange_weight(torch.Tensor.int), "run.pt holds ln_f.bias"),
    "generate: giant sizes": writes(changed_config(d_model=2**40, d_ff=2**61), "no model can have"),
    "generate: sizes with a point": writes(changed_config(d_ff=64.0), "no model can have"),
    "generate: NaN": writes(nan, "run.pt .*NaN"),
    "generate: temperature": Case("generate", "--temperature=-1", ("--temperature: must be",)),
    "generate: seed": Case("generate", f"--seed={2**70}", ("--seed: must be",)),
    "generate: top p": Case("generate", "--top-p=2", ("--top-p: must be",)),
    "generate: prompt": writes(
        changed(), "--prompt: the toy tokenizer reads numbers", flags="--prompt=words"
    ),
    "evaluate: no snapshot": Case("evaluate", "", ("there is no snapshot and no folder run.pt",)),
    "evaluate: a name too long": Case("evaluate", f"--checkpoint-path={'n' * 300}", ("too long",)),
    "evaluate: text": evaluates("", NO_SNAPSHOT, content=b"text"),
    "evaluate: NaN": evaluates("", "run.pt .*NaN", content=nan),
    "evaluate: strange flags": evaluates(
        "", "run.pt is no MiniGPT snapshot .*--seq-len", content=changed(args={"seq_len": "many"})
    ),
    "evaluate: a folder without data": Case(
        "evaluate", "", ("--val-data is missing: the folder run.pt",), {"run.pt": None}
    ),
    "evaluate: a folder that is no model": Case(
        "evaluate", "--val-data=x.bin", ("run.pt is no folder of a",), {"run.pt": None}
    ),
    "evaluate: stride": evaluates("--stride=17", "--stride 17: a window has 16 tokens"),
    "evaluate: no stride": evaluates("--stride=0", "--stride: must be a whole number of at least"),
    "evaluate: seq_len": evaluates("--seq-len=17", "--seq-len 17: the model sees 16 tokens"),
    "evaluate: no such data": evaluates("--val-data=x.txt", "--val-data x.txt: no such file"),
    "evaluate: data of a long name": evaluates(f"--val-data={'n' * 5000}", "File name too long"),
    "evaluate: empty data": evaluates("--val-data=x.bin", "x.bin: the file is empty", x_bin=b""),
    "evaluate: one token": evaluates("--val-data=x.bin", r"x.bin: 1 token\(s\)", x_bin=b"\1\0"),
    "evaluate: half a token": evaluates("--val-data=x.bin", "x.bin: 3 bytes is", x_bin=b"\1\0\2"),
    "evaluate: an id beyond": evaluates(
        "--val-data=x.bin", "x.bin: holds id 31, but the model's end at 30", x_bin=b"\x1e\0\x1f\0"
    ),
    "evaluate: text for numbers": evaluates(
        "--val-data=x.txt", "--val-data x.txt: .*numbers, not text", x_txt=b"1 2 3"
    ),
    "evaluate: a PDF": evaluates("--val-data=x.txt", "x.txt: a PDF, not text", x_txt=b"%PDF-1.4"),
    "evaluate: nowhere to write": evaluates("--json=no/x.json", "--json: there is no folder no"),
    "generate: without .pt": Case(
        "generate", "--checkpoint-path=run", ("; but there is run.pt$",), {"run.pt": b""}
    ),
    "plot: a snapshot": Case(
        "plot",
        "run.pt --output=x.png",
        ("its run's log is run.metrics.jsonl",),
        {"run.pt": changed(), "run.metrics.jsonl": RECORD},
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
