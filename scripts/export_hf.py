"""Export a trained MiniGPT as a folder for Hugging Face's transformers and programs based on it.

    python -m scripts.export_hf checkpoints/minigpt_single.pt --out minigpt-hf

    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
    pipeline("text-generation", "minigpt-hf")("def ")

MiniGPT has the architecture of GPT-2, so the folder holds a GPT2LMHeadModel with the weights of the
snapshot, bit for bit, and a tokenizer that gives the same ids for any text. If a changed model.py
no longer computes GPT-2, nothing is written. The export needs the package safetensors (pip install
safetensors), but not transformers. (To train further here, pass the snapshot to --init-from, which
takes no tokenizer from a tokenizer.json.)
"""

import json
import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from data import Tokenizer
from data.errors import MiniGPTError
from data.tokenizer import EOT_TEXT
from data.tokenizer_json import to_json
from model import MiniGPT, MiniGPTConfig
from planner.formulas import count_parameters
from scripts import add_snapshot_argument, cli_main
from trainer.flags import OneLineParser
from trainer.pretrained import (
    CONFIG_JSON_SIZES,
    MINIGPT_TO_TRANSFORMERS,
    SUPPORTED_GPT2_SETTINGS,
    Pretrained,
    import_safetensors,
    read_pretrained,
    renamed_and_transposed,
)
from trainer.report import describe_model
from trainer.snapshot import SaveError

# Mean square of GPT-2's logits for the weights and ids of `check_is_gpt2`, in float64. (Computed
# with transformers' GPT2LMHeadModel.)
GPT2_LOGITS = 7.375809515808666


def gpt2_config_fields(config: MiniGPTConfig) -> dict[str, Any]:
    """Return the sizes and the dropout of `config` under their names in transformers' GPT2Config,
    which are also those in config.json."""
    sizes = {theirs: getattr(config, ours) for theirs, ours, _ in CONFIG_JSON_SIZES}
    return sizes | dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), config.dropout)


def json_files(config: MiniGPTConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the JSON files as {name: content}. A model of toy data gets no tokenizer files,
    because its ids stand for no text."""
    alone = {name: allowed[0] for name, allowed in SUPPORTED_GPT2_SETTINGS.items()}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eot_id)
    # The sampling defaults of scripts.generate. max_length ends a text at the last position of the
    # model, because transformers lacks the sliding window of scripts.generate.
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 40}
    sampling |= {"pad_token_id": tokenizer.eot_id, "max_length": config.max_position_embeddings}
    files: dict[str, Any] = {"generation_config.json": ends | sampling}
    if tokenizer.name != "toy":
        files["tokenizer.json"] = to_json(tokenizer)
        files["tokenizer_config.json"] = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # reads only tokenizer.json
            **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), EOT_TEXT),
            "model_max_length": config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            # "<|endoftext|>" inside a text is encoded as plain text, as in this project.
            "split_special_tokens": True,
        }
    whole = {"architectures": ["GPT2LMHeadModel"]} | alone | gpt2_config_fields(config) | ends
    return files | {"config.json": whole}  # written last: no program opens a folder without it


@torch.no_grad()
def check_is_gpt2(source: Pretrained) -> None:
    """Raise MiniGPTError unless model.py computes GPT-2: a small model with fixed weights gives
    GPT-2's logits, and `source` has as many weights as GPT-2."""
    model = MiniGPT(MiniGPTConfig(11, 8, n_layers=2, n_heads=2, d_model=8, d_ff=24)).double().eval()
    for name, weight in model.state_dict().items():
        # Equal weights in all blocks, because a changed model.py may run one block several times
        start = sum(re.sub(r"^blocks\.\d+\.", "", name).encode())
        weight.copy_(torch.arange(start, start + weight.numel()).view_as(weight).double().sin())
    found = model(torch.arange(8)[None]).square().mean().item()
    n = sum(weight.numel() for weight in source.weights.values())
    if abs(found / GPT2_LOGITS - 1) > 1e-6 or n != count_parameters(source.config):
        raise MiniGPTError(
            f"{source.path}: with model.py as it is, this is no GPT-2; transformers would compute "
            "other logits, so it is not exported"
        )


def export(source: Pretrained, folder: Path) -> None:
    """Write all files into the folder, or none. Raises MiniGPTError, DataError or SaveError.

    safetensors takes all weights at once, each contiguous and in a storage of its own, so all
    weights are copied first, which needs as much memory again.
    """
    library = import_safetensors()
    check_is_gpt2(source)
    theirs = renamed_and_transposed(source.weights, MINIGPT_TO_TRANSFORMERS)
    theirs = {f"transformer.{name}": weight.float() for name, weight in theirs.items()}
    weights = {
        name: weight.clone(memory_format=torch.contiguous_format) for name, weight in theirs.items()
    }
    files = json_files(source.config, source.tokenizer)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Ctrl-C or a full disk must leave no file: the next export needs an empty folder.
        with TemporaryDirectory(dir=folder) as new:
            library.torch.save_file(weights, f"{new}/model.safetensors", metadata={"format": "pt"})
            for name, content in files.items():
                text = json.dumps(
                    content, ensure_ascii=False, indent=2 if "config" in name else None
                )
                Path(new, name).write_text(text, encoding="utf-8")
            for name in ("model.safetensors", *files):
                os.replace(Path(new, name), folder / name)
    except (OSError, library.SafetensorError) as error:
        raise SaveError(f"cannot save {folder}: {error}", exit_code=3) from None


@cli_main
def main(argv: list[str]) -> None:
    parser = OneLineParser(
        prog="python -m scripts.export_hf", description="Export a snapshot for transformers."
    )
    add_snapshot_argument(parser, "snapshot to export")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder to make; an existing folder must be empty",
    )
    args = parser.parse_args(argv)
    folder = Path(os.path.realpath(args.out))  # so that errors show the full path
    if folder.exists() and any(folder.iterdir()):
        raise MiniGPTError(f"--out: {args.out} exists and is not empty; name another folder")
    source = read_pretrained(args.checkpoint_path)
    export(source, folder)
    shape, name = describe_model(source.config), source.tokenizer.name
    print(f"exported {args.out}: {shape}, tokenizer {name}")


if __name__ == "__main__":
    sys.exit(main())
