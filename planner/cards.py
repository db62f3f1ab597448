"""Cards by name, as their makers describe them."""

from .clock import Card

GIB = 2**30


def nvidia(
    name: str, gib: int, tflops: float, float32: float, gb_per_s: float, cache_mib: float,
    bfloat16: float | None = None,
) -> Card:  # fmt: skip
    """`tflops`: of the tensor cores, float16 with float32 sums, dense (bfloat16's, too)."""
    rates = (float32 * 1e12, (bfloat16 or tflops) * 1e12, tflops * 1e12)
    return Card(name, gib * GIB, rates, gb_per_s * 1e9, int(cache_mib * 2**20))


def apple(name: str, gib: int, tflops: float, gb_per_s: float, cache_mib: float) -> Card:
    """Memory is shared with the processor: the smallest that is sold. All precisions run alike."""
    return Card(name, gib * GIB, (tflops * 1e12,) * 3, gb_per_s * 1e9, int(cache_mib * 2**20))


# Memory, tensor cores and float32 (no TF32), memory bandwidth, L2 cache. Data centre: NVIDIA's data
# sheets of T4, L4, A100, H100 SXM, H200 SXM and HGX B200 (an eighth of it), which since Ampere
# print tensor cores with 2:4 sparsity, too: dense is half of that; A10G: AWS's figures. Their
# caches: whitepapers of Turing, Ampere, Hopper and Ada; B200: as CUDA reports it. GeForce: the
# appendices of NVIDIA's GA102, Ada and RTX Blackwell whitepapers; where a card is younger than its
# whitepaper, 4 (float32: 2) FLOPs x CUDA cores x boost clock.
# Apple: bandwidth and FLOP/s as announced (M1 to M1 Ultra, M2; Newsroom, 2020 to 2022). Of later
# chips it tells the bandwidth only: M2 Pro and Max have the M2's FLOP/s a core; M3 and M4 are rough
# estimates. Caches: the system level's, as others measured or reported them.
CARDS = {
    card.name: card
    for card in (
        nvidia("RTX 3060 12GB", 12, 25.5, 12.7, 360, 3),
        nvidia("RTX 3090", 24, 71, 35.6, 936, 6),
        nvidia("RTX 4060 Ti 16GB", 16, 44.1, 22.1, 288, 32),
        nvidia("RTX 4070", 12, 58.3, 29.1, 504, 36),
        nvidia("RTX 4090", 24, 165.2, 82.6, 1008, 72),
        nvidia("RTX 5090", 32, 209.5, 104.8, 1792, 96),
        # Before Ampere there is no bfloat16: it runs in float32.
        nvidia("T4", 16, 65, 8.1, 320, 4, bfloat16=8.1),
        nvidia("L4", 24, 121, 30.3, 300, 48),
        nvidia("A10G", 24, 70, 35, 600, 6),
        nvidia("A100 40GB", 40, 312, 19.5, 1555, 40),
        nvidia("A100", 80, 312, 19.5, 2039, 40),
        nvidia("H100", 80, 989, 67, 3350, 50),
        nvidia("H200", 141, 989, 67, 4800, 50),
        nvidia("B200", 180, 2250, 75, 7700, 126),
        apple("M1", 8, 2.6, 68.25, 8),
        apple("M1 Pro", 16, 5.2, 200, 24),
        apple("M1 Max", 32, 10.4, 400, 48),
        apple("M1 Ultra", 64, 21, 800, 96),
        apple("M2", 8, 3.6, 100, 8),
        apple("M2 Pro", 16, 6.8, 200, 24),
        apple("M2 Max", 32, 13.6, 400, 48),
        apple("M3 Max", 36, 14, 400, 48),
        apple("M4", 16, 4, 120, 8),
        apple("M4 Pro", 24, 8, 273, 24),
        apple("M4 Max", 36, 16, 546, 48),
    )
}
