"""Which tensors does one block keep for backward, why, and under which recompute policy?

python -m scripts.kept_tensors                     # all policies, GPT-2 small's block
python -m scripts.kept_tensors --policy cheap --no-amp --batch-size 8

What JAX prints with `print_saved_residuals`. The model runs on fake tensors: any size, no memory.
"""

import os
import sys

if not __package__:  # python scripts/kept_tensors.py: the others lie one folder up
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    import scripts  # noqa: F401

import argparse
import linecache
from collections import Counter
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model import RECOMPUTE_POLICIES, MiniGPT, MiniGPTConfig
from planner.log import Storage, kept_for_backward
from scripts import tool
from trainer.flags import SHAPES, OneLineParser, UsageError, number
from trainer.metrics import format_bytes

ROOT = Path(__file__).parent.parent


def kept_by_one_block(policy: str, args: argparse.Namespace) -> list[Storage]:
    """What a model of two blocks keeps more than a model of one."""

    def kept(n_layers: int) -> list[Storage]:
        C, H, T = args.d_model, args.n_heads, args.seq_len
        config = MiniGPTConfig(64, T, n_layers, H, C, d_ff=4 * C, dropout=0.0, recompute=policy)
        with FakeTensorMode():
            model = MiniGPT(config).train()
            ids = torch.zeros(args.batch_size, T, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16, enabled=not args.no_amp, cache_enabled=False):
            return kept_for_backward(model, lambda: model(ids, ids))

    def key(tensor: Storage) -> tuple:
        return tensor.module, tensor.operator, tensor.shape, tensor.dtype

    one, more = Counter(map(key, kept(1))), []
    for tensor in kept(2):
        one[key(tensor)] -= 1
        if one[key(tensor)] < 0:
            more.append(tensor)
    return more


def table(policy: str, tensors: list[Storage], unit: int) -> str:
    """One line a tensor; `unit`: bytes of one (B, T, C) tensor with one byte an element."""
    total = sum(tensor.bytes for tensor in tensors)
    lines = [f"{policy}: {len(tensors)} tensors, {format_bytes(total)} ({total / unit:.2f} BTC)"]
    for tensor in tensors:
        file, _, line = tensor.line.partition(":")
        code = linecache.getline(str(ROOT / file), int(line)).split("#")[0].strip()
        module = tensor.module.removeprefix("MiniGPT").removeprefix(".blocks.0")
        name = f"{module.removeprefix('.blocks.1').removeprefix('.') or 'block'} {tensor.operator}"
        shape = "x".join(map(str, tensor.shape))
        kind = str(tensor.dtype).removeprefix("torch.")
        lines.append(
            f"  {format_bytes(tensor.bytes):>10} {tensor.bytes / unit:5.2f}  {kind:<8} {shape:<12} "
            f"{name[:34]:<34} {tensor.line:<22} {code}"
        )
    return "\n".join(lines)


@tool
def main(argv: list[str]) -> None:
    parser = OneLineParser(
        prog="python -m scripts.kept_tensors", description="List what one block keeps for backward."
    )
    add, size = parser.add_argument, number(int, 1, 10**6)
    # fmt: off
    add("--policy", choices=RECOMPUTE_POLICIES, help="(default: all, one after the other)")
    add("--batch-size", type=size, default=2, metavar="N", help="(default: %(default)s)")
    add("--seq-len", type=size, default=1024, metavar="N", help="(default: %(default)s)")
    add("--model", choices=tuple(SHAPES), default="gpt2",
        help="whose block (default: %(default)s); the next two override its shape")
    add("--d-model", type=size, metavar="N", help="(default: the --model's)")
    add("--n-heads", type=size, metavar="N", help="(default: the --model's)")
    add("--no-amp", action="store_true", help="float32 instead of bfloat16 autocast")
    # fmt: on
    args = parser.parse_args(argv)
    for name in ("d_model", "n_heads"):
        if getattr(args, name) is None:
            setattr(args, name, SHAPES[args.model][name])
    unit = args.batch_size * args.seq_len * args.d_model
    for policy in [args.policy] if args.policy else RECOMPUTE_POLICIES:
        try:
            print(table(policy, kept_by_one_block(policy, args), unit), end="\n\n", flush=True)
        except ValueError as error:  # d_model and n_heads that do not go together
            raise UsageError(f"--d-model, --n-heads: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
