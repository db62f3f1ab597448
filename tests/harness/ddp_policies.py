"""Started by torchrun in test_train_ddp.py: with DDP and accumulation, every policy == none."""

import gc
import sys
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).parents[1:3])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from memory import offload  # noqa: E402
from model import RECOMPUTE_POLICIES, MiniGPT, MiniGPTConfig  # noqa: E402

offload.SMALL = 1  # everything travels
SHAPE = dict(vocab_size=61, max_position_embeddings=16, n_layers=3, n_heads=2, d_model=32, d_ff=64)
VARIANTS: list[dict] = [{"recompute": policy} for policy in RECOMPUTE_POLICIES]
VARIANTS += [{"recompute": "full", "recompute_group": 2, "offload_activations": True}]
VARIANTS += [{"recompute": "mlp", "recompute_layers": 1, "recompute_rest": "full"}]


def gradients(bfloat16: bool, **variant) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = MiniGPT(MiniGPTConfig(**SHAPE, dropout=0.1, loss_chunks=4, **variant))
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    for micro_batch in range(2):
        torch.manual_seed(2 * micro_batch + dist.get_rank())
        ids = torch.randint(0, 61, (2, 16))
        wrapped.require_backward_grad_sync = micro_batch == 1
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16, cache_enabled=False):
            loss = wrapped(ids, ids)
        loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    del wrapped
    gc.collect()  # its threads must be gone before the connections are
    return found


dist.init_process_group("gloo")
for bfloat16 in (False, True):
    expected = gradients(bfloat16)
    for variant in VARIANTS:
        if not all(map(torch.equal, expected, gradients(bfloat16, **variant))):
            sys.exit(f"{variant} differs from none (bfloat16: {bfloat16})")
print(f"rank {dist.get_rank()}: {len(VARIANTS)} variants equal")
dist.destroy_process_group()
