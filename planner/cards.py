"""Cards by name: their memory, FLOP/s, bytes/s and cache, and where each figure is from.

Peaks, as their makers print them, of products without sparsity (which doubles what NVIDIA's data
sheets print since Ampere) and with float32 sums (which a GeForce does at half the rate of float16
sums): what training gets to use. clock.py knows which part of a peak is reached.
"""

import re

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
# Error correction takes a sixteenth of T4, L4, A10G and RTX 6000 Ada (if it is on there),
# the driver its part of all. (Estimates, from their siblings: RTX 3070, 3080, 4060 Ti, 4070, 4080,
# 5080, A10G, the PCIe cards, H200.)
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
    # corrected unless one wants it), RTX 6000 Ada, L4, A100, H100 (SXM and PCIe), H200 SXM and HGX
    # B200; T4's GB/s: 5,001 MHz x 2 x 256 bits. A10G: AWS's figures (69.5 TFLOP/s have been
    # measured; the A10's 125, which many tables give it, are another card's).
    # Caches: as CUDA reports them (A10G: the A10's); H200: an estimate, the 60 MiB that the Hopper
    # whitepaper gives the full chip, all of whose 12 memory controllers it has (H100: 10, and 50).
    # Neither V100 nor T4 has bfloat16: that runs in float32.
    card("V100 16GB", 15.7, 15.7, 15.7, 125, 900, 6),
    card("V100 32GB", 31.7, 15.7, 15.7, 125, 900, 6),
    card("T4", 14.5, 8.1, 8.1, 65, 320, 4),
    card("L4", 22, 30.3, 121, 121, 300, 48),
    card("A10G", 21.9, 35, 70, 70, 600, 6),
    card("RTX A6000", 47.4, 38.7, 154.8, 154.8, 768, 6),
    card("RTX 6000 Ada", 44.4, 91.1, 364.2, 364.2, 960, 96),
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

# Other names of the same cards, those that CUDA reports among them. It does not tell sizes of which
# there are several: such a name is that of the one size above.
SAME = {
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


def plain(name: str) -> str:
    """In small letters, without blanks, hyphens, and brands."""
    return re.sub("^(nvidia|apple)?(geforce|tesla)?(rtx)?", "", re.sub("[-_ ]", "", name.lower()))


NAMED = {plain(name): CARDS[SAME.get(name, name)] for name in (*CARDS, *SAME)}


def find_card(device_name: str, memory: int) -> Card | None:
    """The card that CUDA calls so and that has about as many bytes; None if it is not in the table.

    Laptops' GPUs, parts of one (MIG) and other forms are other cards; so is an RTX 3060 of 8 GB.
    """
    card = NAMED.get(plain(device_name))
    return card if card and 0.85 < memory / card.memory < 1.15 else None


def card_named(name: str) -> Card:
    """The card that a person means: "RTX 4090", "rtx-4090", "4090", "a100_40gb"; or what
    torch.cuda.get_device_name() says.

    Raises ValueError, one line with all names, if there is none or the name leaves open which.
    """
    if plain(name) not in NAMED:
        near = [known for known in CARDS if plain(name) and plain(known).startswith(plain(name))]
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"unknown card {name!r}; {hint}known: {', '.join(CARDS)}")
    return NAMED[plain(name)]
