"""One transformer block, tensor by tensor: what each policy keeps, replays, and does without.

python -m scripts.block_picture                # out/block_policies.png
python -m scripts.block_picture --text         # the same as a table; needs no matplotlib

Nothing of it is written down here but the names of the tensors: a model with each policy goes
forward and backward on fake tensors, and what its middle block still holds between the two is
kept, and what it makes once more in backward is replayed. The block is GPT-2 small's, in bfloat16
autocast without dropout. Needs matplotlib: pip install matplotlib
"""

import sys

if not __package__:  # python scripts/block_picture.py: the others lie one folder up
    sys.path[0] += "/.."
    import scripts  # noqa: F401

import argparse
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from model import RECOMPUTE_POLICIES, MiniGPT, MiniGPTConfig
from planner.formulas import step_flops
from planner.step import follow
from planner.tracker import Storage, StorageTracker
from scripts import say_stopped
from scripts.memory_timeline_pictures import COLORS, SMALL, WIDTH, save_picture
from trainer.flags import OneLineParser, UsageError, output_folder, print_error

GPT2_SMALL = MiniGPTConfig(dropout=0.0)
BATCH_SIZE, SEQ_LEN = 2, 1024
BTC = BATCH_SIZE * SEQ_LEN * GPT2_SMALL.d_model  # bytes of a (B, T, C) tensor with one byte each
BLOCK = 1  # of 0, 1, 2: one that has a block on each side

Key = tuple[str, str, tuple[int, ...]]  # layer ("" = the block itself), operator, shape
# (layer, operator) -> what its results are called here, one after the other. Under autocast a
# linear layer is handed LayerNorm's result as its own copy in bfloat16, so that is what is kept.
NAMES = {
    ("", "x"): ["x, the block's input"],
    ("ln_1", "native_layer_norm"): ["ln_1 in float32", "ln_1's mean, deviation"],
    ("attn.c_attn", "_to_copy"): ["ln_1"],
    ("attn.c_attn", "addmm"): ["q, k, v"],
    ("", "_scaled_dot_product_flash_attention_for_cpu"): ["attention", "softmax's normaliser"],
    ("attn.c_proj", "addmm"): ["attn.c_proj"],
    ("", "add"): ["x2 = x + attn.c_proj"],
    ("ln_2", "native_layer_norm"): ["ln_2 in float32", "ln_2's mean, deviation"],
    ("mlp.c_fc", "_to_copy"): ["ln_2"],
    ("mlp.c_fc", "addmm"): ["c_fc"],
    ("", "gelu"): ["gelu"],
    ("mlp.c_proj", "addmm"): ["mlp.c_proj"],
}


@dataclass(frozen=True)
class BlockTensor:
    """What a block makes of one kind, with one policy. `bytes` are those of all of that kind."""

    name: str
    bytes: int
    kept: bool  # from forward to backward
    replayed: bool  # made once more in backward
    multiplied: bool  # by a matmul or by attention: not cheap to make
    of_a_weight: bool  # autocast's copy of a weight: does not grow with the batch

    @property
    def state(self) -> str:
        if self.kept:
            return "kept"
        if not self.replayed:
            return "neither"
        return "replayed, multiplied" if self.multiplied else "replayed"


class LayerTracker(StorageTracker):
    """Notes for each storage the layer of a block that made it ("attn.c_attn"; "" = none)."""

    layer = ""

    def add(self, tensor: Tensor, operator: str = "") -> Storage:
        storage = super().add(tensor, operator)
        if storage.born == self.now:  # else it is a view of something older
            storage.module = self.layer
        return storage

    def watch(self, block: nn.Module) -> None:
        """The end is always heard of, also when a replay stops in the middle of a layer."""
        for name, layer in block.named_modules():
            if isinstance(layer, nn.Linear | nn.LayerNorm):
                layer.register_forward_pre_hook(lambda *_, name=name: setattr(self, "layer", name))
                layer.register_forward_hook(lambda *_: setattr(self, "layer", ""), always_call=True)


