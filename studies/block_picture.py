"""Show every tensor of a transformer block under each policy: kept, recomputed or not needed.

python -m studies.block_picture                 # as a table
python -m studies.block_picture --out FILE      # and as a picture: needs matplotlib

This file states only the names of the tensors. The rest comes from the planner, which simulates a
step with each policy. A tensor that still exists when backward begins is *kept*. A tensor that
backward makes again is *recomputed*. The block is a block of GPT-2 small, in bfloat16 autocast
without dropout.
"""

import re
import sys
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

from memory import POLICY_NAMES
from planner.op_recorder import Storage
from scripts import cli_main
from scripts.benchmark import table
from scripts.style import COLORS, WIDTH, load_pyplot, relative_flops, save_picture
from studies.common import study_parser
from studies.tables import plan
from trainer.flags import output_file

BATCH_SIZE, SEQ_LEN = 2, 1024
FLAGS = f"--model gpt2 --batch-size {BATCH_SIZE} --dropout 0 --device cpu --amp-dtype bfloat16"
BTC = BATCH_SIZE * SEQ_LEN * 768  # bytes of a (B, T, C) tensor, at one byte per element
BLOCK = 1  # index of the block to show; it has a block before it and blocks after it
RESULT = "x + feed_forward"  # a block's output, which is the next block's input
# Name of a block's tensor in planner/record.py, without the block's number -> name in the picture.
# Under autocast a linear layer reads a bfloat16 copy of LayerNorm's result. So backward needs the
# copy and not the result.
NAMES = {
    RESULT: "x, the block's input",
    "ln_1: mean": "ln_1's mean, deviation",
    "ln_1: 1 / deviation": "ln_1's mean, deviation",
    "bfloat16 copy of ln_1: output": "ln_1",
    "attn.c_attn: output": "q, k, v",
    "attention": "attention",
    "logsumexp": "softmax's normaliser",
    "attn.c_proj: output": "attn.c_proj",
    "x + attention": "x2 = x + attn.c_proj",
    "ln_2: mean": "ln_2's mean, deviation",
    "ln_2: 1 / deviation": "ln_2's mean, deviation",
    "bfloat16 copy of ln_2: output": "ln_2",
    "mlp.c_fc: output": "c_fc",
    "gelu": "gelu",
    "mlp.c_proj: output": "mlp.c_proj",
}


class BlockTensor(NamedTuple):
    """Tensors of a block that share one name in the picture, in a step with one policy."""

    name: str
    bytes: int  # of these tensors together
    state: str  # a key of LOOKS


Blocks = dict[str, list[BlockTensor]]  # policy -> tensors of the block


def name_of(storage: Storage) -> str | None:
    """Return a storage's name in the picture; None for a storage of another block, a copy of a
    weight, or a tensor that no policy keeps."""
    name = re.sub(r"\bblocks\.\d+(\.|: )", "", storage.name)
    return NAMES.get(name) if storage.block_index == BLOCK - (name == RESULT) else None


def look(policy: str) -> list[BlockTensor]:
    """Return the tensors that one block makes in a training step with this policy, in the order of
    forward."""
    record = plan(FLAGS).request.planner.record(BATCH_SIZE, recompute=policy)
    backward = record.step_memory.phase_slice("backward").start
    ours = [storage for storage in record.storages if name_of(storage)]
    first = [storage for storage in ours if storage.phase != "backward"]
    replayed = [storage for storage in ours if storage.replayed]
    by_state = {  # state -> storages; if a tensor has several states, the last one counts
        ".": first,
        "/": replayed,
        "X": [s for s in replayed if s.operator == "addmm" or "attention" in s.operator],
        "#": [storage for storage in first if storage.died > backward],
    }
    states = {name_of(storage): state for state, some in by_state.items() for storage in some}
    sizes = Counter[str | None]()
    for storage in first:
        sizes[name_of(storage)] += storage.nbytes
    return [BlockTensor(str(name), sizes[name], state) for name, state in states.items()]


def kept_btc(tensors: list[BlockTensor]) -> float:
    """Return the bytes that the block keeps for backward, in BTC (units of B x T x C)."""
    return sum(tensor.bytes for tensor in tensors if tensor.state == "#") / BTC


