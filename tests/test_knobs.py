"""What to change when memory is little: one list, the least cost first; and who asks for it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness.answers import parse, room_for

from memory import expanded
from planner import CARDS, Planner
from planner.cards import clock_card
from trainer.flags import UsageError, changed, model_config
from trainer.knobs import FEWER, Knob, candidates, next_knob
from trainer.plan import Question, TooLarge, plan_memory
from trainer.process import OneProcess
from trainer.snapshot import bytes_of

SHAPE = (
    "--use-toy-data --vocab-size 61 --n-layers 2 --n-heads 2 --d-model 16 --seq-len 32 "
    "--batch-size 12 --no-amp --device cpu"
)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB, H100 = 2**30, CARDS["H100"]


# ---- the list

FULL = "--use-activation-checkpoint full"
PLAIN = f"--loss-chunks 0 {FULL}"
OFFLOAD = "--use-activation-checkpoint full+offload"
AUTO = "--use-activation-checkpoint auto --card H100 --memory-budget 1GiB --batch-size 1"
LISTS = [
    (
        "--loss-chunks 1 --batch-size 6 --seq-len 32",
        "cpu",
        [
            "--loss-chunks 0",
            PLAIN,
            f"{PLAIN} --batch-size 3 --grad-accum-steps 2",
            f"{PLAIN} --batch-size 2 --grad-accum-steps 3",
            f"{PLAIN} --batch-size 1 --grad-accum-steps 6",
            f"{PLAIN} --batch-size 5",
            f"{PLAIN} --batch-size 1 --grad-accum-steps 6 --seq-len 16",
            f"{PLAIN} --batch-size 1 --grad-accum-steps 6 --seq-len 8",
        ],
    ),
    (  # a GPU can offload, too
        "--use-activation-checkpoint full:1 --batch-size 2 --seq-len 8",
        "cuda",
        [
            FULL,
            f"{FULL} --batch-size 1 --grad-accum-steps 2",
            OFFLOAD,
            f"{OFFLOAD} --batch-size 1 --grad-accum-steps 2",
            f"{FULL} --batch-size 1",
            f"{OFFLOAD} --batch-size 1",
        ],
    ),
    (  # more than four layers can be nested, with the smallest micro-batch
        "--n-layers 7 --batch-size 2 --grad-accum-steps 3 --seq-len 8",
        "cuda",
        [
            FULL,
            f"{FULL} --batch-size 1 --grad-accum-steps 6",
            "--use-activation-checkpoint full/3+nested --batch-size 1 --grad-accum-steps 6",
            OFFLOAD,
            f"{OFFLOAD} --batch-size 1 --grad-accum-steps 6",
        ],
    ),
    ("--use-activation-checkpoint full/3+nested --n-layers 7 --batch-size 1 --seq-len 8", "cpu",
     []),
    # what is there is not asked for again, and what belongs to auto goes with it
    (f"{OFFLOAD} --batch-size 2 --grad-accum-steps 3 --seq-len 8", "cuda",
     ["--batch-size 1 --grad-accum-steps 6"]),
    (f"{AUTO} --seq-len 8", "cpu", [f"{FULL} without --memory-budget --card"]),
    (f"{FULL} --batch-size 1 --seq-len 8", "cpu", []),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "device", "knobs"), LISTS)
def test_the_list_begins_with_what_costs_least(flags, device, knobs):
    """A run that ran out takes the first."""
    args, back = parse(flags), "go on with --resume"
    found = candidates(args, device, most=lambda args: args.batch_size)
    assert [knob.command(args) for knob in found] == knobs
    said = next_knob(args, torch.device(device), back)
    first = f"{knobs[0]} (" if knobs else "a shorter --seq-len or a smaller model"
    assert f"; try {first}" in said and said.endswith(f"; {back}" * bool(knobs))
    assert "a smaller model (--n-layers, --d-model)" in next_knob(args, None, None)


# ---- a prediction


class MadeUp(Question):
    """What a planner would say of full, by a formula that grows with all that a step's memory grows
    with; notes how many layers it was asked about."""

    @property
    def peak(self) -> int:
        args, (_, group, _, offload) = self.args, expanded(self.config)
        way = (0.8 if group > 1 else 1) * (0.3 if offload else 1)
        of_blocks = 2 * args.n_layers * args.d_model * way
        gradients = 48 * args.n_layers * args.d_model**2 * (args.grad_accum_steps > 1)
        tokens = args.batch_size * args.seq_len
        return self.state + int(tokens * (of_blocks + 1000)) + gradients

    @property
    def largest_batch(self) -> int:
        if self.state >= self.budget:
            return 0
        self.made.setdefault("asked", set()).add(self.args.n_layers)
        sizes = (self.about(changed(self.args, batch_size=n)) for n in range(1, 18))
        return sum(one.peak <= self.budget for one in sizes)


def test_fewer_sequences_are_as_many_as_fit():
    """Where accumulating them takes more, as gradients have to wait."""
    args = parse("--n-layers 12 --d-model 768 --batch-size 7 --use-activation-checkpoint full")
    asked = MadeUp(args, 1000, CPU, torch.bfloat16)
    five = asked.about(changed(args, batch_size=5)).peak
    _, knob = replace(asked, room=room_for(five)).way_out(is_auto=True)
    assert knob == Knob({"batch_size": 5}, FEWER)


def test_a_smaller_state_before_a_smaller_model():
    """By how much they change the training; and a run that is half done keeps its optimizer. The
    planner is asked about no model that cannot be."""
    muon, half, one = "--optimizer muon", "--moments-dtype bfloat16", "--batch-size 1 --seq-len 8"
    xl = f"--model gpt2-xl {one}"
    typed = f"--n-layers 48 --d-model 1600 --n-heads 25 --d-ff 6400 {one}"
    for flags, gib, wanted, layers in (
        (xl, 20, half, 48),
        (f"{xl} --resume", 20, half, 48),
        (xl, 17, f"{muon} {half}", 48),
        (f"{xl} {half}", 15, muon, 48),
        (f"{xl} {muon}", 15, half, 48),
        (xl, 14, "--model gpt2-large", 36),
        (f"{xl} --resume", 15, "--model gpt2-large", 36),
        (typed, 3, "--n-layers 12 --n-heads 12 --d-model 768 --d-ff 3072", 12),
        (typed, 1, "", None),
    ):
        args = parse(f"{flags} --use-activation-checkpoint full")
        asked = MadeUp(args, 50257, GPU, torch.bfloat16, room_for(gib * GIB))
        _, knob = asked.way_out(is_auto=True)
        assert (knob.command(args) if knob else "") == wanted
        assert asked.made.get("asked", {None}) == {layers}


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
    way_out = "; try --use-activation-checkpoint cheap:1 (same results, some more time)"
    machine(2 * peak(), peak() - 1)
    _, line = words().splitlines()
    assert line.startswith("warning  ") and " free, less a margin of a tenth); the machine" in line
    assert line.endswith(f"{way_out}, which fits")
    machine(peak() - 1, peak() - 1)
    with pytest.raises(TooLarge) as stop:
        words()
    line = str(stop.value)
    assert line.startswith("out of memory before the first step: ") and "\n" not in line
    assert "the machine has" in line and "with --batch-size 12 --seq-len 32, recompute none" in line
    assert line.endswith(f"{way_out}, which fits")


def test_auto_has_what_a_snapshot_takes_and_is_checked_as_well(machine):
    auto = "--use-activation-checkpoint auto"
    machine(10 * peak(FULL), 9 * peak(FULL) // 10)
    with pytest.raises(UsageError, match="free, less a margin"):
        words(auto)
    assert "auto takes" in words(auto, snapshot=peak(FULL) // 4)
    machine(peak(FULL) // 2, peak(FULL) // 2)
    with pytest.raises(TooLarge, match="recompute auto; try .*--batch-size"):
        words(f"{auto} --memory-budget {2 * peak(FULL)}b")
    state = {"model": {"w": torch.zeros(3, 4)}, "optimizer": {"state": [torch.zeros(5)]}, "step": 1}
    assert bytes_of(state) == 4 * (12 + 5)


def test_what_the_state_settles_is_not_simulated(machine, monkeypatch):
    monkeypatch.setattr(Planner, "step", lambda *_, **__: pytest.fail("planned"))
    machine(1000, 1000)
    with pytest.raises(TooLarge, match="AdamW's state alone take .*: try a smaller --d-model"):
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
