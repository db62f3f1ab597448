"""Mistakes in flags, text, token files, tokenizers and environments, for test_bad_input.py.

What a case is, and a table for each subject. Those in snapshots and places: bad_snapshots.py.
"""

import io
import os
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness.runs import TINY, TINY_MODEL

import train_ddp
import train_fsdp
import train_minimal
import train_sp
from data.tokenizer import format_ranks, load_tokenizer
from scripts import (
    benchmark,
    evaluate,
    export_hf,
    generate,
    kept_tensors,
    lesson,
    memory_page,
    memory_timeline,
    plan_memory,
    plot_metrics,
)
from studies import tables

Write = bytes | Callable[[Path], object]  # content, or what writes it
Programs = dict[str, tuple[Callable[[list[str]], int], list[str]]]

PROGRAMS: Programs = {
    "toy": (train_minimal.main, [*TINY, "--checkpoint-path=run.pt"]),
    "text": (train_minimal.main, [*TINY_MODEL, "--checkpoint-path=run.pt"]),
    "built-in": (train_minimal.main, ["--checkpoint-path=run.pt", "--device=cpu"]),
    "ddp": (train_ddp.main, [*TINY, "--checkpoint-path=run.pt"]),
    "fsdp": (train_fsdp.main, [*TINY, "--checkpoint-path=run.pt"]),
    "sp": (train_sp.main, [*TINY, "--checkpoint-path=run.pt"]),
    "generate": (generate.main, ["--checkpoint-path=run.pt", "--device=cpu"]),
    "export_hf": (export_hf.main, ["--checkpoint-path=run.pt"]),
    "evaluate": (evaluate.main, ["--checkpoint-path=run.pt", "--device=cpu"]),
    "plot": (plot_metrics.main, []),
    "plan_memory": (plan_memory.main, []),
    "memory_page": (memory_page.main, []),
    "memory_timeline": (memory_timeline.main, []),
    "benchmark": (benchmark.main, ["--device=cpu"]),
    "kept_tensors": (kept_tensors.main, []),
    "lesson": (lesson.main, []),
    "tables": (tables.main, []),
}


class Case(NamedTuple):
    """One mistake. `says` are regular expressions, each of which the line must match."""

    program: str
    flags: str  # words between blanks
    says: tuple[str, ...]
    files: dict[str, Write] = {}
    env: dict[str, str] = {}


# ---- Flags


