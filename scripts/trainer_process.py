"""Trainers in processes of their own: start, watch, signal and kill them, compare what they leave.

The harness of scripts/reliability.py, and what a row of its table is.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# One thread a process: sums differ in the last bit between one thread and two.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}

from scripts.faults import weights_hash
from trainer.snapshot import beside, read_snapshot

ROOT = Path(__file__).resolve().parent.parent
# The smallest run that still has everything: two layers, dropout, epochs of 6 steps, two sequences
# in each of two micro-batches (or of two processes).
TINY = (
    "--use-toy-data --max-tokens 200 --vocab-size 31 --n-layers 2 --n-heads 2 --d-model 16 "
    "--seq-len 16 --batch-size 2 --dropout 0.1 --num-steps 20 --log-interval 1 --eval-interval 0 "
    "--save-interval 5 --eval-batches 2 --sample-tokens 0 --device cpu"
).split()
STEPS, INTERVAL = 20, 5
DEADLINE = 150.0  # seconds; of a process that takes 3, on a machine that is not otherwise busy


class NotHeld(Exception):
    """A figure was not reached; the message says what was measured instead."""


def check(condition: object, otherwise: str) -> None:
    if not condition:
        raise NotHeld(" ".join(otherwise.split()))


class Trainer:
    """A trainer in a process of its own, or with `processes` > 1 torchrun and its workers."""

    def __init__(
        self, path: Path, *flags: str, processes: int = 1, torchrun: str = "", **env: str
    ) -> None:
        command = [sys.executable, "-m", "scripts.faults"]
        if processes > 1 or "TRAINER" in env:
            launch = f"-m torch.distributed.run --standalone --nproc-per-node={processes}"
            command = [sys.executable, *launch.split(), *torchrun.split(), "-m", "scripts.faults"]
        precision = [] if any("--amp" in flag for flag in flags) else ["--no-amp"]
        same_batch = f"--grad-accum-steps={max(2 // processes, 1)}"
        command += [*TINY, *precision, same_batch, f"--checkpoint-path={path}", *flags]
        self.path = path
        number = len(list(path.parent.glob("*.out")))
        self.out, self.err = (path.with_name(f"{number}.{kind}") for kind in ("out", "err"))
        with open(self.out, "w") as out, open(self.err, "w") as err:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | env, stdin=subprocess.DEVNULL,
                stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip

    def last_step(self) -> int:
        """The last step that the log shows."""
        return max(map(int, re.findall(r"^step +(\d+)/", self.out.read_text(), re.M)), default=0)

    def wait_for_step(self, step: int) -> None:
        wait_until(
            lambda: self.last_step() >= step or self.process.poll() is not None,
            f"step {step} did not come",
        )

    def send(self, number: int, rank: int | None = None) -> float:
        """Signal the process that was started, or one rank; returns the time it is now."""
        pid = self.process.pid
        if rank is not None:
            pid = next(p for p in pids_of(self.path) if env_of(p).get("RANK") == str(rank))
        os.kill(pid, number)
        return time.monotonic()

    def end(self, *expected: int, seconds: float = DEADLINE) -> "Trainer":
        """Wait for the end. Raises NotHeld if it does not come, or with another exit code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            kill_all(self.path)
            raise NotHeld(f"no end within {seconds:.0f} s: {last_line(self.out)}") from None
        if code not in expected:
            kill_all(self.path)
        error = last_line(self.err)
        check(code in expected, f"exit code {code}, not {expected}: {error}")
        return self

    def errors(self) -> list[str]:
        """The lines on stderr that are meant for the user."""
        lines = self.err.read_text().splitlines()
        return [line for line in lines if line.startswith("error: ")]


def wait_until(condition: Callable[[], object], otherwise: str, seconds: float = DEADLINE) -> float:
    """Wait; returns the seconds that it took."""
    start = time.monotonic()
    while not condition():
        check(time.monotonic() - start < seconds, f"{otherwise} within {seconds:.0f} s")
        time.sleep(0.01)
    return time.monotonic() - start


def pids_of(path: Path) -> list[int]:
    """The processes that have `path` (or what lies below it) on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
            zombie = ") Z " in (entry / "stat").read_text()
        except OSError:  # gone meanwhile
            continue
        if str(path).encode() in words and not zombie and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def env_of(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def kill_all(path: Path) -> None:
    """End what was started on `path`, workers first orphaned by their torchrun included.

    Returns when all of it is gone. A process outlives the SIGKILL that ends it, on a busy machine
    for as long as it takes to be scheduled once more and to give back its memory; and torchrun may
    have started another one just now.
    """

    def all_gone() -> bool:
        pids = pids_of(path)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait_until(all_gone, "killed processes did not end")


def last_line(path: Path) -> str:
    return (path.read_text(errors="replace").strip().splitlines() or [""])[-1]


def history(path: Path, rank: int = 0) -> dict[int, dict[str, Any]]:
    """Step -> what scripts/faults.py wrote down after it: hash of the weights, loss scale."""
    lines = beside(path, f".rank{rank}.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines)}


class Bench:
    """A scratch folder, and the runs that nothing happened to, each trained once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, threading.Lock()
        self.undisturbed: dict[tuple[str, ...], Path] = {}

    def path(self) -> Path:
        """Where a new run may save."""
        return Path(tempfile.mkdtemp(dir=self.folder)) / "run.pt"

    def reference(self, *flags: str) -> Path:
        """The finished run with these flags, in one process."""
        with self.lock:
            if flags not in self.undisturbed:
                path = self.path()
                Trainer(path, *flags).end(0)
                self.undisturbed[flags] = path
            return self.undisturbed[flags]

    def train(self, path: Path, *flags: str, expect: int = 0, **options: Any) -> Trainer:
        return Trainer(path, *flags, **options).end(expect)

    def check_same(self, path: Path, *flags: str) -> None:
        """The run ended with the weights that it would have ended with undisturbed."""
        ours, theirs = (read_snapshot(p) for p in (path, self.reference(*flags)))
        check(ours["step"] == theirs["step"], f"ended at step {ours['step']}")
        same = weights_hash(ours["model"]) == weights_hash(theirs["model"])
        check(same, "the final weights differ from the undisturbed run's")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    what: str
    wanted: str
    measure: Callable[..., str]  # (bench): returns what was measured, or raises NotHeld


def row(name: str, what: str, wanted: str) -> Callable[[Callable[..., str]], Row]:
    """Makes a row of the function that measures it; scripts/reliability.py puts it in the table."""
    return partial(Row, name, what, wanted)
