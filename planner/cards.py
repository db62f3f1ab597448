"""Cards by name: their memory, FLOP/s, bytes/s and cache, and where each figure is from.

Peaks, as their makers print them, of products without sparsity (which doubles what NVIDIA's data
sheets print since Ampere) and with float32 sums (which a GeForce does at half the rate of float16
sums): what training gets to use. clock.py knows which part of a peak is reached.
"""

import re

import torch

from .clock import Card

GIB = 2**30


def card(
    name: str, gib: float, float32: float, bfloat16: float, float16: float, gb_per_s: float,
    cache_mib: float,
) -> Card:  # fmt: skip
    rates = float32 * 1e12, bfloat16 * 1e12, float16 * 1e12
    return Card(name, int(gib * GIB), rates, gb_per_s * 1e9, int(cache_mib * 2**20))


# The columns: memory in GiB; TFLOP/s in float32 (without TF32), bfloat16, float16; GB/s; cache in
# MiB. The memory is what CUDA reports, less than what is sold; Apple's, what Metal lets a GPU have.
#
# Memory: the least that cudaGetDeviceProperties, or PyTorch out of memory, told people on Linux.
# Error correction takes a sixteenth of T4, L4 and A10G, the driver its part of all. (Estimates,
# from their siblings: RTX 3070, 3080, 4060 Ti, 4070, 4080, 5080, A10G, the PCIe cards, H200.)
GEFORCE = (
    # FLOP/s, GB/s: "FP16 Tensor with FP32 Accumulate" and "FP32" in the appendices of NVIDIA's
    # whitepapers GA102 (3070, 3080, 3090), Ada (4080, 4090) and RTX Blackwell (5080, 5090). 3060,
    # 4060, 4060 Ti, 4070 are younger than those: 4 and 2 FLOPs x CUDA cores x boost clock, of
    # NVIDIA's product pages.
    # Caches: as CUDA reports them (3060: 2.25 of the chip's 3 MiB; 3090, 4060 Ti, 5090), the
    # whitepapers (3070, 3080, 4080, 4090, 5080), tables of others (4060, 4070).
    card("RTX 3060 12GB", 11.6, 12.7, 25.5, 25.5, 360, 2.25),
    card("RTX 3070", 7.6, 20.3, 40.6, 40.6, 448, 4),
    card("RTX 3080 10GB", 9.6, 29.8, 59.5, 59.5, 760, 5),
    card("RTX 3090", 23.5, 35.6, 71, 71, 936, 6),
    card("RTX 4060", 7.6, 15.1, 30.2, 30.2, 272, 24),
    card("RTX 4060 Ti 16GB", 15.4, 22.1, 44.1, 44.1, 288, 32),
    card("RTX 4070", 11.6, 29.1, 58.3, 58.3, 504, 36),
    card("RTX 4080", 15.4, 48.7, 97.5, 97.5, 716.8, 64),
    card("RTX 4090", 23.4, 82.6, 165.2, 165.2, 1008, 72),
    card("RTX 5080", 15.4, 56.3, 112.6, 112.6, 960, 64),
    card("RTX 5090", 31.3, 104.8, 209.5, 209.5, 1792, 96),
)
DATA_CENTRE = (
    # NVIDIA's data sheets of V100 (SXM2), T4, RTX A6000 (a workstation's; its memory is not error-
    # corrected unless one wants it), L4, A100, H100 (SXM and PCIe), H200 SXM and HGX B200; T4's
    # GB/s: 5,001 MHz x 2 x 256 bits. A10G: AWS's figures (69.5 TFLOP/s have been measured; the
    # A10's 125, which many tables give it, are another card's).
    # Caches: as CUDA reports them (A10G: the A10's); H200: an estimate, the 60 MiB that the Hopper
    # whitepaper gives the full chip, all of whose 12 memory controllers it has (H100: 10, and 50).
    # Neither V100 nor T4 has bfloat16: that runs in float32.
    card("V100 16GB", 15.7, 15.7, 15.7, 125, 900, 6),
    card("V100 32GB", 31.7, 15.7, 15.7, 125, 900, 6),
    card("T4", 14.5, 8.1, 8.1, 65, 320, 4),
    card("L4", 22, 30.3, 121, 121, 300, 48),
    card("A10G", 21.9, 35, 70, 70, 600, 6),
    card("RTX A6000", 47.4, 38.7, 154.8, 154.8, 768, 6),
    card("A100 40GB", 39.3, 19.5, 312, 312, 1555, 40),  # SXM and PCIe
    card("A100", 79.1, 19.5, 312, 312, 2039, 40),  # 80 GB, SXM
    card("A100 PCIe", 79.1, 19.5, 312, 312, 1935, 40),  # 80 GB
    card("H100", 79.1, 67, 989, 989, 3350, 50),  # SXM
    card("H100 PCIe", 79.1, 51, 756, 756, 2000, 50),
    card("H200", 139.7, 67, 989, 989, 4800, 60),
    card("B200", 178.3, 75, 2250, 2250, 7700, 126.5),
)
APPLE = (
    # Memory is bought in several sizes; here those from 16 GB (M1, M2, M3, M4, Pro; M3 Pro 18, M4
    # Pro 24), 32 (M1 Max, M2 Max), 36, 48 (the others Max), 64 (Ultra). Of up to 32 GB two thirds,
    # of more three quarters: recommendedMaxWorkingSetSize, as seen with 16, 32 and 96 GB; the rest
    # are estimates, and macOS 26 allows more. Fewer GPU cores are sold, too: here all, unless said.
    # GB/s: Apple's announcements and technical specifications (M4 Max's 410: unconfirmed). FLOP/s:
    # announced for M1 to M1 Ultra and M2, whose FLOP/s a core M2 Pro and Max have, too. M3 and M4:
    # estimates, 256 FLOPs x cores x 1.4 and 1.57 GHz; tables of others go up to 16 % higher.
    # Caches, the system level's: as others measured M1 to M1 Ultra; the rest are estimates.
    card("M1", 10.6, 2.6, 2.6, 2.6, 68.25, 8),
    card("M1 Pro", 10.6, 5.2, 5.2, 5.2, 200, 24),
    card("M1 Max", 21.3, 10.4, 10.4, 10.4, 400, 48),
    card("M1 Ultra", 48, 21, 21, 21, 800, 96),
    card("M2", 10.6, 3.6, 3.6, 3.6, 100, 8),
    card("M2 Pro", 10.6, 6.8, 6.8, 6.8, 200, 24),
    card("M2 Max", 21.3, 13.6, 13.6, 13.6, 400, 48),
    card("M3", 10.6, 3.6, 3.6, 3.6, 100, 8),
    card("M3 Pro", 12, 6.4, 6.4, 6.4, 150, 12),
    card("M3 Max 30-core", 27, 10.8, 10.8, 10.8, 300, 48),
    card("M3 Max 40-core", 36, 14.3, 14.3, 14.3, 400, 48),
    card("M4", 10.6, 4, 4, 4, 120, 8),
    card("M4 Pro", 16, 8, 8, 8, 273, 24),
    card("M4 Max 32-core", 27, 12.9, 12.9, 12.9, 410, 48),
    card("M4 Max 40-core", 36, 16.1, 16.1, 16.1, 546, 48),
)
CARDS = {card.name: card for card in (*GEFORCE, *DATA_CENTRE, *APPLE)}

