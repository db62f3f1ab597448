"""Run the trainers as a user does, in new processes with a deadline, or in the process of the
test."""

import gc
import json
import multiprocessing.connection
import multiprocessing.forkserver
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

import torch

import train_minimal
import trainer.build
import trainer.plan
from trainer.plan import StepPlan
from trainer.process import OneProcess
from trainer.run import Run
from trainer.settings import Settings, resolve

ROOT = Path(__file__).parents[2]
# Flags of the smallest run with two layers, dropout and several epochs. An epoch has 12 windows,
# which are 6 steps.
TINY = (
    "--use-toy-data --max-tokens 200 --vocab-size 31 --n-layers 2 --n-heads 2 --d-model 16 "
    "--seq-len 16 --batch-size 2 --dropout 0.1 --num-steps 20 --log-interval 1 --eval-interval 0 "
    "--save-interval 0 --eval-tokens 0 --sample-tokens 0 --device cpu --data-seed 3"
).split()
TINY_MODEL = TINY[TINY.index("--n-layers") :]  # TINY without the flags that choose the data

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
FAULTS = "tests/harness/faults.py"  # runs a trainer with the faults in the variable FAULTS
DEADLINE = 300.0  # seconds; on an idle machine a run takes only a few seconds
GRACE = 5  # seconds from SIGTERM to SIGKILL, when another process has failed


def run(
    command: list[str], timeout: float = DEADLINE, cwd: Path = ROOT, **env: str
) -> CompletedProcess:
    python, *words = command
    if python == sys.executable and words[0] not in ("-c", "-Ic") and words[:2] != TORCHRUN[1:3]:
        return Forks([(words, env)], cwd).end(timeout)
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


@cache
def server() -> multiprocessing.context.ForkServerContext:
    """Return the context of a fork server that has imported the trainers. A process that the server
    forks need not import them again, which takes three seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "pytest", "harness.runs"])
    with patch.dict(os.environ, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}"):
        multiprocessing.forkserver.ensure_running()
    return context


def become(words: list[str], folder: str, environment: dict[str, str], *files: str) -> None:
    """Run `python` with the arguments `words` in this process, in `folder` and with `environment`.
    `files`: the files for stdout and for stderr.

    Garbage collection then skips the objects of imported modules. This saves a quarter of the time
    of a run of a few steps.
    """
    gc.set_threshold(300_000)
    gc.freeze()
    for standard, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), standard)
    os.environ.clear()
    os.environ.update(environment)
    # torch has read OMP_NUM_THREADS already, when it was imported.
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    os.chdir(folder)
    sys.argv = words
    if "PLANS_NOTHING" in environment:
        plan_nothing()
    if words[0] == "-m":
        sys.path.insert(0, "")
        runpy.run_module(words.pop(1), run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(words[0]))
        runpy.run_path(words[0], run_name="__main__")


class Forks:
    """Python programs that start at the same time, in processes that `server` forks. So they start
    faster than with `subprocess`.

    `programs`: for each program the words of its command, and its additional environment variables.
    All programs write to the same files `out` and `err`.
    """

    def __init__(self, programs: list[tuple[list[str], dict[str, str]]], cwd: Path = ROOT):
        self.command, self.temporary = programs[0][0], tempfile.TemporaryDirectory()
        self.out, self.err = (Path(self.temporary.name, name) for name in ("stdout", "stderr"))
        for file in (self.out, self.err):  # a test may read the file before a program has started
            file.touch()
        self.processes = []
        for words, env in programs:
            how = words, str(cwd), os.environ.copy() | env, str(self.out), str(self.err)
            self.processes.append(server().Process(target=become, args=how, daemon=True))
        for process in self.processes:
            process.start()
        self.pids = [process.pid for process in self.processes]  # in the order of ranks

    def wait_for_step(self, step: int) -> None:
        """Wait until the log on stdout shows this step."""
        wait_until(lambda: last_step(self.out.read_text()) >= step, f"step {step}")

    def end(self, timeout: float = DEADLINE) -> CompletedProcess:
        """Wait for all programs. Return their output, with the exit code of the program that failed
        first, or 0. When a program fails, end the other programs, as torchrun does. Raises
        TimeoutExpired after `timeout` seconds."""
        end, code = time.monotonic() + timeout, 0
        left = {process.sentinel: process for process in self.processes}
        while left and not code:
            ended = multiprocessing.connection.wait([*left], max(0, end - time.monotonic()))
            if not ended:
                break
            code = left.pop(ended[0]).exitcode
        for process in left.values():
            process.terminate()
        for process in left.values():
            process.join(GRACE)
            process.kill()
        if left and not code:
            raise subprocess.TimeoutExpired(self.command, timeout)
        out, err = self.out.read_text(), self.err.read_text()
        self.temporary.cleanup()
        return CompletedProcess(self.command, code, out, err)


def wait_until(condition: Callable[[], object], what: str, seconds: float = DEADLINE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no {what} within {seconds:.0f} s"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Return whether the process runs. A zombie has ended, though it still has a pid."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def last_step(log: str) -> int:
    """Return the last step that has a line in the log, or 0 if no step has a line."""
    return max(map(int, re.findall(r"^step +(\d+)/", log, re.M)), default=0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def start_together(words: list[str], processes: int = 2, **env: str) -> Forks:
    """Start a program in several processes with the environment variables that torchrun sets, but
    without torchrun."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | env
    env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return Forks([(words, env | rank) for rank in ranks])


