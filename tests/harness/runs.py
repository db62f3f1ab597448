"""Run the trainers as a user does: in a process of their own, with a deadline."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

import train_minimal

ROOT = Path(__file__).parents[2]
# The smallest run that still has everything: two layers, dropout, epochs of 6 steps (12 windows).
TINY = (
    "--use-toy-data --max-tokens 200 --vocab-size 31 --n-layers 2 --n-heads 2 --d-model 16 "
    "--seq-len 16 --batch-size 2 --dropout 0.1 --num-steps 20 --log-interval 1 --eval-interval 0 "
    "--save-interval 0 --eval-batches 0 --sample-tokens 0 --device cpu --data-seed 3"
).split()


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


class Crash(Exception):
    pass


def run(
    command: list[str], timeout: float = 120, cwd: Path = ROOT, **env: str
) -> subprocess.CompletedProcess:
    python, *words = command
    is_program = python == sys.executable and words[0] != "-c" and words[:2] != TORCHRUN[1:3]
    if is_program and not env and hasattr(os, "fork"):
        return fork([(words, {})], timeout, cwd)
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
def forks() -> subprocess.Popen:
    """tests/harness/forks.py at work, until this process ends."""
    command, pipe = [sys.executable, str(ROOT / "tests/harness/forks.py")], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)


def fork(
    programs: list[tuple[list[str], dict[str, str]]], timeout: float, cwd: Path
) -> subprocess.CompletedProcess:
    """Programs, each with what is new in its environment, at the same time; what one of them says
    is what all do. Faster than `subprocess.run`: see forks.py."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        asked = [
            [words, str(cwd), dict(os.environ) | env, *map(str, files)] for words, env in programs
        ]
        server = forks()
        print(json.dumps(asked), file=server.stdin, flush=True)
        if not select.select([server.stdout], [], [], timeout)[0]:
            os.killpg(server.pid, signal.SIGKILL)  # and all that it has started
            forks.cache_clear()
            raise subprocess.TimeoutExpired(programs[0][0], timeout)
        codes = json.loads(server.stdout.readline())
        said = [file.read_text() for file in files]
    failed = [code for code in codes if code]
    return subprocess.CompletedProcess(programs[0][0], failed[0] if failed else 0, *said)


def together(
    words: list[str], processes: int = 2, timeout: float = 120, **env: str
) -> subprocess.CompletedProcess:
    """A program in as many processes as torchrun would start, without torchrun."""
    if not hasattr(os, "fork"):
        return run([*TORCHRUN, f"--nproc-per-node={processes}", *words], timeout, **env)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return fork([(words, env | rank) for rank in ranks], timeout, ROOT)


def train(path: Path, *flags: str, expect: int = 0) -> subprocess.CompletedProcess:
    command = [sys.executable, "train_minimal.py", *TINY, "--checkpoint-path", str(path), *flags]
    result = run(command)
    assert result.returncode == expect, result.stdout + result.stderr
    return result


def train_here(path: Path, *flags: str) -> int:
    """Like `train`, but in this process, whose random state is somewhere else each time."""
    torch.rand(int(torch.randint(1, 100, ())))
    return train_minimal.main([*TINY, "--checkpoint-path", str(path), *flags])


def torchrun(
    path: Path,
    *flags: str,
    processes: int = 2,
    script: str = "train_ddp.py",
    expect: int = 0,
    launch: tuple[str, ...] = (),
    **env: str,
) -> subprocess.CompletedProcess:
    words = [*script.split(), *TINY, "--checkpoint-path", str(path), *flags]
    if expect == 0 and not launch:  # then torchrun has nothing to do
        result = together(words, processes, **env)
    else:
        result = run([*TORCHRUN, f"--nproc-per-node={processes}", *launch, *words], **env)
    assert result.returncode == expect, result.stdout + result.stderr
    return result


def crash_after(step: int, monkeypatch) -> None:
    """Let a run in this process die in the step after that one."""
    real = train_minimal.train_step

    def train_step(run):
        if run.step > step:
            raise Crash
        return real(run)

    monkeypatch.setattr(train_minimal, "train_step", train_step)


def snapshot(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def metrics(path: Path) -> list[dict]:
    lines = path.with_name(path.stem + ".metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def same(a: object, b: object) -> bool:
    """Equal to the bit, whatever is nested in whatever."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b
