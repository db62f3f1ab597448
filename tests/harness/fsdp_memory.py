"""Started by torchrun in test_shards.py: what do real steps under fully_shard take?

The model is sharded as train_fsdp.py does it. Process 0 writes what each case takes to the file
that is named first; the cases are named after it.
"""

import json
import os
import sys
import weakref
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = map(str, Path(__file__).parents[1:3])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from cases.shapes import CONFIG, WIDE, T  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import memory.offload  # noqa: E402
from model import MiniGPT, MiniGPTConfig  # noqa: E402
from trainer.optimizer import make_optimizer  # noqa: E402


class Case(NamedTuple):
    config: MiniGPTConfig
    batch_size: int
    in_bfloat16: bool = False
    micro_batches: int = 1
    optimizer: str = "adamw"
    moments: str = "float32"

    @property
    def flags(self) -> Namespace:
        """The optimizer's."""
        its = {"optimizer": self.optimizer, "moments_dtype": self.moments}
        return Namespace(lr=1e-3, weight_decay=0.1, **its)


FULL, CHEAP = (replace(WIDE, recompute=policy) for policy in ("full", "cheap"))
CASES = {
    "none, large head": Case(CONFIG, 16),
    "full, large head": Case(replace(CONFIG, recompute="full"), 16),
    "none": Case(WIDE, 24),
    "full": Case(FULL, 24),
    "cheap": Case(CHEAP, 24),
    "cheap, bfloat16": Case(CHEAP, 24, in_bfloat16=True),
    "full, bfloat16": Case(FULL, 8, in_bfloat16=True),
    "none, accumulated": Case(WIDE, 4, micro_batches=2),
    "full, accumulated": Case(FULL, 4, micro_batches=2),
    "little but weights": Case(FULL, 1),
    "dropout": Case(replace(WIDE, dropout=0.1), 8),
    "offloaded": Case(replace(FULL, recompute="full+offload"), 24),
    "Muon": Case(WIDE, 8, optimizer="muon"),
    "bfloat16 moments": Case(WIDE, 8, moments="bfloat16"),
    "one block": Case(replace(WIDE, n_layers=1), 16),
}


class Storages(TorchDispatchMode):
    """The bytes of all storages that operators have seen and that are still alive.

    A storage can also be freed and made anew without an operator (fully_shard does that to the
    weights), so each is asked for its size again and again.
    """

    def __init__(self, there: list[Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, weakref.ref] = {}
        self.peak = 0
        for tensor in there:
            self.add(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensor will be seen
        self.look()
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        self.look()
        return result

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.alive:
            self.alive[address] = weakref.ref(storage, lambda _: self.alive.pop(address))

    def look(self) -> None:
        storages = [reference() for reference in list(self.alive.values())]
        now = sum(storage.nbytes() for storage in storages if storage is not None)
        self.peak = max(self.peak, now)


def shard(model: MiniGPT) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def train_step(model: MiniGPT, optimizer: torch.optim.Optimizer, case: Case) -> None:
    """As train_minimal.train_step, with FSDP's answers."""
    for micro_batch in range(case.micro_batches):
        last = micro_batch == case.micro_batches - 1
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        ids, labels = torch.randint(case.config.vocab_size, (2, case.batch_size, T))
        with torch.autocast("cpu", torch.bfloat16, enabled=case.in_bfloat16, cache_enabled=False):
            loss = model(ids, labels)
        loss.backward()
    del ids, labels, loss
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def measure(case: Case) -> dict[str, int]:
    """Bytes: what a process has between two steps, and at the peak of one."""
    model = MiniGPT(case.config).train()
    shard(model)
    optimizer = make_optimizer(model, case.flags, torch.device("cpu"))
    for _ in range(2):
        train_step(model, optimizer, case)
    state = [p.detach() for p in model.parameters()]
    state += [moment for moments in optimizer.state.values() for moment in moments.values()]
    there = [t.to_local() if isinstance(t, DTensor) else t for t in state]
    peaks = []
    for _ in range(5):  # a thread of gloo's may hold a buffer a moment longer, or may not
        with Storages(there) as storages:
            train_step(model, optimizer, case)
        peaks.append(storages.peak)
    alive = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in there}
    return {"peak": min(peaks), "state": sum(alive.values())}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    memory.offload.SMALL = 1  # nothing is too small to be sent away
    dist.init_process_group("gloo")
    path, *names = sys.argv[1:]
    measured = {name: measure(CASES[name]) for name in names}
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(measured))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
