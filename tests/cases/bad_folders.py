"""Folders that --init-from cannot take, and flags that do not go with it, for test_bad_input.py."""

from pathlib import Path
from typing import Any

import numpy as np
from cases.bad_input import Case, Write
from harness.gpt2_folder import CONFIG, TOKENIZER, gpt2_tensors, write_folder
from safetensors.numpy import save

GOOD = gpt2_tensors()
VOCAB = TOKENIZER["model"]["vocab"]
NAMES = {"config": "config.json", "tokenizer": "tokenizer.json", "model": "model.safetensors"}


def refused(write: Write, *says: str, flags: str = "--init-from=gpt2") -> Case:
    return Case("built-in", flags, says, {"gpt2": write})


def folder(*says: str, tensors: dict[str, np.ndarray] | None = None, **files: Any) -> Case:
    """`files`: by what they are."""
    content = {NAMES[what]: content for what, content in files.items()}
    return refused(lambda path: write_folder(path, GOOD | (tensors or {}), content), *says)


def config(*says: str, **changes: Any) -> Case:
    """A folder whose config.json has these values; "gone": not there."""
    values = (CONFIG | changes).items()
    return folder(*says, config={name: value for name, value in values if value != "gone"})


def tokenizer(vocab: object, *says: str, name: str = "tokenizer.json") -> Case:
    content = {"model": {"vocab": vocab}} if name == "tokenizer.json" else vocab
    files = {"tokenizer.json": None, name: content}
    return refused(lambda path: write_folder(path, GOOD, files), name, *says)


def contradiction(flags: str, *says: str) -> Case:
    return refused(write_folder, *says, flags=f"--init-from=gpt2 {flags}")


FOLDERS = {
    "not there": Case(
        "built-in",
        "--init-from=ab/cd",
        ("no snapshot and no folder ab/cd; .*hf download ab/cd --local-dir cd",),
    ),
    "a very long name": Case("built-in", "--init-from=" + "n" * 999, ("no snapshot and no",)),
    "a text": refused(b"a few words", "gpt2 is no snapshot of this trainer, or a damaged one"),
    "empty": refused(Path.mkdir, "cannot read gpt2/config.json: No such file"),
    "one file": refused(write_folder, "json is no snapshot", flags="--init-from=gpt2/config.json"),
    "config is no JSON": folder("config.json is no configuration of a model", config=b"{"),
    "config is a list": folder("config.json is no configuration of a model", config=[1]),
    "another model": config("model_type is 'bert'; MiniGPT is GPT-2", model_type="bert"),
    "no model type": config("model_type is None", model_type="gone"),
    "another class": folder(
        "gpt2", "as score.weight, .* nothing", tensors={"score.weight": np.zeros(2, np.float32)}
    ),
    "heads": config("config.json is no configuration of a model", n_head=3),
    "a size that is a word": config("config.json is no configuration of a model", n_layer="two"),
    "as wide as may be": config(r"16\) as .*, 1000000\)", n_embd=10**6, n_inner=10**6),
    "other sizes than the weights": config(r"\(257, 16\) as .*\(257, 768\)", n_embd="gone"),
    "more layers than there are": config("nothing as blocks.2.*: is it damaged", n_layer=3),
    "fewer layers than there are": config("as blocks.1.*, .* says nothing", n_layer=1),
    "ids of no known tokenizer": config("300 ids, but no tokenizer is read from a", vocab_size=300),
    "no weights": folder("cannot read gpt2/model.safetensors: No such file", model=None),
    "header cut in the middle": folder(
        "is no .safetensors file, or is damaged", model=save(GOOD)[:100]
    ),
    "whole numbers": folder(
        "gpt2", "torch.int32 .* says floats", tensors={"ln_f.bias": np.zeros(16, np.int32)}
    ),
    "NaN": folder(
        "gpt2",
        "NaN or infinite weights",
        tensors={"h.1.ln_1.bias": np.full(16, np.nan, np.float32)},
    ),
    "another head": config("tie_word_embeddings is False", tie_word_embeddings=False),
    "tokenizer is no JSON": folder("tokenizer.json is no tokenizer of trans", tokenizer=b"{"),
    "tokenizer without ids": folder("tokenizer.json is no tokenizer of trans", tokenizer=[]),
    "another tokenizer": tokenizer(VOCAB | {"a": 1}, "its ids are not those of byte, and no other"),
    "bytes are missing": tokenizer({"a": 97}, "its ids are not those of byte"),
    "another vocab.json": tokenizer({"a": 1}, "its ids are not those", name="vocab.json"),
    "layers": contradiction("--n-layers=3", "--n-layers 3: --init-from gpt2 has 2; leave it out"),
    "a shape by name": contradiction("--model=gpt2", "--model and --init-from: give only one"),
    "a tokenizer": contradiction("--tokenizer-name=gpt2", "--tokenizer-name gpt2: .* has byte"),
    "a vocabulary": contradiction("--vocab-size=512", "--vocab-size 512: .* has 257"),
    "a sequence": Case(
        "built-in",
        "--init-from=gpt2 --seq-len=33",
        ("--seq-len 33 is above --max-position-embeddings 32",),
        {"gpt2": write_folder},
    ),
    "toy data": contradiction("--use-toy-data", "--use-toy-data True: .* has False"),
    "export onto files": Case(
        "export_hf", "--out=full", ("exists and is not empty; name",), {"full": write_folder}
    ),
    "export onto a file": Case("export_hf", "--out=x", ("x: Not a directory",), {"x": b""}),
    "to resume": contradiction("--resume", "starts a run and --resume goes on .*leave one out"),
}
