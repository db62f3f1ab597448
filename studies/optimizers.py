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
from statistics import mean, median
from typing import Any

from scripts import tool
from scripts.benchmark import about, describe, write_json
from scripts.benchmark_worker import WARM_UP, Job, config_of, make_run, timed_step
from studies.common import changed, parse_training, reached, ready, training_parser, val_curve
from trainer.device import choose_device, choose_precision
from trainer.flags import number
from trainer.report import describe_model

OPTIMIZERS, MOMENTS = ("adamw", "muon"), ("float32", "bfloat16")
MUON_SHARE = 0.6  # of --num-steps
CHOSEN = "optimizer moments_dtype lr resume num_tokens num_epochs"


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises UsageError."""
    words = "Compare optimizers and the dtypes of their moments: loss and time."
    parser, group = training_parser("studies.optimizers", words, eval_interval=50, log_interval=0)
    add = group.add_argument
    positive, count = number(float, 0, open=True), number(int, 1, 10**6)
    add("--factors", type=positive, nargs="+", default=[0.5, 1.0, 2.0, 4.0, 8.0], metavar="X",
        help="learning rates, in units of the default (default: 0.5 1 2 4 8)")  # fmt: skip
    add("--seeds", type=count, default=3, metavar="N", help="(default: %(default)s)")
    add("--rounds", type=count, default=40, metavar="N",
        help="timed steps of each optimizer, which take turns (default: %(default)s)")  # fmt: skip
    return parse_training(parser, argv, CHOSEN)


def run(args: argparse.Namespace, optimizer: str, rate: float, **changes: Any) -> dict[str, Any]:
    """Train as train_minimal.py does, and keep no more than the validation losses."""
    steps = args.num_steps if optimizer == "adamw" else round(MUON_SHARE * args.num_steps)
    flags = {"optimizer": optimizer, "lr": rate, "num_steps": max(steps, 1)} | changes
    curve = val_curve(args, "val_loss", **flags)
    words = ", ".join(f"{name} {value}" for name, value in flags.items())
    print(f"{words}: validation loss {curve[-1][1]:.4f}", flush=True)
    return flags | {"val_loss": curve[-1][1], "curve": curve}


def best(rates: list[dict[str, Any]], optimizer: str) -> dict[str, Any]:
    return min((r for r in rates if r["optimizer"] == optimizer), key=lambda r: r["val_loss"])


def steps_to_match(rates: list[dict[str, Any]]) -> int | None:
    """The step at which Muon's best run is where AdamW's ends; None: it never is."""
    return reached(best(rates, "muon")["curve"], best(rates, "adamw")["val_loss"])


def time_steps(args: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    """Seconds of a step of each optimizer, and the median of the ratios of neighbours."""
    flags = ready(changed(args, **changes))
    device, job = choose_device(flags.device), Job("none", flags.batch_size)
    runs = [make_run(changed(flags, optimizer=name), job, device) for name in OPTIMIZERS]
    rounds = [[timed_step(run) for run in runs] for _ in range(WARM_UP + args.rounds)][WARM_UP:]
    found = {
        "precision": str(choose_precision(flags, device)).removeprefix("torch."),
        "step_s": dict(zip(OPTIMIZERS, map(median, zip(*rounds, strict=True)), strict=True)),
        "ratio": median(muon / adamw for adamw, muon in rounds),
    }
    print(f"a step, in s: {found}", flush=True)
    return found | {"step_s_all": rounds}


def compare_moments(args: argparse.Namespace, rates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs at the best learning rates. (A run of the sweep is not done again.)"""
    found = []
    for name, dtype in product(OPTIMIZERS, MOMENTS):
        here = []
        for seed in range(args.seed, args.seed + args.seeds):
            one, kind = best(rates, name), {"moments_dtype": dtype, "seed": seed}
            if (dtype, seed) != (args.moments_dtype, args.seed):
                one = run(args, name, one["lr"], **kind)
            here.append(one | kind)
        loss = mean(one["val_loss"] for one in here)
        print(f"{name}, moments in {dtype}: validation loss {loss:.4f}, of {args.seeds} seeds")
        found += here
    return found


def describe_match(rates: list[dict[str, Any]], times: list[dict[str, Any]]) -> str:
    goal, match = best(rates, "adamw"), steps_to_match(rates)
    words = f"AdamW's best run ends at {goal['val_loss']:.4f} after {goal['num_steps']:,} steps"
    if not match:
        return f"{words}; Muon's best is there never"
    share = match / goal["num_steps"]
    of_time = " or ".join(f"{share * t['ratio']:.2f} ({t['precision']})" for t in times)
    return f"{words}; Muon's is there at step {match:,}: {share:.2f} of steps, {of_time} of time"


@tool
def main(argv: list[str]) -> None:
    args = parse(argv)
    flags, device = ready(changed(args)), choose_device(args.device)
    model = describe_model(config_of(flags, Job("none", flags.batch_size)))
    found = {"model": model} | about("studies.optimizers", argv, device)
    print(describe(found), flush=True)
    times = [time_steps(args)]
    if times[0]["precision"] != "float32":
        times.append(time_steps(args, no_amp=True, amp_dtype="auto"))
    every = product(OPTIMIZERS, args.factors)
    rates = [run(args, name, factor * flags.lr) for name, factor in every]
    print(describe_match(rates, times), flush=True)
    moments = compare_moments(args, rates)
    write_json(args.json, found | {"times": times, "rates": rates, "moments": moments})


if __name__ == "__main__":
    sys.exit(main())
