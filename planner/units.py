"""Write numbers of bytes as text."""

from collections.abc import Sequence


def format_bytes(count: float) -> str:
    """Return a number of bytes as text with a binary unit: 1536 -> "1.5 KiB"."""
    return format_sizes([count])[0]


def format_sizes(sizes: Sequence[float]) -> list[str]:
    """Return numbers of bytes as texts with the same unit, so that a reader can compare them.

    The unit is that of the largest, or a smaller one in which every size but 0 is at least 0.1:
    [5 GiB, 300 MiB] -> ["5.0 GiB", "0.3 GiB"].
    """
    least = min([max(sizes), *(10 * size for size in sizes if size)])
    power = sum(least >= 1024**n for n in (1, 2, 3, 4))
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return [f"{size / 1024**power:,.{min(power, 1)}f} {unit}" for size in sizes]
