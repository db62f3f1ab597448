"""Make toy data: random ids, which need no file, and whose lowest possible loss is known."""

import random
from pathlib import Path
from typing import Any

import numpy as np

from .files import Say
from .store import cache_key, load_or_build_folder
from .tokenizer import NumberTokenizer
from .tokens import Dataset, Tokens

N_TOY_SUCCESSORS = 4
TOY_TRAIN, TOY_VAL = 1_000_000, 100_000


def make_random_walk_data(
    vocab_size: int, max_tokens: int | None, seed: int, cache_dir: Path, say: Say
) -> Dataset:
    """Load toy data, or make them: a random walk, determined by `seed`, in which each id has 4
    equally likely successors.

    No model can reach a loss below ln 4 = 1.386 nats, which a table of bigrams reaches. All ids are
    equally frequent, so a model that has learned nothing has a loss of ln(vocab_size) nats.
    """
    limits = [min(count, max_tokens or count) for count in (TOY_TRAIN, TOY_VAL)]

    def build(folder: Path) -> dict[str, Any]:
        rng = random.Random(seed)
        order = rng.sample(range(vocab_size), vocab_size)
        # `sample` draws distinct steps, so the successors are distinct.
        steps = rng.sample(range(vocab_size), N_TOY_SUCCESSORS)
        ids = [order[0]]
        for step in rng.choices(steps, k=sum(limits) - 1):
            ids.append(order[(ids[-1] + step) % vocab_size])
        train, val = np.split(np.array(ids), limits[:1])
        Tokens(folder / "train.bin", vocab_size).write([train])
        Tokens(folder / "val.bin", vocab_size).write([val])
        return {"vocab_size": vocab_size}

    folder = cache_dir / cache_key([], "toy", vocab_size, limits, seed)
    meta = load_or_build_folder(folder, build, say)
    source = f"toy data, each id has {N_TOY_SUCCESSORS} likely successors (best loss ln 4 = 1.386)"
    return Dataset.from_cache_folder(folder, meta, NumberTokenizer(vocab_size), source)
