"""Run the trainers as a user does: in a process of their own, with a deadline."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import train_minimal

ROOT = Path(__file__).parent.parent
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
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


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
    command = [*TORCHRUN, f"--nproc-per-node={processes}", *launch, *script.split(), *TINY]
    result = run([*command, "--checkpoint-path", str(path), *flags], **env)
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
