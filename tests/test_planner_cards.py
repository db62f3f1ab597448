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

# What torch.cuda.get_device_name() says, for each of NVIDIA's cards in the table.
REPORTED = {
    "NVIDIA GeForce RTX 3060": "RTX 3060 12GB",
    "NVIDIA GeForce RTX 3070": "RTX 3070",
    "NVIDIA GeForce RTX 3080": "RTX 3080 10GB",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "GeForce RTX 3090": "RTX 3090",  # (drivers of 2020)
    "NVIDIA GeForce RTX 4060": "RTX 4060",
    "NVIDIA GeForce RTX 4060 Ti": "RTX 4060 Ti 16GB",
    "NVIDIA GeForce RTX 4070": "RTX 4070",
    "NVIDIA GeForce RTX 4080": "RTX 4080",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5080": "RTX 5080",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "NVIDIA RTX A6000": "RTX A6000",
    "Tesla V100-SXM2-16GB": "V100 16GB",
    "Tesla V100-SXM2-32GB": "V100 32GB",
    "Tesla T4": "T4",
    "NVIDIA L4": "L4",
    "NVIDIA A10G": "A10G",
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100-PCIE-40GB": "A100 40GB",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100 PCIe",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
}

NO_BFLOAT16 = ("V100 16GB", "V100 32GB", "T4")  # no unit for it


@pytest.mark.parametrize("name", CARDS)
def test_figures_are_of_the_right_size(name):
    card = CARDS[name]
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


@pytest.mark.parametrize("card", GEFORCE, ids=lambda card: card.name)
def test_a_geforces_tensor_cores_add_in_float32(card):
    """At twice the rate of the shaders; with float16 sums it is four times, and sparse eight."""
    assert card.flops[2] == pytest.approx(2 * card.flops[0], rel=0.01)
    assert card.flops[1] == card.flops[2]


def test_tensor_cores_against_shaders():
    ratios = {"V100 16GB": 8, "V100 32GB": 8, "RTX A6000": 4}
    ratios |= {"T4": 8, "L4": 4, "A10G": 2, "H100": 14.8, "H100 PCIe": 14.8, "H200": 14.8}
    ratios |= dict.fromkeys(("A100", "A100 40GB", "A100 PCIe"), 16) | {"B200": 30}
    assert ratios.keys() == {card.name for card in DATA_CENTRE}
    for name, ratio in ratios.items():
        assert CARDS[name].flops[2] / CARDS[name].flops[0] == pytest.approx(ratio, rel=0.01)
    for card in DATA_CENTRE:
        float32, bfloat16, float16 = card.flops
        assert bfloat16 == (float32 if card.name in NO_BFLOAT16 else float16)


@pytest.mark.parametrize(
    "slower, faster",
    [
        ("RTX 3060 12GB", "RTX 4070"),
        ("RTX 4060", "RTX 3070"),
        ("RTX 3070", "RTX 3080 10GB"),
        ("RTX 4080", "RTX 5080"),
        ("V100 32GB", "A100 40GB"),
        ("RTX 4070", "RTX 3090"),
        ("RTX 3090", "RTX 4090"),
        ("RTX 4090", "RTX 5090"),
        ("A100 40GB", "A100 PCIe"),
        ("A100 PCIe", "A100"),
        ("A100", "H100"),
        ("H100 PCIe", "H100"),
        ("H100", "H200"),
        ("H200", "B200"),
        ("M1", "M2"),
        ("M1 Pro", "M1 Max"),
        ("M2 Pro", "M2 Max"),
        ("M3 Max 30-core", "M3 Max 40-core"),
        ("M4 Pro", "M4 Max 32-core"),
        ("M4 Max 32-core", "M4 Max 40-core"),
    ],
)
def test_what_is_sold_as_faster_is(slower, faster):
    left, right = CARDS[slower], CARDS[faster]
    assert all(a <= b for a, b in zip(left.flops, right.flops, strict=True))
    assert left.bytes_per_s < right.bytes_per_s


