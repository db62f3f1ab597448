"""What each recompute policy costs and saves, measured on this machine: time and peak memory.

GPT-2 small, every policy, at the same batch and at the largest batch that fits in 8 GiB:
    python -m scripts.benchmark --model gpt2 --batch-size 2 --largest-batch --memory-budget 8GiB

Beside Hugging Face's GPT-2 in the same loop (pip install transformers):
    python -m scripts.benchmark --model gpt2 --batch-size 2 --policies none full \
        --peer transformers

It says first how long it will take. Ctrl-C ends it early: what has been measured stays.

Each measurement is a process of its own (benchmark_worker.py) that does the trainer's own steps
(train_step) on random tokens. The processes take turns, so that whatever else the machine does hits
all alike, and what is reported are medians (of steps; on a GPU, for which Python waits only once
all of them are queued, of each process's mean). Peak memory is what tensors took at most: on a GPU
as counted by PyTorch's caching allocator, on a CPU as torch.profiler saw its allocator in one more
step. There the resident set stands beside it, above what it was before the model was made: kernels'
own memory and malloc's gaps are in that too.

Beside each time stands the planner's (planner/clock.py): on a GPU that planner.CARDS knows by its
data sheet, on any other device by what it measures of it in three seconds, before the first run.
"""

import os
import sys

if not __package__:  # python scripts/benchmark.py: the others lie one folder up
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    import scripts  # noqa: F401

import argparse
import json
import platform
import re
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from memory import RECOMPUTE_POLICIES
from planner import StepMemory
from planner.cards import CARDS
from planner.formulas import step_flops
from planner.operators import PRECISIONS
from scripts import say_stopped, tool
from scripts.benchmark_worker import WARM_UP, Job, config_of, flags_of, measure
from scripts.style import policy_fields
from trainer.card import THIS_MACHINE, clock_card
from trainer.device import choose_device, choose_precision, set_matmul_precision
from trainer.endings import is_out_of_memory
from trainer.flags import UsageError, changed, fill_in, number, output_file, policy_string
from trainer.flags import build_parser as trainers_parser
from trainer.metrics import format_bytes, format_time
from trainer.plan import Question, vocabulary
from trainer.pretrained import open_init_from
from trainer.report import describe_model
from trainer.room import Room, room_on

Row = dict[str, Any]


def build_parser() -> argparse.ArgumentParser:
    parser = trainers_parser("python -m scripts.benchmark", "unused")
    parser.description = (
        "Measure what each recompute policy costs and saves. Takes the trainers' flags; those of "
        "running have no effect, those of data by the size of the vocabulary only. With --compile "
        "everything is measured without it, too."
    )
    count = number(int, 1, 10**6)
    add = parser.add_argument_group("benchmark").add_argument
    # fmt: off
    add("--policies", nargs="+", type=policy_string, default=list(RECOMPUTE_POLICIES),
        metavar="POLICY", help=f"(default: {' '.join(RECOMPUTE_POLICIES)})")
    add("--repeats", type=count, default=3, metavar="N",
        help="processes for each measurement, which take turns (default: %(default)s)")
    add("--steps", type=count, default=5, metavar="N",
        help="timed steps of each process (default: %(default)s)")
    add("--largest-batch", action="store_true",
        help="also at the largest batch that fits in --memory-budget")
    add("--peer", choices=("transformers",),
        help="also Hugging Face's GPT2LMHeadModel, with and without its gradient checkpointing")
    add("--json", type=output_file, metavar="FILE", help="write the raw numbers there")
    add("--worker", help=argparse.SUPPRESS)  # a Job: measure it, here and now
    # fmt: on
    return parser


def check(args: argparse.Namespace) -> None:
    """Finds mistakes before anything is measured, and fills in defaults. Raises UsageError or
    DataError."""
    if args.use_activation_checkpoint != "none":
        raise UsageError("--use-activation-checkpoint: here --policies names what is measured")
    if args.card is not None:
        raise UsageError("--card: the device that is here is measured: leave it out")
    if args.memory_budget is not None and not args.largest_batch:
        raise UsageError("--memory-budget is for --largest-batch")
    if args.peer and find_spec(args.peer) is None:
        raise UsageError(f"--peer {args.peer} is not installed: pip install {args.peer}")
    open_init_from(args)
    fill_in(args, is_run=False)
    args.vocab_size = vocabulary(args)
    try:
        for policy in args.policies:
            config_of(args, Job(policy, args.batch_size))
    except UsageError as error:
        message = str(error).replace("--use-activation-checkpoint", "--policies")
        raise UsageError(message) from None


