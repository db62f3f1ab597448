"""Started by torchrun in test_optimizer.py: sharded parameters are updated as whole ones are.

No gradient comes from a model here: all are drawn, so that nothing but the optimizer can differ.
"""

import argparse
import sys
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).parents[1:3])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: E402

from model import MiniGPT, MiniGPTConfig  # noqa: E402
from trainer.optimizer import make_optimizer, restore_optimizer, update_if_finite  # noqa: E402

# Nothing divides evenly: rows over processes (one table has a single row), elements over a CPU's
# vectors. But torch's own AdamW has no way to round all elements alike: its whole tensors do.
UNEVEN = MiniGPTConfig(1001, 1, n_layers=3, n_heads=2, d_model=36, d_ff=100)
EVEN = MiniGPTConfig(1001, 1, n_layers=3, n_heads=2, d_model=48, d_ff=112)
MODES = [
    (optimizer, moments, products)
    for optimizer in ("adamw", "muon")
    for moments in ("float32", "bfloat16")
    for products in (torch.float32, torch.bfloat16)
    if optimizer == "muon" or products == torch.float32
]


def part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return whole.clone()
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Side:
    """A model, whole or sharded, and its optimizer."""

    def __init__(self, mode: tuple, shards: bool):
        optimizer, moments, products = mode
        args = argparse.Namespace(
            optimizer=optimizer, moments_dtype=moments, lr=0.01, weight_decay=0.1
        )
        torch.manual_seed(0)
        self.model = MiniGPT(EVEN if (optimizer, moments) == ("adamw", "float32") else UNEVEN)
        for module in (*self.model.blocks, self.model) if shards else ():
            fully_shard(module, mesh=MESH)
        self.make = lambda: make_optimizer(self.model, args, torch.device("cpu"), products)
        self.optimizer = self.make()

    def step(self, gradients: list[torch.Tensor], norm: float) -> None:
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = part(gradient, parameter)
        update_if_finite(self.optimizer, torch.tensor(norm))

    def state(self) -> dict:
        """Whole, as in a snapshot."""
        state = self.optimizer.state_dict()
        for moments in state["state"].values():
            moments |= {name: full(tensor) for name, tensor in moments.items()}
        return state

    def everything(self) -> list[torch.Tensor]:
        moments = [t for state in self.state()["state"].values() for t in state.values()]
        return [full(p) for p in self.model.parameters()] + moments


dist.init_process_group("gloo")
MESH = init_device_mesh("cpu", (dist.get_world_size(),))
for mode in MODES:
    whole, sharded = (Side(mode, shards) for shards in (False, True))
    assert isinstance(sharded.model.blocks[0].mlp.c_fc.weight, DTensor)
    for step in range(6):
        torch.manual_seed(step)
        gradients = [0.1 * torch.randn(p.shape) for p in whole.model.parameters()]
        for side in (whole, sharded):
            side.step(gradients, norm=torch.inf if step == 3 else 1.0)
        if step == 4:  # as a snapshot goes on
            saved, sharded.optimizer = sharded.state(), sharded.make()
            restore_optimizer(sharded.optimizer, saved, part)
    both = list(zip(whole.everything(), sharded.everything(), strict=True))
    different = sum(not torch.equal(a, b) or a.dtype != b.dtype for a, b in both)
    if different:
        sys.exit(f"{mode}: {different} of {len(both)} tensors differ")
print(f"rank {dist.get_rank()}: {len(MODES)} optimizers equal")
dist.barrier()  # nobody leaves while another still gathers
dist.destroy_process_group()
