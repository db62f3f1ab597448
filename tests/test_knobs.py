"""What to change when memory is little: one list, the least cost first; and who asks for it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.answers import parse, room_for

from planner import CARDS, Planner
from planner.cards import clock_card
from trainer.flags import UsageError, changed, model_config, recompute_of
from trainer.plan import POLICY, Question, TooLarge, next_knob, plan_memory
from trainer.process import OneProcess
from trainer.snapshot import bytes_of

SHAPE = (
    "--use-toy-data --vocab-size 61 --n-layers 2 --n-heads 2 --d-model 16 --seq-len 32 "
    "--batch-size 12 --no-amp --device cpu"
)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB, H100 = 2**30, CARDS["H100"]
LARGE_SEQUENCE = 64 * (2 * 12 * 768 + 1000)  # bytes of a sequence, by the formula below


# ---- a run that ran out

FULL = "--use-activation-checkpoint full"
OFFLOAD = "--use-activation-checkpoint full+offload"
AUTO = "--use-activation-checkpoint auto --card H100 --memory-budget 1GiB --batch-size 1"


@pytest.mark.parametrize(
    ("flags", "device", "used", "wanted"),
    [
        ("--loss-chunks 1", "cpu", "", "--loss-chunks 0"),
        ("--use-activation-checkpoint full:1", "cpu", "", FULL),
        # what is there is not asked for again, and what belongs to auto goes with it
        (AUTO, "cpu", "", f"{FULL} without --memory-budget --card"),
        (f"{FULL} --batch-size 6", "cuda", "", "--batch-size 3 --grad-accum-steps 2"),
        # the policy that was taken since stays, if no other needs less
        ("--batch-size 6", "cpu", "attn", "--use-activation-checkpoint attn --batch-size 3 "
         "--grad-accum-steps 2"),
        (f"{FULL} --batch-size 1", "cuda", "", OFFLOAD),  # (a CPU has one memory)
        (f"{FULL} --batch-size 1", "cpu", "", None),
        (f"{OFFLOAD} --batch-size 1", "cuda", "", None),
    ],
)  # fmt: skip
def test_it_is_told_what_costs_least(flags, device, used, wanted):
    args, back = parse(flags), "go on with --resume"
    said = next_knob(args, torch.device(device), back, used, is_least=bool(used))
    assert f"recompute {used or args.use_activation_checkpoint}; try " in said
    if wanted:
        assert f"; try {wanted} (" in said and said.endswith(f"; {back}")
    else:
        assert said.endswith("; try a shorter --seq-len or a smaller model")
    assert "a smaller model (--n-layers, --d-model)" in next_knob(args, None, None)


# ---- a prediction


class MadeUp(Question):
    """With a planner that knows `full` alone, by a formula."""

    @property
    def peak(self) -> int:
        args = self.args
        gradients = 48 * args.n_layers * args.d_model**2 * (args.grad_accum_steps > 1)
        tokens = args.batch_size * args.seq_len
        return self.state + tokens * (2 * args.n_layers * args.d_model + 1000) + gradients

    @property
    def largest_batch(self) -> int:
        sizes = (self.about(changed(self.args, batch_size=n)) for n in range(1, 18))
        return sum(one.peak <= self.budget for one in sizes)

    def fitting(self) -> Any:
        fits = self.peak <= self.budget and not recompute_of(self.args).offload
        return SimpleNamespace(config=self.config, host=0) if fits else None


LARGE = f"--n-layers 12 --d-model 768 --batch-size 7 {FULL}"
XL = f"--model gpt2-xl --batch-size 1 --seq-len 8 {FULL}"
MUON, HALF = "--optimizer muon", "--moments-dtype bfloat16"


@pytest.mark.parametrize(
    ("flags", "room", "wanted"),
    [
        (f"{LARGE} --loss-chunks 1", 7 * LARGE_SEQUENCE, "--loss-chunks 0"),
        # accumulating takes more, as gradients have to wait: so as many sequences as fit
        (LARGE, 5 * LARGE_SEQUENCE, "--batch-size 5"),
        (LARGE, LARGE_SEQUENCE * 7 / 8, "--seq-len 8"),
        # a smaller state, by how much it changes the training: half a run keeps its optimizer
        (XL, 20 * GIB, HALF),
        (f"{XL} --resume", 20 * GIB, HALF),
        (XL, 17 * GIB, f"{MUON} {HALF}"),
        (f"{XL} {HALF}", 15 * GIB, MUON),
        (f"{XL} {MUON}", 15 * GIB, HALF),
        (f"{XL} --resume", 17 * GIB, None),
        (f"{XL} {MUON} {HALF}", 14 * GIB, None),
    ],
)
def test_the_first_change_that_fits(flags, room, wanted):
    args = parse(flags)
    asked = MadeUp(args, 50257 if args.model else 1000, GPU, torch.bfloat16)
    asked = replace(asked, room=room_for(room if args.model else asked.state + room))
    _, knob = asked.way_out()
    assert (knob and knob.command(args)) == wanted


def test_what_it_says_fits_and_nothing_cheaper_does():
    """By the planner itself; the less room, the more has to change."""
    args = parse(f"{SHAPE} --n-layers 6 --d-model 32 --grad-accum-steps 2")
    plain, known = Question(args, 61, CPU, torch.float32), []
    for share in (0.9, 0.3, 0.1, 0.05, 0.01):
        budget = plain.state + share * (plain.step.peak - plain.state)
        asked = replace(plain, room=room_for(budget))
        _, knob = asked.way_out()
        assert asked.turned(knob).step.peak <= asked.budget
        assert (asked.fitting() is None) == (knob.flags.keys() != {POLICY})
        known.append(sorted(knob.flags.keys() - {POLICY, "grad_accum_steps"}))
    assert known == [[], [], ["batch_size"], ["batch_size"], ["batch_size", "seq_len"]]


# ---- before a run starts


@pytest.fixture
def machine(monkeypatch):
    """machine(total, free, own=0): what the device has; free for tensors."""

    def make(total: int, free: int, own: int = 0) -> None:
        monkeypatch.setattr("trainer.plan.total_memory", lambda device: total)
        monkeypatch.setattr("trainer.plan.own_memory", lambda: own)
        monkeypatch.setattr("trainer.device.free_memory", lambda device: room_for(free).budget)

    return make


def words(flags: str = "", processes: int = 1, snapshot: int = 0) -> str:
    args, process = parse(f"{SHAPE} {flags}"), OneProcess(CPU)
    process.processes_here = processes
    return plan_memory(args, process, model_config(args, 61), torch.float32, snapshot)[1]


def peak(flags: str = "") -> int:
    return Question(parse(f"{SHAPE} {flags}"), 61, CPU, torch.float32).step.peak


@pytest.mark.parametrize(
    ("processes", "snapshot", "own", "total", "free", "says"),
    [  # total and free: bytes beyond the peaks of all processes
        (1, 0, 0, 0, 0, ""),
        (1, 0, 99, 99, 0, ""),
        (1, 0, 99, 98, 0, "beside the 99 B that Python, PyTorch and data take"),
        (2, 0, 0, 0, 2, ""),
        (2, 0, 0, -1, 0, "2 processes, each .* predicted"),
        # A snapshot is read before the run is planned, and gone before the run needs as much.
        (1, 0, 599, 99, -450, "beside the 599 B"),
        (1, 500, 599, 99, -450, ""),
        (1, 500, 599, 98, 0, "beside the 99 B"),
    ],
)
def test_the_process_itself_counts_and_so_do_others(
    machine, processes, snapshot, own, total, free, says
):
    peaks = processes * peak()
    machine(peaks + total, peaks + free, own=own)
    if says:
        with pytest.raises(TooLarge, match=says):
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
    with pytest.raises(TooLarge) as stop:
        words()
    line = str(stop.value)
    assert line.startswith("out of memory before the first step: ") and "\n" not in line
    assert "the machine has" in line and "with --batch-size 12 --seq-len 32, recompute none" in line
    assert line.endswith(fits)


def test_auto_has_what_a_snapshot_takes_and_is_checked_as_well(machine):
    auto = "--use-activation-checkpoint auto"
    machine(10 * peak(FULL), 9 * peak(FULL) // 10)
    with pytest.raises(UsageError, match="free, less a margin"):
        words(auto)
    assert "auto takes" in words(auto, snapshot=peak(FULL) // 4)
    machine(peak(FULL) // 2, peak(FULL) // 2)
    with pytest.raises(TooLarge, match="recompute auto; .*--batch-size .* fits"):
        words(f"{auto} --memory-budget {2 * peak(FULL)}b")
    state = {"model": {"w": torch.zeros(3, 4)}, "optimizer": {"state": [torch.zeros(5)]}, "step": 1}
    assert bytes_of(state) == 4 * (12 + 5)


def test_what_the_state_settles_is_not_simulated(machine, monkeypatch):
    monkeypatch.setattr(Planner, "step", lambda *_, **__: pytest.fail("planned"))
    machine(1000, 1000)
    with pytest.raises(TooLarge, match="AdamW's state alone take .*: a smaller --d-model"):
        words()


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
    process = OneProcess(CPU)
    process.exchange = lambda mine: [H100 if mine is None else mine, mine]
    process.by_first = lambda act: None  # it is not for this one to do
    process.by_all = lambda act: act()
    args = parse(f"{SHAPE} {AUTO_1GIB} --card this-machine")
    said = plan_memory(args, process, model_config(args, 61), torch.float32).words
    assert f"the least time (predicted for H100) {FITS}" in said


def test_a_gpu_is_known_by_its_name(monkeypatch):
    gpu = torch.device("cuda", 0)
    mine = "--card this-machine --d-model 96 --n-heads 3 --seq-len 80"
    auto = "--use-activation-checkpoint auto"
    nothing, tf32, t4, mine = (
        parse(f"{auto} {flags}") for flags in ("", "--tf32", "--card T4 --tf32", mine)
    )
    there = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=H100.memory)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: there)
    monkeypatch.setattr("planner.cards.this_machine", lambda *what: what)
    assert clock_card(nothing, gpu) == H100
    assert clock_card(tf32, gpu).flops == (H100.flops[1] / 2, *H100.flops[1:])
    assert clock_card(t4, gpu) == clock_card(t4, CPU) == CARDS["T4"]  # which has no TF32
    assert clock_card(mine, gpu) == (gpu, 80, 32)  # measured at the shape of its attention
    there.name = "NVIDIA GeForce 8800 GTX"
    assert clock_card(nothing, gpu) is None is clock_card(nothing, CPU)
