"""A vocabulary as Hugging Face's `tokenizer.json`, which transformers opens; and back.

The two sides describe the same thing differently. Here and in tiktoken, neighbours are merged if
their bytes together are a token, the lowest id first. There, each token comes with the one pair
(left, right) that it may be merged from, the earliest in a list first. Is that pair known, the
results are the same for any text: until a token's two parts lie side by side, nothing has been
merged across the token's ends; so inside they were merged as if the token stood alone; and alone,
one pair comes out (`halves`). tiktoken also takes a whole word that is a token without any merging:
`ignore_merges` there.
"""

import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from .tokenizer import (
    EOT,
    GPT2_PATTERN,
    R50K_SHA256,
    DataError,
    Tokenizer,
    byte_characters,
    format_ranks,
)

CHARACTERS = byte_characters()
BYTE_OF = {char: byte for byte, char in enumerate(CHARACTERS)}
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


def vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    """{"Ġthe": 262, ...}, <|endoftext|> included, as in vocab.json."""
    ids = {spelled(token): rank for token, rank in tokenizer.ranks.items()}
    return ids | tokenizer.special_tokens


def to_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of a tokenizer.json whose ids are those of `tokenizer` on any text."""
    words: dict[str, Any] = BYTE_LEVEL | {"use_regex": True}
    if tokenizer.pattern != GPT2_PATTERN:  # which is what use_regex means
        # tiktoken's quantifiers never give back what they took ("++"). That is for speed: the words
        # are the same without it, which not every engine knows; as `$`, the end of the text.
        plain = re.sub(r"([?*+]|\{[\d,]+\})\+", r"\1", tokenizer.pattern).replace("$", r"\z")
        split = {"type": "Split", "pattern": {"Regex": plain}, "behavior": "Isolated"}
        byte_level = BYTE_LEVEL | {"use_regex": False}
        words = {"type": "Sequence", "pretokenizers": [split | {"invert": False}, byte_level]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": text, **flags, "special": True} for text, number in special
        ],
        "normalizer": None,
        "pre_tokenizer": words,
        "post_processor": None,
        "decoder": BYTE_LEVEL | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocabulary(tokenizer),
            "merges": list_merges(tokenizer),
        },
    }


def read_folder(folder: Path) -> Tokenizer | None:
    """The tokenizer of a transformers folder: from tokenizer.json, or vocab.json and merges.txt.

    None if there is neither. Raises DataError if there is one that is no byte-level BPE, or one
    that cannot be run by ranks.
    """
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            return from_json(json.loads(path.read_bytes()))
        path = folder / "vocab.json"
        if not path.is_file() or not (folder / "merges.txt").is_file():
            return None
        lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
        merges = [line for line in lines if line and not line.startswith("#version")]
        return build(json.loads(path.read_bytes()), merges, GPT2_PATTERN, {})
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{path}: no tokenizer of transformers, or a damaged one") from None
    except OSError as error:
        raise DataError(f"{error.filename or path}: {error.strerror or error}") from None


def from_json(content: dict[str, Any]) -> Tokenizer:
    """What `to_json` returned, and what is like it. Raises DataError."""
    model, words = content["model"], content["pre_tokenizer"]
    if model.get("type", "BPE") != "BPE" or words is None or content.get("normalizer"):
        raise DataError("no byte-level BPE, which is all that this project can run")
    steps = words["pretokenizers"] if words["type"] == "Sequence" else [words]
    *splits, byte_level = steps
    known = byte_level["type"] == "ByteLevel" and not byte_level.get("add_prefix_space")
    pattern = GPT2_PATTERN
    if not byte_level.get("use_regex", True):
        (split,) = splits
        known &= split["type"] == "Split" and split["behavior"] == "Isolated"
        pattern, splits = split["pattern"]["Regex"], []
    if not known or splits:
        raise DataError("words are split in a way that this project does not know")
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    return build(model["vocab"], model["merges"], pattern, added)


def build(vocab: dict[str, int], merges: list, pattern: str, added: dict[str, int]) -> Tokenizer:
    """Raises DataError unless ids, taken as ranks, merge as `merges` say."""
    special = added or ({EOT: vocab[EOT]} if EOT in vocab else {})
    if EOT not in special:
        raise DataError(f"it has no {EOT}, which stands between documents here")
    ids = {token: number for token, number in vocab.items() if token not in special}
    ranks = {bytes(BYTE_OF[char] for char in token): number for token, number in ids.items()}
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise DataError("no byte-level BPE: not every byte has an id")
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    made = [vocab[left + right] for left, right in pairs]
    if made != sorted(set(made)):
        raise DataError("its merges are in another order than its ids, which are ranks here")
    is_gpt2 = hashlib.sha256(format_ranks(ranks).encode()).hexdigest() == R50K_SHA256
    return Tokenizer("gpt2" if is_gpt2 else "bpe", ranks, pattern, special)
