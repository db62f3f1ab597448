"""python -m scripts.plan_memory answers before the run, in the trainers' own flags."""

import re
import shlex

import pytest
import torch
from harness.answers import SHAPE, ask, budget_for, run
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import CARDS, Planner
from scripts import plan_memory
from scripts.plan_table import digits, format_hours, format_seconds
from trainer.flags import build_parser, byte_count, flag, model_config
from trainer.older import OLDER
from trainer.plan import Plans, card_target
from trainer.room import Room, for_tensors

pytestmark = pytest.mark.usefixtures("everything_travels")
GIB = 2**30
POLICIES = ["none", "cheap", "selective", "mlp", "attn", "sdpa", "full"]


def plans(flags: str):
    """The planner itself, asked with the same flags."""
    asked = plan_memory.aim([*SHAPE.split(), "--batch-size", "64", *flags.split()])
    return asked.plans, asked.args


# ---- the table


@pytest.fixture(scope="module")
def tight():
    peaks = ask().peaks
    return ask(budget_for((peaks["none"] + peaks["full"]) / 2))


def test_a_row_for_each_policy_says_what_the_planner_says(tight):
    roomy = ask()
    assert list(roomy.rows) == [*POLICIES, "full/2", "full+offload"]
    assert roomy.json["takes"] == "none" and all(row["fits"] for row in roomy.rows.values())
    of_gpu, args = plans("--device cuda --memory-budget 1GiB")
    for name, row in (roomy.rows | tight.rows).items():
        step = of_gpu.planner(args).step(64, recompute=name)
        policies, group, offload = step.config.expanded
        assert row["policy"] == name and (row["group"], row["offload"]) == (group, offload)
        named = [] if name == "none" else [policies[0]] * row["layers"]
        assert [*policies] == named + [row["rest"]] * (len(policies) - len(named))
        assert (row["peak_bytes"], row["at_peak"]) == (step.peak, step.at_peak)
        assert (row["kept_bytes"], row["host_bytes"]) == (step.kept, step.host)
        assert sum(row["at_peak"].values()) == row["peak_bytes"]


def test_what_fits_is_said_and_the_cheapest_is_marked(tight):
    (mark,) = [line for line in tight.table if line.startswith(">")]
    safe, taken = tight.json["safe_bytes"], tight.rows[tight.json["takes"]]
    assert mark.startswith(f">  {taken['name']}  ") and "none" not in taken["name"]
    for row, line in zip(tight.json["rows"], tight.table[1:], strict=True):
        assert row["fits"] == (row["peak_bytes"] <= tight.json["budget_bytes"])
        assert row["fits_safely"] == (row["peak_bytes"] <= safe)
        assert (row["largest_batch"] >= 64) == row["fits"]
        assert (row["largest_batch_safely"] >= 64) == row["fits_safely"]
        assert int(line.split()[-1].replace(",", "")) == row["largest_batch_safely"]
        word = "yes" if row["fits_safely"] else "tight" if row["fits"] else "no"
        assert f"  {word}  " in line
    cheaper = [row for row in tight.json["rows"] if row["replayed"] < taken["replayed"]]
    assert not any(row["fits_safely"] for row in cheaper)
    assert " ".join(tight.command).endswith(shlex.join(taken["flags"]))


@pytest.mark.slow
def test_table_and_verdict_agree():
    """From the state alone to all that is asked for: what is recommended fits with a margin."""
    peaks, verdicts = ask().peaks.values(), set()
    for part in (-0.1, 0.2, 0.5, 0.8, 1.01):
        tensors = min(peaks) + part * (max(peaks) - min(peaks))
        answer = ask(budget_for(tensors))
        head, *_, verdict = answer.out.split("\n\n")
        assert "tensors may take " in head and " less a margin of a quarter)" in head
        rows = answer.json["rows"]
        safe, tight = (any(row[key] for row in rows) for key in ("fits_safely", "fits"))
        assert (answer.json["takes"] is not None) == safe
        assert ("nothing fits" in verdict) == (not safe)
        assert ("tight    " in verdict) == ("with a margin" in verdict) == (tight and not safe)
        verdicts.add(answer.json["takes"] or "nothing")
        if answer.command[0] == "python":  # it does what it promises
            again = Plans(61, torch.device("cuda"), torch.bfloat16).peak(run(answer.command))
            assert again <= answer.json["safe_bytes"]
    assert {"none", "nothing"} < verdicts and len(verdicts) >= 4


