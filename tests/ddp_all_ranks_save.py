"""train_ddp.py, except that every process saves its final weights, not only process 0."""

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


train_minimal.train = train_and_save
sys.exit(train_ddp.main())
