"""Write Hugging Face's `tokenizer.json`, the file of a tokenizer in transformers.

tiktoken and tokenizer.json describe the same merges in two ways. In tiktoken (and in this project)
two neighbouring tokens are merged if their joined bytes are a token, and the merge that makes the
token with the lowest id comes first. tokenizer.json has a list of pairs (left, right), of which the
earliest comes first. Its list therefore has, for each token in the order of ids, every pair of
tokens that joins to it; transformers converts tiktoken's vocabularies in the same way.

If a whole word is a token, tiktoken takes this token without merging, and so does tokenizer.json
with the option `ignore_merges`.
"""

import json
import re
from pathlib import Path
from typing import Any

from .errors import DataError, errors_as_data_errors
from .tokenizer import Tokenizer

# Byte -> the printable character that OpenAI's and Hugging Face's files write for it: a printable
# byte is written as itself, the 68 others as the characters from number 256 on, in order.
PLAIN_BYTES = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
OTHER_BYTES = sorted({*range(256)} - {*PLAIN_BYTES})
CHARACTERS = {byte: chr(byte) for byte in PLAIN_BYTES} | {
    byte: chr(256 + place) for place, byte in enumerate(OTHER_BYTES)
}
BYTE_LEVEL_CONFIG = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def token_to_unicode(token: bytes) -> str:
    """Return a token as tokenizer.json writes it: b" the" -> "Ġthe"."""
    return "".join(CHARACTERS[byte] for byte in token)


def unicode_vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the id of each token that stands for text."""
    return {token_to_unicode(token): rank for token, rank in tokenizer.ranks.items()}


def to_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of a tokenizer.json that gives the ids of `tokenizer` for every text."""
    # tiktoken's patterns have possessive quantifiers ("++") for speed, which not every regex engine
    # supports; normal ones give the same words. `$` is the end of the text in tiktoken, but also
    # the end of a line in other engines, where `\z` is the end of the text.
    pattern = re.sub(r"([?*+]|\{[\d,]+\})\+", r"\1", tokenizer.pattern).replace("$", r"\z")
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    byte_level = BYTE_LEVEL_CONFIG | {"use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])
    ranks = tokenizer.ranks
    merges = [
        (token_to_unicode(token[:i]), token_to_unicode(token[i:]))
        for token in sorted(ranks, key=ranks.__getitem__)
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [
            {"id": number, "content": text, **flags, "special": True} for text, number in special
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split | {"invert": False}, byte_level],
        },
        "decoder": BYTE_LEVEL_CONFIG | {"use_regex": True},
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token")),
            **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix"), ""),
            **dict.fromkeys(("fuse_unk", "byte_fallback"), False),
            "ignore_merges": True,
            "vocab": unicode_vocabulary(tokenizer) | tokenizer.special_tokens,
            "merges": merges,
        },
    }


def check_vocabulary(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise DataError if the transformers folder `folder` has a tokenizer with other ids. (A folder
    without tokenizer.json and vocab.json has none.)"""
    for path in filter(Path.is_file, (folder / "tokenizer.json", folder / "vocab.json")):
        with errors_as_data_errors(path, "tokenizer of transformers"):
            content = json.loads(path.read_bytes())
            ids = content["model"]["vocab"] if path.name == "tokenizer.json" else content
            if unicode_vocabulary(tokenizer).items() - ids.items():
                raise DataError(
                    f"its ids are not those of {tokenizer.name}, and no other vocabulary is read "
                    "from such a file; a snapshot has its tokenizer"
                )