@pytest.mark.parametrize("name", REPORTED)
def test_a_device_is_found_by_its_name(name):
    card = CARDS[REPORTED[name]]
    assert find_card(name, card.memory) is card
    assert find_card(name, round(1.1 * card.memory)) is card
    assert find_card(name, 6 * 2**30) is None  # the same name on a smaller card


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3060 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4070 Ti",
        "NVIDIA GeForce RTX 4080 SUPER",
        "Tesla V100-PCIE-16GB",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA A10",
        "NVIDIA L40",
        "NVIDIA H100 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "AMD Instinct MI300X",
        "NVIDIA",
        "",
    ],
)
def test_another_device_is_not(name):
    assert all(find_card(name, card.memory) is None for card in CARDS.values())


@pytest.mark.parametrize(
    "name, card",
    [
        *[(name, "RTX 4090") for name in ("rtx-4090", "rtx4090", "4090", "RTX 4090", "Rtx_4090")],
        *[(name, "A100 40GB") for name in ("a100-40gb", "A100_40GB", "NVIDIA A100-SXM4-40GB")],
        *[(name, "A100") for name in ("a100", "A100", "a100-80gb")],
        ("h100", "H100"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("Tesla T4", "T4"),
        ("a6000", "RTX A6000"),
        ("3060 12gb", "RTX 3060 12GB"),
        ("4060-ti-16gb", "RTX 4060 Ti 16GB"),
        ("m1-ultra", "M1 Ultra"),
        ("Apple M4 Pro", "M4 Pro"),
        ("m4 max 40 core", "M4 Max 40-core"),
        *[(name, name) for name in CARDS],
        *[(name.lower().replace(" ", "-"), name) for name in CARDS],
    ],
)
def test_a_person_may_be_brief(name, card):
    assert card_named(name) is CARDS[card]


@pytest.mark.parametrize(
    "name",
    [
        "4070 ti",  # there is an RTX 4070, another card
        "v100",  # of 16 GB or 32?
        "4060 ti",  # of 8 GB or 16?
        "RTX 3060",  # of 8 GB or 12?
        "m4 max",  # 410 or 546 GB/s?
        "rtx 4090 laptop",
        "a10",
        "h100 nvl",
        "100",
        "rtx",
        "this machine",
        "",
    ],
)
def test_but_not_unclear(name):
    with pytest.raises(ValueError) as caught:
        card_named(name)
    message = str(caught.value)
    assert message.startswith(f"unknown card {name!r}; ")
    assert message.endswith(f"known: {', '.join(CARDS)}")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("rtx3060", "did you mean RTX 3060 12GB? "),
        ("m4 max", "did you mean M4 Max 32-core or M4 Max 40-core? "),
        ("voodoo", ""),
        ("rtx", ""),  # that says nothing
    ],
)
def test_what_begins_so_is_named_first(name, near):
    with pytest.raises(ValueError, match=re.escape(f"unknown card {name!r}; {near}known: ")):
        card_named(name)


def test_no_two_names_read_alike():
    names = {*CARDS, *SAME}
    assert len({plain(name) for name in names}) == len(CARDS) + len(SAME)
    assert set(SAME.values()) <= CARDS.keys()


@pytest.mark.parametrize("name", REPORTED)
def test_mfu_is_of_the_same_peak(name):
    name = f"NVIDIA {name}" if name.startswith("GeForce") else name
    card = CARDS[REPORTED[name]]
    _, bfloat16, float16 = card.flops
    assert peak_flops(name, torch.float16) == float16
    none = card.name in NO_BFLOAT16
    assert peak_flops(name, torch.bfloat16) == (None if none else bfloat16)


def test_no_card_is_left_out_here():
    assert set(REPORTED.values()) == {card.name for card in (*GEFORCE, *DATA_CENTRE)}
