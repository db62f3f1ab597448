"""Generate text with a trained MiniGPT, from its snapshot alone, without data or a network.

python -m scripts.generate --prompt "def " --max-new-tokens 200 --temperature 0.8 --top-k 40

The text appears token by token. A sample ends when the model generates <|endoftext|>, or after
--max-new-tokens.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import takewhile

import torch
from torch.nn.attention import sdpa_kernel

from data import Tokenizer
from data.errors import MiniGPTError
from model import MiniGPT
from scripts import add_snapshot_argument, cli_main, exit_on_out_of_memory
from trainer.check_model import kv_cache_is_exact
from trainer.device import GENERATION_KERNELS, choose_device
from trainer.flags import OneLineParser, number_in_range
from trainer.pretrained import load_model_and_tokenizer

SEPARATOR = "\n----------------\n"


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m scripts.generate", description="Sample from a snapshot.")
    add, shown = parser.add_argument, "(default: %(default)s)"
    add_snapshot_argument(parser, "snapshot to sample from")
    # fmt: off
    add("--prompt", default="", metavar="TEXT", help="(default: empty: begin a new document)")
    add("--max-new-tokens", type=number_in_range(int, 1, 10**6), default=200, metavar="N",
        help=shown)
    add("--num-samples", type=number_in_range(int, 1, 10**4), default=1, metavar="N", help=shown)
    add("--temperature", type=number_in_range(float, 0, 100), default=0.8, metavar="X",
        help="0 = always the likeliest token (default: %(default)s)")
    add("--top-k", type=number_in_range(int, 0), default=40, metavar="K",
        help="0 = off (default: 40)")
    add("--top-p", type=number_in_range(float, 0, 1), default=1.0, metavar="P",
        help="1 = off (default: %(default)s)")
    add("--seed", type=number_in_range(int, 0, 2**63 - 1), default=1337, metavar="N", help=shown)
    add("--ignore-eot", action="store_true",
        help="continue after <|endoftext|>, up to --max-new-tokens")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    # fmt: on
    return parser


def generate_text(
    args: argparse.Namespace, model: MiniGPT, tokenizer: Tokenizer, device: torch.device
) -> Iterator[str]:
    """Yield the text to print in pieces: one sample after the other, each with the prompt before
    it. Raises MiniGPTError."""
    try:
        prompt = tokenizer.encode(args.prompt).tolist()
    except ValueError as error:
        raise MiniGPTError(f"--prompt: {error}") from None
    # In training <|endoftext|> came before each document, so each sample begins with this token and
    # ends when the model generates it. (Toy data have no documents: their `eot_id` is 0, an
    # ordinary token, which ends nothing.)
    start = torch.tensor([[tokenizer.eot_id, *prompt]], device=device)
    is_toy = tokenizer.name == "toy"
    stop_id = None if args.ignore_eot or is_toy else tokenizer.eot_id
    use_cache = kv_cache_is_exact(model.config)
    torch.manual_seed(args.seed)
    for n in range(args.num_samples):
        yield SEPARATOR * bool(n) + tokenizer.decode(prompt)
        stream = model.stream_tokens(
            start,
            args.max_new_tokens,
            use_cache=use_cache,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p if args.top_p < 1 else None,
        )
        new_ids, held = map(int, stream), list[int]()  # held: tokens of an unfinished character
        for new_id in takewhile(lambda new_id: new_id != stop_id, new_ids):
            held.append(new_id)
            text = tokenizer.decode(held)
            if not text.endswith("\ufffd"):  # replaces a character whose bytes are incomplete
                yield " " * is_toy + text
                held.clear()
        yield tokenizer.decode(held)
    yield "\n"


@cli_main
def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    typed = f"--num-samples {args.num_samples} and --max-new-tokens {args.max_new_tokens}"
    with (
        exit_on_out_of_memory(f" with {typed}: lower them"),
        sdpa_kernel(GENERATION_KERNELS),
    ):
        device = choose_device(args.device)
        model, tokenizer = load_model_and_tokenizer(args.checkpoint_path, device)
        try:
            for piece in generate_text(args, model, tokenizer, device):
                print(piece, end="", flush=True)
        except (RuntimeError, MemoryError):
            print()  # the error may come in the middle of a line
            raise


if __name__ == "__main__":
    sys.exit(main())
