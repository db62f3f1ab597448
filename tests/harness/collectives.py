"""Started in test_train_ddp.py: a trainer as it is, and what the collectives of a step carry.

`collectives.py TRAINER FLAGS...`; each process prints a line for its last step.
"""

import importlib
import json
import os
import sys
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).parents[1:3])

import torch  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import train_minimal  # noqa: E402
from trainer.torchrun import main_and_exit  # noqa: E402

train_step = train_minimal.train_step


class Collectives(TorchDispatchMode):
    """[name, bytes] of each: of the largest tensor in it, the one that is put together or dealt
    out. (On a CPU backward runs in the thread that calls it, DDP's averages among it.)"""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensor will be seen
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.seen.append((func._opname, max(tensor.nbytes for tensor in tensors)))
        return func(*args, **(kwargs or {}))


def watched(run):
    if run.step < run.args.num_steps:
        return train_step(run)
    with Collectives() as collectives:
        result = train_step(run)
    said = f"collectives {json.dumps(sorted(collectives.seen))}\n"
    os.write(1, said.encode())  # at once: another process writes to the same pipe
    return result


if __name__ == "__main__":
    train_minimal.train_step = watched
    _, trainer, *flags = sys.argv
    main_and_exit(lambda: importlib.import_module(trainer).main(flags))