def look(policy: str) -> list[BlockTensor]:
    """What one block makes in a training step with that policy, in the order of forward."""
    config = replace(GPT2_SMALL, vocab_size=64, n_layers=3, recompute=policy)
    fake, tracker = FakeTensorMode(), LayerTracker()
    with fake:
        model = MiniGPT(config).train()
        ids = torch.zeros(BATCH_SIZE, SEQ_LEN, dtype=torch.int64)
    inputs: list[Storage] = []  # of this block and of the next

    def note_input(ln_1: nn.Module, args: tuple[Tensor]) -> None:
        if tracker.phase == "forward":
            inputs.append(tracker.add(args[0]))

    tracker.watch(model.blocks[BLOCK])
    for block in list(model.blocks)[BLOCK : BLOCK + 2]:
        block.ln_1.register_forward_pre_hook(note_input)  # type: ignore[union-attr]
    with fake, tracker, follow(model, tracker):
        weights = {tracker.add(parameter).shape for parameter in model.parameters()}
        tracker.enter("forward")
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = model(ids, ids)
        forward_end = tracker.now
        loss.backward()
    x, x_of_next = inputs
    x.module, x.operator = "", "x"
    made = [s for s in tracker.storages if place(tracker, s)[1] == BLOCK and s.operator]
    forward = [s for s in made if not s.replayed and place(tracker, s)[0] == "forward"]
    forward = [x, *(storage for storage in forward if storage is not x_of_next)]
    replayed = {key(storage) for storage in made if storage.replayed}
    return [
        describe(alike, key(alike[0]) in replayed, forward_end, weights, name)
        for name, alike in named(forward).items()
    ]


def place(tracker: StorageTracker, storage: Storage) -> tuple[str, int | None]:
    """(phase, block) in which a storage was made."""
    _, phase, block = [place for place in tracker.places if place[0] <= storage.born][-1]
    return phase, block


def key(storage: Storage) -> Key:
    return storage.module, storage.operator, storage.shape


def named(storages: list[Storage]) -> dict[str, list[Storage]]:
    """By name; what has one layer, operator and shape, as mean and deviation have, is together."""
    groups: dict[Key, list[Storage]] = {}
    for storage in storages:
        groups.setdefault(key(storage), []).append(storage)
    count: Counter = Counter()
    result = {}
    for (layer, operator, shape), alike in groups.items():
        if shape[:1] in ((BATCH_SIZE,), (BATCH_SIZE * SEQ_LEN,)):
            names = NAMES.get((layer, operator), [])
            i = count[layer, operator]
            count[layer, operator] += 1
            name = names[i] if i < len(names) else f"{layer} {operator} {i}".strip()
        else:
            name = f"copy of {layer}'s {'weight' if len(shape) > 1 else 'bias'}"
        result[name] = alike
    return result


def describe(
    alike: list[Storage], replayed: bool, forward_end: int, weights: set, name: str
) -> BlockTensor:
    first = alike[0]
    return BlockTensor(
        name=name,
        bytes=sum(storage.bytes for storage in alike),
        kept=first.born <= forward_end < first.died,
        replayed=replayed,
        multiplied=first.operator == "addmm" or "attention" in first.operator,
        of_a_weight=first.shape in weights,
    )


def look_at_all() -> dict[str, list[BlockTensor]]:
    """A policy's name -> the tensors that grow with the batch, and that some policy keeps."""
    seen = {policy: look(policy) for policy in tqdm(RECOMPUTE_POLICIES, leave=False, disable=None)}
    drawn = {
        tensor.name
        for tensors in seen.values()
        for tensor in tensors
        if tensor.kept and not tensor.of_a_weight
    }
    return {policy: [t for t in seen[policy] if t.name in drawn] for policy in seen}


def kept_btc(tensors: list[BlockTensor]) -> float:
    """In BTC."""
    return sum(tensor.bytes for tensor in tensors if tensor.kept) / BTC


def relative_flops(policy: str) -> float:
    """Of a whole step of GPT-2 small, in units of the step without recompute."""
    needed, replayed = step_flops(replace(GPT2_SMALL, recompute=policy), SEQ_LEN)
    return (needed + replayed) / needed


MARKS = {"kept": "#", "replayed": "/", "replayed, multiplied": "X", "neither": "."}


def text_table(blocks: dict[str, list[BlockTensor]]) -> str:
    """The picture in letters. It is also what the picture carries with it, in its metadata."""
    width = max(len(tensor.name) for tensor in blocks["none"])
    lines = [f"{'':{width}}    BTC  " + "  ".join(f"{policy:^9}" for policy in blocks)]
    for row in zip(*blocks.values(), strict=True):
        marks = "  ".join(f"{MARKS[tensor.state]:^9}" for tensor in row)
        lines.append(f"{row[0].name:{width}} {row[0].bytes / BTC:6.2f}  {marks}")
    sums = "  ".join(f"{kept_btc(tensors):^9.2f}" for tensors in blocks.values())
    lines.append(f"{'kept (BTC)':{width}} {'':6}  {sums}")
    costs = "  ".join(f"{relative_flops(policy):^9.2f}" for policy in blocks)
    lines.append(f"{'FLOPs of a step':{width}} {'':6}  {costs}")
    lines.append("# kept   / replayed, cheap   X replayed, a matmul or attention   . neither")
    return "\n".join(line.rstrip() for line in lines)


# ---- The picture

