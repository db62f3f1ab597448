"""Convert text to token ids once: split documents into training and validation, encode each
document, and keep the ids in a cache.

    paths -> documents -> train | val -> ids -> data/cache/<key>/{train.bin,val.bin,...}

Token files of other programs are read in place; the cache has only their checksum. toy.py makes toy
data.
"""

import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from .documents import (
    TOKEN_SUFFIXES,
    is_json_lines,
    iter_chunked_documents,
    iter_text_chunks,
    reading,
    suffix_of,
)
from .errors import DataError
from .files import (
    CACHE_DIR,
    VAL_NAME,
    Say,
    check_disjoint,
    describe_paths,
    find_files,
    find_stdlib,
)
from .store import Build, cache_key, load_or_build_folder, os_errors_as_data_errors
from .tokenizer import Tokenizer, format_ranks, load_tokenizer, parse_ranks, train_bpe
from .tokens import (
    Dataset,
    Tokens,
    dataset_in_cache,
    open_token_file,
    take_up_to,
    write_split_ids,
)
from .toy import N_TOY_SUCCESSORS, load_toy

BPE_TRAINING_CHARS = 10_000_000
RANKS = "tokenizer.tiktoken"  # name of the tokenizer's file in a cache folder


@dataclass(frozen=True)
class TextCorpus:
    """Text files, their split into training and validation, and their cache folders."""

    train_paths: list[Path]
    val_paths: list[Path]
    val_ratio: float  # share of the text that is for validation; unused if `val_paths` has files
    max_tokens: int | None  # limit for the tokens of each split; None: no limit
    text_key: str  # key of the text in a line of JSON Lines
    cache_dir: Path
    say: Say

    @property
    def splits_each_file(self) -> bool:
        """True if the end of each file is for validation."""
        is_short = len(self.train_paths) * self.val_ratio < 1 and not self.val_paths
        return is_short and not any(is_json_lines(path, self.text_key) for path in self.train_paths)

    def documents(self, split: str) -> Iterator[Iterator[str]]:
        """Return the documents of a split, "train" or "val", each as an iterator over chunks of
        text. The rule: "Which part is for validation" in data/README.md."""
        if self.splits_each_file:
            return (
                iter_text_chunks(path, *_range_of_split(path, split, self.val_ratio))
                for path in self.train_paths
            )
        paths = self.val_paths if split == "val" and self.val_paths else self.train_paths
        documents = (iter_chunked_documents(path, self.text_key) for path in paths)
        numbered = enumerate(chain.from_iterable(documents))
        if self.val_paths:
            return (document for _, document in numbered)
        # Every (1 / val_ratio)-th document is for validation.
        turn, is_val = self.val_ratio, split == "val"
        return (doc for i, doc in numbered if (int((i + 1) * turn) > int(i * turn)) == is_val)

    def cached(self, build: Build, *settings: object) -> tuple[Path, dict[str, Any]]:
        """Return the cache folder of this text and `settings`, and its meta.json."""
        split = len(self.train_paths), bool(self.val_paths) or self.val_ratio
        paths, how = self.train_paths + self.val_paths, (self.max_tokens, self.text_key)
        folder = self.cache_dir / cache_key(paths, split, *how, *settings)
        return folder, load_or_build_folder(folder, build, self.say)

    def train_tokenizer(self, vocab_size: int) -> Tokenizer:
        """Return the bpe that is trained on the training text."""

        def build(folder: Path) -> dict[str, Any]:
            self.say(f"training a BPE of {vocab_size} ids on the training text, its first 10 MB")
            text = take_up_to(BPE_TRAINING_CHARS, chain.from_iterable(self.documents("train")))
            (folder / RANKS).write_text(format_ranks(train_bpe(text, vocab_size)))
            return {}

        folder, _ = self.cached(build, "bpe", vocab_size, BPE_TRAINING_CHARS)
        return Tokenizer("bpe", parse_ranks((folder / RANKS).read_bytes()))

    def load(self, label: str, tokenizer: Tokenizer) -> Dataset:
        """Load the ids from the cache; encode the text first if it does not have them."""
        size = sum(path.stat().st_size for path in self.train_paths + self.val_paths)

        def build(folder: Path) -> dict[str, Any]:
            self.say(f"encoding {label}, once: the ids will be in {self.cache_dir}")
            (folder / RANKS).write_text(format_ranks(tokenizer.ranks))
            # (A file that is in both splits counts as one document.)
            train, val = Counter[str](), Counter[str]()
            parts = {
                "train": tokenizer.encode_documents(self.documents("train"), train),
                "val": tokenizer.encode_documents(self.documents("val"), val),
            }
            meta = write_split_ids(folder, tokenizer.vocab_size, parts, self.max_tokens)
            count = train if self.splits_each_file else train + val
            return meta | {"documents": count["documents"], "empty": count["empty"], "bytes": size}

        folder, meta = self.cached(build, tokenizer.fingerprint)
        amount = f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.2f} kB"
        n = meta["documents"]
        if meta["empty"]:
            self.say(f"note     {label}: documents without text: {meta['empty']:,}; left out")
        share = meta["val_tokens"] / max(1, meta["train_tokens"] + meta["val_tokens"])
        chooses = not self.val_paths and not self.max_tokens
        if chooses and not self.val_ratio / 2 <= share <= self.val_ratio * 2:
            self.say(
                f"note     {share:.1%} of the tokens are for validation, --val-ratio is "
                f"{self.val_ratio:g}: documents stay whole, and their lengths differ much"
            )
        source = f"{label}: {n:,} document{'s' * (n != 1)}, {amount}"
        return dataset_in_cache(folder, meta, tokenizer, source)


