"""Rows of scripts/reliability.py, third part: the endings that shards could change (train_fsdp.py).

No process has the whole model there; a snapshot is gathered from all, and dealt out to all.
"""

import signal
from collections.abc import Sequence
from typing import Any

from scripts import reliability_endings as endings
from scripts.trainer_process import STEPS, Bench, Trainer, check, row
from trainer.metrics import read_metrics
from trainer.snapshot import beside

SHARDS: dict[str, Any] = {"TRAINER": "train_fsdp"}


@row(
    "fsdp-kill",
    "`train_fsdp.py`: `kill -9` of one of two processes, at random points of training",
    "20 of 20 resume with the weights of one undisturbed process, at most one save interval lost",
)
def killed_in_training(bench: Bench, kills: int = 20, steps: int = 160) -> str:
    """The others are left with shards of a model that is nowhere whole."""
    return endings.killed_in_training.measure(bench, kills, steps, processes=2, **SHARDS)


@row(
    "fsdp-save",
    "`train_fsdp.py`: `kill -9` of process 0 at each point inside a save",
    "6 of 6 end bit-identical",
)
def killed_in_a_save(bench: Bench, points: Sequence[str] = endings.DEATHS_IN_A_SAVE) -> str:
    """What it writes was gathered from all: the others must not wait for it for ever."""
    return endings.killed_in_a_save.measure(bench, points, processes=2, **SHARDS)


@row(
    "fsdp-signals",
    "`train_fsdp.py`: SIGTERM and SIGINT to torchrun, to one rank",
    "step finished, one save, all ranks stop at the same step within 5 s; one process goes on",
)
def signals(
    bench: Bench, numbers: Sequence[int] = (signal.SIGTERM, signal.SIGINT), limit: float = 5
) -> str:
    """All must gather for the save, after the same step."""
    targets = (("torchrun", 2, None), ("rank", 2, 1))
    slowest = endings.signal_each(bench, numbers, targets, limit, **SHARDS)
    n = len(numbers) * len(targets)
    return f"{n} of {n} saved within {slowest:.1f} s, end bit-identical in one process"


@row(
    "fsdp-restarts",
    "`train_fsdp.py` with `torchrun --max-restarts=3`, a rank raising or killed",
    "10 of 10 resume by themselves and end with the single-process weights",
)
def restarts(bench: Bench, times: int = 10) -> str:
    """The processes that come instead must get the same shards."""
    return endings.restarts.measure(bench, times, **SHARDS)


@row(
    "fsdp-elastic",
    "`train_minimal.py` -> `train_ddp.py` on 2 -> `train_fsdp.py` on 2, 1 -> `train_minimal.py`; "
    "`train_fsdp.py` on 4",
    "same micro-batches: bit-identical; on 4, which add up in another order: the same loss to 1e-4",
)
def across_trainers(bench: Bench) -> str:
    """Whoever trained it, and on however many devices: a snapshot is a snapshot."""
    path, resume = bench.path(), list[str]()
    for step, processes, env in ((4, 1, {}), (8, 2, {}), (12, 2, SHARDS), (16, 1, SHARDS)):
        run = Trainer(path, *resume, processes=processes, PAUSE="0.1", **env)
        run.wait_for_step(step)
        run.send(signal.SIGTERM)
        run.end(1 if processes > 1 or env else 143)
        resume = ["--resume"]
    bench.train(path, *resume)
    bench.check_same(path)
    # Alike is only what is computed in the same micro-batches, with the same masks: so without.
    flags = ("--dropout=0", "--eval-batches=0")
    four = bench.path()
    bench.train(four, *flags, "--batch-size=1", processes=4, **SHARDS)
    ours, theirs = (
        read_metrics(beside(p, ".metrics.jsonl"))[-1] for p in (four, bench.reference(*flags))
    )
    check(ours["step"] == theirs["step"] == STEPS, f"4 processes ended at step {ours['step']}")
    off = abs(ours["val_loss"] / theirs["val_loss"] - 1)
    check(off < 1e-4, f"the loss of 4 processes is {off:.1e} off")
    return f"ends bit-identical; on 4 the loss is {off:.0e} off"
