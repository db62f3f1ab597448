"""train_minimal.py, or under torchrun train_ddp.py, in which things go wrong at chosen moments.

    FAULTS="nan:1:7 kill:0:9" torchrun ... tests/faults.py     # rank 1 in step 7, rank 0 in step 9

Only in the first attempt that torchrun makes, so that a restarted one can show what it does. Every
process leaves its weights in run.rank<R>.pt when its training ends, however it ends.
"""

import math
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import train_ddp  # noqa: E402
import train_minimal  # noqa: E402

import torch  # noqa: E402  isort: skip

RANK = os.environ.get("RANK", "0")
real_train, real_train_step = train_minimal.train, train_minimal.train_step


class Fault(Exception):
    pass


def train_step(run):
    undo = []
    for word in os.environ.get("FAULTS", "").split():
        kind, rank, step = word.split(":")
        first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first_attempt and (rank, step) == (RANK, str(run.step)):
            undo.append(INJECT[kind](run))
    try:
        return real_train_step(run)
    finally:
        for function in filter(None, undo):
            function()


def nan(run):
    """In one gradient, on its way to the average over processes."""
    return run.model.blocks[0].mlp.c_proj.weight.register_hook(lambda g: g * math.nan).remove


def infinite_loss(run):
    """With gradients that are finite."""
    wrapped, run.wrapped = run.wrapped, lambda *batch: wrapped(*batch) + math.inf
    return lambda: setattr(run, "wrapped", wrapped)


def error(run):
    raise Fault("injected")


def out_of_memory(run):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def hang(run):
    """Until torchrun sends SIGTERM (which is noted, and a second one would end the process)."""
    while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        time.sleep(0.1)
    os._exit(1)


INJECT = {
    "nan": nan,
    "infinite_loss": infinite_loss,
    "error": error,
    "out_of_memory": out_of_memory,
    "kill": lambda run: os.kill(os.getpid(), signal.SIGKILL),
    "hang": hang,
}


def train(run):
    try:
        return real_train(run)
    finally:
        path = run.args.checkpoint_path
        torch.save(run.model.state_dict(), path.with_name(f"run.rank{RANK}.pt"))


if __name__ == "__main__":
    train_minimal.train, train_minimal.train_step = train, train_step
    if "WORLD_SIZE" in os.environ:
        train_ddp.main_and_exit()
    else:
        sys.exit(train_minimal.main())
