"""Whose clock tells what is fastest: in plan_memory's recommendation, and in a trainer's `auto`."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_knobs import SHAPE, parse
from test_torchrun import Other

import trainer.card
import trainer.plan
from model import MiniGPTConfig
from planner import CARDS, Card, Planner
from scripts.plan_table import Row, recommend
from trainer.card import clock_card
from trainer.flags import changed, model_config
from trainer.plan import Question
from trainer.process import OneProcess
from trainer.room import Room

GIB = 2**30
H100 = CARDS["H100"]


def test_the_fastest_that_fits_is_recommended_and_offload_last():
    """By time on a card, else by FLOPs; no clock knows what offload's copies take."""

    args = parse(SHAPE)
    asked = Question(args, 61, torch.device("cpu"), torch.float32, Room(10, "cpu"), H100)

    def row(peak: int, seconds: float, recompute: str = "none") -> Row:
        step = SimpleNamespace(config=MiniGPTConfig(recompute=recompute), peak=peak, seq_len=8)
        step.seconds = lambda card, compiled: seconds
        return Row(step, 0, asked, None)

    slow, slower = row(5, 3.0, "full"), row(4, 4.0, "full/2")
    mlp, offloaded = row(4, 5.0, "mlp"), row(3, 1.0, "full+offload")
    too_large = row(11, 0.5)
    assert recommend([too_large, slower, mlp, offloaded, slow]) is slow
    assert recommend([too_large, offloaded]) is offloaded
    assert recommend([too_large]) is None
    by_flops = [replace(one, asked=replace(asked, card=None)) for one in (slow, mlp)]
    assert recommend(by_flops).step is mlp.step


class Idle(torch.optim.Optimizer):
    """Does nothing."""

    def __init__(self, model):
        super().__init__(model.parameters(), {})

    def step(self):
        pass


def test_micro_batches_share_one_update():
    """What AdamW takes is 28 of the update's 40 bytes a parameter."""
    config = MiniGPTConfig(1000, 64, n_layers=2, n_heads=4, d_model=256, d_ff=1024)
    card = Card("simple", GIB, (1e12,) * 3, 1e9, 0, 0, 1, 1)
    steps = []
    for make in (lambda model: torch.optim.AdamW(model.parameters(), fused=True), Idle):
        planner = Planner(
            config, 64, precision=torch.bfloat16, make_optimizer=make, device_type="cuda"
        )
        steps.append(planner.step(2))
    one = steps[0].seconds(card)
    update = (one - steps[1].seconds(card)) * 40 / 28
    for n in (1, 2, 10):
        args = changed(parse(SHAPE), grad_accum_steps=n)
        asked = Question(args, 61, torch.device("cuda"), torch.bfloat16, card=card, processes=3)
        assert asked.seconds(steps[0]) == pytest.approx(n * one - (n - 1) * update, rel=1e-3)
        tokens = 3 * n * 2 * 64
        assert asked.tokens_per_s(steps[0]) == pytest.approx(tokens / asked.seconds(steps[0]))


# ---- in the trainers


def choose(monkeypatch, flags: str, process: OneProcess) -> tuple[Card | None, str]:
    """The card that `auto` goes by, and what is said."""
    seen: list = []
    pick = trainer.plan.pick_recompute

    def watch(planner, batch_size, budget, card, compiled, offload):
        seen.append((card, compiled))
        return pick(planner, batch_size, budget, card, compiled, offload)

    monkeypatch.setattr("trainer.plan.pick_recompute", watch)
    args = parse(f"{SHAPE} --use-activation-checkpoint auto {flags}")
    _, words, _ = trainer.plan.plan_memory(args, process, model_config(args, 61), torch.float32)
    ((card, compiled),) = seen
    assert compiled == args.compile
    return card, words.splitlines()[0]


def test_auto_goes_by_the_clock_of_a_card(monkeypatch):
    process = OneProcess(torch.device("cpu"))
    card, words = choose(monkeypatch, "--card h100 --memory-budget 1GiB --compile", process)
    assert card == H100
    fits = "that fits in 921.6 MiB (1.0 GiB less a margin of a tenth)"
    assert words == f"auto takes none: the least time (predicted for H100) {fits}"
    card, words = choose(monkeypatch, "--memory-budget 1GiB", process)
    assert card is None and words == f"auto takes none: the least {fits}"


def test_all_processes_go_by_the_clock_of_the_first(monkeypatch):
    monkeypatch.setattr(trainer.card, "this_machine", lambda *what: pytest.fail("measured"))
    process = Other(None)
    process.exchange = lambda mine: [1 << 30 if isinstance(mine, int) else H100, mine]
    process.by_first = lambda act: None  # it is not for this one to do
    assert choose(monkeypatch, "--card this-machine", process)[0] == H100


def test_a_gpu_is_known_by_its_name(monkeypatch):
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    mine = "--card this-machine --d-model 96 --n-heads 3 --seq-len 80"
    nothing, tf32, t4, mine = (
        parse(f"--use-activation-checkpoint auto {flags}")
        for flags in ("", "--tf32", "--card T4 --tf32", mine)
    )
    there = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=H100.memory)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: there)
    monkeypatch.setattr(trainer.card, "this_machine", lambda *what: what)
    assert clock_card(nothing, gpu) == H100
    assert clock_card(tf32, gpu).flops == (H100.flops[1] / 2, *H100.flops[1:])
    assert clock_card(t4, gpu) == clock_card(t4, cpu) == CARDS["T4"]  # which has no TF32
    assert clock_card(mine, gpu) == (gpu, 80, 32)  # measured at the shape of its attention
    there.name = "NVIDIA GeForce 8800 GTX"
    assert clock_card(nothing, gpu) is None is clock_card(nothing, cpu)
