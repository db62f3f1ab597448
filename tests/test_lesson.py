"""docs/lesson.md: its exercises are the script's, each answer is measured, right answers pass,
plausible mistakes do not."""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from harness.marks import rest_slow
from harness.runs import ROOT
from test_checkpoint_from_scratch import n_different, run_step
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from memory import POLICY_NAMES, MemorySavingGPT
from model import MLP, MiniGPTConfig
from planner import KINDS, Planner
from planner.choose import recomputed_flops_key
from planner.formulas import head_bytes
from scripts import lesson
from scripts.checkpoint_from_scratch import address
from scripts.lesson import EXERCISES, NOT_YET, sections

PAGE = (ROOT / "docs" / "lesson.md").read_text()


def ask(capsys, *words: str) -> tuple[int, str, str]:
    return lesson.main(list(words)), *capsys.readouterr()


def test_the_page_and_the_script_have_the_same_exercises(capsys):
    assert [*sections()] == [*EXERCISES] == list(range(1, len(EXERCISES) + 1))
    for n in EXERCISES:
        code, out, _ = ask(capsys, str(n))
        assert code == 0 and out.strip() in PAGE and out.startswith(f"{n}. ")
    for words, begin in ((), r"\d+\. "), (("--solution",), r"\d+: "):
        code, out, _ = ask(capsys, *words)
        assert code == 0 and len(re.findall(f"^{begin}", out, re.M)) == len(EXERCISES)


# ---- Each answer, measured, with the numbers that --measure prints

MIB, GIB = 2**20, 2**30
SMALL = MiniGPTConfig(dropout=0.0)
DEEP = MiniGPTConfig(61, 1024, n_layers=36, n_heads=1, d_model=64, d_ff=256, dropout=0.0)
make_planner = partial(
    Planner,
    seq_len=1024,
    precision=torch.bfloat16,
    make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    device_type="cuda",
)
PLANNER, ACCUMULATING = make_planner(SMALL), make_planner(SMALL, accumulates_gradients=True)
# An answer, and the cells of its facts: numbers, and the words of CELL.
Measured = tuple[float | str, list[float | str]]
CELL = r"(?m)\d[\d,]*\.?\d*|(?:kept|needed|fits|no)$|none(?= of)"


def needed_by_backward() -> Measured:
    mlp, saved = MLP(MiniGPTConfig(n_heads=1, d_model=8, d_ff=32)), []
    x = torch.randn(2, 4, 8, requires_grad=True)
    with saved_tensors_hooks(lambda t: saved.append(address(t)) or t, lambda t: t):
        wide = mlp.c_fc(x)
        g = F.gelu(wide, approximate="tanh")
        y = mlp.c_proj(g)
    kept = [address(tensor) in saved for tensor in (x, wide, g, y)]
    return sum(kept), ["kept" if each else "needed" for each in kept]


def block_keeps(n: int) -> Measured:
    facts = EXERCISES[n].facts()  # these are measured when they are shown
    return sum(map(float, re.findall(r"iB +([\d.]+) ", facts))), re.findall(CELL, facts)


def cost_of_full() -> Measured:
    """By hand: of a block's products `full` repeats all but the last, and of the head none."""
    C, L, costs = SMALL.d_model, SMALL.n_layers, []
    for vocab_size, seq_len in ((0, 0), (0, 1024), (50257, 1024)):
        attention = 2 * seq_len * C  # without the masked half
        forward = L * (24 * C * C + attention) + 2 * vocab_size * C
        costs.append(1 + L * (16 * C * C + attention) / (3 * forward))
    assert PLANNER.step(1, recompute="full").relative_flops == pytest.approx(costs[-1], rel=1e-4)
    return costs[0], [*costs, 2, 1024]


def other_dice() -> Measured:
    def forgets(*args, **options):
        return checkpoint(*args, **options | {"preserve_rng_state": False})

    none, full = run_step("none"), run_step("full")
    other = run_step("full", partial(mock.patch, "model.checkpoint", forgets))
    assert full.results["loss"].equal(none.results["loss"]) and not n_different(full, none)
    assert other.results["loss"].equal(none.results["loss"])
    return "c", [none.results["loss"].item(), 0, 28, n_different(other, none), 28]


def the_head() -> Measured:
    logits = head_bytes(replace(SMALL, loss_chunks=1), 12 * 1024, torch.float32)
    peaks = [
        PLANNER.step(12, recompute=policy, loss_chunks=n).peak
        for n in (1, 0)
        for policy in ("none", "full")
    ]
    blocks = 12 * PLANNER.step(12).kept_per_block
    return logits / GIB, [logits / GIB, blocks / GIB, 12, *(peak / GIB for peak in peaks)]


def best_group(planner: Planner, policy: str, btc: dict[int, float]) -> Measured:
    """`btc`: group size -> BTC by the formula."""
    peaks = {k: planner.step(12, recompute=policy.format(k)).peak for k in btc}
    return min(btc, key=peaks.get), [n for k in btc for n in (k, btc[k], peaks[k] / MIB)]


def gradients_that_wait() -> Measured:
    once, several = PLANNER.step(12), ACCUMULATING.step(3)
    starts = [int(step.bytes_after_each_op[0]) for step in (once, several)]
    # Not all memory: a smaller batch also has fewer token ids.
    before, now = (int(s.timeline[0, KINDS.index("gradients")]) for s in (once, several))
    assert now - before == sum(p.nbytes for p in PLANNER.model.parameters())
    return (now - before) / MIB, [
        *(starts[0] / MIB, 12, once.peak / MIB, 1, 12),  # 12 bytes a parameter
        *(starts[1] / MIB, 16, several.peak / MIB, 4, 3),
    ]


