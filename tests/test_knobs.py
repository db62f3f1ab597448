"""What to change when memory is little: one list, the least cost first; and who asks for it."""

import argparse
from itertools import count
from pathlib import Path

import pytest
import torch

from model import MiniGPTConfig
from planner import Planner
from trainer.flags import UsageError, build_parser, fill_in, model_config
from trainer.knobs import Knob, nearest, next_knob, other_sequences, same_sequences
from trainer.metrics import format_bytes
from trainer.plan import Plans, TooLarge, plan_memory
from trainer.process import OneProcess
from trainer.room import for_tensors
from trainer.setup import held
from trainer.snapshot import Resumed

SHAPE = (
    "--use-toy-data --vocab-size 61 --n-layers 2 --n-heads 2 --d-model 16 --seq-len 32 "
    "--batch-size 12 --no-amp --device cpu"
)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 2**30


def parse(flags: str) -> argparse.Namespace:
    return fill_in(build_parser("test", "x.pt").parse_args(flags.split()))


def everything(flags: str, device_type: str) -> list[str]:
    """The whole list: of each kind the first and the last."""
    args, lines = parse(flags), []
    for families in (same_sequences(args, device_type), other_sequences(args, device_type)):
        for family in families:
            ends = (family[0], family[-1]) if len(family) > 1 else tuple(family)
            lines += [knob.command(args) for knob in ends]
    return lines


def test_a_command_that_recomputes_fully_in_the_rest_can_be_typed():
    args = parse("--n-layers 4")
    config = MiniGPTConfig(n_layers=4, recompute="sdpa", recompute_layers=3, recompute_rest="full")
    words = Knob({}, "").with_policy(args, config).command(args)
    typed = parse(words)
    assert (typed.recompute_layers, typed.recompute_rest) == (3, "full")
    assert (
        Knob({"use_activation_checkpoint": "full"}, "").command(args)
        == "--use-activation-checkpoint"
    )


def test_the_list_begins_with_what_costs_nothing():
    plain = "--loss-chunks 0 --use-activation-checkpoint"
    assert everything("--loss-chunks 1 --batch-size 6 --seq-len 32", "cpu") == [
        "--loss-chunks 0",
        plain,
        f"{plain} --batch-size 3 --grad-accum-steps 2",
        f"{plain} --batch-size 1 --grad-accum-steps 6",
        f"{plain} --batch-size 5",
        f"{plain} --batch-size 1",
        f"{plain} --batch-size 1 --grad-accum-steps 6 --seq-len 16",
        f"{plain} --batch-size 1 --grad-accum-steps 6 --seq-len 8",
    ]


def test_a_gpu_can_offload_too_and_what_is_there_is_not_asked_for_again():
    flags = "--use-activation-checkpoint --recompute-layers 1 --batch-size 2 --seq-len 8"
    full, without = "--use-activation-checkpoint full", " without --recompute-layers"
    parts = "--batch-size 1 --grad-accum-steps 2"
    assert everything(flags, "cuda") == [
        full + without,
        f"{full} {parts}{without}",
        f"{full} --offload-activations{without}",
        f"{full} --offload-activations {parts}{without}",
        f"{full} --batch-size 1{without}",
        f"{full} --offload-activations --batch-size 1{without}",
    ]
    done = "--use-activation-checkpoint --offload-activations --batch-size 2 --grad-accum-steps 3"
    assert everything(f"{done} --seq-len 8", "cuda") == ["--batch-size 1 --grad-accum-steps 6"]


def test_what_belongs_to_auto_goes_with_it():
    flags = "--use-activation-checkpoint auto --card H100 --memory-budget 1GiB --batch-size 1"
    first, *_ = everything(f"{flags} --seq-len 8", "cpu")
    assert first == "--use-activation-checkpoint full without --memory-budget --card"


