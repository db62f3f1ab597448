"""Convert data to token ids once, and keep the ids in a cache.

    paths -> documents -> ids -> train | val -> data/cache/<key>/{train.bin,val.bin,...}

toy.py makes toy data.
"""

import os
import platform
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .documents import TOKEN_SUFFIXES, is_json_lines, iter_chunked_documents, suffix_of
from .errors import DataError
from .files import (
    CACHE_DIR,
    VAL_NAME,
    Say,
    check_and_count_duplicates,
    describe_paths,
    find_files,
    find_stdlib_files,
)
from .store import cache_key, load_or_build_folder, os_errors_as_data_errors
from .tokenizer import Tokenizer, format_ranks, load_tokenizer, parse_ranks, train_bpe
from .tokens import CHUNK_TOKENS, Dataset, Tokens, iter_token_file, take_up_to
from .toy import N_TOY_SUCCESSORS, make_random_walk_data

BPE_TRAINING_CHARS = 10_000_000
RANKS = "tokenizer.tiktoken"  # name of the tokenizer's file in a cache folder


def iter_ids(
    paths: list[Path], tokenizer: Tokenizer, text_key: str, count: Counter[str]
) -> Iterator[np.ndarray]:
    """Yield the ids of text files or token files, in chunks.

    In text, the id of <|endoftext|> comes before each document, and `count` counts the documents
    (see `Tokenizer.encode_documents`). Raises DataError.
    """
    for path in paths:
        if suffix_of(path) in TOKEN_SUFFIXES:
            yield from iter_token_file(path, tokenizer.vocab_size)
        else:
            yield from tokenizer.encode_documents(iter_chunked_documents(path, text_key), count)


def encode_train_and_val(
    folder: Path,
    paths: tuple[list[Path], list[Path]],
    tokenizer: Tokenizer,
    text_key: str,
    val_ratio: float,
    max_tokens: int | None,
) -> dict[str, Any]:
    """Write train.bin, val.bin and the tokenizer to `folder`; return what meta.json says of them.

    `paths`: files for training, and files for validation. Without the latter, the last `val_ratio`
    of all ids is for validation.
    """
    twins = check_and_count_duplicates(*paths)
    train, val = (Tokens(folder / name, tokenizer.vocab_size) for name in ("train.bin", "val.bin"))
    count = Counter(documents=0, empty=0)
    (folder / RANKS).write_text(format_ranks(tokenizer.ranks))
    pieces, val_pieces = (iter_ids(p, tokenizer, text_key, count) for p in paths)
    # (With so many ids, each split has `max_tokens`.)
    limit = max_tokens and int(max_tokens / min(val_ratio, 1 - val_ratio)) + 1
    train.write(pieces, limit)
    n = n_train = len(train)
    if not paths[1]:
        n_train = max(0, n - max(1, int(n * val_ratio)))
        starts = range(n_train, n, CHUNK_TOKENS)
        val_pieces = (train.read(start, min(start + CHUNK_TOKENS, n)) for start in starts)
    val.write(val_pieces, max_tokens)
    os.truncate(train.path, min(n_train, max_tokens or n_train) * train.dtype.itemsize)
    return {**count, "twins": twins, "train_tokens": len(train), "val_tokens": len(val)}


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
    """Load the data that the flags of the group "data" choose, after encoding text that is not yet
    in the cache.

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
        tokenizer: the tokenizer of a snapshot, with which the ids keep their meaning, also on other
            text than that on which a bpe was trained. It is ignored if its name is not the chosen
            name.

    Several processes may call this function at the same time. Raises DataError, with exit code 3 if
    the disk has no room for the cache, and leaves no incomplete folder there.
    """
    name = tokenizer_name or ("toy" if use_toy_data else "gpt2" if train_data else "bpe")
    if use_toy_data and (train_data or val_data or text_key or name != "toy"):
        raise DataError(
            "--use-toy-data makes its own data and tokenizer: drop --train-data, --val-data, "
            "--text-key and --tokenizer-name"
        )
    smallest = {"bpe": 257, "toy": 2 * N_TOY_SUCCESSORS}.get(name, 2**21)
    if vocab_size is not None and not smallest <= vocab_size <= 2**20:
        raise DataError(
            f"--vocab-size {vocab_size}: must be 257 to {2**20} for bpe, {2 * N_TOY_SUCCESSORS} to "
            f"{2**20} for toy data; the vocabulary of other tokenizers is fixed: drop the flag"
        )
    with os_errors_as_data_errors(cache_dir):
        if use_toy_data:
            return make_random_walk_data(vocab_size or 256, max_tokens, data_seed, cache_dir, say)
        train, val = find_train_and_val_files(train_data, val_data, say)
        key = text_key or "text"
        if text_key and not any(is_json_lines(path, key) for path in train + val):
            raise DataError(f"--text-key {key}: no file here has JSON objects in lines; drop it")
        if tokenizer is None or tokenizer.name != name:
            tokenizer = (
                load_or_train_bpe(train, key, vocab_size or 1024, cache_dir, say)
                if name == "bpe" and suffix_of(train[0]) not in TOKEN_SUFFIXES
                else load_tokenizer(name)
            )
        built_in = f"Python {platform.python_version()} standard library"
        label = describe_paths([Path(name).name or name for name in train_data or [built_in]])

        def build(folder: Path) -> dict[str, Any]:
            say(f"encoding {label}, once: the ids will be in {cache_dir}")
            return encode_train_and_val(folder, (train, val), tokenizer, key, val_ratio, max_tokens)

        settings = len(train), val_ratio, max_tokens, key, tokenizer.fingerprint
        folder = cache_dir / cache_key(train + val, *settings)
        meta = load_or_build_folder(folder, build, say)
        n, size = meta["documents"], sum(path.stat().st_size for path in train + val)
    if meta["empty"]:
        say(f"note     {label}: documents without text: {meta['empty']:,}; left out")
    if meta["twins"] and train_data:
        say(f"note     {label}: files with the content of another one: {meta['twins']:,}")
    amount = f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.2f} kB"
    documents = f"{n:,} document{'s' * (n != 1)}, " if n else ""
    return Dataset.from_cache_folder(folder, meta, tokenizer, f"{label}: {documents}{amount}")


def load_or_train_bpe(
    paths: list[Path], text_key: str, vocab_size: int, cache_dir: Path, say: Say
) -> Tokenizer:
    """Return the bpe that is trained on the beginning of text files."""

    def build(folder: Path) -> dict[str, Any]:
        say(f"training a BPE of {vocab_size} ids on the training text, its first 10 MB")
        chunks = (
            chunk
            for path in paths
            for document in iter_chunked_documents(path, text_key)
            for chunk in document
        )
        text = take_up_to(BPE_TRAINING_CHARS, chunks)
        (folder / RANKS).write_text(format_ranks(train_bpe(text, vocab_size)))
        return {}

    folder = cache_dir / cache_key(paths, text_key, "bpe", vocab_size, BPE_TRAINING_CHARS)
    load_or_build_folder(folder, build, say)
    return Tokenizer("bpe", parse_ranks((folder / RANKS).read_bytes()))


def find_train_and_val_files(
    train_data: list[str] | None, val_data: list[str] | None, say: Say
) -> tuple[list[Path], list[Path]]:
    """Return the files for training and the files for validation: those of `val_data`, or those of
    `train_data` that have "val" in their names, or none.

    Raises DataError if a name leads to no usable file, or if only some of the files hold tokens.
    """
    train = find_files(train_data, "--train-data", say) if train_data else find_stdlib_files()
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
    return train, val