def train(path: Path, *flags: str, script: str = "train_minimal.py", **how) -> CompletedProcess:
    """Run a trainer in one new process. `how`: arguments of `torchrun`."""
    return torchrun(path, *flags, processes=1, script=script, **how)


def train_here(path: Path, *flags: str, base: list[str] = TINY) -> int:
    """Run train_minimal.py in this process, and return its exit code. Draw random numbers first, so
    that each run begins with another random state."""
    torch.rand(int(torch.randint(1, 100, ())))
    return train_minimal.main([*base, "--checkpoint-path", str(path), *flags])


def typed(*flags: str) -> Settings:
    """Parse flags as a trainer does. (A string may contain several flags.)"""
    words = " ".join(flags).split()
    return Settings.parse(words, "test", checkpoint_path=Path("x.pt"))


def parse(*flags: str) -> Settings:
    """Parse flags, and fill in the defaults that depend on other flags."""
    return resolve(typed(*flags))


def ready(folder: Path, *flags: str) -> Run:
    """Set up a run with TINY and `flags` in this process, and release its files. Return the run
    before its first step."""
    settings = parse(*TINY, *flags).replace(checkpoint_path=folder / "run.pt")
    run = trainer.build.build_run(settings, OneProcess(torch.device("cpu")))
    run.held_lock.close()
    return run


def torchrun(
    path: Path,
    *flags: str,
    processes: int = 2,
    script: str = "train_ddp.py",
    expect: int = 0,
    **env: str,
) -> CompletedProcess:
    """Run a trainer in `processes` processes, as torchrun would do. Check that the exit code is
    `expect`. `env`: additional environment variables."""
    words = [*script.split(), *TINY, "--checkpoint-path", str(path), *flags]
    result = start_together(words, processes, **env).end()
    assert result.returncode == expect, result.stdout + result.stderr
    return result


def by_torchrun(path: Path, *flags: str, script: str, launch: str = "") -> list[str]:
    """Return the command that starts a trainer in two processes with the real torchrun. `launch`:
    flags of torchrun."""
    words = [*launch.split(), "--nproc-per-node=2", *script.split(), *TINY]
    return [*TORCHRUN, *words, "--checkpoint-path", str(path), *flags]


def errors(result: CompletedProcess) -> list[str]:
    """Return the lines on stderr that begin with "error: "."""
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


def plan_nothing() -> None:
    """Turn off memory prediction for trainers that run in this process. The prediction would take
    as long as the rest of a small run. But it stays on for --use-activation-checkpoint auto, and
    for a run that torchrun has restarted after an out-of-memory error."""

    def plan(settings: Settings, vocab_size: int, process: OneProcess, precision: torch.dtype):
        if settings.use_activation_checkpoint == "auto" or process.failed_policy:
            return trainer.plan.plan_run(settings, vocab_size, process, precision)
        where = process.device, precision
        plan = StepPlan(settings, vocab_size, *where, layout=process.layout)
        return plan.policy, PlannedLate([plan]), "not predicted"

    trainer.build.plan_run = plan


class PlannedLate(list[StepPlan]):
    """A plan, followed by its `deeper_plans`, which are made only if memory runs out."""

    def __bool__(self) -> bool:
        return False  # so no peak is asked for

    def __iter__(self) -> Iterator[StepPlan]:
        yield self[0]
        yield from self[0].deeper_plans()


def snapshot(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def older_runs(path: Path) -> list[Path]:
    """Return the archived snapshots of earlier runs with the same `path`, the newest last."""
    named = re.compile(re.escape(path.stem) + r"\.20[-\d]+\.pt")
    old = [file for file in path.parent.iterdir() if named.fullmatch(file.name)]
    return sorted(old, key=lambda file: file.stat().st_mtime)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return everything below `folder`: relative path -> bytes of a file, or None for a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def metrics(path: Path) -> list[dict]:
    lines = path.with_name(path.stem + ".metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def same(a: object, b: object) -> bool:
    """Return whether two nested structures are equal. Tensors must be equal to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b