AUTO = "--use-activation-checkpoint=auto"
REFUSED = {  # by whom; words: what the line must say
    "toy": {
        f"{AUTO} --memory-budget=8": "--memory-budget: must be bytes with a unit",
        f"{AUTO} --memory-budget=0.1b": "as in 8GiB, not '0.1b'",
        f"{AUTO} --memory-budget={'9' * 400}b": f"8GiB, not '{'9' * 40}'",
        "--batch-size=0": "--batch-size: must be a whole number of at least 1",
        "--weight-decay=inf": "--weight-decay: must be a number",
        "--lr=1e-400": "--lr: must be a number above 0",
        "--seq-len=long": "--seq-len: must be a whole number",
        "--num-tokens=1M": "--num-steps and --num-tokens: give only one",
        "--num-tokens=0": "--num-tokens: must be a whole number of tokens",
        "--num-tokens=1e99": "--num-tokens: must be a whole number of tokens",
        "--num-tokens=1X": "--num-tokens: must be .* as in 300M, .* not '1X'",
        "--seq-len": "--seq-len: expected one argument",
        "--val-ratio=1": "--val-ratio: must be a number above 0 and below 1",
        "--dropout=1": "--dropout: must be a number .* at most 0.99",
        "--num-step=1": "unrecognized arguments: --num-step=1; did you mean --num-steps?",
        "--no-amp --amp-dtype=auto": "--no-amp and --amp-dtype: give only one",
        "stray": "stray; .*--help lists all flags",
        "--use-activation-checkpoint=some": "-checkpoint: must be auto or POLICY.*none, cheap, sel",
        "--device=gpu": "--device: invalid choice: 'gpu'.*cuda",
        "--n-heads=3": r"--d-model \(16\) must be divisible by --n-heads \(3\)",
        "--max-position-embeddings=8": "--seq-len 16 is above --max-position-embeddings 8: raise",
        "--use-activation-checkpoint=mlp:3": "--use-activation-checkpoint must be POLICY.* in 0..2",
        "--use-activation-checkpoint=mlp/2": "must be auto or POLICY.* only blocks that are full",
        "--use-activation-checkpoint=": "must be auto or POLICY",
        "--use-activation-checkpoint=FULL": "must be auto or POLICY",
        "--use-activation-checkpoint=mlp:-1": "must be auto or POLICY",
        "--use-activation-checkpoint=mlp:1,some": "must be auto or POLICY",
        "--use-activation-checkpoint=full/0": "must be auto or POLICY",
        "--use-activation-checkpoint=full+nested": "must be auto or POLICY",
        "--use-activation-checkpoint=full/1+nested": "must be auto or POLICY",
        "--use-activation-checkpoint=mlp/2+nested": "must be auto or POLICY",
        "--use-activation-checkpoint=full/2+offload+nested": "must be auto or POLICY",
        "--use-activation-checkpoint=full+offloads": "must be auto or POLICY",
        "--use-activation-checkpoint=none:2": "must be auto or POLICY",
        "--use-activation-checkpoint=none:1,mlp": "must be auto or POLICY",
        "--use-activation-checkpoint=none+offload": "must be auto or POLICY",
        "--use-activation-checkpoint=mlp:1,cheap,full": "must be auto or POLICY",
        "--use-activation-checkpoint=mlp,cheap": "not 'mlp,cheap': N and K are whole numbers, and",
        "--use-activation-checkpoint=auto:3": "must be auto or .* not 'auto:3': a POLICY is one of",
        "--min-lr=1": "--min-lr 1 is above --lr",
        "--mlp-chunks=2 --use-activation-checkpoint --compile": "--mlp-chunks 2: .*; --no-compile",
        "--device=cuda": "--device cuda: .* try --device cpu",
        "--seq-len=999 --checkpoint-path=new/run.pt": "--seq-len 999 needs .* a lower --seq-len",
        "--seed=1" + "0" * 400: "--seed: must be a whole number",
        "--no\nsuch": "unrecognized arguments: --no such",
        "--train-data=x.txt": "--use-toy-data .* drop --train-data",
        "--tokenizer-name=byte": "--use-toy-data .* and --tokenizer-name",
        "--text-key=x": "--use-toy-data .* --text-key and --tok",
        "--vocab-size=7": "--vocab-size 7: must be .* 8 to",
    },
    "plan_memory": {
        "--fsdp --nproc-per-node=2 --no-amp --gather-dtype=bfloat16": "--gather-dtype bfloat16: ",
        "--json=nowhere/plan.json": "--json: nowhere/plan.json cannot be written",
        "--json=run.pt/plan.json": "--json: run.pt/plan.json cannot be written",
        "--fsdp": "--fsdp: over how many processes",
        "--sp": "--sp: over how many processes",
        "--sp --fsdp --nproc-per-node=2": "--fsdp and --sp: leave --fsdp out",
        "--sp --nproc-per-node=2 --n-heads=1 --compile": "--n-heads 1: .* or train_fsdp.py",
        "--sp --nproc-per-node=2 --compile": "--compile: train_fsdp.py can",
        "--sp --nproc-per-node=2 --use-activation-checkpoint=full/2": "full/2: train_sp.py gathers",
        "--fsdp --nproc-per-node=2 --use-activation-checkpoint=full/2": "full/2: train_fsdp.py",
        "--fsdp --nproc-per-node=2 --compress-gradients": "--compress-gradients: train_ddp.py",
        "--reproducible-sums --nproc-per-node=6": "--nproc-per-node 6: .* of two, such as 4; --no",
        "--reproducible-sums --compress-gradients": "neither .* nor --compress-gradients can have",
        "--card=Voodoo2": "--card: .*Voodoo2.: --device cuda --memory-budget 16GiB tells what fits",
        "--card=M1 --amp-dtype=float16": "--amp-dtype float16",
        "--card=this-machine --device=cuda": "--device cuda: .* finds none",
        "--card=this-machine --nproc-per-node=2": "--card this-machine .* leave out --nproc",
        "--all-knobs": "--all-knobs compares times: name a --card, or --card this-machine",
        "--longest-sequence --device=cuda": "--longest-sequence: within what",
        "--longest-sequence --all-knobs --card=H100": "--all-knobs and --longest-sequence: ask one",
    },
    "benchmark": {
        "--policies none half": "--policies: must be .*'half'",
        "--card=H100": "--card: leave it out; --policies names what is measured, on this machine",
        "--memory-budget=8GiB": "--memory-budget: leave it out",
        "--use-activation-checkpoint": "--policies names what is measured",
        "--tokenizer-name=none.tiktoken": "cannot read none.tiktoken: No such file",
    },
    "memory_page": {"--out=.": "--out: . cannot be written", "--card=H1000": "--card: .*'H1000'"},
    "memory_timeline": {
        "--out=.": "--out: . cannot be written",
        "--policies=half": "--policies: .*'half'",
    },
    "plot": {
        "x --output=y.png": "unrecognized arguments: --output=y.png; did you mean --out",
    },
    "lesson": {
        "13": "N: must be a whole number of at least 1 and at most 12, not '13'",
        "4 many": "the answer must be a number, as 12.3 BTC, not 'many'",
        "4 24 12": "the answer must be a number",
        "9 3/0": "the answer must be a number",
        "6 e": "answer one of a, b, c, d, not 'e'",
        "10 auto": "answer one of none, cheap, .*, not 'auto'",
        "--measure": "--measure needs the number of an exercise",
        "4 --mesure": "unrecognized arguments: --mesure; did you mean --measure",
    },
}
FLAGS = {
    f"{tool}: {words[:80]}": Case(tool, words, (says,))
    for tool, refused in REFUSED.items()
    for words, says in refused.items()
}

