"""Muon beside AdamW, and moments in bfloat16 beside float32: what they do to loss and time.

python -m studies.optimizers                      # the main job on a CPU: half an hour to an hour
python -m studies.optimizers --use-toy-data ...   # another: the flags are train_minimal.py's

1. Each optimizer at the same number of learning rates; Muon for fewer steps. At which of them is
   Muon's validation loss where AdamW's best run ends?
2. A step of both, turn by turn in one process, so that both see what else the machine does; once in
   the precision of the runs and once in float32, as where the hardware has no bfloat16.
3. At the best learning rate of each, three seeds with moments of either kind.
"""

import argparse
import sys
from itertools import product
from typing import Any

import numpy as np
from tqdm import tqdm

from scripts.benchmark_worker import WARM_UP, Job, config_of, make_run, timed_step
from studies.common import (
    about,
    add_json,
    changed,
    describe,
    reached,
    refuse,
    table,
    tool,
    val_curve,
    write_json,
)
from trainer.device import choose_device, choose_precision
from trainer.flags import build_parser, fill_in, number, output_file
from trainer.plan import vocabulary
from trainer.pretrained import open_init_from
from trainer.report import describe_model

OPTIMIZERS, MOMENTS = ("adamw", "muon"), ("float32", "bfloat16")
MUON_SHARE = 0.6  # of --num-steps


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises UsageError."""
    parser = build_parser("python -m studies.optimizers", "unused")
    parser.description = "Compare optimizers and the dtypes of their moments: loss and time."
    parser.set_defaults(eval_interval=50, save_interval=0, sample_tokens=0, log_interval=0)
    group = parser.add_argument_group("study (all else as in train_minimal.py)")
    add = group.add_argument
    positive, count = number(float, 0, open=True), number(int, 1, 10**6)
    add("--factors", type=positive, nargs="+", default=[0.5, 1.0, 2.0, 4.0, 8.0], metavar="X",
        help="learning rates, in units of the default (default: 0.5 1 2 4 8)")  # fmt: skip
    add("--seeds", type=count, default=3, metavar="N", help="(default: %(default)s)")
    add("--rounds", type=count, default=40, metavar="N",
        help="timed steps of each optimizer, which take turns (default: %(default)s)")  # fmt: skip
    add_json(group)
    add("--markdown", type=output_file, metavar="FILE", help="write the tables there")
    args = parser.parse_args(argv)
    refuse(args, "optimizer", "moments_dtype", "lr", "resume", "num_tokens", "num_epochs")
    open_init_from(args)
    fill_in(changed(args))  # contradictions
    return args


def run(args: argparse.Namespace, optimizer: str, rate: float, **changes: Any) -> dict[str, Any]:
    """Train as train_minimal.py does, and keep no more than the validation losses."""
    steps = args.num_steps if optimizer == "adamw" else round(MUON_SHARE * args.num_steps)
    flags = {"optimizer": optimizer, "lr": rate, "num_steps": max(steps, 1)} | changes
    curve = val_curve(args, "val_loss", **flags)
    return flags | {"val_loss": curve[-1][1], "curve": curve}


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    default = fill_in(changed(args)).lr
    every = [(name, factor * default) for name in OPTIMIZERS for factor in args.factors]
    bar = tqdm(every, desc="learning rates", leave=False, disable=None)
    return [run(args, name, rate) for name, rate in bar]


def best(rates: list[dict[str, Any]], optimizer: str) -> dict[str, Any]:
    return min((r for r in rates if r["optimizer"] == optimizer), key=lambda r: r["val_loss"])


def steps_to_match(rates: list[dict[str, Any]]) -> int | None:
    """The step at which Muon's best run is where AdamW's ends; None: it never is."""
    return reached(best(rates, "muon")["curve"], best(rates, "adamw")["val_loss"])


def time_steps(args: argparse.Namespace, rounds: int, no_amp: bool) -> dict[str, Any]:
    """Seconds of a step of each optimizer, and the median of the ratios of neighbours."""
    flags = fill_in(changed(args, no_amp=True, amp_dtype="auto") if no_amp else changed(args))
    flags.vocab_size, device = vocabulary(flags), choose_device(flags.device)
    runs = []
    for name in OPTIMIZERS:
        one = changed(flags, optimizer=name)
        runs.append(make_run(one, Job("none", one.batch_size), device))
    seconds = []
    for i in tqdm(range(-WARM_UP, rounds), desc="rounds", leave=False, disable=None):
        row = [timed_step(run) for run in runs]
        seconds += [row] * (i >= 0)
    measured = np.array(seconds)  # (rounds, optimizers)
    return {
        "precision": str(choose_precision(flags, device)).removeprefix("torch."),
        "step_s": dict(zip(OPTIMIZERS, np.median(measured, axis=0).tolist(), strict=True)),
        "ratio": float(np.median(measured[:, 1] / measured[:, 0])),
        "step_s_all": measured.tolist(),
    }


def compare_moments(
    args: argparse.Namespace, seeds: int, rates: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Runs at the best learning rates. (A run of the sweep is not done again.)"""
    numbers = range(args.seed, args.seed + seeds)
    every = list(product(OPTIMIZERS, MOMENTS, numbers))
    found = []
    for name, dtype, seed in tqdm(every, desc="moments", leave=False, disable=None):
        one = best(rates, name)
        if (dtype, seed) != (args.moments_dtype, args.seed):
            one = run(args, name, one["lr"], moments_dtype=dtype, seed=seed)
        found.append(one | {"moments_dtype": dtype, "seed": seed})
    return found


