"""Does a run survive what happens to runs? Breaks real ones on purpose, and prints what was left.

python -m scripts.reliability                       # every row: some 10 minutes on two CPU cores
python -m scripts.reliability --only save damage    # some rows
python -m scripts.reliability --json studies/results/reliability.json

Each row of the table is one function below: its docstring names the failure that it guards
against, and it raises NotHeld if the figure wanted is not reached (then the exit code is 1). The
trainers run in processes of their own, most of them through scripts/faults.py, which makes things
go wrong at a chosen step. What is killed is killed on progress, never on the wall clock: a delay
after the start would mostly hit `import torch`. Linux is needed (/proc, SIGKILL), a GPU is not.

Not covered: power loss (SIGKILL loses no page that the kernel holds), network file systems,
Windows, several machines.
"""

import sys

if not __package__:  # python scripts/reliability.py: the others lie one folder up
    sys.path[0] += "/.."
    import scripts  # noqa: F401

import concurrent.futures
import json
import os
import shutil
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch
from tqdm import tqdm

from scripts import reliability_conditions as conditions
from scripts import reliability_endings as endings
from scripts import reliability_shards as shards
from scripts import say_stopped
from scripts.trainer_process import Bench, NotHeld, Row, kill_all
from trainer.flags import OneLineParser, output_file

# From top to bottom. The functions, each with its row's words above it, are written out in
# reliability_endings.py, reliability_conditions.py and reliability_shards.py.
ROWS: dict[str, Row] = {
    one.name: one
    for one in (
        endings.killed_in_training,
        endings.killed_in_a_save,
        endings.newest_damaged,
        endings.flipped_bits,
        endings.code_in_a_snapshot,
        endings.signals,
        endings.restarts,
        endings.elastic,
        endings.hung_rank,
        endings.exit_codes,
        endings.killed_torchrun,
        endings.second_run,
        conditions.not_finite,
        conditions.float16_overflow,
        conditions.disk_full,
        conditions.out_of_memory,
        conditions.other_flags,
        conditions.cache_race,
        conditions.malformed_input,
        conditions.flat,
        conditions.no_network,
        shards.killed_in_training,
        shards.killed_in_a_save,
        shards.signals,
        shards.restarts,
        shards.across_trainers,
    )
}


@dataclass(frozen=True)
class Result:
    """What became of a row."""

    row: str
    what: str
    wanted: str
    measured: str
    held: bool
    seconds: float


def measure(one: Row, bench: Bench) -> Result:
    start = time.monotonic()
    try:
        measured, held = one.measure(bench), True
    except Exception as failure:  # a row that breaks is a row that is not held
        name = "" if isinstance(failure, NotHeld) else f"{type(failure).__name__}: "
        measured, held = f"{name}{failure}", False
    seconds = round(time.monotonic() - start, 1)
    tqdm.write(f"{'held' if held else 'NOT HELD':8} {one.name:13} {seconds:5.0f} s  {measured}",
               file=sys.stderr)  # fmt: skip
    return Result(one.name, one.what, one.wanted, measured, held, seconds)


def measure_all(names: list[str], bench: Bench) -> list[Result]:
    """Two rows at a time; but the one that loads the machine by itself, and those with a clock."""
    alone = [name for name in names if name in ("exit", "signals", "offline", "fsdp-signals")]
    pool = concurrent.futures.ThreadPoolExecutor(2)  # no `with`: Ctrl-C is not to wait for it
    together = [ROWS[name] for name in names if name not in alone]
    one_by_one = chain(
        pool.map(lambda one: measure(one, bench), together),
        (measure(ROWS[name], bench) for name in alone),
    )
    results = list(tqdm(one_by_one, total=len(names), unit="row", leave=False, disable=None))
    return sorted(results, key=lambda result: names.index(result.row))


def table(results: list[Result]) -> str:
    """Markdown."""
    lines = ["| what | wanted | measured | |", "|---|---|---|---|"]
    for one in results:
        verdict = "held" if one.held else "**not held**"
        measured = one.measured.replace("|", "/").replace("\n", " ")
        lines.append(f"| {one.what} | {one.wanted} | {measured} | {verdict} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m scripts.reliability", description=__doc__)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results there")
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", default=list(ROWS),
                        help=f"some rows: {' '.join(ROWS)}")  # fmt: skip
    args = parser.parse_args(argv)
    if sys.platform != "linux":
        parser.error("scripts.reliability needs Linux: it looks at processes through /proc")

    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="reliability-"))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        results = measure_all(args.only, Bench(folder))
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)  # first: nothing can be started in it any more
        kill_all(folder)
        say_stopped()
        os._exit(130)  # without waiting for the threads that wait for what was killed
    finally:
        signal.signal(signal.SIGTERM, before)
        kill_all(folder)
        shutil.rmtree(folder, ignore_errors=True)
    about = {
        "command": " ".join(["python -m scripts.reliability", *(argv or sys.argv[1:])]),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - start),
    }
    print(table(results))
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    if args.json:
        rows = [asdict(result) for result in results]
        args.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return 0 if all(result.held for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
