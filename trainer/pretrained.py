"""Load trained weights, for --init-from and for tools. The source is a MiniGPT snapshot, or a
folder with a GPT-2 in the format of Hugging Face's transformers.

MiniGPT has the same tensors as GPT-2. Only the names of the tensors differ, and the matrices of the
blocks are transposed, because transformers uses TensorFlow's layout ("Conv1D"). A variant of GPT-2
that MiniGPT cannot compute is rejected (see `SUPPORTED_GPT2_SETTINGS`). To read a folder, the
package safetensors is needed, but not transformers.
"""

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data import DataError, Tokenizer
from data.errors import MiniGPTError
from data.tokenizer import errors_as_data_errors, load_tokenizer
from data.tokenizer_json import check_vocabulary
from memory import MemorySavingGPT, recompute_plan_of_config
from model import MiniGPT, MiniGPTConfig
from planner.formulas import count_parameters

from .flags import flag
from .optimizer import ShardLikeFn
from .settings import Rule, S, names_with, parse_value
from .snapshot import LoadedSnapshot, SnapshotError, check_shapes, peek, read_snapshot

# ---- the arithmetic of GPT-2

LAYER = {  # parameter prefix in nn.TransformerEncoderLayer -> prefix in model.py's Block
    "self_attn.in_proj_": "attn.c_attn",
    "self_attn.out_proj.": "attn.c_proj",
    "linear1.": "mlp.c_fc",
    "linear2.": "mlp.c_proj",
    "norm1.": "ln_1",
    "norm2.": "ln_2",
}


def gpt2_logits(weights: dict[str, Tensor], config: MiniGPTConfig, ids: Tensor) -> Tensor:
    """Compute GPT-2's logits (B, T, V) for ids (B, T) from a MiniGPT's weights, with torch's own
    layers. Raises KeyError or RuntimeError if the weights are not those of a GPT-2."""
    T, embedding = ids.size(1), weights["token_embedding.weight"]
    x = embedding[ids] + weights["position_embedding.weight"][:T]  # (B, T, C)
    layer = nn.TransformerEncoderLayer(
        config.d_model,
        config.n_heads,
        config.d_ff,
        dropout=0.0,
        activation=partial(F.gelu, approximate="tanh"),
        batch_first=True,
        norm_first=True,
    )
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    for i in range(config.n_layers):
        layer.load_state_dict(
            {
                theirs + kind: weights[f"blocks.{i}.{ours}.{kind}"]
                for theirs, ours in LAYER.items()
                for kind in ("weight", "bias")
            }
        )
        x = layer(x, mask, is_causal=True)
    x = F.layer_norm(x, x.shape[-1:], weights["ln_f.weight"], weights["ln_f.bias"])
    return F.linear(x, embedding)


