"""Mistakes in what a run leaves behind, for test_bad_input.py: a table for each subject.

Snapshots that are none, or strange; places where none can lie; and the scripts that read them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases.bad_input import Case, Write
from harness.runs import snapshot

from trainer.snapshot import save_snapshot

TRAINED = Path()  # the folder of a finished run; set by the fixture

# ---- Files


class Bomb:
    def __reduce__(self):
        return Path.mkdir, (Path("exploded"),)


def saved(value: Any) -> Callable[[Path], None]:
    return lambda path: save_snapshot(path, value)


def altered(*keys: Any, to: Any) -> Callable[[Path], None]:
    """The fixture's snapshot with another value there, or with what `to` makes of that value."""

    def write(path: Path) -> None:
        state = part = snapshot(TRAINED / "run.pt")
        *way, last = keys
        for key in way:
            part = part[key]
        part[last] = to(part.get(last)) if callable(to) else to
        save_snapshot(path, state)

    return write


GOOD = altered("step", to=lambda step: step)


DAMAGED = "run.pt is no snapshot of this trainer, or a damaged one"
PLAIN = "run.pt holds more than plain data: refused"
CODE = saved({"model": Bomb()})
BIAS = ("model", "ln_f.bias")
RESUME: dict[str, tuple[Write, str]] = {  # what lies there, and what --resume says of it
    "a folder": (Path.mkdir, "run.pt is no file"),
    "a pipe": (os.mkfifo, "run.pt is no file"),
    "a mere model": (lambda path: torch.save({"weight": torch.zeros(3)}, path), DAMAGED),
    "code": (CODE, PLAIN),
    "model": (altered("model", to={}), "run.pt holds nothing as .*weight.*damaged"),
}
SNAPSHOTS = {
    "none to resume": Case("toy", "--resume", ("no snapshot run.pt; start without --resume",)),
    "another trainer's": Case(
        "toy",
        "--resume --checkpoint-path=minigpt_fsdp.pt",
        ("no snapshot minigpt_fsdp.pt; .* name the file with",),
        {"minigpt_ddp.pt": GOOD, "minigpt_ddp.best.pt": GOOD},
    ),
    **{
        name: Case("toy", "--resume", (says,), {"run.pt": content, "run.lock": b""})
        for name, (content, says) in RESUME.items()
    },
}

# A run that goes on as another one gives a result that belongs to no command line.
OTHER = {
    "--n-layers=3": "--n-layers: .* was trained with 2, this run has 3",
    "--vocab-size=32": "--vocab-size: .* was trained with 31, this run has 32",
    "--seq-len=8 --max-position-embeddings=16": "--seq-len: .* 16, this run has 8",
    "--seed=5": "--seed: .* was trained with 1337, this run has 5; .* or another --checkpoint-path",
    "--data-seed=5": "--data-seed: .* was trained with 3, this run has 5",
    "--dropout=0": "--dropout: .* was trained with 0.1, this run has 0",
    "--max-tokens=100": "--train-data.*--init-from .*run.pt in place of --resume",
    "--batch-size=1": "--batch-size: .* 2 sequences .* --grad-accum-steps 2 fits; or --init",
}
RESUMED = {
    words: Case("toy", f"--resume {words}", (says,), {"run.pt": GOOD, "run.lock": b""})
    for words, says in OTHER.items()
}

# ---- Places

TAKEN: dict[str, tuple[str, str, dict[str, Write]]] = {  # flags, what is said, what lies there
    "in a file": ("--checkpoint-path=x/run.pt", "--checkpoint-path: .* x/run.pt", {"x": b""}),
    "a folder": (
        "--checkpoint-path=new",
        "--checkpoint-path: new is there and is no file",
        {"new": Path.mkdir},
    ),
    "the one before, to resume": (
        *("--resume --checkpoint-path=run.prev.pt", "is another run's second file; copy it"),
        {"run.prev.pt": GOOD},
    ),
    **{
        f"no name in {name}": (
            f"--checkpoint-path={name}",
            "--checkpoint-path: .*is no name of a file",
            {},
        )
        for name in (".pt", "new/", "")
    },
    "the best one, to resume": (
        *("--resume --checkpoint-path=run.best.pt", "is another run's second file; copy it"),
        {"run.best.pt": GOOD},
    ),
    "a link to nothing": (
        *("", "run.pt is there and is no file"),
        {"run.pt": lambda path: path.symlink_to("gone.pt")},
    ),
    "a folder's link to nothing": (
        *("--checkpoint-path=link/x/run.pt", "cannot write .*run.pt: link is a link to nothing"),
        {"link": lambda path: path.symlink_to("gone")},
    ),
    "a name that clears the screen": (
        *("--checkpoint-path=\x1b[2J\x9b", r": \\x1b\[2J\\x9b is there and is no file"),
        {"\x1b[2J\x9b": Path.mkdir},
    ),
    "one log for two": (
        "--checkpoint-path=run",
        "share its files with run.pt",
        {"run.pt": GOOD},
    ),
    "somebody else's weights": (
        *("", "run.pt is there and is no .*snapshot; name another file"),
        {"run.pt": lambda path: torch.save({"model": {"weight": torch.zeros(3)}}, path)},
    ),
    "a name too long": (f"--checkpoint-path={'n' * 300}.pt", "--checkpoint-path: .*too long", {}),
    "one to resume": (f"--resume --checkpoint-path={'n' * 300}.pt", "--resume: .*too long", {}),
}
PLACES = {name: Case("toy", flags, (says,), files) for name, (flags, says, files) in TAKEN.items()}

