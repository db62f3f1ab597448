"""Data that need no file, and whose best loss is known."""

import random
from pathlib import Path
from typing import Any

import numpy as np

from .store import Dataset, FoundData, Say, build_cache, cached_dataset, key, one_line, read_meta
from .tokenizer import ToyTokenizer

TOY_SUCCESSORS = 4
TOY_TRAIN, TOY_VAL = 1_000_000, 100_000


def find_toy(
    vocab_size: int, max_tokens: int | None, seed: int, seq_len: int, cache_dir: Path, say: Say
) -> FoundData:
    """A random walk in which every id has 4 equally likely successors, fixed by `seed`.

    No model can beat ln 4 = 1.386 nats, and a bigram table reaches it; every id is equally
    common, so a model that learned nothing stays at ln(vocab_size).
    """
    counts = [min(count, max_tokens or count) for count in (TOY_TRAIN, TOY_VAL)]
    folder = cache_dir / key("toy", vocab_size, counts, seed)
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"

    def build(temporary: Path) -> dict[str, Any]:
        rng = random.Random(seed)
        order = rng.sample(range(vocab_size), vocab_size)
        steps = rng.sample(range(vocab_size), TOY_SUCCESSORS)  # distinct, so successors are too
        ids = [order[0]]
        for step in rng.choices(steps, k=sum(counts) - 1):
            ids.append(order[(ids[-1] + step) % vocab_size])
        walk = np.array(ids, dtype=dtype)
        # (Not numpy's tofile: if the disk is full, it does not say so.)
        (temporary / "train.bin").write_bytes(walk[: counts[0]].tobytes())
        (temporary / "val.bin").write_bytes(walk[counts[0] :].tobytes())
        return {
            "tokenizer": "toy",
            "vocab_size": vocab_size,
            "corpus": f"toy data, seed {seed}",
            "dtype": dtype,
            "train_tokens": counts[0],
            "val_tokens": counts[1],
        }

    @one_line(cache_dir)
    def load() -> Dataset:
        meta = read_meta(folder) or build_cache(folder, build, seq_len, say)
        about = f"toy data, each id has {TOY_SUCCESSORS} likely successors (best loss ln 4 = 1.386)"
        return cached_dataset(folder, meta, ToyTokenizer(vocab_size), about)

    return FoundData(vocab_size, load)
