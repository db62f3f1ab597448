"""Draw training runs from their metrics.jsonl: loss, perplexity, learning rate, speed, memory.

python -m scripts.plot_metrics checkpoints/*.metrics.jsonl --output curves.png

Needs matplotlib: pip install matplotlib
"""

import sys
from pathlib import Path
from typing import Any

from trainer.flags import OneLineParser, UsageError, print_error
from trainer.metrics import read_metrics

# Okabe and Ito's colours, which colour-blind readers can tell apart, each with a marker of its own.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]

# (title, axis label, [(key, what it is called)], scale of the values, logarithmic axis)
PANELS: list[tuple[str, str, list[tuple[str, str]], float, bool]] = [
    ("Loss", "nats per token", [("train_loss", ""), ("val_loss", "validation")], 1, False),
    ("Perplexity", "perplexity", [("train_ppl", ""), ("val_ppl", "validation")], 1, True),
    ("Learning rate", "learning rate", [("lr", "")], 1, False),
    ("Speed", "tokens per second", [("tokens_per_s", "")], 1, False),
    ("Peak memory so far", "MiB", [("peak_memory_bytes", "")], 2**-20, False),
]


def load(paths: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """Run name -> records. Raises UsageError for a file that holds none."""
    runs = {}
    for path in paths:
        try:
            records = read_metrics(path)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        records = [r for r in records if isinstance(r.get("step"), int)]
        if not records:
            raise UsageError(f"{path} has no line with a step in it: is it a metrics.jsonl?")
        if any(isinstance(v, int) and abs(v) >= 2**63 for r in records for v in r.values()):
            raise UsageError(f"{path} holds a number too large to draw: is it a metrics.jsonl?")
        name = path.name.removesuffix(".jsonl").removesuffix(".metrics")
        runs[name if name not in runs else str(path)] = records
    return runs


def draw(runs: dict[str, list[dict[str, Any]]], output: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise UsageError("plot_metrics needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    axes = list(grid.flat)
    for axis, (title, label, series, scale, logarithmic) in zip(axes, PANELS, strict=False):
        for i, (name, records) in enumerate(runs.items()):
            color, marker = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
            for key, kind in series:
                points = [
                    (r["step"], r[key] * scale)
                    for r in records
                    if isinstance(r.get(key), int | float)
                ]
                if points:
                    style = {"marker": marker, "linestyle": "--"} if kind else {"linestyle": "-"}
                    text = f"{name}, {kind}" if kind else name
                    axis.plot(*zip(*points, strict=True), color=color, label=text, **style)
        axis.set(title=title, xlabel="optimizer step", ylabel=label)
        axis.grid(alpha=0.3)
        if logarithmic:
            axis.set_yscale("log")
            for formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
                formatter(lambda value, _: f"{value:g}")  # 200, not 2 x 10^2
        elif title != "Loss":
            axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    axes[-1].axis("off")  # the sixth place holds the legend
    axes[-1].legend(*axes[0].get_legend_handles_labels(), loc="center", frameon=False)
    try:
        figure.savefig(output, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no picture format
        raise UsageError(f"--output {output}: {error}") from None


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m scripts.plot_metrics", description=__doc__)
    parser.add_argument("metrics", nargs="+", type=Path, metavar="FILE.metrics.jsonl")
    parser.add_argument("--output", type=Path, default=Path("metrics.png"), metavar="PICTURE")
    args = parser.parse_args(argv)
    if not args.output.suffix:
        args.output = args.output.with_suffix(".png")
    try:
        draw(load(args.metrics), args.output)
    except UsageError as error:
        print_error(error)
        return 2
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
