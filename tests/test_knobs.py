"""What to change when memory is little: one list, the least cost first; and who asks for it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness.answers import parse, room_for

from planner import CARDS
from planner.cards import choose_card
from trainer.flags import model_config, with_flags
from trainer.plan import (
    POLICY_FLAG,
    PlanRequest,
    PredictedOutOfMemory,
    describe_suggested_change,
    plan_memory,
)
from trainer.process import OneProcess

SHAPE = (
    "--use-toy-data --vocab-size 61 --n-layers 2 --n-heads 2 --d-model 16 --seq-len 32 "
    "--batch-size 12 --no-amp --device cpu"
)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB, H100 = 2**30, CARDS["H100"]


# ---- a run that ran out

FULL = "--use-activation-checkpoint full"
OFFLOAD = "--use-activation-checkpoint full+offload"


@pytest.mark.parametrize(
    ("flags", "device", "less", "wanted"),
    [
        ("--loss-chunks 1", "cpu", "full", "--loss-chunks 0"),
        ("", "cpu", "full", FULL),
        (f"{FULL} --batch-size 6", "cuda", "", "--batch-size 3 --grad-accum-steps 2"),
        (f"{FULL} --batch-size 1", "cuda", "", OFFLOAD),  # (a CPU has one memory)
        (f"{FULL} --batch-size 1", "cpu", "", None),
        (f"{OFFLOAD} --batch-size 1", "cuda", "", None),
    ],
)
def test_it_is_told_what_costs_least(flags, device, less, wanted):
    """Of what is not so yet. `less`: the policy that is predicted to need less."""
    args = parse(flags)
    said = describe_suggested_change(args, device, args.use_activation_checkpoint, less)
    assert said.startswith(f"{wanted} (" if wanted else "what changes the training: ")


# ---- a prediction


def test_what_it_says_fits_and_nothing_cheaper_does():
    """By the planner itself; the less room, the more has to change."""
    args = parse(f"{SHAPE} --n-layers 6 --d-model 32 --grad-accum-steps 2")
    plain, known = PlanRequest(args, 61, CPU, torch.float32), []
    for share in (0.9, 0.3, 0.1, 0.01):
        budget = plain.state_bytes + share * (plain.predicted_step.peak - plain.state_bytes)
        asked = replace(plain, memory_budget=room_for(budget))
        said, knob = asked.advice_and_change()
        if knob is None:
            assert (
                asked.step_with_best_policy().peak > budget
                and "; " not in said
                and "--seq-len" in said
            )
            continue
        step = asked.with_args(with_flags(args, **knob.flags)).predicted_step
        assert step.peak <= asked.usable_bytes and said.startswith(f"{knob.flags_as_text} fits (")
        assert (asked.step_with_fitting_policy() is None) == (knob.flags.keys() != {POLICY_FLAG})
        known.append(sorted(knob.flags.keys() - {POLICY_FLAG, "grad_accum_steps"}))
    assert known == [[], [], ["batch_size"]]


# ---- before a run starts


@pytest.fixture
def machine(monkeypatch):
    """machine(total, free): what the device has; free for tensors."""

    def make(total: int, free: int) -> None:
        monkeypatch.setattr("trainer.plan.total_memory", lambda device: total)
        monkeypatch.setattr("trainer.device.free_memory", lambda device: room_for(free).limit_bytes)

    return make


def words(flags: str = "", processes: int = 1, snapshot: int = 0) -> str:
    args, process = parse(f"{SHAPE} {flags}"), OneProcess(CPU)
    process.local_world_size = processes
    return plan_memory(args, process, model_config(args, 61), torch.float32, snapshot)[1]


def peak(flags: str = "") -> int:
    return PlanRequest(parse(f"{SHAPE} {flags}"), 61, CPU, torch.float32).predicted_step.peak


@pytest.mark.parametrize(
    ("processes", "snapshot", "total", "free", "says"),
    [  # total and free: bytes beyond the peaks of all processes
        (1, 0, 0, 0, ""),
        (1, 0, -1, 0, "before the first step: .* predicted"),
        (2, 0, 0, 2, ""),
        (2, 0, -1, 0, "2 processes, each .* predicted"),
        # A snapshot is read before the run is planned, and gone before the run needs as much.
        (1, 500, 99, -450, ""),
    ],
)
def test_all_processes_count(machine, processes, snapshot, total, free, says):
    peaks = processes * peak()
    machine(peaks + total, peaks + free)
    if says:
        with pytest.raises(PredictedOutOfMemory, match=says):
            words(processes=processes, snapshot=snapshot)
    else:
        assert "\n" not in words(processes=processes, snapshot=snapshot)  # no warning


def test_too_little_is_one_line_with_the_knob(machine):
    """A warning where it is too little just now; the end where there is no more in all."""
    fits = "; --use-activation-checkpoint cheap:1 fits (same results, some more time)"
    machine(2 * peak(), peak() - 1)
    _, line = words().splitlines()
    assert line.startswith("warning  ") and " free, less a margin of a tenth); the machine" in line
    assert line.endswith(fits)
    machine(peak() - 1, peak() - 1)
    says = "^out of memory before the first step: .* the machine has .* recompute none"
    with pytest.raises(PredictedOutOfMemory, match=says) as stop:
        words()
    assert str(stop.value).endswith(fits)


# ---- whose clock tells what is fastest

AUTO_1GIB = "--use-activation-checkpoint auto --memory-budget 1GiB"
FITS = "that fits in 921.6 MiB (1.0 GiB less a margin of a tenth)"


def test_auto_goes_by_the_clock_of_a_card(machine):
    machine(GIB, GIB)
    least, fastest = (words(f"{AUTO_1GIB} {card}").splitlines()[0] for card in ("", "--card h100"))
    assert least == f"auto takes none: the least recompute {FITS}"
    assert fastest == f"auto takes none: the least time (predicted for H100) {FITS}"


def test_all_processes_go_by_the_clock_of_the_first(machine, monkeypatch):
    machine(GIB, GIB)
    monkeypatch.setattr("planner.cards.this_machine", lambda *what: pytest.fail("measured"))
    # Not for this one to do.
    monkeypatch.setattr(OneProcess, "run_on_rank0_only", lambda self, act: None)
    monkeypatch.setattr(OneProcess, "run_on_all_ranks", lambda self, act: act())
    monkeypatch.setattr(
        OneProcess, "all_gather_object", lambda self, mine: [H100 if mine is None else mine, mine]
    )
    said = words(f"{AUTO_1GIB} --card this-machine")
    assert f"the least time (predicted for H100) {FITS}" in said


def test_a_gpu_is_known_by_its_name(monkeypatch):
    gpu, auto = torch.device("cuda", 0), "--use-activation-checkpoint auto"
    nothing, tf32, t4 = (parse(f"{auto} {flags}") for flags in ("", "--tf32", "--card T4 --tf32"))
    mine = parse(f"{auto} --card this-machine --d-model 96 --n-heads 3 --seq-len 80")
    there = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=H100.memory)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device=None: there)
    monkeypatch.setattr("planner.cards.this_machine", lambda *what: what)
    assert choose_card(nothing, gpu) == H100
    assert choose_card(tf32, gpu).flops == (H100.flops[1] / 2, *H100.flops[1:])
    assert choose_card(t4, gpu) == choose_card(t4, CPU) == CARDS["T4"]  # which has no TF32
    assert choose_card(mine, gpu) == (gpu, 80, 32)  # measured at the shape of its attention
    there.name = "NVIDIA GeForce 8800 GTX"
    assert choose_card(nothing, gpu) is None is choose_card(nothing, CPU)
