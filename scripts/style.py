"""Define the colours, labels and sizes of all pictures and of memory_page's web page, and the
metadata of results (`about`): the command, the device, the torch version and the date.

Only load_pyplot imports matplotlib, so that a missing matplotlib is an error of one line, not a
traceback.
"""

import json
import platform
import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from data.errors import MiniGPTError
from planner.choose import UNIFORM_POLICIES
from planner.record import StepRecord
from scripts.plans import CommandPlan

# Name of a policy in pictures and on memory_page's page -> arguments of `Planner.step`.
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {"recompute": "none", "loss_chunks": 1},  # as in most tutorials
    **{policy: {"recompute": policy} for policy in UNIFORM_POLICIES},
}
# Kinds of memory in the order of every picture, from the bottom up: first those that exist during
# the whole step, in cold hues. The hues are Okabe and Ito's. Some colours are lighter or darker
# here, because a colour-blind reader would otherwise confuse "head" with "temporaries" and
# "recomputed" with "activations".
COLORS = {
    "parameters": "#0072B2",
    "optimizer": "#56B4E9",
    "gradients": "#007A59",
    "activations": "#E69F00",
    "recomputed": "#C04A00",
    "head": "#C66A9C",
    "temporaries": "#C4C4C4",
}
LEGEND = {  # kind -> "name: meaning"
    "parameters": "parameters",
    "optimizer": "moments: the optimizer's",
    "gradients": "gradients",
    "activations": "activations: kept for backward",
    "recomputed": "recomputed: made again in backward",
    "head": "head: logits, loss",
    "temporaries": "temporaries: soon gone",
}
# Web pages show a picture about 830 pixels wide, whatever its own width. With this WIDTH (inches),
# text of size SMALL (points) is 16 pixels high on such a page, like the text around the picture.
WIDTH, SMALL = 6.4, 9
STYLE: Any = {
    "figure.constrained_layout.use": True,
    "figure.titlesize": 10,
    "savefig.dpi": 150,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "font.size": SMALL,
    "svg.hashsalt": "minigpt",  # equal numbers give equal files
}
FLAGS_NOTE = "Takes the trainers' flags; many of them do not change the plan."


def record_steps(
    plan: CommandPlan, policies: Mapping[str, dict[str, Any]]
) -> dict[str, StepRecord]:
    """Return the record of a simulated step with each of `policies` (name -> arguments of
    `Planner.record`). Raises ValueError for a policy that names more blocks than the model has."""
    each = tqdm(policies.items(), unit="policy", disable=None, leave=False)
    batch_size = plan.settings.batch_size
    return {name: plan.planner.record(batch_size, **memory) for name, memory in each}


def describe_step(plan: CommandPlan, batch: str = "") -> str:
    """Describe a planned step: "124M parameters, batch of 8 x 1,024 tokens, bfloat16 on a GPU"."""
    millions = plan.n_parameters / 1e6
    size = f"{millions:,.{0 if millions > 10 else 2}f}M parameters"
    batch = batch or f"batch of {plan.settings.batch_size} x "
    precision = str(plan.precision).removeprefix("torch.")
    device = "CPU" if plan.device.type == "cpu" else "GPU"
    return f"{size}, {batch}{plan.settings.seq_len:,} tokens, {precision} on a {device}"


def load_pyplot(program: str) -> Any:
    """Return matplotlib.pyplot in this project's style, for drawing into files. Raises MiniGPTError
    if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise MiniGPTError(f"{program} needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcdefaults()  # ignore the user's own style
    plt.rcParams.update(STYLE)
    return plt


def save_picture(figure: Any, file: Path, about: Mapping[str, str] | None = None) -> None:
    """Write the picture. The metadata of a PNG file are only `about`, without matplotlib's version,
    so that equal numbers give equal files. Raises a MiniGPTError that names --out."""
    metadata = {"Software": None, **(about or {})} if file.suffix == ".png" else None
    try:
        file.parent.mkdir(exist_ok=True)  # (the default folder, out/, may be missing)
        figure.savefig(file, metadata=metadata)
    except (OSError, ValueError) as error:  # ValueError: the suffix is no picture format
        raise MiniGPTError(f"--out {file}: {error}") from None


# ---- Metadata of results


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    linux = Path("/proc/cpuinfo")
    found = re.search("model name.*: (.*)", linux.read_text() if linux.exists() else "")
    name = found[1] if found else platform.processor() or platform.machine()
    return f"{device.type}: {name}, {torch.get_num_threads()} thread(s)"


def about(module: str, argv: list[str], device: torch.device | None = None) -> dict[str, Any]:
    """Return the metadata of a result, with the device if `device` is given."""
    return {
        "command": shlex.join(["python", "-m", module, *argv]),
        **({"device": describe_device(device)} if device else {}),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def describe_about(about: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in about.items())


def write_json(file: Path | None, numbers: dict[str, Any]) -> None:
    """Write the numbers to `file`, or nothing if `file` is None."""
    if file:
        file.write_text(json.dumps(numbers, indent=1) + "\n")
