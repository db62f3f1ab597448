"""Started in test_torchrun.py: what is dealt out learns what DDP learns, to the bit; and every
policy learns what none learns.

Five steps of each variant (a few of them, or with the argument "all" all), with dropout and
accumulation, in both trainers' processes; weights and moments are compared whole.
"""

import gc
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path[:0] = map(str, Path(__file__).parents[1:3])

import torch  # noqa: E402
from harness.runs import TINY, same  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from memory import offload  # noqa: E402
from model import RECOMPUTE_POLICIES, MiniGPT, MiniGPTConfig  # noqa: E402
from train_ddp import DDPProcess  # noqa: E402
from train_fsdp import FSDPProcess  # noqa: E402
from trainer.flags import build_parser, fill_in  # noqa: E402
from trainer.optimizer import make_optimizer  # noqa: E402
from trainer.torchrun import main_and_exit  # noqa: E402

offload.SMALL = 1  # everything travels
# (Of 61 rows process 0 gets 31, process 1 gets 30. But every shard is a multiple of 16 numbers:
# what is left of a tensor beyond that, the CPU's fused AdamW rounds otherwise.)
SHAPE = MiniGPTConfig(
    vocab_size=61, max_position_embeddings=16, n_layers=3, n_heads=2, d_model=32, d_ff=64,
    dropout=0.1, loss_chunks=4,
)  # fmt: skip
VARIANTS: list[dict] = [{"recompute": policy} for policy in RECOMPUTE_POLICIES]
VARIANTS += [
    {"recompute": "mlp:1,full"},
    {"recompute": "full+offload"},
    {"recompute": "full/2+offload"},
    {"recompute": "cheap+offload"},
    {"loss_chunks": 1},
]


to_empty = MiniGPT.to_empty


def no_whole_model(model: MiniGPT, *, device: torch.device) -> None:
    """Memory comes when all is dealt out, and is for half of the rows."""
    assert all(isinstance(p, DTensor) and p.is_meta for p in model.parameters())
    to_empty(model, device=device)
    for p in model.parameters():
        rows = -(-len(p) // 2)
        assert p.to_local().untyped_storage().nbytes() <= 4 * rows * (p.numel() // len(p)), p.shape


def learn(process: DDPProcess, config: MiniGPTConfig, dtype: torch.dtype) -> dict:
    """Weights and moments after five steps of two micro-batches (process 0; others have less)."""
    with torch.device("meta"):
        model = MiniGPT(config)
    with patch.object(MiniGPT, "to_empty", no_whole_model) if process.shards > 1 else nullcontext():
        process.place(model)
    torch.manual_seed(0)
    model.init_weights(process.part)
    optimizer = make_optimizer(model, process.args, process.device)
    wrapped = process.wrap(model)
    for step in range(5):
        for micro_batch in range(2):
            torch.manual_seed(4 * step + 2 * micro_batch + process.rank)
            ids = torch.randint(0, 61, (2, 16))
            autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
            with process.sync_gradients(now=micro_batch == 1):
                with autocast:
                    loss = wrapped(ids, ids)
                loss.backward()
        process.clip_gradients(model.parameters(), 0.5)
        optimizer.step()
        process.clear_gradients(optimizer)
    found = process.gather(model, optimizer)
    found["optimizer"] = found["optimizer"]["state"]
    # What was in CPU memory: weights do not go there, also not those that were gathered.
    found["moved"] = {kind: len(some) for kind, some in model.host_memory.unused.items()}
    del wrapped, process.wrapper
    gc.collect()
    return found


def main() -> int:
    variants = VARIANTS if sys.argv[1] == "all" else [VARIANTS[0], VARIANTS[1], VARIANTS[-2]]
    args = fill_in(build_parser("test", "x.pt").parse_args(TINY))
    ddp, fsdp = DDPProcess(args), FSDPProcess(args)
    ddp.start()
    for dtype in (torch.float32, torch.bfloat16):
        without = None
        for variant in variants:
            config = replace(SHAPE, **variant)
            ddp.buckets_are_final = False
            expected = learn(ddp, config, dtype)
            if config.expanded.group == 1:  # (FSDP gathers block by block)
                found = learn(fsdp, config, dtype)
                if ddp.rank == 0 and not same(expected, found):
                    sys.exit(f"{variant} differs in {dtype}")
            if config.loss_chunks == SHAPE.loss_chunks:  # (others round sums otherwise)
                without = without or expected
                if not all(same(without[part], expected[part]) for part in ("model", "optimizer")):
                    sys.exit(f"{variant} differs from none in {dtype}")
    print(f"rank {ddp.rank}: {2 * len(variants)} variants equal")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    main_and_exit(main)
