"""What each recompute policy costs and saves, measured on this machine: time and peak memory.

GPT-2 small, every policy, at the same batch and at the largest batch that fits in 8 GiB:
    python -m scripts.benchmark --model gpt2 --batch-size 2 --largest-batch --memory-budget 8GiB

Beside Hugging Face's GPT-2 in the same loop (pip install transformers):
    python -m scripts.benchmark --model gpt2 --batch-size 2 --policies none full \
        --peer transformers

It says first how long it will take. Ctrl-C ends it early: what has been measured stays.

Each measurement is a process of its own (benchmark_worker.py) that does the trainer's own steps
(train_step) on random tokens. The processes take turns, so that whatever else the machine does hits
all alike, and what is reported are medians. Peak memory is what tensors took at most: on a GPU as
counted by PyTorch's caching allocator, on a CPU as torch.profiler saw its allocator in one more
step. There the resident set stands beside it, above what it was before the model was made: kernels'
own memory and malloc's gaps are in that too.

Beside each time stands the planner's (planner/clock.py): on a GPU that planner.CARDS knows by its
data sheet, on any other device by what it measures of it in three seconds, before the first run.
"""

import sys

if not __package__:  # python scripts/benchmark.py: the others lie one folder up
    sys.path[0] += "/.."
    import scripts  # noqa: F401

import argparse
import json
import platform
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

from model import RECOMPUTE_POLICIES, MiniGPTConfig
from planner import Card
from planner.cards import peak_flops
from planner.formulas import step_flops
from planner.step import Planner
from scripts import say_stopped, tool
from scripts.benchmark_worker import WARM_UP, Job, config_of, measure
from scripts.style import policy_fields
from trainer.card import clock_card, measured_card
from trainer.device import choose_device, choose_precision, set_matmul_precision
from trainer.endings import is_out_of_memory
from trainer.flags import UsageError, fill_in, number, output_file, policy_string
from trainer.flags import build_parser as trainers_parser
from trainer.metrics import format_bytes, format_time
from trainer.plan import make_planner, step_seconds, vocabulary
from trainer.pretrained import open_init_from
from trainer.report import describe_model
from trainer.room import room_on


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
    for policy in args.policies:
        config_of(args, Job(policy, args.batch_size))


def plan(args: argparse.Namespace, device: torch.device, precision: torch.dtype) -> Planner:
    config = config_of(args, Job("none", args.batch_size))
    return make_planner(args, config, device, precision)


def predicted_seconds(args: argparse.Namespace, job: Job, planner: Planner, card: Card) -> float:
    step = planner.step(job.batch_size, **asdict(config_of(args, job)))
    return step_seconds(step, card, args.grad_accum_steps, job.compiled)


def choose_jobs(args: argparse.Namespace, planner: Planner) -> list[Job]:
    pair = ("none", "full")  # what the peer has
    policies = list(dict.fromkeys([*args.policies, *(pair if args.peer else ())]))
    ways = (False, True) if args.compile else (False,)
    jobs = [Job(policy, args.batch_size, way) for way in ways for policy in policies]
    if args.peer:
        jobs += [Job(policy, args.batch_size, peer=args.peer) for policy in pair]
    if not args.largest_batch:
        return jobs
    room = room_on(choose_device(args.device), args.memory_budget)
    for policy in tqdm(policies, desc="largest batches", leave=False, disable=None):
        memory = asdict(config_of(args, Job(policy, 1)))
        size = planner.largest_batch(room.safe or 0, args.batch_size, **memory)
        if size == 0:
            tqdm.write(f"{policy}: not one sequence fits in {room}", sys.stderr)
        else:
            jobs += [Job(policy, size, way, largest=True) for way in ways]
    return jobs


