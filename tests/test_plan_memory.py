"""python -m scripts.plan_memory answers before the run, in the trainers' own flags."""

import re
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from harness.answers import BATCH, ask, budget_for, question
from harness.planned import MAKE_PLANNER
from harness.runs import typed

from model import MLP
from planner import CARDS, KINDS, Planner
from planner.choose import UNIFORM_POLICIES
from planner.roofline import LINKS
from planner.shards import root_group_bytes
from planner.units import format_bytes, format_sizes
from scripts import plan_memory
from scripts.plan_table import (
    choice_key,
    cost_key,
    format_speed_range,
    format_table,
    format_time,
    plan_row,
    recommended_plan,
    significant_digits,
)
from scripts.plans import OTHER_WAYS
from trainer.device import MemoryBudget
from trainer.flags import byte_count
from trainer.settings import resolve, to_words

pytestmark = pytest.mark.usefixtures("everything_travels")
GIB = 2**30

SEVERAL = "--grad-accum-steps=3 --nproc-per-node=2"


# ---- the table


def tight() -> str:
    """A budget for some of the rows."""
    peaks = ask().peaks
    return budget_for((peaks["none"] + peaks["full"]) / 2)


@pytest.mark.parametrize(
    ("flags", "sequences", "takes"),
    [
        pytest.param("--device cuda --memory-budget 1GiB", 64, "none", marks=pytest.mark.slow),
        ("tight", 64, None),
        pytest.param(f"--card H100 {SEVERAL}", 2 * 3 * 64, "none", marks=pytest.mark.slow),
        (f"--card H100 {SEVERAL} --fsdp", 2 * 3 * 64, "none"),
    ],
)
def test_a_row_says_what_the_planner_does(flags, sequences, takes):
    """Of one batch; only the last column is about another one."""
    flags = tight() if flags == "tight" else flags
    answer, plain = ask(flags), question(flags)
    room, shards = plain.memory_budget, plain.layout.shard_degree
    policies = [name for name in UNIFORM_POLICIES if shards == 1 or "/" not in name]
    mix = [name for name in answer.rows if ":" in name]
    assert bool(mix) == (takes is None)
    assert [n for n in answer.rows if n not in mix] == [*policies, "full+offload"]
    shown = (next(rows) for _, rows in groupby(answer.json["rows"], choice_key))
    for row, line in zip(shown, answer.table[1:], strict=True):
        plan = plain.with_policy(row["name"])
        step = plan.step
        sizes = [row[f"{name}_bytes"] for name in ("peak", "kept", "host")]
        assert (
            sizes == [step.peak, step.kept, step.host_bytes]
            and row["at_peak"] == step.bytes_by_kind_at_peak
        )
        assert row["fits"] == (step.peak <= room.limit_bytes)
        assert row["fits_beside_context"] == (step.peak <= room.bytes_left_by_context)
        assert (
            row["fits_safely"]
            == (step.peak <= room.bytes_within_margin)
            == (row["largest_batch"] >= 64)
        )
        word = "yes" if row["fits_safely"] else "tight" if row["fits_beside_context"] else "no"
        assert re.search(f"  {word} +{row['largest_batch']:,}$", line)
        if plan.card:
            assert row["seconds"] == pytest.approx(plan.seconds, rel=1e-9)
            least, most = (
                significant_digits(2, row["tokens_per_s"] / slower) for slower in (1.25, 1)
            )
            # No clock knows the copies of offload
            assert f"  {'<' if 'offload' in row['name'] else f'{least} to'} {most}  {word} " in line
            assert row["tokens_per_s"] == pytest.approx(sequences * 32 / plan.seconds)
    fitting = [row for row in answer.json["rows"][:-1] if row["fits_safely"]]
    by = "seconds" if plain.card else "recomputed_flops_share"
    cheapest = min(fitting, key=lambda row: (row[by], bool(plain.card) * row["peak_bytes"]))
    assert answer.json["takes"] == cheapest["name"] and takes in (None, cheapest["name"])
    (mark,) = [line for line in answer.table if line.startswith(">")]
    assert mark.startswith(f">  {cheapest['name']}  ")
    assert answer.command[-1] == cheapest["name"]


def test_what_is_offloaded_is_recommended_last():
    """No clock knows what its copies take."""
    deep = "--n-layers 4"
    peaks = ask(f"{deep} --device cuda").peaks
    plain = question(f"{deep} {budget_for(peaks['full'])}")
    assert cost_key(plain.with_policy("cheap+offload")) < cost_key(plain.with_policy("full"))
    assert "offload" not in recommended_plan(plain).policy
    between = question(f"{deep} {budget_for((peaks['full'] + peaks['full+offload']) / 2)}")
    assert recommended_plan(between).policy == "full+offload"
    assert recommended_plan(question(f"{deep} {budget_for(peaks['full+offload'] - 9)}")) is None


