"""Estimate the seconds of a step on a card from its operators: a roofline model.

An operator takes the longest of three times: its matrix products at 70 % of the card's peak, its
bytes at 85 % of the memory's bandwidth, and one kernel launch. A step takes the sum over its
operators. This ranks recompute policies. It predicts the ratio of two steps better than their
milliseconds.

Left out:
- caches: all bytes come from memory (the cost of a policy changes by about one percentage point)
- offload's copies, which run beside the computation (but may be slower than it)
- DDP's averaging of gradients
- all FLOPs outside of matrix products
- Python, which takes most of a small model's step on a CPU
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from .operators import PRECISIONS

LONGEST = 2048  # tokens: with longer sequences attention reaches the same FLOP/s


@dataclass(frozen=True)
class Card:
    """Peak rates of a card, and the share of them that kernels reach."""

    name: str
    memory: int  # bytes
    flops: tuple[float, float, float]  # peak FLOP/s of dense products, by PRECISIONS
    bytes_per_s: float  # peak bandwidth of its memory
    launch_s: float = 3e-6  # seconds of the shortest operator
    flops_efficiency: float = 0.7
    bandwidth_efficiency: float = 0.85
    # Pairs by PRECISIONS: measured FLOP/s of attention and of its backward (`this_machine`). None:
    # attention is as fast as other products.
    attention: tuple[tuple[float, float], ...] | None = None


def seconds_per_op(work: np.recarray, card: Card) -> np.ndarray:
    """Return the seconds of each operator, (operators,) float64, if it runs once.

    `work`: (operators,) an array of WORK_DTYPE (timeline.py).
    """
    rates = np.array(card.flops)[work.precision] * card.flops_efficiency
    if card.attention is not None:
        measured = np.array(card.attention)[work.precision, (work.attention == 2).astype(int)]
        rates = np.where(work.attention > 0, measured, rates)
    moving = work.bytes / (card.bandwidth_efficiency * card.bytes_per_s)
    return np.maximum(np.maximum(work.flops / rates, moving), card.launch_s)


def this_machine(
    device: torch.device | None = None, seq_len: int = 1024, head_size: int = 64
) -> Card:
    """Measure a device in about three seconds, with its present load and threads; return a Card.

    The rates are measured, so both efficiencies are 1. A device without hardware for float16 or
    bfloat16 gets the slow rates that it has. Attention is measured with `seq_len` tokens and
    `head_size` channels, because its share of a product's FLOP/s depends on both. On a CPU in
    bfloat16 its backward reaches a 50th with 64 tokens of 32 channels, a third with 1,024 of 64.
    """
    device = device or torch.device("cpu")
    card = measure_card(device, seq_len, head_size)
    if device.type == "cuda":  # keep this memory out of the run's statistics
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return card


def measure_card(device: torch.device, seq_len: int, head_size: int) -> Card:
    """Measure products, copies, launches and attention on a device; return them as a Card."""
    on_gpu = device.type != "cpu"
    n, size = (4096, 2**28) if on_gpu else (1024, 2**26)

    def product(dtype: torch.dtype) -> float:
        side = 128 if dtype == torch.float16 and not on_gpu else n  # 1000 times slower
        a, b = torch.randn(2, side, side, device=device).to(dtype)
        return 2 * side**3 / time_of(lambda: a @ b)

    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, one = torch.empty_like(source), torch.ones(1, device=device)
    return Card(
        name="this machine",
        memory=0,  # unused: the device reports its free memory
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
    """Return the FLOP/s of causal attention and of its backward: (forward, backward).

    At most LONGEST tokens. The masked half of the products does not count.
    """
    on_gpu = device.type != "cpu"
    T = min(seq_len, 128 if dtype == torch.float16 and not on_gpu else LONGEST)
    n_heads = max(1, 2**16 // T) if on_gpu else max(4, 256 // T) * torch.get_num_threads()
    qkv = torch.randn(1, T, 3, n_heads, head_size, device=device).to(dtype).requires_grad_()
    q, k, v = qkv.transpose(1, 3).unbind(2)  # (1, heads, T, D) each, with the model's strides
    attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    out = attend()
    grad = torch.randn_like(out)
    forward = time_of(attend)
    backward = time_of(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    product = n_heads * T * T * head_size  # FLOPs of a product without its masked half
    return 2 * product / forward, 5 * product / backward


def time_of(run: Callable[[], object]) -> float:
    """Return the seconds of one call of `run`: the fastest of all calls in a tenth of a second.

    On a GPU that includes the GPU's work. (A median would not compare operators: other work on the
    machine slows down long calls, but misses many short ones.)
    """
    # Import it here: the import looks for a compiler, and on some machines warns that it has none.
    from torch.utils.benchmark import Timer

    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=0.1).times)
