"""Draw the loss and the speed of training runs, from their metrics.jsonl files.

python -m scripts.plot_metrics checkpoints/*.metrics.jsonl                      # out/metrics.png
python -m scripts.plot_metrics a.metrics.jsonl b.metrics.jsonl --out curves.svg

Single log lines are noisy, so a long run has a thin line through all values, and a thick line for
their moving average over a twentieth of the run. (--smooth 1: no average.) A vertical line marks
where memory ran out and the run continued with another recompute policy. The legend shows each
run's peak memory. The command needs matplotlib: pip install matplotlib
"""

import argparse
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import MiniGPTError
from scripts import cli_main
from scripts.style import WIDTH, load_pyplot, save_picture
from trainer.flags import OneLineParser, number_in_range, output_file
from trainer.metrics import format_bytes, read_metrics

Records = list[dict[str, Any]]
Runs = dict[str, Records]  # name of a run -> its records

# Okabe and Ito's colours: colour-blind readers can tell most of them apart.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
LONG = 30  # log lines; shorter runs get no average
PANELS = {  # title -> keys of the records for training and for validation
    "Loss in nats per token (circles: validation)": ("train_loss", "val_loss"),
    "Speed in tokens per second": ("tokens_per_s", ""),
}


def load(paths: list[Path]) -> Runs:
    """Return the records of each run; a file without records raises MiniGPTError."""
    runs: Runs = {}
    for path in paths:
        records = read_metrics(path)
        if not records:
            raise MiniGPTError(f"{path} has no line with a step in it: is it a metrics.jsonl?")
        name = path.name.removesuffix(".jsonl").removesuffix(".metrics")
        runs[name if name not in runs else str(path)] = records
    return runs


def points(records: Records, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values), each (n,), of the records in which `key` is a finite number."""
    known = [r for r in records if isinstance(r.get(key), int | float) and math.isfinite(r[key])]
    return np.array([r["step"] for r in known]), np.array([r[key] for r in known], dtype=float)


def draw(plt: Any, runs: Runs, smooth: int | None) -> Any:
    """Draw a panel for each of PANELS, in which each run has its colour, and the legend below."""
    figure, axes = plt.subplots(len(PANELS), 1, sharex=True, figsize=(WIDTH, 5 + 0.1 * len(runs)))
    for axis, (title, keys) in zip(axes, PANELS.items(), strict=True):
        axis.set_title(title)
        axis.grid(alpha=0.3)
        for i, (name, records) in enumerate(runs.items()):
            draw_run(axis, records, *keys, smooth, COLORS[i % len(COLORS)], name)
        axis.yaxis.set_major_formatter("{x:,.10g}")
    axis.set_xlabel("optimizer step")
    figure.legend(
        handles=axes[0].get_legend_handles_labels()[0],
        loc="outside lower center",
        frameon=False,
        ncols=min(2, len(runs)),
    )
    return figure


def draw_run(
    axis: Any,
    records: Records,
    training: str,
    validation: str,
    smooth: int | None,
    color: str,
    name: str,
) -> None:
    """Draw one run in one panel, with a label such as "minigpt_single: peak 3.2 GiB (cuda)"."""
    peak = max(points(records, "peak_memory_bytes")[1], default=None)
    kind = records[-1].get("peak_memory_kind")
    label = f"{name}: peak {format_bytes(peak)} ({kind})" if peak else name
    steps, values = points(records, training)
    window = min(smooth or (len(steps) // 20 if len(steps) >= LONG else 1), len(steps))
    if window > 1:
        axis.plot(steps, values, color=color, linewidth=0.6, alpha=0.35)
        values = np.convolve(values, np.full(window, 1 / window), "valid")
        steps = steps[(window - 1) // 2 :][: len(values)]
    # A short run's log lines may be at uneven steps, so each is marked.
    marker = "." if len(steps) < LONG else ""
    axis.plot(steps, values, color=color, linewidth=1.5, marker=marker, label=label)
    axis.plot(*points(records, validation), "o--", color=color, markerfacecolor="w", linewidth=1)
    for before, after in pairwise(records):
        earlier, policy = before.get("recompute"), after.get("recompute")
        if earlier and policy and earlier != policy:
            label = f"{policy} by step {after['step']:,}"
            axis.axvline(after["step"], color=color, linewidth=0.8, zorder=1, label=label)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the flags. Raises MiniGPTError."""
    parser = OneLineParser(prog="python -m scripts.plot_metrics", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("metrics", nargs="+", type=Path, metavar="FILE.metrics.jsonl")
    add("--out", type=output_file, default=Path("out/metrics.png"), metavar="FILE",
        help="file of the picture; its suffix sets the format (default: %(default)s)")  # fmt: skip
    add("--smooth", type=number_in_range(int, 1, 10**9), metavar="N",
        help="number of log lines to average for the thick line, 1 = no thick line (default: a "
        f"twentieth of the run if it has {LONG} log lines or more)")  # fmt: skip
    return parser.parse_args(argv)


@cli_main
def main(argv: list[str]) -> None:
    args = parse(argv)
    runs = load(args.metrics)
    save_picture(draw(load_pyplot("plot_metrics"), runs, args.smooth), args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    sys.exit(main())
