"""The longest sequence and all knobs: against every possibility, one by one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness import answers
from harness.answers import budget_for, run

from planner import CARDS
from planner.choose import pick_recompute
from scripts import plan_memory
from scripts.plan_knobs import (
    STEP,
    Search,
    format_settings,
    length_words,
    longest_for_all,
    longest_possible,
    most_that_fit,
    with_length,
)
from scripts.plan_table import Clock, digits
from trainer.plan import Plans

TYPED = "--seq-len 64 --batch-size 4 --grad-accum-steps 3 --card H100"
SHAPE = f"{answers.SHAPE} {TYPED}"
pytestmark = pytest.mark.usefixtures("everything_travels")  # as in answers
H100 = CARDS["H100"]
CLOCK = Clock(H100, compiled=False, micro_batches=3, processes=1)


def ask(flags: str = SHAPE):
    args = plan_memory.parse(flags.split())
    args.use_activation_checkpoint = "none"
    return args, Plans(61, torch.device("cuda"), torch.bfloat16)


# ---- the longest sequence


def lines():
    """Peaks, and how often they may be asked for."""
    yield lambda n: 100 + 7 * n, 4
    yield lambda n: 100 + 7 * n + (n > 40) * 300, 16  # a jump
    yield lambda n: 100 + 7 * n + n * n // 9, 16
    yield lambda n: 100 + 7 * n + 9 * (n // 10), 16  # steps


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("guess", [0, 1, 30, 10**6])
def test_most_that_fit(case, guess):
    for budget in (99, 100, 107, 108, 345, 600, 10**9):
        peak, tries = list(lines())[case]
        asked = []

        def watch(n, peak=peak, asked=asked):
            asked.append(n)
            return peak(n)

        most = 200
        wanted = max([n for n in range(most + 1) if peak(n) <= budget], default=0)
        assert wanted - 1 <= most_that_fit(watch, budget, guess, most) <= wanted
        assert len(asked) <= tries and len(set(asked)) == len(asked)


@pytest.mark.slow
def test_the_longest_sequence_of_each_row():
    """It fits, 128 tokens more do not; and so does the command, which is that of the longest."""
    args, plans = ask()
    answer = answers.ask(f"{TYPED} {budget_for(plans.peak(args) * 1.1)} --longest-sequence")
    limit, lengths = answer.json["safe_bytes"], []
    for row, line in zip(answer.json["rows"], answer.table[1:], strict=True):
        longest = row["longest_sequence_safely"]
        peaks = []
        for length in (longest, longest + 2 * STEP):
            args.seq_len = args.max_position_embeddings = length
            peaks.append(plans.planner(args).step(4, recompute=row["name"]).peak)
        assert peaks[0] <= limit < peaks[1] and longest % STEP == 0 and longest > 0
        assert line.endswith(f"  {longest:,}")
        lengths.append(longest)
    found = run(answer.command)
    assert found.seq_len == found.max_position_embeddings == max(lengths)
    assert plans.peak(found) <= limit and max(lengths) > min(lengths)
    assert answer.json["run"]["seconds"] is None  # the command has other steps than the rows


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
    args, _ = ask(flags)
    wanted = with_length(args, length)
    assert " ".join(length_words(args, wanted)) == words
    found = run(f"python train_minimal.py {flags} {words}".split())
    assert found.seq_len == length <= found.max_position_embeddings
    assert {name: getattr(found, name) for name in wanted} == wanted
    assert longest_possible(args) == (1000 if "1000" in flags else 10**6)


# ---- all knobs


@pytest.fixture(scope="module")
def peaks() -> tuple[int, int]:
    """Of one sequence with the most recompute, and of all of them without any."""
    args, plans = ask()
    search = Search(args, plans, 0, CLOCK)
    full = search.planner(1).step(1, recompute="full").peak
    return full, search.planner(12).step(12, recompute="none").peak


SLOW = [pytest.param(share, marks=pytest.mark.slow) for share in (-0.01, 0.0, 0.6, 1.0)]


@pytest.mark.parametrize("share", [*SLOW, 0.25])
def test_the_fastest_of_all_is_found(peaks, share):
    least, most = peaks
    args, plans = ask()
    safe = int(least + share * (most - least))
    search = Search(args, plans, safe, CLOCK)
    settings = search.settings()
    every = [found.seconds for size in search.sizes if (found := search.fastest(size))]
    assert search.sizes == [1, 2, 3, 4, 6, 12] and bool(settings) == bool(every)
    assert [s.seconds for s in settings] == sorted(s.seconds for s in settings)
    assert min(every, default=None) == (settings[0].seconds if settings else None)
    for setting in settings:
        step, micro_batches = setting.step, setting.clock.micro_batches
        assert step.peak <= safe and micro_batches * step.batch_size == 12
        picked = pick_recompute(search.planner(step.batch_size), step.batch_size, safe, H100)
        assert setting.seconds == replace(CLOCK, micro_batches=micro_batches).seconds(picked)
    if settings:
        marked, *others = format_settings(settings).splitlines()[1:]
        assert marked[0] == ">" and {line[0] for line in others} <= {" "}
        assert digits(3, settings[0].clock.tokens_per_s(settings[0].step)) in marked


class Told(Search):
    """Knows the seconds of each micro-batch, which fit with recompute; notes who was asked."""

    def __init__(self, start, seconds):
        super().__init__(ask()[0], None, 9, CLOCK)
        self.start, self.of_size, self.asked = start, seconds, set()

    def largest_without(self):
        return self.start

    def without(self, size):
        return SimpleNamespace(seconds=self.of_size[size], step=SimpleNamespace(peak=99))

    def fastest(self, size):
        self.asked.add(size)
        return SimpleNamespace(seconds=self.of_size[size], step=SimpleNamespace(peak=1))


@pytest.mark.parametrize(
    ("start", "seconds", "best", "asked"),
    [  # of micro-batches of 1, 2, 3, 4, 6, 12; 4 is what was asked, to compare with
        (3, (9, 8, 7, 6, 5, 6), 5, {3, 4, 6}),
        (3, (6, 5, 6, 7, 8, 9), 5, {2, 3, 4}),  # a cache that holds little
        (1, (9, 10, 7, 6, 5, 6), 6, {1, 4}),
    ],
)
def test_both_ways_are_tried_for_as_long_as_it_pays(start, seconds, best, asked):
    search = Told(start, dict(zip((1, 2, 3, 4, 6, 12), seconds, strict=True)))
    assert search.settings()[0].seconds == best and search.asked == asked


def test_one_command_that_does_it(peaks):
    """The same sequences a step; more tokens/s than as asked; and it fits."""
    answer = answers.ask(f"{TYPED} {budget_for(sum(peaks) / 2)} --all-knobs --num-steps 10")
    *_, found, last = answer.out.split("\n\n")
    first, *_ = settings = answer.json["all_knobs"]
    args = run(answer.command)
    assert args.batch_size * args.grad_accum_steps == 12 and args.seq_len == 64
    assert args.batch_size == first["batch_size"]
    assert ask()[1].peak(args) == first["peak_bytes"] <= answer.json["safe_bytes"]
    assert first["tokens_per_s"] == max(s["tokens_per_s"] for s in settings)
    assert {4} < {s["batch_size"] for s in settings}  # what was asked is there to compare with
    assert len(found.splitlines()) == len(settings) + 1
    assert last.startswith("run      10 steps: about ")
    assert answer.json["run"]["seconds"] == pytest.approx(10 * first["seconds"], rel=1e-9)


def test_few_steps_are_simulated(monkeypatch, peaks):
    """Of 480 sequences, which can be dealt out in 24 ways, a few are tried with any policy."""
    tried, picked, without = set(), [], Search.without

    def pick(planner, size, *_):
        picked.append(size)
        return planner.step(size, recompute="full")

    monkeypatch.setattr(Search, "without", lambda self, n: tried.add(n) or without(self, n))
    monkeypatch.setattr("scripts.plan_knobs.pick_recompute", pick)
    args, plans = ask(f"{SHAPE} --grad-accum-steps 120")
    search = Search(args, plans, peaks[1], CLOCK)
    assert len(search.sizes) == 24 and search.settings()
    assert len(tried.union(picked)) <= 10 and len(picked) <= 8


@pytest.mark.parametrize("asked", ["--all-knobs", "--longest-sequence"])
def test_where_nothing_fits_there_is_still_a_way_out(asked, peaks):
    answer = answers.ask(f"{TYPED} {budget_for(peaks[0] - 9)} {asked}")
    assert "full/2" in answer.out and "nothing fits" in answer.out  # the whole table
    assert "--seq-len" in answer.command


def test_with_the_longest_sequence_the_tokens_of_a_step_stay(peaks):
    args, plans = ask(f"{SHAPE} --batch-size 2")
    limit, tokens = peaks[0] + (peaks[1] - peaks[0]) // 8, 2 * 3 * 64
    assert longest_for_all(args, plans, 1000) is args  # no length fits
    longer = longest_for_all(args, plans, limit)
    assert longer.seq_len == longer.max_position_embeddings > 64
    fits = []
    for length in (64, 128, 192, 384):
        parts = {"batch_size": 1, "grad_accum_steps": tokens // length, "seq_len": length}
        there = type(args)(**vars(args) | parts | {"max_position_embeddings": length})
        there.use_activation_checkpoint = "full"
        groups = type(args)(**vars(there) | {"use_activation_checkpoint": "full/2"})
        if min(plans.peak(there), plans.peak(groups)) <= limit:
            fits.append(length)
    assert longer.seq_len == max(fits) < 384
    one = Search(longer, plans, limit, CLOCK).without(1)
    typed = SHAPE.replace(" --card H100", "")
    found = run([*f"python train_minimal.py {typed}".split(), *one.flags(args)])
    assert found.batch_size * found.grad_accum_steps * found.seq_len == tokens
    assert found.seq_len == longer.seq_len
