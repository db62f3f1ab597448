"""Documents to tokens: which split, and once only: the result is kept in a cache.

    paths -> documents -> train | val -> ids -> data/cache/<key>/{train.bin,val.bin,...}

Token files made elsewhere are read in place; toy data: toy.py.
"""

import os
import platform
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import data.store as store

from .batches import TokenFile, hash_ids, slice_files
from .documents import CHUNK, TOKEN_SUFFIXES, read_documents, read_text, suffix_of
from .files import CACHE_DIR, find_files, find_stdlib, warn_of_shared
from .store import Dataset, FoundData, Say
from .tokenizer import DataError, Tokenizer, format_ranks, load_tokenizer, parse_ranks, train_bpe
from .toy import TOY_SUCCESSORS, find_toy

BPE_TRAINING_CHARS = 10_000_000
ENCODING_THREADS = min(4, os.cpu_count() or 1)
RANKS = "tokenizer.tiktoken"  # in a folder of the cache


@dataclass(frozen=True)
class Text:
    """Text files, how to split them, and what makes ids of them."""

    label: str
    train: list[Path]
    val: list[Path]
    ratio: float  # the validation part, unless `val` is given
    max_tokens: int | None  # of each part
    tokenizer_name: str
    vocab_size: int  # of a bpe that is still to be trained
    known: Tokenizer | None
    seq_len: int  # tokens, which each part must have, and one more
    cache_dir: Path
    say: Say

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.train + self.val)

    @cached_property
    def documents(self) -> int:
        """How many. All text is read for it, so that nothing is written if some is bad."""
        count = 0
        for document in _documents(self.train + self.val):
            count += 1
            for _ in document:
                pass
        lines = next((path for path in self.train if suffix_of(path) == ".jsonl"), None)
        if lines and not self.val and count * self.ratio < 1:
            few = f"too few documents ({count}) to give --val-ratio {self.ratio} to validation"
            raise DataError(f"{lines}: {few}; raise it or give --val-data")
        return count

    def split(self) -> Iterator[tuple[str, Iterator[str]]]:
        """("train" or "val", chunks of text) of each document; data/README.md states the rule."""
        if not self.val and self.documents * self.ratio < 1:
            for path in self.train:
                size = path.stat().st_size
                cut = _tail(path, size, self.ratio)
                yield "train", read_text(path, 0, cut)
                yield "val", read_text(path, cut, size)
            return
        for number, document in enumerate(_documents(self.train)):
            turn = int((number + 1) * self.ratio) > int(number * self.ratio)
            yield "val" if turn and not self.val else "train", document
        for document in _documents(self.val):
            yield "val", document

    @cached_property
    def content(self) -> list[str]:
        """Hashes of the training and the validation files."""
        return [store.hash_files(self.train), store.hash_files(self.val)]

    def folder(self, vocabulary: str) -> Path:
        """Of the cache, by what it is made from."""
        split = "given" if self.val else self.ratio
        return self.cache_dir / store.key(self.content, vocabulary, split, self.max_tokens)

    def place(self, fingerprint: str | None) -> Path:
        """The folder of these ids, there or not. `fingerprint`: of a run that goes on."""
        known = self.known  # a BPE follows from its text and size: it has a place before training
        bpe = self.folder(f"bpe {self.vocab_size} {BPE_TRAINING_CHARS}")
        if known is None:
            return bpe
        own = self.folder(known.fingerprint)
        if self.tokenizer_name != "bpe" or own.name == fingerprint:
            return own
        # Of an edited text it is another BPE's: then the ids of `known` have their own place.
        is_of_known = bpe.name == fingerprint  # nothing there: training would give it again
        if store.read_meta(bpe):
            is_of_known = (bpe / RANKS).read_text() == format_ranks(known.ranks)
        return bpe if is_of_known else own

    def find(self, fingerprint: str | None) -> FoundData:
        """The data as `find_dataset` returns them."""
        folder, known = self.place(fingerprint), self.known
        meta = store.read_meta(folder)

        @store.one_line(self.cache_dir)
        def load() -> Dataset:
            made = meta or store.build_cache(folder, self.build, self.seq_len, self.say)
            saved = folder / RANKS
            tokenizer = known or Tokenizer("bpe", parse_ranks(saved.read_bytes(), str(saved)))
            n, size = made["documents"], made["bytes"]
            documents = "1 document" if n == 1 else f"{n:,} documents"
            amount = f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.2f} kB"
            about = f"{self.label}: {documents}, {amount}"
            return store.cached_dataset(folder, made, tokenizer, about)

        if meta is None:
            self.documents  # noqa: B018  (looks whether all text is good)
        size = meta["vocab_size"] if meta else known.vocab_size if known else self.vocab_size
        return FoundData(size, load, is_most=meta is None and known is None)

    def build(self, folder: Path) -> dict[str, Any]:
        """Write a folder of the cache; returns its meta.json."""
        tokenizer = self.known or self.train_bpe()
        (folder / RANKS).write_text(format_ranks(tokenizer.ranks))
        self.say(f"encoding {self.label}, once: the ids will be in {store.shown(self.cache_dir)}")
        return {
            "tokenizer": self.tokenizer_name,
            "vocab_size": tokenizer.vocab_size,
            "corpus": self.label,
            "files": len(self.train + self.val),
            "documents": self.documents,
            "bytes": self.size,
            "sha256": self.content,
            **self.encode(tokenizer, folder),
        }

    def train_bpe(self) -> Tokenizer:
        """On the training part."""

        def texts() -> Iterator[str]:
            left = BPE_TRAINING_CHARS
            for split, document in self.split():
                for chunk in document if split == "train" else ():
                    yield chunk[:left]
                    left -= len(chunk)
                    if left <= 0:
                        return

        most = self.vocab_size
        self.say(f"training a BPE of {most} ids on the training text (its first 10 MB at most)")
        tokenizer = Tokenizer("bpe", train_bpe(texts(), most))
        if tokenizer.vocab_size < most:
            self.say(f"no pair of ids repeats any more: the BPE ends at {tokenizer.vocab_size} ids")
        return tokenizer

    def encode(self, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
        """Write train.bin and val.bin into `folder`; returns their part of meta.json."""
        dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        limit = self.max_tokens or sys.maxsize
        written = {"train": 0, "val": 0}

        def chunks() -> Iterator[tuple[str, str | None]]:
            for split, document in self.split():
                for chunk in chain([None], document):  # None: the start of a document
                    if written[split] >= limit:
                        break
                    yield split, chunk
                if min(written.values()) >= limit:
                    return

        def encode(item: tuple[str, str | None]) -> np.ndarray:
            return np.array([tokenizer.eot_id]) if item[1] is None else tokenizer.encode(item[1])

        todo = chunks()
        with (
            open(folder / "train.bin", "wb") as train,
            open(folder / "val.bin", "wb") as val,
            tqdm(total=self.size, unit="B", unit_scale=True, disable=None, leave=False) as bar,
            ThreadPoolExecutor(ENCODING_THREADS) as pool,  # tiktoken releases the interpreter lock
        ):
            file_of = {"train": train, "val": val}
            # A few at a time: of all chunks `map` would take in the whole text.
            while some := list(islice(todo, 4 * ENCODING_THREADS)):
                for (split, chunk), ids in zip(some, pool.map(encode, some), strict=True):
                    ids = ids[: limit - written[split]].astype(dtype)
                    file_of[split].write(ids.tobytes())
                    written[split] += len(ids)
                    bar.update(len((chunk or "").encode("utf-8", "replace")))
        return {"dtype": dtype, "train_tokens": written["train"], "val_tokens": written["val"]}


def _documents(paths: list[Path]) -> Iterator[Iterator[str]]:
    return chain.from_iterable(map(read_documents, paths))


def _tail(path: Path, size: int, ratio: float) -> int:
    """Where the last `ratio` of the file's bytes begins: after a newline, if one is near."""
    cut = int(size * (1 - ratio))
    with open(path, "rb") as file:
        file.seek(cut)
        near = file.read(CHUNK)
    newline = near.find(b"\n") + 1
    if 0 < newline < size - cut:
        return cut + newline
    inside = len(near) - len(near.lstrip(bytes(range(0x80, 0xC0))))  # UTF-8: not a first byte
    return cut + inside


def find_dataset(
    train_data: list[str] | None,
    val_data: list[str] | None,
    *,
    val_ratio: float = 0.1,
    tokenizer_name: str | None = None,
    vocab_size: int | None = None,
    use_toy_data: bool = False,
    max_tokens: int | None = None,
    data_seed: int = 0,
    seq_len: int = 0,
    tokenizer: Tokenizer | None = None,
    fingerprint: str | None = None,
    cache_dir: Path = CACHE_DIR,
    say: Say = print,
) -> FoundData:
    """What is behind the `data:` flags; loaded, it comes from the cache if it is there already.

    train_data None is the built-in corpus, Python's standard library. val_ratio lies between 0 and
    1. max_tokens, 1 at least, caps training and validation, each. data_seed is for toy data alone.
    Nothing is written of data in which no sequence of seq_len tokens, and the next one, fits.
    Safe to call from many processes at once.
    A run that goes on brings the tokenizer and the fingerprint that its Dataset had: its ids keep
    their meaning even if the text that a bpe was trained on has changed, and data that have not
    changed have that fingerprint again. A tokenizer of another name is left aside.
    Raises DataError; bad input is found before anything is written.
    """
    name = tokenizer_name or ("toy" if use_toy_data else "gpt2" if train_data else "bpe")
    if use_toy_data and (train_data or val_data):
        raise DataError("--use-toy-data makes its own data: drop --train-data and --val-data")
    if use_toy_data != (name == "toy"):
        raise DataError(f"--tokenizer-name {name}: toy belongs to --use-toy-data, and it alone")
    if vocab_size is not None:
        if name not in ("bpe", "toy"):
            what = f"the vocabulary of {name} is fixed"
            raise DataError(
                f"--vocab-size {vocab_size}: {what}; drop the flag or use --tokenizer-name bpe"
            )
        least = 257 if name == "bpe" else 2 * TOY_SUCCESSORS
        if not least <= vocab_size <= 2**20:
            raise DataError(f"--vocab-size {vocab_size}: must be {least} to {2**20}")
    if use_toy_data:
        return find_toy(vocab_size or 256, max_tokens, data_seed, seq_len, cache_dir, say)
    with store.one_line(cache_dir):
        train, val = _find(train_data, val_data, say)
        is_tokens = suffix_of(train[0]) in TOKEN_SUFFIXES
        if is_tokens and name == "bpe":
            way_out = "name the tokenizer that made them, for example gpt2"
            raise DataError(f"--tokenizer-name bpe: {train[0]} holds ids already; {way_out}")
        known = tokenizer if tokenizer is not None and tokenizer.name == name else None
        if known is None and name != "bpe":
            known = load_tokenizer(name)
        if is_tokens and known:
            data = _read_tokens(train, val, val_ratio, max_tokens, known)
            return FoundData(known.vocab_size, lambda: data)
        stdlib = f"Python {platform.python_version()} standard library"
        about = store.label(train_data) if train_data else stdlib
        how = (name, vocab_size or 1024, known, seq_len, cache_dir, say)
        return Text(about, train, val, val_ratio, max_tokens, *how).find(fingerprint)


def _find(
    train_data: list[str] | None, val_data: list[str] | None, say: Say
) -> tuple[list[Path], list[Path]]:
    """The files to train on and to validate on, all of one kind; says what is odd about them."""
    train = find_files(train_data, "--train-data", say) if train_data else find_stdlib()
    val = find_files(val_data, "--val-data", say) if val_data else []
    kinds = {suffix_of(path) in TOKEN_SUFFIXES for path in train + val}
    if kinds == {True, False}:
        both = "text and token files (.bin, .npy)"
        raise DataError(f"--train-data, --val-data: found both {both}; name files of one kind")
    warn_of_shared(train, val, say)
    return train, val


def _read_tokens(
    train: list[Path], val: list[Path], ratio: float, max_tokens: int | None, tokenizer: Tokenizer
) -> Dataset:
    """Token files as they are. Validation: `val`, else the files named so, else the tail."""
    about = store.label([path.name for path in train])
    # nanoGPT writes train.bin and val.bin, llm.c fineweb_train_000001.bin and fineweb_val_...
    named_val = [path for path in train if re.search("(?<![a-z])val", path.name.lower())]
    if not val and 0 < len(named_val) < len(train):
        train, val = [path for path in train if path not in named_val], named_val
    train_files, val_files = ([TokenFile.open(path) for path in paths] for paths in (train, val))
    if not val_files:
        total = sum(file.count for file in train_files)
        n_train = total - max(1, int(total * ratio))
        val_files = slice_files(train_files, n_train, total)
        train_files = slice_files(train_files, 0, n_train)
    parts = [slice_files(files, 0, max_tokens or sys.maxsize) for files in (train_files, val_files)]
    content = [hash_ids(files, tokenizer) for files in parts]
    fingerprint = store.key(content, tokenizer.fingerprint)
    return Dataset(tuple(parts[0]), tuple(parts[1]), tokenizer, about, fingerprint)
