"""Started by torchrun in test_shards.py: what do real steps under fully_shard take?

The model is sharded as train_fsdp.py does it. For each case: the largest sum of the storages that
operators see in a step. Process 0 writes them to the file that is named first; the cases are named
after it.
"""

import json
import os
import sys
import weakref
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

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
from model import MiniGPT  # noqa: E402
from trainer.optimizer import make_optimizer  # noqa: E402

# name -> (config, batch size, in bfloat16, micro-batches, and for some cases the optimizer)
CASES: dict[str, tuple] = {
    "none, large head": (CONFIG, 16, False, 1),
    "full, large head": (replace(CONFIG, recompute="full"), 16, False, 1),
    "none": (WIDE, 24, False, 1),
    "full": (replace(WIDE, recompute="full"), 24, False, 1),
    "cheap": (replace(WIDE, recompute="cheap"), 24, False, 1),
    "cheap, bfloat16": (replace(WIDE, recompute="cheap"), 24, True, 1),
    "full, bfloat16": (replace(WIDE, recompute="full"), 8, True, 1),
    "none, accumulated": (WIDE, 4, False, 2),
    "full, accumulated": (replace(WIDE, recompute="full"), 4, False, 2),
    "little but weights": (replace(WIDE, recompute="full"), 1, False, 1),
    "dropout": (replace(WIDE, dropout=0.1), 8, False, 1),
    "offloaded": (replace(WIDE, recompute="full", offload_activations=True), 24, False, 1),
    "Muon": (WIDE, 8, False, 1, "muon"),
    "bfloat16 moments": (WIDE, 8, False, 1, "adamw", "bfloat16"),
    "one block": (replace(WIDE, n_layers=1), 16, False, 1),
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


def optimizer_flags(case: tuple) -> Namespace:
    name, moments, *_ = [*case[4:], *("adamw", "float32")[len(case) - 4 :]]
    return Namespace(optimizer=name, moments_dtype=moments, lr=1e-3, weight_decay=0.1)


def shard(model: MiniGPT) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state(model: MiniGPT, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What a process has between two steps."""
    parameters = list(model.parameters())
    moments = [moment for p in parameters for moment in optimizer.state[p].values()]
    return [local(tensor.detach()) for tensor in [*parameters, *moments]]


def train_step(model: MiniGPT, optimizer: torch.optim.Optimizer, case: tuple) -> None:
    """As train_minimal.train_step, with FSDP's answers."""
    config, batch_size, in_bfloat16, micro_batches, *_ = case
    for micro_batch in range(micro_batches):
        model.set_requires_gradient_sync(micro_batch == micro_batches - 1)  # type: ignore[operator]
        ids, labels = torch.randint(config.vocab_size, (2, batch_size, T))
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16, cache_enabled=False):
            loss = model(ids, labels)
        loss.backward()
    del ids, labels, loss
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def measure(case: tuple) -> dict[str, int]:
    model = MiniGPT(case[0]).train()
    shard(model)
    optimizer = make_optimizer(model, optimizer_flags(case), torch.device("cpu"))
    for _ in range(2):
        train_step(model, optimizer, case)
    there = state(model, optimizer)
    peaks = []
    for _ in range(5):  # a thread of gloo's may hold a buffer a moment longer, or may not
        with Storages(there) as storages:
            train_step(model, optimizer, case)
        peaks.append(storages.peak)
    before = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in there}.values())
    return {"storages": min(peaks), "state": before}


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
