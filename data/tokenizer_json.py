"""Write and read Hugging Face's `tokenizer.json`, the file of a tokenizer in transformers.

tiktoken and tokenizer.json describe the same merges in two ways. In tiktoken (and in this project)
two neighbouring tokens are merged if their joined bytes are a token; the merge that makes the token
with the lowest id comes first. tokenizer.json has a list of pairs (left, right), with one pair for
each token. Only the two tokens of a pair are merged; the earliest pair in the list comes first.

If the list has the right pair for each token, both ways give the same ids for any text. The right
pair is the pair that tiktoken merges last when it encodes the token alone; `find_merge_pair` finds
this pair. When tiktoken makes the token inside of a longer text, it merges the same pair last.
Until then no merge has crossed the ends of the token, so the bytes of the token were merged exactly
as if the token stood alone.

If a whole word is a token, tiktoken takes this token without merging. The option `ignore_merges` of
tokenizer.json does the same.
"""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from .tokenizer import (
    CHARACTER_BY_BYTE,
    EOT_TEXT,
    GPT2_PATTERN,
    DataError,
    Tokenizer,
    errors_as_data_errors,
    fingerprint_of,
    vocab_to_ranks,
)

GPT2_PATTERNS = (  # GPT-2's pattern, as different versions of tiktoken write it
    GPT2_PATTERN,
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+$|\s+(?!\S)|\s",
)
NAME_BY_FINGERPRINT = {  # fingerprint of a vocabulary -> its --tokenizer-name
    "3fb4c8efa8f8fd2bd611dbb9f00c189db5aed123a4f9833469abf037114e236e": "gpt2",
    "22e4053a3829f659111a1119339d9bddff243d8dac496cace7103ed9b720db23": "byte",
}
BYTE_LEVEL_CONFIG = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def spell(token: bytes) -> str:
    """Return a token as tokenizer.json writes it: b" the" -> "Ġthe"."""
    return "".join(CHARACTER_BY_BYTE[byte] for byte in token)


def find_merge_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """Return the two tokens that are merged last when the bytes of `token` are encoded alone.
    Return None for a single byte, and if the merges do not end in `token`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        merged = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        best = min(merged)
        if best >= ranks[token]:
            return None
        i = merged.index(best)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def list_spelled_merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return the merges (left, right), spelled as in merges.txt. They are sorted by the id of the
    merged token."""
    by_rank = sorted(tokenizer.ranks, key=tokenizer.ranks.__getitem__)
    pairs = (find_merge_pair(token, tokenizer.ranks) for token in by_rank)
    return [(spell(pair[0]), spell(pair[1])) for pair in pairs if pair]


def to_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of a tokenizer.json that gives the ids of `tokenizer` for every text."""
    pre_tokenizer: dict[str, Any] = BYTE_LEVEL_CONFIG | {"use_regex": True}
    # tiktoken's patterns have possessive quantifiers ("++") for speed. Not every regex engine
    # supports them. Normal quantifiers give the same words.
    pattern = re.sub(r"([?*+]|\{[\d,]+\})\+", r"\1", tokenizer.pattern)
    if pattern not in GPT2_PATTERNS:
        # In tiktoken `$` is the end of the text. In other engines `$` is also the end of a line. So
        # write `\z`, which is the end of the text.
        regex = {"Regex": pattern.replace("$", r"\z")}
        split = {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
        byte_level = BYTE_LEVEL_CONFIG | {"use_regex": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])
    ids = {spell(token): rank for token, rank in tokenizer.ranks.items()}
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
            "merges": list_spelled_merges(tokenizer),
        },
    }


def read_folder(folder: Path) -> Tokenizer | None:
    """Read the tokenizer of a transformers folder from tokenizer.json. If the folder does not have
    this file, read the tokenizer from vocab.json and merges.txt.

    Return None if the folder has no tokenizer. Raises DataError if the tokenizer is not a
    byte-level BPE, or if its ids cannot be used as ranks.
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
    """Return the tokenizer that `content`, the content of a tokenizer.json, describes.

    Raises DataError if the tokenizer does not split words as GPT-2 does. Raises DataError, too, if
    its list of merges is not the list that follows from its ids.
    """
    model, pre_tokenizer = content["model"], content["pre_tokenizer"] or {}
    differences = (
        model.get("type", "BPE") != "BPE",
        *map(model.get, ("continuing_subword_prefix", "end_of_word_suffix", "dropout")),
        pre_tokenizer.get("type") != "ByteLevel",
        not pre_tokenizer.get("use_regex", True),
        pre_tokenizer.get("add_prefix_space"),
        content.get("normalizer"),
    )
    if any(differences):
        raise DataError(
            "no byte-level BPE that splits words as GPT-2 does, which is all that can be read here"
        )
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    if others := sorted(added.keys() - {EOT_TEXT}):
        raise DataError(f"{', '.join(others[:3])}: tokens of its own, which would be read as text")
    ids = added | model["vocab"]
    if EOT_TEXT not in ids:
        raise DataError(f"it has no {EOT_TEXT}, which stands between documents here")
    special = {EOT_TEXT: ids.pop(EOT_TEXT)}
    ranks = vocab_to_ranks(ids)
    name = NAME_BY_FINGERPRINT.get(fingerprint_of(ranks, special), "bpe")
    tokenizer = Tokenizer(name, ranks, GPT2_PATTERN, special)
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    is_complete = len(merges) == len(ranks) - 256 or model.get("ignore_merges")
    if merges != list_spelled_merges(tokenizer) or not is_complete:
        raise DataError("its merges are not those of its ids, which are ranks here")
    return tokenizer
