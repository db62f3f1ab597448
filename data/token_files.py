"""Token files that were made elsewhere (nanoGPT, llm.c, .npy), which are read in place."""

import re
import sys
from pathlib import Path

from .batches import TokenFile, hash_ids, slice_files
from .store import Dataset, describe, key, label
from .tokenizer import DataError, Tokenizer, load_tokenizer


def load_token_files(
    train: list[Path],
    val: list[Path],
    ratio: float,
    name: str,
    max_tokens: int | None,
    tokenizer: Tokenizer | None,
) -> Dataset:
    """Validation: `val`, else the files named so, else the tail. tokenizer: that of `name`, where
    a run that goes on brings it. Raises DataError."""
    if name == "bpe":
        raise DataError(
            f"--tokenizer-name bpe: {train[0]} holds ids already, there is no text to train it "
            "on; name the tokenizer that made them, for example gpt2"
        )
    tokenizer = tokenizer or load_tokenizer(name)
    about = label([path.name for path in train])
    # nanoGPT writes train.bin and val.bin, llm.c fineweb_train_000001.bin and fineweb_val_...
    named_val = [path for path in train if re.search("(?<![a-z])val", path.name.lower())]
    if not val and 0 < len(named_val) < len(train):
        train, val = [path for path in train if path not in named_val], named_val
    train_files = [TokenFile.open(path) for path in train]
    val_files = [TokenFile.open(path) for path in val]
    if not val_files:
        total = sum(file.count for file in train_files)
        n_val = max(1, int(total * ratio))
        val_files = slice_files(train_files, total - n_val, total)
        train_files = slice_files(train_files, 0, total - n_val)
    limit = max_tokens or sys.maxsize
    train_files, val_files = slice_files(train_files, 0, limit), slice_files(val_files, 0, limit)
    content = [hash_ids(files, tokenizer) for files in (train_files, val_files)]
    counts = [sum(file.count for file in files) for files in (train_files, val_files)]
    return Dataset(
        tuple(train_files),
        tuple(val_files),
        tokenizer,
        describe(about, counts, tokenizer),
        key(content, tokenizer.fingerprint),
    )
