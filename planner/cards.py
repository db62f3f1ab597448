"""Cards by name: memory, FLOP/s and bytes/s, with the source of each figure.

FLOP/s are peaks from the makers, for the matrix products that training can use: without sparsity,
and with float32 sums. (Sparsity doubles the figures that NVIDIA's data sheets print since Ampere.
A GeForce has half the rate with float32 sums that it has with float16 sums.) roofline.py has the
share of a peak that kernels reach.
"""

import argparse
import re
from dataclasses import replace

import torch

from .roofline import Card, this_machine

GIB = 2**30


def card(
    name: str, gib: float, float32: float, bfloat16: float, float16: float, gb_per_s: float
) -> Card:
    """Return a Card. `gib`: memory in GiB; three rates of products in TFLOP/s; `gb_per_s`: GB/s."""
    rates = float32 * 1e12, bfloat16 * 1e12, float16 * 1e12
    return Card(name, int(gib * GIB), rates, gb_per_s * 1e9)


# Columns: memory in GiB; TFLOP/s in float32 (without TF32), bfloat16 and float16; GB/s. Memory is
# the figure that CUDA reports, which is less than the sold one. For Apple it is the memory that
# Metal allows a GPU.
#
# Source of NVIDIA's memory: the smallest figure that people saw on Linux, from
# cudaGetDeviceProperties or from PyTorch when it was out of memory. Error correction takes a
# sixteenth of T4, L4 and A10G, and of RTX 6000 Ada if it is on. The driver takes a part of every
# card. Estimates from similar cards: RTX 3070, 3080, 4060 Ti, 4070, 4080, 5080, A10G, the PCIe
# cards, H200.
GEFORCE = (
    # FLOP/s, GB/s: "FP16 Tensor with FP32 Accumulate" and "FP32" in the appendices of NVIDIA's
    # whitepapers GA102 (3070, 3080, 3090), Ada (4080, 4090) and RTX Blackwell (5080, 5090). RTX
    # 3060, 4060, 4060 Ti and 4070 came after these papers: their FLOP/s are CUDA cores x boost
    # clock, from NVIDIA's product pages, x 2 in float32 and x 4 in bfloat16 and float16.
    card("RTX 3060 12GB", 11.6, 12.7, 25.5, 25.5, 360),
    card("RTX 3070", 7.6, 20.3, 40.6, 40.6, 448),
    card("RTX 3080 10GB", 9.6, 29.8, 59.5, 59.5, 760),
    card("RTX 3090", 23.5, 35.6, 71, 71, 936),
    card("RTX 4060", 7.6, 15.1, 30.2, 30.2, 272),
    card("RTX 4060 Ti 16GB", 15.4, 22.1, 44.1, 44.1, 288),
    card("RTX 4070", 11.6, 29.1, 58.3, 58.3, 504),
    card("RTX 4080", 15.4, 48.7, 97.5, 97.5, 716.8),
    card("RTX 4090", 23.4, 82.6, 165.2, 165.2, 1008),
    card("RTX 5080", 15.4, 56.3, 112.6, 112.6, 960),
    card("RTX 5090", 31.3, 104.8, 209.5, 209.5, 1792),
)
DATA_CENTRE = (
    # NVIDIA's data sheets of V100 (SXM2), T4, RTX A6000 (a workstation card, whose error correction
    # is off by default), RTX 6000 Ada, L4, A100, H100 (SXM and PCIe), H200 SXM and HGX B200. GB/s
    # of T4: 5,001 MHz x 2 x 256 bits. A10G: figures of AWS. (69.5 TFLOP/s were measured. Many
    # tables give it the 125 TFLOP/s of the A10, which is another card.)
    # V100 and T4 have no bfloat16: it runs in float32.
    card("V100 16GB", 15.7, 15.7, 15.7, 125, 900),
    card("V100 32GB", 31.7, 15.7, 15.7, 125, 900),
    card("T4", 14.5, 8.1, 8.1, 65, 320),
    card("L4", 22, 30.3, 121, 121, 300),
    card("A10G", 21.9, 35, 70, 70, 600),
    card("RTX A6000", 47.4, 38.7, 154.8, 154.8, 768),
    card("RTX 6000 Ada", 44.4, 91.1, 364.2, 364.2, 960),
    card("A100 40GB", 39.3, 19.5, 312, 312, 1555),  # SXM and PCIe
    card("A100", 79.1, 19.5, 312, 312, 2039),  # 80 GB, SXM
    card("A100 PCIe", 79.1, 19.5, 312, 312, 1935),  # 80 GB
    card("H100", 79.1, 67, 989, 989, 3350),  # SXM
    card("H100 PCIe", 79.1, 51, 756, 756, 2000),
    card("H200", 139.7, 67, 989, 989, 4800),
    card("B200", 178.3, 75, 2250, 2250, 7700),
)
APPLE = (
    # Each chip is sold with several memory sizes. The table has the smallest from 16 GB on: 16 GB
    # for M1, M2, M3, M4 and Pro chips (M3 Pro 18, M4 Pro 24), 32 for M1 Max and M2 Max, 36 and 48
    # for the other Max chips, 64 for Ultra. A GPU may use two thirds of up to 32 GB, and three
    # quarters of more: recommendedMaxWorkingSetSize, seen with 16, 32 and 96 GB. For other sizes
    # that is an estimate, and macOS 26 allows more. Chips are also sold with fewer GPU cores: the
    # table assumes all cores if the name has no number of cores.
    # GB/s: Apple's announcements and technical specifications (M4 Max's 410: unconfirmed). FLOP/s:
    # announced for M1 to M1 Ultra and M2. M2 Pro and M2 Max: the M2's FLOP/s per core. M3 and M4:
    # estimates, 256 FLOPs x cores x 1.4 and 1.57 GHz; other tables are up to 16 % higher.
    card("M1", 10.6, 2.6, 2.6, 2.6, 68.25),
    card("M1 Pro", 10.6, 5.2, 5.2, 5.2, 200),
    card("M1 Max", 21.3, 10.4, 10.4, 10.4, 400),
    card("M1 Ultra", 48, 21, 21, 21, 800),
    card("M2", 10.6, 3.6, 3.6, 3.6, 100),
    card("M2 Pro", 10.6, 6.8, 6.8, 6.8, 200),
    card("M2 Max", 21.3, 13.6, 13.6, 13.6, 400),
    card("M3", 10.6, 3.6, 3.6, 3.6, 100),
    card("M3 Pro", 12, 6.4, 6.4, 6.4, 150),
    card("M3 Max 30-core", 27, 10.8, 10.8, 10.8, 300),
    card("M3 Max 40-core", 36, 14.3, 14.3, 14.3, 400),
    card("M4", 10.6, 4, 4, 4, 120),
    card("M4 Pro", 16, 8, 8, 8, 273),
    card("M4 Max 32-core", 27, 12.9, 12.9, 12.9, 410),
    card("M4 Max 40-core", 36, 16.1, 16.1, 16.1, 546),
)
CARDS = {card.name: card for card in (*GEFORCE, *DATA_CENTRE, *APPLE)}

