"""Make the numbers and pictures in studies/results/ anew: the one place where their commands stand.

python -m studies.make_results                       # those that take three minutes, no GPU
python -m studies.make_results --list                # all of them
python -m studies.make_results --only benchmark      # one of those that take longer, by name

What the documents show stands in studies/results/. A command writes there only if it is told to;
what it makes by default goes to out/, which git ignores. tests/test_results.py computes some of the
numbers again, and knows if one of them no longer comes out of the code.
"""

import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

from studies.common import Stopped, run_study, study_parser

ROOT = Path(__file__).parent.parent
FOLDER = "studies/results"
IDLE = "10 minutes of an idle machine: it measures time"


class Result(NamedTuple):
    """What to run, from the project's root, and what of FOLDER it makes besides a --json file."""

    command: str
    takes: str
    pictures: tuple[str, ...] = ()

    @property
    def files(self) -> list[str]:
        words = [Path(word) for word in shlex.split(self.command)]
        named = [path.name for path in words if path.parent == Path(FOLDER) and path.suffix]
        return [*named, *self.pictures]


QUICK = ("memory_timeline", "block", "ladder", "mixes")
RESULTS = {
    "memory_timeline": Result(
        "python -m scripts.memory_timeline --model gpt2 --batch-size 8 --card RTX-4090 "
        f"--amp-dtype bfloat16 --out {FOLDER} --json {FOLDER}/memory_timeline.json",
        "20 s",
        ("memory_timeline.png", "memory_frontier.png", "memory_made_of.png"),
    ),
    "page": Result(
        "python -m scripts.memory_page --model gpt2 --batch-size 8 --device cuda "
        "--amp-dtype bfloat16",
        "20 s; out/memory_page.html, for the next one",
    ),
    "page_picture": Result(
        f"python -m studies.page_shots --readme {FOLDER}/memory_page.png", "seconds of Chromium"
    ),
    "block": Result(
        f"python -m studies.block_picture --out {FOLDER}", "seconds", ("block_policies.png",)
    ),
    "ladder": Result(f"python -m studies.ladder --json {FOLDER}/ladder.json", "2 minutes"),
    "mixes": Result(f"python -m studies.mixes --json {FOLDER}/mixes.json", "half a minute"),
    "cards": Result(f"python -m studies.cards --json {FOLDER}/cards.json", "3 minutes"),
    "benchmark": Result(
        "python -m scripts.benchmark --model gpt2 --batch-size 2 --no-amp --policies none full "
        "--peer transformers --repeats 2 --steps 2 "
        f"--json {FOLDER}/benchmark_cpu_124m_b2_peer.json",
        IDLE,
    ),
    "clock": Result(
        "python -m studies.clock_check --model gpt2 --batch-size 2 --rounds 3 "
        f"--json {FOLDER}/clock_cpu_124m.json",
        IDLE,
    ),
    "small_clock": Result(
        f"python -m studies.clock_check --rounds 40 --json {FOLDER}/clock_cpu_small.json",
        "half a minute of an idle machine: it measures time",
    ),
    "optimizers": Result(
        f"python -m studies.optimizers --json {FOLDER}/optimizers.json "
        f"--markdown {FOLDER}/optimizers.md",
        "half an hour of an idle machine: it measures time, too",
    ),
    "fine_tuning": Result(
        f"python -m studies.fine_tuning --json {FOLDER}/fine_tuning.json", "3 minutes"
    ),
}


def make(result: Result) -> int:
    """Runs the command as it stands, with this Python; its exit code."""
    _, *words = shlex.split(result.command)
    print(f"\n{result.command}    # {result.takes}", flush=True)
    return subprocess.run([sys.executable, *words], cwd=ROOT).returncode


def study(argv: list[str]) -> None:
    """Raises Stopped."""
    parser = study_parser("studies.make_results", __doc__)
    parser.add_argument("--only", nargs="+", choices=RESULTS, default=QUICK, metavar="NAME",
        help=f"some of {', '.join(RESULTS)} (default: {' '.join(QUICK)})")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="show the commands, run none")
    args = parser.parse_args(argv)
    if args.list:
        for name, result in RESULTS.items():
            print(f"{name}: {', '.join(result.files)} ({result.takes})\n    {result.command}")
        return
    try:
        codes = [make(RESULTS[name]) for name in args.only]
    except KeyboardInterrupt:  # the command that was running has said so
        raise Stopped(130) from None
    if any(codes):
        raise Stopped(max(codes, key=abs))


main = partial(run_study, study)


if __name__ == "__main__":
    sys.exit(main())
