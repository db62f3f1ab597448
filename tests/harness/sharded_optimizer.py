"""Started in test_optimizer.py: sharded parameters are updated as whole ones are.

No gradient comes from a model here: all are drawn, so that nothing but the optimizer can differ.
"""

import argparse
import sys
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).parents[1:3])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from harness.runs import TINY, same  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

from model import MiniGPT, MiniGPTConfig  # noqa: E402
from train_fsdp import FSDPProcess  # noqa: E402
from trainer.flags import build_parser, fill_in  # noqa: E402
from trainer.optimizer import make_optimizer, restore_optimizer, update_if_finite  # noqa: E402
from trainer.process import OneProcess  # noqa: E402
from trainer.torchrun import main_and_exit  # noqa: E402

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


def learn(process: OneProcess, optimizer: str, moments: str, products: torch.dtype) -> tuple:
    """Weights and moments, whole, after six steps."""
    args = argparse.Namespace(optimizer=optimizer, moments_dtype=moments, lr=0.01, weight_decay=0.1)
    with torch.device("meta"):
        model = MiniGPT(EVEN if (optimizer, moments) == ("adamw", "float32") else UNEVEN)
    process.place(model)
    torch.manual_seed(0)
    model.init_weights(process.part)
    assert process.shards == 1 or isinstance(model.blocks[0].mlp.c_fc.weight, DTensor)
    make = lambda: make_optimizer(model, args, process.device, products)  # noqa: E731
    updated = make()
    for step in range(6):
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = process.part(0.1 * torch.randn(parameter.shape), parameter)
        update_if_finite(updated, torch.tensor(torch.inf if step == 3 else 1.0))
        state = model.state_dict(), updated.state_dict()
        whole = tree_map_only(DTensor, DTensor.full_tensor, state)
        if step == 4:  # as a snapshot goes on
            updated = make()
            restore_optimizer(updated, whole[1], process.part)
    return whole[0], whole[1]["state"]


def main() -> int:
    fsdp = FSDPProcess(fill_in(build_parser("test", "x.pt").parse_args(TINY)))
    fsdp.start()
    for mode in MODES:
        if not same(learn(OneProcess(fsdp.device), *mode), learn(fsdp, *mode)):
            sys.exit(f"{mode} differs")
    print(f"rank {fsdp.rank}: {len(MODES)} optimizers equal\n", end="")
    dist.barrier()  # nobody leaves while another still gathers
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    main_and_exit(main)
