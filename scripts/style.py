"""The look of all pictures and of the page: colours, units, words; and what they all are of.

matplotlib is imported by load_pyplot alone: where it is missing, that is one line and no traceback.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from memory import expanded
from model import MiniGPTConfig
from planner.choose import RUNGS
from planner.formulas import count_parameters, step_flops
from trainer.flags import UsageError
from trainer.plan import Question

# As pictures and the page name them -> what `Planner.step` is told.
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {"recompute": "none", "loss_chunks": 1},  # what every tutorial does
    **{rung: {"recompute": rung} for rung in RUNGS},
}
# Bottom up, what is always there first: the same order everywhere. Okabe and Ito's hues, cold ones
# for the training state; some lighter or darker, for as they are a colour-blind reader takes the
# head for temporaries, and recomputed for activations.
COLORS = {
    "parameters": "#0072B2",
    "optimizer": "#56B4E9",
    "gradients": "#007A59",
    "activations": "#E69F00",
    "recomputed": "#C04A00",
    "head": "#C66A9C",
    "temporaries": "#C4C4C4",
}
LEGEND = {  # what a kind is called: and what it is
    "parameters": "parameters",
    "optimizer": "moments: the optimizer's",
    "gradients": "gradients",
    "activations": "activations: kept for backward",
    "recomputed": "recomputed: made again in backward",
    "head": "head: logits, loss",
    "temporaries": "temporaries: soon gone",
}
GRAY = "#555555"
# Pages show a picture some 830 pixels wide, whatever its own width. SMALL at this WIDTH is then
# 16 pixels high, as the text around it is. Both in their usual units: inches, points.
WIDTH, SMALL = 6.4, 9
# Without the date and the program that made it: the same numbers make the same file.
FORMATS: dict[str, dict[str, str | None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


class Unit(NamedTuple):
    """What a picture's bytes are counted in."""

    name: str
    size: int

    @classmethod
    def of(cls, most: int) -> "Unit":
        """One in which the largest number of bytes is at least 1."""
        power = 3 if most >= 2**30 else 2 if most >= 2**20 else 1
        return cls(("KiB", "MiB", "GiB")[power - 1], 1024**power)

    def text(self, count: float) -> str:
        return f"{count / self.size:.{2 if self.name == 'GiB' else 1}f} {self.name}"


def describe(asked: Question, batch: str = "") -> str:
    """ "124M parameters, batch of 8 x 1,024 tokens, bfloat16 on a GPU" """
    millions = count_parameters(asked.config) / 1e6
    batch = batch or f"batch of {asked.args.batch_size} x "
    size = f"{millions:,.{0 if millions > 10 else 2}f}M parameters"
    precision = str(asked.precision).removeprefix("torch.")
    device = f"{precision} on a {'CPU' if asked.device.type == 'cpu' else 'GPU'}"
    return f"{size}, {batch}{asked.args.seq_len:,} tokens, {device}"


def relative_flops(config: MiniGPTConfig, seq_len: int, compiled: bool = False) -> float:
    """Of a step's matrix products, in units of those without recompute."""
    needed, replayed = step_flops(config, seq_len, compiled)
    return (needed + replayed) / needed


def policy_fields(config: MiniGPTConfig) -> dict[str, Any]:
    """How a config recomputes, for a JSON file: as the policy string, and in its parts."""
    policies, group, _, offload = expanded(config)
    first, rest = policies[0], policies[-1]
    return {
        "name": config.recompute,
        "policy": config.recompute,
        "layers": 0 if first == "none" else policies.count(first),
        "rest": "none" if rest == first else rest,
        "group": group,
        "offload": offload,
    }


def load_pyplot(program: str) -> Any:
    """matplotlib.pyplot in our style, drawing into files. Raises UsageError where it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError(f"{program} needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcdefaults()  # not the style that the reader may have at home
    style: Any = {"figure.constrained_layout.use": True, "figure.titlesize": 10, "savefig.dpi": 200}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "minigpt"}
    style |= {"axes.titlelocation": "left", "axes.titlesize": 9.5, "font.size": SMALL}
    plt.rcParams.update(style | {"hatch.linewidth": 0.8})
    return plt


def save_picture(figure: Any, file: Path, more: Mapping[str, str] | None = None) -> None:
    """A PNG carries `more` in its metadata. Raises UsageError that names --out."""
    try:
        figure.savefig(file, metadata=FORMATS.get(file.suffix[1:]))
        if file.suffix == ".png":
            use_few_colors(file, more or {})
    except (OSError, ValueError) as error:  # ValueError: an ending that is no picture format
        raise UsageError(f"--out {file}: {error}") from None


def use_few_colors(file: Path, about: Mapping[str, str]) -> None:
    """256 are all that a picture has but at the edges of letters: so a PNG takes a third of the
    bytes."""
    from PIL import Image, PngImagePlugin  # matplotlib needs them, too

    metadata = PngImagePlugin.PngInfo()
    for key, words in about.items():
        metadata.add_text(key, words)
    with Image.open(file) as picture:
        few = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(file, optimize=True, pnginfo=metadata)
