"""Trained weights to start from (--init-from) or to look at: one of our snapshots, or GPT-2 in a
folder as transformers writes it (hf.py)."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data import DataError, Tokenizer
from model import MiniGPT, MiniGPTConfig

from .flags import LARGEST, UsageError, is_size
from .hf import open_folder, read_config
from .optimizer import Part
from .process import OneProcess
from .resume import blamed
from .snapshot import Resumed, SnapshotError, check_shapes, files_of, peek, read_snapshot

# The flags that follow from the weights.
SHAPE = "n_layers n_heads d_model d_ff max_position_embeddings".split()


@dataclass(frozen=True)
class Pretrained:
    """Weights, complete and finite, and all that they need to be of use."""

    path: Path
    config: MiniGPTConfig
    tokenizer: Tokenizer
    weights: dict[str, Tensor]  # by MiniGPT's names, on the CPU; may be of fewer bits than float32
    about: str  # what they are
    checksum: int  # the same for the same weights

    @torch.no_grad()
    def fill(self, model: nn.Module, part: Part) -> None:
        """Put them into a model of that shape; `part` as in `MiniGPT.init_weights`."""
        for name, weight in model.state_dict().items():
            weight.copy_(part(self.weights[name].float(), weight))


Origin = Resumed | Pretrained | None  # what a run begins with; None: weights that are drawn


def open_pretrained(path: Path) -> Pretrained:
    """Look at weights without keeping them. Raises SnapshotError or DataError."""
    if os.path.isdir(path):  # (Path's own raises for a name that is too long)
        config, weights, tokenizer = open_folder(path)
        about = "as transformers writes them"
    elif os.path.exists(path):
        state = read_snapshot(path)
        try:
            if not all(is_size(name, state["config"][name]) for name in LARGEST):
                raise ValueError
            config, weights = MiniGPTConfig(**state["config"]), state["model"]
            tokenizer = Tokenizer.from_state(state["tokenizer"])
            about = f"step {state['step']:,} on {state['data'].get('description')}"
        except (ValueError, TypeError, KeyError):
            raise SnapshotError(f"{path} holds no model: is it damaged?") from None
    else:
        raise SnapshotError(no_such(path))
    if tokenizer.vocab_size != config.vocab_size:
        raise SnapshotError(
            f"{path}: a model of {config.vocab_size:,} ids, but a tokenizer ({tokenizer.name}) of "
            f"{tokenizer.vocab_size:,}; in transformers "
            f"model.resize_token_embeddings({tokenizer.vocab_size}) makes them fit"
        )
    return Pretrained(path, config, tokenizer, weights, about, check_weights(path, config, weights))


def no_such(path: Path) -> str:
    words = f"there is no snapshot and no folder {path}"
    if path.name and os.path.isfile(f"{path}.pt"):
        return f"{words}; but there is {path}.pt"
    if path.is_absolute() or path.suffix or len(path.parts) > 2:
        return words
    return (  # "gpt2", "openai-community/gpt2": perhaps the name of a model on the hub
        f"{words}; nothing is downloaded here. Is it a GPT-2 on the Hugging Face hub? "
        f"`hf download {path} --local-dir {path.name}` makes the folder that this needs "
        "(config.json, model.safetensors, tokenizer.json)"
    )


def check_weights(path: Path, config: MiniGPTConfig, weights: dict[str, Tensor]) -> int:
    """Their checksum. Raises SnapshotError unless they are all of such a model, and finite."""
    if config.n_layers > len(weights):  # as many blocks take their time, only to be missing
        raise SnapshotError(f"{path} holds {len(weights)} tensors for {config.n_layers} layers")
    with torch.device("meta"):
        model = MiniGPT(config).state_dict()
    check_shapes(path, weights, model)
    checksum = 0
    for name, weight in weights.items():
        found = weight.float()
        if not found.isfinite().all():
            raise SnapshotError(f"{path} holds NaN or infinite weights ({name}): take others")
        # As whole numbers: their sum does not depend on the order in which it is taken.
        checksum += int(found.view(torch.int32).sum(dtype=torch.int64))
    return checksum


def load_model(path: Path, device: torch.device) -> tuple[MiniGPT, Tokenizer]:
    """The model in a snapshot or a transformers folder, ready to evaluate, and its tokenizer.
    Raises SnapshotError or DataError."""
    source, process = open_pretrained(path), OneProcess(device)
    with torch.device("meta"):
        model = MiniGPT(source.config)
    process.place(model)
    source.fill(model, process.part)
    return model.eval(), source.tokenizer


def open_init_from(args: argparse.Namespace) -> Pretrained | None:
    """What --init-from names; `args` get its shape and its tokenizer. None without the flag. Raises
    UsageError, also where something else was typed."""
    if args.init_from is None:
        return None
    try:
        source = open_pretrained(args.init_from)
    except (DataError, SnapshotError) as error:
        raise UsageError(f"--init-from: {error}") from None
    config, tokenizer = source.config, source.tokenizer
    toy = tokenizer.name == "toy"
    if (args.train_data or args.val_data) if toy else args.use_toy_data:
        knows = "toy data and no text" if toy else "text and no toy data"
        raise UsageError(f"--init-from {source.path} knows {knows}: name other data, or weights")
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
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        own = [file.absolute() for file in files_of(args.checkpoint_path)]
        if source.path.absolute() in own:
            raise UsageError(
                f"--init-from {source.path} is of the run that this one replaces, and would have "
                "another name when torchrun starts it again: name another --checkpoint-path"
            )
    if "seq_len" not in args.typed:
        args.seq_len = config.max_position_embeddings
    if args.seq_len > config.max_position_embeddings:
        raise UsageError(
            f"--seq-len {args.seq_len}: --init-from {source.path} has "
            f"{config.max_position_embeddings:,} positions, and cannot see further"
        )
    args.typed = args.typed | set(SHAPE)  # as with --model: nothing else may change them
    return source


def vocabulary_of(path: Path) -> int:
    """Ids of weights that `open_pretrained` has found to be good; they are not read again."""
    config = read_config(path) if os.path.isdir(path) else MiniGPTConfig(**peek(path)["config"])
    return config.vocab_size
