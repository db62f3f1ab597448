"""Is bfloat16 worth it on this CPU? Times a training step in float32 and in bfloat16.

python -m scripts.cpu_precision

Both precisions take turns in one process, so that a noisy neighbour slows both; what counts is
the ratio of the medians. The trainers' default (`--amp-dtype auto`) should be the faster one.
"""

import sys

if not __package__:  # python scripts/cpu_precision.py: the others lie one folder up
    sys.path[0] += "/.."
    import scripts  # noqa: F401

import json
import platform
import statistics
import time
from dataclasses import asdict

import torch
from tqdm import tqdm

from model import MiniGPT, MiniGPTConfig
from trainer.device import cpu_has_bfloat16
from trainer.flags import OneLineParser, number


def step_seconds(model: MiniGPT, ids: torch.Tensor, dtype: torch.dtype) -> float:
    start = time.perf_counter()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False):
        loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m scripts.cpu_precision", description=__doc__)
    parser.add_argument("--repeats", type=number(int, 1), default=5, metavar="N")
    parser.add_argument("--n-layers", type=number(int, 1), default=6, metavar="N")
    parser.add_argument("--d-model", type=number(int, 1), default=384, metavar="N")
    parser.add_argument("--json", action="store_true", help="print JSON instead of two lines")
    args = parser.parse_args(argv)

    config = MiniGPTConfig(
        vocab_size=8192,
        max_position_embeddings=256,
        n_layers=args.n_layers,
        n_heads=6,
        d_model=args.d_model,
        d_ff=4 * args.d_model,
        dropout=0.0,
    )
    torch.manual_seed(0)
    model, ids = MiniGPT(config), torch.randint(0, 8192, (8, 257))
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    for _ in tqdm(range(args.repeats + 1), unit="round", leave=False, disable=None):
        for dtype, taken in seconds.items():
            taken.append(step_seconds(model, ids, dtype))
    float32, bfloat16 = (statistics.median(taken[1:]) for taken in seconds.values())
    native = cpu_has_bfloat16()
    if args.json:
        result = {
            "config": asdict(config),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
            "native_bfloat16": native,
            "float32_ms": 1000 * float32,
            "bfloat16_ms": 1000 * bfloat16,
            "ratio": bfloat16 / float32,
        }
        print(json.dumps(result, indent=2))
    else:
        print(
            f"float32 {1000 * float32:.0f} ms, bfloat16 {1000 * bfloat16:.0f} ms a step: ratio ",
            end="",
        )
        print(
            f"{bfloat16 / float32:.2f}; the default here is {'bfloat16' if native else 'float32'}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