# Other names of the same cards, those that CUDA reports among them.
SAME = {
    "V100-SXM2-16GB": "V100 16GB",
    "V100-SXM2-32GB": "V100 32GB",
    "A100-SXM4-40GB": "A100 40GB",
    "A100-PCIE-40GB": "A100 40GB",
    "A100-SXM4-80GB": "A100",
    "A100 80GB": "A100",
    "A100 80GB PCIe": "A100 PCIe",
    "H100 80GB HBM3": "H100",
}
# What CUDA calls cards of which there are several sizes; a name that a person gives says which.
SIZE_UNTOLD = {
    "RTX 3060": "RTX 3060 12GB",
    "RTX 3080": "RTX 3080 10GB",
    "RTX 4060 Ti": "RTX 4060 Ti 16GB",
}


def chip(device_name: str) -> str:
    """What torch.cuda.get_device_name() tells, without brands."""
    return re.sub("^(NVIDIA )?(GeForce |Tesla )?", "", device_name)


def find_card(device_name: str, memory: int) -> Card | None:
    """The card that CUDA calls so and that has about as many bytes; None if it is not in the table.

    Laptops' GPUs, parts of one (MIG) and other forms are other cards; so is an RTX 3060 of 8 GB.
    """
    name = chip(device_name)
    card = CARDS.get((SAME | SIZE_UNTOLD).get(name, name))
    return card if card and 0.85 < memory / card.memory < 1.15 else None


