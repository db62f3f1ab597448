"""--card: whose memory it is, whose clock tells the time, and who says no."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_agree import Other
from test_knobs import SHAPE as TRAINER_SHAPE
from test_knobs import parse as parse_trainer

import trainer.card
import trainer.plan
from model import MiniGPTConfig
from planner import CARDS, Card, Planner
from scripts import plan_memory
from scripts.plan_table import Clock, Row, digits, format_seconds, recommend
from trainer.card import clock_card
from trainer.flags import UsageError, model_config
from trainer.plan import card_target
from trainer.process import OneProcess
from trainer.room import Room, for_tensors

SHAPE = (
    "--use-toy-data --vocab-size 61 --n-layers 2 --n-heads 2 --d-model 16 --seq-len 32 "
    "--batch-size 64"
).split()
GIB = 2**30
H100 = CARDS["H100"]


def plan(tmp_path, *flags: str) -> dict:
    path = tmp_path / "plan.json"
    assert plan_memory.main([*SHAPE, "--json", str(path), *flags]) == 0
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict:
    return plan(tmp_path_factory.mktemp("plain"), "--card=h100")


def columns(out: str) -> list[str]:
    (head,) = re.findall(r"^ +policy.*$", out, re.M)
    return re.split(" {2,}", head.strip())


# ---- in plan_memory


@pytest.mark.parametrize(
    ("flags", "kind", "precision", "gib"),
    [
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
def test_a_card_says_what_is_planned_for(flags, kind, precision, gib):
    args = plan_memory.parse(flags.split())
    card = CARDS[args.card]
    room = Room(gib * GIB if gib else card.memory, kind)
    assert card_target(args, card) == (kind, precision, room)


def test_a_card_leaves_the_margin_of_its_size(plain, tmp_path):
    assert (plain["card"], plain["device"], plain["precision"]) == ("H100", "cuda", "bfloat16")
    assert plain["budget_bytes"] == H100.memory
    assert plain["safe_bytes"] == pytest.approx(0.9 * H100.memory, abs=1)
    small = plan(tmp_path, "--card=H100", "--memory-budget=8GiB")
    assert (small["budget_bytes"], small["safe_bytes"]) == (8 * GIB, 7 * GIB)


def test_seconds_are_the_clocks(tmp_path, plain):
    """In each row, of the policy that it is about."""
    args = plan_memory.parse([*SHAPE, "--card=H100"])
    args.use_activation_checkpoint = "none"
    plans = trainer.plan.Plans(61, torch.device("cuda"), torch.bfloat16)
    for row in plain["rows"]:
        memory = {"recompute": row["policy"], "recompute_group": row["group"]}
        step = plans.planner(args).step(64, **memory, offload_activations=row["offload"])
        assert row["seconds"] == step.seconds(H100) > 0
        assert row["tokens_per_s"] == 64 * 32 / row["seconds"]
    compiled = plan(tmp_path, "--card=H100", "--compile")
    for ours, theirs in zip(compiled["rows"], plain["rows"], strict=True):
        assert ours["seconds"] < theirs["seconds"]


def test_times_are_shown_as_estimates(tmp_path, capsys):
    result = plan(tmp_path, "--card=H100")
    out = capsys.readouterr().out
    wanted = ["policy", "peak", "time", "tokens/s", "fits", "largest batch"]
    assert columns(out) == wanted and "times are estimates" in out
    none, *_, offloaded = result["rows"]
    for row, line in zip(result["rows"], out.split("\n\n")[1].splitlines()[1:], strict=True):
        more = row["seconds"] / none["seconds"] - 1
        time = f"~{format_seconds(row['seconds'])}" if row is none else f"{more:+.0%}"
        speed = "~" + digits(3, row["tokens_per_s"])
        if row is offloaded:  # the clock does not know its copies
            time, speed = f"> {time}", f"<{speed[1:]}"
        assert f"  {time}  {speed}  yes  " in line


def test_without_a_card_nothing_is_timed(tmp_path, capsys):
    result = plan(tmp_path, "--device=cuda", "--memory-budget=1GiB")
    assert result["card"] is None and {row["seconds"] for row in result["rows"]} == {None}
    assert columns(capsys.readouterr().out)[4:6] == ["FLOPs twice", "fits"]


@pytest.mark.parametrize(
    ("x", "two", "three"),
    [
        *((0.0054, "0.0054", "0.00540"), (4.0, "4.0", "4.00"), (9.96, "10", "9.96")),
        *((54, "54", "54.0"), (358_123, "360,000", "358,000")),
    ],
)
def test_digits(x, two, three):
    assert (digits(2, x), digits(3, x)) == (two, three)


@pytest.mark.slow
def test_what_is_recommended_is_the_fastest_that_fits(tmp_path, plain):
    """By time, not by FLOPs."""
    slow = replace(H100, flops=(1e18, 1e18, 1e18), launch_s=0)  # bytes are all that counts
    peaks = {row["name"]: row["peak_bytes"] for row in plain["rows"]}
    budget = (max(peaks["cheap"], peaks["mlp"]) + 1) / 0.75
    assert peaks["none"] > 0.75 * budget
    flags = (f"--memory-budget={budget}b", "--device=cuda")
    for card in (H100, slow):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr("trainer.plan.clock_card", lambda args, device, card=card: card)
            result = plan(tmp_path, "--card=H100", *flags)
        safe = [row for row in result["rows"] if row["fits_safely"] and not row["offload"]]
        assert result["takes"] == min(safe, key=lambda row: row["seconds"])["name"]
    by_flops = plan(tmp_path, *flags)
    safe = [row for row in by_flops["rows"] if row["fits_safely"]]
    assert by_flops["takes"] == min(safe, key=lambda row: row["replayed"])["name"]
    assert by_flops["takes"] != result["takes"]


def test_offload_is_the_last_whatever_its_clock_says():
    """It does not know the copies."""

    def row(peak: int, seconds: float, **memory) -> Row:
        step = SimpleNamespace(
            config=MiniGPTConfig(**memory), peak=peak, seconds=lambda card, compiled: seconds
        )
        return Row(step, 0, Room(10, "cpu"), None, None, Clock(H100, False, 1, 1))

    slow = row(5, 3.0, recompute="full")
    slower = row(4, 4.0, recompute="full", recompute_group=2)
    offloaded = row(3, 1.0, recompute="full", offload_activations=True)
    too_large = row(11, 0.5)
    assert recommend([too_large, slower, offloaded, slow]) is slow
    assert recommend([too_large, offloaded]) is offloaded
    assert recommend([too_large]) is None


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
        clock = Clock(card, compiled=False, micro_batches=n, processes=3)
        assert clock.seconds(steps[0]) == pytest.approx(n * one - (n - 1) * update, rel=1e-3)
        tokens = 3 * n * 2 * 64
        assert clock.tokens_per_s(steps[0]) == pytest.approx(tokens / clock.seconds(steps[0]))


def test_accumulation_and_processes_count(tmp_path):
    result = plan(tmp_path, "--card=H100", "--grad-accum-steps=3", "--nproc-per-node=2")
    for row in result["rows"]:
        assert row["tokens_per_s"] == pytest.approx(2 * 3 * 64 * 32 / row["seconds"])


def test_tf32_makes_products_of_float32_faster(tmp_path, capsys):
    plain, fast = (plan(tmp_path, "--card=H100", "--no-amp", *more) for more in ([], ["--tf32"]))
    told = re.findall(r"^card +H100: (\S+) TFLOP/s in float32", capsys.readouterr().out, re.M)
    assert told == ["67.0", "494"] and plain["card"] == fast["card"] == "H100"


def test_this_machine_is_measured(tmp_path, capsys, monkeypatch):
    mine = replace(H100, name="this machine")
    monkeypatch.setattr("trainer.card.this_machine", lambda *what: mine)
    result = plan(tmp_path, "--card=This machine", "--device=cpu")
    assert result["card"] == "this machine" and result["device"] == "cpu"
    assert result["safe_bytes"] == for_tensors(result["budget_bytes"], "cpu")  # of what is free
    assert re.search(
        r"^card +this machine: .*, measured in [\d.]+ s", capsys.readouterr().out, re.M
    )


def test_the_command_is_a_trainers():
    argv = "--card H100 --seq-len 32 --longest-sequence --all-knobs --lr=1".split()
    flags = ["--batch-size", "2", "--use-activation-checkpoint", "none"]
    command = plan_memory.command_line(argv, plan_memory.parse(argv), flags)
    assert command == f"python train_minimal.py --seq-len 32 --lr=1 {' '.join(flags)}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
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
    ],
)
def test_bad_input_gets_one_line(flags, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    try:
        code = plan_memory.main(flags.split())
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert code == 2 and out == "" and re.match(f"error: {message}", line), line


# ---- in the trainers


def choose(monkeypatch, flags: str, process: OneProcess) -> tuple[Card | None, str]:
    """The card that `auto` goes by, and what is said."""
    seen: list = []
    pick = trainer.plan.pick_recompute

    def watch(planner, batch_size, budget, card=None, compiled=False):
        seen.append((card, compiled))
        return pick(planner, batch_size, budget, card, compiled)

    monkeypatch.setattr("trainer.plan.pick_recompute", watch)
    args = parse_trainer(f"{TRAINER_SHAPE} --use-activation-checkpoint auto {flags}")
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
    nothing, tf32, t4, mine = (
        parse_trainer(f"--use-activation-checkpoint auto {flags}")
        for flags in (
            "",
            "--tf32",
            "--card T4 --tf32",
            "--card this-machine --d-model 96 --n-heads 3 --seq-len 80",
        )
    )
    there = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=H100.memory)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: there)
    monkeypatch.setattr(trainer.card, "this_machine", lambda *what: what)
    assert clock_card(nothing, gpu) == H100
    assert clock_card(tf32, gpu).flops == (H100.flops[1] / 2, *H100.flops[1:])
    assert clock_card(t4, gpu) == CARDS["T4"]  # which has no TF32
    assert clock_card(mine, gpu) == (gpu, 80, 32)  # measured at the shape of its attention
    there.name = "NVIDIA GeForce 8800 GTX"
    assert clock_card(nothing, gpu) is None is clock_card(nothing, cpu)
    assert clock_card(t4, cpu) == CARDS["T4"]


def test_a_card_belongs_to_auto():
    with pytest.raises(UsageError, match="--card is for --use-activation-checkpoint auto"):
        parse_trainer("--card H100 --use-activation-checkpoint mlp")
    assert parse_trainer("--card h100 --use-activation-checkpoint auto").card == "H100"
