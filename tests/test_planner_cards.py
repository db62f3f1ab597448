"""The table of cards: figures that fit each other, and names that mean one card or none."""

import re

import pytest
import torch

from planner import CARDS
from planner.cards import (
    APPLE,
    DATA_CENTRE,
    GEFORCE,
    GIB,
    SAME,
    card_named,
    find_card,
    peak_flops,
    plain,
)

# What torch.cuda.get_device_name() says where that is not "NVIDIA" or "NVIDIA GeForce" and the
# card's own name.
REPORTED = {
    "NVIDIA GeForce RTX 3060": "RTX 3060 12GB",
    "NVIDIA GeForce RTX 3080": "RTX 3080 10GB",
    "GeForce RTX 3090": "RTX 3090",  # (drivers of 2020)
    "NVIDIA GeForce RTX 4060 Ti": "RTX 4060 Ti 16GB",
    "Tesla V100-SXM2-16GB": "V100 16GB",
    "Tesla V100-SXM2-32GB": "V100 32GB",
    "Tesla T4": "T4",
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100-PCIE-40GB": "A100 40GB",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100 PCIe",
    "NVIDIA H100 80GB HBM3": "H100",
}
for _card in (*GEFORCE, *DATA_CENTRE):
    if _card.name not in REPORTED.values():
        brand = "NVIDIA GeForce" if _card in GEFORCE else "NVIDIA"
        REPORTED[f"{brand} {_card.name}"] = _card.name


def test_figures_are_of_the_right_size():
    for name, card in CARDS.items():
        assert card.name == name
        float32, bfloat16, float16 = card.flops
        assert 2e12 < float32 <= bfloat16 <= float16 < 3e15
        assert 60e9 < card.bytes_per_s < 10e12
        assert 7 * GIB < card.memory < 256 * GIB
        assert 2 * 2**20 < card.cache <= 128 * 2**20
        # FLOPs for each byte: tensor cores want some hundred, a GPU without them some ten.
        low, high = (20, 50) if card in APPLE else (70, 410)
        assert low < float16 / card.bytes_per_s < high


def test_memory_is_what_is_left_of_what_is_sold():
    sold = {"RTX 3090": 24, "RTX 4090": 24, "RTX 5090": 32, "T4": 16, "L4": 24, "A10G": 24}
    sold |= {"A100": 80, "A100 PCIe": 80, "H100": 80, "H100 PCIe": 80, "H200": 141, "B200": 180}
    sold |= {"RTX 3070": 8, "RTX 4060": 8, "RTX 4080": 16, "RTX 5080": 16, "RTX A6000": 48}
    sold |= {name: int(gb[1]) for name in CARDS if (gb := re.search(r" (\d+)GB$", name))}
    assert sold.keys() | {"RTX 4070"} == {card.name for card in (*GEFORCE, *DATA_CENTRE)}
    for name, gb in sold.items():
        assert 0.9 * gb * GIB < CARDS[name].memory < gb * GIB


def test_tensor_cores_against_shaders():
    """A GeForce's add in float32: at twice the rate of the shaders; with float16 sums it would be
    four times, and sparse eight."""
    ratios = dict.fromkeys((card.name for card in GEFORCE), 2)
    ratios |= {"V100 16GB": 8, "V100 32GB": 8, "RTX A6000": 4, "T4": 8, "L4": 4, "A10G": 2}
    ratios |= dict.fromkeys(("A100", "A100 40GB", "A100 PCIe"), 16) | {"B200": 30}
    ratios |= {"H100": 14.8, "H100 PCIe": 14.8, "H200": 14.8}
    assert ratios.keys() == {card.name for card in (*GEFORCE, *DATA_CENTRE)}
    for name, ratio in ratios.items():
        float32, bfloat16, float16 = CARDS[name].flops
        assert float16 / float32 == pytest.approx(ratio, rel=0.01)
        has_none = name in ("V100 16GB", "V100 32GB", "T4")  # no unit for bfloat16
        assert bfloat16 == (float32 if has_none else float16)