def _range_of_split(path: Path, split: str, val_ratio: float) -> tuple[int, int]:
    """Return the first byte of a split in a file, and the byte behind its last. The last
    `val_ratio` of the bytes is for validation, from the beginning of a character on."""
    size = path.stat().st_size
    cut = int(size * (1 - val_ratio))
    with reading(path), open(path, "rb") as file:
        file.seek(cut)
        near = file.read(4)
    cut += len(near) - len(near.lstrip(bytes(range(0x80, 0xC0))))  # UTF-8's continuation bytes
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
        tokenizer: the tokenizer of a snapshot. With it the ids keep their meaning, also on other
            text than that on which a bpe was trained. A tokenizer whose name is not the chosen name
            is ignored.

    Several processes may call this function at the same time. Raises DataError, with exit code 3 if
    the disk has no room for the cache. After an error the cache has no incomplete folder.
    """
    name = tokenizer_name or ("toy" if use_toy_data else "gpt2" if train_data else "bpe")
    if use_toy_data and (train_data or val_data or text_key or name != "toy"):
        raise DataError(
            "--use-toy-data makes its own data and tokenizer: drop --train-data, --val-data, "
            "--text-key and --tokenizer-name"
        )
    if vocab_size is not None:
        check_vocab_size_flag(vocab_size, name)
    with os_errors_as_data_errors(cache_dir):
        if use_toy_data:
            return load_toy(vocab_size or 256, max_tokens, data_seed, cache_dir, say)
        train, val = find_train_and_val_files(train_data, val_data, say)
        is_tokens, key = suffix_of(train[0]) in TOKEN_SUFFIXES, text_key or "text"
        if text_key and (is_tokens or not any(is_json_lines(p, key) for p in train + val)):
            raise DataError(f"--text-key {key}: no file here has JSON objects in lines; drop it")
        if is_tokens and name == "bpe":
            raise DataError(
                f"--tokenizer-name bpe: {train[0]} holds ids already; name the tokenizer that made "
                "them, for example gpt2"
            )
        if tokenizer is None or tokenizer.name != name:
            tokenizer = None if name == "bpe" else load_tokenizer(name)
        if is_tokens and tokenizer:
            return load_token_files(train, val, val_ratio, max_tokens, tokenizer, cache_dir, say)
        corpus = TextCorpus(train, val, val_ratio, max_tokens, key, cache_dir, say)
        built_in = f"Python {platform.python_version()} standard library"
        label = describe_paths(train_data) if train_data else built_in
        return corpus.load(label, tokenizer or corpus.train_tokenizer(vocab_size or 1024))


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


def find_train_and_val_files(
    train_data: list[str] | None, val_data: list[str] | None, say: Say
) -> tuple[list[Path], list[Path]]:
    """Return the files for training and the files for validation: those of `val_data`, or those of
    `train_data` that have "val" in their names, or none.

    Raises DataError if a name leads to no usable file, if only some of the files are token files,
    or if a file for validation has the content of one for training.
    """
    train = find_files(train_data, "--train-data", say) if train_data else find_stdlib()
    val = find_files(val_data, "--val-data", say) if val_data else []
    named = [path for path in train if VAL_NAME.search(path.name.lower())]
    if train_data and not val and 0 < len(named) < len(train):
        train, val = [path for path in train if path not in named], named
        say(f"note     for validation, by its name: {describe_paths([*map(str, val)])}")
    if {suffix_of(path) in TOKEN_SUFFIXES for path in train + val} == {True, False}:
        raise DataError(
            "--train-data, --val-data: found both text and token files (.bin, .npy); name files of "
            "one kind"
        )
    check_disjoint(train, val)
    return train, val


def load_token_files(
    train: list[Path],
    val: list[Path],
    val_ratio: float,
    max_tokens: int | None,
    tokenizer: Tokenizer,
    cache_dir: Path,
    say: Say,
) -> Dataset:
    """Return the Dataset of token files, which are read in place. Without files for validation, the
    last `val_ratio` of all tokens are for validation."""
    rows = [Tokens.of_files(map(open_token_file, f), tokenizer.vocab_size) for f in (train, val)]
    if not val:
        n = len(rows[0])
        n_train = max(0, n - max(1, int(n * val_ratio)))
        rows = [rows[0].part(0, n_train), rows[0].part(n_train, n)]
    rows = [row.part(0, max_tokens or len(row)) for row in rows]

    def build(folder: Path) -> dict[str, Any]:
        train_sha256, val_sha256 = (row.sha256() for row in rows)
        return {"train": train_sha256, "val": val_sha256, "tokenizer": tokenizer.fingerprint}

    parts = [(row.start, row.stop) for row in rows]
    folder = cache_dir / cache_key(train + val, len(train), parts, tokenizer.fingerprint)
    meta = load_or_build_folder(folder, build, say)
    source = describe_paths([path.name for path in train])
    return Dataset(rows[0], rows[1], tokenizer, source, meta["sha256"])