# ---- Text


X: dict[str, Write] = {"x.txt": b"text"}


def data(words: str, says: str, files: dict[str, Write] = X) -> Case:
    words += " --tokenizer-name=byte" * ("--tok" not in words)
    return Case("text", words, (says,), files)


def text(name: str, content: bytes, says: str) -> Case:
    return data(f"--train-data={name}", says, {name: content})


TEXTS = {
    "CP1252": text("-b.txt", b"caf\xe9", "-b.txt is no UTF-8 text"),
    "a PDF": text("a.pdf", b"%PDF-1.5\n%\xd0\xd4\xc5\xd8\n", "a.pdf is no UTF-8 text"),
    "UTF-16": text(
        "b.txt", "hi".encode("utf-16-le"), "b.txt: a binary file, or UTF-16; name files"
    ),
    # What needs no tokens is told before a text is read, which may take long.
    "a name, and no text": data(
        "--train-data=x.txt --checkpoint-path=README.md",
        "README.md is there and is no snapshot",
        {"x.txt": b"\xff", "README.md": b"mine"},
    ),
    "a budget, and no text": data(
        f"--train-data=x.txt {AUTO} --memory-budget=9KiB",
        "the smallest peak is",
        {"x.txt": b"\xff"},
    ),
    "short": text(
        "x.txt", b"a few words\n" * 5, "--seq-len 16 needs 17 validation tokens, the data have 6: "
    ),
    "empty": text("x.txt", b"", "--seq-len 16 needs 17 training tokens"),
    "half a character at the end": text("x.txt", "né".encode()[:-1], "x.txt is no UTF-8 text"),
    "far inside": text("x.txt", b"a b " * 2**19 + b"\xff", "x.txt is no UTF-8 text"),
    "a program": text("x.txt", b"\x7fELF\x00\x01", "x.txt: a binary file, or UTF-16"),
    "jsonl cut off": text("x.jsonl", b'{"text": "a"}\n{"text": \n', 'x.jsonl:2: want .* "text"'),
    "an array": text(
        "x.json", b'[\n {"id": 1, "text": "a"},\n {"id": 2}]', "x.json is a JSON array: write each"
    ),
    "jsonl with a number": text("x.jsonl", b'{"text": 3}\n', 'x.jsonl:1: want .*string "text"'),
    "jsonl with other keys": text(
        "x.jsonl", b'{"prompt": "a"}\n', r"string \"text\" .--text-key names .*, not .*prompt"
    ),
    "jsonl without the key": data(
        "--train-data=x.jsonl --text-key=prompt", 'string "prompt"', {"x.jsonl": b'{"text": "a"}'}
    ),
    "jsonl without end": text("x.jsonl", b"[" * 100_000, "x.jsonl:1: want"),
    "jsonl in UTF-16": text("x.jsonl", '{"text": "a"}\n'.encode("utf-16"), "x.jsonl:1: want"),
    "jsonl with too many digits": text("x.jsonl", b"1" * 9999, "x.jsonl:1: want"),
    "jsonl of blank lines": text("x.jsonl", b"\n\n\n", "17 training tokens, the data have 0: "),
    "no such file": data("--train-data=no/such.txt", "--train-data no/such.txt: no such file"),
    "empty name": data("--train-data=", "--train-data : no such file"),
    "a very long name": data("--train-data=" + "n" * 5000, "nnn: no such file"),
    "a device": data(
        "--train-data=/dev/zero", "--train-data /dev/zero: no text or token file, only /dev/zero"
    ),
    **{  # on Linux, a regular file that opens, and whose first byte cannot be read
        f"unreadable: {path}": data(f"--train-data={path}", f"cannot read {path}: Input/output err")
        for path in glob("/proc/self/mem")
    },
    "pictures": data(
        "--train-data=.",
        "--train-data .: no text or token file, only .*x.png",
        {"x.png": b"\x89PNG"},
    ),
    "validation": data(
        "--train-data x.txt --val-data=y.txt", "y.txt is no UTF-8 text", X | {"y.txt": b"a\xff"}
    ),
    "a key of a text": data("--train-data=x.txt --text-key=t", "--text-key t: no file here has"),
    "a key of token files": data(
        "--train-data=x.bin --text-key=t", "--text-key t: no file here has", {"x.bin": b"\1\0" * 99}
    ),
    "a twin": data(
        "--train-data x.txt y.txt --val-data=z.txt",
        "--val-data z.txt: the same content as x.txt of --train-data",
        X | {"y.txt": b"texu", "z.txt": b"text"},
    ),
    "fixed ids": data(
        "--train-data x.txt --vocab-size=300",
        "--vocab-size 300: .* other tokenizers is fixed: drop the",
    ),
    "few ids": data(
        "--train-data x.txt --tokenizer-name=bpe --vocab-size=256", "-size 256: must be 257 to"
    ),
    "both": data(
        "--train-data x.txt y.bin", "-data: found both text and token files", X | {"y.bin": b"\1\0"}
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
PADDING, IDS = np.zeros(9999, "<u4"), np.arange(9999, dtype="<u4")
TOKEN_FILES = {
    "half a token": text("x.bin", b"\x01\x00\x02", "x.bin is no token file, or is damaged"),
    "an id beyond": text(
        "x.bin",
        b"\x01\x00\x01\x01",
        "x.bin: holds ids 1 to 257, .*ends at 256: another --tokenizer-name",
    ),
    "llm.c cut off": text(
        "x.bin", llmc(NINE, 20240520, 1)[:-2], "x.bin: .*9 tokens, it has 8: cut"
    ),
    "llm.c version": text("x.bin", llmc(NINE, 20240801, 3), "x.bin: .* version 3; .* of version 7"),
    "an unknown header": text("x.bin", llmc(NINE, 20250101, 1), "x.bin: a header .* 20250101"),
    **{  # (ids of 20 bits are those of the largest vocabularies)
        f"raw {dtype}": text("x.bin", np.arange(9, largest, 99).astype(dtype).tobytes(), says)
        for dtype, largest, says in (
            ("<i4", 50257, "every second token is 0: 32-bit ids.* save them as .npy"),
            ("<u4", 2**20, "every second token is below 16: 32-bit ids"),
            ("<i8", 50257, "every second token is 0: 32-bit ids"),
            (">i4", 50257, "every second token is 0: 32-bit ids"),
        )
    },
    **{  # padding as long as a sample, before or behind the ids
        f"padded {side}": text(
            "x.bin", np.concatenate(parts).tobytes(), "second token is 0: 32-bit"
        )
        for side, parts in {"before": (PADDING, IDS), "behind": (IDS, PADDING)}.items()
    },
    "llm.c of -9": text("x.bin", llmc(NINE, 20240520, 1, count=-9), "x.bin: its header promises"),
    ".npy cut off": text("x.npy", npy(NINE)[:-2], "x.npy is no token file, or is damaged"),
    ".npy of no tokens": text("x.npy", npy(NINE[:0]), "--seq-len 16 needs 17"),
    ".npy of objects": text("x.npy", npy(np.array([{}])), "x.npy is no token file"),
    "two dimensions": text("x.npy", npy(np.zeros((3, 3), np.uint16)), r"x.npy: holds .*\(3, 3\)"),
    ".npy of numbers with a point": text(
        "x.npy", npy(np.zeros(9)), "x.npy: holds float64 .*want one row of integers"
    ),
    ".npy of truths": text("x.npy", npy(np.zeros(9, bool)), "x.npy: holds bool .*row of integers"),
    ".npy below 0": text(
        "x.npy", npy(np.arange(-1, 99)), "x.npy: holds ids -1 to 98, .* ends at 256"
    ),
    "tokens for a bpe": data(
        "--tokenizer-name=bpe --train-data=x.bin",
        "--tokenizer-name bpe: its vocabulary is unknown to tiktoken, .* for text, bpe",
        {"x.bin": NINE.tobytes()},
    ),
}

# ---- Tokenizers


RANKS = format_ranks(load_tokenizer("byte").ranks)


def tokenizer(content: str) -> Case:
    return data(
        "--train-data=x.txt --tokenizer-name=bad.tiktoken",
        "bad.tiktoken(:| is no .tiktoken file, or is damaged)",
        X | {"bad.tiktoken": content.encode()},
    )


TOKENIZERS = {
    "a pipe": data(
        "--train-data=x.txt --tokenizer-name=bad.tiktoken",
        "bad.tiktoken is no file",
        X | {"bad.tiktoken": os.mkfifo},
    ),
    "no base64": tokenizer(RANKS + "!!!! 256\n"),
    "negative rank": tokenizer(RANKS + "AAA= -1\n"),
    "a rank twice": tokenizer(RANKS + "AAA= 7\n"),
    "a byte missing": tokenizer(RANKS.split("\n", 1)[1]),
    "nothing in it": tokenizer(""),
    "a binary": tokenizer("\x00\xff\n"),
    "unknown name": data(
        "--train-data=x.txt --tokenizer-name=gpt9",
        "--tokenizer-name gpt9: .* unknown to tiktoken, .* choose byte, FILE.tiktoken or",
    ),
    "toy for a text": data(
        "--train-data=x.txt --tokenizer-name=toy", "--tokenizer-name toy: .* unknown"
    ),
}

# ---- Environments


ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29999",
}


def rank(*says: str, **variables: str) -> Case:
    return Case("ddp", "", says, {}, ALONE | variables)


def together(trainer: str, words: str, *says: str) -> Case:
    return Case(trainer, words, says, {}, ALONE | {"WORLD_SIZE": "2"})


ENVIRONMENTS = {
    "no torchrun": Case("ddp", "", ("torchrun .*=2 train_ddp.py",)),
    "groups of blocks in shards": together(
        "fsdp",
        "--use-activation-checkpoint=full/2",
        "full/2: train_fsdp.py gathers .*; full/2\\+nested fits",
    ),
    "chunks gathered in bfloat16": together(
        "fsdp",
        "--mlp-chunks=2 --use-activation-checkpoint --amp-dtype=bfloat16 --gather-dtype=bfloat16",
        "--mlp-chunks 2: --gather-dtype bfloat16 would add the chunks' gradients up in bfloat16; ",
    ),
    "gathered in bfloat16, computed in another": together(
        "fsdp",
        "--no-amp --gather-dtype=bfloat16",
        "--gather-dtype bfloat16: .* in torch.float32 here; --amp-dtype bfloat16 goes with it, or",
    ),
    "compressed": together(
        "fsdp", "--compress-gradients", "--compress-gradients: train_ddp.py can; --no-"
    ),
    "a sum of three": together(
        "ddp",
        "--reproducible-sums --grad-accum-steps=3",
        "--grad-accum-steps 3: --reproducible-sums needs a power of two, such as 2; --no-rep",
    ),
    "parts of sequences": together(
        "sp", "--reproducible-sums", "--reproducible-sums: neither train_sp.py, which splits"
    ),
    "few heads": together(
        "sp", "--n-heads=1", "--n-heads 1: each of 2 .* --nproc-per-node=1, or train_fsdp"
    ),
    "few tokens": together(
        "sp", "--seq-len=1 --n-heads=4", "--seq-len 1: each of 2 .* --nproc-per-node=1"
    ),
    "compiled, of a shared sequence": together("sp", "--compile", "--compile: train_fsdp.py can; "),
    "groups of blocks of a shared sequence": together(
        "sp",
        "--use-activation-checkpoint=full/2",
        "full/2: train_sp.py gathers .*; full/2\\+nested",
    ),
    "RANK=abc": rank("abc.*torchrun", RANK="abc"),
    "MASTER_PORT=abc": rank("abc.*torchrun", MASTER_PORT="abc"),
    "MINIGPT_TIMEOUT_S=0": rank("MINIGPT_TIMEOUT_S 0: a whole number", MINIGPT_TIMEOUT_S="0"),
    "MINIGPT_TIMEOUT_S=inf": rank("MINIGPT_TIMEOUT_S inf: a whole number", MINIGPT_TIMEOUT_S="inf"),
    "torchrun for one": Case(
        "toy",
        "",
        ("torchrun starts train_ddp.py, .* train_sp.py; .* WORLD_SIZE is 2",),
        {},
        {"WORLD_SIZE": "2"},
    ),
    "a cache that leads nowhere": Case(
        "toy",
        "",
        ("cache: File exists; MINIGPT_CACHE names another folder",),
        {"cache": lambda path: path.symlink_to("nowhere")},
    ),
}