def run_worker(argv: list[str], job: Job) -> dict[str, Any] | None:
    """What `measure` returns, in a process of its own; None if it ran out of memory."""
    command = [sys.executable, __file__, *argv, "--worker", json.dumps(vars(job))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == -9:  # Linux ends the process that takes too much
        return None
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def expected_seconds(args: argparse.Namespace, steps: list[float]) -> float:
    """How long all runs will take, roughly; `steps`: predicted seconds of one, of each job.

    (--compile's first steps take longer, nobody knows how much.)
    """
    # A step with a profiler takes three times as long; and a process needs to start, as this one
    # has done.
    runs = (time.process_time() + step * (WARM_UP + args.steps + 3) for step in steps)
    return args.repeats * sum(runs)


def take_turns(
    jobs: list[Job], repeats: int, run: Callable[[Job], dict[str, Any] | None]
) -> tuple[dict[Job, list[dict[str, Any]]], str | None]:
    """All jobs once, then all of them again. What ran out of memory is left out from then on.

    Returns the results, and, if Ctrl-C has ended it, after how many runs.
    """
    results: dict[Job, list[dict[str, Any]]] = {job: [] for job in jobs}
    n_runs = repeats * len(jobs)
    with tqdm(total=n_runs, unit="run", leave=False, disable=None) as bar:
        try:
            for n_done in range(n_runs):
                job = jobs[n_done % len(jobs)]
                if job in results:
                    result = run(job)
                    if result is None:
                        del results[job]
                    else:
                        results[job].append(result)
                bar.update()
        except KeyboardInterrupt:
            return results, f"after {n_done} of {n_runs} runs"
    return results, None


def utilization(
    config: MiniGPTConfig,
    seq_len: int,
    tokens_per_s: float,
    peak: float | None,
    compiled: bool = False,
) -> dict[str, float | None]:
    """What share of `peak` FLOP/s the FLOPs that a step needs are, and those that it does.

    Model and hardware FLOPs utilization: Chowdhery et al., 2022, section 4.1.
    """
    if peak is None:
        return {"mfu": None, "hfu": None}
    needed, replayed = step_flops(config, seq_len, compiled)
    share = tokens_per_s / peak
    return {"mfu": share * needed, "hfu": share * (needed + replayed)}


def make_row(
    args: argparse.Namespace,
    job: Job,
    results: list[dict[str, Any]],
    planner: Planner,
    card: Card,
) -> dict[str, Any]:
    """One measurement, as it goes into the JSON file."""
    config = config_of(args, job)
    step = planner.step(job.batch_size, **asdict(config))
    seconds = list(chain(*(result["step_s_all"] for result in results)))
    step_s = statistics.median(seconds)
    tokens_per_s = job.batch_size * args.grad_accum_steps * args.seq_len / step_s
    peak = None
    if choose_device(args.device).type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(), planner.precision, args.tf32)
    row = {
        **vars(job),
        **policy_fields(config),
        "name": config.recompute + (", compiled" if job.compiled else ""),
        "seq_len": args.seq_len,
        "step_s": step_s,
        "predicted_s": predicted_seconds(args, job, planner, card),
        "step_s_all": seconds,
        "tokens_per_s": tokens_per_s,
        **utilization(config, args.seq_len, tokens_per_s, peak, job.compiled),
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


def policy_table(rows: list[dict[str, Any]]) -> str:
    """Times are compared with the first row's."""
    lines = []
    for row in rows:
        peak, predicted = row["peak_bytes"], row["predicted_bytes"]
        line = [row["name"], f"{row['batch_size']} x {row['seq_len']}"]
        line += [f"{1000 * row[name]:,.1f} ms" for name in ("step_s", "predicted_s")]
        line += [f"{row['tokens_per_s']:,.0f}"]
        for name in ("step_s", "predicted_s"):
            first, own = (r[name] / r["batch_size"] for r in (rows[0], row))
            line.append(f"{own / first - 1:+.1%}")
        line += [show(format_bytes, peak), show("{:.4f}".format, peak and predicted / peak)]
        line += [show(format_bytes, row["rss_bytes"])]
        line += [show("{:.1%}".format, row[name]) for name in ("mfu", "hfu")]
        lines.append(line)
    header = "policy|batch|step|predicted|tokens/s|time per token|predicted|peak"
    return table(f"{header}|predicted / peak|resident|MFU|HFU".split("|"), lines) + "\n"


def peer_table(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    """The peer runs none and full, and nothing compiled."""
    lines = []
    for row in theirs:
        for own in ours:
            if own["policy"] == row["policy"] and not own["compiled"]:
                lines.append([own["name"]])
                for name, form in (("step_s", "{:.3f} s".format), ("peak_bytes", format_bytes)):
                    a, b = own[name], row[name]
                    lines[-1] += [show(form, a), show(form, b), show("{:.2f}".format, a and a / b)]
    header = "policy|step, ours|the peer's|ratio|peak, ours|the peer's|ratio"
    return table(header.split("|"), lines) + "\n"


def report(rows: list[dict[str, Any]], failed: list[Job]) -> str:
    """Markdown: a table for each kind of comparison that was made."""
    equal = [row for row in rows if not row["largest"] and not row["peer"]]
    largest = [row for row in rows if row["largest"]]
    theirs = [row for row in rows if row["peer"]]
    parts = ["### At equal batch\n", policy_table(equal)]
    if largest:
        parts += ["### At the largest batch that fits\n", policy_table(largest)]
    if theirs:
        parts += [f"### Beside {theirs[0]['peer']}\n", peer_table(equal, theirs)]
    for job in failed:
        way = job.policy + (", compiled" if job.compiled else "")
        parts.append(f"Out of memory: {job.peer or 'MiniGPT'}, {way}, batch {job.batch_size}\n")
    return "\n".join(parts)


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{device.type}: {name}, {torch.get_num_threads()} thread(s)"


def measure_all(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, print the tables, write the JSON file. Raises UsageError before it begins."""
    device = choose_device(args.device)
    precision = choose_precision(args, device)
    planner = plan(args, device, precision)
    jobs = choose_jobs(args, planner)
    set_matmul_precision(device, args.tf32)
    card = clock_card(args, device) or measured_card(args, device)
    progress = tqdm(jobs, desc="predicting", leave=False, disable=None)
    steps = [predicted_seconds(args, job, planner, card) for job in progress]
    n_runs, seconds = args.repeats * len(jobs), format_time(expected_seconds(args, steps))
    print(f"{n_runs} run{'s' * (n_runs > 1)}, about {seconds} in all", file=sys.stderr)
    results, interrupted = take_turns(jobs, args.repeats, lambda job: run_worker(argv, job))
    measured = [job for job in results if results[job]]
    failed = [job for job in jobs if job not in results]
    rows = [make_row(args, job, results[job], planner, card) for job in measured]
    about = {
        "command": shlex.join(["python", "-m", "scripts.benchmark", *argv]),
        "model": describe_model(planner.config),
        "device": describe_device(device),
        "precision": str(precision).removeprefix("torch."),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "predicted for": card.name,
    }
    if args.peer:
        about[args.peer] = version(args.peer)
    if interrupted:
        about["interrupted"] = interrupted
        say_stopped(interrupted)
    if rows or not interrupted:
        print(report(rows, failed))
        print("\n".join(f"{name}: {value}" for name, value in about.items()))
    if args.json and (rows or not interrupted):
        result = {**about, "config": asdict(planner.config), "card": asdict(card), "rows": rows}
        result |= {"out_of_memory": [vars(job) for job in failed]}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
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
