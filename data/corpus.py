"""Convert text to token ids once: split documents into training and validation, encode each
document, and keep the ids in a cache.

    paths -> documents -> train | val -> ids -> data/cache/<key>/{train.bin,val.bin,...}

Token files of other programs are read in place, without the cache. toy.py makes toy data.
"""

import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from .batches import TokenFile, check_length, hash_ids, slice_token_files
from .documents import (
    CHUNK,
    TOKEN_SUFFIXES,
    iter_chunked_documents,
    iter_text_chunks,
    reading,
    suffix_of,
)
from .errors import DataError
from .files import CACHE_DIR, describe_paths, find_files, find_stdlib
from .store import (
    Dataset,
    Say,
    cache_key,
    hash_files,
    load_or_build_folder,
    noted_checksum,
    os_errors_as_data_errors,
    take_up_to,
    write_split_ids,
)
from .tokenizer import Tokenizer, format_ranks, load_tokenizer, parse_ranks, train_bpe
from .toy import N_TOY_SUCCESSORS, load_toy

BPE_TRAINING_CHARS = 10_000_000
RANKS = "tokenizer.tiktoken"  # name of the tokenizer's file in a cache folder


@dataclass(frozen=True)
class TextCorpus:
    """Text files, their split into training and validation, and their cache folders."""

    label: str
    train_paths: list[Path]
    val_paths: list[Path]
    val_ratio: float  # share of the text that is for validation; unused if `val_paths` has files
    max_tokens: int | None  # limit for the tokens of each split; None: no limit
    vocab_size: int  # number of ids of a bpe that is trained on the text
    seq_len: int  # each split must have at least seq_len + 1 tokens
    text_key: str  # key of the text in a line of a .jsonl file
    cache_dir: Path
    say: Say

    @property
    def splits_each_file(self) -> bool:
        """True if the end of each file is for validation."""
        is_short = len(self.train_paths) * self.val_ratio < 1
        return is_short and not self.val_paths and ".jsonl" not in map(suffix_of, self.train_paths)

    def validates(self, number: int) -> bool:
        """Return True if a document is for validation: every (1 / `val_ratio`)-th is."""
        return int((number + 1) * self.val_ratio) > int(number * self.val_ratio)

    def iter_chunked_documents(self, split: str) -> Iterator[Iterator[str]]:
        """Return the documents of a split, "train" or "val", each as an iterator over chunks of
        text. The rule: "Which part is for validation" in data/README.md."""
        if self.splits_each_file:
            return (
                iter_text_chunks(path, *_range_of_split(path, split, self.val_ratio))
                for path in self.train_paths
            )
        paths = self.val_paths if split == "val" and self.val_paths else self.train_paths
        documents = (iter_chunked_documents(path, self.text_key) for path in paths)
        return (
            document
            for number, document in enumerate(chain.from_iterable(documents))
            if self.val_paths or self.validates(number) == (split == "val")
        )

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Name and size of the text, for meta.json. Reads all text, to find errors before a bpe is
        trained. Raises DataError for an error in the text, and if a split is certainly too short.
        """
        # The most tokens of each document: <|endoftext|> and one for each byte.
        largest = {
            split: np.fromiter(
                (
                    1 + sum(map(utf8_length, document))
                    for document in self.iter_chunked_documents(split)
                ),
                np.int64,
            )
            for split in ("train", "val")
        }
        for split, counts in largest.items():
            check_length(min(counts.sum(), self.max_tokens or sys.maxsize), self.seq_len, split)
        n_documents = len(largest["train"]) + len(largest["val"]) * (not self.splits_each_file)
        size = sum(path.stat().st_size for path in self.train_paths + self.val_paths)
        return {"corpus": self.label, "documents": n_documents, "bytes": size}

    @cached_property
    def content_hashes(self) -> list[str]:
        """Two SHA-256 (hex): of the training files, and of the validation files."""
        return [
            noted_checksum(self.cache_dir, paths, partial(hash_files, paths))
            for paths in (self.train_paths, self.val_paths)
        ]

    def folder(self, tokenizer: str) -> Path:
        """Return the cache folder for this text and a tokenizer. `tokenizer`: its fingerprint, or
        the settings of a bpe that is trained on the text."""
        split = "given" if self.val_paths else self.val_ratio
        # (The usual key is left out: so runs and caches of older versions have the same names.)
        text_key = () if self.text_key == "text" else (self.text_key,)
        return self.cache_dir / cache_key(
            self.content_hashes, tokenizer, split, self.max_tokens, *text_key
        )

    def load(self, tokenizer: Tokenizer | None) -> Dataset:
        """Load the ids from the cache; encode the text first if it does not have them.

        `tokenizer` None: a bpe that is trained on the text, and has a cache folder of its own.
        """
        bpe_folder = self.folder(f"bpe {self.vocab_size} {BPE_TRAINING_CHARS}")
        if tokenizer is None:
            load_or_build_folder(bpe_folder, lambda: self.facts, self.build_bpe, self.say)
            tokenizer = Tokenizer("bpe", parse_ranks((bpe_folder / RANKS).read_bytes()))
        folder = self.folder(tokenizer.fingerprint)
        build = partial(self.build_cache_folder, tokenizer)
        meta = load_or_build_folder(folder, lambda: self.facts, build, self.say)
        documents = f"{meta['documents']:,} document{'' if meta['documents'] == 1 else 's'}"
        size = meta["bytes"]
        amount = f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.2f} kB"
        source = f"{self.label}: {documents}, {amount}"
        # A resumed run keeps the bpe of its snapshot, even if a new run would train another. Both
        # must get the same fingerprint for the same text. So with a bpe it depends on the text, the
        # split, the limit of tokens and the size of the bpe, but not on the ranks.
        identity = bpe_folder if tokenizer.name == "bpe" else folder
        return Dataset.from_cache(folder, meta, tokenizer, source, fingerprint=identity.name)

    def build_bpe(self, folder: Path) -> dict[str, Any]:
        """Train a bpe on the training split and write it to `folder`. Return its meta.json."""
        self.say(
            f"training a BPE of {self.vocab_size} ids on the training text (its first 10 MB at "
            "most)"
        )
        text = chain.from_iterable(self.iter_chunked_documents("train"))
        ranks = train_bpe(take_up_to(BPE_TRAINING_CHARS, text), self.vocab_size)
        (folder / RANKS).write_text(format_ranks(ranks))
        return {"tokenizer": "bpe", "vocab_size": len(ranks) + 1}  # + 1: <|endoftext|>

    def build_cache_folder(self, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
        """Write the tokenizer and the ids to `folder`. Return their meta.json."""
        self.say(f"encoding {self.label}, once: the ids will be in {self.cache_dir}")
        (folder / RANKS).write_text(format_ranks(tokenizer.ranks))
        with tqdm(
            total=self.facts["bytes"], unit="B", unit_scale=True, disable=None, leave=False
        ) as bar:

            def counted(document: Iterator[str]) -> Iterator[str]:
                for chunk in document:
                    bar.update(utf8_length(chunk))
                    yield chunk

            parts = {
                split: tokenizer.encode_documents(map(counted, self.iter_chunked_documents(split)))
                for split in ("train", "val")
            }
            return write_split_ids(folder, tokenizer, self.seq_len, parts, self.max_tokens)


def utf8_length(text: str) -> int:
    """Return the number of bytes of `text` in UTF-8; a lone surrogate counts as one."""
    return len(text.encode("utf-8", "replace"))


def _range_of_split(path: Path, split: str, val_ratio: float) -> tuple[int, int]:
    """Return the first byte of a split in a file, and the byte behind its last.

    The end of the file is for validation: about `val_ratio` of its bytes. If a newline follows
    within the first CHUNK bytes of this part, the part begins after this newline instead.
    """
    size = path.stat().st_size
    cut = int(size * (1 - val_ratio))
    with reading(path), open(path, "rb") as file:
        file.seek(cut)
        near = file.read(CHUNK)
    rest_of_line = near.find(b"\n") + 1
    if not 0 < rest_of_line < size - cut:
        # Do not cut inside a character: skip UTF-8's continuation bytes, 0x80 to 0xBF.
        rest_of_line = len(near) - len(near.lstrip(bytes(range(0x80, 0xC0))))
    cut += rest_of_line
    return (0, cut) if split == "train" else (cut, size)


def load_dataset(
    train_data: list[str] | None,
    val_data: list[str] | None,
    *,
    val_ratio: float = 0.1,
    text_key: str | None = None,
    tokenizer_name: str | None = None,
    vocab_size: int | None = None,
    use_toy_data: bool = False,
    max_tokens: int | None = None,
    data_seed: int = 0,
    seq_len: int = 0,
    tokenizer: Tokenizer | None = None,
    cache_dir: Path = CACHE_DIR,
    say: Say = print,
) -> Dataset:
    """Load the data that the flags of the group "data" choose. Text that is not in the cache is
    encoded first.

    Args:
        train_data: files, folders and patterns; None: the built-in corpus, which is Python's
            standard library.
        val_data: files, folders and patterns for validation; None: a part of `train_data` is for
            validation.
        val_ratio: share of the data that is for validation, between 0 and 1.
        text_key: key of the text in each line of a .jsonl file; None: "text".
        tokenizer_name: None: "toy" for toy data, "gpt2" with `train_data`, else "bpe".
        max_tokens: limit for the tokens of each split, at least 1; None: no limit.
        data_seed: seed of toy data; other data do not use it.
        seq_len: if a split of text or toy data has fewer than seq_len + 1 tokens, DataError is
            raised and nothing is cached.
        tokenizer: the tokenizer of a resumed run's snapshot. With it the ids keep their meaning,
            even if the text on which a bpe was trained has changed. A tokenizer whose name is not
            the chosen name is ignored.

    Several processes may call this function at the same time. Raises DataError, with
    exit code 3 if the disk has no room for the cache. After an error the cache has no incomplete
    folder.
    """
    name = tokenizer_name or ("toy" if use_toy_data else "gpt2" if train_data else "bpe")
    if use_toy_data and (train_data or val_data or name != "toy"):
        raise DataError(
            "--use-toy-data makes its own data and tokenizer: drop --train-data, --val-data and "
            "--tokenizer-name"
        )
    if vocab_size is not None:
        check_vocab_size_flag(vocab_size, name)
    with os_errors_as_data_errors(cache_dir):
        if use_toy_data:
            return load_toy(vocab_size or 256, max_tokens, data_seed, seq_len, cache_dir, say)
        train, val = _find_train_and_val_files(train_data, val_data, say)
        is_tokens = suffix_of(train[0]) in TOKEN_SUFFIXES
        if is_tokens and name == "bpe":
            raise DataError(
                f"--tokenizer-name bpe: {train[0]} holds ids already; name the tokenizer that made "
                "them, for example gpt2"
            )
        if tokenizer is None or tokenizer.name != name:
            tokenizer = None if name == "bpe" else load_tokenizer(name)
        if is_tokens and tokenizer:
            return _dataset_of_token_files(
                train, val, val_ratio, max_tokens, seq_len, tokenizer, cache_dir, say
            )
        built_in = f"Python {platform.python_version()} standard library"
        return TextCorpus(
            label=describe_paths(train_data) if train_data else built_in,
            train_paths=train,
            val_paths=val,
            val_ratio=val_ratio,
            max_tokens=max_tokens,
            vocab_size=vocab_size or 1024,
            seq_len=seq_len,
            text_key=text_key or "text",
            cache_dir=cache_dir,
            say=say,
        ).load(tokenizer)


def check_vocab_size_flag(vocab_size: int, tokenizer_name: str) -> None:
    """Raise DataError if the tokenizer `tokenizer_name` cannot have `vocab_size` ids."""
    smallest = {"bpe": 257, "toy": 2 * N_TOY_SUCCESSORS}.get(tokenizer_name)
    if smallest is None:
        raise DataError(
            f"--vocab-size {vocab_size}: the vocabulary of {tokenizer_name} is fixed; drop the "
            "flag or use --tokenizer-name bpe"
        )
    if not smallest <= vocab_size <= 2**20:
        raise DataError(f"--vocab-size {vocab_size}: must be {smallest} to {2**20}")


def _find_train_and_val_files(
    train_data: list[str] | None, val_data: list[str] | None, say: Say
) -> tuple[list[Path], list[Path]]:
    """Return the files for training and the files for validation. Warn if a file is in both lists.
    Raises DataError if a name leads to no usable file, or if only some of the files are token
    files."""
    train = find_files(train_data, "--train-data", say) if train_data else find_stdlib()
    val = find_files(val_data, "--val-data", say) if val_data else []
    kinds = {suffix_of(path) in TOKEN_SUFFIXES for path in train + val}
    if kinds == {True, False}:
        raise DataError(
            "--train-data, --val-data: found both text and token files (.bin, .npy); name files of "
            "one kind"
        )
    trained = {path.resolve() for path in train}
    if shared := [str(path) for path in val if path.resolve() in trained]:
        say(
            f"warning  --val-data {describe_paths(shared)}: in --train-data, too: the validation "
            "loss will "
            "not see overfitting"
        )
    return train, val


def _dataset_of_token_files(
    train: list[Path],
    val: list[Path],
    val_ratio: float,
    max_tokens: int | None,
    seq_len: int,
    tokenizer: Tokenizer,
    cache_dir: Path,
    say: Say,
) -> Dataset:
    """Return the Dataset of token files, which are read in place.

    For validation: the files `val`; else the files in `train` with "val" in their names; else (all
    or none have it) the last `val_ratio` of all tokens.
    """
    source = describe_paths([path.name for path in train])
    # nanoGPT's files are called train.bin and val.bin. llm.c's files are called, for example,
    # fineweb_train_000001.bin and fineweb_val_000000.bin.
    named_val = [path for path in train if re.search("(?<![a-z])val", path.name.lower())]
    if not val and 0 < len(named_val) < len(train):
        train, val = [path for path in train if path not in named_val], named_val
    train_token_files, val_token_files = (
        [TokenFile.from_path(path, tokenizer.vocab_size) for path in paths]
        for paths in (train, val)
    )
    if not val_token_files:
        total = sum(file.count for file in train_token_files)
        n_train = total - max(1, int(total * val_ratio))
        val_token_files = slice_token_files(train_token_files, n_train, total)
        train_token_files = slice_token_files(train_token_files, 0, n_train)
    parts = [
        slice_token_files(files, 0, max_tokens or sys.maxsize)
        for files in (train_token_files, val_token_files)
    ]
    hashes = [
        noted_checksum(
            cache_dir,
            [file.path for file in files],
            partial(hash_ids, files),
            [(str(file.dtype), file.offset, file.count) for file in files],
            tokenizer.vocab_size,
        )
        for files in parts
    ]
    fingerprint = cache_key(hashes, tokenizer.fingerprint)
    counts = [file.count for files in parts for file in files]
    if short := [count for count in counts if count <= seq_len]:
        say(
            f"note     {len(short):,} of {len(counts):,} token files are shorter than a sequence "
            f"({seq_len + 1:,} tokens) and are not used: {sum(short):,} of {sum(counts):,} tokens"
        )
    return Dataset(tuple(parts[0]), tuple(parts[1]), tokenizer, source, fingerprint)
