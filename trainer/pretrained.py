"""Trained weights to start from (--init-from) or to look at: one of our snapshots, or GPT-2 in a
folder as transformers writes it (hf.py)."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data import Tokenizer
from model import MiniGPT, MiniGPTConfig

from .flags import UsageError
from .hf import open_folder
from .resume import blamed
from .snapshot import SnapshotError, read_snapshot

# The flags that follow from the weights.
SHAPE = "n_layers n_heads d_model d_ff max_position_embeddings".split()


@dataclass(frozen=True)
class Pretrained:
    """Weights, complete and finite, and all that they need to be of use."""

    path: Path
    config: MiniGPTConfig
    tokenizer: Tokenizer
    weight: Callable[[str], Tensor]  # by MiniGPT's name: float32, on the CPU
    names: list[str]  # all of MiniGPT's
    checksum: int  # the same for the same weights

    @torch.no_grad()
    def fill(
        self, model: nn.Module, part: Callable[[Tensor, Tensor], Tensor] = lambda whole, _: whole
    ) -> None:
        """Put them into a model of that shape; `part` as in `MiniGPT.init_weights`."""
        weights = model.state_dict()
        for name in self.names:
            weights[name].copy_(part(self.weight(name), weights[name]))


def open_pretrained(path: Path) -> Pretrained:
    """Look at weights without keeping them. Raises SnapshotError: one line, and the way out."""
    if os.path.isdir(path):  # (Path's own raises for a name that is too long)
        config, weight, tokenizer = open_folder(path)
    elif os.path.exists(path):
        state = read_snapshot(path)
        try:
            config, weight = MiniGPTConfig(**state["config"]), state["model"].__getitem__
            tokenizer = Tokenizer.from_state(state["tokenizer"])
        except (ValueError, TypeError):
            raise SnapshotError(f"{path} holds no model: is it damaged?") from None
    else:
        raise SnapshotError(no_such(path))
    if tokenizer.vocab_size != config.vocab_size:
        raise SnapshotError(
            f"{path}: a model of {config.vocab_size:,} ids, but a tokenizer "
            f"({tokenizer.name}) of {tokenizer.vocab_size:,}"
        )
    with torch.device("meta"):
        expected = MiniGPT(config).state_dict()
    checksum = check_weights(path, expected, weight)
    return Pretrained(path, config, tokenizer, weight, list(expected), checksum)


def no_such(path: Path) -> str:
    words = f"there is no snapshot and no folder {path}"
    if path.is_absolute() or path.suffix or len(path.parts) > 2:
        return words
    return (  # "gpt2", "openai-community/gpt2": perhaps the name of a model on the hub
        f"{words}; nothing is downloaded here. Is it a model of the Hugging Face hub? "
        f"`hf download {path} --local-dir {path.name}` makes the folder that this needs "
        "(config.json, model.safetensors, tokenizer.json)"
    )


def check_weights(path: Path, expected: dict[str, Tensor], weight: Callable[[str], Tensor]) -> int:
    """Their checksum. Raises SnapshotError unless each is there, of its shape, and finite."""
    checksum = 0
    for name, like in expected.items():
        try:
            found = weight(name)
            if found.shape != like.shape or found.dtype != like.dtype:
                raise SnapshotError(
                    f"{path} holds {name} as {tuple(found.shape)}, its configuration says "
                    f"{tuple(like.shape)}: is it damaged?"
                )
        except (LookupError, AttributeError):
            raise SnapshotError(f"{path} holds no {name}: is it complete?") from None
        if not found.isfinite().all():
            raise SnapshotError(f"{path} holds NaN or infinite weights ({name}): take others")
        # As whole numbers: their sum does not depend on the order in which it is taken.
        checksum += int(found.view(torch.int32).sum(dtype=torch.int64))
    return checksum


def load_model(path: Path, device: torch.device) -> tuple[MiniGPT, Tokenizer]:
    """The model in a snapshot or a transformers folder, ready to evaluate, and its tokenizer.

    Raises SnapshotError.
    """
    source = open_pretrained(path)
    with torch.device("meta"):
        model = MiniGPT(source.config)
    model.to_empty(device=device)
    source.fill(model)
    return model.eval(), source.tokenizer


def open_init_from(args: argparse.Namespace) -> Pretrained | None:
    """What --init-from names; `args` get its shape and its tokenizer. None without the flag.

    Raises UsageError, also where something else was typed.
    """
    if args.init_from is None:
        return None
    try:
        source = open_pretrained(args.init_from)
    except SnapshotError as error:
        raise UsageError(f"--init-from: {error}") from None
    config, tokenizer = source.config, source.tokenizer
    toy = tokenizer.name == "toy"
    if toy and args.train_data:
        raise UsageError(f"--train-data: --init-from {source.path} knows toy data only, no text")
    if args.use_toy_data and not toy:
        raise UsageError(f"--use-toy-data: --init-from {source.path} was trained on text")
    wanted: dict[str, Any] = {name: getattr(config, name) for name in SHAPE}
    wanted |= {"tokenizer_name": tokenizer.name, "use_toy_data": toy}
    if toy or tokenizer.name == "bpe" or "vocab_size" in args.typed:
        wanted["vocab_size"] = config.vocab_size
    for name, value in wanted.items():
        typed = getattr(args, name)
        if name in args.typed and typed != value:
            raise UsageError(
                f"{blamed(args, name)} {typed}: --init-from {source.path} has {value}; leave it out"
            )
        setattr(args, name, value)
    if "seq_len" not in args.typed:
        args.seq_len = config.max_position_embeddings
    if args.seq_len > config.max_position_embeddings:
        raise UsageError(
            f"--seq-len {args.seq_len}: --init-from {source.path} has "
            f"{config.max_position_embeddings:,} positions, and cannot see further"
        )
    args.typed = args.typed | set(SHAPE)  # as with --model: nothing else may change them
    return source
