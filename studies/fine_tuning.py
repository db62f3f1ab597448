"""What do trained weights save? One half of a text, then the other: from those, or from nothing.

python -m studies.fine_tuning                      # the built-in corpus: three minutes on a CPU
python -m studies.fine_tuning --train-data ...     # others; the flags are train_minimal.py's

A model is trained on every second file. Then the other files are trained on: from random weights,
for as many steps, and with --init-from that model, for a third of them, at several learning rates.
After which step is the validation loss where random weights end? In bits/byte, as the two have
tokenizers of their own.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data import DataError
from data.files import find_files, find_stdlib
from scripts import tool
from scripts.benchmark import about, table, write_json
from studies.common import changed, parse_training, reached, training_parser, val_curve
from trainer.device import choose_device
from trainer.flags import fill_in, number

BITS = "val_bits_per_byte"
CHOSEN = "init_from val_data use_toy_data resume checkpoint_path num_tokens num_epochs"


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises UsageError."""
    words = "Compare a start from trained weights with one from random weights."
    parser, group = training_parser(
        "studies.fine_tuning", words, tokenizer_name="bpe", eval_interval=25, eval_tokens=76_800
    )
    add, positive = group.add_argument, number(float, 0, open=True)
    add("--factors", type=positive, nargs="+", default=[1.0, 0.3, 0.1], metavar="X",
        help="learning rates, in units of that of random weights (default: 1 0.3 0.1)")  # fmt: skip
    add("--share", type=number(float, 0, 1, open=True), default=1 / 3, metavar="SHARE",
        help="of --num-steps that trained weights get (default: a third)")  # fmt: skip
    return parse_training(parser, argv, CHOSEN)


def halves(args: argparse.Namespace) -> list[list[str]]:
    """Every second file, and the others. Raises DataError."""
    if args.train_data:
        files = find_files(args.train_data, "--train-data", print)
    else:
        files = find_stdlib()
    if len(files) < 2:
        raise DataError("--train-data: one file only; every second one trains first")
    return [[str(path) for path in files[start::2]] for start in (0, 1)]


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What was run, each with its curve: first from random weights. Raises DataError."""
    before, after = halves(args)
    rate = fill_in(changed(args)).lr
    few = max(1, round(args.share * args.num_steps))
    runs: list[dict[str, Any]] = [{"from": "random weights", "lr": rate, "steps": args.num_steps}]
    runs += [{"from": "trained", "lr": rate * x, "steps": few} for x in args.factors]
    with tempfile.TemporaryDirectory() as folder:
        trained = Path(folder) / "trained.pt"
        val_curve(args, BITS, train_data=before, checkpoint_path=trained)
        for i, run in enumerate(tqdm(runs, leave=False, disable=None)):
            start = {"init_from": trained, "lr": run["lr"]} if i else {}
            run["curve"] = val_curve(args, BITS, train_data=after, num_steps=run["steps"], **start)
    return runs


def steps_to_match(runs: list[dict[str, Any]]) -> list[int | None]:
    """For each run from trained weights: where it is as good as random weights at their end."""
    _, goal = runs[0]["curve"][-1]
    return [reached(run["curve"], goal) for run in runs[1:]]


def report(runs: list[dict[str, Any]]) -> str:
    """A column a run, in bits/byte; what a run did not see is left out."""
    curves: list[dict[int, float]] = [dict(run["curve"]) for run in runs]
    steps = sorted({step for curve in curves for step in curve})
    header = ["step", *(f"{run['from']}, lr {run['lr']:.1e}" for run in runs)]
    shown = [[f"{curve[step]:.3f}" if step in curve else "" for curve in curves] for step in steps]
    rows = [[f"{step:,}", *row] for step, row in zip(steps, shown, strict=True)]
    there = [str(step) if step else "never" for step in steps_to_match(runs)]
    goal = f"{curves[0][steps[-1]]:.3f} bits/byte, the end of random weights"
    return f"{table(header, rows)}\n\n{goal}, reached after step: {', '.join(there)}"


@tool
def main(argv: list[str]) -> None:
    args = parse(argv)
    found = about("studies.fine_tuning", argv, choose_device(args.device))
    runs = compare(args)
    print(report(runs))
    write_json(args.json, found | {"runs": runs})


if __name__ == "__main__":
    sys.exit(main())
