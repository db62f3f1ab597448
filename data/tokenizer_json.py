"""Write Hugging Face's `tokenizer.json`, the file of a tokenizer in transformers.

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

from .tokenizer import GPT2_PATTERN, DataError, Tokenizer, errors_as_data_errors

# Byte -> the printable character that OpenAI's and Hugging Face's files write for it: a printable
# byte is written as itself, the 68 others as the characters from number 256 on, in order.
PLAIN_BYTES = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
OTHER_BYTES = sorted({*range(256)} - {*PLAIN_BYTES})
CHARACTER_BY_BYTE = {byte: chr(byte) for byte in PLAIN_BYTES} | {
    byte: chr(256 + place) for place, byte in enumerate(OTHER_BYTES)
}
GPT2_PATTERNS = (  # GPT-2's pattern, as different versions of tiktoken write it
    GPT2_PATTERN,
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+$|\s+(?!\S)|\s",
)
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


def check_vocabulary(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise DataError if the transformers folder `folder` has a tokenizer with other ids. (A folder
    without tokenizer.json and vocab.json has none.)"""
    for path in (folder / "tokenizer.json", folder / "vocab.json"):
        if path.is_file():
            with errors_as_data_errors(path, "tokenizer of transformers"):
                content = json.loads(path.read_bytes())
                ids = content["model"]["vocab"] if path.name == "tokenizer.json" else content
                ours = {spell(token): rank for token, rank in tokenizer.ranks.items()}
                if ours.items() - ids.items():
                    raise DataError(
                        f"its ids are not those of {tokenizer.name}, and no other vocabulary is "
                        "read from such a file; a snapshot has its tokenizer"
                    )