def test_the_extra_flops_are_those_of_a_changed_mlp(monkeypatch):
    """One that multiplies by c_fc twice: so does its replay."""
    monkeypatch.setattr("trainer.plan.make_planner", MAKE_PLANNER.__wrapped__)
    extra = []
    for up_project in (MLP.up_project, lambda mlp, x: mlp.c_fc(x) + mlp.c_fc(x)):
        monkeypatch.setattr(MLP, "up_project", up_project)
        plan = question("--device cuda").with_policy("full")
        extra.append(
            plan_row(plan)["recomputed_flops_share"] * plan.step.needed_and_replayed_flops[0]
        )
    blocks, tokens, weights = 2, BATCH * 32, 16 * 64
    assert extra[1] - extra[0] == pytest.approx(2 * blocks * tokens * weights)


def test_what_offers_no_choice_is_one_line():
    """Rows of equal bytes; and, of those that do not fit, of one printed peak. A GPU keeps half a
    GiB for its context, and a column has one unit."""
    budgets = (24, "cuda", False), (1, "cuda", False), (24, "cpu", False), (24, "cuda", True)
    left = [MemoryBudget(n * GIB, *device).bytes_left_by_context / GIB for n, *device in budgets]
    assert left == [23.5, 0.75, 24, 24]  # never less than the margin; what is free has a context
    rows = [
        {
            "policy": name, "peak_bytes": peak * GIB, "kept_bytes_per_block": kept * GIB,
            "fits_beside_context": peak < 23.5, "fits_safely": peak < 21, "largest_batch": batch,
            "where": "head", "kept_bytes": kept, "recomputed_flops_share": 0.5, "seconds": None,
        }
        for name, peak, kept, batch in (
            *(("none", 23.61, 4, 0), ("cheap", 23.59, 3, 0), ("mlp", 23.4, 2, 0)),
            *(("sdpa", 0.3, 1, 9), ("full", 0.3, 0.05, 9), ("full/2", 0.3, 0.05, 9)),
        )
    ]  # fmt: skip
    assert [re.sub(" +", " ", line) for line in format_table(rows, "full/2").splitlines()[1:]] == [
        " none or cheap 23.6 GiB head 4,096.0 MiB 50.0% no 0",
        " mlp 23.4 GiB head 2,048.0 MiB 50.0% tight 0",
        " sdpa 0.3 GiB head 1,024.0 MiB 50.0% yes 9",
        "> full or full/2 0.3 GiB head 51.2 MiB 50.0% yes 9",
    ]


# ---- what to run


# What a command loses, and what it keeps
OWN = "--card H100 --all-knobs --at-peak --json=x --use-activation-checkpoint mlp:1,full"
KEPT = "--seq-len 32 --lr=0.1 --train-data a.txt b.txt --compile --no-tf32 --model gpt2"


@pytest.mark.parametrize(
    ("processes", "trainer"),
    [
        ("", "python train_minimal.py"),
        ("--nproc-per-node 2 --fsdp", "torchrun --nproc-per-node=2 train_fsdp.py"),
    ],
)
def test_a_command_has_what_was_typed_for_a_trainer_and_what_was_found(processes, trainer):
    words = f"{OWN} --memory-budget 8GiB {KEPT} --batch-size 5 {processes}".split()
    found = {"batch_size": 2, "use_activation_checkpoint": "mlp:2,cheap"}
    command = plan_memory.command_line(plan_memory.parse(words), **found)
    assert command.startswith(f"{trainer} --")
    wanted = f"{KEPT} --batch-size 2 --use-activation-checkpoint mlp:2,cheap"
    assert typed(*command.removeprefix(trainer).split()) == typed(*wanted.split())


@pytest.mark.parametrize(("budget", "tables"), [("12GiB", 0), ("24GiB", 1)])
def test_what_the_state_settles_is_answered_before_a_step(capsys, monkeypatch, budget, tables):
    """Of other flags only the state is named, and each fits: no step is simulated for them."""
    asked = []
    monkeypatch.setattr(Planner, "step", lambda *given, **memory: asked.append(memory))
    monkeypatch.setattr(plan_memory, "plan_row", lambda plan: {"host_bytes": 0})
    monkeypatch.setattr("scripts.plan_table.format_table", lambda *given: "the table")
    flags = "--model gpt2-xl --device cuda".split()
    assert plan_memory.main([*flags, "--memory-budget", budget]) == 0
    _, said, *rest = capsys.readouterr().out.strip().split("\n\n")
    assert "nothing fits; weights, gradients and AdamW's state alone take 23.2 GiB, more" in said
    assert asked == [] and len(rest) == tables
    usable = question(f"--device cuda --memory-budget {budget}").bytes_within_margin
    ways = re.findall(r"(--[^(]*) \(([\d.]+ GiB)\)", said)
    assert len(ways) == (3 if tables else 0) and OTHER_WAYS in said
    for words, size in ways:
        changed = plan_memory.parse([*flags, *words.split(), "--memory-budget", budget])
        state = plan_memory.make_plan(changed).state_bytes
        assert format_bytes(state) == size and state < usable


