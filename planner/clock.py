"""Seconds that a step takes on a card, from what its operators do: a roofline.

An operator takes as long as its products at 70 % of the card's peak, or its bytes at 85 % of the
memory's bandwidth, or a launch, whichever is longest; a step takes the sum. No estimate of this
kind knows what a kernel is worth, what Python costs between small ones, or how warm the card is:
it ranks ways to run a step, and tells their ratios better than their milliseconds.

What it leaves out: copies of offload, which run beside (and may not keep up); the averaging of DDP;
FLOPs outside of products.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .work import PRECISIONS, Work

# Of a cache's bytes, how many of memory's take as long. (Estimate: the L2 of an H100 is about twice
# as fast as its memory, that of an RTX 4090 five times.)
CACHE_SHARE = 1 / 3
# The part of a cache in which something is found again: it does not forget strictly in order.
REACHED_CACHE = 0.75


@dataclass(frozen=True)
class Card:
    """What a card can do at most, and the part of it that kernels reach."""

    name: str
    memory: int  # bytes
    flops: tuple[float, float, float]  # FLOP/s of products in float32, bfloat16, float16; dense
    bytes_per_s: float
    cache: int  # bytes of its last-level cache
    launch_s: float = 3e-6  # the shortest operator
    reached_flops: float = 0.7
    reached_bytes: float = 0.85


def seconds(work: Work, card: Card) -> float:
    """The roofline, operator by operator."""
    rates = np.array(card.flops)[work.precision] * card.reached_flops
    moved = work.moved(REACHED_CACHE * card.cache, CACHE_SHARE) / (
        card.reached_bytes * card.bytes_per_s
    )
    each = np.maximum(np.maximum(work.flops / rates, moved), card.launch_s)
    return float(each @ work.times)


def this_machine(device: torch.device | None = None) -> Card:
    """The device as it is now, with the threads it has: measured in two seconds or three.

    What is measured has been reached, so nothing is taken off. float16 and bfloat16 without a unit
    for them are as slow as they are.
    """
    device = device or torch.device("cpu")
    on_gpu = device.type != "cpu"
    n, size = (4096, 2**28) if on_gpu else (512, 2**26)

    def product(dtype: torch.dtype) -> float:
        a, b = torch.randn(2, n, n, device=device).to(dtype)
        return 2 * n**3 / fastest(lambda: a @ b, device)

    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, one = torch.empty_like(source), torch.ones(1, device=device)
    return Card(
        name="this machine",
        memory=memory_of(device),
        flops=tuple(product(dtype) for dtype in PRECISIONS),  # type: ignore[arg-type]
        bytes_per_s=2 * size / fastest(lambda: target.copy_(source), device),
        cache=cache_of(device),
        launch_s=fastest(lambda: one.add_(1), device, times=100),
        reached_flops=1,
        reached_bytes=1,
    )


def fastest(
    run: Callable[[], object], device: torch.device, times: int = 1, budget: float = 0.3
) -> float:
    """Seconds of the fastest of all runs in `budget` seconds, `times` calls each."""
    wait = getattr(torch, device.type).synchronize
    run()  # the first one is another thing
    wait()
    best, start = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - start < budget:
        begin = time.perf_counter()
        for _ in range(times):
            run()
        wait()
        best = min(best, (time.perf_counter() - begin) / times)
    return best


def memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # (Windows)
        return 0


def cache_of(device: torch.device) -> int:
    """Of the last level; 0 if nobody tells: then nothing is found in it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text()  # "32768K"
        return 1024 * int(size.strip().removesuffix("K"))
    except (OSError, ValueError):  # (macOS, Windows)
        return 0