def test_a_giant_batch_is_answered():
    of_cpu, args = plans("--n-layers=1 --batch-size=1000000 --device cpu")
    assert 1000 < of_cpu.planner(args).largest_batch(GIB, 10**6) < 10**6
    why, knob = of_cpu.way_out(args, GIB)
    assert why == "" and of_cpu.peak(knob.change(args)) <= GIB


# ---- what to run


# What a command loses, and what it keeps, with a value behind a blank or an equals sign.
OWN = ["--card H100", "--card=H100", "--longest-sequence", "--all-knobs", "--json=x", "--fsdp",
       "--use-activation-checkpoint", "--use-activation-checkpoint mlp", "--recompute-rest=full",
       "--memory-budget 8GiB", "--nproc-per-node=2", "--memory-viz x", "--recompute-layers 1",
       "--recompute-group=1", "--offload-activations", "--at-peak"]  # fmt: skip
KEPT = ["--seq-len 32", "--lr=1", "--resume", "--train-data a.txt b.txt", "--compile", "--seed 1"]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.sampled_from([*OWN, *KEPT]), max_size=8, unique=True))
def test_a_command_has_what_was_typed_for_a_trainer_and_what_was_found(flags):
    args = plan_memory.parse([])
    found = ["--batch-size", "2", "--use-activation-checkpoint", "none"]
    argv = [*" ".join(flags).split(), "--batch-size", "5"]
    command = plan_memory.command_line(argv, args, found)
    kept = " ".join(flag for flag in flags if flag in KEPT)
    assert command.split() == f"python train_minimal.py {kept} {' '.join(found)}".split()


def test_the_command_of_several_processes():
    args = plan_memory.parse("--nproc-per-node 2 --fsdp".split())
    argv = ["--nproc-per-node", "2", "--fsdp", "--no-compress-gradients", "--lr=1"]
    command = plan_memory.command_line(argv, args, [])
    assert command == "torchrun --nproc-per-node=2 train_fsdp.py --no-compress-gradients --lr=1"


