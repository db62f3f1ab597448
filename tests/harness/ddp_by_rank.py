"""train_ddp.py where each process has flags of its own besides, in FLAGS_0 and FLAGS_1."""

import os
import sys
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).parents[1:3])

import train_ddp  # noqa: E402
from trainer.torchrun import main_and_exit  # noqa: E402

if __name__ == "__main__":
    own = os.environ.get(f"FLAGS_{os.environ['RANK']}", "").split()
    main_and_exit(lambda: train_ddp.main([*sys.argv[1:], *own]))
