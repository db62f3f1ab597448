"""List the tensors that one block keeps for backward, and why, under each recompute policy.

python -m scripts.kept_tensors                     # all policies, GPT-2 small's block
python -m scripts.kept_tensors --policy cheap --no-amp --batch-size 8

The model runs on fake tensors, which have shapes but no memory, so any size works. (JAX prints a
similar list with `print_saved_residuals`.)
"""

import argparse
import re
import sys

import torch

from memory import POLICY_NAMES
from model import MiniGPTConfig
from planner import Planner
from planner.op_recorder import Storage
from planner.record import read_source_line
from scripts import cli_main
from scripts.plan_table import format_columns
from trainer.flags import OneLineParser, number_in_range
from trainer.metrics import format_bytes
from trainer.settings import SHAPE_BY_MODEL

RESULT = ": x + feed_forward"  # a block's output, which is the next block's input


def kept_by_one_block(policy: str, args: argparse.Namespace) -> list[Storage]:
    """Return the storages that the second of two blocks keeps for backward: first the input of the
    block, then the others in the order in which forward makes them."""
    C, H, T = args.d_model, args.n_heads, args.seq_len
    planner = Planner(
        MiniGPTConfig(64, T, 2, H, C, d_ff=4 * C, dropout=0.0),
        T,
        precision=torch.float32 if args.no_amp else torch.bfloat16,
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    )
    storages = planner.record(args.batch_size, recompute=policy).storages
    kept = [s for s in storages if s.kind == "activations" and s.born]
    # Select the output of the first block, which is the second block's input, and all tensors of
    # the second block except its output.
    return [s for s in kept if (s.block_index == 1) != s.name.endswith(RESULT)]


def format_kept_tensors(policy: str, tensors: list[Storage], unit: int) -> str:
    """Return the table, one line per tensor. `unit`: bytes of a (B, T, C) tensor, at one byte per
    element."""
    total, lines = sum(tensor.nbytes for tensor in tensors), []
    for tensor in tensors:
        name = "x: the block's input" if tensor.name.endswith(RESULT) else tensor.name
        label, why = (
            re.sub(r"\bblocks\.1(\.|: )", "", text) for text in (name, tensor.reason_alive)
        )
        shape = "x".join(map(str, tensor.shape))
        line = {
            "bytes>": format_bytes(tensor.nbytes),
            "BTC>": f"{tensor.nbytes / unit:.2f}",
            "what<": label,
            "shape<": f"{shape} {str(tensor.dtype).removeprefix('torch.')}",
            "why<": why,
            "line<": f"{tensor.line} {read_source_line(tensor.line)}",
        }
        lines.append(line)
    title = f"{policy}: {len(tensors)} tensors, {format_bytes(total)} ({total / unit:.2f} BTC)"
    return f"{title}\n{format_columns(lines)}"


@cli_main
def main(argv: list[str]) -> None:
    parser = OneLineParser(
        prog="python -m scripts.kept_tensors", description="List what one block keeps for backward."
    )
    add, size = parser.add_argument, number_in_range(int, 1, 10**6)
    # fmt: off
    add("--policy", choices=POLICY_NAMES, help="(default: all, one after the other)")
    add("--batch-size", type=size, default=2, metavar="N", help="(default: %(default)s)")
    add("--seq-len", type=size, default=1024, metavar="N", help="(default: %(default)s)")
    add("--model", choices=tuple(SHAPE_BY_MODEL), default="gpt2",
        help="model whose block is listed (default: %(default)s)")
    add("--no-amp", action="store_true", help="float32 instead of bfloat16 autocast")
    # fmt: on
    args = parser.parse_args(argv)
    args.d_model, args.n_heads = (
        SHAPE_BY_MODEL[args.model][name] for name in ("d_model", "n_heads")
    )
    unit = args.batch_size * args.seq_len * args.d_model
    for policy in [args.policy] if args.policy else POLICY_NAMES:
        print(
            format_kept_tensors(policy, kept_by_one_block(policy, args), unit),
            end="\n\n",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
