"""--card: which card's clock tells what is fastest. Named, found, or measured."""

import argparse
import re
from dataclasses import replace

import torch

from planner import Card, this_machine
from planner.cards import card_named, find_card, plain

THIS_MACHINE = "this-machine"


def card_name(text: str) -> str:
    """An argparse type: a card that is known, by its own name; or this machine."""
    if plain(text) == plain(THIS_MACHINE):
        return THIS_MACHINE
    try:
        return card_named(text).name
    except ValueError as error:
        other = "of any other, --device cuda --memory-budget 16GiB tells what fits"
        raise argparse.ArgumentTypeError(f"{error}; or {THIS_MACHINE}, measured; {other}") from None


def clock_card(args: argparse.Namespace, device: torch.device) -> Card | None:
    """The card that --card names; without it a CUDA GPU that is known. None: nobody can tell.

    This machine is measured, at the shape of the model's attention: two or three seconds.
    """
    if args.card == THIS_MACHINE:
        return this_machine(device, args.seq_len, args.d_model // args.n_heads)
    card = None if args.card is None else card_named(args.card)
    if card is None and device.type == "cuda":
        there = torch.cuda.get_device_properties(device)
        card = find_card(there.name, there.total_memory)
    if card and args.tf32:
        float32, bfloat16, float16 = card.flops
        card = replace(card, flops=(max(float32, bfloat16 / 2), bfloat16, float16))
    return card


def device_type(card: Card) -> str:
    """The kind of device that a card of the table is: "cuda", or of Apple's M1 to M4 "mps"."""
    return "mps" if re.match(r"M\d", card.name) else "cuda"
