"""train_ddp.py, except that every process saves its final weights, not only process 0.

With STOP_RANK and STOP_STEP in the environment, that process gets a SIGTERM in that step.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402

import train_ddp  # noqa: E402
import train_minimal  # noqa: E402

train = train_minimal.train


def train_and_save(run):
    record = train(run)
    path = run.args.checkpoint_path
    torch.save(run.model.state_dict(), path.with_name(f"run.rank{run.process.rank}.pt"))
    return record


train_step = train_minimal.train_step


def train_step_with_signal(run):
    here = {"STOP_RANK": str(run.process.rank), "STOP_STEP": str(run.step)}
    if here.items() <= os.environ.items():
        os.kill(os.getpid(), signal.SIGTERM)
    return train_step(run)


train_minimal.train = train_and_save
train_minimal.train_step = train_step_with_signal
sys.exit(train_ddp.main())
