"""One transformer block, tensor by tensor: what each policy keeps, replays, and does without.

python -m studies.block_picture                # out/block_policies.png
python -m studies.block_picture --text         # the same as a table; needs no matplotlib

Nothing of it is written down here but the names of the tensors: the planner simulates a step with
each policy, and what the block still holds when backward begins is kept, and what it makes once
more in backward is replayed. The block is GPT-2 small's, in bfloat16 autocast without dropout.
Needs matplotlib: pip install matplotlib
"""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from memory import RECOMPUTE_POLICIES
from model import MiniGPTConfig
from planner import Planner
from planner.log import Storage
from scripts import tool
from scripts.benchmark import table
from scripts.style import COLORS, WIDTH, load_pyplot, relative_flops, save_picture
from studies.common import study_parser
from trainer.flags import output_folder

GPT2_SMALL = MiniGPTConfig(dropout=0.0)
BATCH_SIZE, SEQ_LEN = 2, 1024
BTC = BATCH_SIZE * SEQ_LEN * GPT2_SMALL.d_model  # bytes of a (B, T, C) tensor with one byte each
BLOCK = 1  # of 0, 1, 2: one that has a block on each side
X = "x, the block's input"
# What planner/record.py calls a block's tensors, its number left out -> what they are called here.
# Under autocast a linear layer is handed LayerNorm's result as its own copy in bfloat16, so that is
# what is kept.
NAMES = {
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


@dataclass
class BlockTensor:
    """What a block makes of one kind, with one policy. `bytes` are those of all of that kind."""

    name: str
    multiplied: bool  # by a matmul or by attention: not cheap to make
    bytes: int = 0
    kept: bool = False  # from forward to backward
    replayed: bool = False  # made once more in backward

    @property
    def state(self) -> str:
        """As LEGEND has it."""
        replayed = "X" if self.multiplied else "/"
        return "#" if self.kept else replayed if self.replayed else "."


def name_of(storage: Storage) -> str | None:
    """None: of another block, a copy of a weight, or something that no policy keeps."""
    name = re.sub(r"\bblocks\.\d+(\.|: )", "", storage.name)
    if storage.block == BLOCK - 1 and name == "x + feed_forward":
        return X
    return NAMES.get(name) if storage.block == BLOCK else None


def look(policy: str) -> list[BlockTensor]:
    """What one block makes in a training step with that policy, in the order of forward."""
    planner = Planner(
        replace(GPT2_SMALL, vocab_size=64, n_layers=3),
        SEQ_LEN,
        precision=torch.bfloat16,
        make_optimizer=lambda model: torch.optim.SGD(model.parameters()),
        device_type="cpu",
    )
    record = planner.record(BATCH_SIZE, recompute=policy)
    backward = record.step.phase("backward").start
    found: dict[str, BlockTensor] = {}
    for storage in record.storages:
        name = name_of(storage)
        if name is None or storage.phase == "backward" and not storage.replayed:
            continue
        multiplied = storage.operator == "addmm" or "attention" in storage.operator
        tensor = found.setdefault(name, BlockTensor(name, multiplied))
        if storage.replayed:
            tensor.replayed = True
        else:
            tensor.bytes += storage.bytes
            tensor.kept |= storage.died > backward
    return list(found.values())


def look_at_all() -> dict[str, list[BlockTensor]]:
    return {policy: look(policy) for policy in tqdm(RECOMPUTE_POLICIES, leave=False, disable=None)}


def kept_btc(tensors: list[BlockTensor]) -> float:
    """In BTC."""
    return sum(tensor.bytes for tensor in tensors if tensor.kept) / BTC


def step_cost(policy: str) -> float:
    """FLOPs of a whole step of GPT-2 small, in units of the step without recompute."""
    return relative_flops(replace(GPT2_SMALL, recompute=policy), SEQ_LEN)


LEGEND = "# kept, / replayed, cheap, X replayed, a matmul or attention, . neither"


def text_table(blocks: dict[str, list[BlockTensor]]) -> str:
    """The picture in letters. It is also what the picture carries with it, in its metadata."""
    rows = [
        [row[0].name, f"{row[0].bytes / BTC:.2f}", *(tensor.state for tensor in row)]
        for row in zip(*blocks.values(), strict=True)
    ]
    rows.append(["kept (BTC)", "", *(f"{kept_btc(tensors):.2f}" for tensors in blocks.values())])
    rows.append(["FLOPs of a step", "", *(f"{step_cost(policy):.2f}" for policy in blocks)])
    return f"{table(['', 'BTC', *blocks], rows)}\n\n{LEGEND}"


# ---- The picture

# Those that memory_timeline has for the same two things.
ORANGE, RED, GREY = COLORS["activations"], COLORS["recomputed"], "#999999"
LOOKS: dict[str, tuple[str, dict[str, Any]]] = {  # state -> its words, how it is drawn
    "#": ("kept from forward to backward", {"facecolor": ORANGE, "edgecolor": ORANGE}),
    "/": ("replayed in backward: cheap", {"edgecolor": RED, "hatch": "//"}),
    "X": ("replayed: a matmul, or attention", {"edgecolor": RED, "hatch": "xxxx"}),
    ".": ("neither: backward does without", {"edgecolor": GREY}),
}
THIN = 0.9  # as high, in BTC, is drawn what is thinner: a name has to fit beside it
GAP = 0.25


def draw(plt: Any, blocks: dict[str, list[BlockTensor]]) -> Any:
    """A block a policy, side by side; heights are bytes. Forward goes down, backward up."""

    def box(place: tuple[float, float], height: float, state: str, **more: Any) -> Any:
        look = {"facecolor": "white", "linewidth": 0.8} | LOOKS[state][1]
        return plt.Rectangle(place, 0.8, height, **look, **more)

    figure, axis = plt.subplots(figsize=(WIDTH, 7.6))
    left = {"x": -0.15, "ha": "right"}
    top = 0.0
    for row in zip(*blocks.values(), strict=True):
        size = row[0].bytes / BTC
        height = max(size, THIN)
        axis.text(-0.75, top + height / 2, row[0].name, ha="right", va="center")
        words = f"{size:.0f}" if size >= 1 else f"{size:.2f}"
        axis.text(y=top + height / 2, s=words, va="center", **left)
        for column, tensor in enumerate(row):
            axis.add_patch(box((column, top), height, tensor.state))
        top += height + GAP
    sums, flops = top + 0.5, top + 2.3
    axis.text(y=-0.5, s="size (BTC)", va="bottom", **left)
    axis.text(y=sums, s="kept of a block (BTC)", va="top", weight="bold", **left)
    axis.text(y=flops, s="FLOPs of a step", va="top", **left)
    for column, (policy, tensors) in enumerate(blocks.items()):
        middle = {"x": column + 0.4, "ha": "center"}
        axis.text(y=-0.5, s=policy, va="bottom", weight="bold", **middle)
        axis.text(y=sums, s=f"{kept_btc(tensors):.1f}", va="top", weight="bold", **middle)
        axis.text(y=flops, s=f"{step_cost(policy):.2f}", va="top", **middle)
    axis.set(xlim=(-3.2, len(blocks) - 0.1), ylim=(top + 3.8, -2))
    axis.axis("off")
    handles = [box((0, 0), 1, state, label=words) for state, (words, _) in LOOKS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(
        "What a transformer block makes, and what becomes of it until backward\n"
        "GPT-2 small, bfloat16 autocast. A box is as high as it has bytes, in units of\n"
        "B x T x C (BTC); thin ones are drawn thicker"
    )
    return figure


@tool
def main(argv: list[str]) -> None:
    parser = study_parser("studies.block_picture", __doc__)
    add = parser.add_argument
    add("--text", action="store_true", help="print it as a table, and draw nothing")
    add("--out", type=output_folder, default=Path("out"), metavar="FOLDER",
        help="where the picture goes; made if it is not there (default: %(default)s)")  # fmt: skip
    args = parser.parse_args(argv)
    plt = None if args.text else load_pyplot("block_picture", " (or --text, without)")
    blocks = look_at_all()
    if plt is None:
        print(text_table(blocks))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "block_policies.png"
    save_picture(draw(plt, blocks), file, {"Description": text_table(blocks)})
    print(f"wrote {file}")


if __name__ == "__main__":
    sys.exit(main())
