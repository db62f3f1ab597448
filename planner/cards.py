"""Cards by name: their memory, FLOP/s, bytes/s and cache, and where each figure is from.

Peaks, as their makers print them, of products without sparsity (which doubles what NVIDIA's data
sheets print since Ampere) and with float32 sums (which a GeForce does at half the rate of float16
sums): what training gets to use. clock.py knows which part of a peak is reached.
"""

import re

import torch

from .clock import Card

GIB = 2**30


def nvidia(
    name: str, gib: float, tflops: float, float32: float, gb_per_s: float, cache_mib: float,
    bfloat16: float | None = None,
) -> Card:  # fmt: skip
    """`gib`: what CUDA reports, less than what is sold. `tflops`: of the tensor cores in float16
    (and `bfloat16`, unless given); `float32`: without TF32."""
    rates = (float32 * 1e12, (bfloat16 or tflops) * 1e12, tflops * 1e12)
    return Card(name, int(gib * GIB), rates, gb_per_s * 1e9, int(cache_mib * 2**20))


def apple(name: str, gib: float, tflops: float, gb_per_s: float, cache_mib: float) -> Card:
    """`gib`: what Metal lets a GPU have of the memory. All precisions run alike."""
    return Card(name, int(gib * GIB), (tflops * 1e12,) * 3, gb_per_s * 1e9, int(cache_mib * 2**20))


# The columns: memory in GiB; TFLOP/s of the tensor cores, and of float32; GB/s; L2 cache in MiB.
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
    nvidia("RTX 3060 12GB", 11.6, 25.5, 12.7, 360, 2.25),
    nvidia("RTX 3070", 7.6, 40.6, 20.3, 448, 4),
    nvidia("RTX 3080 10GB", 9.6, 59.5, 29.8, 760, 5),
    nvidia("RTX 3090", 23.5, 71, 35.6, 936, 6),
    nvidia("RTX 4060", 7.6, 30.2, 15.1, 272, 24),
    nvidia("RTX 4060 Ti 16GB", 15.4, 44.1, 22.1, 288, 32),
    nvidia("RTX 4070", 11.6, 58.3, 29.1, 504, 36),
    nvidia("RTX 4080", 15.4, 97.5, 48.7, 716.8, 64),
    nvidia("RTX 4090", 23.4, 165.2, 82.6, 1008, 72),
    nvidia("RTX 5080", 15.4, 112.6, 56.3, 960, 64),
    nvidia("RTX 5090", 31.3, 209.5, 104.8, 1792, 96),
)
DATA_CENTRE = (
    # NVIDIA's data sheets of V100 (SXM2), T4, RTX A6000 (a workstation's; its memory is not error-
    # corrected unless one wants it), L4, A100, H100 (SXM and PCIe), H200 SXM and HGX B200; T4's
    # GB/s: 5,001 MHz x 2 x 256 bits. A10G: AWS's figures (69.5 TFLOP/s have been measured; the
    # A10's 125, which many tables give it, are another card's).
    # Caches: as CUDA reports them (A10G: the A10's); H200: an estimate, the 60 MiB that the Hopper
    # whitepaper gives the full chip, all of whose 12 memory controllers it has (H100: 10, and 50).
    # Neither V100 nor T4 has bfloat16: that runs in float32.
    nvidia("V100 16GB", 15.7, 125, 15.7, 900, 6, bfloat16=15.7),
    nvidia("V100 32GB", 31.7, 125, 15.7, 900, 6, bfloat16=15.7),
    nvidia("T4", 14.5, 65, 8.1, 320, 4, bfloat16=8.1),
    nvidia("L4", 22, 121, 30.3, 300, 48),
    nvidia("A10G", 21.9, 70, 35, 600, 6),
    nvidia("RTX A6000", 47.4, 154.8, 38.7, 768, 6),
    nvidia("A100 40GB", 39.3, 312, 19.5, 1555, 40),  # SXM and PCIe
    nvidia("A100", 79.1, 312, 19.5, 2039, 40),  # 80 GB, SXM
    nvidia("A100 PCIe", 79.1, 312, 19.5, 1935, 40),  # 80 GB
    nvidia("H100", 79.1, 989, 67, 3350, 50),  # SXM
    nvidia("H100 PCIe", 79.1, 756, 51, 2000, 50),
    nvidia("H200", 139.7, 989, 67, 4800, 60),
    nvidia("B200", 178.3, 2250, 75, 7700, 126.5),
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
    apple("M1", 10.6, 2.6, 68.25, 8),
    apple("M1 Pro", 10.6, 5.2, 200, 24),
    apple("M1 Max", 21.3, 10.4, 400, 48),
    apple("M1 Ultra", 48, 21, 800, 96),
    apple("M2", 10.6, 3.6, 100, 8),
    apple("M2 Pro", 10.6, 6.8, 200, 24),
    apple("M2 Max", 21.3, 13.6, 400, 48),
    apple("M3", 10.6, 3.6, 100, 8),
    apple("M3 Pro", 12, 6.4, 150, 12),
    apple("M3 Max 30-core", 27, 10.8, 300, 48),
    apple("M3 Max 40-core", 36, 14.3, 400, 48),
    apple("M4", 10.6, 4, 120, 8),
    apple("M4 Pro", 16, 8, 273, 24),
    apple("M4 Max 32-core", 27, 12.9, 410, 48),
    apple("M4 Max 40-core", 36, 16.1, 546, 48),
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


def find_card(device_name: str, memory: int) -> Card | None:
    """The card that torch.cuda.get_device_name() calls so and that has about as many bytes; None if
    it is not in the table.

    Laptops' GPUs, parts of one (MIG) and other forms are other cards; so is an RTX 3060 of 8 GB.
    """
    name = re.sub("^(NVIDIA )?(GeForce |Tesla )?", "", device_name)
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


def cuda_name(card: str) -> str:
    """What CUDA calls a card from Ampere on, its memory left out."""
    chip = re.sub(r" \d+GB$", "", card)
    return f"NVIDIA GeForce {chip}" if re.match(r"RTX \d", chip) else f"NVIDIA {chip}"


# TFLOP/s of the tensor cores in bfloat16 or float16 with float32 sums, dense; by the name that
# CUDA reports. First, the cards above whose bfloat16 has a unit of its own; then more of them, from
# the same sources (GB200: a 72nd of GB200 NVL72; Turing has a whitepaper, too).
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
