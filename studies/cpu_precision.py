"""Is bfloat16 worth it on this CPU? Times a training step in float32 and in bfloat16.

python -m studies.cpu_precision

Both precisions take turns in one process, so that a noisy neighbour slows both; what counts is
the ratio of the medians. The trainers' default (`--amp-dtype auto`) should be the faster one.
"""

import sys

if not __package__:  # python studies/cpu_precision.py: the others lie one folder up
    sys.path[0] += "/.."
    import studies  # noqa: F401

import argparse
import statistics
import time
from dataclasses import asdict

import torch
from tqdm import tqdm

from model import MiniGPT, MiniGPTConfig
from studies.common import about, add_json, tool, write_json
from trainer.device import cpu_has_bfloat16
from trainer.flags import OneLineParser, number


def step_seconds(model: MiniGPT, ids: torch.Tensor, dtype: torch.dtype) -> float:
    start = time.perf_counter()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False):
        loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - start


@tool
def main(argv: list[str]) -> None:
    parser = OneLineParser(prog="python -m studies.cpu_precision", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    for flag, usual in {"--repeats": 5, "--n-layers": 6, "--d-model": 384}.items():
        parser.add_argument(flag, type=number(int, 1), default=usual, metavar="N")
    add_json(parser)
    args = parser.parse_args(argv)
    config = MiniGPTConfig(8192, 256, args.n_layers, n_heads=6, d_model=args.d_model,
                           d_ff=4 * args.d_model, dropout=0.0)  # fmt: skip
    torch.manual_seed(0)
    model, ids = MiniGPT(config), torch.randint(0, 8192, (8, 257))
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    for _ in tqdm(range(args.repeats + 1), unit="round", leave=False, disable=None):
        for dtype, taken in seconds.items():
            taken.append(step_seconds(model, ids, dtype))
    float32, bfloat16 = (1000 * statistics.median(taken[1:]) for taken in seconds.values())
    ratio, default = bfloat16 / float32, "bfloat16" if cpu_has_bfloat16() else "float32"
    print(f"float32 {float32:.0f} ms, bfloat16 {bfloat16:.0f} ms a step: ratio {ratio:.2f}; "
          f"the default here is {default}")  # fmt: skip
    found = {"float32_ms": float32, "bfloat16_ms": bfloat16, "ratio": ratio, "default": default}
    told = about("studies.cpu_precision", argv, torch.device("cpu"))
    write_json(args.json, told | {"config": asdict(config)} | found)


if __name__ == "__main__":
    sys.exit(main())
