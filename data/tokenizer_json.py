"""A vocabulary as Hugging Face's `tokenizer.json`, which transformers opens; and back.

The two sides describe the same thing differently. Here and in tiktoken, neighbours are merged if
their bytes together are a token, the lowest id first. There, each token comes with the one pair
(left, right) that it may be merged from, the earliest in a list first. Is that pair known, the
results are the same for any text: until a token's two parts lie side by side, nothing has been
merged across the token's ends; so inside they were merged as if the token stood alone; and alone,
one pair comes out (`halves`). tiktoken also takes a whole word that is a token without any merging:
`ignore_merges` there.
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
    ranks_by_bytes,
)

CHARACTERS = byte_characters()
GPT2_PATTERNS = (  # tiktoken spells it in other ways, from version to version
    GPT2_PATTERN,
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+$|\s+(?!\S)|\s",
)
NAMES = {  # of --tokenizer-name, by the vocabulary's fingerprint
    "3fb4c8efa8f8fd2bd611dbb9f00c189db5aed123a4f9833469abf037114e236e": "gpt2",
    "22e4053a3829f659111a1119339d9bddff243d8dac496cace7103ed9b720db23": "byte",
}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def spelled(token: bytes) -> str:
    """b" the" -> "Ġthe"."""
    return "".join(CHARACTERS[byte] for byte in token)


def halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that make `token` when it stands alone; None if no two do."""
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
    """The merges in their order, spelled as in merges.txt."""
    by_rank = sorted(tokenizer.ranks, key=tokenizer.ranks.__getitem__)
    pairs = (halves(token, tokenizer.ranks) for token in by_rank)
    return [(spelled(pair[0]), spelled(pair[1])) for pair in pairs if pair]


def to_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Make the content of a tokenizer.json whose ids are those of `tokenizer` on any text."""
    words: dict[str, Any] = BYTE_LEVEL | {"use_regex": True}
    # tiktoken's quantifiers never give back what they took ("++"). That is for speed: the words are
    # the same without it, which not every engine knows.
    pattern = re.sub(r"([?*+]|\{[\d,]+\})\+", r"\1", tokenizer.pattern)
    if pattern not in GPT2_PATTERNS:
        # (`$`, the end of the text, is in other engines that of a line, too.)
        regex = {"Regex": pattern.replace("$", r"\z")}
        split = {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
        byte_level = BYTE_LEVEL | {"use_regex": False}
        words = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])
    ids = {spelled(token): rank for token, rank in tokenizer.ranks.items()}
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [
            {"id": number, "content": text, **flags, "special": True} for text, number in special
        ],
        "pre_tokenizer": words,
        "decoder": BYTE_LEVEL | {"use_regex": True},
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
    """Read the tokenizer of a transformers folder: tokenizer.json, or vocab.json and merges.txt.

    None if there is neither. Raises DataError if there is one that is no byte-level BPE, or one
    that cannot be run by ranks.
    """
    whole, vocabulary, merges = (
        folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt")
    )
    if whole.is_file():
        with errors_as_data_errors(whole, "tokenizer of transformers"):
            return from_json(json.loads(whole.read_bytes()))
    if vocabulary.is_file() and merges.is_file():
        with errors_as_data_errors(vocabulary, "tokenizer of transformers"):
            pairs = re.findall("^(?!#version).+", merges.read_text(encoding="utf-8"), re.M)
            model = {"vocab": json.loads(vocabulary.read_bytes()), "merges": pairs}
            return from_json({"model": model, "pre_tokenizer": BYTE_LEVEL, "added_tokens": []})
    return None


def from_json(content: dict[str, Any]) -> Tokenizer:
    """Make the tokenizer of a tokenizer.json. Raises DataError unless it splits words as GPT-2
    does, and its ids, taken as ranks, give what its merges give, on any text."""
    model, words = content["model"], content["pre_tokenizer"] or {}
    affixes = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
    is_plain = model.get("type", "BPE") == "BPE" and not any(map(model.get, affixes))
    by_bytes = words.get("type") == "ByteLevel" and words.get("use_regex", True)
    if not is_plain or not by_bytes or words.get("add_prefix_space") or content.get("normalizer"):
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
    ranks = ranks_by_bytes(ids)
    tokenizer = Tokenizer("bpe", ranks, GPT2_PATTERN, special)
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    is_complete = len(merges) == len(ranks) - 256 or model.get("ignore_merges")
    if merges != list_merges(tokenizer) or not is_complete:
        raise DataError("its merges are not those of its ids, which are ranks here")
    tokenizer.name = NAMES.get(tokenizer.fingerprint, "bpe")
    return tokenizer
