"""What to change when memory is little: one list, the least cost first; and who asks for it."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness.answers import room_for
from harness.runs import parse
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import MiniGPTError
from planner import CARDS, Layout
from scripts import plan_memory
from scripts.plans import OTHER_WAYS, CommandPlan, advice
from trainer.plan import card_for, plan_memory_command, plan_run
from trainer.process import OneProcess
from trainer.settings import to_words

SHAPE = (
    "--use-toy-data --vocab-size 61 --n-layers 2 --n-heads 2 --d-model 16 --seq-len 32 "
    "--batch-size 12 --no-amp --device cpu"
)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB, H100 = 2**30, CARDS["H100"]


# ---- a run that ran out, or would


@pytest.mark.parametrize(
    ("kind", "processes"), [("one", ""), ("fsdp", " --nproc-per-node=2 --fsdp")]
)
def test_a_run_names_the_question_for_plan_memory(kind, processes):
    typed = parse(f"{SHAPE} --lr 0.1 --model gpt2 --resume")
    said = plan_memory_command(typed, Layout(kind, world_size=1 + bool(processes)))
    command = said.removeprefix("what fits: python -m scripts.plan_memory ")
    assert command.endswith(processes) and "--resume" not in command
    asked = plan_memory.parse(command.split())
    assert asked.layout.kind == kind and asked.lr == 0.1
    assert typed.typed.keys() - {"resume"} <= asked.typed.keys()


# ---- a prediction


DRAWN = {
    "--batch-size": [1, 2, 6],
    "--seq-len": [16],
    "--n-layers": [2],
    "--grad-accum-steps": [1, 2],
    "--optimizer": ["adamw", "muon"],
    "--moments-dtype": ["float32", "bfloat16"],
    "--use-activation-checkpoint": ["none", "cheap", "full"],
}
COMMANDS = st.fixed_dictionaries({name: st.sampled_from(of) for name, of in DRAWN.items()})


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=25)
@given(COMMANDS, st.sampled_from(["cpu", "cuda"]), st.sampled_from([-0.5, -0.1, 0.01, 0.1, 0.5]))
def test_advice_fits_and_repeats_nothing(typed, kind, share):
    """By the planner itself. `share` of the way from the state to the peak is there for tensors."""
    settings = parse(f"{SHAPE} {' '.join(f'{name} {value}' for name, value in typed.items())}")
    plain = CommandPlan(settings, 61, torch.device(kind), torch.float32)
    room = plain.state_bytes + share * (plain.peak - plain.state_bytes)
    room = room if share > 0 else (1 + share) * plain.state_bytes
    asked = replace(plain, memory_budget=room_for(room))
    said, change = advice(asked)
    if share < 0:  # of the state alone: nothing is simulated, and each state fits
        assert change is None and not re.search("--batch-size|--seq-len", said)
        assert said.endswith(OTHER_WAYS)
        for way in re.findall(r"(--[^(]*) \(", said.partition("less state, ")[2]):
            assert not any(f"{name} {value}" in way for name, value in typed.items())
            words = " ".join(f"{name} {value}" for name, value in typed.items())
            then = replace(asked, settings=parse(f"{SHAPE} {words} {way}"))
            assert then.state_bytes < asked.bytes_within_margin
        return
    assert change or said == f"plan {OTHER_WAYS}"
    assert change or asked.with_fastest_policy().peak > asked.bytes_within_margin
    for flags in [change] if change else []:
        assert said.startswith(f"{' '.join(to_words(flags))} fits (")
        assert all(getattr(settings, name) != value for name, value in flags.items())
        then = asked.with_flags(**flags)
        same = then.settings.batch_size * then.settings.grad_accum_steps == (
            settings.batch_size * settings.grad_accum_steps
        ) and not flags.keys() & {"seq_len", "optimizer", "moments_dtype"}
        assert then.peak <= asked.bytes_within_margin and same == ("(the same training)" in said)


# ---- before a run starts


@pytest.fixture
def machine(monkeypatch):
    """machine(total, free): what the device has; free for tensors."""

    def make(total: int, free: int) -> None:
        known = (room_for(free).limit_bytes, total)
        for file in ("plan", "device"):
            monkeypatch.setattr(f"trainer.{file}.free_and_total_memory", lambda device: known)

    return make


def words(flags: str = "", processes: int = 1) -> str:
    process = OneProcess(CPU, Layout(local_world_size=processes))
    return plan_run(parse(f"{SHAPE} {flags}"), 61, process, torch.float32)[2]


def peak() -> int:
    return CommandPlan(parse(SHAPE), 61, CPU, torch.float32).peak


@pytest.mark.parametrize(
    ("processes", "total", "free", "says"),
    [  # total and free: bytes beyond the peaks of all processes
        (1, 0, 0, ""),
        (1, -1, 0, "before the first step: .* predicted"),
        (2, 0, 2, ""),
        (2, -1, 0, "2 processes, each .* predicted"),
    ],
)
def test_all_processes_count(machine, processes, total, free, says):
    peaks = processes * peak()
    machine(peaks + total, peaks + free)
    if says:
        with pytest.raises(MiniGPTError, match=says):
            words(processes=processes)
    else:
        assert "\n" not in words(processes=processes)  # no warning


def test_too_little_is_one_line_with_the_knob(machine):
    """A warning where it is too little just now; the end where there is no more in all."""
    fits = f"; {plan_memory_command(parse(SHAPE), Layout())}"
    machine(2 * peak(), peak() - 1)
    _, line = words().splitlines()
    assert line.startswith("warning  ") and " free, less a margin of " in line
    assert line.endswith(fits)
    machine(peak() - 1, peak() - 1)
    says = "^out of memory before the first step: .* the machine has .* recompute none"
    with pytest.raises(MiniGPTError, match=says) as stop:
        words()
    assert str(stop.value).endswith(fits)


# ---- whose clock tells what is fastest

AUTO_1GIB = "--use-activation-checkpoint auto --memory-budget 1GiB"
FITS = "that fits in 921.6 MiB (1,024.0 MiB less a margin of 102.4 MiB)"


def test_auto_goes_by_the_clock_of_a_card(machine):
    machine(GIB, GIB)
    least, fastest = (words(f"{AUTO_1GIB} {card}").splitlines()[0] for card in ("", "--card h100"))
    assert least == f"auto takes none: the least recompute {FITS}"
    assert fastest == f"auto takes none: the least time (predicted for H100) {FITS}"


def test_all_processes_go_by_the_clock_of_the_first(machine, monkeypatch):
    machine(GIB, GIB)
    monkeypatch.setattr("planner.cards.measure_this_machine", lambda *what: pytest.fail("measured"))
    # Not for this one to do.
    monkeypatch.setattr(OneProcess, "broadcast_from_rank0", lambda self, act: H100)
    said = words(f"{AUTO_1GIB} --card this-machine")
    assert f"the least time (predicted for H100) {FITS}" in said


def test_a_gpu_is_known_by_its_name(monkeypatch):
    gpu, auto = torch.device("cuda", 0), "--use-activation-checkpoint auto"
    nothing, tf32, t4 = (parse(f"{auto} {flags}") for flags in ("", "--tf32", "--card T4 --tf32"))
    mine = parse(f"{auto} --card this-machine --d-model 96 --n-heads 3 --seq-len 80")
    there = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=H100.memory)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device=None: there)
    monkeypatch.setattr("planner.cards.measure_this_machine", lambda *what: what)
    assert card_for(nothing, gpu) == H100
    assert card_for(tf32, gpu).flops == (H100.flops[1] / 2, *H100.flops[1:])
    assert card_for(t4, gpu) == card_for(t4, CPU) == CARDS["T4"]  # which has no TF32
    assert card_for(mine, gpu) == (gpu, 80, 32)  # measured at the shape of its attention
    there.name = "NVIDIA GeForce 8800 GTX"
    assert card_for(nothing, gpu) is None is card_for(nothing, CPU)