def card_named(name: str) -> Card:
    """The card that a person means: "RTX 4090", "rtx-4090", "4090", "a100_40gb".

    Raises ValueError, one line with all names, if there is none or the name leaves open which.
    """
    cards = {plain(known): CARDS[SAME.get(known, known)] for known in (*CARDS, *SAME)}
    if plain(name) not in cards:
        near = [known for known in CARDS if plain(name) and plain(known).startswith(plain(name))]
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"unknown card {name!r}; {hint}known: {', '.join(CARDS)}")
    return cards[plain(name)]


def plain(name: str) -> str:
    """In small letters, without blanks, hyphens, and brands."""
    return re.sub("^(nvidia|apple)?(geforce|tesla)?(rtx)?", "", re.sub("[-_ ]", "", name.lower()))


# ---- the denominator of MFU and HFU


# TFLOP/s of the tensor cores in bfloat16 or float16 with float32 sums, dense; by chip. First, the
# cards above whose bfloat16 has a unit of its own; then more of them, from the same sources (GB200:
# a 72nd of GB200 NVL72; Turing has a whitepaper, too).
TFLOPS = {
    re.sub(r" \d+GB$", "", name): card.flops[1] / 1e12
    for name, card in CARDS.items()
    if card.flops[1] > card.flops[0]
} | {
    "A10": 125, "A30": 165, "A40": 149.7, "A800": 312, "L40": 181, "L40S": 362, "GB200": 2500,
    "H100 NVL": 835, "H200 NVL": 835, "GH200": 989, "H800": 989, "H800 PCIe": 756, "H20": 148,
    "RTX A4000": 76.7, "RTX A5000": 111.1, "RTX 6000 Ada Generation": 364.2,
    "RTX 3060 Ti": 32.4, "RTX 3070 Ti": 43.5, "RTX 3080 Ti": 68.2, "RTX 3090 Ti": 80,
    "RTX 4070 SUPER": 71, "RTX 4070 Ti": 80.2, "RTX 4070 Ti SUPER": 88.2, "RTX 4080 SUPER": 104.4,
    "RTX 4090 D": 147, "RTX 5060": 38.4, "RTX 5060 Ti": 47.4, "RTX 5070": 61.7, "RTX 5070 Ti": 87.9,
}  # fmt: skip
# Before Ampere: float16 only, neither bfloat16 nor TF32.
FLOAT16_TFLOPS = {
    "T4": CARDS["T4"].flops[2] / 1e12, "V100": CARDS["V100 16GB"].flops[2] / 1e12,
    "V100-PCIE": 112, "V100S": 130, "RTX 2080 Ti": 53.8,
}  # fmt: skip
# What may follow in a name without making it another chip ("-SXM4-40GB", " 80GB HBM3"). "Laptop
# GPU" does make it one, and "MIG 1g.10gb" a part of one.
FORM = r"([ -](SXM\d?|PCIE|PCIe|\d+GB?|HBM\d\w?))*"


def peak_flops(name: str, precision: torch.dtype, tf32: bool = False) -> float | None:
    """FLOP/s of the GPU of that name in matmuls of that precision; None if nobody has noted it.

    `tf32`: float32 runs on the tensor cores, at half of bfloat16's rate.
    """
    if precision == torch.float32 and not tf32:
        return None
    rates = TFLOPS | FLOAT16_TFLOPS if precision == torch.float16 else TFLOPS
    fitting = [known for known in rates if re.fullmatch(re.escape(known) + FORM, chip(name))]
    if not fitting:
        return None
    rate = 1e12 * rates[max(fitting, key=len)]  # "H100 PCIe" is also an "H100"
    return rate / 2 if precision == torch.float32 else rate
