"""Draw training runs from their metrics.jsonl: loss, perplexity, learning rate, speed, memory.

python -m scripts.plot_metrics checkpoints/*.metrics.jsonl                      # out/metrics.png
python -m scripts.plot_metrics a.metrics.jsonl b.metrics.jsonl --out curves.svg

Single log lines are noisy: of a long run they are a thin line, and the thick one over it is their
average over a twentieth of the run (--smooth 1: none). Dotted lines stand where a run was resumed.
Needs matplotlib: pip install matplotlib
"""

import os
import sys

if not __package__:  # python scripts/plot_metrics.py: the others lie one folder up
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    import scripts  # noqa: F401

import argparse
import math
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts import tool
from scripts.style import FORMATS, GRAY, WIDTH, Unit, load_pyplot, save_picture
from trainer.flags import OneLineParser, UsageError, number
from trainer.metrics import read_metrics
from trainer.snapshot import beside

Records = list[dict[str, Any]]
Runs = dict[str, Records]  # by name

# Okabe and Ito's colours, most of which colour-blind readers can tell apart, each with a marker of
# its own: along validation, or at the end of the line.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
LINES = ["-", "-.", ":"]  # of the first seven runs, the next seven, ...
LONG = 30  # log lines; shorter runs are not smoothed
KINDS: dict[str, dict[str, Any]] = {  # of lines, from the thinnest
    "training": {"linewidth": 1.5},
    "each log line": {"linewidth": 0.6, "alpha": 0.35, "zorder": 1.5},
    "moving average": {"linewidth": 2.2, "zorder": 3},
    "validation": {"linewidth": 1, "linestyle": "--", "marker": "o", "markersize": 5},
    "resumed": {"linewidth": 1, "linestyle": ":", "zorder": 1},
}


class Panel(NamedTuple):
    title: str
    training: str  # a key of the records
    validation: str = ""
    label: str = ""
    smooth: bool = False
    logarithmic: bool = False


PANELS = [
    Panel("Loss", "train_loss", "val_loss", "nats per token", smooth=True),
    Panel("Perplexity", "train_ppl", "val_ppl", smooth=True, logarithmic=True),
    Panel("Learning rate", "lr"),
    Panel("Speed", "tokens_per_s", label="tokens per second", smooth=True),
    Panel("Peak memory so far", "peak_memory_bytes"),
]


def load(paths: list[Path]) -> Runs:
    """Raises UsageError for a file that holds no records."""
    runs: Runs = {}
    for path in paths:
        try:
            records = read_metrics(path)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        records = [r for r in records if isinstance(r.get("step"), int)]
        if not records:
            log = beside(path, ".metrics.jsonl")
            hint = f"its run's log is {log}" if log.is_file() else "is it a metrics.jsonl?"
            raise UsageError(f"{path} has no line with a step in it: {hint}")
        if any(isinstance(v, int) and abs(v) >= 2**63 for r in records for v in r.values()):
            raise UsageError(f"{path} holds a number too large to draw: is it a metrics.jsonl?")
        name = path.name.removesuffix(".jsonl").removesuffix(".metrics")
        runs[name if name not in runs else str(path)] = records
    return runs


