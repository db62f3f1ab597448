"""Convert text to ids and back with a byte-level BPE. This file trains the BPE; tiktoken runs it.

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
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import regex
import tiktoken

from .errors import DataError

EOT_TEXT = "<|endoftext|>"
# GPT-2's pattern. A word is a run of letters, of digits or of punctuation, and includes ONE space
# before the run. Merges never cross the end of a word, which makes training and encoding fast.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# `train_bpe` puts a MARK, which is above every id, in place of a pair that it merges.
MARK = chr(sys.maxunicode)
PAIRS_AT_MARKS = re.compile(f"(?s)(?=(.{MARK}|{MARK}.))")  # also those that overlap


@contextmanager
def errors_as_data_errors(path: Path, kind: str) -> Iterator[None]:
    """Convert every error of a parser to a DataError of one line that names `path`. `kind`: of file
    that the parser expects."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception:  # a damaged file makes parsers raise many kinds of errors
        raise DataError(f"{path} is no {kind}, or is damaged") from None


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
        if not all(bytes([byte]) in ranks for byte in range(256)):
            raise DataError("no byte-level BPE: not every byte has an id")
        is_unique = len(self._bytes) == len(ranks) + len(special)  # (else tiktoken would panic)
        if not is_unique or not all(0 <= rank < 2**20 for rank in self._bytes):
            raise DataError("two tokens have the same id, or an id is below 0 or above a million")
        self._encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, uint32 (n,). "<|endoftext|>" in it is plain text."""
        # Text from JSON may have lone surrogates. UTF-8 cannot encode them: replace them by "?".
        text = text.encode("utf-8", "replace").decode()
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # tiktoken's regex engine fails on a million spaces in a row
            half = len(text) // 2
            return np.concatenate([self.encode(text[:half]), self.encode(text[half:])])

    def encode_documents(
        self, documents: Iterable[Iterable[str]], count: Counter[str]
    ) -> Iterator[np.ndarray]:
        """Yield the ids of documents, which are given in chunks of text, with the id of
        <|endoftext|> before each document.

        A document without text, or with white space alone, is left out. `count` gets the numbers of
        "documents" and of those that are "empty".
        """
        for chunks in map(iter, documents):
            head = ""
            while not head.strip() and (chunk := next(chunks, None)) is not None:
                head += chunk
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
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        lengths[list(self.ranks.values())] = [*map(len, self.ranks)]
        return lengths

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
        """Rebuild a tokenizer without a file or the network. Raises DataError if `state` is
        damaged."""
        try:
            if state["name"] == NumberTokenizer.name:
                return NumberTokenizer(state["vocab_size"])
            ranks = parse_ranks(state["ranks"].encode())
            return cls(state["name"], ranks, state["pattern"], state["special_tokens"])
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise DataError("a tokenizer that no run has saved: is the file damaged?") from error


class NumberTokenizer(Tokenizer):
    """Tokenizer of toy data. The text of toy data is numbers: "7 42 3" <-> [7, 42, 3]."""

    name = "toy"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.eot_id = vocab_size, 0  # toy data has no documents to separate
        self.ranks = {}  # the ids stand for no bytes of text
        self.fingerprint = hashlib.sha256(f"toy {vocab_size}".encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Return the numbers in `text`: uint32 (n,). Raises DataError for a word that is no id."""
        ids = range(self.vocab_size)
        try:
            return np.array([ids.index(int(word)) for word in text.split()], dtype=np.uint32)
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

    Return the ranks of at most vocab_size - 1 tokens: the 256 bytes, then the merged tokens. One id
    stays free for <|endoftext|>. Training ends earlier if no pair occurs twice. Of equally frequent
    pairs the one with the lowest ids is merged, so equal text gives equal ranks.
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
    tokens = [bytes([byte]) for byte in range(256)]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    heap = sorted((-count, pair) for pair, count in pair_counts.items())
    while heap and len(ranks) < vocab_size - 1:
        count, pair = heapq.heappop(heap)
        if -count != pair_counts[pair]:  # an outdated entry: queue it again with the current count
            heapq.heappush(heap, (-pair_counts[pair], pair))
            continue
        if pair_counts[pair] < 2:
            break
        left, right = pair
        token = tokens[ord(left)] + tokens[ord(right)]
        # Two different pairs can join to the same bytes. Both pairs then get the same id. With two
        # ids for the same bytes, `ranks` would have no token for the first id.
        merged = chr(ranks.setdefault(token, len(ranks)))
        if ord(merged) == len(tokens):
            tokens.append(token)
        new_pairs: set[tuple[str, str]] = set()
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
                new_pairs.add(new_pair)
            words[index] = marked.replace(MARK, merged)
        pair_counts[pair] = 0
        for new_pair in new_pairs:
            heapq.heappush(heap, (-pair_counts[new_pair], new_pair))
    return ranks


def format_ranks(ranks: dict[bytes, int]) -> str:
    """Return the text of a .tiktoken file: a line "<base64 of the bytes> <rank>" for each token,
    sorted by rank."""
    lines = sorted((rank, base64.b64encode(token).decode()) for token, rank in ranks.items())
    return "".join(f"{token} {rank}\n" for rank, token in lines)


def parse_ranks(content: bytes) -> dict[bytes, int]:
    """Return the ranks in a .tiktoken file. Raises ValueError if it has another format.

    tiktoken's own loader caches a local file by its path, without a hash, and so returns the old
    ranks of a file that has changed.
    """
    pairs = [line.split() for line in content.splitlines() if line.strip()]
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    if len(ranks) < len(pairs):
        raise DataError("a token stands there twice")
    return ranks


def load_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer that needs no training. `name`: "byte", the name of an encoding of
    tiktoken, or the path of a .tiktoken file.

    Raises DataError if the name is unknown, or if the vocabulary is not on this machine and cannot
    be downloaded.
    """
    if name == "byte":
        return Tokenizer("byte", {bytes([byte]): byte for byte in range(256)})
    if name.lower().endswith(".tiktoken"):
        with errors_as_data_errors(Path(name), ".tiktoken file"):
            if Path(name).exists() and not Path(name).is_file():  # a pipe would block
                raise DataError("not a regular file")
            return Tokenizer(name, parse_ranks(Path(name).read_bytes()))
    known = sorted(tiktoken.list_encoding_names())
    if name not in known:
        raise DataError(
            f"--tokenizer-name {name}: unknown; choose bpe, byte, FILE.tiktoken, {', '.join(known)}"
        )
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # of a download (requests' errors are OSErrors)
        raise DataError(
            f"--tokenizer-name {name}: its vocabulary is not on this machine and the download "
            f"failed ({type(error).__name__}): set TIKTOKEN_CACHE_DIR to a folder that has it, or "
            "use --tokenizer-name bpe or --tokenizer-name byte"
        ) from None
    # tiktoken's documentation uses these three private attributes to extend an encoding.
    special = dict(encoding._special_tokens)
    special.setdefault(EOT_TEXT, encoding.max_token_value + 1)
    return Tokenizer(name, encoding._mergeable_ranks, encoding._pat_str, special)
