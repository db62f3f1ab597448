"""What GPUs can do at most: the denominator of MFU and HFU."""

import re

import torch

from planner import CARDS


def cuda_name(card: str) -> str:
    """What CUDA calls a card of planner/cards.py from Ampere on, its memory left out."""
    chip = re.sub(r" \d+GB$", "", card)
    return f"NVIDIA GeForce {chip}" if re.match(r"RTX \d", chip) else f"NVIDIA {chip}"


# TFLOP/s of the tensor cores in bfloat16 or float16 with float32 sums, dense; by the name that
# CUDA reports. First, what stands in planner/cards.py: its cards whose bfloat16 has a unit of its
# own. Of the others, data centre and workstation cards: NVIDIA's data sheets, which since Ampere
# print twice as much, with 2:4 sparsity; GB200 NVL72 of its 72 GPUs together. GeForce: the
# appendices of the Turing, GA102, Ada and RTX Blackwell whitepapers, "FP16 Tensor with FP32
# Accumulate", which since Ampere is twice the shaders' float32; where a card is younger than its
# whitepaper, that: 4 FLOPs x CUDA cores x boost clock.
TFLOPS = {
    cuda_name(name): card.flops[1] / 1e12
    for name, card in CARDS.items()
    if card.flops[1] > card.flops[0]
} | {
    "NVIDIA A10": 125, "NVIDIA A30": 165, "NVIDIA A40": 149.7, "NVIDIA A800": 312,
    "NVIDIA H100 NVL": 835, "NVIDIA H200 NVL": 835, "NVIDIA GH200": 989,
    "NVIDIA H800": 989, "NVIDIA H800 PCIe": 756, "NVIDIA H20": 148, "NVIDIA GB200": 2500,
    "NVIDIA L40": 181, "NVIDIA L40S": 362,
    "NVIDIA RTX A4000": 76.7, "NVIDIA RTX A5000": 111.1,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA GeForce RTX 3060 Ti": 32.4, "NVIDIA GeForce RTX 3070 Ti": 43.5,
    "NVIDIA GeForce RTX 3080 Ti": 68.2, "NVIDIA GeForce RTX 3090 Ti": 80,
    "NVIDIA GeForce RTX 4070 SUPER": 71,
    "NVIDIA GeForce RTX 4070 Ti": 80.2, "NVIDIA GeForce RTX 4070 Ti SUPER": 88.2,
    "NVIDIA GeForce RTX 4080 SUPER": 104.4, "NVIDIA GeForce RTX 4090 D": 147,
    "NVIDIA GeForce RTX 5060": 38.4, "NVIDIA GeForce RTX 5060 Ti": 47.4,
    "NVIDIA GeForce RTX 5070": 61.7, "NVIDIA GeForce RTX 5070 Ti": 87.9,
}  # fmt: skip
# Before Ampere: float16 only, neither bfloat16 nor TF32.
FLOAT16_TFLOPS = {
    "Tesla T4": CARDS["T4"].flops[2] / 1e12,
    "Tesla V100": CARDS["V100 16GB"].flops[2] / 1e12, "Tesla V100-PCIE": 112, "Tesla V100S": 130,
    "NVIDIA GeForce RTX 2080 Ti": 53.8,
}  # fmt: skip
# What may follow in a name without making it another chip ("-SXM4-40GB", " 80GB HBM3"). "Laptop
# GPU" does make it one, and "MIG 1g.10gb" a part of one.
FORM = r"([ -](SXM\d?|PCIE|PCIe|\d+GB?|HBM\d\w?))*"


def peak_flops(name: str, precision: torch.dtype, tf32: bool = False) -> float | None:
    """FLOP/s of the GPU of that name in matmuls of that precision; None if nobody has noted it.

    `tf32`: float32 runs on the tensor cores, at half of bfloat16's rate.
    """
    rates: dict[str, float] = dict(TFLOPS)
    if precision == torch.float16:
        rates |= FLOAT16_TFLOPS
    elif precision == torch.float32 and not tf32:
        return None
    fitting = [card for card in rates if re.fullmatch(re.escape(card) + FORM, name)]
    if not fitting:
        return None
    rate = 1e12 * rates[max(fitting, key=len)]  # "H100 PCIe" is also an "H100"
    return rate / 2 if precision == torch.float32 else rate
