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
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from model import RECOMPUTE_POLICIES
from scripts import tool
from scripts.benchmark import about_planned, ask, describe, predict, table, write_json
from scripts.benchmark_worker import WARM_UP, Job, config_of, make_run, timed_step
from studies.common import parse_training, ready, training_parser
from trainer.flags import number

Row = dict[str, Any]
HEADER = ("policy", "step", "predicted", "ratio", "over none", "predicted")


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises UsageError or DataError."""
    words = "Compare measured time of every policy with what the planner predicts."
    parser, group = training_parser("studies.clock_check", words, largest_batch=False)
    group.add_argument("--rounds", type=number(int, 1, 10**6), default=10, metavar="N",
        help="timed steps of each policy, which take turns (default: %(default)s)")  # fmt: skip
    return ready(parse_training(parser, argv, "use_activation_checkpoint card"))


def measure(args: argparse.Namespace, device: torch.device, jobs: list[Job]) -> np.ndarray:
    """(rounds, jobs) seconds of a step."""
    run, configs = make_run(args, jobs[0], device), [config_of(args, job) for job in jobs]
    seconds = []
    for i in tqdm(range(-1, args.rounds), desc="rounds", leave=False, disable=None):
        row = []
        for config in configs:
            run.model.config = config
            # The first one also pays for memory that the policy before had given back.
            row.append([timed_step(run) for _ in range(WARM_UP)][-1])
        seconds += [row] * (i >= 0)
    return np.array(seconds)


def compare(policies: list[str], predicted: list[float], measured: np.ndarray) -> list[Row]:
    """A row for each policy, the first of which is `none`. `predicted`: seconds; `measured`:
    (rounds, policies) seconds."""
    medians = np.median(measured, axis=0)
    over_none = np.median(measured / measured[:, :1], axis=0) - 1
    return [
        {
            "policy": policy,
            "step_s": float(medians[i]),
            "predicted_s": predicted[i],
            "over_none": float(over_none[i]),
            "predicted_over_none": predicted[i] / predicted[0] - 1,
            "step_s_all": measured[:, i].tolist(),
        }
        for i, policy in enumerate(policies)
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
    question = ask(args)
    jobs = [Job(policy, args.batch_size) for policy in RECOMPUTE_POLICIES]
    predicted = [predict(question, job)[1] for job in jobs]
    measured = measure(args, question.device, jobs)
    rows = compare([job.policy for job in jobs], predicted, measured)
    assert question.card
    told = about_planned("studies.clock_check", argv, question)
    print(table(HEADER, map(cells, rows)), describe(told), sep="\n\n")
    write_json(args.json, told | {"card": asdict(question.card), "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
