"""Write a vocabulary as Hugging Face's `tokenizer.json`, which transformers opens; and read one.

The two formats describe the same merges differently. Here and in tiktoken, two neighbours are
merged if their joined bytes are a token; the lowest id goes first. In tokenizer.json each token has
one pair (left, right) from which it may be merged; the earliest pair in a list goes first.

With that pair known, both give the same ids for any text. Until the two parts of a token lie side
by side, no merge has crossed the ends of the token. So its inside was merged as if the token stood
alone, and alone it is merged from one pair (`halves`). tiktoken also takes a whole word that is a
token without any merging; `ignore_merges` says the same in tokenizer.json.
"""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from .tokenizer import (
    EOT,
    GPT2_PATTERN,
    DataError,
    Tokenizer,
    byte_characters,
    errors_as_data_errors,
    vocab_to_ranks,
)

CHARACTERS = byte_characters()
GPT2_PATTERNS = (  # one pattern, as versions of tiktoken spell it
    GPT2_PATTERN,
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+$|\s+(?!\S)|\s",
)
NAMES = {  # fingerprint of a vocabulary -> its --tokenizer-name
    "3fb4c8efa8f8fd2bd611dbb9f00c189db5aed123a4f9833469abf037114e236e": "gpt2",
    "22e4053a3829f659111a1119339d9bddff243d8dac496cace7103ed9b720db23": "byte",
}
BYTE_LEVEL_CONFIG = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def spelled(token: bytes) -> str:
    """Return the spelling of a token in tokenizer.json: b" the" -> "Ġthe"."""
    return "".join(CHARACTERS[byte] for byte in token)


def halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """Return the two tokens from which `token` is merged when it stands alone; None if no two make
    it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        merged = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        best = min(merged)
        if best >= ranks[token]:
            return None
        i = merged.index(best)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def list_merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """List the merges (left, right) in their order, spelled as in merges.txt."""
    by_rank = sorted(tokenizer.ranks, key=tokenizer.ranks.__getitem__)
    pairs = (halves(token, tokenizer.ranks) for token in by_rank)
    return [(spelled(pair[0]), spelled(pair[1])) for pair in pairs if pair]


def to_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of a tokenizer.json that gives the ids of `tokenizer` for any text."""
    pre_tokenizer: dict[str, Any] = BYTE_LEVEL_CONFIG | {"use_regex": True}
    # tiktoken's quantifiers are possessive ("++") for speed. Not every engine knows them, and the
    # words are the same without.
    pattern = re.sub(r"([?*+]|\{[\d,]+\})\+", r"\1", tokenizer.pattern)
    if pattern not in GPT2_PATTERNS:
        # tiktoken's `$` is the end of the text. In other engines it is also the end of a line.
        regex = {"Regex": pattern.replace("$", r"\z")}
        split = {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
        byte_level = BYTE_LEVEL_CONFIG | {"use_regex": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])
    ids = {spelled(token): rank for token, rank in tokenizer.ranks.items()}
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [
            {"id": number, "content": text, **flags, "special": True} for text, number in special
        ],
        "pre_tokenizer": pre_tokenizer,
        "decoder": BYTE_LEVEL_CONFIG | {"use_regex": True},
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token")),
            **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix"), ""),
            **dict.fromkeys(("fuse_unk", "byte_fallback"), False),
            "ignore_merges": True,
            "vocab": ids | tokenizer.special_tokens,
            "merges": list_merges(tokenizer),
        },
    }


def read_folder(folder: Path) -> Tokenizer | None:
    """Read the tokenizer of a transformers folder: tokenizer.json, else vocab.json and merges.txt.

    Return None if neither is there. Raises DataError if it is not a byte-level BPE, or if its ids
    cannot serve as ranks.
    """
    tokenizer_file, vocabulary, merges = (
        folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt")
    )
    if tokenizer_file.is_file():
        with errors_as_data_errors(tokenizer_file, "tokenizer of transformers"):
            return from_json(json.loads(tokenizer_file.read_bytes()))
    if vocabulary.is_file() and merges.is_file():
        with errors_as_data_errors(vocabulary, "tokenizer of transformers"):
            pairs = re.findall("^(?!#version).+", merges.read_text(encoding="utf-8"), re.M)
            model = {"vocab": json.loads(vocabulary.read_bytes()), "merges": pairs}
            return from_json(
                {"model": model, "pre_tokenizer": BYTE_LEVEL_CONFIG, "added_tokens": []}
            )
    return None


def from_json(content: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json. Raises DataError unless it splits words as GPT-2
    does, and its ids as ranks give the same result as its merges for any text."""
    model, pre_tokenizer = content["model"], content["pre_tokenizer"] or {}
    affixes = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
    is_plain = model.get("type", "BPE") == "BPE" and not any(map(model.get, affixes))
    by_bytes = pre_tokenizer.get("type") == "ByteLevel" and pre_tokenizer.get("use_regex", True)
    if (
        not is_plain
        or not by_bytes
        or pre_tokenizer.get("add_prefix_space")
        or content.get("normalizer")
    ):
        raise DataError(
            "no byte-level BPE that splits words as GPT-2 does, which is all that can be read here"
        )
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    if others := sorted(added.keys() - {EOT}):
        raise DataError(f"{', '.join(others[:3])}: tokens of its own, which would be read as text")
    ids = added | model["vocab"]
    if EOT not in ids:
        raise DataError(f"it has no {EOT}, which stands between documents here")
    special = {EOT: ids.pop(EOT)}
    ranks = vocab_to_ranks(ids)
    tokenizer = Tokenizer("bpe", ranks, GPT2_PATTERN, special)
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    is_complete = len(merges) == len(ranks) - 256 or model.get("ignore_merges")
    if merges != list_merges(tokenizer) or not is_complete:
        raise DataError("its merges are not those of its ids, which are ranks here")
    tokenizer.name = NAMES.get(tokenizer.fingerprint, "bpe")
    return tokenizer
