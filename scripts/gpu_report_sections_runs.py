"""Sections of scripts/gpu_report.py: true runs. Out of memory on purpose; torchrun with NCCL.

The trainers run in processes of their own, on toy data.
"""

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

from scripts.benchmark_worker import Job, config_of
from scripts.gpu_report_bench import DRY, REAL, Bench, Jobs, Values
from scripts.trainer_process import env_of, kill_all, last_line, pids_of, wait_until
from trainer.device import choose_precision
from trainer.metrics import read_metrics
from trainer.plan import make_planner
from trainer.room import for_tensors, total_memory
from trainer.snapshot import beside, read_snapshot

ROOT = Path(__file__).resolve().parent.parent
RUN = "--log-interval 1 --eval-interval 0 --eval-batches 1 --save-interval 0 --sample-tokens 0"
ACCUMULATE = ("--batch-size 8 --grad-accum-steps 4", "--grad-accum-steps 12")  # real, dry
# train_minimal.py, on a card that is smaller than it is.
LIMITED = (
    "import sys, train_minimal, torch; "
    "torch.cuda.set_per_process_memory_fraction(float(sys.argv.pop(1))); "
    "sys.exit(train_minimal.main())"
)


def flags(bench: Bench, more: str) -> list[str]:
    data = "--use-toy-data --vocab-size 50257"
    return f"{bench.pick(f'{REAL} {data}', DRY)} {RUN} {more}".split()


# ----------------------------------------------------------------------------------------- oom


def oom(bench: Bench) -> Jobs:
    """Does a run that is predicted to fit fit, and does one that does not end well?"""
    yield "none, twice the batch that fits", partial(limited, bench, "none", 2, ends_with=4)
    yield "auto, the same batch, with a budget", partial(limited, bench, "auto", 2, ends_with=0)
    if bench.dry:  # on a CPU nothing holds the limit: the rest would only be the same again
        return
    for policy in ("none", "full"):
        for margin, name in ((True, "with the margin"), (False, "without a margin")):
            job = partial(limited, bench, policy, margin=margin, ends_with=0)
            yield f"{policy}, the largest batch, {name}", job
    yield (
        "full, that and one more",
        partial(limited, bench, "full", margin=False, more=1, ends_with=4),
    )


def memory_limit(bench: Bench) -> tuple[float, int]:
    """(share of the card, bytes): a tenth, but enough for GPT-2 small."""
    if bench.dry:
        return 1.0, bench.predicted("", Job("none", 4))
    total = total_memory(bench.device) or 0
    share = min(1.0, max(0.1, 5 * 2**30 / total))
    return share, int(share * total)


def limited(
    bench: Bench,
    policy: str,
    times: int = 1,
    *,
    margin: bool = True,
    more: int = 0,
    ends_with: int,
) -> Values:
    """A run of a few steps with the largest batch, by the planner."""
    share, limit = memory_limit(bench)
    room = for_tensors(limit, bench.device.type) if margin else limit
    asked = "none" if policy == "auto" else policy
    fits = bench.planner().largest_batch(room, 1, recompute=asked)
    batch_size = times * fits + more
    args = f"--num-steps 3 --batch-size {batch_size} --use-activation-checkpoint {policy}"
    if policy == "auto":
        args += f" --memory-budget {limit}B"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.pt")
        command = [sys.executable, "-c", LIMITED, str(share)]
        environment = dict(os.environ)
        if bench.dry:  # a CPU's memory cannot be limited for tensors alone: it is played
            command = [sys.executable, "tests/harness/faults.py", "train_minimal"]
            environment |= {"FAULTS": "cuda-oom:0:2" if ends_with == 4 else ""}
        command += [*flags(bench, args), "--checkpoint-path", str(path)]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        records = read_metrics(log) if (log := beside(path, ".metrics.jsonl")).exists() else []
    chosen = re.search(r"auto takes ([^:]*):", done.stdout)
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return {
        "limit": limit,
        "batch": batch_size,
        "exit": done.returncode,
        "wanted": ends_with,
        "as_wanted": done.returncode == ends_with,
        "predicted": None if policy == "auto" else bench.predicted("", Job(policy, batch_size)),
        "allocated": records[-1]["peak_memory_bytes"] if bench.on_gpu and records else None,
        "chosen": chosen[1] if chosen else None,
        "said": next(iter(said or done.stderr.splitlines()[-1:]), None),
        "took": time.perf_counter() - start,
    }


# ----------------------------------------------------------------------------------------- ddp


