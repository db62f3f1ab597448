"""Generate text with a trained MiniGPT. Only its snapshot is needed: no data and no network.

python -m scripts.generate --prompt "def " --max-new-tokens 200 --temperature 0.8 --top-k 40

The text appears token by token. A sample ends when the model generates <|endoftext|>, or after
--max-new-tokens.
"""

import argparse
import sys
from collections.abc import Iterator

import torch
from torch.nn.attention import sdpa_kernel

from data import Tokenizer
from data.errors import MiniGPTError
from model import MiniGPT
from scripts import add_snapshot, cli_main, out_of_memory_as
from trainer.device import GENERATION_KERNELS, choose_device
from trainer.flags import OneLineParser, number_in_range
from trainer.pretrained import load_model_and_tokenizer

SEPARATOR = "\n----------------\n"


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m scripts.generate", description="Sample from a snapshot.")
    add, shown = parser.add_argument, "(default: %(default)s)"
    add_snapshot(parser, "snapshot to sample from")
    # fmt: off
    add("--prompt", default="", metavar="TEXT", help="(default: empty; begin a new document)")
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
    """Yield the text to print, piece by piece: all samples, each with the prompt before it.

    All samples grow together, one token at a time. The first unfinished sample is printed while it
    grows; later samples are printed after it. Raises MiniGPTError.
    """
    try:
        prompt = tokenizer.encode(args.prompt).tolist()
    except ValueError as error:
        raise MiniGPTError(f"--prompt: {error}") from None
    # In training <|endoftext|> came before each document. So each sample begins with this token and
    # ends when the model generates it. (Toy data has no documents: `eot_id` is 0 there, a number
    # like any other, and ends nothing.)
    ids = torch.tensor([[tokenizer.eot_id, *prompt]] * args.num_samples, device=device)
    stop_id = None if args.ignore_eot or tokenizer.name == "toy" else tokenizer.eot_id
    samples = [list(prompt) for _ in range(args.num_samples)]
    unfinished = set(range(args.num_samples))
    between = " " if tokenizer.name == "toy" else ""  # separates numbers of toy data
    torch.manual_seed(args.seed)
    new_ids = (
        column.flatten().tolist()  # one read for all samples, because a read waits for the GPU
        for column in model.stream_tokens(  # (num_samples, 1)
            ids,
            args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p if args.top_p < 1 else None,
        )
    )

    def grow() -> None:
        """Add a token to each unfinished sample, or finish the sample."""
        row = next(new_ids, None)
        for i in sorted(unfinished):
            if row is None or row[i] == stop_id:
                unfinished.remove(i)
            else:
                samples[i].append(row[i])

    for turn, sample in enumerate(samples):
        n_shown = 0  # tokens of this sample that are printed
        while True:
            text = tokenizer.decode(sample[n_shown:])
            # If the last character lacks bytes, text ends with "\ufffd": wait for the next token.
            if turn not in unfinished or not text.endswith("\ufffd"):
                yield between * bool(n_shown and text) + text
                n_shown = len(sample)
            if turn not in unfinished:
                break
            grow()
        yield SEPARATOR if turn < args.num_samples - 1 else "\n"


@cli_main
def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    typed = f"--num-samples {args.num_samples} and --max-new-tokens {args.max_new_tokens}"
    with (
        out_of_memory_as(f" with {typed}: lower them"),
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