def test_the_state_is_that_of_the_step():
    """Counted on a model without memory, and by the simulation."""
    for flags in ("", "--optimizer muon --moments-dtype bfloat16", "--nproc-per-node 3 --fsdp"):
        plan = question(f"--device cuda {flags}")
        at_start, gathered = plan.step.timeline[0], root_group_bytes(plan.meta_model, 3)
        kept = sum(at_start[KINDS.index(kind)] for kind in ("parameters", "optimizer"))
        rows = sum(p.nbytes for p in plan.planner.local_model.parameters())
        assert plan.state_bytes == kept + rows + gathered * (plan.layout.shard_degree > 1)


def test_help_begins_with_what_matters(capsys):
    assert plan_memory.main(["--help"]) == 0
    usage, _, _, first, *_ = capsys.readouterr().out.split("\n\n")
    named = re.findall("^  (--[a-z-]+)", first, re.M)
    assert usage.endswith(" [FLAG ...]") and len(named) == 10 and named[:2] == ["--model", "--card"]


# ---- what is planned for


def test_ddp_accumulation_and_compressed_gradients_are_planned():
    """Compressed: copies in bfloat16 at the end of backward, where processes average."""
    gradients = []
    several = "--nproc-per-node 2"
    for more in ("", "--compress-gradients", several, f"{several} --compress-gradients"):
        wide = question(f"--device cuda --batch-size 1 --seq-len 8 --d-model 256 {more}")
        gradients.append(wide.planner.step(1, recompute="full").bytes_by_kind_at_peak["gradients"])
    one, alone, ddp, compressed = gradients
    assert one == alone < ddp == compressed / 1.5
    accumulated = question("--device cuda --grad-accum-steps 2").planner
    assert accumulated.accumulates_gradients and accumulated.step(64).peak > ask().peaks["none"]


def test_a_gpu_that_is_not_here_and_no_card():
    answer = ask("--device cuda --num-tokens 1M")
    for row in answer.json["rows"]:
        assert row["fits"] is row["largest_batch"] is row["seconds"] is None
    assert answer.json["takes"] is answer.json["budget_bytes"] is answer.json["card"] is None
    assert "no cuda here: --memory-budget 8GiB, for example, shows what fits" in answer.out
    assert "\nrun " not in answer.out
    assert answer.json["run"] == {"tokens": 10**6, "steps": 489, "seconds": None}


