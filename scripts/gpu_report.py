"""What this project does on a GPU, measured by one command, and written down as it comes.

Without a GPU, everything small and on the CPU: does it run at all? (A minute.)
    python -m scripts.gpu_report --dry-run

On a GPU, all of it: 47 minutes at most. A part of it: --only, --skip, --time-limit.
    python -m scripts.gpu_report
    python -m scripts.gpu_report --only machine head peaks
    python -m scripts.gpu_report --time-limit 560 --nanogpt ../nanoGPT --peer

Time on a GPU is short, and the machine may go at any moment. So each measurement is on the disk
before the next one begins (OUT/results.jsonl); the same command once more goes on where it
stopped, and leaves out what is there; each section runs in a process of its own, where no crash,
and no memory that was not given back, can touch another; and each has a deadline. The report
(OUT/report.md) is made from what there is, and says what there is not.

A section is a function: see scripts/gpu_report_bench.py. To add one, write it, and its line here.
"""

import sys

if not __package__:  # python scripts/gpu_report.py: the others lie one folder up
    sys.path[0] += "/.."
    import scripts  # noqa: F401

import argparse
import gc
import os
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scripts import say_stopped
from scripts.benchmark import describe_device
from scripts.gpu_report_bench import Bench
from scripts.gpu_report_markdown import failures, report
from scripts.gpu_report_results import Results, append, forget, read_results, work
from trainer.device import set_matmul_precision
from trainer.flags import OneLineParser, UsageError, number, output_folder, print_error
from trainer.metrics import format_time


class Section(NamedTuple):
    """A function of that name in scripts/gpu_report_sections_MODULE.py, and its deadline."""

    module: str
    minutes: float
    about: str


SECTIONS = {
    "machine": Section("kernels", 2, "The card, what it copies and multiplies at best."),
    "matmuls": Section("kernels", 5, "The head's three products, by vocabulary and chunk."),
    "head": Section("kernels", 4, "Forward and backward of the head alone; predicted by formula."),
    "correctness": Section("steps", 6, "Each policy beside `none`, to the bit; float16; offload."),
    "speed": Section("steps", 8, "Whole steps; medians of turns."),
    "syncs": Section("steps", 3, "Where Python waits; the dearest kernels; the GPU's idle share."),
    "peaks": Section("memory", 6, "The planner beside the allocator."),
    "offload": Section("memory", 5, "What it costs and saves."),
    "oom": Section("runs", 4, "True runs on a card that is made small."),
    "ddp": Section("runs", 4, "torchrun with one process."),
}
DRY_MINUTES = 5.0  # of a section that takes seconds, on a machine that is very busy
START = "its start"  # what fails where a section's process does not get to its first measurement
# A section that has less than this share of its deadline left is not begun.
WORTH_IT = 1 / 3