def ddp(bench: Bench) -> Jobs:
    """One process of torchrun's; what DDP changes in memory, and how it ends."""
    yield "accumulation, SIGTERM to the worker", partial(stop, bench)
    if bench.on_gpu:
        yield "--resume of that run", partial(go_on, bench)
    yield "--resume, kill -9 of the worker, --max-restarts=1", partial(go_on, bench, kill=True)
    yield "--resume by train_fsdp.py", partial(go_on, bench, script="train_fsdp.py")


@cache
def scratch() -> Path:
    """A folder for snapshots, as long as this process lives."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


class Torchrun:
    """A trainer as torchrun's one process, with accumulation."""

    def __init__(
        self, bench: Bench, path: Path, more: str, launch: str = "", script: str = "train_ddp.py"
    ) -> None:
        self.path, self.log, self.script = path, beside(path, ".metrics.jsonl"), script
        accumulate = bench.pick(*ACCUMULATE)
        command = [sys.executable, *"-m torch.distributed.run --standalone".split()]
        command += ["--nproc-per-node=1", *launch.split(), script]
        command += flags(bench, f"{accumulate} --use-activation-checkpoint {more}")
        starts = len(list(path.parent.glob("start*.log")))  # each has a log of its own: exit codes
        self.out = path.parent / f"start{starts + 1}.log"
        with open(self.out, "x") as out:
            self.process = subprocess.Popen(
                [*command, "--checkpoint-path", str(path)], cwd=ROOT,
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip

    def __enter__(self) -> "Torchrun":
        return self

    def __exit__(self, *error: object) -> None:
        kill_all(self.path)
        self.process.wait()

    def records(self) -> list[dict]:
        return read_metrics(self.log) if self.log.exists() else []

    def send(self, number: int, step: int) -> None:
        """To the worker, as soon as it has logged that step."""

        def there() -> bool:
            ended = self.process.poll() is not None
            return ended or any(record["step"] >= step for record in self.records())

        wait_until(there, f"step {step} did not come")
        (pid,) = (pid for pid in pids_of(self.path) if env_of(pid).get("RANK") == "0")
        os.kill(pid, number)

    def end(self) -> int:
        return self.process.wait(120)

    def worker_codes(self) -> list[int]:
        """The exit codes that torchrun tells."""
        return [int(code) for code in re.findall(r"exitcode\s*: (-?\d+)", self.out.read_text())]


def stop(bench: Bench) -> Values:
    with Torchrun(bench, scratch() / "run.pt", "--num-steps 100000") as run:
        run.send(signal.SIGTERM, step=3)
        sent = time.perf_counter()
        code = run.end()
        took = time.perf_counter() - sent
        saved, codes = read_snapshot(run.path)["step"], run.worker_codes()
        return {
            "exit": code,
            "worker": next(iter(codes), None),
            "as_wanted": set(codes) == {143} and saved >= 3,
            "step": saved,
            "took": took,
            "said": None,
            **log_values(bench, run),
        }


def go_on(bench: Bench, kill: bool = False, script: str = "train_ddp.py") -> Values:
    """Resumed, the moments are there before the first gradients: its peak may be another one."""
    path = scratch() / "run.pt"
    if not path.exists():
        stop(bench)
    saved = read_snapshot(path)["step"]
    more, start = f"--resume --num-steps {saved + 8} --save-interval 2", time.perf_counter()
    with Torchrun(bench, path, more, "--max-restarts=1", script) as run:
        if kill:
            run.send(signal.SIGKILL, step=saved + 3)
        code = run.end()
        step = run.records()[-1]["step"]
        as_wanted = code == 0 and step == saved + 8
        return {
            "exit": code,
            "worker": next(iter(run.worker_codes()), None),
            "as_wanted": as_wanted,
            "step": step,
            "took": time.perf_counter() - start,
            "said": None if as_wanted else last_line(run.out),
            **log_values(bench, run),
        }


def log_values(bench: Bench, run: Torchrun) -> Values:
    """What the run's own log says of time and memory, and the planner of such a run."""
    args = bench.args(bench.pick(*ACCUMULATE))
    precision = choose_precision(args, bench.device)
    config = config_of(args, Job("full", args.batch_size))
    ddp = run.script == "train_ddp.py"
    planner = make_planner(args, config, bench.device, precision, ddp=ddp)
    last = run.records()[-1]
    return {
        "ms": last["step_ms"],
        "tokens/s": last["tokens_per_s"],
        "predicted": planner.step(args.batch_size, **asdict(config)).peak,
        "allocated": last["peak_memory_bytes"] if bench.on_gpu else None,
    }
