"""Let a trained MiniGPT write. Needs a snapshot and nothing else: no data folder, no network.

python -m scripts.generate --prompt "def " --max-new-tokens 200 --temperature 0.8 --top-k 40
"""

import argparse
import sys
from io import TextIOWrapper
from pathlib import Path

import torch

from data import Tokenizer
from model import MiniGPT, MiniGPTConfig
from trainer.flags import OneLineParser, UsageError, choose_device, number, print_error
from trainer.snapshot import SnapshotError, read_snapshot


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m scripts.generate", description="Sample from a snapshot.")
    add = parser.add_argument
    # fmt: off
    add("--checkpoint-path", type=Path, default=Path("checkpoints/minigpt_single.pt"),
        metavar="FILE", help="snapshot to sample from (default: %(default)s)")
    add("--prompt", default="", metavar="TEXT", help="(default: empty, a document from its start)")
    add("--max-new-tokens", type=number(int, 1, 10**6), default=200, metavar="N",
        help="(default: %(default)s)")
    add("--num-samples", type=number(int, 1, 10**4), default=1, metavar="N",
        help="(default: %(default)s)")
    add("--temperature", type=number(float, 0, 100), default=0.8, metavar="X",
        help="0 = always the likeliest token (default: %(default)s)")
    add("--top-k", type=number(int, 0), default=40, metavar="K", help="0 = off (default: 40)")
    add("--top-p", type=number(float, 0, 1), default=1.0, metavar="P",
        help="1 = off (default: %(default)s)")
    add("--seed", type=number(int, 0, 2**63 - 1), default=1337, metavar="N",
        help="(default: %(default)s)")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    # fmt: on
    return parser


@torch.no_grad()
def generate(args: argparse.Namespace) -> list[str]:
    """The samples, prompt included. Raises SnapshotError or UsageError."""
    device = choose_device(args.device)
    state = read_snapshot(args.checkpoint_path)
    try:
        tokenizer = Tokenizer.from_state(state["tokenizer"])
        model = MiniGPT(MiniGPTConfig(**state["config"]))
        model.load_state_dict(state["model"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        raise SnapshotError(f"{args.checkpoint_path} holds no model: is it damaged?") from None
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise SnapshotError(f"{args.checkpoint_path} holds NaN weights: take an older snapshot")
    model.to(device).eval()
    try:
        prompt = tokenizer.encode(args.prompt).tolist()
    except ValueError as error:
        raise UsageError(f"--prompt: {error}") from None
    # Documents were trained with <|endoftext|> before them: that is how a text begins.
    start = torch.tensor([[tokenizer.eot_id, *prompt]] * args.num_samples, device=device)
    torch.manual_seed(args.seed)
    ids = model.generate(
        start,
        args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k or None,
        top_p=args.top_p if args.top_p < 1 else None,
    )
    return [tokenizer.decode(row[1:].tolist()) for row in ids]


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if isinstance(sys.stdout, TextIOWrapper):  # half a character is no reason to crash
        sys.stdout.reconfigure(errors="replace")
    try:
        print("\n----------------\n".join(generate(args)))
    except (SnapshotError, UsageError) as error:
        print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