def ask(args: argparse.Namespace) -> Question:
    """What the planner says of the device that is here; one that it does not know is measured."""
    device = choose_device(args.device)
    set_matmul_precision(device, args.tf32)
    room = room_on(device, args.memory_budget) if args.largest_batch else Room(None, device.type)
    card = clock_card(args, device) or clock_card(changed(args, card=THIS_MACHINE), device)
    precision = choose_precision(args, device)
    return Question(args, args.vocab_size, device, precision, room, card)


def predict(question: Question, job: Job) -> tuple[StepMemory, float]:
    """A step of the job, and its seconds."""
    asked = question.about(flags_of(question.args, job))
    return asked.step, asked.seconds(asked.step)


def choose_jobs(question: Question) -> list[Job]:
    args = question.args
    pair = ("none", "full")  # what the peer has
    policies = list(dict.fromkeys([*args.policies, *(pair if args.peer else ())]))
    ways = (False, True) if args.compile else (False,)
    jobs = [Job(policy, args.batch_size, way) for way in ways for policy in policies]
    if args.peer:
        jobs += [Job(policy, args.batch_size, peer=args.peer) for policy in pair]
    if not args.largest_batch:
        return jobs
    for policy in tqdm(policies, desc="largest batches", leave=False, disable=None):
        size = question.about(flags_of(args, Job(policy, args.batch_size))).largest_batch
        if size == 0:
            tqdm.write(f"{policy}: not one sequence fits in {question.room}", sys.stderr)
        else:
            jobs += [Job(policy, size, way, largest=True) for way in ways]
    return jobs