def step_cost(policy: str) -> float:
    """Return the FLOPs of a whole step of GPT-2 small, relative to a step without recompute."""
    return relative_flops(replace(plan(FLAGS).request.config, recompute=policy), SEQ_LEN)


def sums(blocks: Blocks) -> dict[str, list[str]]:
    """Return the lines below the blocks: label -> a cell for each policy."""
    return {
        "kept per block (BTC)": [f"{kept_btc(tensors):.1f}" for tensors in blocks.values()],
        "FLOPs of a step": [f"{step_cost(policy):.2f}" for policy in blocks],
    }


ORANGE, RED, GREY = COLORS["activations"], COLORS["recomputed"], "#999999"
LOOKS: dict[str, tuple[str, dict[str, str]]] = {  # state -> (its description, how it is drawn)
    "#": ("kept from forward to backward", {"facecolor": ORANGE, "edgecolor": ORANGE, "hatch": ""}),
    "/": ("recomputed in backward: cheap", {"facecolor": "w", "edgecolor": RED, "hatch": "//"}),
    "X": (
        "recomputed: a matmul, or attention",
        {"facecolor": "w", "edgecolor": RED, "hatch": "xxxx"},
    ),
    ".": ("neither: backward does not need it", {"facecolor": "w", "edgecolor": GREY, "hatch": ""}),
}
THIN = 0.9  # BTC; a thinner tensor is drawn with this height, so that its name fits


def text_table(blocks: Blocks) -> str:
    """Return the picture as a text table. The PNG file has this text in its metadata."""
    rows = [
        [row[0].name, f"{row[0].bytes / BTC:.1g}", *(tensor.state for tensor in row)]
        for row in zip(*blocks.values(), strict=True)
    ]
    rows += [[words, "", *cells] for words, cells in sums(blocks).items()]
    legend = ", ".join(f"{state} {words}" for state, (words, _) in LOOKS.items())
    return f"{table(['', 'BTC', *blocks], rows)}\n\n{legend}"


def draw(plt: Any, blocks: Blocks) -> Any:
    """Draw one column per policy. The height of a box is its bytes. Forward runs from top to
    bottom, backward from bottom to top."""
    figure, axis = plt.subplots(figsize=(WIDTH, 7.6))
    columns, labels, top = range(len(blocks)), dict[float, str](), 0.0
    for row in zip(*blocks.values(), strict=True):
        size = row[0].bytes / BTC
        height = max(size, THIN)
        looks = [LOOKS[tensor.state][1] for tensor in row]
        each = {key: [look[key] for look in looks] for key in looks[0]}
        axis.bar(columns, height, 0.8, top, linewidth=0.8, **each)
        labels[top + height / 2] = f"{row[0].name}  {size:.1g}"
        top += height + 0.25
    for words, cells in sums(blocks).items():
        top += 1.3
        labels[top] = words
        for column, cell in zip(columns, cells, strict=True):
            axis.text(column, top, cell, ha="center", va="center")
    axis.set_yticks([*labels], labels.values())
    axis.set_xticks(columns, blocks, weight="bold")
    axis.set(xlim=(-0.5, len(blocks) - 0.5), ylim=(top + 1, -0.3), frame_on=False)
    axis.tick_params(length=0, labeltop=True, labelbottom=False)
    handles = [plt.Rectangle((0, 0), 1, 1, label=words, **look) for words, look in LOOKS.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(
        "The tensors of a transformer block: kept for backward, recomputed, or neither\n"
        "GPT-2 small, bfloat16 autocast. The height of a box is its bytes, in units of\n"
        "B x T x C (BTC): the number beside it. Thin boxes are drawn thicker"
    )
    return figure


@cli_main
def main(argv: list[str]) -> None:
    parser = study_parser("studies.block_picture", __doc__)
    parser.add_argument("--out", type=output_file, metavar="FILE", help="file of the picture")
    args = parser.parse_args(argv)
    plt = load_pyplot("--out") if args.out else None
    blocks = {policy: look(policy) for policy in POLICY_NAMES}
    print(text_table(blocks))
    if plt:
        save_picture(draw(plt, blocks), args.out, {"Description": text_table(blocks)})


if __name__ == "__main__":
    sys.exit(main())