@pytest.mark.parametrize(
    ("flags", "kind", "precision", "gib"),
    [
        ("--device=cuda --amp-dtype=float16", "cuda", torch.float16, None),
        ("--device=cuda --no-amp --memory-budget=1GiB", "cuda", torch.float32, 1),
        ("--card=H100", "cuda", torch.bfloat16, None),
        ("--card=H100 --device=cuda --memory-budget=8GiB", "cuda", torch.bfloat16, 8),
        ("--card=T4", "cuda", torch.float16, None),  # it has no bfloat16
        ("--card=T4 --amp-dtype=bfloat16", "cuda", torch.bfloat16, None),
        ("--card=H100 --no-amp", "cuda", torch.float32, None),
        ("--card=M1 --optimizer=muon", "mps", torch.float32, None),
        ("--card=M1 --memory-budget=12GiB", "mps", torch.float32, 12),  # sold with more
    ],
)
def test_the_flags_say_what_is_planned_for(flags, kind, precision, gib, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    plan = question(flags)
    budget = gib * GIB if gib else plan.card and plan.card.memory
    assert (plan.device.type, plan.precision) == (kind, precision)
    assert plan.memory_budget == MemoryBudget(budget, kind)
    assert (plan.card is None) == ("card" not in flags)
    assert plan.peak > plan.state_bytes  # ours, the optimizers of an Apple, too


@pytest.mark.parametrize(
    ("flags", "vocabulary", "added"),
    [
        ("", 1024, "--num-tokens 1B"),
        ("--vocab-size 300 --num-steps 9", 300, ""),
        ("--train-data x.txt", 50257, "--num-tokens 1B"),
        ("--train-data x.txt --tokenizer-name byte --num-tokens 9", 257, ""),
        ("--model gpt2 --n-layers 6", 50257, "--train-data YOUR_TEXT --num-tokens 1B"),
        ("--model gpt2 --num-tokens 9", 50257, "--train-data YOUR_TEXT"),
        ("--use-toy-data", 256, "--num-tokens 1B"),
    ],
)
def test_the_vocabulary_is_known_without_data(flags, vocabulary, added):
    """And what the data of a command need in addition, to be those whose time is told."""
    settings = plan_memory.parse(flags.split())
    plan = plan_memory.make_plan(settings)
    assert plan.vocab_size == plan.config.vocab_size == vocabulary and plan.policy == "none"
    assert " ".join(to_words(plan_memory.whole_run_data_flags(plan, settings))) == added


def test_this_machine_is_measured(monkeypatch):
    mine = replace(CARDS["H100"], memory=0)
    monkeypatch.setattr("planner.cards.measure_this_machine", lambda *what: mine)
    typed = plan_memory.parse(["--card=This machine", "--device=cpu"])
    plan = plan_memory.make_plan(typed)
    assert plan.card is mine and plan.device.type == "cpu" and plan.memory_budget.is_free
    assert " GB/s measured; times are" in plan_memory.describe_target(plan, typed.script)


# ---- the whole run


@pytest.mark.parametrize(
    ("flags", "tokens", "steps", "words"),
    [
        ("--num-tokens=2.5M", 2_500_000, 1221, "2,500,000 tokens, 1,221 steps"),
        (f"--num-steps=70 {SEVERAL}", 6 * 70 * 2048, 70, "860,160 tokens, 70 steps"),
        (f"--num-tokens=1M {SEVERAL}", 10**6, 82, "1,000,000 tokens, 82 steps"),
        ("", 10**9, 488_282, "1,000,000,000 tokens, 488,282 steps"),  # to compare by
    ],
)
def test_the_whole_run(flags, tokens, steps, words):
    answer = ask(f"--card H100 {flags}")
    run = answer.json["run"]
    seconds = steps * answer.rows[answer.json["takes"]]["seconds"]
    assert run == {"tokens": tokens, "steps": steps, "seconds": pytest.approx(seconds, rel=1e-9)}
    (said,) = re.findall(r"^run      (.*); without data, ", answer.out, re.M)
    assert said == f"{words}: {format_time(run['seconds'], 1.25)}"
    # A trainer takes the command, and trains as long as was told.
    command = typed(" ".join(answer.command).partition(".py ")[2])
    assert resolve(command, question(flags).layout).num_steps == steps


@pytest.mark.parametrize(
    ("form", "value", "words"),
    [(form, value, words) for form, pairs in {
        format_time: {0.0016: "1.6 ms", 0.99: "990 ms", 20: "20 s", 91: "1.5 min", 1500: "25 min",
                       5399: "90 min", 5401: "1.5 h", 61_000: "17 h", 359_000: "100 h",
                       450_000: "5.2 days", 10**8: "1,200 days"},
        (lambda x: significant_digits(2, x)): {0.0054: "0.0054", 4.0: "4.0", 9.96: "10",
                                               358_123: "360,000"},
        (lambda x: significant_digits(3, x)): {0.0054: "0.00540", 9.96: "9.96", 54: "54.0"},
        (lambda x: format_time(x, 1.25)): {0.02: "20 to 25 ms", 88: "88 to 110 s"},
        format_speed_range: {17_700: "14,000 to 18,000"},
        (lambda x: " ".join(format_sizes([x, 5 * GIB]))): {0: "0.0 GiB 5.0 GiB",
             300 * 2**20: "0.3 GiB 5.0 GiB", 100 * 2**20: "100.0 MiB 5,120.0 MiB"},
        byte_count: {"8GiB": 2**33, "8gib": 2**33, "1.5 MiB": 3 * 2**19, "8GB": 8 * 10**9,
                     "500b": 500, "8G": 2**33, "500 m": 500 * 2**20, "2kib": 2048, "3k": 3072},
    }.items() for value, words in pairs.items()],
)  # fmt: skip
def test_figures_in_words(form, value, words):
    assert form(value) == words


# ---- communication


@pytest.mark.parametrize(("flag", "times"), [("", 2), ("--fsdp", 3), ("--sp", 3)])
def test_the_time_of_communication_is_that_of_its_bytes_over_the_link(flag, times, monkeypatch):
    """Less what runs beside it. On a link so slow that nothing else matters."""
    monkeypatch.setitem(LINKS, "pcie3", 1.0)
    plan = question(f"--card H100 --nproc-per-node 2 {flag} --link pcie3")
    weights = 4 * plan.n_parameters
    exchanged = 8 * 2 * 16 * 2 * BATCH * 16 * (flag == "--sp")  # bfloat16
    expected = (times * weights + exchanged) / 2 / 0.8
    assert plan.exposed_communication_seconds == pytest.approx(expected, rel=1e-3)
    assert plan.seconds == plan.step.seconds(plan.card) + plan.exposed_communication_seconds
    fast = question(f"--card H100 --nproc-per-node 2 {flag}")
    assert fast.link == "nvlink" and fast.exposed_communication_seconds < 1e-3
