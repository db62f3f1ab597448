"""List the cards that --card can name: memory, FLOP/s, bytes/s, and the source of each figure.

Each card here is a GPU. FLOP/s are the maker's peak rates of matrix products as training can use
them: without sparsity, and with sums in float32. (Since Ampere, NVIDIA's data sheets print the
rates with sparsity, which are twice as high. With float32 sums a GeForce has half the rate that it
has with float16 sums.) Kernels reach only a share of a peak; planner/roofline.py has this share.
"""

import argparse
import re
from dataclasses import replace

import torch

from .roofline import Card, this_machine

GIB = 2**30


def make_card(
    name: str, gib: float, float32: float, bfloat16: float, float16: float, gb_per_s: float
) -> Card:
    """Return the Card with these figures.

    `gib`: memory in GiB. `float32`, `bfloat16`, `float16`: peak TFLOP/s of matrix products in this
    dtype. `gb_per_s`: peak bandwidth of the memory in GB/s.
    """
    rates = float32 * 1e12, bfloat16 * 1e12, float16 * 1e12
    return Card(name, int(gib * GIB), rates, gb_per_s * 1e9)


# Columns: memory in GiB; TFLOP/s in float32 (without TF32), bfloat16 and float16; GB/s. The memory
# of an NVIDIA card is the figure that CUDA reports, which is less than the advertised figure. The
# memory of an Apple chip is the memory that Metal allows the GPU to use.
#
# Source of NVIDIA's memory: the smallest figure that people reported on Linux, from
# cudaGetDeviceProperties or from PyTorch's out-of-memory error. Error correction (ECC) takes a
# sixteenth of the memory of T4, L4 and A10G, and of RTX 6000 Ada if ECC is on. The driver takes a
# part of the memory of every card. For RTX 3070, 3080, 4060 Ti, 4070, 4080 and 5080, for A10G, the
# PCIe cards and H200, the memory is an estimate from similar cards.
GEFORCE_CARDS = (
    # Source of FLOP/s and GB/s: the appendices of NVIDIA's whitepapers GA102 (3070, 3080, 3090),
    # Ada (4080, 4090) and RTX Blackwell (5080, 5090). The papers list the FLOP/s in the lines "FP16
    # Tensor with FP32 Accumulate" and "FP32". RTX 3060, 4060, 4060 Ti and 4070 are newer than these
    # papers, so their FLOP/s are computed. In float32 they are 2 x CUDA cores x boost clock. In
    # bfloat16 and float16 they are 4 x CUDA cores x boost clock. The number of CUDA cores and the
    # boost clock come from NVIDIA's product pages.
    make_card("RTX 3060 12GB", 11.6, 12.7, 25.5, 25.5, 360),
    make_card("RTX 3070", 7.6, 20.3, 40.6, 40.6, 448),
    make_card("RTX 3080 10GB", 9.6, 29.8, 59.5, 59.5, 760),
    make_card("RTX 3090", 23.5, 35.6, 71, 71, 936),
    make_card("RTX 4060", 7.6, 15.1, 30.2, 30.2, 272),
    make_card("RTX 4060 Ti 16GB", 15.4, 22.1, 44.1, 44.1, 288),
    make_card("RTX 4070", 11.6, 29.1, 58.3, 58.3, 504),
    make_card("RTX 4080", 15.4, 48.7, 97.5, 97.5, 716.8),
    make_card("RTX 4090", 23.4, 82.6, 165.2, 165.2, 1008),
    make_card("RTX 5080", 15.4, 56.3, 112.6, 112.6, 960),
    make_card("RTX 5090", 31.3, 104.8, 209.5, 209.5, 1792),
)
DATA_CENTRE_CARDS = (
    # Source: NVIDIA's data sheets of V100 (SXM2), T4, RTX A6000, RTX 6000 Ada, L4, A100, H100 (SXM
    # and PCIe), H200 SXM and HGX B200. The GB/s of T4 are computed: 5,001 MHz x 2 x 256 bits. The
    # figures of A10G come from AWS. (On an A10G, 69.5 TFLOP/s were measured. Many tables say that
    # an A10G has 125 TFLOP/s, but this is the figure of another card, the A10.) RTX A6000 is a
    # workstation card. Its error correction is off by default, so ECC takes no memory here.
    # V100 and T4 have no hardware for bfloat16: products in bfloat16 run at the rate of float32.
    make_card("V100 16GB", 15.7, 15.7, 15.7, 125, 900),
    make_card("V100 32GB", 31.7, 15.7, 15.7, 125, 900),
    make_card("T4", 14.5, 8.1, 8.1, 65, 320),
    make_card("L4", 22, 30.3, 121, 121, 300),
    make_card("A10G", 21.9, 35, 70, 70, 600),
    make_card("RTX A6000", 47.4, 38.7, 154.8, 154.8, 768),
    make_card("RTX 6000 Ada", 44.4, 91.1, 364.2, 364.2, 960),
    make_card("A100 40GB", 39.3, 19.5, 312, 312, 1555),  # SXM and PCIe
    make_card("A100", 79.1, 19.5, 312, 312, 2039),  # 80 GB, SXM
    make_card("A100 PCIe", 79.1, 19.5, 312, 312, 1935),  # 80 GB
    make_card("H100", 79.1, 67, 989, 989, 3350),  # SXM
    make_card("H100 PCIe", 79.1, 51, 756, 756, 2000),
    make_card("H200", 139.7, 67, 989, 989, 4800),
    make_card("B200", 178.3, 75, 2250, 2250, 7700),
)
APPLE_CARDS = (
    # Each chip is sold with several memory sizes. The table has the smallest size from 16 GB on:
    # 16 GB for M1, M2, M3, M4, M1 Pro and M2 Pro; 18 GB for M3 Pro; 24 GB for M4 Pro; 32 GB for M1
    # Max and M2 Max; 36 GB for M3 Max 30-core and M4 Max 32-core; 48 GB for M3 Max 40-core and M4
    # Max 40-core; 64 GB for M1 Ultra. A GPU may use two thirds of a memory of up to 32 GB, and
    # three quarters of a larger memory. These shares are Metal's recommendedMaxWorkingSetSize,
    # which people reported for 16, 32 and 96 GB. For other sizes the share is an estimate. macOS 26
    # allows a larger share. Chips are also sold with fewer GPU cores. If a name has no number of
    # cores, the table assumes the chip with all cores.
    #
    # Source of GB/s: Apple's announcements and technical specifications (the 410 GB/s of M4 Max
    # 32-core are unconfirmed). Apple announced the FLOP/s of M1 to M1 Ultra and of M2. The FLOP/s
    # of M2 Pro and M2 Max are the M2's FLOP/s per core times their number of cores. The FLOP/s of
    # M3 and M4 chips are estimates: 256 FLOPs per core and clock cycle, at 1.4 GHz (M3) or 1.57 GHz
    # (M4). Tables of other authors list up to 16 % more FLOP/s for M3 and M4 chips.
    make_card("M1", 10.6, 2.6, 2.6, 2.6, 68.25),
    make_card("M1 Pro", 10.6, 5.2, 5.2, 5.2, 200),
    make_card("M1 Max", 21.3, 10.4, 10.4, 10.4, 400),
    make_card("M1 Ultra", 48, 21, 21, 21, 800),
    make_card("M2", 10.6, 3.6, 3.6, 3.6, 100),
    make_card("M2 Pro", 10.6, 6.8, 6.8, 6.8, 200),
    make_card("M2 Max", 21.3, 13.6, 13.6, 13.6, 400),
    make_card("M3", 10.6, 3.6, 3.6, 3.6, 100),
    make_card("M3 Pro", 12, 6.4, 6.4, 6.4, 150),
    make_card("M3 Max 30-core", 27, 10.8, 10.8, 10.8, 300),
    make_card("M3 Max 40-core", 36, 14.3, 14.3, 14.3, 400),
    make_card("M4", 10.6, 4, 4, 4, 120),
    make_card("M4 Pro", 16, 8, 8, 8, 273),
    make_card("M4 Max 32-core", 27, 12.9, 12.9, 12.9, 410),
    make_card("M4 Max 40-core", 36, 16.1, 16.1, 16.1, 546),
)
CARDS = {card.name: card for card in (*GEFORCE_CARDS, *DATA_CENTRE_CARDS, *APPLE_CARDS)}

