"""GPT-2 in a folder as Hugging Face's transformers writes and reads it.

MiniGPT is GPT-2, tensor by tensor; other names, and matrices that lie the other way round
(transformers kept TensorFlow's, "Conv1D"), are all that differs. What GPT-2 can also be there, and
MiniGPT cannot, is refused (`GPT2_ALONE`). Needs the package safetensors, but no transformers.
"""

import json
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from data import DataError, Tokenizer
from data.tokenizer import load_tokenizer, parsing
from data.tokenizer_json import read_folder
from model import MiniGPTConfig

from .flags import LARGEST, is_size
from .snapshot import SaveError, cannot_save

# config.json's name of a size, MiniGPT's, and GPT-2's value: what is left out there.
SIZES = [
    ("vocab_size", "vocab_size", 50257),
    ("n_positions", "max_position_embeddings", 1024),
    ("n_layer", "n_layers", 12),
    ("n_head", "n_heads", 12),
    ("n_embd", "d_model", 768),
    ("n_inner", "d_ff", None),
]
# What a GPT-2 of transformers computes otherwise than MiniGPT, unless these have these values.
GPT2_ALONE: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
# The first word of a tensor's name, there and here. (Their model's have "transformer." before it.)
OURS = {"wte": "token_embedding", "wpe": "position_embedding", "h": "blocks"}
THEIRS = {ours: theirs for theirs, ours in OURS.items()}
MASKS = (".attn.bias", ".attn.masked_bias")  # GPT-2's older files hold each layer's causal mask


def renamed(name: str, words: dict[str, str]) -> str:
    """`h.3.ln_1.weight` -> `blocks.3.ln_1.weight`, or back."""
    first, _, rest = name.partition(".")
    return f"{words.get(first, first)}.{rest}"


def turned(name: str, weight: Tensor) -> Tensor:
    """Between a Linear's matrix (out, in) and their Conv1D's (in, out); the rest is the same."""
    return weight.T if name.startswith("blocks.") and weight.dim() == 2 else weight


def open_folder(folder: Path) -> tuple[MiniGPTConfig, dict[str, Tensor], Tokenizer]:
    """The weights have MiniGPT's names, and are mapped into memory: they must not be written to.
    Raises DataError."""
    config, found = read_config(folder), read_weights(folder)
    found = {renamed(name.removeprefix("transformer."), OURS): found[name] for name in found}
    weights = {name: turned(name, found[name]) for name in found if not name.endswith(MASKS)}
    head = weights.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, weights.get("token_embedding.weight", head)):
        raise DataError(f"{folder}: lm_head is not wte; MiniGPT has one weight for both")
    tokenizer = read_folder(folder)
    if tokenizer is None and config.vocab_size == 50257:
        tokenizer = load_tokenizer("gpt2")
    if tokenizer is None:
        raise DataError(
            f"{folder} holds no tokenizer.json, and no vocab.json with merges.txt; with "
            f"{config.vocab_size:,} ids it is not GPT-2's own either"
        )
    return config, weights, tokenizer


def read_json(path: Path) -> dict[str, Any]:
    """Raises DataError."""
    with parsing(path, "JSON object"):
        return {**json.loads(path.read_bytes())}


def read_config(folder: Path) -> MiniGPTConfig:
    """The shape that config.json tells; dropout is left to whoever trains. Raises DataError."""
    path = folder / "config.json"
    content = {"model_type": None} | read_json(path)
    for name, allowed in GPT2_ALONE.items():
        if content.get(name, allowed[0]) not in allowed:
            what = f"{name} is {content[name]!r}; MiniGPT is GPT-2 with {allowed[0]!r}"
            raise DataError(f"{path}: {what}")
    shape: dict[str, Any] = {}
    for theirs, ours, default in SIZES:
        size = content.get(theirs, default)
        if size is None and ours == "d_ff":
            size = 4 * shape["d_model"]
        if not is_size(ours, size):
            raise DataError(
                f"{path}: {theirs} is {size!r}, not a whole number of at least 1 and at most "
                f"{LARGEST[ours]:,}"
            )
        shape[ours] = size
    try:
        return MiniGPTConfig(**shape, dropout=0.0)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the shards that its index names. Raises DataError."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not whole.exists() and not index.exists():  # but a pytorch_model.bin, as older folders have
        way_out = f"model.save_pretrained({str(folder)!r}) in transformers writes it"
        raise DataError(f"{folder} holds no {whole.name}; {way_out}")
    if whole.exists():
        return read_tensors(whole)
    with parsing(index, "index of weights"):
        names = {Path(name).name for name in read_json(index)["weight_map"].values()}
    shards = [read_tensors(folder / name) for name in sorted(names)]
    return {name: tensor for shard in shards for name, tensor in shard.items()}


def import_safetensors() -> ModuleType:
    """The library of the .safetensors format. Raises DataError with the way to get it."""
    try:
        import safetensors.torch
    except ImportError:
        raise DataError(
            "weights of transformers need the package safetensors: pip install safetensors"
        ) from None
    return safetensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, mapped into memory: one that is not used is not read.
    They must not be written to. Raises DataError that names the file and what is wrong with it."""
    library = import_safetensors()
    with parsing(path, ".safetensors file"):
        open(path, "rb").close()  # Python says more plainly than the library why that cannot be
        return library.torch.load_file(path)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write them, complete or not at all. Raises SaveError.

    The library takes all tensors together, each in one piece: turned matrices are copied first,
    so this needs about as much memory again as the weights.
    """
    library = import_safetensors()
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        library.torch.save_file(tensors, path, metadata={"format": "pt"})
    except library.SafetensorError as error:  # "... File too large (os error 27)"
        code = re.search(r"os error (\d+)", str(error))
        reason = OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(str(error))
        n_bytes = sum(tensor.nbytes for tensor in tensors.values())
        raise SaveError(cannot_save(path, reason, n_bytes)) from None
