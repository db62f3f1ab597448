"""Cards: figures that fit each other, names that mean one card or none, and the documents' tables
of what they train (studies/results/cards.json), which are true."""

import json
import re
from argparse import ArgumentTypeError

import pytest
from harness.runs import ROOT

from planner import CARDS
from planner.cards import canonical_card_name, device_type, match_card
from studies import tables

# What torch.cuda.get_device_name() says -> the card
REPORTED = {
    "NVIDIA GeForce RTX 3060": "RTX 3060 12GB",
    "NVIDIA GeForce RTX 3070": "RTX 3070",
    "NVIDIA GeForce RTX 3080": "RTX 3080 10GB",
    "GeForce RTX 3090": "RTX 3090",  # (drivers of 2020)
    "NVIDIA GeForce RTX 4060": "RTX 4060",
    "NVIDIA GeForce RTX 4060 Ti": "RTX 4060 Ti 16GB",
    "NVIDIA GeForce RTX 4070": "RTX 4070",
    "NVIDIA GeForce RTX 4080": "RTX 4080",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5080": "RTX 5080",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "Tesla V100-SXM2-16GB": "V100 16GB",
    "Tesla V100-SXM2-32GB": "V100 32GB",
    "Tesla T4": "T4",
    "NVIDIA L4": "L4",
    "NVIDIA A10G": "A10G",
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "A100-SXM4-40GB": "A100 40GB",  # (older drivers)
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100-PCIE-40GB": "A100 40GB",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100 PCIe",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
}
# Other forms of those, parts of one, and others
OTHERS = """NVIDIA GH200 480GB|NVIDIA H100 NVL|NVIDIA H200 NVL|NVIDIA GeForce RTX 4090 D|NVIDIA
Tesla V100S-PCIE-32GB|Tesla V100-PCIE-16GB|NVIDIA A10|NVIDIA A100-SXM4-40GB MIG 1g.5gb|NVIDIA A1000
NVIDIA GeForce RTX 4090 Laptop GPU|NVIDIA H1000|NVIDIA A10-24Q|AMD Instinct MI300X|Quadro RTX 6000
NVIDIA GeForce RTX 3060 Ti|NVIDIA GeForce RTX 4070 Ti SUPER|NVIDIA RTX A4000|Tesla P100-PCIE-16GB"""


def test_a_device_is_found_by_its_name():
    """By what CUDA calls it, and its memory; and by a person who types that."""
    assert {*REPORTED.values()} == {n for n, card in CARDS.items() if device_type(card) == "cuda"}
    for name, known in REPORTED.items():
        card = CARDS[known]
        assert match_card(name, card.memory) is match_card(name, round(1.1 * card.memory)) is card
        assert match_card(name, 6 * 2**30) is None  # the same name on a smaller card
        assert canonical_card_name(name) == known
    for name in re.split("[|\n]", OTHERS):
        assert all(match_card(name, card.memory) is None for card in CARDS.values()), name
        with pytest.raises(ArgumentTypeError, match="unknown card"):
            canonical_card_name(name)


def test_a_person_may_be_brief_but_not_unclear():
    brief = {
        "RTX 4090": ("rtx-4090", "rtx4090", "4090", "Rtx_4090"),
        "A100 40GB": ("a100-40gb", "A100_40GB", "NVIDIA A100-SXM4-40GB"),
        "A100": ("a100", "a100-80gb"),
        "T4": ("Tesla T4",),
        "RTX 4060 Ti 16GB": ("4060 ti", "rtx 4060ti", "RTX-4060-Ti-16GB"),
        "M4 Max 40-core": ("m4 max 40 core", "Apple M4 Max 40-core"),
    }
    for card in CARDS:
        for name in (card, card.lower().replace(" ", "-"), *brief.get(card, ())):
            assert canonical_card_name(name) == card, name
    # (There is an RTX 4070, another card; "rtx" says nothing.)
    hints = {"v100": "did you mean V100 16GB or V100 32GB? ", "4070 ti": "", "rtx": "", "": ""}
    for name, near in hints.items():
        with pytest.raises(ArgumentTypeError) as caught:
            canonical_card_name(name)
        said = f"unknown card {name!r}; {near}known: {', '.join(CARDS)}; or this-machine, measured;"
        assert str(caught.value).startswith(said)


# ---- what they train (that docs/planning.md has the table: test_results.py)

ROWS = json.loads((ROOT / "studies/results/cards.json").read_text())["rows"]
REMAKE = "if the change is meant: studies/README.md has the command"


@pytest.mark.slow
def test_a_row_is_found_again():
    found, wanted = tables.card_row(ROWS[0]["card"]), dict(ROWS[0])
    best, shown = found.pop("fastest"), wanted.pop("fastest")
    assert found == wanted, REMAKE
    for name, value in best.items():
        same = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
        assert shown[name] == same, REMAKE