# Other names of these cards, among them names that CUDA reports. Such a name may lack the memory
# size, though cards with other sizes exist: then it means the size in the tables above.
ALIASES = {
    "RTX 3060": "RTX 3060 12GB",
    "RTX 3080": "RTX 3080 10GB",
    "RTX 4060 Ti": "RTX 4060 Ti 16GB",
    "RTX 6000 Ada Generation": "RTX 6000 Ada",
    "V100-SXM2-16GB": "V100 16GB",
    "V100-SXM2-32GB": "V100 32GB",
    "A100-SXM4-40GB": "A100 40GB",
    "A100-PCIE-40GB": "A100 40GB",
    "A100-SXM4-80GB": "A100",
    "A100 80GB": "A100",
    "A100 80GB PCIe": "A100 PCIe",
    "H100 80GB HBM3": "H100",
}


def normalize_name(name: str) -> str:
    """Return a card's name in lower case, without blanks, hyphens, underscores and brands."""
    return re.sub("^(nvidia|apple)?(geforce|tesla)?(rtx)?", "", re.sub("[-_ ]", "", name.lower()))


THIS_MACHINE = "this-machine"  # a value of --card: measure the device
CANONICAL_NAMES = {
    normalize_name(name): ALIASES.get(name, name) for name in (*CARDS, *ALIASES, THIS_MACHINE)
}


def card_name(text: str) -> str:
    """Return the name in CARDS of the card that `text` means, or THIS_MACHINE: an argparse type.

    It accepts "RTX 4090", "rtx-4090", "4090", "a100_40gb", and names that
    torch.cuda.get_device_name() returns. Raises ArgumentTypeError if the text means no card, or may
    mean several. The message is one line with all names.
    """
    if normalize_name(text) not in CANONICAL_NAMES:
        similar = [
            name
            for name in CARDS
            if normalize_name(text) and normalize_name(name).startswith(normalize_name(text))
        ]
        hint = f"did you mean {' or '.join(similar)}? " if similar else ""
        raise argparse.ArgumentTypeError(
            f"unknown card {text!r}; {hint}known: {', '.join(CARDS)}; or {THIS_MACHINE}, measured; "
            "of any other, --device cuda --memory-budget 16GiB tells what fits"
        )
    return CANONICAL_NAMES[normalize_name(text)]


def find_card(device_name: str, memory: int) -> Card | None:
    """Return the card with this name in CUDA and about `memory` bytes (15 %); None if unknown.

    A laptop's GPU, a part of a GPU (MIG) and other variants are other cards. So is an RTX 3060 of
    8 GB.
    """
    card = CARDS.get(CANONICAL_NAMES.get(normalize_name(device_name), ""))
    return card if card and 0.85 < memory / card.memory < 1.15 else None


def choose_card(args: argparse.Namespace, device: torch.device) -> Card | None:
    """Return the card to estimate seconds for; None if it is unknown.

    `args`: a trainer's flags. --card names the card; without it, it is this machine's CUDA GPU if
    CARDS has it. With --tf32 the card's float32 products are as fast as TF32: half of the bfloat16
    rate, if that is more. `--card this-machine` measures the device, and attention at the model's
    shape, in two or three seconds.
    """
    if args.card == THIS_MACHINE:
        return this_machine(device, args.seq_len, args.d_model // args.n_heads)
    card = CARDS.get(args.card)
    if card is None and device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        card = find_card(properties.name, properties.total_memory)
    if card and args.tf32:
        float32, bfloat16, float16 = card.flops
        card = replace(card, flops=(max(float32, bfloat16 / 2), bfloat16, float16))
    return card


def device_type(card: Card) -> str:
    """Return the device type of a card in CARDS: "mps" for Apple's M1 to M4, else "cuda"."""
    return "mps" if card.name.startswith("M") else "cuda"