def report(found: dict[str, Any]) -> str:
    rates, times, moments = (found[name] for name in ("rates", "times", "moments"))
    lines = [
        [r["optimizer"], f"{r['lr']:.2e}", f"{r['num_steps']:,}", f"{r['val_loss']:.4f}"]
        for r in rates
    ]
    parts = [table(["optimizer", "--lr", "steps", "validation loss"], lines)]
    goal, match = best(rates, "adamw"), steps_to_match(rates)
    words = f"AdamW's best run ends at {goal['val_loss']:.4f} after {goal['num_steps']:,} steps"
    words += "; Muon's best is there " + (f"at step {match:,}" if match else "never")
    if match:
        share = match / goal["num_steps"]
        words += f", {share:.2f} of the steps and, by the times below, "
        words += " or ".join(f"{share * t['ratio']:.2f}" for t in times) + " of the time"
    parts.append(words + ".")
    lines = [
        [t["precision"], *(f"{1000 * t['step_s'][name]:.1f} ms" for name in OPTIMIZERS)]
        + [f"{t['ratio']:.2f}"]
        for t in times
    ]
    parts.append(table(["precision", "AdamW's step", "Muon's", "ratio"], lines))
    lines = []
    for name in OPTIMIZERS:
        for dtype in MOMENTS:
            row = [r for r in moments if (r["optimizer"], r["moments_dtype"]) == (name, dtype)]
            losses = [r["val_loss"] for r in row]
            words = ", ".join(f"{loss:.4f}" for loss in losses)
            lines.append([name, dtype, words, f"{sum(losses) / len(losses):.4f}"])
    header = ["optimizer", "moments", "validation loss of each seed", "mean"]
    return "\n\n".join([*parts, table(header, lines)])


@tool
def main(argv: list[str]) -> None:
    args = parse(argv)
    flags, device = fill_in(changed(args)), choose_device(args.device)
    flags.vocab_size = vocabulary(flags)
    times = [time_steps(args, args.rounds, no_amp=False)]
    if times[0]["precision"] != "float32":
        times.append(time_steps(args, args.rounds, no_amp=True))
    rates = sweep(args)
    model = describe_model(config_of(flags, Job("none", flags.batch_size)))
    found = {"model": model} | about("studies.optimizers", argv, device)
    numbers = {"times": times, "rates": rates}
    numbers["moments"] = compare_moments(args, args.seeds, rates)
    text = f"{report(numbers)}\n\n{describe(found)}"
    print(text)
    write_json(args.json, found | numbers)
    if args.markdown:
        args.markdown.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
