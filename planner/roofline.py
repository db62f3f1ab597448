"""Estimate the seconds that a step takes on a card, by a roofline model of the step's operators.

The time of an operator is the longest of three: the time of its matrix products at 70 % of the
card's peak FLOP/s, the time to read and write its bytes at 85 % of the memory's peak bandwidth, and
the time of a kernel launch. The time of a step is the sum over its operators. The estimate serves
to rank recompute policies: it predicts the ratio of two steps' times better than their
milliseconds.

Left out:
- caches: all bytes come from memory (caches would change the cost of a policy by about one
  percentage point)
- offload's copies, which run at the same time as the computation (but may take longer)
- the time of communication (`CommandPlan.exposed_communication_seconds` in scripts/plans.py adds
  it)
- all FLOPs outside of matrix products
- the time of Python code, which is most of a small model's step on a CPU
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from .operators import MATMUL_DTYPES

MAX_MEASURED_SEQ_LEN = 2048  # tokens; longer sequences reach the same FLOP/s in attention


@dataclass(frozen=True)
class Card:
    """A device with its memory: peak rates, and the share of each peak that kernels reach. `flops`
    and `attention` have one entry for each dtype of MATMUL_DTYPES."""

    name: str
    memory: int  # bytes
    flops: tuple[float, float, float]  # peak FLOP/s of dense matrix products
    bytes_per_s: float  # peak bandwidth of the card's memory
    launch_s: float = 3e-6  # seconds of a kernel launch: no operator takes less
    flops_efficiency: float = 0.7
    bandwidth_efficiency: float = 0.85
    # For each dtype: FLOP/s of attention's forward and of its backward, measured by
    # `measure_this_machine`. None: attention reaches the FLOP/s of other matrix products.
    attention: tuple[tuple[float, float], ...] | None = None
    device_type: str = "cuda"  # torch's: "cuda" for AMD's GPUs, too; "mps" for Apple's chips


# Links between the cards of a machine -> bytes/s in each direction. PCIe: 16 lanes (PCI-SIG).
# NVLink: an A100's (NVIDIA's data sheet has 600 GB/s for both directions together).
LINKS = {"pcie3": 15.75e9, "pcie4": 31.5e9, "pcie5": 63e9, "nvlink": 300e9}
LINK_EFFICIENCY = 0.8  # share of a link's bytes/s that collectives are assumed to reach
# Start of a card's name -> its link: the PCIe generation of its data sheet, or NVLink for cards
# without a slot. The first line that matches counts. (Some cards have only 8 lanes.)
LINK_BY_CARD = {
    "GTX|RTX 20[678]|TITAN|Quadro|P4|P100 PCIe|V100 PCIe|V100S|T4": "pcie3",
    r"RTX (50[5-9]|PRO)|H100 (PCIe|NVL)|H200 NVL|MI3": "pcie5",
    r"RTX|[AL]\d\d?[GS]?\b(?!0)|A\d00 PCIe|MI|RX": "pcie4",
    "": "nvlink",
}


def default_link(card: Card) -> str:
    """Return the key of LINKS for the machines in which a card is usually sold."""
    return next(link for name, link in LINK_BY_CARD.items() if re.match(name, card.name))


def seconds_of_each_op(work: np.recarray, card: Card) -> np.ndarray:
    """Return the seconds of one run of each operator: (operators,) float64.

    `work`: (operators,) array of dtype OP_WORK_DTYPE (planner/timeline.py).
    """
    rates = np.array(card.flops)[work.precision] * card.flops_efficiency
    if card.attention is not None:
        measured = np.array(card.attention)[work.precision, (work.attention == 2).astype(int)]
        rates = np.where(work.attention > 0, measured, rates)
    moving = work.bytes / (card.bandwidth_efficiency * card.bytes_per_s)
    return np.maximum(np.maximum(work.flops / rates, moving), card.launch_s)


def measure_this_machine(
    device: torch.device | None = None, seq_len: int = 1024, head_size: int = 64
) -> Card:
    """Measure a device in about three seconds, with its present load and threads; return a Card.

    The rates are measured, so both efficiencies are 1, and a device without hardware for float16 or
    bfloat16 gets the low rates that it reaches. Attention is measured with `seq_len` tokens and
    `head_size` channels, because its FLOP/s depend on both: its backward on a CPU in bfloat16, for
    example, reaches a 50th of the FLOP/s of other matrix products with 64 tokens and 32 channels,
    and a third of them with 1,024 tokens and 64 channels.
    """
    device = device or torch.device("cpu")
    card = measure_card(device, seq_len, head_size)
    if device.type == "cuda":  # keep the measurement's memory out of the run's statistics
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return card


def measure_card(device: torch.device, seq_len: int, head_size: int) -> Card:
    """Measure the speed of a device's matrix products, of copies in its memory and of attention,
    and the time of a kernel launch; return them as a Card."""
    on_gpu = device.type != "cpu"
    n, size = (4096, 2**28) if on_gpu else (1024, 2**26)

    def matmul_flops_per_s(dtype: torch.dtype) -> float:
        # Smaller matrices for float16, because on CPUs its matrix products are 100 to 1,000 times
        # slower than in float32.
        side = 128 if dtype == torch.float16 and not on_gpu else n
        a, b = torch.randn(2, side, side, device=device).to(dtype)
        return 2 * side**3 / measure_seconds(lambda: a @ b)

    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, one = torch.empty_like(source), torch.ones(1, device=device)
    return Card(
        name="this machine",
        memory=0,  # not used: the device itself reports its free memory
        flops=tuple(matmul_flops_per_s(dtype) for dtype in MATMUL_DTYPES),  # type: ignore[arg-type]
        bytes_per_s=2 * size / measure_seconds(lambda: target.copy_(source)),
        launch_s=measure_seconds(lambda: one.add_(1)),
        flops_efficiency=1,
        bandwidth_efficiency=1,
        attention=tuple(
            measure_attention_flops_per_s(device, dtype, seq_len, head_size)
            for dtype in MATMUL_DTYPES
        ),
        device_type=device.type,
    )


def measure_attention_flops_per_s(
    device: torch.device, dtype: torch.dtype, seq_len: int, head_size: int
) -> tuple[float, float]:
    """Return the FLOP/s of causal attention and of its backward: (forward, backward).

    Longer sequences are measured with MAX_MEASURED_SEQ_LEN tokens, and FLOPs in the masked half of
    the products do not count.
    """
    on_gpu = device.type != "cpu"
    T = min(seq_len, 128 if dtype == torch.float16 and not on_gpu else MAX_MEASURED_SEQ_LEN)
    n_heads = max(1, 2**16 // T) if on_gpu else max(4, 256 // T) * torch.get_num_threads()
    qkv = torch.randn(1, T, 3, n_heads, head_size, device=device).to(dtype).requires_grad_()
    q, k, v = qkv.transpose(1, 3).unbind(2)  # each (1, heads, T, D), with strides as in model.py
    attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    out = attend()
    grad = torch.randn_like(out)
    forward = measure_seconds(attend)
    backward = measure_seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    product = n_heads * T * T * head_size  # FLOPs of a product without its masked half
    return 2 * product / forward, 5 * product / backward


def measure_seconds(run: Callable[[], object]) -> float:
    """Return the seconds of one call of `run`: the shortest time that is measured in a tenth of a
    second. On a GPU it includes the GPU's work.

    (By the median, a long and a short operator could not be compared, because other programs on the
    machine slow down all long calls, but only some of the short calls.)
    """
    # Import Timer only here: its import looks for a compiler, and warns on machines without one.
    from torch.utils.benchmark import Timer

    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=0.1).times)
