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
from pathlib import Path
from typing import NamedTuple

from studies.common import study_parser, tool

ROOT = Path(__file__).parent.parent
FOLDER = "studies/results"
IDLE = "10 minutes of an idle machine: it measures time"


class Result(NamedTuple):
    """What to run, from the project's root."""

    takes: str
    command: str
    pictures: tuple[str, ...] = ()  # in FOLDER, besides the files that the command names

    @property
    def files(self) -> list[str]:
        words = [Path(word) for word in shlex.split(self.command)]
        named = [path.name for path in words if path.parent == Path(FOLDER) and path.suffix]
        return [*named, *self.pictures]


def study(name: str, result: str, takes: str, more: str = "") -> Result:
    """One that writes numbers alone."""
    return Result(takes, f"python -m studies.{name} {more}--json {FOLDER}/{result}.json")


QUICK = ("memory_timeline", "block", "ladder", "mixes")
RESULTS = {
    "memory_timeline": Result(
        "20 s",
        "python -m scripts.memory_timeline --model gpt2 --batch-size 8 --card RTX-4090 "
        f"--amp-dtype bfloat16 --out {FOLDER} --json {FOLDER}/memory_timeline.json",
        ("memory_timeline.png", "memory_frontier.png", "memory_made_of.png"),
    ),
    "page": Result(
        "20 s; out/memory_page.html, for the next one",
        "python -m scripts.memory_page --model gpt2 --batch-size 8 --device cuda "
        "--amp-dtype bfloat16",
    ),
    "page_picture": Result(
        "seconds of Chromium", f"python -m studies.page_shots --readme {FOLDER}/memory_page.png"
    ),
    "block": Result(
        "seconds", f"python -m studies.block_picture --out {FOLDER}", ("block_policies.png",)
    ),
    "ladder": study("ladder", "ladder", "2 minutes"),
    "mixes": study("mixes", "mixes", "half a minute"),
    "cards": study("cards", "cards", "3 minutes"),
    "benchmark": Result(
        IDLE,
        "python -m scripts.benchmark --model gpt2 --batch-size 2 --no-amp --policies none full "
        "--peer transformers --repeats 2 --steps 2 "
        f"--json {FOLDER}/benchmark_cpu_124m_b2_peer.json",
    ),
    "clock": study(
        "clock_check", "clock_cpu_124m", IDLE, "--model gpt2 --batch-size 2 --rounds 3 "
    ),
    "optimizers": study(
        "optimizers", "optimizers", "half an hour of an idle machine: it measures time, too"
    ),
    "fine_tuning": study("fine_tuning", "fine_tuning", "3 minutes"),
}


def make(result: Result) -> int:
    """Runs the command as it stands, with this Python; its exit code."""
    _, *words = shlex.split(result.command)
    print(f"\n{result.command}    # {result.takes}", flush=True)
    try:
        return subprocess.run([sys.executable, *words], cwd=ROOT).returncode
    except KeyboardInterrupt:  # the command has said so
        raise SystemExit(130) from None


@tool
def main(argv: list[str]) -> int:
    parser = study_parser("studies.make_results", __doc__)
    parser.add_argument("--only", nargs="+", choices=RESULTS, default=QUICK, metavar="NAME",
        help=f"some of {', '.join(RESULTS)} (default: {' '.join(QUICK)})")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="show the commands, run none")
    args = parser.parse_args(argv)
    if args.list:
        for name, result in RESULTS.items():
            print(f"{name}: {', '.join(result.files)} ({result.takes})\n    {result.command}")
        return 0
    return max((make(RESULTS[name]) for name in args.only), key=abs)


if __name__ == "__main__":
    sys.exit(main())
