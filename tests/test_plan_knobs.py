"""The longest sequence and all knobs: against every possibility, one by one."""

import re
from dataclasses import replace

import pytest
from harness import answers
from harness.answers import budget_for, question, room_for, run
from harness.marks import rest_slow
from harness.runs import parse
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts import plan_memory
from scripts.plan_table import (
    STEP,
    changed_flags,
    flags_for_seq_len,
    largest_n_that_fits,
    search_fastest_plans,
)
from scripts.plans import OTHER_WAYS, CommandPlan
from trainer.settings import to_words

NONE = "--use-activation-checkpoint none"
TYPED = "--seq-len 64 --batch-size 4 --grad-accum-steps 3 --card H100"
pytestmark = pytest.mark.usefixtures("everything_travels")  # as in answers


def asked(tensors: float, more: str = "") -> CommandPlan:
    """With so many bytes for tensors."""
    return replace(question(f"{TYPED} {more}"), memory_budget=room_for(tensors))


# ---- the longest sequence


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.integers(1, 50),
    st.sampled_from([lambda n: 0, lambda n: (n > 40) * 300, lambda n: n * n // 9]),
    st.integers(1, 200),
    st.integers(100, 3000),
)
def test_most_that_fit(slope, more, most, budget):
    """Of peaks along a line, with a jump, along a parabola; with few tries."""
    tried = []

    def peak(n: int) -> int:
        tried.append(n)
        return 100 + slope * n + more(n)

    wanted = max(n for n in range(most + 1) if peak(n) <= budget)
    tried.clear()
    assert largest_n_that_fits(peak, 100, budget, most) == wanted
    assert len(tried) == len(set(tried)) <= (14 if more(50) else 4)


@pytest.mark.slow
def test_the_longest_sequence_of_each_row():
    """It fits, 64 tokens more do not; and so does the command, which is that of the longest."""
    typed = f"{TYPED} --n-layers 6"
    plain = question(typed)
    answer = answers.ask(f"{typed} {budget_for(plain.peak * 1.1)} --longest-sequence")
    assert [row["name"] for row in answer.json["rows"]][-2:] == ["full/3+nested", "full+offload"]
    limit, lengths = answer.json["safe_bytes"], []
    for row in answer.json["rows"]:
        longest, plan = row["longest_sequence_safely"], plain.with_policy(row["name"])
        fits, more = (
            plan.with_flags(**flags_for_seq_len(plan.settings, longest + n)).peak for n in (0, STEP)
        )
        assert fits <= limit < more and longest % STEP == 0 and longest > 0
        lengths.append(longest)
    found = run(answer.command)
    assert found.seq_len == found.max_position_embeddings == max(lengths)
    assert replace(plain, settings=found).peak <= limit


@pytest.mark.parametrize(
    ("flags", "length", "words"),
    [
        ("--seq-len 64", 128, "--seq-len 128"),  # positions grow with it
        ("--seq-len 64", 64, ""),
        ("--seq-len 64 --max-position-embeddings 1000", 128, "--seq-len 128"),  # typed: they stay
        ("--model gpt2", 512, "--seq-len 512"),  # the name stands for 1,024 positions
        ("--model gpt2", 1024, ""),
        ("--model gpt2", 4096, "--seq-len 4096 --max-position-embeddings 4096"),
    ],
)
def test_the_flags_of_a_length(flags, length, words):
    plan = plan_memory.make_plan(plan_memory.parse([*flags.split(), "--use-toy-data"]))
    wanted = flags_for_seq_len(plan.settings, length)
    change = changed_flags(plan.with_flags(**wanted), plan.settings)
    assert " ".join(to_words(change)).removesuffix(NONE).strip() == words
    found = parse(f"{flags} {words}")
    assert found.seq_len == length <= found.max_position_embeddings
    assert found.max_position_embeddings == wanted["max_position_embeddings"]


# ---- all knobs


def dealt(one: CommandPlan, size: int) -> CommandPlan:
    """Its sequences of a step in micro-batches of that size."""
    sequences = one.settings.batch_size * one.settings.grad_accum_steps
    parts = {"batch_size": size, "grad_accum_steps": sequences // size}
    return one.with_flags(**parts)


@pytest.fixture(scope="module")
def peaks() -> tuple[int, int]:
    """The smallest of one sequence, and that of all of them without recompute."""
    plain = question(TYPED)
    least = replace(dealt(plain, 1), memory_budget=room_for(1)).with_fastest_policy().peak
    return least, dealt(plain, 12).peak


SLOW = [pytest.param(share, marks=pytest.mark.slow) for share in (-0.01, 0.0, 0.6)]


@pytest.mark.parametrize("share", [*SLOW, 0.25, 1.0])
def test_the_fastest_of_all_is_found(peaks, share):
    least, most = peaks
    one = asked(least + share * (most - least))
    found, every, sizes = search_fastest_plans(one), {}, (1, 2, 3, 4, 6, 12)
    for size in sizes:
        fastest = dealt(one, size).with_fastest_policy()
        if fastest.peak <= one.bytes_within_margin:
            every[size] = fastest.seconds
    times = [way.seconds for way in found]
    assert times == sorted(times) and set(times) <= set(every.values())
    assert min(times, default=None) == min(every.values(), default=None)
    for way in found:
        sequences = way.settings.batch_size * way.settings.grad_accum_steps
        assert way.peak <= one.bytes_within_margin and sequences == 12


def test_reproducible_sums_are_of_powers_of_two(peaks):
    one = asked(sum(peaks) / 2)
    any_number, powers = (
        {way.settings.grad_accum_steps for way in search_fastest_plans(plan)}
        for plan in (one, one.with_flags(reproducible_sums=True))
    )
    assert powers == {n for n in any_number if n.bit_count() == 1} != any_number


def test_one_command_that_does_it(peaks):
    """The same sequences a step; more tokens/s than as asked; and it fits."""
    answer = answers.ask(f"{TYPED} {budget_for(sum(peaks) / 2)} --all-knobs --num-steps 10")
    first, *_ = found = answer.json["all_knobs"]
    settings = run(answer.command)
    assert settings.batch_size * settings.grad_accum_steps == 12 and settings.seq_len == 64
    again = replace(question(TYPED), settings=settings)
    assert again.peak == first["peak_bytes"] <= answer.json["safe_bytes"]
    assert first["tokens_per_s"] == max(row["tokens_per_s"] for row in found)
    assert {4} < {row["batch_size"] for row in found}  # what was asked is there to compare with
    assert answer.json["run"]["seconds"] == pytest.approx(10 * first["seconds"], rel=1e-9)


@pytest.mark.parametrize(
    "how", rest_slow(["--all-knobs", "--longest-sequence"], "--all-knobs".__eq__)
)
def test_where_nothing_fits_there_is_still_a_way_out(how, peaks):
    """And the table below it, in which equal peaks are one line."""
    answer = answers.ask(f"{TYPED} {budget_for(peaks[0] - 9)} {how}")
    assert f"\nnothing fits; plan {OTHER_WAYS}\n" in answer.out  # no single change fits
    assert answer.json["takes"] is None and len(answer.rows) > len(answer.table) - 1
    assert answer.table[1].startswith("   none ")
    assert re.match("   (.* to )?full.offload ", answer.table[-1])
