"""Six questions (a card, a model, a batch) to all who answer them: they say the same."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from harness.runs import parse

from data.errors import MiniGPTError
from planner import CARDS, Layout
from planner.choose import uniform_policies
from scripts import memory_page, plan_memory
from scripts.plans import CommandPlan, advice, plan_for_command
from trainer.device import MemoryBudget
from trainer.plan import plan_run
from trainer.process import OneProcess
from trainer.settings import Settings, to_words

# name: (card, layers, channels, heads, sequences)
MODELS = {"flat": ("RTX 3060 12GB", 3, 512, 8, 48), "deep": ("H100", 8, 128, 4, 64)}
# Room for tensors, between the least peak there is and that without recompute.
SHARES = {"flat": (-0.04, 0.4, 1.0), "deep": (0.01, 0.1, 0.5)}


def flags_of(model: str, share: float | None = None) -> str:
    """With a budget that has this room for tensors; None: no budget, no card."""
    card, layers, width, heads, batch = MODELS[model]
    shape = f"--n-layers {layers} --d-model {width} --n-heads {heads} --batch-size {batch}"
    shape += " --seq-len 256 --tokenizer-name bpe --vocab-size 4096 --dropout 0"
    if share is None:
        return shape
    return f"{shape} --memory-budget {budget_of(model, share)}b --card {card.replace(' ', '-')}"


def of_card(model: str, settings: Settings) -> CommandPlan:
    """To the planner itself."""
    card, gpu = CARDS[MODELS[model][0]], torch.device("cuda")
    return CommandPlan(settings, 4096, gpu, torch.bfloat16, card=card)


@cache
def budget_of(model: str, share: float) -> int:
    plan = of_card(model, parse(flags_of(model)))
    peaks = [plan.with_policy(rung).peak for rung in uniform_policies(plan.planner)]
    safe = min(peaks) + share * (peaks[0] - min(peaks))
    return int(safe / 0.75) + 2


def of_plan_memory(flags: str, folder) -> str | None:
    path = folder / "plan.json"
    assert plan_memory.main([*flags.split(), "--json", str(path)]) == 0
    return json.loads(path.read_text())["takes"]


def of_auto(flags: str, monkeypatch) -> str | None:
    for file in ("plan", "device"):
        monkeypatch.setattr(f"trainer.{file}.free_and_total_memory", lambda device: (2**60, 2**60))
    auto = parse(f"{flags} --use-activation-checkpoint auto")
    process = OneProcess(torch.device("cuda"))
    try:
        policy, _, words = plan_run(auto, 4096, process, torch.bfloat16)
    except MiniGPTError:
        return None
    assert words.startswith(f"auto takes {policy}: ")
    return policy


@cache
def ways_on_the_page(model: str) -> list:
    settings = memory_page.parse(flags_of(model, 1.0).split())
    return memory_page.policy_choices_data(plan_for_command(settings, Layout()))


def of_the_page(model: str, flags: str) -> str | None:
    settings = memory_page.parse(flags.split())
    room = plan_for_command(settings, Layout()).memory_budget
    fitting = (
        name for peak, _, name, _ in ways_on_the_page(model) if peak <= room.bytes_within_margin
    )
    return next(fitting, None)


QUESTIONS = [("flat", share) for share in SHARES["flat"]]
QUESTIONS += [pytest.param("deep", share, marks=pytest.mark.slow) for share in SHARES["deep"]]


@pytest.mark.parametrize(("model", "share"), QUESTIONS)
def test_all_say_the_same(model, share, tmp_path, monkeypatch):
    flags, budget = flags_of(model, share), budget_of(model, share)
    takes = of_plan_memory(flags, tmp_path)
    answer = None if takes and "offload" in takes else takes
    assert (answer is None) == (share < 0) and (answer == "none") == (share == 1)
    assert of_auto(flags, monkeypatch) == answer
    assert of_the_page(model, flags) == answer

    if answer not in ("none", None):
        plan = of_card(model, parse(flags_of(model)))
        _, change = advice(replace(plan, memory_budget=MemoryBudget(budget, "cuda")))
        told = plan.with_flags(**change).policy
        assert told == of_plan_memory(f"{flags} {' '.join(to_words(change))}", tmp_path)
        assert told == answer
