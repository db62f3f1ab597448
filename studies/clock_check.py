"""Is the planner's clock right here? Measured and predicted time of every policy, turn by turn.

python -m studies.clock_check                                  # the demo's model
python -m studies.clock_check --model gpt2 --batch-size 2      # GPT-2 small: minutes

One process, one model: a policy changes no weight, so a step with each of them, then all of them
again, differ in nothing but the policy and in what else the machine does meanwhile. What a policy
costs is therefore compared with `none` of the same round, and the median of all rounds is reported.
(scripts.benchmark measures peaks, too, and so needs a process for each policy.)
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from tqdm import tqdm

from model import RECOMPUTE_POLICIES
from planner import StepMemory
from scripts.benchmark_worker import WARM_UP, Job, config_of, make_run, timed_step
from studies.common import (
    about,
    describe,
    parse_training,
    table,
    tool,
    training_parser,
    write_json,
)
from trainer.card import clock_card, measured_card
from trainer.device import choose_device, choose_precision, set_matmul_precision
from trainer.flags import fill_in, number
from trainer.plan import make_planner, step_seconds, vocabulary
from trainer.pretrained import open_init_from
from trainer.report import describe_model

Row = dict[str, Any]
HEADER = ("policy", "step", "predicted", "ratio", "over none", "predicted")


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises UsageError or DataError."""
    words = "Compare measured time of every policy with what the planner predicts."
    parser, group = training_parser("studies.clock_check", words)
    group.add_argument("--rounds", type=number(int, 1, 10**6), default=10, metavar="N",
        help="timed steps of each policy, which take turns (default: %(default)s)")  # fmt: skip
    args = parse_training(parser, argv, "use_activation_checkpoint card")
    open_init_from(args)
    args = fill_in(args)
    args.vocab_size = vocabulary(args)
    return args


def measure(args: argparse.Namespace, policies: Sequence[str]) -> np.ndarray:
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


def compare(steps: list[StepMemory], predicted: list[float], measured: np.ndarray) -> list[Row]:
    """A row for each step, the first without recompute. `predicted`: seconds; `measured`: (rounds,
    steps) seconds."""
    medians = np.median(measured, axis=0)
    over_none = np.median(measured / measured[:, :1], axis=0) - 1
    return [
        {
            "policy": step.config.recompute,
            "step_s": float(medians[i]),
            "predicted_s": predicted[i],
            "over_none": float(over_none[i]),
            "predicted_over_none": predicted[i] / predicted[0] - 1,
            "step_s_all": measured[:, i].tolist(),
        }
        for i, step in enumerate(steps)
    ]


def cells(row: Row) -> list[str]:
    return [
        row["policy"],
        f"{1000 * row['step_s']:,.1f} ms",
        f"{1000 * row['predicted_s']:,.1f} ms",
        f"{row['predicted_s'] / row['step_s']:.2f}",
        f"{row['over_none']:+.1%}",
        f"{row['predicted_over_none']:+.1%}",
    ]


@tool
def main(argv: list[str]) -> None:
    args = parse(argv)
    device = choose_device(args.device)
    set_matmul_precision(device, args.tf32)
    card = clock_card(args, device) or measured_card(args, device)
    config = config_of(args, Job("none", args.batch_size))
    precision = choose_precision(args, device)
    planner = make_planner(args, config, device, precision)
    steps = [planner.step(args.batch_size, recompute=policy) for policy in RECOMPUTE_POLICIES]
    predicted = [step_seconds(step, card, args.grad_accum_steps) for step in steps]
    rows = compare(steps, predicted, measure(args, RECOMPUTE_POLICIES))
    told = about("studies.clock_check", argv, device) | {
        "model": describe_model(config),
        "precision": str(precision).removeprefix("torch."),
        "predicted for": card.name,
    }
    print(table(HEADER, map(cells, rows)), describe(told), sep="\n\n")
    write_json(args.json, told | {"card": asdict(card), "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