@pytest.mark.parametrize(
    "names",
    [
        ("RTX 3060 12GB", "RTX 4070", "RTX 3090", "RTX 4090", "RTX 5090"),
        ("RTX 4060", "RTX 3070", "RTX 3080 10GB"),
        ("V100 32GB", "A100 40GB", "A100 PCIe", "A100", "H100", "H200", "B200"),
        ("RTX 4080", "RTX 5080"),
        ("H100 PCIe", "H100"),
        ("M1", "M2"),
        ("M1 Pro", "M1 Max"),
        ("M2 Pro", "M2 Max"),
        ("M3 Max 30-core", "M3 Max 40-core"),
        ("M4 Pro", "M4 Max 32-core", "M4 Max 40-core"),
    ],
    ids=" < ".join,
)
def test_what_is_sold_as_faster_is(names):
    for slower, faster in zip(names, names[1:], strict=False):
        left, right = CARDS[slower], CARDS[faster]
        assert all(a <= b for a, b in zip(left.flops, right.flops, strict=True))
        assert left.bytes_per_s < right.bytes_per_s


def test_a_device_is_found_by_its_name():
    for name, known in REPORTED.items():
        card = CARDS[known]
        assert find_card(name, card.memory) is card
        assert find_card(name, round(1.1 * card.memory)) is card
        assert find_card(name, 6 * 2**30) is None  # the same name on a smaller card
        float32, bfloat16, float16 = card.flops  # and MFU is of the same peak
        full = f"NVIDIA {name}" if name.startswith("GeForce") else name
        assert peak_flops(full, torch.float16) == float16
        assert peak_flops(full, torch.bfloat16) == (bfloat16 if bfloat16 > float32 else None)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4070 Ti",
        "Tesla V100-PCIE-16GB",
        "NVIDIA A10",
        "NVIDIA H100 NVL",
        "AMD Instinct MI300X",
        "NVIDIA",
        "",
    ],
)
def test_another_device_is_not(name):
    assert all(find_card(name, card.memory) is None for card in CARDS.values())


def test_a_person_may_be_brief():
    brief = {
        "RTX 4090": ("rtx-4090", "rtx4090", "4090", "Rtx_4090"),
        "A100 40GB": ("a100-40gb", "A100_40GB", "NVIDIA A100-SXM4-40GB"),
        "A100": ("a100", "a100-80gb"),
        "RTX 5090": ("NVIDIA GeForce RTX 5090",),
        "T4": ("Tesla T4",),
        "RTX A6000": ("a6000",),
        "RTX 4060 Ti 16GB": ("4060-ti-16gb",),
        "M4 Pro": ("Apple M4 Pro",),
        "M4 Max 40-core": ("m4 max 40 core",),
    }
    for card in CARDS:
        for name in (card, card.lower().replace(" ", "-"), *brief.get(card, ())):
            assert card_named(name) is CARDS[card], name


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("4070 ti", ""),  # there is an RTX 4070, another card
        ("v100", "did you mean V100 16GB or V100 32GB? "),
        ("RTX 3060", "did you mean RTX 3060 12GB? "),
        ("m4 max", "did you mean M4 Max 32-core or M4 Max 40-core? "),
        ("rtx 4090 laptop", ""),
        ("a10", None),  # (A100 and A10G begin so)
        ("rtx", ""),  # that says nothing
        ("voodoo", ""),
        ("", ""),
    ],
)
def test_but_not_unclear(name, near):
    with pytest.raises(ValueError) as caught:
        card_named(name)
    message = str(caught.value)
    assert message.startswith(f"unknown card {name!r}; {near or ''}")
    assert message.endswith(f"known: {', '.join(CARDS)}")
    assert near is None or message.count("did you mean") == bool(near)


def test_no_two_names_read_alike():
    names = {*CARDS, *SAME}
    assert len({plain(name) for name in names}) == len(CARDS) + len(SAME)
    assert set(SAME.values()) <= CARDS.keys()