@torch.no_grad()
def computes_gpt2(model: MiniGPT) -> bool:
    """Return whether a model on the CPU computes GPT-2: its tensors have GPT-2's names and shapes,
    and its logits of some tokens agree with those of `gpt2_logits`."""
    config = model.config
    weights = {name: weight.float() for name, weight in model.state_dict().items()}
    ids = torch.arange(min(64, config.max_position_embeddings))[None] % config.vocab_size
    try:
        ours, theirs = model.eval()(ids), gpt2_logits(weights, config, ids)
    except (KeyError, RuntimeError):  # a tensor is missing, or has another shape
        return False
    n = sum(weight.numel() for weight in weights.values())  # larger with an extra tensor
    is_close = (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    return bool(is_close) and n == count_parameters(config)


# ---- a transformers folder

# (name of a size in config.json, its name in MiniGPT, its default). The defaults are GPT-2's. (A
# default of None for n_inner means 4 x n_embd.)
CONFIG_JSON_SIZES = [
    ("vocab_size", "vocab_size", 50257),
    ("n_positions", "max_position_embeddings", 1024),
    ("n_layer", "n_layers", 12),
    ("n_head", "n_heads", 12),
    ("n_embd", "d_model", 768),
    ("n_inner", "d_ff", None),
]
# Setting in config.json -> the values with which transformers' GPT-2 computes the same as MiniGPT.
# The first value is the default.
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
# Ends of the names of causal masks. Older files also store the mask of each block.
MASKS = (".attn.bias", ".attn.masked_bias")


def renamed_and_transposed(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """Return `tensors` under other names. With `names` = TRANSFORMERS_TO_MINIGPT, names of
    transformers become names of MiniGPT; with MINIGPT_TO_TRANSFORMERS, the reverse. Example:
    `h.3.ln_1.bias` <-> `blocks.3.ln_1.bias`.

    The matrices of a block are returned as transposed views: they are (in, out) in transformers,
    and (out, in) in MiniGPT.
    """
    result = {}
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        is_matrix = first in ("h", "blocks") and tensor.dim() == 2
        result[f"{names.get(first, first)}.{rest}"] = tensor.T if is_matrix else tensor
    return result


def read_transformers_folder(folder: Path) -> tuple[MiniGPTConfig, dict[str, Tensor], Tokenizer]:
    """Read a transformers folder. Return config, weights under MiniGPT's names, and tokenizer.

    The weights are memory-mapped from the file: do not write to them. Raises DataError if the
    folder is incomplete, or if MiniGPT cannot compute its model.
    """
    config, tensors = read_config(folder), read_safetensors(folder)
    weights = {
        name.removeprefix("transformer."): tensor
        for name, tensor in tensors.items()
        if not name.endswith(MASKS)
    }
    head = weights.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, weights.get("wte.weight", head)):
        raise DataError(f"{folder}: lm_head is not wte; MiniGPT has one weight for both")
    if config.vocab_size not in TOKENIZER_BY_SIZE:
        raise DataError(
            f"{folder}: {config.vocab_size:,} ids, but no tokenizer is read from a folder: known "
            "are gpt2 of 50,257 and byte of 257 ids; a snapshot has its tokenizer"
        )
    tokenizer = load_tokenizer(TOKENIZER_BY_SIZE[config.vocab_size])
    check_vocabulary(folder, tokenizer)
    return config, renamed_and_transposed(weights, TRANSFORMERS_TO_MINIGPT), tokenizer


def read_config(folder: Path) -> MiniGPTConfig:
    """Read config.json and return the model's config, with dropout 0: a run sets its dropout by
    --dropout. Raises DataError."""
    with errors_as_data_errors(folder / "config.json", "configuration of a model"):
        content = {"model_type": None} | json.loads((folder / "config.json").read_bytes())
        for name, allowed in SUPPORTED_GPT2_SETTINGS.items():
            if content.get(name, allowed[0]) not in allowed:
                raise DataError(
                    f"{name} is {content[name]!r}; MiniGPT is GPT-2 with {allowed[0]!r}"
                )
        sizes = {ours: content.get(theirs, default) for theirs, ours, default in CONFIG_JSON_SIZES}
        return make_config(sizes | {"d_ff": sizes["d_ff"] or 4 * sizes["d_model"], "dropout": 0.0})


def make_config(content: dict[str, Any]) -> MiniGPTConfig:
    """Return a MiniGPTConfig with the values in `content`, which come from a file. Raises DataError
    if a size is outside of the limits of its flag, or if the config is impossible."""
    for name in (*names_with(Rule.SHAPE), "vocab_size"):
        if not isinstance(content[name], int):
            raise DataError(f"{name} is {content[name]!r}, not a whole number")
        try:
            parse_value(name, str(content[name]))
        except ValueError as error:
            raise DataError(f"{name} {error}") from None
    try:
        config = MiniGPTConfig(**content)
        recompute_plan_of_config(config)  # raises ValueError for a strange policy
        return config
    except ValueError as error:
        raise DataError(error) from None


def import_safetensors() -> ModuleType:
    """Import and return the package safetensors. Raises DataError if the package is missing; the
    message says how to install it."""
    try:
        import safetensors.torch
    except ImportError:
        raise DataError(
            "weights of transformers need the package safetensors: pip install safetensors"
        ) from None
    return safetensors


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of model.safetensors, memory-mapped: the disk is read only for tensors
    that are used. Do not write to the tensors. Raises DataError."""
    path = folder / "model.safetensors"
    # This file may be missing: transformers splits a large model into several files, and older
    # versions wrote pytorch_model.bin.
    if not path.exists():
        raise DataError(
            f"{folder} holds no {path.name}; in transformers "
            f"model.save_pretrained({str(folder)!r}, max_shard_size='99GB') writes it"
        )
    library = import_safetensors()
    with errors_as_data_errors(path, ".safetensors file"):
        # Open the file first: if this fails, Python's own error is clearer than the library's.
        open(path, "rb").close()
        return library.torch.load_file(path)


# ---- a transformers folder, or a snapshot


@dataclass(frozen=True)
class Pretrained:
    """Trained weights with their config and tokenizer. `open_pretrained` has checked that the
    weights are complete and finite."""

    path: Path
    config: MiniGPTConfig
    tokenizer: Tokenizer
    weights: dict[str, Tensor]  # under MiniGPT's names, on the CPU, in any float dtype
    description: str  # where the weights come from, in words
    weights_checksum: int  # equal weights have equal checksums

    @torch.no_grad()
    def fill(self, model: nn.Module, shard_like: ShardLikeFn) -> None:
        """Copy the weights into a model of the same shape, in the model's dtype. `shard_like(full,
        weight)` returns this process's rows of a full tensor."""
        for name, weight in model.state_dict().items():
            weight.copy_(shard_like(self.weights[name].float(), weight))

    def make_model_with_weights(self, device: torch.device) -> MiniGPT:
        """Return a model with these weights, in evaluation mode and in float32."""
        with torch.device("meta"):
            model = MemorySavingGPT(self.config)
        model.to_empty(device=device).load_state_dict(self.weights)
        return model.eval()


SnapshotOrPretrained = LoadedSnapshot | Pretrained | None  # source of a run's weights; None: random


def open_pretrained(path: Path) -> Pretrained:
    """Read weights from a snapshot or from a transformers folder, and check them. Raises
    SnapshotError or DataError."""
    if os.path.isdir(path):  # (Path.is_dir raises an error for a very long name)
        config, weights, tokenizer = read_transformers_folder(path)
        about = "as transformers writes them"
    elif os.path.exists(path):
        state = read_snapshot(path)
        with errors_as_data_errors(path, "snapshot of a model"):
            config, weights = make_config(state["config"]), state["model"]
            tokenizer = Tokenizer.from_state(state["tokenizer"])
            about = f"step {state['step']:,} on {state['data'].get('description')}"
    else:
        raise SnapshotError(
            f"there is no snapshot and no folder {path}; if that is a GPT-2 on the Hugging Face "
            f"hub, `hf download {path} --local-dir {path.name}` makes the folder"
        )
    if tokenizer.vocab_size != config.vocab_size:
        raise SnapshotError(
            f"{path}: a model of {config.vocab_size:,} ids, but a tokenizer ({tokenizer.name}) of "
            f"{tokenizer.vocab_size:,}; in transformers "
            f"model.resize_token_embeddings({tokenizer.vocab_size}) makes them fit"
        )
    return Pretrained(
        path, config, tokenizer, weights, about, check_and_hash_weights(path, config, weights)
    )


def check_and_hash_weights(path: Path, config: MiniGPTConfig, weights: dict[str, Tensor]) -> int:
    """Return the checksum of the weights. Raises SnapshotError if a name or a shape differs from
    the model of `config`, or if a weight is NaN or infinite."""
    with torch.device("meta"):
        model = MemorySavingGPT(config).state_dict()
    check_shapes(path, weights, model)
    checksum = 0
    for name, weight in weights.items():
        values = weight.float()
        if not values.isfinite().all():
            raise SnapshotError(f"{path} holds NaN or infinite weights ({name}): take others")
        # Add the weights' bits as integers: such a sum does not depend on the order.
        checksum += int(values.view(torch.int32).sum(dtype=torch.int64))
    return checksum


def load_model_and_tokenizer(path: Path, device: torch.device) -> tuple[MiniGPT, Tokenizer]:
    """Return the model of a snapshot or of a transformers folder, in evaluation mode, and its
    tokenizer. Raises SnapshotError or DataError."""
    source = open_pretrained(path)
    return source.make_model_with_weights(device), source.tokenizer


def open_init_from(settings: S) -> tuple[Pretrained | None, S]:
    """Return the weights that --init-from names, and the settings with the flags that must agree
    with them: shape and tokenizer. Without --init-from, return (None, settings).

    Raises MiniGPTError if the weights cannot be loaded, or if a typed flag contradicts them.
    """
    if settings.init_from is None:
        return None, settings
    try:
        source = open_pretrained(settings.init_from)
    except (DataError, SnapshotError) as error:
        raise MiniGPTError(f"--init-from: {error}") from None
    config, tokenizer, toy = source.config, source.tokenizer, source.tokenizer.name == "toy"
    required: dict[str, Any] = {name: getattr(config, name) for name in names_with(Rule.SHAPE)}
    required |= {"tokenizer_name": tokenizer.name, "use_toy_data": toy}
    if toy or tokenizer.name == "bpe" or "vocab_size" in settings.typed:
        required["vocab_size"] = config.vocab_size
    for name, value in required.items():
        typed = getattr(settings, name)
        if name in settings.typed and typed != value:
            raise MiniGPTError(
                f"{flag(name)} {typed}: --init-from {source.path} has {value}; leave it out"
            )
    longest = config.max_position_embeddings
    required["seq_len"] = settings.seq_len if "seq_len" in settings.typed else longest
    if required["seq_len"] > longest:
        raise MiniGPTError(
            f"--seq-len {settings.seq_len}: --init-from {source.path} has {longest:,} positions, "
            "and cannot see further"
        )
    # These flags count as typed, as with --model, so that nothing else changes them.
    return source, settings.replace(**required, typed=frozenset({*settings.typed, *required}))


def read_vocab_size(path: Path) -> int:
    """Return the vocabulary size of the model at `path`. This reads the config but not the weights:
    `open_pretrained` has checked both before."""
    config = read_config(path) if os.path.isdir(path) else MiniGPTConfig(**peek(path)["config"])
    return config.vocab_size
