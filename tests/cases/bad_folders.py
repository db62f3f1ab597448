"""Folders that --init-from cannot take, and flags that do not go with it, for test_bad_input.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from cases.bad_input import Case, Write
from harness.gpt2_folder import CONFIG, TOKENIZER, gpt2_tensors, safetensors, write_folder

from data.tokenizer import Tokenizer, load_tokenizer
from data.tokenizer_json import to_json

GOOD = gpt2_tensors()
RANKS = load_tokenizer("byte").ranks
BYTES = {text: i for text, i in TOKENIZER["model"]["vocab"].items() if i < 256}


def refused(write: Write, *says: str, flags: str = "--init-from=gpt2") -> Case:
    return Case("built-in", flags, ("--init-from", *says), {} if write is None else {"gpt2": write})


def good_folder(path: Path) -> Path:
    return write_folder(path, CONFIG, GOOD)


def config(*says: str, **changes: Any) -> Case:
    """A folder whose config.json has these values; None: not there."""
    changed = {name: value for name, value in (CONFIG | changes).items() if value != "gone"}
    return refused(lambda path: write_folder(path, changed, GOOD), *says)


def content(name: str, text: str | None, *says: str) -> Case:
    """A folder with another text in one of its files; None: without it."""

    def write(path: Path) -> None:
        file = good_folder(path) / name
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)

    return refused(write, *says)


def weights(data: bytes, *says: str) -> Case:
    return refused(lambda path: write_folder(path, CONFIG, weights=data), *says)


def tensor(name: str, array: np.ndarray | None, *says: str) -> Case:
    tensors = GOOD | ({} if array is None else {name: array})
    if array is None:
        del tensors[name]
    return weights(safetensors(tensors), "gpt2", *says)


def tokenizer(*says: str, **changes: Any) -> Case:
    whole = TOKENIZER | {key: value for key, value in changes.items() if key != "model"}
    whole["model"] = TOKENIZER["model"] | changes.get("model", {})
    return refused(lambda path: write_folder(path, CONFIG, GOOD, whole), "tokenizer.json", *says)


def merges(pairs: list, vocab: dict[str, int], *says: str) -> Case:
    return tokenizer(*says, model={"merges": pairs, "vocab": BYTES | vocab})


def index(content: Any, *says: str) -> Case:
    """Weights in shards, by this index."""

    def write(path: Path) -> None:
        good_folder(path)
        (path / "model.safetensors").rename(path / "a.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps(content))

    return refused(write, *says)


SPOILED = GOOD["h.1.mlp.c_fc.weight"].copy()
SPOILED[3, 5] = np.nan


def contradiction(flags: str, *says: str) -> Case:
    return refused(good_folder, *says, flags=f"--init-from=gpt2 {flags}")


WHOLE = safetensors(GOOD)
DAMAGED = "model.safetensors is no .safetensors file, or is damaged: "
A = "a.safetensors"


def shards(others: dict[str, str], *says: str) -> Case:
    return index({"weight_map": dict.fromkeys(GOOD, A) | others}, *says)


FOLDERS = {
    "not there": refused(None, "no folder gpt2.*hf download gpt2 --local-dir gpt2"),
    "of the hub": refused(None, "download ab/cd --local-dir cd", flags="--init-from=ab/cd"),
    "a very long name": refused(None, "no snapshot and no", flags="--init-from=" + "n" * 999),
    "a text": refused(b"a few words", "gpt2 is no snapshot, or a damaged one"),
    "empty": refused(Path.mkdir, "gpt2 is no folder of a transformers model: .*config.json"),
    "config is no JSON": content("config.json", "{", "config.json is not JSON"),
    "config is a list": content("config.json", "[1]", "config.json is not JSON, or damaged"),
    "config without end": content("config.json", "[" * 99_999, "config.json is not JSON"),
    "another model": config("model_type is 'bert'; MiniGPT is GPT-2", model_type="bert"),
    "no model type": config("model_type is None", model_type="gone"),
    "another activation": config("activation_function is 'relu'", activation_function="relu"),
    "a head of its own": config("tie_word_embeddings is False", tie_word_embeddings=False),
    "heads": config(r"config.json: .*divisible", n_head=3),
    "a size that is a word": config("config.json: n_layer is 'two'", n_layer="two"),
    "a huge size": config("config.json: n_positions is 1", n_positions=10**30),
    "other sizes than the weights": config(r"as \(257, 16\), .*\(257, 768\)", n_embd="gone"),
    "more layers than there are": config("holds no blocks.2.*: is it complete", n_layer=3),
    "fewer layers than there are": config(
        "holds blocks.1.*, which its configuration has no", n_layer=1
    ),
    "a million layers": config("holds .* tensors for 1000000 layers", n_layer=10**6),
    "more ids than the tokenizer": config("300 ids, but a tokenizer .* of 257", vocab_size=300),
    "no weights": content("model.safetensors", None, "model.safetensors: No such file"),
    "header cut in the middle": weights(WHOLE[:100], DAMAGED),
    "data added": weights(WHOLE + b"1234", DAMAGED),
    "a tensor is missing": tensor("ln_f.bias", None, "holds no ln_f.bias: is it complete"),
    "another shape": tensor("ln_f.bias", np.zeros(15, np.float32), r"\(15,\), .* \(16,\)"),
    "whole numbers": tensor("ln_f.bias", np.zeros(16, np.int32), "want floats"),
    "NaN": tensor("h.1.mlp.c_fc.weight", SPOILED, "NaN or infinite .*blocks.1.mlp.c_fc"),
    "another head": tensor("lm_head.weight", GOOD["wte.weight"] + 1, "lm_head is not wte"),
    "no weight_map": index({}, "index.json is damaged: no weight_map"),
    "a shard is missing": shards({"ln_f.bias": "b"}, "b: No such file"),
    "a shard without its tensor": index(
        {"weight_map": dict.fromkeys(GOOD, "config.json")}, "config.json is no .safetensors file"
    ),
    "tokenizer is no JSON": content("tokenizer.json", "{", "tokenizer.json: no tokenizer"),
    "tokenizer is a list": content("tokenizer.json", "[]", "tokenizer.json: no tokenizer"),
    "no tokenizer": content("tokenizer.json", None, "holds no tokenizer.json, .*257 ids"),
    "word pieces": tokenizer("no byte-level BPE", model={"type": "WordPiece"}),
    "a normalizer": tokenizer("no byte-level BPE", normalizer={"type": "Lowercase"}),
    "no end of text": tokenizer("has no <.endoftext.>", added_tokens=[], model={"vocab": {"a": 0}}),
    "bytes are missing": tokenizer("not every byte", model={"vocab": {"a": 0}}),
    "merges in another order": merges(["a b", "a b"], {"ab": 257}, "merges are not those of its"),
    "merges of other pairs": merges([["a", "b"]], {"ab": 258, "ac": 257}, "merges are not those"),
    "a token that no merge makes": tokenizer(
        "tokens that no merge makes",
        model={"merges": [], "vocab": BYTES | {"abc": 257}, "ignore_merges": False},
    ),
    "tokens of its own": tokenizer(
        "<user>: tokens of its own",
        added_tokens=[*TOKENIZER["added_tokens"], {"content": "<user>", "id": 257}],
    ),
    "words by another pattern": tokenizer(
        "words are split", pre_tokenizer=to_json(Tokenizer("x", RANKS, "[a-z]+"))["pre_tokenizer"]
    ),
    "dropout of merges": tokenizer("no byte-level BPE", model={"dropout": 0.5}),
    "an id twice": tokenizer(
        "b'!' and b'!!' have the same id, 33", model={"vocab": BYTES | {"!!": 33}}
    ),
    "an id twice, once of the end of text": tokenizer(
        "b'!' and b'<.endoftext.>' have the same id, 33",
        added_tokens=[{"content": "<|endoftext|>", "id": 33}],
        model={"vocab": BYTES},
    ),
    "a negative id": merges([], {"a": -1}, "tokenizer.json: "),
    "a giant id": merges([], {"a": 2**40}, "tokenizer.json: "),
    "an impossible width": config(
        "no model can have such sizes", n_embd=2**31 - 2, n_head=1, n_inner=2**31 - 2
    ),
    "another head's class": config("a GPT2ForMagic", architectures=["GPT2ForMagic"]),
    "an empty tensor that is too large": weights(
        safetensors(GOOD, x={"dtype": "F32", "shape": [0, 2**64], "data_offsets": [0, 0]}), DAMAGED
    ),
    "a shard that no file can be": shards({"x": "a\0b"}, "cannot read"),
    "one file of several": refused(
        good_folder,
        "one file of several: name its folder, gpt2",
        flags="--init-from=gpt2/model.safetensors",
    ),
    "layers": contradiction("--n-layers=3", "--n-layers 3: --init-from gpt2 has 2; leave it out"),
    "a shape by name": contradiction("--model=gpt2", "--model gpt2, --n-layers 12: .* has 2"),
    "a tokenizer": contradiction("--tokenizer-name=gpt2", "--tokenizer-name gpt2: .* has byte"),
    "a vocabulary": contradiction("--vocab-size=512", "--vocab-size 512: .* has 257"),
    "a sequence": contradiction("--seq-len=33", "--seq-len 33: .*32 positions"),
    "toy data": contradiction("--use-toy-data", "--use-toy-data: .*trained on text"),
    "to resume": contradiction("--resume", "starts a run and --resume goes on .*leave one out"),
}
