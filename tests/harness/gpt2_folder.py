"""A folder as transformers writes it, without transformers and without our writer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from data.tokenizer import load_tokenizer
from data.tokenizer_json import to_json

CONFIG: dict[str, Any] = {"model_type": "gpt2", "activation_function": "gelu_new"}
CONFIG |= {"vocab_size": 257, "n_positions": 32, "n_embd": 16, "n_inner": None}
CONFIG |= {"n_layer": 2, "n_head": 2}
TOKENIZER = to_json(load_tokenizer("byte"))
Tensors = dict[str, np.ndarray]


def gpt2_tensors(config: dict[str, Any] = CONFIG) -> Tensors:
    """Random weights by the names of the model on the hub, which have no prefix."""
    random = np.random.default_rng(0)
    C = config["n_embd"]
    wide = config["n_inner"] or 4 * C
    shapes = {"wte.weight": (config["vocab_size"], C), "wpe.weight": (config["n_positions"], C)}
    for i in range(config["n_layer"]):
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{norm}.weight": (C,), f"h.{i}.{norm}.bias": (C,)}
        linears = {"attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C)}
        linears |= {"mlp.c_fc": (C, wide), "mlp.c_proj": (wide, C)}
        for name, shape in linears.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[1:]}
    shapes |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
    return {
        name: random.normal(size=shape, scale=0.2).astype(np.float32)
        for name, shape in shapes.items()
    }


def safetensors(tensors: Tensors, pad: int = 0, **more: Any) -> bytes:
    """The bytes of a file; its header may tell of more than there is."""
    content = save(tensors)
    end = 8 + int.from_bytes(content[:8], "little")
    text = json.dumps(json.loads(content[8:end]) | more).encode() + b" " * pad
    return len(text).to_bytes(8, "little") + text + content[end:]


def write_folder(
    folder: Path,
    config: dict[str, Any] = CONFIG,
    tensors: Tensors | None = None,
    tokenizer: Any = TOKENIZER,
    weights: bytes | None = None,
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    content = weights or safetensors(gpt2_tensors(config) if tensors is None else tensors)
    (folder / "model.safetensors").write_bytes(content)
    return folder
