"""Seconds that a step takes on a card, from what its operators do: a roofline.

An operator takes as long as its products at 70 % of the card's peak, or its bytes at 85 % of the
memory's bandwidth, or a launch, whichever is longest; a step takes the sum. That ranks ways to run
a step, and tells their ratios better than their milliseconds.

Left out: caches, so all bytes come from memory (which changes what a policy adds by about a point);
copies of offload, which run beside (and may not keep up); the averaging of DDP; all FLOPs outside
of products; Python, which takes most of a small model's step on a CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from .operators import PRECISIONS

LONGEST = 2048  # attention is as fast at any sequence that is longer


@dataclass(frozen=True)
class Card:
    """What a card can do at most, and the part of it that kernels reach."""

    name: str
    memory: int  # bytes
    flops: tuple[float, float, float]  # FLOP/s of products in float32, bfloat16, float16; dense
    bytes_per_s: float
    launch_s: float = 3e-6  # the shortest operator
    flops_efficiency: float = 0.7
    bandwidth_efficiency: float = 0.85
    # FLOP/s of attention and of its backward, by precision as above, as `this_machine` has measured
    # them; None: as products
    attention: tuple[tuple[float, float], ...] | None = None


def op_seconds(work: np.recarray, card: Card) -> np.ndarray:
    """(operators,) How long each operator takes. `work`: an array of `WORK_DTYPE` (timeline.py)."""
    rates = np.array(card.flops)[work.precision] * card.flops_efficiency
    if card.attention is not None:
        measured = np.array(card.attention)[work.precision, (work.attention == 2).astype(int)]
        rates = np.where(work.attention > 0, measured, rates)
    moving = work.bytes / (card.bandwidth_efficiency * card.bytes_per_s)
    return np.maximum(np.maximum(work.flops / rates, moving), card.launch_s)


def this_machine(
    device: torch.device | None = None, seq_len: int = 1024, head_size: int = 64
) -> Card:
    """The device as it is now, with the threads it has: measured in three seconds.

    What is measured has been reached, so nothing is taken off. float16 and bfloat16 without a unit
    for them are as slow as they are. Attention is measured at `seq_len` and `head_size`, as what it
    reaches of a product's FLOP/s depends on them: on a CPU, in bfloat16, its backward a 50th at 64
    tokens of 32 channels, a third at 1,024 of 64.
    """
    device = device or torch.device("cpu")
    card = measure_card(device, seq_len, head_size)
    if device.type == "cuda":  # what that took is neither in use now, nor a run's peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return card


def measure_card(device: torch.device, seq_len: int, head_size: int) -> Card:
    on_gpu = device.type != "cpu"
    n, size = (4096, 2**28) if on_gpu else (1024, 2**26)

    def product(dtype: torch.dtype) -> float:
        side = 128 if dtype == torch.float16 and not on_gpu else n  # (a thousand times slower)
        a, b = torch.randn(2, side, side, device=device).to(dtype)
        return 2 * side**3 / time_of(lambda: a @ b)

    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, one = torch.empty_like(source), torch.ones(1, device=device)
    return Card(
        name="this machine",
        memory=0,  # (the device itself tells how much is free)
        flops=tuple(product(dtype) for dtype in PRECISIONS),  # type: ignore[arg-type]
        bytes_per_s=2 * size / time_of(lambda: target.copy_(source)),
        launch_s=time_of(lambda: one.add_(1)),
        flops_efficiency=1,
        bandwidth_efficiency=1,
        attention=tuple(
            measure_attention(device, dtype, seq_len, head_size) for dtype in PRECISIONS
        ),
    )


def measure_attention(
    device: torch.device, dtype: torch.dtype, seq_len: int, head_size: int
) -> tuple[float, float]:
    """FLOP/s of attention and of its backward."""
    on_gpu = device.type != "cpu"
    T = min(seq_len, 128 if dtype == torch.float16 and not on_gpu else LONGEST)
    n_heads = max(1, 2**16 // T) if on_gpu else max(4, 256 // T) * torch.get_num_threads()
    qkv = torch.randn(1, T, 3, n_heads, head_size, device=device).to(dtype).requires_grad_()
    q, k, v = qkv.transpose(1, 3).unbind(2)  # (1, heads, T, D) each, as the model has them
    attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    out = attend()
    grad = torch.randn_like(out)
    forward = time_of(attend)
    backward = time_of(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    product = n_heads * T * T * head_size  # FLOPs: half of a product is masked
    return 2 * product / forward, 5 * product / backward


def time_of(run: Callable[[], object]) -> float:
    """Seconds of a call: the fastest run in a tenth of a second, GPU's included.

    (Whatever else the machine does hits a long run, and spares a short one: medians of operators
    would not go together.)
    """
    # (Imported here: the import looks for a compiler, and on some machines prints what it misses.)
    from torch.utils.benchmark import Timer

    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=0.1).times)
