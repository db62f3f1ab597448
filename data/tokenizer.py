"""Convert text to ids and back with a byte-level BPE, which this file trains and tiktoken runs.

A vocabulary has three parts. `ranks`: bytes of a token -> its id; the lowest id is merged first. A
pattern (a regular expression), which splits text into words before any merge. Special tokens, which
stand for no text: in our data only <|endoftext|>, before each document.
"""

import base64
import hashlib
import heapq
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import regex
import tiktoken

from .errors import DataError, errors_as_data_errors

EOT_TEXT = "<|endoftext|>"
# GPT-2's pattern. A word is a run of letters, of digits or of punctuation, and includes ONE space
# before the run. Merges never cross the end of a word, which makes training and encoding fast.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# `train_bpe` puts a MARK, which is above every id, in place of a pair that it merges.
MARK = chr(sys.maxunicode)
PAIRS_AT_MARKS = re.compile(f"(?s)(?=(.{MARK}|{MARK}.))")  # also those that overlap


class Tokenizer:
    """Byte-level BPE: decoding the ids of any text gives the text.

    `name`: the value of --tokenizer-name. `vocab_size`: ids are below it. `eot_id`: the id of
    <|endoftext|>. `fingerprint`: hex, equal for equal vocabularies. Raises DataError if a byte has
    no id, if an id is out of range, or if two tokens have the same id.
    """

    def __init__(
        self,
        name: str,
        ranks: dict[bytes, int],
        pattern: str = GPT2_PATTERN,
        special_tokens: dict[str, int] | None = None,
    ) -> None:
        special = {EOT_TEXT: max(ranks.values()) + 1} if special_tokens is None else special_tokens
        self.name, self.pattern, self.ranks, self.special_tokens = name, pattern, ranks, special
        self.eot_id = special[EOT_TEXT]
        self.vocab_size = max(*ranks.values(), *special.values()) + 1
        # (Without the pattern: new versions of tiktoken rewrite patterns with the same matches.)
        content = format_ranks(ranks) + json.dumps(special, sort_keys=True)
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        self._bytes = {rank: token for token, rank in ranks.items()} | {
            rank: text.encode() for text, rank in special.items()
        }
        if (
            len(self._bytes) < len(ranks) + len(special)  # (tiktoken would panic)
            or not all(0 <= rank < 2**20 for rank in self._bytes)
            or not all(bytes([byte]) in ranks for byte in range(256))
        ):
            raise DataError(
                "no byte-level BPE: a byte has no id, two tokens have the same id, or an id is "
                "below 0 or above a million"
            )
        self._encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, uint32 (n,), in which "<|endoftext|>" is plain text. (Text from
        JSON may have lone surrogates, which UTF-8 does not have: they become U+FFFD.)"""
        return np.array(self._encoding.encode_ordinary(text), np.uint32)

    def encode_documents(
        self, documents: Iterable[Iterable[str]], count: Counter[str]
    ) -> Iterator[np.ndarray]:
        """Yield the ids of documents, which are given in chunks of text, with the id of
        <|endoftext|> before each document.

        A document whose first chunk has no text, or white space alone, is left out.
        count["documents"] and count["empty"] count the kept documents and those left out.
        """
        for chunks in map(iter, documents):
            head = next(chunks)
            count["documents" if head.strip() else "empty"] += 1
            if head.strip():
                yield np.array([self.eot_id], np.uint32)
                yield from map(self.encode, chain([head], chunks))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, with U+FFFD for an id without bytes and for an incomplete
        character."""
        tokens = (self._bytes.get(int(i), "\ufffd".encode()) for i in ids)
        return b"".join(tokens).decode(errors="replace")

    def byte_lengths(self) -> np.ndarray:
        """Return the number of bytes of text behind each id, int64 (vocab_size,); 0 for special
        tokens."""
        lengths = {rank: len(token) for token, rank in self.ranks.items()}
        return np.array([lengths.get(number, 0) for number in range(self.vocab_size)])

    def state(self) -> dict[str, Any]:
        """Return all that `from_state` needs, in types that torch.load reads with
        weights_only=True."""
        return {
            "name": self.name,
            "pattern": self.pattern,
            "ranks": format_ranks(self.ranks),
            "special_tokens": dict(self.special_tokens),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Tokenizer":
        """Rebuild a tokenizer without a file or the network."""
        if state["name"] == NumberTokenizer.name:
            return NumberTokenizer(state["vocab_size"])
        return cls(
            state["name"],
            parse_ranks(state["ranks"].encode()),
            state["pattern"],
            state["special_tokens"],
        )


class NumberTokenizer(Tokenizer):
    """Tokenizer of toy data, whose text is numbers: "7 42 3" <-> [7, 42, 3]."""

    name = "toy"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.eot_id = vocab_size, 0  # toy data has no documents to separate
        self.ranks = {}  # the ids stand for no bytes of text
        self.fingerprint = hashlib.sha256(f"toy {vocab_size}".encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Return the numbers in `text`, uint32 (n,). Raises DataError for a word that is no id."""
        try:
            ids = map(range(self.vocab_size).index, map(int, text.split()))
            return np.array([*ids], np.uint32)
        except ValueError:
            raise DataError(
                f"the toy tokenizer reads numbers from 0 to {self.vocab_size - 1}"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def state(self) -> dict[str, Any]:
        return {"name": self.name, "vocab_size": self.vocab_size}


def train_bpe(texts: Iterable[str], vocab_size: int) -> dict[bytes, int]:
    """Train a byte pair encoding (Sennrich et al. 2016, arXiv:1508.07909): merge the most frequent
    pair of neighbouring tokens into a new token, again and again.

    Return the ranks of at most vocab_size - 1 tokens: the 256 bytes, and then the merged tokens, of
    which there are fewer if no pair occurs twice. One id stays free for <|endoftext|>. Of equally
    frequent pairs the one with the lowest ids is merged, so that equal text gives equal ranks.
    """
    word_counts = Counter(word for text in texts for word in regex.findall(GPT2_PATTERN, text))
    # Each word is a string with one character per id.
    words = [word.encode("utf-8", "replace").decode("latin-1") for word in word_counts]
    word_frequencies = list(word_counts.values())
    pair_counts: Counter[tuple[str, str]] = Counter()
    # pair -> indices of words that contain the pair, or contained it before a merge
    words_with: defaultdict[tuple[str, str], set[int]] = defaultdict(set)

    for index, word in enumerate(words):
        for pair in pairwise(word):
            pair_counts[pair] += word_frequencies[index]
            words_with[pair].add(index)
    tokens = {chr(byte): bytes([byte]) for byte in range(256)}
    ranks = {bytes([byte]): byte for byte in range(256)}
    heap = sorted((-count, pair) for pair, count in pair_counts.items())
    while heap and len(ranks) < vocab_size - 1:
        count, pair = heapq.heappop(heap)
        if -count != pair_counts[pair] or pair_counts[pair] < 2:  # an outdated entry, or the end
            continue
        left, right = pair
        token = tokens[left] + tokens[right]
        # Two different pairs can join to the same bytes, and then get the same id: with two ids for
        # the same bytes, `ranks` would have no token for the first id.
        merged = chr(ranks.setdefault(token, len(ranks)))
        tokens[merged] = token
        changed = {pair}
        for index in words_with.pop(pair):
            marked = words[index].replace(left + right, MARK)
            # Update only the pairs at the merged tokens: to count all pairs of a word of a million
            # letters again (DNA, for example) after each merge would take hours.
            for (first, second), n in Counter(PAIRS_AT_MARKS.findall(marked)).items():
                old_pair = first.replace(MARK, right), second.replace(MARK, left)
                new_pair = first.replace(MARK, merged), second.replace(MARK, merged)
                pair_counts[old_pair] -= n * word_frequencies[index]
                pair_counts[new_pair] += n * word_frequencies[index]
                words_with[new_pair].add(index)
                changed |= {old_pair, new_pair}
            words[index] = marked.replace(MARK, merged)
        pair_counts[pair] = 0
        for pair in changed:
            heapq.heappush(heap, (-pair_counts[pair], pair))
    return ranks


def format_ranks(ranks: dict[bytes, int]) -> str:
    """Return the text of a .tiktoken file: a line "<base64 of the bytes> <rank>" for each token,
    sorted by rank."""
    lines = sorted((rank, base64.b64encode(token).decode()) for token, rank in ranks.items())
    return "".join(f"{token} {rank}\n" for rank, token in lines)


def parse_ranks(content: bytes) -> dict[bytes, int]:
    """Return the ranks in a .tiktoken file, or raise ValueError if it has another format.

    tiktoken's own loader caches a local file by its path, without a hash, and so returns the old
    ranks of a file that has changed.
    """
    lines = (line.split() for line in content.splitlines() if line.strip())
    return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}


def load_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer that needs no training, by its `name`: "byte", the name of an encoding of
    tiktoken, or the path of a .tiktoken file.

    Raises DataError if the name is unknown, or if the vocabulary is not on this machine and cannot
    be downloaded.
    """
    if name == "byte":
        return Tokenizer("byte", {bytes([byte]): byte for byte in range(256)})
    if name.lower().endswith(".tiktoken"):
        with errors_as_data_errors(Path(name), ".tiktoken file"):
            return Tokenizer(name, parse_ranks(Path(name).read_bytes()))
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # (requests' errors are OSErrors)
        raise DataError(
            f"--tokenizer-name {name}: its vocabulary is unknown to tiktoken, or is not on this "
            f"machine and cannot be downloaded ({type(error).__name__}): set TIKTOKEN_CACHE_DIR to "
            "a folder that has it, or choose byte, FILE.tiktoken or, for text, bpe"
        ) from None
    # tiktoken's documentation uses these three private attributes to extend an encoding.
    special = {EOT_TEXT: encoding.max_token_value + 1} | encoding._special_tokens
    return Tokenizer(name, encoding._mergeable_ranks, encoding._pat_str, special)