# Those that memory_timeline has for the same two things.
ORANGE, RED, GREY = COLORS["activations"], COLORS["recomputed"], "#999999"
LOOKS: dict[str, dict[str, Any]] = {
    "kept": {"facecolor": ORANGE, "edgecolor": ORANGE},
    "replayed": {"facecolor": "white", "edgecolor": RED, "hatch": "//"},
    "replayed, multiplied": {"facecolor": "white", "edgecolor": RED, "hatch": "xxxx"},
    "neither": {"facecolor": "white", "edgecolor": GREY},
}
WORDS = {
    "kept": "kept from forward to backward",
    "replayed": "replayed in backward: cheap",
    "replayed, multiplied": "replayed: a matmul, or attention",
    "neither": "neither: backward does without",
}
THIN = 0.9  # as high, in BTC, is drawn what is thinner: a name has to fit beside it
GAP = 0.25


def load_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UsageError(
            "block_picture needs matplotlib: pip install matplotlib (or --text, without)"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcdefaults()  # not the style that the reader may have at home
    style: Any = {"hatch.linewidth": 0.8, "savefig.dpi": 200, "svg.hashsalt": "block"}
    plt.rcParams.update(style | {"font.size": SMALL})
    return plt


def draw(plt: Any, blocks: dict[str, list[BlockTensor]]) -> Any:
    """A block a policy, side by side; heights are bytes. Forward goes down, backward up."""
    figure, axis = plt.subplots(figsize=(WIDTH, 7.6), layout="constrained")
    left = {"x": -0.15, "ha": "right"}
    top = 0.0
    for row in zip(*blocks.values(), strict=True):
        size = row[0].bytes / BTC
        height = max(size, THIN)
        axis.text(-0.75, top + height / 2, row[0].name, ha="right", va="center")
        axis.text(y=top + height / 2, s=btc(size), va="center", **left)
        for column, tensor in enumerate(row):
            look = {"linewidth": 0.8, **LOOKS[tensor.state]}
            axis.add_patch(plt.Rectangle((column, top), 0.8, height, **look))
        top += height + GAP
    sums, flops = top + 0.5, top + 2.3
    axis.text(y=-0.5, s="size (BTC)", va="bottom", **left)
    axis.text(y=sums, s="kept of a block (BTC)", va="top", weight="bold", **left)
    axis.text(y=flops, s="FLOPs of a step", va="top", **left)
    for column, (policy, tensors) in enumerate(blocks.items()):
        middle = {"x": column + 0.4, "ha": "center"}
        axis.text(y=-0.5, s=policy, va="bottom", weight="bold", **middle)
        axis.text(y=sums, s=f"{kept_btc(tensors):.1f}", va="top", weight="bold", **middle)
        axis.text(y=flops, s=f"{relative_flops(policy):.2f}", va="top", **middle)
    axis.set(xlim=(-3.2, len(blocks) - 0.1), ylim=(top + 3.8, -2))
    axis.axis("off")
    legend = [plt.Rectangle((0, 0), 1, 1, label=WORDS[state], **LOOKS[state]) for state in LOOKS]
    figure.legend(handles=legend, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(
        "What a transformer block makes, and what becomes of it until backward\n"
        "GPT-2 small, bfloat16 autocast. A box is as high as it has bytes, in units of\n"
        "B x T x C (BTC); thin ones are drawn thicker",
        fontsize=10,
    )
    return figure


def btc(size: float) -> str:
    return f"{size:.0f}" if size >= 1 else f"{size:.2f}"


def save(figure: Any, file: Path, text: str) -> None:
    """With the table in it, and without a date or a version: the same data, the same file."""
    about: dict[str, dict[str, str | None]] = {
        ".png": {"Description": text, "Software": None},
        ".svg": {"Description": text, "Date": None, "Creator": None},
        ".pdf": {"Subject": text, "CreationDate": None, "Creator": None, "Producer": None},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    save_picture(figure, file, about[file.suffix])


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m scripts.block_picture",
        description="Draw what each recompute policy keeps and replays of a transformer block.",
    )
    add = parser.add_argument
    add("--text", action="store_true", help="print it as a table, and draw nothing")
    add("--out", type=output_folder, default=Path("out"), metavar="FOLDER",
        help="where the picture goes; made if it is not there (default: %(default)s)")  # fmt: skip
    add("--format", choices=("png", "svg", "pdf"), default="png", help="(default: %(default)s)")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        plt = None if args.text else load_pyplot()
        blocks = look_at_all()
        if plt is None:
            print(text_table(blocks))
            return 0
        file = args.out / f"block_policies.{args.format}"
        save(draw(plt, blocks), file, text_table(blocks))
        print(f"wrote {file}")
    except UsageError as error:
        print_error(error)
        return 2
    except OSError as error:  # a full disk
        print_error(f"--out: {error.filename}: {error.strerror}")
        return 2
    except KeyboardInterrupt:
        say_stopped()
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
