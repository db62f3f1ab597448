"""Write a small GPT-2 to a folder, in the format of transformers, but without transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from data.tokenizer import load_tokenizer
from data.tokenizer_json import to_json
from model import MiniGPT, MiniGPTConfig
from trainer.pretrained import MINIGPT_TO_TRANSFORMERS, renamed_and_transposed

CONFIG: dict[str, Any] = {"model_type": "gpt2", "activation_function": "gelu_new"}
CONFIG |= {"vocab_size": 257, "n_positions": 32, "n_embd": 16, "n_inner": None}
CONFIG |= {"n_layer": 2, "n_head": 2}
TOKENIZER = to_json(load_tokenizer("byte"))
Tensors = dict[str, np.ndarray]


def gpt2_tensors() -> Tensors:
    """Return random weights. They have the names of GPT-2's weights on the Hugging Face hub, which
    do not begin with "transformer."."""
    random, model = np.random.default_rng(0), MiniGPT(MiniGPTConfig(257, 32, 2, 2, 16, 64))
    return {
        name: random.normal(0, 0.2, weight.shape).astype(np.float32)
        for name, weight in renamed_and_transposed(
            model.state_dict(), MINIGPT_TO_TRANSFORMERS
        ).items()
    }


def write_folder(folder: Path, tensors: Tensors | None = None, files: dict | None = None) -> Path:
    """Write the model to `folder`, and return `folder`. `files`: name of a file -> its content,
    in place of the usual content. The content is bytes, or a value that is written as JSON, or
    None, which leaves out the file."""
    weights = save(gpt2_tensors() if tensors is None else tensors)
    whole = {"config.json": CONFIG, "tokenizer.json": TOKENIZER, "model.safetensors": weights}
    folder.mkdir()
    for name, content in (whole | (files or {})).items():
        if content is not None:
            is_bytes = isinstance(content, bytes)
            (folder / name).write_bytes(content if is_bytes else json.dumps(content).encode())
    return folder