def build_parser() -> argparse.ArgumentParser:
    minutes = ", ".join(f"{name} {section.minutes:g}" for name, section in SECTIONS.items())
    parser = OneLineParser(
        prog="python -m scripts.gpu_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"Deadlines of the sections, in minutes: {minutes}. (How long "
        "they really take is not known yet: nothing has run on a GPU.)",
    )
    names: dict[str, Any] = {
        "nargs": "+",
        "type": section_names,
        "action": "extend",
        "metavar": "SECTION",
    }
    # fmt: off
    add = parser.add_argument
    add("--only", help=f"some of: {' '.join(SECTIONS)} (default: all)", **names)
    add("--skip", help="all but these", **names)
    add("--out", type=output_folder, metavar="FOLDER",
        help="(default: out/gpu_report, or out/gpu_report_dry_run)")
    add("--time-limit", type=number(float, 0, open=True), metavar="SECONDS",
        help="for all together; what no longer fits is left out, and named (default: none)")
    add("--again", action="store_true", help="measure also what was measured before")
    add("--peer", action="store_true",
        help="beside transformers' GPT-2 (pip install transformers)")
    add("--nanogpt", type=Path, metavar="FOLDER", help="beside the GPT of this nanoGPT checkout")
    add("--dry-run", action="store_true", help="all of it small, on the CPU")
    add("--report", type=Path, metavar="FILE",
        help="measure nothing: print the report of an earlier run's results.jsonl")
    add("--worker", nargs=2, help=argparse.SUPPRESS)  # a section and the run's name
    # fmt: on
    return parser


def section_names(text: str) -> list[str]:
    """An argparse type: "head,peaks"."""
    found = [name for name in text.split(",") if name]
    for name in found:
        if name not in SECTIONS:
            known = ", ".join(SECTIONS)
            raise argparse.ArgumentTypeError(f"there is no section {name!r}, only {known}")
    return found


def check(args: argparse.Namespace) -> None:
    """Fills in defaults. Raises UsageError."""
    args.only, args.skip = (
        [name for names in given or [] for name in names] for given in (args.only, args.skip)
    )
    if args.out is None:
        args.out = Path("out", "gpu_report_dry_run" if args.dry_run else "gpu_report")
    if args.peer and find_spec("transformers") is None:
        raise UsageError("--peer: transformers is not installed: pip install transformers")
    if args.nanogpt and not (args.nanogpt / "model.py").is_file():
        raise UsageError(f"--nanogpt {args.nanogpt}: there is no model.py in it")


def check_device(args: argparse.Namespace) -> None:
    """Raises UsageError without a GPU. (Not before --report: that needs none.)"""
    if not args.dry_run and not torch.cuda.is_available():
        raise UsageError(
            f"torch {torch.__version__} finds no GPU here; --dry-run runs all of it small on a CPU"
        )


def chosen(args: argparse.Namespace) -> list[str]:
    return [n for n in SECTIONS if n in (args.only or SECTIONS) and n not in args.skip]


def describe(args: argparse.Namespace, argv: list[str]) -> dict[str, object]:
    device = torch.device("cpu" if args.dry_run else "cuda")
    return {
        "command": shlex.join(["python", "-m", "scripts.gpu_report", *argv]),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "device": describe_device(device),
        "torch": torch.__version__,
        "dry_run": args.dry_run,
    }


def begin(file: Path, about: dict[str, object], run: str, args: argparse.Namespace) -> None:
    """Note the run. Raises UsageError if the file holds another machine's results."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        for before in read_results(file).abouts[-1:]:
            for key in ("device", "torch", "dry_run"):
                if before[key] != about[key]:
                    raise UsageError(
                        f"--out {args.out} has the results of {key} {before[key]}, this is "
                        f"{about[key]}: name another folder"
                    )
        if args.again:
            forget(file, chosen(args))
    append(file, {"about": about, "run": run})


def worker_command(args: argparse.Namespace, section: str, run: str) -> list[str]:
    command = [sys.executable, "-m", "scripts.gpu_report", "--worker", section, run]
    command += ["--out", str(args.out.resolve())]
    command += ["--dry-run"] * args.dry_run + ["--peer"] * args.peer
    return command + (["--nanogpt", str(args.nanogpt.resolve())] if args.nanogpt else [])


def run_process(command: list[str], log: Path, seconds: float) -> str | None:
    """Run a worker to its end, or to the deadline. None if all went well, else how it ended."""
    root = Path(__file__).resolve().parent.parent
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command, cwd=root, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        code = process.wait(max(seconds, 0.1))
    except subprocess.TimeoutExpired:
        return f"the deadline came, after {seconds:.0f} s"
    finally:
        if hasattr(os, "killpg"):  # also what it has started
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # (Windows)
        process.wait()
    if code == 0:
        return None
    name = f"signal {-code}" if code < 0 else f"exit code {code}"
    lines = log.read_text(errors="replace").strip().splitlines() or [""]
    return f"its process ended with {name}: {lines[-1][:300]}"


def run_section(args: argparse.Namespace, section: str, run: str, seconds: float) -> Results:
    """Measure a section, in as many processes as it takes: a crash costs one measurement."""
    file, deadline = args.out / "results.jsonl", time.monotonic() + seconds
    while True:
        before = read_results(file).settled(section, run)
        left = deadline - time.monotonic()
        ended = run_process(worker_command(args, section, run), args.out / f"{section}.log", left)
        for name in read_results(file).under_way(section, run):
            append(file, {"section": section, "name": name, "run": run, "error": ended or "lost"})
        results = read_results(file)
        settled = results.settled(section, run)
        if ended and settled == before:  # it did not even begin
            failed = {"section": section, "name": START, "run": run, "error": ended}
            append(file, failed)
            return read_results(file)
        all_done = settled >= set(results.names.get(section, []))
        if ended is None or all_done or deadline - time.monotonic() < 1:
            return results


def run_all(args: argparse.Namespace, run: str) -> None:
    """One section after the other, while there is time; a line for each."""
    start = time.monotonic()
    for section in chosen(args):
        seconds = 60 * (DRY_MINUTES if args.dry_run else SECTIONS[section].minutes)
        if args.time_limit:
            left = args.time_limit - (time.monotonic() - start)
            if left < WORTH_IT * seconds:
                print(f"{section:<12} left out: {max(left, 0):.0f} s left of --time-limit")
                continue
            seconds = min(seconds, left)
        began = time.monotonic()
        results = run_section(args, section, run, seconds)
        records = results.records.get(section, {})
        done = sum("values" in record for record in records.values())
        failed = sum("error" in record for record in records.values())
        missing = len(results.missing(section))
        parts = [f"{done} measured", *([f"{failed} failed"] if failed else [])]
        parts += [f"{missing} not reached"] if missing else []
        took = format_time(time.monotonic() - began)
        print(f"{section:<12} {', '.join(parts)}, {took}", flush=True)


def write_report(args: argparse.Namespace) -> None:
    results = read_results(args.out / "results.jsonl")
    text = report(results, {name: section.about for name, section in SECTIONS.items()})
    (args.out / "report.md").write_text(text, encoding="utf-8")
    for line in failures(results):
        print(f"failed       {line}")
    print(f"report       {args.out / 'report.md'}, raw: {args.out / 'results.jsonl'}")


def measure_section(args: argparse.Namespace, section: str, run: str) -> int:
    """A worker: the section, here and now."""
    bench = Bench(args.dry_run, args.out, args.peer, args.nanogpt)
    if bench.dry:
        torch.set_num_threads(1)
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # to compile takes minutes
    set_matmul_precision(bench.device, tf32=False)  # as the trainers have it, in all sections
    gc.freeze()  # what is there now stays: between measurements, garbage is only looked for among
    # what they have made
    module = import_module(f"scripts.gpu_report_sections_{SECTIONS[section].module}")
    return work(bench, section, getattr(module, section)(bench), args.out / "results.jsonl", run)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(argv)
    try:
        if args.report:
            results = read_results(args.report)
            print(report(results, {name: one.about for name, one in SECTIONS.items()}), end="")
            return 0
        check(args)
        if args.worker:
            return measure_section(args, *args.worker)
        check_device(args)
        run, file = time.strftime("%Y%m%d-%H%M%S"), args.out / "results.jsonl"
        begin(file, describe(args, argv), run, args)
    except UsageError as error:
        print_error(error)
        return 2
    except OSError as error:
        name = f"--report {args.report}" if args.report else f"--out {args.out}"
        print_error(f"{name}: {error.strerror}")
        return 2
    # A job that is asked to end takes its worker along, and leaves its report.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run_all(args, run)
    except KeyboardInterrupt:
        say_stopped("early: the same command goes on from there")
        return 130
    finally:
        write_report(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
