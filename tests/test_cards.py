"""Cards: figures that fit each other, and names that mean one card or none."""

import re

import pytest

from planner import CARDS, card
from planner.cards import canonical_card_name, is_before_ampere, match_card
from scripts import plan_memory

# What torch.cuda.get_device_name() says -> the card. (Names of the form "NVIDIA <card>" and "NVIDIA
# GeForce <card>" are drawn from the table.)
REPORTED = {
    "NVIDIA GeForce RTX 3060": "RTX 3060 12GB",
    "NVIDIA GeForce RTX 3060 ": "RTX 3060 8GB",
    "NVIDIA GeForce RTX 3080": "RTX 3080 12GB",
    "GeForce RTX 3090": "RTX 3090",  # (drivers of 2020)
    "NVIDIA GeForce RTX 4060 Ti": "RTX 4060 Ti 8GB",
    "NVIDIA GeForce RTX 5060 Ti": "RTX 5060 Ti 16GB",
    "NVIDIA GeForce RTX 4070 Laptop GPU": "RTX 4070 Laptop",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000 Blackwell Server",
    "Tesla V100-SXM2-16GB": "V100 16GB",
    "Tesla V100-SXM2-32GB": "V100 32GB",
    "Tesla V100-PCIE-16GB": "V100 PCIe 16GB",
    "Tesla P100-PCIE-16GB": "P100 PCIe 16GB",
    "Tesla T4": "T4",
    "A100-SXM4-40GB": "A100 40GB",  # (older drivers)
    "NVIDIA A100-PCIE-40GB": "A100 40GB",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100 PCIe",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA GH200 480GB": "GH200",
    "AMD Instinct MI300X": "MI300X",
}
# Variants that the table does not have, and parts of a card
OTHERS = """NVIDIA RTX PRO 6000D|NVIDIA A100-SXM4-40GB MIG 1g.5gb|NVIDIA A1000|NVIDIA H1000
NVIDIA A10-24Q|NVIDIA GeForce RTX 2070 with Max-Q Design
NVIDIA RTX 5000 Ada Generation Laptop GPU|Tesla K80"""
# Cards of the first places in Steam's survey (2025, 2026), and of the price lists of AWS, Azure and
# Google Cloud
SOLD = """GTX 1050 Ti|GTX 1060|GTX 1650|GTX 1660 SUPER|GTX 1660 Ti|RTX 2060|RTX 2060 SUPER
RTX 2070 SUPER|RTX 2080 Ti|RTX 3050|RTX 3050 Laptop|RTX 3060|RTX 3060 Laptop|RTX 3060 Ti
RTX 3070|RTX 3070 Ti|RTX 3080|RTX 3080 Ti|RTX 4050 Laptop|RTX 4060|RTX 4060 Laptop|RTX 4060 Ti
RTX 4070|RTX 4070 Laptop|RTX 4070 SUPER|RTX 4070 Ti|RTX 4070 Ti SUPER|RTX 4080|RTX 4080 SUPER
RTX 4090|RTX 5060|RTX 5060 Laptop|RTX 5060 Ti|RTX 5070|RTX 5070 Ti|RTX 5080|RTX 5090|P4|P100
V100|T4|T4G|L4|L40S|A10|A10G|A100|A100 40GB|H100|H100 NVL|H200|B200|GB200|B300|GB300|MI300X
RTX PRO 6000 Blackwell Server Edition"""


def test_a_device_is_found_by_its_name():
    """By what torch calls it, and its memory; and by a person who types that."""
    drawn = {f"NVIDIA {'GeForce ' * ('X' in name)}{name}": name for name in CARDS}
    for name, known in (drawn | REPORTED).items():
        this = CARDS[known]
        assert match_card(name, this.memory) is match_card(name, round(1.1 * this.memory)) is this
        assert match_card(name, this.memory // 2) is not this  # a part of it
        sizes = {
            n for n in CARDS if n.startswith(canonical_card_name(name).rstrip("0123456789GB "))
        }
        assert known in sizes
    for name in re.split("[|\n]", OTHERS):
        assert all(match_card(name, each.memory) is None for each in CARDS.values()), name
        with pytest.raises(ValueError, match="unknown card"):
            canonical_card_name(name)
    assert {canonical_card_name(name) for name in re.split("[|\n]", SOLD)} <= {*CARDS}
    assert all(list(each.flops) == sorted(each.flops) for each in CARDS.values())
    kinds = {name: each.device_type for name, each in CARDS.items()}
    assert kinds["MI300X"] == kinds["RTX 4090"] == "cuda" and kinds["M4 Max 40-core"] == "mps"


def test_a_person_may_be_brief_but_not_unclear():
    brief = {
        "RTX 4090": ("rtx-4090", "rtx4090", "4090", "Rtx_4090"),
        "A100 40GB": ("a100-40gb", "A100_40GB", "NVIDIA A100-SXM4-40GB"),
        "A100": ("a100", "a100-80gb"),
        "T4": ("Tesla T4",),
        "RTX 4060 Ti 16GB": ("4060 ti", "rtx 4060ti", "RTX-4060-Ti-16GB"),
        "M4 Max 40-core": ("m4 max 40 core", "Apple M4 Max 40-core"),
    }
    for full in CARDS:
        for name in (full, full.lower().replace(" ", "-"), *brief.get(full, ())):
            assert canonical_card_name(name) == full, name
    near = {"4070 tii": "RTX 4070 Ti or ", "4009": "RTX 4090 or "}
    for name in (*near, "rtx", "", "8800 GTX"):
        with pytest.raises(ValueError) as caught:
            card(name)
        hint = f"; did you mean {near[name]}" if name in near else "; --card list has all names"
        way = "--device cuda --memory-budget 16GiB tells what fits"
        assert str(caught.value).startswith(f"unknown card {name!r}: {way}{hint}")
        assert len(str(caught.value)) < 220
    assert card("rtx 3090") is CARDS["RTX 3090"]


def test_all_names_are_a_table(capsys):
    assert plan_memory.main(["--card", "list"]) == 0
    *lines, _ = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CARDS) and len(set(map(len, lines))) == 1
    assert "T4 14.5 GiB 65.0 TFLOP/s 320 GB/s" in [re.sub(" +", " ", line) for line in lines]


def test_what_is_said_of_a_card():
    """Its other sizes; that it is older than Ampere, as NVIDIA's are with a faster float16."""
    old = {name for name, each in CARDS.items() if is_before_ampere(each)}
    slow = {name for name, each in CARDS.items() if each.flops[1] < each.flops[2]}
    newer = {"RTX 3050 6GB", "RTX 2000 Ada", "A10", "A100", "L4", "H100", "MI100", "M4"}
    assert old >= {"GTX 1080"} | slow - {"MI100"} and not old & newer
    for name, precision, sizes in (
        ("T4", "float16", ""),
        ("A100", "bfloat16", "--card A100-40GB"),
        ("RTX-3060", "bfloat16", "--card RTX-3060-8GB"),
    ):
        typed = plan_memory.parse(f"--card {name} --use-toy-data".split())
        said = plan_memory.describe_target(plan_memory.make_plan(typed), typed.script)
        assert f", {precision}\n" in said and ("Ampere" in said) == (precision == "float16")
        assert re.findall("another size of memory: (.*)", said) == [sizes] * bool(sizes)
