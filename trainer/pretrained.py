"""Load trained weights, for --init-from and for tools, from a MiniGPT snapshot, or from a folder
with a GPT-2 in the format of Hugging Face's transformers.

MiniGPT has the same tensors as GPT-2 under other names, and with the matrices of the blocks
transposed, because transformers uses TensorFlow's layout ("Conv1D"). A variant of GPT-2 that
MiniGPT cannot compute is rejected (`SUPPORTED_GPT2_SETTINGS`). A folder is read with the package
safetensors, without transformers.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from data import DataError, Tokenizer
from data.errors import MiniGPTError, errors_as_data_errors
from data.files import describe_paths
from data.tokenizer import load_tokenizer
from data.tokenizer_json import check_vocabulary
from memory import MemorySavingGPT
from model import MiniGPT, MiniGPTConfig

from .flags import flag
from .optimizer import ShardLikeFn
from .settings import Rule, S, flags_with_rule
from .snapshot import LoadedSnapshot, SnapshotError, check_shapes, read_snapshot

# ---- a transformers folder

# (name of a size in config.json, its name in MiniGPT, its default, which is GPT-2's). A default of
# None for n_inner means 4 x n_embd.
CONFIG_JSON_SIZES = [
    ("vocab_size", "vocab_size", 50257),
    ("n_positions", "max_position_embeddings", 1024),
    ("n_layer", "n_layers", 12),
    ("n_head", "n_heads", 12),
    ("n_embd", "d_model", 768),
    ("n_inner", "d_ff", None),
]
# Setting in config.json -> the values with which transformers' GPT-2 computes the same as MiniGPT,
# the default first.
SUPPORTED_GPT2_SETTINGS: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
# First part of a tensor's name: in transformers -> in MiniGPT. (In files of GPT2LMHeadModel, names
# begin with "transformer.", which `read_transformers_folder` removes.)
TRANSFORMERS_TO_MINIGPT = {"wte": "token_embedding", "wpe": "position_embedding", "h": "blocks"}
MINIGPT_TO_TRANSFORMERS = {ours: theirs for theirs, ours in TRANSFORMERS_TO_MINIGPT.items()}
TOKENIZER_BY_SIZE = {257: "byte", 50257: "gpt2"}  # vocab_size in config.json -> --tokenizer-name
# Ends of names of tensors that are not read: older files also store the causal mask of each block,
# and the head, which transformers ignores if the embeddings are tied.
LEFT_OUT = (".attn.bias", ".attn.masked_bias", "lm_head.weight")


def renamed_and_transposed(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """Return `tensors` under other names: with `names` = TRANSFORMERS_TO_MINIGPT, names of
    transformers become names of MiniGPT (`h.3.ln_1.bias` -> `blocks.3.ln_1.bias`), with
    MINIGPT_TO_TRANSFORMERS the reverse.

    The matrices of a block are returned as transposed views: they are (in, out) in transformers,
    and (out, in) in MiniGPT.
    """
    result = {}
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        is_matrix = first in ("h", "blocks") and tensor.dim() == 2
        result[f"{names.get(first, first)}.{rest}"] = tensor.T if is_matrix else tensor
    return result


def read_config(folder: Path) -> MiniGPTConfig:
    """Read config.json and return the model's config, with dropout 0, because a run sets its
    dropout by --dropout. Raises DataError."""
    with errors_as_data_errors(folder / "config.json", "configuration of a model"):
        content = {"model_type": None} | json.loads((folder / "config.json").read_bytes())
        for name, allowed in SUPPORTED_GPT2_SETTINGS.items():
            if content.get(name, allowed[0]) not in allowed:
                raise DataError(
                    f"{name} is {content[name]!r}; MiniGPT is GPT-2 with {allowed[0]!r}"
                )
        sizes = {ours: content.get(theirs, default) for theirs, ours, default in CONFIG_JSON_SIZES}
        sizes["d_ff"] = sizes["d_ff"] or 4 * sizes["d_model"]
        return MiniGPTConfig(**sizes, dropout=0.0)


def import_safetensors() -> ModuleType:
    """Import and return the package safetensors, or raise DataError with an install hint if it is
    missing."""
    try:
        import safetensors.torch
    except ImportError:
        raise DataError(
            "weights of transformers need the package safetensors: pip install safetensors"
        ) from None
    return safetensors


def read_transformers_folder(folder: Path) -> tuple[MiniGPTConfig, dict[str, Tensor], Tokenizer]:
    """Return config, weights under MiniGPT's names, and tokenizer of a transformers folder.

    The weights are memory-mapped from the file: do not write to them. Raises DataError if the
    folder is incomplete, or if MiniGPT cannot compute its model.
    """
    config, library, path = read_config(folder), import_safetensors(), folder / "model.safetensors"
    with errors_as_data_errors(path, ".safetensors file"):
        tensors = library.torch.load_file(path)
    weights = {
        name.removeprefix("transformer."): tensor
        for name, tensor in tensors.items()
        if not name.endswith(LEFT_OUT)
    }
    if config.vocab_size not in TOKENIZER_BY_SIZE:
        raise DataError(
            f"{folder}: {config.vocab_size:,} ids, but no tokenizer is read from a folder: known "
            "are gpt2 of 50,257 and byte of 257 ids; a snapshot has its tokenizer"
        )
    tokenizer = load_tokenizer(TOKENIZER_BY_SIZE[config.vocab_size])
    check_vocabulary(folder, tokenizer)
    return config, renamed_and_transposed(weights, TRANSFORMERS_TO_MINIGPT), tokenizer


# ---- a transformers folder, or a snapshot


@dataclass(frozen=True)
class Pretrained:
    """Trained weights with their config and tokenizer; `read_pretrained` has checked that the
    weights are complete and finite."""

    path: Path
    config: MiniGPTConfig
    tokenizer: Tokenizer
    weights: dict[str, Tensor]  # under MiniGPT's names, on the CPU, in any float dtype
    weights_checksum: int  # equal weights have equal checksums

    @torch.no_grad()
    def fill(self, model: nn.Module, shard_like: ShardLikeFn) -> None:
        """Copy the weights into a model of the same shape, in the model's dtype; `shard_like(full,
        weight)` returns this process's rows of a full tensor."""
        for name, weight in model.state_dict().items():
            weight.copy_(shard_like(self.weights[name].float(), weight))


SnapshotOrPretrained = LoadedSnapshot | Pretrained | None  # source of a run's weights; None: random


def read_pretrained(path: Path) -> Pretrained:
    """Read weights from a snapshot or from a transformers folder, and check that they are finite
    and have the names and shapes of model.py. Raises SnapshotError or DataError."""
    if os.path.isdir(path):  # (Path.is_dir raises an error for a very long name)
        config, weights, tokenizer = read_transformers_folder(path)
    elif os.path.exists(path):
        state = read_snapshot(path)
        with errors_as_data_errors(path, "snapshot of a model"):
            config, weights = MiniGPTConfig(**state["config"]), state["model"]
            tokenizer = Tokenizer.from_state(state["tokenizer"])
    else:
        hint = f"for one of the Hugging Face hub: hf download {path} --local-dir {path.name}"
        if path.suffix == ".pt" or path.parent != Path() and path.parent.exists():
            there = sorted(map(str, path.parent.glob("*.pt")))
            hint = f"there are {describe_paths(there)}" if there else "a trainer writes one"
        raise SnapshotError(f"there is no snapshot and no folder {path}; {hint}")
    with torch.device("meta"):
        model = MemorySavingGPT(config)
    check_shapes(path, weights, model.state_dict())
    if not all(weight.isfinite().all() for weight in weights.values()):
        raise SnapshotError(f"{path} holds NaN or infinite weights: take others")
    # The weights' bits are added as integers, because such a sum does not depend on the order.
    ints = torch.int32
    checksum = sum(int(w.float().view(ints).sum(dtype=torch.int64)) for w in weights.values())
    return Pretrained(path, config, tokenizer, weights, checksum)


def load_model_and_tokenizer(path: Path, device: torch.device) -> tuple[MiniGPT, Tokenizer]:
    """Return the model of a snapshot or of a transformers folder, in evaluation mode and in
    float32, and its tokenizer. Raises SnapshotError or DataError."""
    source = read_pretrained(path)
    with torch.device("meta"):
        model = MemorySavingGPT(source.config)
    model.to_empty(device=device).load_state_dict(source.weights)
    return model.eval(), source.tokenizer


def read_init_from(settings: S) -> tuple[Pretrained | None, S]:
    """Return the weights that --init-from names, and the settings with the flags that must agree
    with them (shape and tokenizer), or (None, settings) without --init-from.

    Raises MiniGPTError if the weights cannot be loaded, or if a typed flag contradicts them.
    """
    if settings.init_from is None:
        return None, settings
    source = read_pretrained(settings.init_from)
    config, tokenizer = source.config, source.tokenizer.name
    required: dict[str, Any] = {name: getattr(config, name) for name in flags_with_rule(Rule.SHAPE)}
    required |= {"tokenizer_name": tokenizer, "use_toy_data": tokenizer == "toy"}
    if tokenizer in ("toy", "bpe") or "vocab_size" in settings.typed:
        required["vocab_size"] = config.vocab_size
    for name, value in required.items():
        typed = getattr(settings, name)
        if name in settings.typed and typed != value:
            raise MiniGPTError(
                f"{flag(name)} {typed}: --init-from {source.path} has {value}; leave it out"
            )
    if "seq_len" not in settings.typed:
        required["seq_len"] = config.max_position_embeddings
    # These flags count as typed, so that a resume has them without reading the weights.
    return source, settings.replace(**required, typed={**settings.typed, **required})