# ---- Scripts

NO_MODEL = "run.pt(:| is no snapshot of a model, or is damaged)"
GENERATE: dict[str, tuple[str, str, Write]] = {  # flags, what is said, run.pt
    "a folder": ("", "cannot read run.pt.config.json: No such", Path.mkdir),
    "code": ("", PLAIN, CODE),
    "a config without sense": ("", NO_MODEL, altered("config", "n_heads", to="2")),
    "no tokenizer": ("", "run.pt.*damaged", altered("tokenizer", to={})),
    "whole numbers": ("", "run.pt holds torch.int32", altered(*BIAS, to=torch.Tensor.int)),
    "NaN": ("", "run.pt .*NaN", altered(*BIAS, to=lambda bias: bias * torch.nan)),
    "prompt": ("--prompt=words", "--prompt: the toy tokenizer reads numbers", GOOD),
    "temperature": ("--temperature=-1", "--temperature: must be", GOOD),
    "seed": (f"--seed={2**70}", "--seed: must be", GOOD),
    "top p": ("--top-p=2", "--top-p: must be", GOOD),
}
EVALUATE: dict[str, tuple[str, str, dict[str, Write]]] = {  # ..., other files, or another run.pt
    "a folder without data": (
        "",
        "--val-data is missing: the folder run.pt",
        {"run.pt": Path.mkdir},
    ),
    "seq_len": ("--seq-len=17", "--seq-len 17: the model sees 16 tokens", {}),
    "one token": ("--val-data=x.bin", r"x.bin: 1 token\(s\)", {"x.bin": b"\1\0"}),
    "nowhere to write": ("--json=no/x.json", "--json: no/x.json cannot be written", {}),
}
LINE = b'{"step": 1, "train_loss": 2.5}\n'
PLOT: dict[str, tuple[str, str, dict[str, Write]]] = {
    "a snapshot": ("run.pt --out=x.png", "has no line with a step in it", {"run.pt": GOOD}),
    "no such file": ("x.jsonl", "x.jsonl: No such file", {}),
    "no picture format": ("x.jsonl --out=x.jsonl", "--out x.jsonl", {"x.jsonl": LINE}),
    "no folder": (
        "x.jsonl --out=no/x.png",
        "--out: no/x.png cannot be written: is there such a folder",
        {"x.jsonl": LINE},
    ),
    **{
        name: ("x.jsonl --out=x.png", says, {"x.jsonl": content})
        for name, says, content in (
            ("text", "x.jsonl has no line with a step", b"not json"),
            ("no step", "x.jsonl has no line with a step", b'{"loss": 3}'),
        )
    },
}
SCRIPTS = {
    "generate: no snapshot": Case(
        "generate", "", ("there is no snapshot .*run.pt; a trainer writes one",)
    ),
    **{  # named as a word of its own, before or behind flags
        f"{tool}: {flags}": Case(tool, flags, ("no snapshot and no folder other.pt",))
        for tool, flags in (
            ("generate", "other.pt --seed=1"),
            ("evaluate", "--seq-len=1 other.pt --batch-size=2"),
            ("export_hf", "--out=x other.pt"),
        )
    },
    "tables: no folder": Case(
        "tables", "long --json=no/x.json", ("--json: no/x.json cannot be written",)
    ),
    **{
        f"generate: {name}": Case("generate", flags, (says,), {"run.pt": content})
        for name, (flags, says, content) in GENERATE.items()
    },
    **{
        f"evaluate: {name}": Case("evaluate", flags, (says,), {"run.pt": GOOD, **files})
        for name, (flags, says, files) in EVALUATE.items()
    },
    **{
        f"plot: {name}": Case("plot", flags, (says,), files)
        for name, (flags, says, files) in PLOT.items()
    },
}
