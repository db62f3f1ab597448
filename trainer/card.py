"""--card: which card's clock tells what is fastest. Named, found, or measured."""

import argparse
import re

import torch

from planner import Card, this_machine
from planner.cards import card_named, find_card

THIS_MACHINE = "this-machine"


def card_name(text: str) -> str:
    """An argparse type: a card that is known, by its own name; or this machine."""
    if text == THIS_MACHINE:
        return text
    try:
        return card_named(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; or {THIS_MACHINE}, measured") from None


def clock_card(name: str | None, device: torch.device) -> Card | None:
    """The card that --card names; without it a CUDA GPU that is known. None: nobody can tell.

    Measuring this machine takes two or three seconds.
    """
    if name == THIS_MACHINE:
        return this_machine(device)
    if name is not None:
        return card_named(name)
    if device.type != "cuda":
        return None
    there = torch.cuda.get_device_properties(device)
    return find_card(there.name, there.total_memory)


def device_type(card: Card) -> str:
    """The kind of device that a card of the table is: "cuda", or of Apple's M1 to M4 "mps"."""
    return "mps" if re.match(r"M\d", card.name) else "cuda"