def test_help_lists_what_changes_a_plan(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with pytest.raises(SystemExit):
        plan_memory.main(["--help"])
    out, err = capsys.readouterr()
    assert err == "" and re.match("usage: ", out)
    listed = set(re.findall(r"--[\w-]+", out))
    flags = {flag for action in build_parser("", "")._actions for flag in action.option_strings[:1]}
    others = sorted(flags - listed - {"-h"} - {flag(name) for name in OLDER})
    values = {"--lr-scheduler": "=linear", "--log-to": "=wandb", "--num-epochs": "=0.3"}
    values |= dict.fromkeys(("--lr", "--min-lr", "--val-ratio"), "=0.03")
    values |= dict.fromkeys(("--resume", "--detect-anomaly"), "")
    words = " ".join(flag + values.get(flag, "=7") for flag in others)
    answer = ask(f"{words} --device cuda --memory-budget 1GiB")
    assert answer.json["rows"] == ask().json["rows"]
    assert words in " ".join(answer.command)
    assert {"--loss-chunks", "--num-tokens", "--optimizer"} <= listed and "--seed" in others


def test_nothing_fits():
    answer = ask("--device cpu --n-layers 1 --memory-budget 900KiB")
    assert answer.json["takes"] is None
    assert not any(row["fits"] for row in answer.json["rows"])
    assert re.search("nothing fits; .*--batch-size .* --grad-accum-steps ", answer.out)


@pytest.mark.slow
@pytest.mark.usefixtures("everything_travels")
def test_offload_is_taken_if_nothing_else_fits_and_what_else_there_is_is_said():
    flags = "--n-layers=4"
    peaks = ask(f"{flags} --device cuda").peaks
    budget = budget_for((peaks["full"] + peaks["full+offload"]) / 2)
    answer = ask(f"{flags} {budget}")
    *_, instead, command = answer.out.splitlines()
    takes = answer.json["takes"]
    assert takes == "full+offload" and command.endswith("checkpoint full+offload")
    said = re.fullmatch(r"or, instead of offloading, (--use-.*) \(the same sequences\)", instead)
    again = ask(f"{flags} {said[1]} {budget}").json
    assert again["takes"] and "offload" not in again["takes"] and again["batch_size"] < 64


def test_what_the_state_settles_is_answered_at_once(capsys, monkeypatch):
    monkeypatch.setattr(Planner, "step", lambda *_, **__: pytest.fail("planned"))
    flags = "--use-toy-data --n-layers 48 --d-model 1600 --n-heads 25 --device cuda".split()
    assert plan_memory.main([*flags, "--memory-budget", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert "nothing fits; weights, gradients and AdamW's state alone take 22.0 GiB, more" in out
    assert out.count("\n\n") == 1  # no table


# ---- what is planned for


def test_ddp_accumulation_and_compressed_gradients_are_planned():
    """Compressed: copies in bfloat16 at the end of backward, where processes average."""
    several = " --nproc-per-node 2"
    ways = ("", " --compress-gradients", " --grad-accum-steps 2", several)
    ways = (*ways, f"{several} --compress-gradients")
    gradients, peaks = [], []
    for more in ways:
        wide, args = plans(f"--device cuda --batch-size 1 --seq-len 8 --d-model 256{more}")
        step = wide.planner(args).step(1, recompute="full")
        gradients.append(step.at_peak["gradients"])
        peaks.append(step.peak)
    assert plan_memory.parallel_words(wide) == ", DistributedDataParallel"
    one, alone, several_batches, ddp, compressed = gradients
    assert one == alone < ddp == compressed / 1.5 and peaks[2] > peaks[0] == peaks[1]


def test_a_gpu_that_is_not_here():
    answer = ask("--device cuda")
    assert answer.json["precision"] == "bfloat16" and answer.json["budget_bytes"] is None
    assert {row["fits"] for row in answer.json["rows"]} == {None}
    assert "no cuda here and no --memory-budget" in answer.out
    assert "--memory-budget 8GiB, say, tells what fits" in answer.out
    assert answer.json["takes"] is None and not re.search("^>", answer.out, re.M)


@pytest.mark.parametrize(
    ("flags", "kind", "precision", "gib"),
    [
        ("--device=cuda --amp-dtype=float16", "cuda", torch.float16, None),
        ("--device=cuda --no-amp --memory-budget=1GiB", "cuda", torch.float32, 1),
        ("--card=H100", "cuda", torch.bfloat16, None),
        ("--card=H100 --device=cuda --memory-budget=8GiB", "cuda", torch.bfloat16, 8),
        ("--card=T4", "cuda", torch.float16, None),  # it has no bfloat16
        ("--card=V100-32GB", "cuda", torch.float16, None),
        ("--card=T4 --amp-dtype=bfloat16", "cuda", torch.bfloat16, None),
        ("--card=H100 --no-amp", "cuda", torch.float32, None),
        ("--card=M1", "mps", torch.float32, None),
        ("--card=M1 --memory-budget=12GiB", "mps", torch.float32, 12),  # sold with more
    ],
)
def test_the_flags_say_what_is_planned_for(flags, kind, precision, gib, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    args = plan_memory.parse(flags.split())
    budget = gib * GIB if gib else CARDS[args.card].memory if args.card else None
    assert plan_memory.target(args) == (kind, precision, Room(budget, kind))
    if args.card:
        assert card_target(args, CARDS[args.card]) == plan_memory.target(args)


@pytest.mark.parametrize("flag", ["--optimizer=muon", "--moments-dtype=bfloat16"])
def test_an_optimizer_of_ours_on_an_apple(flag):
    of_apple, args = plans(f"--n-layers=1 --card=M1 {flag}")
    assert 0 < of_apple.planner(args).step(64).peak


@pytest.mark.parametrize(
    ("flags", "vocabulary", "assumed"),
    [
        ("", 1024, None),
        ("--vocab-size 300", 300, "3 layers, 128 channels, 4 heads, 64 tokens (--seq-len)"),
        ("--train-data x.txt", 50257, None),
        ("--train-data x.txt --tokenizer-name byte", 257, None),
        ("--use-toy-data", 256, None),
        ("--model gpt2 --n-layers 6", 50257, None),
        ("--n-layers 12 --d-model 768", 1024, "4 heads, a vocabulary of 1,024 (--tokenizer-name "
         "gpt2: 50,257), 64 tokens (--seq-len)"),
        ("--seq-len 32 --tokenizer-name byte", 257, "3 layers, 128 channels, 4 heads"),
        ("--n-layers 1 --n-heads 2 --d-model 32 --use-toy-data --seq-len 8", 256,
         "a vocabulary of 256"),
        ("--n-layers 1 --n-heads 2 --d-model 32 --train-data x.txt --seq-len 8", 50257, None),
    ],
)  # fmt: skip
def test_what_was_assumed_is_said(flags, vocabulary, assumed):
    asked = plan_memory.aim(flags.split())
    assert asked.plans.vocab_size == vocabulary
    said = re.findall("\nnote     assumed, as nothing else was asked: (.*)",
                      plan_memory.describe_target(asked))  # fmt: skip
    assert said == ([assumed] if assumed else [])
    assert model_config(asked.args, vocabulary).recompute == "none"


# ---- times

SEVERAL = "--grad-accum-steps=3 --nproc-per-node=2"


@pytest.fixture(scope="module")
def h100():
    return ask("--card H100")


@pytest.mark.parametrize(
    ("more", "tokens"),
    [("", 64 * 32), ("--compile", 64 * 32), (SEVERAL, 2 * 3 * 64 * 32)],
)  # fmt: skip
def test_seconds_are_the_clocks(h100, more, tokens):
    """In each row, of the policy that it is about."""
    answer = ask(f"--card H100 {more}")
    of_card, args = plans(f"--card H100 {more}")
    clock = plan_memory.aim([*SHAPE.split(), "--card=H100", *more.split()]).clock
    for row in answer.json["rows"]:
        step = of_card.planner(args).step(64, recompute=row["name"])
        assert row["seconds"] == clock.seconds(step) > 0
        assert row["tokens_per_s"] == pytest.approx(tokens / row["seconds"])
        if not more:
            assert row["seconds"] == step.seconds(CARDS["H100"])
    if more == "--compile":
        assert "\nnote     eager code is simulated" in answer.out
        for name, row in h100.rows.items():
            compiled = answer.rows[name]
            assert compiled["seconds"] < row["seconds"]
            assert (compiled["replayed"] > row["replayed"]) == ("full" in name)


def test_times_are_shown_as_estimates(h100):
    wanted = ("H100", "cuda", "bfloat16", CARDS["H100"].memory)
    assert tuple(h100.json[k] for k in ("card", "device", "precision", "budget_bytes")) == wanted
    assert h100.json["safe_bytes"] == pytest.approx(0.9 * CARDS["H100"].memory, abs=1)
    columns = re.split(" {2,}", h100.table[0].strip())
    assert columns == ["policy", "peak", "time", "tokens/s", "fits", "largest batch"]
    assert re.search("^card     H100: .* at most; times are estimates$", h100.out, re.M)
    none, *_, offloaded = h100.json["rows"]
    for row, line in zip(h100.json["rows"], h100.table[1:], strict=True):
        more = row["seconds"] / none["seconds"] - 1
        time = f"~{format_seconds(row['seconds'])}" if row is none else f"{more:+.0%}"
        speed = "~" + digits(3, row["tokens_per_s"])
        if row is offloaded:  # the clock does not know its copies
            time, speed = f"> {time}", f"<{speed[1:]}"
        assert f"  {time}  {speed}  yes  " in line


def test_tf32_makes_products_of_float32_faster():
    for more, speed in (("", "67.0"), (" --tf32", "494")):
        asked = plan_memory.aim(f"--card H100 --no-amp{more}".split())
        assert f"card     H100: {speed} TFLOP/s in float32" in plan_memory.describe_target(asked)


def test_this_machine_is_measured(monkeypatch):
    mine = CARDS["H100"]
    monkeypatch.setattr("trainer.card.this_machine", lambda *what: mine)
    asked = plan_memory.aim(["--card=This machine", "--device=cpu"])
    assert asked.clock.card is mine and asked.plans.device.type == "cpu"
    assert asked.room.safe == for_tensors(asked.room.budget, "cpu") and asked.room.is_free
    said = plan_memory.describe_target(asked)
    assert re.search(r"^card     H100: .*, measured in [\d.]+ s; times are", said, re.M)


@pytest.mark.parametrize(
    ("flags", "tokens", "steps", "words"),
    [
        ("--num-tokens=2.5M", 2_500_000, 1221, r"2\.5M tokens, 1,221 steps: about "),
        (f"--num-steps=70 {SEVERAL}", 6 * 70 * 2048, 70, "70 steps: about "),
        (f"--num-tokens=1M {SEVERAL}", 10**6, 82, "1M tokens, 82 steps: about "),
        ("", 10**9, 488_282, "1B tokens, 488,282 steps: about "),  # what people compare by
        ("--num-epochs=2", 10**9, 488_282, "1B tokens, 488,282 steps: about "),
    ],
)
def test_the_whole_run(flags, tokens, steps, words):
    answer = ask(f"--card H100 {flags}".strip())
    run = answer.json["run"]
    assert (run["tokens"], run["steps"]) == (tokens, steps)
    (said,) = re.findall(r"^run      (.*)$", answer.out, re.M)
    epochs = "note     how many steps --num-epochs 2 are is up to the data" in answer.out
    assert re.match(words, said) and epochs == ("epochs" in flags)
    seconds = steps * answer.rows[answer.json["takes"]]["seconds"]
    assert run["seconds"] == pytest.approx(seconds, rel=1e-9)
    about, without = said.split(": about ")[1].split("; ")
    assert about == format_hours(run["seconds"])
    assert without == "without data, communication, evaluation"


def test_without_a_card_nothing_is_timed():
    assert ask().json["card"] is None and ask().rows["full"]["seconds"] is None
    assert re.split(" {2,}", ask().table[0].strip())[4:6] == ["FLOPs twice", "fits"]
    asked = ask("--device cuda --num-tokens 1M")
    assert "run      1M tokens, 489 steps; --card tells how long they take" in asked.out
    assert asked.json["run"] == {"tokens": 10**6, "steps": 489, "seconds": None}
    assert "\nrun " not in ask("--device cuda").out  # nobody knows, nobody asked


# ---- words


@pytest.mark.parametrize(
    ("form", "value", "words"),
    [(form, value, words) for form, pairs in {
        format_hours: {0.0016: "0.0016 s", 20: "20 s", 91: "1.5 min", 1500: "25 min",
                       5399: "90 min", 5401: "1.5 h", 61_000: "17 h", 359_000: "100 h",
                       450_000: "5.2 days", 10**8: "1,200 days"},
        (lambda x: digits(2, x)): {0.0054: "0.0054", 4.0: "4.0", 9.96: "10", 54: "54",
                                   358_123: "360,000"},
        (lambda x: digits(3, x)): {0.0054: "0.00540", 9.96: "9.96", 54: "54.0",
                                   358_123: "358,000"},
        byte_count: {"8GiB": 2**33, "8gib": 2**33, "1.5 MiB": 3 * 2**19, "8GB": 8 * 10**9,
                     "500b": 500, "8G": 2**33, "500 m": 500 * 2**20, "2kib": 2048, "3k": 3072},
    }.items() for value, words in pairs.items()],
)  # fmt: skip
def test_figures_in_words(form, value, words):
    assert form(value) == words


# ---- mistakes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--memory-budget 8", "--memory-budget: must be a number with a unit"),
        ("--n-heads 3", ".*must be divisible by --n-heads"),
        ("--json nowhere/plan.json", "--json: there is no folder nowhere"),
        ("--memory-viz nowhere/step.pickle", "--memory-viz: there is no folder nowhere"),
        ("--memory-viz tests", "--memory-viz: tests is a folder"),
        ("--json x --memory-viz x", "--json and --memory-viz: both are to be written to x"),
        ("--nproc-per-node 0", "--nproc-per-node"),
        ("--fsdp", "--fsdp: over how many processes"),
        ("--card=Voodoo2", r"--card: .*Voodoo2.*RTX 3060 12GB, .*M4 Max.*; or this-machine"),
        ("--card=Voodoo2", "--card: .* of any other, --device cuda --memory-budget 16GiB tells"),
        ("--card=H100 --memory-budget=81GiB", "--memory-budget 81.0 GiB is more than the 79.1 GiB"),
        ("--card=H100 --device=cpu", "--device cpu: H100 is cuda; leave --device out"),
        ("--card=M1 --device=cuda", "--device cuda: M1 is mps; leave --device out"),
        ("--card=M1 --amp-dtype=float16", "--amp-dtype float16"),
        ("--card=this-machine --device=cuda", "--device cuda: .* finds none"),
        ("--card=this-machine --nproc-per-node=2", "--card this-machine .* leave out --nproc"),
        ("--all-knobs", "--all-knobs compares times: name a --card, or --card this-machine"),
        ("--longest-sequence --device=cuda", "--longest-sequence: within what"),
        ("--at-peak --use-activation-checkpoint mlp:9", "--use-activation-checkpoint must be POL"),
    ],
)
def test_bad_input_gets_one_line(flags, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)  # no bar before it either
    try:
        code = plan_memory.main(flags.split())
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert code == 2 and out == "" and re.match(f"error: {message}", line), line


def test_progress_is_shown_while_it_simulates(monkeypatch):
    said = []

    class Bar:
        update, write = lambda self, n=1: said.append("step"), staticmethod(said.append)
        __enter__, __exit__ = lambda self: self, lambda *_: None

    monkeypatch.setattr(plan_memory, "tqdm", lambda **_: Bar())
    flags = "--n-layers 1 --batch-size 3 --device cuda"  # (asked nowhere else)
    assert plan_memory.main([*SHAPE.split(), *flags.split()]) == 0
    assert said[0] != "step" and said[1:10] == 9 * ["step"]  # first what it is about


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Planner, "step", interrupt)
    assert plan_memory.main(SHAPE.split()) == 130
    assert capsys.readouterr().err == "stopped\n"  # where it is redirected, no progress is shown
