"""The longest sequence and all knobs: against every possibility, one by one."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from planner import CARDS, Planner
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
from trainer.flags import build_parser, fill_in
from trainer.plan import Plans

SHAPE = (
    "--use-toy-data --vocab-size 61 --n-layers 2 --n-heads 2 --d-model 16 --seq-len 64 "
    "--batch-size 4 --grad-accum-steps 3 --card H100"
)
H100 = CARDS["H100"]
CLOCK = Clock(H100, compiled=False, micro_batches=3, processes=1)


def ask(flags: str = SHAPE):
    args = plan_memory.parse(flags.split())
    args.use_activation_checkpoint = "none"
    return args, Plans(61, torch.device("cuda"), torch.bfloat16)


def run(command: str):
    """The flags that a recommended command asks for."""
    words = command.split()
    assert words[:2] == ["python", "train_minimal.py"]
    return fill_in(build_parser("test", "x.pt").parse_args(words[2:]))


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
def test_the_longest_sequence_of_each_row(tmp_path, capsys):
    """It fits, 128 tokens more do not; and so does the command, which is that of the longest."""
    args, plans = ask()
    path, limit = tmp_path / "plan.json", int(plans.peak(args) * 1.1)
    flags = [*SHAPE.split(), f"--memory-budget={int(limit / 0.75) + 1}b", "--longest-sequence"]
    assert plan_memory.main([*flags, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    result = json.loads(path.read_text())
    limit = result["safe_bytes"]
    lengths = []
    for row, line in zip(result["rows"], out.split("\n\n")[1].splitlines()[1:], strict=True):
        longest = row["longest_sequence_safely"]
        memory = {"recompute": row["policy"], "offload_activations": row["offload"]}
        memory |= {"recompute_group": row["group"]}
        if row["layers"] < 2 and row["policy"] != "none":
            memory |= {"recompute_layers": row["layers"]}
        peaks = []
        for length in (longest, longest + 2 * STEP):
            args.seq_len = args.max_position_embeddings = length
            peaks.append(plans.planner(args).step(4, **memory).peak)
        assert peaks[0] <= limit < peaks[1] and longest % STEP == 0 and longest > 0
        assert line.endswith(f"  {longest:,}")
        lengths.append(longest)
    found = run(out.splitlines()[-1])
    assert found.seq_len == found.max_position_embeddings == max(lengths)
    assert plans.peak(found) <= limit and max(lengths) > min(lengths)


def test_nothing_fits_is_said_as_ever(capsys):
    flags = [*SHAPE.split(), "--n-layers=1"]
    assert plan_memory.main([*flags, "--memory-budget=1MiB", "--longest-sequence"]) == 0
    assert "nothing fits; " in capsys.readouterr().out


def test_positions_grow_with_the_length():
    args, _ = ask("--seq-len 64")
    assert with_length(args, 128) == {"seq_len": 128, "max_position_embeddings": 128}
    assert longest_possible(args) == 10**6
    args, _ = ask("--seq-len 64 --max-position-embeddings 1000")  # typed: they stay
    assert with_length(args, 128) == {"seq_len": 128} and longest_possible(args) == 1000


@pytest.mark.parametrize(
    ("flags", "length", "words"),
    [
        ("--seq-len 64", 128, "--seq-len 128"),
        ("--seq-len 64", 64, ""),
        ("--model gpt2", 512, "--seq-len 512"),  # the name stands for 1,024 positions
        ("--model gpt2", 1024, ""),
        ("--model gpt2", 4096, "--seq-len 4096 --max-position-embeddings 4096"),
    ],
)
def test_the_flags_of_a_length(flags, length, words):
    args, _ = ask(flags)
    assert " ".join(length_words(args, with_length(args, length))) == words
    found = run(f"python train_minimal.py {flags} {words}")
    wanted = with_length(args, length)
    assert {name: getattr(found, name) for name in wanted} == wanted


# ---- all knobs


def every_setting(search: Search) -> list[float]:
    """Seconds of the fastest way of each micro-batch that fits."""
    found = []
    for size in search.sizes:
        step = pick_recompute(search.planner(size), size, search.safe, H100)
        if step.peak <= search.safe:
            found.append(search.clock_of(size).seconds(step))
    return found


@pytest.fixture(scope="module")
def peaks() -> tuple[int, int]:
    """Of one sequence with the most recompute, and of all of them without any."""
    args, plans = ask()
    search = Search(args, plans, 0, CLOCK)
    full = search.planner(1).step(1, recompute="full").peak
    return full, search.planner(12).step(12, recompute="none").peak


SLOW = [pytest.param(share, marks=pytest.mark.slow) for share in (-0.01, 0.0, 0.6)]


@pytest.mark.parametrize("share", [*SLOW, 0.25, 1.0])
def test_the_fastest_of_all_is_found(peaks, share):
    least, most = peaks
    args, plans = ask()
    safe = int(least + share * (most - least))
    search = Search(args, plans, safe, CLOCK)
    settings = search.settings()
    every = every_setting(search)
    if not every:
        assert settings == []
        return
    assert settings[0].seconds == min(every)
    assert [s.seconds for s in settings] == sorted(s.seconds for s in settings)
    for setting in settings:
        assert setting.step.peak <= safe
        assert setting.clock.micro_batches * setting.step.batch_size == 12
    marked, *others = format_settings(settings).splitlines()[1:]
    assert marked[0] == ">" and {line[0] for line in others} <= {" "}
    assert digits(3, settings[0].clock.tokens_per_s(settings[0].step)) in marked


class Told(Search):
    """Knows the seconds of each micro-batch, those without recompute too; notes who was asked."""

    def __init__(self, start, seconds, bounds):
        super().__init__(ask()[0], None, 9, CLOCK)
        self.start, self.of_size, self.bounds, self.asked = start, seconds, bounds, []

    def largest_without(self):
        return self.start

    def bound(self, size):
        return self.bounds[size]

    def fastest(self, size):
        self.asked.append(size)
        self.found[size] = SimpleNamespace(seconds=self.of_size[size], step=SimpleNamespace(peak=1))
        return self.found[size]


def test_both_ways_are_tried_for_as_long_as_it_pays():
    up = {1: 9.0, 2: 8.0, 3: 7.0, 4: 6.0, 6: 5.0, 12: 6.0}
    search = Told(3, up, up)  # 4 is what was asked
    assert search.settings()[0].seconds == 5 and set(search.asked) == {3, 4, 6}
    down = {1: 6.0, 2: 5.0, 3: 6.0, 4: 7.0, 6: 8.0, 12: 9.0}  # a cache that holds little
    search = Told(3, down, down)
    assert search.settings()[0].seconds == 5 and set(search.asked) == {2, 3, 4}
    search = Told(1, up | {2: 10.0}, up | {2: 10.0})
    assert len(search.settings()) == 2 and set(search.asked) == {1, 4}  # to compare with


def test_one_command_that_does_it(tmp_path, capsys, peaks):
    """The same sequences a step; more tokens/s than as asked; and it fits."""
    path, limit = tmp_path / "plan.json", sum(peaks) / 2
    flags = [*SHAPE.split(), f"--memory-budget={int(limit / 0.75)}b", "--all-knobs"]
    assert plan_memory.main([*flags, "--json", str(path)]) == 0
    *_, found, last = capsys.readouterr().out.split("\n\n")
    first, *_ = settings = json.loads(path.read_text())["all_knobs"]
    args = run(last.splitlines()[-1])
    assert args.batch_size * args.grad_accum_steps == 12 and args.seq_len == 64
    assert (args.batch_size, args.grad_accum_steps) == (
        first["batch_size"],
        first["grad_accum_steps"],
    )
    assert ask()[1].peak(args) == first["peak_bytes"] <= limit
    assert first["tokens_per_s"] == max(s["tokens_per_s"] for s in settings)
    assert {4} < {s["batch_size"] for s in settings}  # what was asked is there to compare with
    assert len(found.splitlines()) == len(settings) + 1


def test_few_steps_are_simulated(monkeypatch, peaks):
    """Of 480 sequences, which can be dealt out in 24 ways."""
    sizes = []
    simulate = Planner.simulate

    def watch(self, batch_size, config):
        sizes.append(batch_size)
        return simulate(self, batch_size, config)

    monkeypatch.setattr(Planner, "simulate", watch)
    args, plans = ask(f"{SHAPE} --grad-accum-steps 120")
    search = Search(args, plans, peaks[1], CLOCK)
    assert len(search.sizes) == 24 and search.settings()
    assert len(set(sizes)) <= 10 and len(sizes) <= 60


def test_where_nothing_fits_there_is_still_a_way_out(capsys, peaks):
    flags = [*SHAPE.split(), f"--memory-budget={int(peaks[0] / 0.75) - 9}b", "--all-knobs"]
    assert plan_memory.main(flags) == 0
    out = capsys.readouterr().out
    assert "full in groups of 2" in out and "nothing fits" in out  # the table of all policies
    assert "--seq-len" in out.splitlines()[-1]


def test_with_the_longest_sequence_the_tokens_of_a_step_stay(peaks):
    args, plans = ask()
    limit, tokens = peaks[0] + (peaks[1] - peaks[0]) // 4, 4 * 3 * 64
    longer = longest_for_all(args, plans, limit)
    assert longer.seq_len == longer.max_position_embeddings > 64
    fits = []
    for length in (64, 128, 192, 256, 384, 768):
        parts = {"batch_size": 1, "grad_accum_steps": tokens // length, "seq_len": length}
        there = type(args)(**vars(args) | parts | {"max_position_embeddings": length})
        there.use_activation_checkpoint = "full"
        groups = type(args)(**vars(there) | {"recompute_group": 2})
        if min(plans.peak(there), plans.peak(groups)) <= limit:
            fits.append(length)
    assert longer.seq_len == max(fits) < 768
    best, *_ = Search(longer, plans, limit, replace(CLOCK, micro_batches=1)).settings()
    found = run(f"python train_minimal.py {SHAPE} {' '.join(best.flags(args))}".replace(
        " --card H100", ""
    ))  # fmt: skip
    assert found.batch_size * found.grad_accum_steps * found.seq_len == tokens
    assert found.seq_len == longer.seq_len and plans.peak(found) <= limit


def test_no_length_fits():
    args, plans = ask()
    assert longest_for_all(args, plans, 1000) is args
