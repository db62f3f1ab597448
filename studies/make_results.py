"""Make the numbers and pictures in studies/results/ anew: the one place where their commands stand.

python -m studies.make_results                       # those that take three minutes, no GPU
python -m studies.make_results --list                # which command makes which files
python -m studies.make_results --only benchmark      # one of those that take longer, by name

What the documents show stands in studies/results/. A command writes there only if it is told to;
what it makes by default goes to out/, which git ignores. tests/test_results.py computes some of the
numbers again, and knows if one of them no longer comes out of the code.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from trainer.flags import OneLineParser

ROOT = Path(__file__).parent.parent
FOLDER = "studies/results"


class Result(NamedTuple):
    """What to run, from the project's root, and the files in FOLDER that it makes."""

    command: str
    files: tuple[str, ...]
    takes: str
    by_default: bool = True


RESULTS = {
    "memory_timeline": Result(
        "python -m scripts.memory_timeline --model gpt2 --batch-size 8 --card RTX-4090 "
        f"--amp-dtype bfloat16 --out {FOLDER} --json {FOLDER}/memory_timeline.json",
        tuple(f"memory_{name}" for name in ("timeline.png", "frontier.png", "made_of.png"))
        + ("memory_timeline.json",),
        "20 s",
    ),
    "page": Result(
        "python -m scripts.memory_page --model gpt2 --batch-size 8 --device cuda "
        "--amp-dtype bfloat16",
        (),
        "20 s; out/memory_page.html, for the next one",
        by_default=False,
    ),
    "page_picture": Result(
        f"python -m studies.page_shots --readme {FOLDER}/memory_page.png",
        ("memory_page.png",),
        "seconds of Chromium",
        by_default=False,
    ),
    "block": Result(
        f"python -m scripts.block_picture --out {FOLDER}", ("block_policies.png",), "seconds"
    ),
    "ladder": Result(
        f"python -m studies.ladder --json {FOLDER}/ladder.json", ("ladder.json",), "2 minutes"
    ),
    "mixes": Result(
        f"python -m studies.mixes --json {FOLDER}/mixes.json", ("mixes.json",), "half a minute"
    ),
    "cards": Result(
        f"python -m studies.cards --json {FOLDER}/cards.json",
        ("cards.json",),
        "3 minutes",
        by_default=False,
    ),
    "benchmark": Result(
        "python -m scripts.benchmark --model gpt2 --batch-size 2 --no-amp --policies none full "
        "--peer transformers --repeats 2 --steps 2 "
        f"--json {FOLDER}/benchmark_cpu_124m_b2_peer.json",
        ("benchmark_cpu_124m_b2_peer.json",),
        "10 minutes of an idle machine: it measures time",
        by_default=False,
    ),
    "clock": Result(
        "python -m studies.clock_check --model gpt2 --batch-size 2 --rounds 3 "
        f"--json {FOLDER}/clock_cpu_124m.json",
        ("clock_cpu_124m.json",),
        "10 minutes of an idle machine: it measures time",
        by_default=False,
    ),
    "small_clock": Result(
        f"python -m studies.clock_check --rounds 40 --json {FOLDER}/clock_cpu_small.json",
        ("clock_cpu_small.json",),
        "half a minute of an idle machine: it measures time",
        by_default=False,
    ),
    "optimizers": Result(
        f"python -m studies.optimizers --json {FOLDER}/optimizers.json "
        f"--markdown {FOLDER}/optimizers.md",
        ("optimizers.json", "optimizers.md"),
        "half an hour of an idle machine: it measures time, too",
        by_default=False,
    ),
    "fine_tuning": Result(
        f"python -m studies.fine_tuning --json {FOLDER}/fine_tuning.json",
        ("fine_tuning.json",),
        "3 minutes",
        by_default=False,
    ),
}


def make(result: Result) -> int:
    """Runs the command as it stands, with this Python; its exit code."""
    _, *words = shlex.split(result.command)
    print(f"\n{result.command}    # {result.takes}", flush=True)
    return subprocess.run([sys.executable, *words], cwd=ROOT).returncode


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m studies.make_results", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    quick = [name for name, result in RESULTS.items() if result.by_default]
    parser.add_argument("--only", nargs="+", choices=RESULTS, default=quick, metavar="NAME",
        help=f"some of {', '.join(RESULTS)} (default: {' '.join(quick)})")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="show the commands, run none")
    args = parser.parse_args(argv)
    if args.list:
        for name, result in RESULTS.items():
            print(f"{name}: {', '.join(result.files)} ({result.takes})\n    {result.command}")
        return 0
    try:
        codes = [make(RESULTS[name]) for name in args.only]
    except KeyboardInterrupt:  # the command that was running has said so
        return 130
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main())