def points(records: Records, key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of the records in which that key is a number."""
    known = [r for r in records if isinstance(r.get(key), int | float) and math.isfinite(r[key])]
    return np.array([r["step"] for r in known]), np.array([r[key] for r in known], dtype=float)


def changes_of_policy(records: Records) -> list[tuple[int, str]]:
    """The steps whose records have another `recompute` than the one before, and that policy."""
    known = [(r["step"], r["recompute"]) for r in records if isinstance(r.get("recompute"), str)]
    return [after for before, after in pairwise(known) if before[1] != after[1]]


def moving_average(panel: Panel, values: np.ndarray, window: int) -> np.ndarray:
    """(n,) -> (n - window + 1,): of each `window` values in a row. Of perplexity the geometric
    mean, exp of the average loss: its axis is logarithmic."""
    if panel.logarithmic:
        values = np.log(np.maximum(values, 1e-300))
    means = np.convolve(values, np.full(window, 1 / window), "valid")
    return np.exp(means) if panel.logarithmic else means


def draw(plt: Any, runs: Runs, smooth: int | None) -> Any:
    """A panel for each of PANELS, a colour for each run; the sixth place holds a short legend."""
    figure, grid = plt.subplots(3, 2, figsize=(WIDTH, 7.6))
    *axes, last = grid.flat
    looks = {}
    for i, name in enumerate(runs):
        looks[name] = {"color": COLORS[i % 7], "marker": MARKERS[(i + i // 7) % 7]}
        looks[name]["linestyle"] = LINES[i // 7 % 3]
    kinds: set[str] = set()  # of lines, for the legend
    for axis, panel in zip(axes, PANELS, strict=True):
        unit = memory_unit(runs) if panel.training == "peak_memory_bytes" else Unit("", 1)
        for name, records in runs.items():
            drawn = draw_run(axis, panel, records, looks[name], smooth, unit.size)
            kinds |= drawn if panel.smooth else set()
        axis.set(title=panel.title, ylabel=panel.label or unit.name)
        tidy(plt, axis, panel)
    for lowest in axes[-2:]:
        lowest.set_xlabel("optimizer step")
    handles = [plt.Line2D([], [], **look, label=name) for name, look in looks.items()]
    handles += [plt.Line2D([], [], color=GRAY, label=k, **KINDS[k]) for k in KINDS if k in kinds]
    marks = axes[0].get_legend_handles_labels()[0]  # of changes of policy
    handles += marks
    last.axis("off")
    if len(handles) <= 11:
        last.legend(handles=handles, loc="center", frameon=False)
    else:  # below all panels
        columns = 2 if marks else 3  # (their words are long)
        figure.set_figheight(figure.get_figheight() + 0.19 * math.ceil(len(handles) / columns))
        figure.legend(handles=handles, loc="outside lower center", frameon=False, ncols=columns)
    return figure


def draw_run(
    axis: Any, panel: Panel, records: Records, look: dict[str, str], smooth: int | None, size: int
) -> set[str]:
    """One run in one panel; the kinds of lines that were drawn."""
    drawn: dict[str, tuple[np.ndarray, np.ndarray, dict[str, Any]]] = {}
    steps, values = points(records, panel.training)
    window = smooth or (len(steps) // 20 if len(steps) >= LONG else 1)
    window = min(window, len(steps)) if panel.smooth else 1
    line: dict[str, Any] = {"color": look["color"], "linestyle": look["linestyle"]}
    last = line | ({} if panel.validation else look | {"markersize": 5, "markevery": [-1]})
    if window > 1:
        average = moving_average(panel, values, window)
        drawn["each log line"] = steps, values, line
        drawn["moving average"] = steps[(window - 1) // 2 :][: len(average)], average, last
    elif len(steps) > 1:
        drawn["training"] = steps, values, last
    elif len(steps):  # one point makes no line
        axis.plot(steps, values / size, ".", color=look["color"], markersize=10, clip_on=False)
    steps, values = points(records, panel.validation)
    if len(steps):  # with markers enough to tell runs apart
        every = {"markevery": max(1, len(steps) // 10)}
        drawn["validation"] = steps, values, look | {"linestyle": "--"} | every
    for kind, (x, y, style) in drawn.items():
        axis.plot(x, y / size, **KINDS[kind] | style)
    kinds = {*drawn}
    for step in points(records, "resumed_from")[1] if drawn else ():
        kinds.add("resumed")
        axis.axvline(step, color=look["color"], **KINDS["resumed"])
    for step, policy in changes_of_policy(records) if drawn else ():
        words = f"{policy} by step {step:,}"
        axis.axvline(step, color=look["color"], linewidth=0.8, zorder=1, label=words)
    return kinds


def memory_unit(runs: Runs) -> Unit:
    """Of the memory panel, and what was measured: "GiB, cuda"."""
    records = [r for records in runs.values() for r in records if r.get("peak_memory_bytes")]
    kinds = sorted({str(r["peak_memory_kind"]) for r in records if r.get("peak_memory_kind")})
    unit = Unit.of(int(max(points(records, "peak_memory_bytes")[1], default=0)))
    return Unit(", ".join([unit.name, *kinds]), unit.size)


def tidy(plt: Any, axis: Any, panel: Panel) -> None:
    """Ticks that can be read: whole steps, few, and no powers of ten."""
    ticker = plt.matplotlib.ticker
    axis.grid(alpha=0.3)
    if not axis.lines:
        axis.text(0.5, 0.5, "not recorded", ha="center", transform=axis.transAxes, color=GRAY)
        axis.set(xticks=[], yticks=[])
        return
    steps = np.concatenate([line.get_xdata() for line in axis.lines])
    if steps.min() == steps.max():
        axis.set_xlim(steps[0] - 1, steps[0] + 1)
    axis.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    unit, k = (1000, "k") if steps.max() >= 100_000 else (1, "")
    axis.xaxis.set_major_formatter(lambda x, _: f"{x / unit:,.10g}{k if x else ''}")
    if panel.logarithmic:
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        decades = ticker.LogLocator(subs=(1, 2, 5), numticks=10)  # of less than one it may find one
        axis.yaxis.set_major_locator(decades if high > 10 * low else ticker.MaxNLocator(5))
        axis.yaxis.set_minor_locator(ticker.NullLocator())
    elif panel.title != "Loss":
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1] or 1)
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Raises UsageError."""
    parser = OneLineParser(prog="python -m scripts.plot_metrics", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    # fmt: off
    add("metrics", nargs="+", type=Path, metavar="FILE.metrics.jsonl")
    add("--out", type=Path, metavar="PICTURE", help="(default: out/metrics.png)")
    add("--format", choices=tuple(FORMATS), help="(default: as --out ends, else png)")
    add("--smooth", type=number(int, 1, 10**9), metavar="N",
        help="log lines that the thick line averages, 1 = no such line (default: a twentieth of "
        f"the run if it has {LONG} or more)")
    # fmt: on
    args = parser.parse_args(argv)
    ending = f".{args.format or 'png'}"
    if args.out is None:
        args.out = Path("out", f"metrics{ending}")
    elif not args.out.suffix:
        args.out = args.out.with_suffix(ending)
    elif args.format and args.out.suffix != ending:
        raise UsageError(f"--format {args.format} and --out {args.out} contradict each other")
    return args


@tool
def main(argv: list[str]) -> None:
    args = parse(argv)
    runs = load(args.metrics)
    figure = draw(load_pyplot("plot_metrics"), runs, args.smooth)
    if args.out.parent == Path("out"):
        args.out.parent.mkdir(exist_ok=True)
    save_picture(figure, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    sys.exit(main())