def run_worker(argv: list[str], job: Job) -> Row | None:
    """What `measure` returns, in a process of its own; None if it ran out of memory."""
    command = [sys.executable, __file__, *argv, "--worker", json.dumps(vars(job))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == -9:  # Linux ends the process that takes too much
        return None
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def take_turns(
    jobs: list[Job], repeats: int, run: Callable[[Job], Row | None]
) -> tuple[dict[Job, list[Row]], str | None]:
    """All jobs once, then all of them again. What ran out of memory is left out from then on.

    Returns the results, and, if Ctrl-C has ended it, after how many runs.
    """
    results: dict[Job, list[Row]] = {job: [] for job in jobs}
    turns, n_done = tqdm(repeats * jobs, unit="run", leave=False, disable=None), 0
    try:
        for job in turns:
            result = run(job) if job in results else None
            if result is None:
                results.pop(job, None)
            else:
                results[job].append(result)
            n_done += 1
    except KeyboardInterrupt:
        turns.close()
        return results, f"after {n_done} of {len(turns)} runs"
    return results, None


def make_row(question: Question, job: Job, results: list[Row]) -> Row:
    """One measurement, as it goes into the JSON file.

    `mfu`, `hfu`: what share of the device's FLOP/s the FLOPs that a step needs are, and those that
    it does. Model and hardware FLOPs utilization: Chowdhery et al., 2022, section 4.1.
    """
    args, (step, predicted_s) = question.args, predict(question, job)
    seconds = list(chain(*(result["step_s_all"] for result in results)))
    step_s = statistics.median(seconds)
    tokens_per_s = job.batch_size * args.grad_accum_steps * args.seq_len / step_s
    share, card = None, question.card
    if card and card.name in CARDS:  # (what is measured here is no peak)
        share = tokens_per_s / card.flops[PRECISIONS.index(question.precision)]
    needed, replayed = step_flops(step.config, args.seq_len, job.compiled)
    row = {
        **vars(job),
        **policy_fields(step.config),
        "name": step.config.recompute + (", compiled" if job.compiled else ""),
        "seq_len": args.seq_len,
        "step_s": step_s,
        "predicted_s": predicted_s,
        "step_s_all": seconds,
        "tokens_per_s": tokens_per_s,
        "mfu": share and share * needed,
        "hfu": share and share * (needed + replayed),
        "predicted_bytes": step.peak,
        "peak_kind": results[0]["peak_kind"],
    }
    for name in ("peak_bytes", "reserved_bytes", "rss_bytes"):
        values = [result[name] for result in results]
        row[name] = None if None in values else statistics.median_low(values)
    if job.peer:  # neither planned nor counted
        row |= {"predicted_bytes": None, "predicted_s": None, "hfu": None}
    return row


def show(form: Callable[[Any], str], value: Any) -> str:
    return "" if value is None else form(value)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown."""
    lines = [[*header], *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def in_units_of(first: Row, row: Row) -> tuple[float, float | None]:
    """A row's step in units of another's, measured and predicted. What was measured is compared
    within each turn: a machine that is slow in one of them is so for both."""
    turns = zip(row["step_s_all"], first["step_s_all"], strict=False)  # (Ctrl-C ends in one)
    measured = statistics.median(own / other for own, other in turns)
    if None in (row["predicted_s"], first["predicted_s"]):
        return measured, None
    return measured, row["predicted_s"] / first["predicted_s"]


def policy_table(rows: list[Row]) -> str:
    """Times are compared with the first row's."""
    first, lines = rows[0], []
    for row in rows:
        peak, predicted = row["peak_bytes"], row["predicted_bytes"]
        of_a_token = first["batch_size"] / row["batch_size"]
        line = [f"{row['peer'] or ''} {row['name']}".strip()]
        line += [f"{row['batch_size']} x {row['seq_len']}"]
        for name in ("step_s", "predicted_s"):
            line.append(show("{:,.1f} ms".format, row[name] and 1000 * row[name]))
        line += [f"{row['tokens_per_s']:,.0f}"]
        for ratio in in_units_of(first, row):
            line.append(show("{:+.1%}".format, ratio and of_a_token * ratio - 1))
        line += [show(format_bytes, peak)]
        line += [show("{:.4f}".format, peak and predicted and predicted / peak)]
        line += [show(format_bytes, row["rss_bytes"])]
        line += [show("{:.1%}".format, row[name]) for name in ("mfu", "hfu")]
        lines.append(line)
    more = f"time per token, over {lines[0][0]}|predicted, over {lines[0][0]}"
    header = f"policy|batch|step|predicted step|tokens/s|{more}|peak|predicted / peak"
    return table(f"{header}|resident|MFU|HFU".split("|"), lines) + "\n"


def report(rows: list[Row], failed: list[Job]) -> str:
    """Markdown: a table for each kind of comparison that was made."""
    parts = []
    for title, largest in (("At equal batch", False), ("At the largest batch that fits", True)):
        if some := [row for row in rows if row["largest"] == largest]:
            parts += [f"### {title}\n", policy_table(some)]
    for job in failed:
        way = job.policy + (", compiled" if job.compiled else "")
        parts.append(f"Out of memory: {job.peer or 'MiniGPT'}, {way}, batch {job.batch_size}\n")
    return "\n".join(parts)


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    linux = Path("/proc/cpuinfo")
    found = re.search("model name.*: (.*)", linux.read_text() if linux.exists() else "")
    name = found[1] if found else platform.processor() or platform.machine()
    return f"{device.type}: {name}, {torch.get_num_threads()} thread(s)"


def about(module: str, argv: list[str], device: torch.device | None = None) -> Row:
    """What has to stand beside a figure; the device only where it matters."""
    command = {"command": shlex.join(["python", "-m", module, *argv])}
    hardware = {"device": describe_device(device)} if device else {}
    return command | hardware | {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}


def describe(about: Row) -> str:
    return "\n".join(f"{name}: {value}" for name, value in about.items())


def write_json(file: Path | None, numbers: Row) -> None:
    """If a file was asked for."""
    if file:
        file.write_text(json.dumps(numbers, indent=1) + "\n")


def measure_all(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, print the tables, write the JSON file."""
    question = ask(args)
    assert question.card
    jobs = choose_jobs(question)
    progress = tqdm(jobs, desc="predicting", leave=False, disable=None)
    seconds = sum(predict(question, job)[1] for job in progress) * (WARM_UP + args.steps + 3)
    # (3: a step with a profiler. And each process needs to start, as this one has done.)
    seconds = args.repeats * (seconds + len(jobs) * time.process_time())
    n_runs = args.repeats * len(jobs)
    print(f"{n_runs} run{'s' * (n_runs > 1)}, about {format_time(seconds)} in all", file=sys.stderr)
    results, interrupted = take_turns(jobs, args.repeats, lambda job: run_worker(argv, job))
    rows = [make_row(question, job, found) for job, found in results.items() if found]
    failed = [job for job in jobs if job not in results]
    told = about("scripts.benchmark", argv, question.device) | {
        "model": describe_model(question.config),
        "precision": str(question.precision).removeprefix("torch."),
        "predicted for": question.card.name,
    }
    if args.peer:
        told[args.peer] = version(args.peer)
    if interrupted:
        told["interrupted"] = interrupted
        say_stopped(interrupted)
    if rows or not interrupted:
        print(report(rows, failed), describe(told), sep="\n")
        told |= {"config": asdict(question.config), "card": asdict(question.card), "rows": rows}
        write_json(args.json, told | {"out_of_memory": [vars(job) for job in failed]})
    return 130 if interrupted else 0


@tool
def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    check(args)
    if args.worker is None:
        return measure_all(args, argv)
    try:
        print(json.dumps(measure(args, Job(**json.loads(args.worker)))))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        print("null")
    return 0


if __name__ == "__main__":
    sys.exit(main())