def policy_for_a_card() -> Measured:
    steps = [PLANNER.step(12, recompute=policy) for policy in POLICY_NAMES]
    steps.sort(key=lambda step: recomputed_flops_key(step))
    fits = ["fits" if step.peak <= 4 * GIB else "no" for step in steps]
    cells = [4.0]
    for step, fit in zip(steps, fits, strict=True):
        cells += [step.relative_flops, step.peak / GIB, fit]
    return steps[fits.index("fits")].config.recompute, cells


def weights_after(part: str, drop: bool = True) -> list[torch.Tensor]:
    """After two steps; in the first, memory runs out in the middle of `part`, and it is repeated
    with `full`. `drop`: without the gradients of the failed attempt."""
    torch.manual_seed(0)
    model = MemorySavingGPT(MiniGPTConfig(61, 16, n_layers=2, n_heads=1, d_model=16, d_ff=64))
    weights = list(model.parameters())
    # Two optimizers, for even and odd weights: an update can fail halfway.
    even, odd = (torch.optim.AdamW(some) for some in (weights[::2], weights[1::2]))
    hooks: dict[str, Callable] = {
        "forward": model.blocks[1].register_forward_pre_hook,
        "backward": model.blocks[0].get_parameter("ln_1.weight").register_hook,
        "update": odd.register_step_pre_hook,
    }
    once = chain([torch.OutOfMemoryError("played")], repeat(None))
    hooks.get(part, id)(mock.Mock(side_effect=once))
    for seed, recompute in ((1, "none"), *[(1, "full")] * bool(part), (2, "full")):
        if drop:
            model.zero_grad()
        model.config = replace(model.config, recompute=recompute)
        torch.manual_seed(seed)  # of the data and the masks
        ids = torch.randint(61, (2, 17))
        with suppress(torch.OutOfMemoryError):
            model(ids[:, :-1], ids[:, 1:]).backward()
            even.step()
            odd.step()
    return weights


def done_again() -> Measured:
    undisturbed = weights_after("")
    failures = ("forward", True), ("backward", True), ("update", True), ("backward", False)
    differ = [
        sum(not one.equal(two) for one, two in zip(weights_after(*how), undisturbed, strict=True))
        for how in failures
    ]
    n_safe = [n > 0 for n in differ].index(True)  # parts, counted from forward
    return "dabc"[n_safe], [cell for n in differ for cell in (n or "none", 28)]


MEASURES: dict[int, Callable[[], Measured]] = {
    1: needed_by_backward,
    **{n: partial(block_keeps, n) for n in (2, 3, 4)},
    5: cost_of_full,
    6: other_dice,
    7: the_head,
    8: lambda: best_group(
        ACCUMULATING, "full/{}", {k: 4 * 12 / k + 36 * k for k in (1, 2, 3, 4, 6, 12)}
    ),
    9: gradients_that_wait,
    10: policy_for_a_card,
    11: lambda: best_group(
        make_planner(DEEP), "full/{}+nested", {k: 4 * (36 / k + k) for k in (2, 3, 4, 6, 9, 12, 18)}
    ),
    12: done_again,
}


@pytest.mark.parametrize("n", rest_slow(EXERCISES, [4, 12].__contains__))
def test_answers_and_facts_are_measured(n, capsys):
    answer, cells = MEASURES[n]()
    assert EXERCISES[n].is_near(answer, EXERCISES[n].answer)
    code, out, _ = ask(capsys, str(n), "--measure")
    shown = re.findall(CELL, out)
    assert code == 0 and len(shown) == len(cells)
    for text, cell in zip(shown, cells, strict=True):
        assert text == cell or float(text.replace(",", "")) == pytest.approx(cell, rel=0.01)


# ---- What people write: right, and wrong, besides the mistakes that an exercise knows

WRITTEN = {
    1: (("3", "3."), ("1", "-3")),
    2: (("64", "64.08", "64 BTC"), ("36",)),
    3: (("36", "36 btc", "36.1"), ("18", "35", "37")),
    4: (("24", "24.06 BTC"), ("36",)),
    5: (("1.22", "1.222", "1.22x", "1.22 times"), ("1.33", "1.25", "1")),
    6: (("c", "C", "(c)"), ()),
    7: (("6.9", "6.9 GiB", "7"), ("7.4", "7067")),
    8: (("1",), ("2", "3.5", "1.2")),
    9: (("475", "474.7", "475 MiB", "475mib"), ("1899", "1.9")),
    10: (("mlp", "MLP", "`mlp`"), ()),
    11: (("6", "6.0"), ("4", "9")),
    12: (("b", "(b)"), ()),
}


@pytest.mark.parametrize("n", EXERCISES)
def test_right_answers_pass_and_mistakes_are_not_given_away(n, capsys):
    rights, wrongs = WRITTEN[n]
    for text in rights:
        code, out, err = ask(capsys, str(n), *text.split())
        assert code == 0 and out.startswith("right: ") and EXERCISES[n].why in out, text
    right = EXERCISES[n].solution().split()[0].rstrip(".")
    known_mistakes = {str(wrong): words for wrong, words in EXERCISES[n].mistakes}
    for text in {*wrongs, *known_mistakes}:
        code, out, err = ask(capsys, str(n), *text.split())
        assert code == NOT_YET == 3 and out.startswith("not yet: "), text
        assert known_mistakes.get(text, "") in out and out.count("\n") == 1
        if n not in (1, 6, 8, 11, 12):  # (a single digit or letter stands in every sentence)
            assert not re.search(rf"\b{re.escape(right)}\b", out), text
