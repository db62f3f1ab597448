"""Make the numbers and pictures in studies/results/ anew, each by the command that made it.

python -m studies.make_results                       # those that take three minutes, no GPU
python -m studies.make_results --list                # all of them
python -m studies.make_results --only cards          # one of those that take longer, by name

What the documents show stands in studies/results/. A command writes there only if it is told to;
what it makes by default goes to out/, which git ignores. A file of numbers says which command made
it; studies/__init__.py says how long that takes, and what measures time wants an idle machine.
studies/README.md says how those were made whose study is gone.
tests/test_results.py computes some of the numbers again, and knows if one of them no longer comes
out of the code.
"""

import json
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path

from scripts import tool
from studies.common import study_parser

ROOT = Path(__file__).parent.parent
FOLDER = "studies/results"
QUICK = ("memory_timeline", "block_policies", "ladder")
ONCE = {"optimizers", "fine_tuning", "compiler"}  # studies/README.md tells how
MORE = {
    "block_policies": [f"python -m studies.block_picture --out {FOLDER}"],
    "memory_page": [  # the page; its picture is a screenshot, 1,200 pixels wide
        "python -m scripts.memory_page --model gpt2 --batch-size 8 --device cuda "
        "--amp-dtype bfloat16",
    ],
    # Today's commands for what earlier ones measured; these stand in the files.
    "clock_cpu_124m": [
        "python -m scripts.benchmark --model gpt2 --batch-size 2 --repeats 3 --steps 1 "
        f"--json {FOLDER}/clock_cpu_124m.json"
    ],
    "benchmark_cpu_124m_b2_peer": [
        "python -m scripts.benchmark --model gpt2 --batch-size 2 --no-amp --policies none full "
        "--peer transformers --repeats 2 --steps 2 "
        f"--json {FOLDER}/benchmark_cpu_124m_b2_peer.json"
    ],
}


def commands() -> dict[str, list[str]]:
    """Name -> what makes it, one after the other, from the project's root."""
    files = (file for file in sorted((ROOT / FOLDER).glob("*.json")) if file.stem not in ONCE)
    return {file.stem: [json.loads(file.read_text())["command"]] for file in files} | MORE


@tool
def main(argv: list[str]) -> int:
    parser, known = study_parser("studies.make_results", __doc__), commands()
    parser.add_argument("--only", nargs="+", choices=known, default=QUICK, metavar="NAME",
        help=f"some of {', '.join(known)} (default: {' '.join(QUICK)})")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="show the commands, run none")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(f"{name}:\n    " + "\n    ".join(known[name]) for name in known))
        return 0
    codes = []
    for command in chain.from_iterable(known[name] for name in args.only):
        print(f"\n{command}", flush=True)
        words = [sys.executable, *shlex.split(command)[1:]]  # as it stands, with this Python
        codes.append(subprocess.run(words, cwd=ROOT).returncode)
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main())
