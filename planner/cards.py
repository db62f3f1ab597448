"""List the cards that --card can name: memory, FLOP/s, bytes/s, and the source of each figure.

Each card here is a GPU, whose FLOP/s are the maker's peak rates of matrix products as training can
use them: without sparsity, and with float32 accumulation. (Since Ampere, NVIDIA's data sheets print
the rates with sparsity, which are twice as high. On a GeForce, float32 accumulation halves the rate
of float16 accumulation.) Kernels reach only a share of a peak, which planner/roofline.py has.
"""

import difflib
import re
from dataclasses import replace

import torch

from .roofline import Card, measure_this_machine

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
# sixteenth of the memory of P4, P40, T4, L4, A10, A10G, A40, L40 and L40S, and of RTX 6000 Ada if
# ECC is on. The driver takes a part of the memory of every card. If no figure was found, the memory
# is an estimate from cards of the same advertised size: 3.7 GiB of 4 GB, 5.6 of 6, 7.6 of 8, 9.6 of
# 10, 11.6 of 12, 15.4 of 16, 23.4 of 24.
CARDS = {
    card.name: card
    for card in (
        # ---- GeForce
        # Sources. GB/s: NVIDIA's product pages, and for laptops the fastest memory that is sold
        # with the GPU. FLOP/s of RTX 3070, 3080, 3090, 4080, 4090, 5080 and 5090: the appendices of
        # NVIDIA's whitepapers GA102, Ada and RTX Blackwell, lines "FP16 Tensor with FP32
        # Accumulate" and "FP32". FLOP/s of all others are computed from the CUDA cores and the
        # boost clock of NVIDIA's product pages. In float32 they are 2 x CUDA cores x boost clock.
        # With tensor cores, float16 is four times as fast on RTX 20; float16 and bfloat16 are twice
        # as fast on RTX 30, 40 and 50. (Whitepapers Turing, GA102, Ada, RTX Blackwell; on TITAN RTX
        # float16 is eight times as fast.) RTX 20 has no hardware for bfloat16, and GTX 10 and 16
        # have no tensor cores, so the table has float32's rate instead of the missing rates.
        make_card("GTX 1050 Ti", 3.9, 2.14, 2.14, 2.14, 112),
        make_card("GTX 1060 6GB", 5.9, 4.37, 4.37, 4.37, 192),
        make_card("GTX 1070", 7.9, 6.46, 6.46, 6.46, 256),
        make_card("GTX 1080", 7.9, 8.87, 8.87, 8.87, 320),
        make_card("GTX 1080 Ti", 10.9, 11.3, 11.3, 11.3, 484),
        make_card("GTX 1650", 3.7, 2.98, 2.98, 2.98, 128),
        make_card("GTX 1650 SUPER", 3.7, 4.42, 4.42, 4.42, 192),
        make_card("GTX 1660", 5.6, 5.03, 5.03, 5.03, 192),
        make_card("GTX 1660 SUPER", 5.6, 5.03, 5.03, 5.03, 336),
        make_card("GTX 1660 Ti", 5.6, 5.44, 5.44, 5.44, 288),
        make_card("RTX 2060", 5.6, 6.45, 6.45, 25.8, 336),
        make_card("RTX 2060 12GB", 11.6, 7.18, 7.18, 28.7, 336),
        make_card("RTX 2060 SUPER", 7.6, 7.18, 7.18, 28.7, 448),
        make_card("RTX 2070", 7.6, 7.46, 7.46, 29.9, 448),
        make_card("RTX 2070 SUPER", 7.6, 9.06, 9.06, 36.2, 448),
        make_card("RTX 2080", 7.6, 10.1, 10.1, 40.3, 448),
        make_card("RTX 2080 SUPER", 7.6, 11.2, 11.2, 44.6, 496),
        make_card("RTX 2080 Ti", 10.6, 13.4, 13.4, 53.8, 616),
        make_card("TITAN RTX", 23.6, 16.3, 16.3, 130.5, 672),
        make_card("RTX 3050 6GB", 5.6, 6.77, 13.5, 13.5, 168),
        make_card("RTX 3050 8GB", 7.6, 9.1, 18.2, 18.2, 224),
        make_card("RTX 3060 8GB", 7.6, 12.7, 25.5, 25.5, 240),
        make_card("RTX 3060 12GB", 11.6, 12.7, 25.5, 25.5, 360),
        make_card("RTX 3060 Ti", 7.6, 16.2, 32.4, 32.4, 448),
        make_card("RTX 3070", 7.6, 20.3, 40.6, 40.6, 448),
        make_card("RTX 3070 Ti", 7.6, 21.7, 43.5, 43.5, 608),
        make_card("RTX 3080 10GB", 9.6, 29.8, 59.5, 59.5, 760),
        make_card("RTX 3080 12GB", 11.6, 30.6, 61.3, 61.3, 912),
        make_card("RTX 3080 Ti", 11.6, 34.1, 68.2, 68.2, 912),
        make_card("RTX 3090", 23.5, 35.6, 71, 71, 936),
        make_card("RTX 3090 Ti", 23.5, 40, 80, 80, 1008),
        make_card("RTX 4060", 7.6, 15.1, 30.2, 30.2, 272),
        make_card("RTX 4060 Ti 8GB", 7.6, 22.1, 44.1, 44.1, 288),
        make_card("RTX 4060 Ti 16GB", 15.4, 22.1, 44.1, 44.1, 288),
        make_card("RTX 4070", 11.6, 29.1, 58.3, 58.3, 504),
        make_card("RTX 4070 SUPER", 11.6, 35.5, 71, 71, 504),
        make_card("RTX 4070 Ti", 11.6, 40.1, 80.2, 80.2, 504),
        make_card("RTX 4070 Ti SUPER", 15.4, 44.1, 88.2, 88.2, 672),
        make_card("RTX 4080", 15.4, 48.7, 97.5, 97.5, 716.8),
        make_card("RTX 4080 SUPER", 15.4, 52.2, 104, 104, 736),
        make_card("RTX 4090 D", 23.4, 73.5, 147, 147, 1008),
        make_card("RTX 4090", 23.4, 82.6, 165.2, 165.2, 1008),
        make_card("RTX 5050", 7.6, 13.2, 26.3, 26.3, 320),
        make_card("RTX 5060", 7.6, 19.2, 38.4, 38.4, 448),
        make_card("RTX 5060 Ti 8GB", 7.6, 23.7, 47.4, 47.4, 448),
        make_card("RTX 5060 Ti 16GB", 15.4, 23.7, 47.4, 47.4, 448),
        make_card("RTX 5070", 11.6, 30.9, 61.7, 61.7, 672),
        make_card("RTX 5070 Ti", 15.4, 43.9, 87.9, 87.9, 896),
        make_card("RTX 5080", 15.4, 56.3, 112.6, 112.6, 960),
        make_card("RTX 5090", 31.3, 104.8, 209.5, 209.5, 1792),
        # ---- GeForce, laptops
        # Sources: as above, with the highest boost clock that NVIDIA's product pages list. A laptop
        # with less power has a lower clock. (Laptops with RTX 20 and GTX 16 have the names of the
        # cards above.)
        make_card("RTX 3050 Laptop", 3.7, 7.13, 14.3, 14.3, 192),
        make_card("RTX 3050 Ti Laptop", 3.7, 8.68, 17.4, 17.4, 192),
        make_card("RTX 3050 6GB Laptop", 5.6, 7.64, 15.3, 15.3, 168),
        make_card("RTX 3060 Laptop", 5.6, 13.1, 26.2, 26.2, 336),
        make_card("RTX 3070 Laptop", 7.6, 16.6, 33.2, 33.2, 448),
        make_card("RTX 3070 Ti Laptop", 7.6, 17.5, 35, 35, 448),
        make_card("RTX 3080 Laptop 8GB", 7.6, 21, 42, 42, 448),
        make_card("RTX 3080 Laptop 16GB", 15.4, 21, 42, 42, 448),
        make_card("RTX 3080 Ti Laptop", 15.4, 23.6, 47.2, 47.2, 512),
        make_card("RTX 4050 Laptop", 5.6, 12.1, 24.3, 24.3, 192),
        make_card("RTX 4060 Laptop", 7.6, 14.6, 29.1, 29.1, 256),
        make_card("RTX 4070 Laptop", 7.6, 20, 40.1, 40.1, 256),
        make_card("RTX 4080 Laptop", 11.6, 33.9, 67.7, 67.7, 432),
        make_card("RTX 4090 Laptop", 15.4, 39.7, 79.4, 79.4, 576),
        make_card("RTX 5050 Laptop", 7.6, 13.6, 27.3, 27.3, 384),
        make_card("RTX 5060 Laptop", 7.6, 16.6, 33.2, 33.2, 384),
        make_card("RTX 5070 Laptop", 7.6, 21.6, 43.3, 43.3, 384),
        make_card("RTX 5070 Ti Laptop", 11.6, 26.1, 52.3, 52.3, 672),
        make_card("RTX 5080 Laptop", 15.4, 35.1, 70.3, 70.3, 896),
        make_card("RTX 5090 Laptop", 23.4, 45.3, 90.7, 90.7, 896),
        # ---- NVIDIA, workstations
        # Source: NVIDIA's data sheets of each card, for Quadro RTX also the whitepaper Turing. From
        # RTX A4000 on they list tensor rates with sparsity: in float16 and bfloat16, or in FP8
        # (Ada) or FP4 (Blackwell). The rate in float16 without sparsity is a half, a quarter and an
        # eighth of these rates. The error correction of RTX A4000 to A6000 is off by default, so
        # ECC takes no memory here.
        make_card("Quadro RTX 5000", 15.4, 11.2, 11.2, 89.2, 448),
        make_card("Quadro RTX 6000", 22.2, 16.3, 16.3, 130.5, 672),
        make_card("Quadro RTX 8000", 44.5, 16.3, 16.3, 130.5, 672),
        make_card("RTX A2000 6GB", 5.6, 8, 32, 32, 288),
        make_card("RTX A2000 12GB", 11.6, 8, 32, 32, 288),
        make_card("RTX A4000", 15.6, 19.2, 76.7, 76.7, 448),
        make_card("RTX A4500", 19.6, 23.7, 94.6, 94.6, 640),
        make_card("RTX A5000", 23.5, 27.8, 111.1, 111.1, 768),
        make_card("RTX A5500", 23.5, 34.1, 136.4, 136.4, 768),
        make_card("RTX A6000", 47.4, 38.7, 154.8, 154.8, 768),
        make_card("RTX 2000 Ada", 15.4, 12, 48, 48, 224),
        make_card("RTX 4000 Ada", 19.5, 26.7, 106.9, 106.9, 360),
        make_card("RTX 4500 Ada", 23.4, 39.6, 158.5, 158.5, 432),
        make_card("RTX 5000 Ada", 31.4, 65.3, 261.1, 261.1, 576),
        make_card("RTX 6000 Ada", 44.4, 91.1, 364.2, 364.2, 960),
        make_card("RTX PRO 6000 Blackwell", 94.9, 125, 500, 500, 1792),
        make_card("RTX PRO 6000 Blackwell Max-Q", 94.9, 110, 439, 439, 1792),
        make_card("RTX PRO 6000 Blackwell Server", 94.9, 120, 480, 480, 1597),
        # ---- NVIDIA, data centres
        # Source: NVIDIA's data sheets of each card, of HGX B200 and HGX B300, GB200 NVL72 and GB300
        # NVL72 (figures for one GPU). The GB/s of T4 are computed: 5,001 MHz x 2 x 256 bits. The
        # figures of A10G come from AWS. (On an A10G, 69.5 TFLOP/s were measured. Many tables say
        # that an A10G has 125 TFLOP/s, but this is the figure of another card, the A10.) P4, P40
        # and P100 have no tensor cores and, like V100 and T4, no hardware for bfloat16: products in
        # bfloat16 run at the rate of float32. On the P cards products in float16 run at this rate,
        # too, because they accumulate in float32. A800, H800: A100 and H100 with slower links. The
        # memory of GB200, B300 and GB300 is an estimate from what the data sheets leave for one
        # GPU.
        make_card("P4", 7.4, 5.5, 5.5, 5.5, 192),
        make_card("P40", 22.3, 11.8, 11.8, 11.8, 346),
        make_card("P100 PCIe 16GB", 15.9, 9.3, 9.3, 9.3, 732),
        make_card("P100 SXM2 16GB", 15.9, 10.6, 10.6, 10.6, 732),
        make_card("V100 16GB", 15.7, 15.7, 15.7, 125, 900),  # SXM2
        make_card("V100 32GB", 31.7, 15.7, 15.7, 125, 900),  # SXM2
        make_card("V100 PCIe 16GB", 15.7, 14, 14, 112, 900),
        make_card("V100 PCIe 32GB", 31.7, 14, 14, 112, 900),
        make_card("V100S", 31.7, 16.4, 16.4, 130, 1134),
        make_card("T4", 14.5, 8.1, 8.1, 65, 320),
        make_card("L4", 22, 30.3, 121, 121, 300),
        make_card("A10", 22, 31.2, 125, 125, 600),
        make_card("A10G", 21.9, 35, 70, 70, 600),
        make_card("A30", 23.5, 10.3, 165, 165, 933),
        make_card("A40", 44.4, 37.4, 149.7, 149.7, 696),
        make_card("L40", 44.4, 90.5, 181, 181, 864),
        make_card("L40S", 44.4, 91.6, 362, 362, 864),
        make_card("A100 40GB", 39.3, 19.5, 312, 312, 1555),  # SXM and PCIe
        make_card("A100", 79.1, 19.5, 312, 312, 2039),  # 80 GB, SXM
        make_card("A100 PCIe", 79.1, 19.5, 312, 312, 1935),  # 80 GB
        make_card("A800", 79.1, 19.5, 312, 312, 2039),  # 80 GB, SXM
        make_card("A800 PCIe", 79.1, 19.5, 312, 312, 1935),  # 80 GB
        make_card("H100", 79.1, 67, 989, 989, 3350),  # SXM
        make_card("H100 PCIe", 79.1, 51, 756, 756, 2000),
        make_card("H100 NVL", 93, 60, 835, 835, 3900),
        make_card("H800", 79.1, 67, 989, 989, 3350),  # SXM
        make_card("H20", 95, 44, 148, 148, 4000),
        make_card("GH200", 94.5, 67, 989, 989, 4000),  # 96 GB
        make_card("H200", 139.7, 67, 989, 989, 4800),
        make_card("H200 NVL", 139.7, 60, 835, 835, 4800),
        make_card("B200", 178.3, 75, 2250, 2250, 7700),
        make_card("GB200", 184, 80, 2500, 2500, 8000),
        make_card("B300", 267, 75, 2250, 2250, 8000),
        make_card("GB300", 267, 80, 2500, 2500, 8000),
        # ---- AMD
        # Source: AMD's data sheets and product pages, lines "Peak Single Precision Matrix (FP32)"
        # and "Peak Half Precision (FP16) / bfloat16 Matrix" without sparsity. MI250 and MI250X are
        # two devices for PyTorch: the figures are those of one of them. The device type is "cuda",
        # as PyTorch calls AMD's GPUs, too.
        make_card("MI100", 31.9, 46.1, 92.3, 184.6, 1228.8),
        make_card("MI210", 63.9, 45.3, 181, 181, 1638.4),
        make_card("MI250", 63.9, 45.3, 181, 181, 1638.4),
        make_card("MI250X", 63.9, 47.9, 191.5, 191.5, 1638.4),
        make_card("MI300X", 191.6, 163.4, 1307.4, 1307.4, 5300),
        make_card("MI325X", 255.6, 163.4, 1307.4, 1307.4, 6000),
        make_card("RX 7900 XT", 19.9, 51.5, 103, 103, 800),
        make_card("RX 7900 XTX", 23.9, 61.4, 122.8, 122.8, 960),
        # ---- Apple
        # Each chip is sold with several memory sizes. The table has the smallest size from 16 GB
        # on: 16 GB for M1, M2, M3, M4, M1 Pro and M2 Pro; 18 GB for M3 Pro; 24 GB for M4 Pro; 32 GB
        # for M1 Max and M2 Max; 36 GB for M3 Max 30-core and M4 Max 32-core; 48 GB for M3 Max
        # 40-core and M4 Max 40-core; 64 GB for M1 Ultra. A GPU may use two thirds of a memory of up
        # to 32 GB, and three quarters of a larger memory. These shares are Metal's
        # recommendedMaxWorkingSetSize, which people reported for 16, 32 and 96 GB. For other sizes
        # the share is an estimate. macOS 26 allows a larger share. Chips are also sold with fewer
        # GPU cores. If a name has no number of cores, the table assumes the chip with all cores.
        #
        # Source of GB/s: Apple's announcements and technical specifications (the 410 GB/s of M4 Max
        # 32-core are unconfirmed). Apple announced the FLOP/s of M1 to M1 Ultra and of M2. The
        # FLOP/s of M2 Pro and M2 Max are the M2's FLOP/s per core times their number of cores. The
        # FLOP/s of M3 and M4 chips are estimates: 256 FLOPs per core and clock cycle, at 1.4 GHz
        # (M3) or 1.57 GHz (M4). Tables of other authors list up to 16 % more FLOP/s for M3 and M4
        # chips.
        *(
            replace(chip, device_type="mps")
            for chip in (
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
        ),
    )
}

# Other name of a card -> its name in CARDS. CUDA reports some of these other names. If a card is
# sold with several memory sizes, its name without a size means the size that is listed here.
ALIASES = {
    "GTX 1060": "GTX 1060 6GB",
    "RTX 3050": "RTX 3050 8GB",
    "RTX 3060": "RTX 3060 12GB",
    "RTX 3080": "RTX 3080 10GB",
    "RTX 4060 Ti": "RTX 4060 Ti 16GB",
    "RTX 5060 Ti": "RTX 5060 Ti 16GB",
    "RTX 3080 Laptop": "RTX 3080 Laptop 8GB",
    "RTX A2000": "RTX A2000 6GB",
    "RTX PRO 6000": "RTX PRO 6000 Blackwell",
    "RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000 Blackwell",
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": "RTX PRO 6000 Blackwell Max-Q",
    "RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000 Blackwell Server",
    "P100": "P100 PCIe 16GB",
    "V100": "V100 16GB",
    "V100-SXM2-16GB": "V100 16GB",
    "V100-SXM2-32GB": "V100 32GB",
    "V100S-PCIe-32GB": "V100S",
    "T4G": "T4",
    "A100-SXM4-40GB": "A100 40GB",
    "A100-PCIE-40GB": "A100 40GB",
    "A100-SXM4-80GB": "A100",
    "A100 80GB": "A100",
    "A100 80GB PCIe": "A100 PCIe",
    "A800-SXM4-80GB": "A800",
    "A800 80GB PCIe": "A800 PCIe",
    "H100 80GB HBM3": "H100",
    "GH200 480GB": "GH200",  # 480 GB is the memory of its CPU
    "B300 SXM6 AC": "B300",
    "MI250X / MI250": "MI250",
    "MI300X VF": "MI300X",
}


def normalize_name(name: str) -> str:
    """Return a card's name in lower case, without blanks, hyphens, underscores and brands."""
    compact = re.sub("[-_ ]|gpu$|generation$", "", name.lower())
    return re.sub("^(nvidia|apple|amd)?(geforce|tesla|instinct|radeon)?(rtx|gtx)?", "", compact)


THIS_MACHINE = "this-machine"  # a value of --card: measure the device
CANONICAL_NAMES = {
    normalize_name(name): ALIASES.get(name, name) for name in (*CARDS, *ALIASES, THIS_MACHINE)
}


def canonical_card_name(text: str) -> str:
    """Return the card's name in CARDS for a text that names a card; or return THIS_MACHINE.

    Valid texts are "RTX 4090", "rtx-4090", "4090", "a100_40gb", and names that
    torch.cuda.get_device_name() returns. Raises ValueError for any other text, with a message that
    tells how to plan for a card that CARDS does not have, and that names up to three similar cards.
    """
    if name := CANONICAL_NAMES.get(normalize_name(text)):
        return name
    near = {normalize_name(name): name for name in CARDS}
    close = difflib.get_close_matches(normalize_name(text), near, cutoff=0.7)
    hint = f"; did you mean {' or '.join(near[name] for name in close)}?" if close else ";"
    raise ValueError(
        f"unknown card {text!r}: --device cuda --memory-budget 16GiB tells what fits{hint} "
        "--card list has all names"
    )


def card(name: str) -> Card:
    """Return the card that `name` names for --card, as in card("rtx 3090"), or raise ValueError as
    `canonical_card_name`. THIS_MACHINE is measured, which takes about three seconds."""
    return CARDS.get(canonical_card_name(name)) or measure_this_machine()


def without_size(name: str) -> str:
    """Return a card's name without the size of its memory: "RTX 3060" for "RTX 3060 12GB"."""
    return re.sub(r" \d+GB$", "", name)


def other_sizes(card: Card) -> list[str]:
    """Return the names of the cards that differ from `card` by the size of their memory."""
    same = without_size(card.name)
    return [name for name in CARDS if without_size(name) == same and name != card.name]


def is_before_ampere(card: Card) -> bool:
    """Return whether NVIDIA made the card before Ampere (compute capability 8.0): it has neither
    bfloat16 in hardware nor a kernel of FlashAttention-2."""
    return re.match(r"GTX|RTX 20[678]|TITAN|Quadro|[PV]\d|T4", card.name) is not None


def match_card(device_name: str, memory: int) -> Card | None:
    """Return the card that CUDA calls `device_name`, or None if CARDS does not have this card.

    Some cards are sold with several memory sizes under one name; `memory` (bytes) tells the size.
    The result is also None if `memory` and the card's memory differ by 15 % or more, as for a part
    of a GPU (MIG), and for a variant of a card that CARDS does not have.
    """
    name = normalize_name(device_name)
    named = (
        card
        for card in CARDS.values()
        if CANONICAL_NAMES.get(name) == card.name or normalize_name(without_size(card.name)) == name
    )
    return next((card for card in named if 0.85 < memory / card.memory < 1.15), None)


def choose_card(
    name: str | None, device: torch.device, tf32: bool, seq_len: int, head_size: int
) -> Card | None:
    """Return the card for which seconds are estimated; None if the card is unknown.

    Args:
        name: value of --card. THIS_MACHINE: `device`, as `measure_this_machine` measures it with
            `seq_len` and `head_size`. None: this machine's CUDA GPU, if CARDS has it.
        tf32: True: the returned card's float32 rate is that of TF32, which is half of its bfloat16
            rate (unless this half is less than the card's float32 rate).
    """
    if name == THIS_MACHINE:
        return measure_this_machine(device, seq_len, head_size)
    card = CARDS.get(name or "")
    if card is None and device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        card = match_card(properties.name, properties.total_memory)
    if card and tf32:
        float32, bfloat16, float16 = card.flops
        card = replace(card, flops=(max(float32, bfloat16 / 2), bfloat16, float16))
    return card