@pytest.mark.parametrize("flags", ["", "--loss-chunks 1", "--use-activation-checkpoint full"])
def test_a_run_that_ran_out_takes_the_first(flags):
    args = parse(flags)
    assert f"; try {everything(flags, 'cpu')[0]} (" in next_knob(args, CPU, None)


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_a_prediction_takes_the_first_that_fits(device):
    """Verified one by one: it fits, and nothing before it does. With what is fastest then."""
    args = parse(SHAPE + " --loss-chunks 1 --batch-size 6")
    plans = Plans(61, device, torch.float32)
    counts = plans.state, plans.peak
    *_, last = other_sequences(args, device.type)
    least, found = plans.peak(last[-1].change(args)), set()
    state = plans.state(args)
    begin = max(int(1.05 * state), least - state // 5)  # below, it is always nothing
    for budget in range(begin, plans.peak(args), state // 6):
        why, told = plans.way_out(args, budget)
        knob = nearest(args, device.type, budget, *counts, groups=True)
        assert why == ""
        if knob is None:  # then not even the least of all does
            assert told is None
            assert least > budget
            continue
        assert plans.peak(knob.change(args)) <= budget
        found.add(tuple(knob.flags))
        then = knob.change(args)
        fastest = plans.pick(then, budget)
        assert plans.peak(told.change(args)) == fastest.peak <= budget or then.offload_activations
        same = same_sequences(args, device.type, groups=True)
        before = [k for family in (*same, *other_sequences(args, device.type)) for k in family]
        for other in before[: before.index(knob)]:
            assert plans.peak(other.change(args)) > budget, (knob.flags, other.flags)
    assert len(found) >= 5


def test_a_state_that_is_too_large_asks_for_a_smaller_model_at_once(monkeypatch):
    """The largest of those that fit; a planner is asked about no model that cannot."""
    asked = []

    def peak(flags: argparse.Namespace) -> int:
        asked.append(flags.n_layers)
        return int(6 * GIB * flags.n_layers / 24) + flags.batch_size * GIB // 4

    plans = Plans(50257, GPU, torch.bfloat16)
    args = parse("--model gpt2-xl --batch-size 8")
    knob = nearest(args, "cuda", 7 * GIB, plans.state, peak)
    full = {"use_activation_checkpoint": "full", "recompute_layers": None, "recompute_rest": None}
    assert knob.flags == {"model": "gpt2-medium"} | full | {"batch_size": 4, "grad_accum_steps": 2}
    assert set(asked) == {24}

    typed = parse("--n-layers 48 --d-model 1600 --n-heads 25 --d-ff 6400 --seq-len 64")
    knob = nearest(typed, "cuda", 3 * GIB, plans.state, lambda flags: 0)
    assert knob.command(typed) == "--n-layers 12 --n-heads 12 --d-model 768 --d-ff 3072"
    assert nearest(typed, "cuda", GIB, plans.state, lambda flags: 0) is None


def test_a_smaller_state_before_a_smaller_model():
    """By how much they change the training; and a run that is half done keeps its optimizer."""
    plans = Plans(50257, GPU, torch.bfloat16)

    def told(flags: str, budget: float) -> str:
        args = parse(f"--model gpt2-xl --batch-size 1 {flags}")
        knob = nearest(args, "cuda", int(budget * GIB), plans.state, plans.state)
        return knob.command(args)

    muon, half = "--optimizer muon", "--moments-dtype bfloat16"
    assert told("", 20) == told("--resume", 20) == half
    assert told("", 17) == f"{muon} {half}"
    assert told(half, 15) == muon and told(muon, 15) == half
    assert told("", 14) == told("--resume", 15) == "--model gpt2-large"


def test_a_shorter_sequence_needs_fewer_positions():
    args = parse("--seq-len 4096")
    *_, halves = other_sequences(args, "cpu")
    assert halves[0].change(args).max_position_embeddings == 2048
    args = parse("--seq-len 4096 --max-position-embeddings 5000")
    assert halves[0].change(args).max_position_embeddings == 5000


# ---- before a run starts


@pytest.fixture
def machine(monkeypatch):
    """machine(total, free, own=0): what the device has; free for tensors."""

    def make(total: int | None, free: int, own: int = 0) -> None:
        monkeypatch.setattr("trainer.plan.total_memory", lambda device: total)
        monkeypatch.setattr("trainer.plan.own_memory", lambda: own)
        room = next(n for n in count(free) if for_tensors(n, "cpu") >= free)
        monkeypatch.setattr("trainer.room.free_memory", lambda device: room)

    return make


def words(flags: str = "", processes: int = 1, snapshot: int = 0) -> str:
    args, process = parse(f"{SHAPE} {flags}"), OneProcess(CPU)
    process.processes_here = processes
    return plan_memory(args, process, model_config(args, 61), torch.float32, snapshot)[1]


def peak(flags: str = "") -> int:
    return Plans(61, CPU, torch.float32).peak(parse(f"{SHAPE} {flags}"))


def test_what_fits_is_not_warned_of(machine):
    machine(peak(), peak())
    assert "warning" not in words() and "\n" not in words()
    machine(None, peak())
    assert "\n" not in words()


def test_above_what_is_free_now_is_one_line_with_the_knob(machine):
    machine(2 * peak(), peak() - 1)
    _, line = words().splitlines()
    assert line.startswith("warning  ") and " free, less a margin of a tenth); the machine" in line
    mix = "--use-activation-checkpoint cheap --recompute-layers 1"  # the least that fits
    assert line.endswith(f"; try {mix} (same results, some more time), which fits")


def test_a_mix_is_planned_as_what_it_is(machine):
    mlp = "--use-activation-checkpoint mlp"
    mix = f"{mlp} --recompute-layers 1 --recompute-rest cheap"
    assert peak("--use-activation-checkpoint") < peak(mix) < peak(mlp)
    machine(2 * peak(), peak(mix))
    (line,) = words(mix).splitlines()
    assert line.startswith("mlp in 1 of 2 blocks, cheap in the rest: peak ")
    assert f"; without recompute: peak {format_bytes(peak())}, " in line
    machine(2 * peak(), peak(mix) - 1)
    knob = "--use-activation-checkpoint sdpa"  # in the first block; the rest stays as it is
    assert f"; try {knob} (same results, some more time), which fits" in words(mix)


def test_above_what_there_is_in_all_ends_before_it_begins(machine):
    machine(peak() - 1, peak() - 1)
    with pytest.raises(TooLarge) as stop:
        words()
    line = str(stop.value)
    assert line.startswith("out of memory before the first step: ") and "\n" not in line
    assert "the machine has" in line and "with --batch-size 12 --seq-len 32, recompute none" in line
    mix = "--use-activation-checkpoint cheap --recompute-layers 1"
    assert line.endswith(f"; try {mix} (same results, some more time), which fits")


def test_the_process_itself_counts_and_so_do_others(machine):
    machine(peak() + 99, peak(), own=99)
    words()
    machine(peak() + 98, peak(), own=99)
    with pytest.raises(TooLarge, match="beside the 99 B that Python, PyTorch and data take"):
        words()
    machine(2 * peak(), 2 * peak() + 2)
    words(processes=2)
    machine(2 * peak() - 1, 2 * peak())
    with pytest.raises(TooLarge, match="2 processes, each .* predicted"):
        words(processes=2)


def test_what_a_snapshot_has_does_not_count_twice(machine):
    """It is read before the run is planned, and gone before the run needs as much."""
    machine(peak() + 99, peak() - 450, own=599)
    with pytest.raises(TooLarge, match="beside the 599 B"):
        words()
    assert "\n" not in words(snapshot=500)
    machine(peak() + 98, peak(), own=599)
    with pytest.raises(TooLarge, match="beside the 99 B"):
        words(snapshot=500)
    full, auto = peak("--use-activation-checkpoint"), "--use-activation-checkpoint auto"
    machine(10 * full, 9 * full // 10)
    with pytest.raises(UsageError, match="free, less a margin"):
        words(auto)
    assert "auto takes" in words(auto, snapshot=full // 4)


def test_how_much_a_snapshot_holds():
    state = {"model": {"w": torch.zeros(3, 4)}, "optimizer": {"state": [torch.zeros(5)]}, "step": 1}
    resumed = Resumed(state, Path("x.pt"))
    assert held(resumed) == 4 * (12 + 5) and held(None) == 0


def test_what_the_state_settles_is_not_simulated(machine, monkeypatch):
    def simulate(*args):
        raise AssertionError

    monkeypatch.setattr(Planner, "simulate", simulate)
    machine(1000, 1000)
    with pytest.raises(TooLarge, match="AdamW's state alone take .*: try a smaller --d-model"):
        words()


def test_auto_is_checked_as_well(machine):
    full = peak("--use-activation-checkpoint")
    machine(full // 2, full // 2)
    with pytest.raises(TooLarge, match="recompute auto; try .*--batch-size"):
        words(f"--use-activation-checkpoint auto --memory-budget {2 * full}b")
