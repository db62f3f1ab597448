"""What the planner says of Muon and of moments in bfloat16: bytes a parameter, time, words. (That
it is right about their steps: test_memory.py.)"""

import pytest
import torch
from cases.shapes import WIDE
from harness.planned import planner
from test_memory import MODES, maker

from planner.cards import card_named
from planner.formulas import count_parameters, state_bytes
from scripts import plan_memory
from trainer.flags import build_parser, fill_in, model_config


def test_bytes_a_parameter_of_a_deep_model():
    """12 of Muon's matrices, 16 of AdamW's; 10 and 12 with moments of half the size."""
    args = fill_in(build_parser("test", "x.pt").parse_args(["--model=gpt2-xl"]))
    config = model_config(args, 50257)
    P, of_blocks = count_parameters(config), 48 * 12 * 1600**2
    for mode, matrix, other in zip(
        [("adamw", "float32"), *MODES], (16, 12, 12, 10), (16, 12, 16, 12), strict=True
    ):
        expected = matrix * of_blocks + other * (P - of_blocks)
        found = state_bytes(config, mode[0], getattr(torch, mode[1]))
        assert 0 < found - expected < 2400


def test_products_of_the_optimizer_take_time():
    """Five times three products of each matrix, the smaller side first (A <= B)."""
    card = card_named("RTX-4090")
    plain, muon = (
        planner(WIDE, "bf16", make_optimizer=maker(mode, "bf16"), device_type="cuda").step(1)
        for mode in (("adamw", "float32"), ("muon", "float32"))
    )
    C, F = WIDE.d_model, WIDE.d_ff
    sides = [(C, 3 * C), (C, C), (C, F), (C, F)]
    flops = sum(5 * (4 * A * A * B + 2 * A**3) for A, B in sides) * WIDE.n_layers
    assert muon.work.flops.sum() - plain.work.flops.sum() == flops
    assert muon.seconds(card) > plain.seconds(card)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (MODES[0], "AdamW in bfloat16"),
        (MODES[1], "Muon and AdamW"),
        (MODES[2], "Muon and AdamW in bfloat16"),
    ],
    ids=str,
)
def test_plan_memory_says_what_is_stored(mode, words):
    flags = "--n-layers 1 --d-model 64 --vocab-size 97 --card RTX-4090 --memory-budget 8GiB"
    argv = [*flags.split(), f"--optimizer={mode[0]}", f"--moments-dtype={mode[1]}"]
    asked = plan_memory.aim(argv)
    said = plan_memory.describe_target(asked)
    assert f"weights, gradients, {words} (1" in said and "bytes a parameter)" in said
    command = plan_memory.command_line(argv, asked.args, [])
    assert f"--optimizer={mode[0]}" in command and f"--moments-dtype={mode[1]}" in command
