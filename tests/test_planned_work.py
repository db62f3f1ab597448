"""How much is simulated for an answer of plan_memory, in operators: a count does not depend on the
machine, as seconds do. (About 5,000 operators take a second of a laptop's core.)"""

from dataclasses import replace
from functools import cache

import pytest
from harness.answers import SHAPE, budget_for
from harness.planned import MAKE_PLANNER

from memory import MemorySavingGPT
from planner import Planner
from scripts import plan_memory
from scripts.plans import ADVICE_OPS, advice

GPT2, XL = "--model gpt2 --card RTX-4090", "--model gpt2-xl --card RTX-4090"
MEDIUM = "--model gpt2-medium --card RTX-3060-12GB"


class Screen:
    """Stands in for the progress bar: stores each text with the operators simulated before it."""

    def __init__(self) -> None:
        self.ops, self.lines = 0, list[tuple[int, str]]()

    def update(self, ops: int) -> None:
        self.ops += ops

    def write(self, text: str) -> None:
        self.lines.append((self.ops, text))


@pytest.fixture(autouse=True)
def new_planners(monkeypatch) -> None:
    """No planner of an earlier test, whose steps are known."""
    monkeypatch.setattr("trainer.plan.make_planner", cache(MAKE_PLANNER.__wrapped__))


def simulated(flags: str) -> Screen:
    typed, screen = plan_memory.parse(flags.split()), Screen()
    plan = plan_memory.make_plan(typed)
    plan_memory.print_plan(replace(plan, on_simulate=screen.update), typed, screen)
    return screen


# The limits are what was measured on 2026-11-29 with torch 2.13, and a tenth more.
SLOW = pytest.mark.slow
ASKED = [  # flags, operators before the answer, operators in all
    (GPT2, 1_450, 12_900),
    (XL, 0, 7_300),
    (f"{XL} --memory-budget 12GiB", 0, 0),
    (f"{XL} --nproc-per-node 2 --fsdp", 8_200, 35_500),
    (f"{XL} --nproc-per-node 2 --sp --batch-size 2", 3_300, 53_000),
    (f"{GPT2} --longest-sequence", 78_000, 78_000),
    (f"{GPT2} --nproc-per-node 2 --grad-accum-steps 4 --reproducible-sums", 1_760, 16_100),
    ("--model gpt2 --device cuda --memory-budget 6GiB", 5_900, 12_900),
    ("--model gpt2 --device cpu --memory-budget 8GiB", 1_800, 15_500),
    (f"{MEDIUM} --batch-size 24", 6_700, 15_500),
    (f"{MEDIUM} --batch-size 24 --grad-accum-steps 4 --all-knobs", 27_500, 33_000),
    (f"{MEDIUM} --optimizer muon --moments-dtype bfloat16", 7_300, 15_300),
]
FAST = ASKED[0], ASKED[2]


@pytest.mark.parametrize(
    ("flags", "first", "most"),
    [pytest.param(*row, marks=[] if row in FAST else SLOW) for row in ASKED],
)
def test_an_answer_takes_no_more_operators_than_it_did(flags, first, most):
    screen = simulated(flags)
    ops, answer = screen.lines[0]
    assert ops <= first and screen.ops <= most
    assert answer.startswith(("fits ", "nothing fits; ", "does not fit: ", "python train_"))


def test_no_answer_makes_a_later_one_dearer():
    """Nor does an order of answers change what they are."""
    asked = ["cheap", "full+offload", "full/2", "none", "sdpa:2,full"]
    found = []
    for policies in (asked, asked[::-1], asked[2:] + asked[:2]):
        plan = plan_memory.make_plan(plan_memory.parse(f"{SHAPE} --n-layers 9".split()))
        planner = MAKE_PLANNER.__wrapped__(*planner_key(plan))
        peaks = {policy: planner.step(3, recompute=policy).peak for policy in policies}
        found.append((planner.n_simulated_ops, sorted(peaks.items())))
    assert found[0] == found[1] == found[2]


def planner_key(plan) -> tuple:
    where = plan.device, plan.precision, plan.layout, plan.card, plan.on_simulate
    return plan.settings.replace(use_activation_checkpoint="none"), plan.vocab_size, *where


class BetweenBlocks(MemorySavingGPT):
    """Does something of its own before each block."""

    def block_calls(self):
        for run, is_full in super().block_calls():
            yield lambda x, *more, run=run, **named: run(x * 1.0, *more, **named), is_full


def test_a_changed_loop_is_simulated_whole_and_once(monkeypatch):
    monkeypatch.setattr("planner.step.MemorySavingGPT", BetweenBlocks)
    plan = plan_memory.make_plan(plan_memory.parse(f"{SHAPE} --n-layers 9".split()))
    planner: Planner = MAKE_PLANNER.__wrapped__(*planner_key(plan))
    for policy in ("none", "full", "full+offload", "full/3"):
        before = planner.n_simulated_ops
        step = planner.step(3, recompute=policy)
        spent = planner.n_simulated_ops - before
        config = planner.model.normalized_config(step.config)
        log, whole = planner.simulate_whole_step(3, config)
        assert (step.timeline == whole.timeline).all()
        assert spent <= log.n_ops * (1.5 if policy == "none" else 1)  # none: first a short step


def test_advice_ends(monkeypatch):
    """With the best that was found, after a fixed number of operators."""
    flags = f"{SHAPE} --batch-size 64"
    state = plan_memory.make_plan(plan_memory.parse(flags.split())).state_bytes
    words = f"{flags} {budget_for(state + 1000)}".split()
    plan = plan_memory.make_plan(plan_memory.parse(words))
    spent = []
    for limit in (1, ADVICE_OPS):
        screen = Screen()
        monkeypatch.setattr("scripts.plans.ADVICE_OPS", limit)
        said, change = advice(replace(plan, on_simulate=screen.update))
        spent.append(screen.ops)
        assert change is None and "smaller model" in said
    assert 0 < spent[0] < spent[1] / 2 and spent[1] < ADVICE_OPS + 5_000
