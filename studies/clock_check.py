"""Is the planner's clock right here? Measured and predicted time of every policy, turn by turn.

python -m studies.clock_check                                  # the demo's model
python -m studies.clock_check --model gpt2 --batch-size 2      # GPT-2 small: minutes

One process, one model: a policy changes no weight, so a step with each of them, then all of them
again, differ in nothing but the policy and in what else the machine does meanwhile. What a policy
costs is therefore compared with `none` of the same round, and the median of all rounds is reported.
(scripts.benchmark measures peaks, too, and so needs a process for each policy.)
"""

import sys

if not __package__:  # python studies/clock_check.py: the others lie one folder up
    sys.path[0] += "/.."
    import studies  # noqa: F401

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from model import RECOMPUTE_POLICIES
from planner import StepMemory
from scripts.benchmark_worker import WARM_UP, Job, config_of, make_run, timed_step
from studies.common import about, add_json, describe, table, tool, write_json
from trainer.card import clock_card, measured_card
from trainer.device import choose_device, choose_precision, set_matmul_precision
from trainer.flags import UsageError, build_parser, fill_in, number
from trainer.plan import make_planner, step_seconds, vocabulary
from trainer.pretrained import open_init_from
from trainer.report import describe_model


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises UsageError or DataError."""
    parser = build_parser("python -m studies.clock_check", "unused")
    parser.description = "Compare measured time of every policy with what the planner predicts."
    group = parser.add_argument_group("check (all else as in train_minimal.py)")
    group.add_argument("--rounds", type=number(int, 1, 10**6), default=10, metavar="N",
        help="timed steps of each policy, which take turns (default: %(default)s)")  # fmt: skip
    add_json(group)
    args = parser.parse_args(argv)
    for name, default in {"use_activation_checkpoint": "none", "card": None}.items():
        if getattr(args, name) != default:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag}: all policies are measured, on this machine: leave it out")
    open_init_from(args)
    args = fill_in(args)
    args.vocab_size = vocabulary(args)
    return args


def measure(args: argparse.Namespace, policies: list[str]) -> np.ndarray:
    """(rounds, policies) seconds of a step."""
    run = make_run(args, Job("none", args.batch_size), choose_device(args.device))
    configs = [config_of(args, Job(policy, args.batch_size)) for policy in policies]
    seconds = []
    for i in tqdm(range(-1, args.rounds), desc="rounds", leave=False, disable=None):
        row = []
        for config in configs:
            run.model.config = config
            # The first one also pays for memory that the policy before had given back.
            row.append([timed_step(run) for _ in range(WARM_UP)][-1])
        seconds += [row] * (i >= 0)
    return np.array(seconds)


def compare(
    steps: list[StepMemory], seconds: Callable[[StepMemory], float], measured: np.ndarray
) -> list[dict[str, Any]]:
    """A row for each step. `seconds`: predicted; `measured`: (rounds, steps) seconds. The first
    one is without recompute."""
    predicted = np.array([seconds(step) for step in steps])
    columns = {
        "step_s": np.median(measured, axis=0),
        "predicted_s": predicted,
        "over_none": np.median(measured / measured[:, :1], axis=0) - 1,
        "predicted_over_none": predicted / predicted[0] - 1,
    }
    return [
        {
            "policy": step.config.recompute,
            **{name: float(column[i]) for name, column in columns.items()},
        }
        | {"step_s_all": measured[:, i].tolist()}
        for i, step in enumerate(steps)
    ]


def cells(row: dict[str, Any]) -> list[str]:
    return [
        row["policy"],
        f"{1000 * row['step_s']:,.1f} ms",
        f"{1000 * row['predicted_s']:,.1f} ms",
        f"{row['predicted_s'] / row['step_s']:.2f}",
        f"{row['over_none']:+.1%}",
        f"{row['predicted_over_none']:+.1%}",
    ]


HEADER = ("policy", "step", "predicted", "ratio", "over none", "predicted")


@tool
def main(argv: list[str]) -> None:
    args = parse(argv)
    device = choose_device(args.device)
    set_matmul_precision(device, args.tf32)
    card = clock_card(args, device) or measured_card(args, device)
    config, precision = (
        config_of(args, Job("none", args.batch_size)),
        choose_precision(args, device),
    )
    planner = make_planner(args, config, device, precision)
    policies = list(RECOMPUTE_POLICIES)
    steps = [planner.step(args.batch_size, recompute=policy) for policy in policies]
    seconds = partial(step_seconds, card=card, micro_batches=args.grad_accum_steps)
    found = compare(steps, seconds, measure(args, policies))
    told = about("studies.clock_check", argv, device) | {
        "model": describe_model(config),
        "precision": str(precision).removeprefix("torch."),
        "predicted for": card.name,
    }
    print(table(HEADER, map(cells, found)), describe(told), sep="\n\n")
    write_json(args.json, told | {"card": asdict(card), "rows": found})


if __name__ == "__main__":
    sys.exit(main())
