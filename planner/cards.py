"""Cards by name: their memory, FLOP/s and bytes/s, and where each figure is from.

Peaks, as their makers print them, of products without sparsity (which doubles what NVIDIA's data
sheets print since Ampere) and with float32 sums (which a GeForce does at half the rate of float16
sums): what training gets to use. clock.py knows which part of a peak is reached.
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
    rates = float32 * 1e12, bfloat16 * 1e12, float16 * 1e12
    return Card(name, int(gib * GIB), rates, gb_per_s * 1e9)


# The columns: memory in GiB; TFLOP/s in float32 (without TF32), bfloat16, float16; GB/s. The memory
# is what CUDA reports, less than what is sold; Apple's, what Metal lets a GPU have.
#
# Memory: the least that cudaGetDeviceProperties, or PyTorch out of memory, told people on Linux.
# Error correction takes a sixteenth of T4, L4, A10G and RTX 6000 Ada (if it is on there),
# the driver its part of all. (Estimates, from their siblings: RTX 3070, 3080, 4060 Ti, 4070, 4080,
# 5080, A10G, the PCIe cards, H200.)
GEFORCE = (
    # FLOP/s, GB/s: "FP16 Tensor with FP32 Accumulate" and "FP32" in the appendices of NVIDIA's
    # whitepapers GA102 (3070, 3080, 3090), Ada (4080, 4090) and RTX Blackwell (5080, 5090). 3060,
    # 4060, 4060 Ti, 4070 are younger than those: 4 and 2 FLOPs x CUDA cores x boost clock, of
    # NVIDIA's product pages.
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
    # NVIDIA's data sheets of V100 (SXM2), T4, RTX A6000 (a workstation's; its memory is not error-
    # corrected unless one wants it), RTX 6000 Ada, L4, A100, H100 (SXM and PCIe), H200 SXM and HGX
    # B200; T4's GB/s: 5,001 MHz x 2 x 256 bits. A10G: AWS's figures (69.5 TFLOP/s have been
    # measured; the A10's 125, which many tables give it, are another card's).
    # Neither V100 nor T4 has bfloat16: that runs in float32.
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
    # Memory is bought in several sizes; here those from 16 GB (M1, M2, M3, M4, Pro; M3 Pro 18, M4
    # Pro 24), 32 (M1 Max, M2 Max), 36, 48 (the others Max), 64 (Ultra). Of up to 32 GB two thirds,
    # of more three quarters: recommendedMaxWorkingSetSize, as seen with 16, 32 and 96 GB; the rest
    # are estimates, and macOS 26 allows more. Fewer GPU cores are sold, too: here all, unless said.
    # GB/s: Apple's announcements and technical specifications (M4 Max's 410: unconfirmed). FLOP/s:
    # announced for M1 to M1 Ultra and M2, whose FLOP/s a core M2 Pro and Max have, too. M3 and M4:
    # estimates, 256 FLOPs x cores x 1.4 and 1.57 GHz; tables of others go up to 16 % higher.
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

# Other names of the same cards, those that CUDA reports among them. It does not tell sizes of which
# there are several: such a name is that of the one size above.
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
    """In small letters, without blanks, hyphens, and brands."""
    return re.sub("^(nvidia|apple)?(geforce|tesla)?(rtx)?", "", re.sub("[-_ ]", "", name.lower()))


THIS_MACHINE = "this-machine"  # --card measures it
NAMED = {normalize_name(name): ALIASES.get(name, name) for name in (*CARDS, *ALIASES, THIS_MACHINE)}


def card_name(text: str) -> str:
    """An argparse type: the name in CARDS of the card that a person means, or THIS_MACHINE.

    It takes "RTX 4090", "rtx-4090", "4090", "a100_40gb", and what torch.cuda.get_device_name()
    says. Raises ArgumentTypeError, one line with all names, if there is none or the text leaves
    open which.
    """
    if normalize_name(text) not in NAMED:
        near = [
            known
            for known in CARDS
            if normalize_name(text) and normalize_name(known).startswith(normalize_name(text))
        ]
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise argparse.ArgumentTypeError(
            f"unknown card {text!r}; {hint}known: {', '.join(CARDS)}; or {THIS_MACHINE}, measured; "
            "of any other, --device cuda --memory-budget 16GiB tells what fits"
        )
    return NAMED[normalize_name(text)]


def find_card(device_name: str, memory: int) -> Card | None:
    """The card that CUDA calls so and that has about as many bytes; None if it is not in the table.

    Laptops' GPUs, parts of one (MIG) and other forms are other cards; so is an RTX 3060 of 8 GB.
    """
    card = CARDS.get(NAMED.get(normalize_name(device_name), ""))
    return card if card and 0.85 < memory / card.memory < 1.15 else None


def clock_card(args: argparse.Namespace, device: torch.device) -> Card | None:
    """The card that --card names; without it a CUDA GPU that is known. None: nobody can tell.

    This machine is measured, at the shape of the model's attention: two or three seconds.
    """
    if args.card == THIS_MACHINE:
        return this_machine(device, args.seq_len, args.d_model // args.n_heads)
    card = CARDS.get(args.card)
    if card is None and device.type == "cuda":
        there = torch.cuda.get_device_properties(device)
        card = find_card(there.name, there.total_memory)
    if card and args.tf32:
        float32, bfloat16, float16 = card.flops
        card = replace(card, flops=(max(float32, bfloat16 / 2), bfloat16, float16))
    return card


def device_type(card: Card) -> str:
    """The kind of device that a card of the table is: "cuda", or of Apple's M1 to M4 "mps"."""
    return "mps" if card.name.startswith("M") else "cuda"