# Other name of a card -> its name in the tables above. CUDA reports some of these other names. If a
# card is sold with several memory sizes and the tables have only one of them, the card's name
# without a size means this one.
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


def canonical_card_name(text: str) -> str:
    """Return the card's name in CARDS for a text that names a card; or return THIS_MACHINE.

    argparse calls this function for the value of --card. Valid texts are "RTX 4090", "rtx-4090",
    "4090", "a100_40gb", and names that torch.cuda.get_device_name() returns. Raises
    ArgumentTypeError if the text names no card, or may name several cards. The message is one line
    with all names.
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


def match_card(device_name: str, memory: int) -> Card | None:
    """Return the card that CUDA calls `device_name`; None if CARDS does not have this card.

    The result is also None if `memory` (bytes) and the card's memory differ by 15 % or more.
    For a variant of a card the result is None, too: for a laptop's GPU, for a part of a GPU (MIG),
    for an RTX 3060 with 8 GB.
    """
    card = CARDS.get(CANONICAL_NAMES.get(normalize_name(device_name), ""))
    return card if card and 0.85 < memory / card.memory < 1.15 else None


def choose_card(args: argparse.Namespace, device: torch.device) -> Card | None:
    """Return the card for which seconds are estimated; None if the card is unknown.

    `args`: a trainer's flags. --card names the card. Without --card the result is this machine's
    CUDA GPU, if CARDS has it. With --tf32 the float32 rate of the returned card is the rate of
    TF32, which is half of the card's bfloat16 rate. (If this half is less than the card's float32
    rate, the float32 rate does not change.) With `--card this-machine` the function measures the
    device in two or three seconds. It measures attention with the model's sequence length and head
    size.
    """
    if args.card == THIS_MACHINE:
        return this_machine(device, args.seq_len, args.d_model // args.n_heads)
    card = CARDS.get(args.card)
    if card is None and device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        card = match_card(properties.name, properties.total_memory)
    if card and args.tf32:
        float32, bfloat16, float16 = card.flops
        card = replace(card, flops=(max(float32, bfloat16 / 2), bfloat16, float16))
    return card


def device_type(card: Card) -> str:
    """Return the device type of a card in CARDS: "mps" for Apple's M1 to M4, else "cuda"."""
    return "mps" if card.name.startswith("M") else "cuda"
