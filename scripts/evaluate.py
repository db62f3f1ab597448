"""Measure how well a trained model predicts a text: loss, perplexity and bits/byte.

The first command evaluates a run on the validation part of the run's own data, the second command
on another text:
    python -m scripts.evaluate checkpoints/minigpt_single.pt
    python -m scripts.evaluate --val-data book.txt

The text is one sequence of tokens, cut into windows as in training; the last window may be shorter.
Every token except the first is predicted, and counts once. The model computes in float32, so that
other programs can reproduce the loss, or with --amp-dtype auto in the trainers' precision.
"""

import argparse
import math
import sys
import time
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from data import DataError, Tokenizer
from data.corpus import iter_ids
from data.documents import TOKEN_SUFFIXES, suffix_of
from data.errors import MiniGPTError
from data.files import find_files
from data.tokens import take_up_to
from model import MiniGPT
from scripts import add_snapshot_argument, cli_main, exit_on_out_of_memory
from scripts.style import about, write_json
from trainer import flags
from trainer.build import load_run_data
from trainer.device import choose_device, choose_precision, set_matmul_precision
from trainer.metrics import perplexity
from trainer.pretrained import load_model_and_tokenizer
from trainer.process import OneProcess
from trainer.resume import settings_of
from trainer.settings import Settings
from trainer.snapshot import LoadedSnapshot, State, read_snapshot


def read_data(
    args: argparse.Namespace, state: State, tokenizer: Tokenizer, process: OneProcess
) -> tuple[str, np.ndarray]:
    """Return a description of the data, and the token ids (N,). Raises DataError or
    SnapshotError."""
    if args.val_data:
        description = ", ".join(args.val_data)
        key = args.text_key or (state and settings_of(state).text_key) or "text"
        paths = find_files(args.val_data, "--val-data", process.print0)
        if tokenizer.name == "toy" and not all(suffix_of(p) in TOKEN_SUFFIXES for p in paths):
            raise DataError(f"--val-data {paths[0]}: this model learned numbers, not text")
        pieces = iter_ids(paths, tokenizer, key, Counter())
    else:
        path = args.checkpoint_path
        try:
            data = load_run_data(settings_of(state), process, LoadedSnapshot(state, path))
        except DataError as error:
            raise DataError(f"the run's own data: {error}; --val-data names other data") from None
        if state["data"]["fingerprint"] != data.fingerprint:
            process.print0("note: the run's data changed; the model may have trained on part of it")
        description = f"validation part of {data.description}"
        pieces = iter([data.val_tokens.read(0, len(data.val_tokens))])
    return description, np.concatenate(  # (concatenate needs at least one array)
        [np.empty(0, np.uint16), *take_up_to(args.max_tokens or sys.maxsize, pieces)]
    )


@torch.no_grad()
def sum_loss(model: MiniGPT, tokens: np.ndarray, args: argparse.Namespace) -> float:
    """Return the sum of the losses of all tokens except the first one, in nats."""
    device, last, nats = next(model.parameters()).device, len(tokens) - 1, 0.0
    T = min(args.seq_len, last)
    with tqdm(total=last, unit="tok", disable=None, leave=False) as bar:
        for first in range(0, last, args.batch_size * T):
            part = tokens[first : first + args.batch_size * T + 1].astype(np.int64)
            ids, n = torch.from_numpy(part).to(device), len(part) - 1
            to_full_window = 0, -n % T
            inputs = F.pad(ids[:-1], to_full_window).view(-1, T)
            labels = F.pad(ids[1:], to_full_window, value=-100).view(-1, T)  # -100: not counted
            nats += model(inputs, labels).item() * n
            bar.update(n)
    return nats


def evaluate(args: argparse.Namespace) -> dict[str, object]:
    """Measure the loss; return all values to print. Raises SnapshotError, DataError or
    MiniGPTError."""
    path = args.checkpoint_path
    if path.is_dir() and not args.val_data:
        raise MiniGPTError(f"--val-data is missing: the folder {path} has no data of its own")
    device = choose_device(args.device)
    process = OneProcess(device)
    precise = Settings(no_amp=args.amp_dtype is None, amp_dtype=args.amp_dtype or "auto")
    precision = choose_precision(precise, device)
    set_matmul_precision(device, tf32=False)
    with process.showing_message(f"reading {path}"):
        model, tokenizer = load_model_and_tokenizer(path, device)
    state = {} if path.is_dir() else read_snapshot(path)
    limit = model.config.max_position_embeddings
    trained = settings_of(state).seq_len if state else limit
    args.seq_len = args.seq_len or min(trained, limit)
    if args.seq_len > limit:
        raise MiniGPTError(f"--seq-len {args.seq_len}: the model sees {limit} tokens at most")
    with process.showing_message("reading its data"):
        data, tokens = read_data(args, state, tokenizer, process)
    if len(tokens) < 2:
        raise DataError(f"{data}: {len(tokens)} token(s), and the first one is not predicted")

    amp, start = precision != torch.float32, time.perf_counter()
    with torch.autocast(device.type, precision if amp else None, amp, cache_enabled=False):
        nats = sum_loss(model, tokens, args)
    if not math.isfinite(nats):  # (load_model_and_tokenizer checked that all weights are finite)
        raise MiniGPTError(f"the loss is {nats}: --amp-dtype {args.amp_dtype} overflows")
    lengths, n_tokens = tokenizer.byte_lengths(), len(tokens) - 1
    n_bytes = int(lengths[tokens[1:]].sum())
    return {
        "checkpoint": str(path),
        "step": state.get("step"),
        "data": data,
        "seq_len": args.seq_len,
        "precision": f"{precision} on {device.type}".removeprefix("torch."),
        "seconds": time.perf_counter() - start,
        "tokens": n_tokens,
        "bytes": n_bytes,
        "loss": nats / n_tokens,
        "perplexity": perplexity(nats / n_tokens),
        "bits_per_byte": nats / math.log(2) / n_bytes if n_bytes else None,
    }


@cli_main
def main(argv: list[str]) -> None:
    parser = flags.OneLineParser(prog="python -m scripts.evaluate", description="Loss on a text.")
    add, count = parser.add_argument, flags.number_in_range(int, 1, 10**9)
    add_snapshot_argument(parser, "snapshot, or transformers folder")
    # fmt: off
    add("--val-data", nargs="+", metavar="PATH", help="files, folders or globs, as for the "
        "trainers; all of the text counts (default: the validation part of the run's own data)")
    add("--text-key", metavar="NAME", help="key of the text in a line of .jsonl (default: as in "
        "training)")
    add("--max-tokens", type=count, metavar="N", help="read the first N tokens (default: all)")
    add("--seq-len", type=count, metavar="N", help="tokens per window (default: as in training)")
    add("--batch-size", type=count, default=8, metavar="N",
        help="windows at a time (default: %(default)s)")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    add("--amp-dtype", choices=("auto", "bfloat16", "float16"), help="(default: no autocast)")
    add("--json", type=flags.output_file, metavar="FILE", help="write the numbers there, unrounded")
    # fmt: on
    args = parser.parse_args(argv)
    knobs = f"lower --batch-size {args.batch_size}, or the number of tokens with --max-tokens"
    with exit_on_out_of_memory(f": {knobs}"):
        results = evaluate(args)
    for name, value in results.items():
        if value is not None:
            shown = value if isinstance(value, str) else f"{value:,.4f}".removesuffix(".0000")
            print(f"{name.replace('_', ' '):13} {shown}")
    write_json(args.json, about("scripts.evaluate", argv) | results)


if __name__ == "__main__":
    sys.exit(main())
