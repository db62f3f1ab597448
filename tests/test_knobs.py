"""What to change when memory is little: one list, the least cost first; and who asks for it."""

import argparse
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Planner
from planner.formulas import state_bytes
from planner.shards import share_of
from trainer.flags import UsageError, build_parser, fill_in, model_config
from trainer.knobs import FEWER, Knob, candidates, nearest, next_knob
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
    args = parse(flags)
    knobs = candidates(args, device_type, most=lambda args: args.batch_size)
    return [knob.command(args) for knob in knobs]


# ---- the list


def test_a_command_that_recomputes_fully_in_the_rest_can_be_typed():
    args = parse("--n-layers 4")
    words = Knob({}, "").with_policy(args, "sdpa:3,full").command(args)
    assert words == "--use-activation-checkpoint sdpa:3,full" and parse(f"--n-layers 4 {words}")
    assert (
        Knob({"use_activation_checkpoint": "full"}, "").command(args)
        == "--use-activation-checkpoint"
    )


PLAIN = "--loss-chunks 0 --use-activation-checkpoint"
TYPED = "--use-activation-checkpoint full:1 --batch-size 2 --seq-len 8"
FULL = "--use-activation-checkpoint full"
DONE = "--use-activation-checkpoint full+offload --batch-size 2 --grad-accum-steps 3"
AUTO = "--use-activation-checkpoint auto --card H100 --memory-budget 1GiB --batch-size 1"


@pytest.mark.parametrize(
    ("flags", "device", "knobs"),
    [
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
            TYPED,
            "cuda",
            [
                FULL,
                f"{FULL} --batch-size 1 --grad-accum-steps 2",
                f"{FULL}+offload",
                f"{FULL}+offload --batch-size 1 --grad-accum-steps 2",
                f"{FULL} --batch-size 1",
                f"{FULL}+offload --batch-size 1",
            ],
        ),
        # what is there is not asked for again, and what belongs to auto goes with it
        (f"{DONE} --seq-len 8", "cuda", ["--batch-size 1 --grad-accum-steps 6"]),
        (f"{AUTO} --seq-len 8", "cpu", [f"{FULL} without --memory-budget --card"]),
        ("--use-activation-checkpoint --batch-size 1 --seq-len 8", "cpu", []),
    ],
)
def test_the_list_begins_with_what_costs_least(flags, device, knobs):
    assert everything(flags, device) == knobs


@pytest.mark.parametrize("flags", ["", "--loss-chunks 1", "--use-activation-checkpoint full"])
def test_a_run_that_ran_out_takes_the_first(flags):
    args, back = parse(flags), "go on with --resume"
    said = next_knob(args, CPU, back)
    assert f"; try {everything(flags, 'cpu')[0]} (" in said and said.endswith(f"; {back}")
    last = parse("--use-activation-checkpoint --batch-size 1")
    assert next_knob(last, CPU, back).endswith("; try a shorter --seq-len or a smaller model")
    assert "a smaller model (--n-layers, --d-model)" in next_knob(args, None, None)


# ---- a prediction


class MadeUp:
    """What plans would say, by a formula; grows with everything that a step's memory grows with."""

    KEPT = {"none": 34, "cheap": 24, "selective": 20, "mlp": 16, "attn": 14, "sdpa": 6, "full": 2}

    def __init__(self, shards: int = 1):
        self.shards = shards

    def state(self, args) -> int:
        config, moments = model_config(args, 1000), getattr(torch, args.moments_dtype)
        return share_of(state_bytes(config, args.optimizer, moments), config, self.shards)

    def peak(self, args) -> int:
        config, n = model_config(args, 1000), args.batch_size * args.seq_len
        policies, group, offload = config.expanded
        kept = sum(self.KEPT[policy] for policy in policies)
        kept *= (0.8 if group > 1 else 1) * (0.3 if offload else 1)
        gradients = 48 * config.n_layers * config.d_model**2 * (args.grad_accum_steps > 1)
        head = n * 1000 * (4 if args.loss_chunks == 1 else 1)
        return self.state(args) + int(n * config.d_model * kept) + head + gradients

    def most(self, args, budget: int) -> int:
        sizes = range(1, 18)
        peaks = (self.peak(argparse.Namespace(**vars(args) | {"batch_size": n})) for n in sizes)
        return sum(peak <= budget for peak in peaks)


def either(*words: str):
    return st.sampled_from(words)


FLAGS = st.tuples(
    either("--n-layers 2", "--n-layers 12 --d-model 768", "--n-layers 1 --d-model 1600 --d-ff 64",
           "--model gpt2-xl", "--model gpt2 --n-layers 24"),
    either("--batch-size 1", "--batch-size 6", "--batch-size 17"),
    either("", "--seq-len 8", "--seq-len 100"),
    either("", "--grad-accum-steps 4"),
    either("", "--loss-chunks 1"),
    either("", FULL, f"{FULL}/2", "--use-activation-checkpoint auto", f"{FULL}+offload",
           f"{FULL}:1", f"{FULL}:1/2+offload", "--use-activation-checkpoint auto+offload",
           "--use-activation-checkpoint mlp:1,cheap"),
    either("", "--optimizer muon", "--moments-dtype bfloat16", "--resume"),
    either("", "--compress-gradients"),
).map(" ".join)  # fmt: skip
STATE = {"moments_dtype", "optimizer", "model", "n_layers"}


@settings(deadline=None, derandomize=True, max_examples=150)
@given(FLAGS, either("cpu", "cuda"), st.floats(0.01, 0.99), st.booleans(), st.booleans())
def test_the_first_that_fits_is_taken(flags, device, share, groups, sharded):
    """Against all, one by one; else less state, which fits too, and is the first that does."""
    args, plans, shards = parse(flags), MadeUp(), MadeUp(4) if sharded else None
    budget = int(share * plans.peak(args))
    knob = nearest(args, device, budget, plans, shards, groups)
    fitting = []
    for other in candidates(args, device, lambda args: args.batch_size, groups):
        sizes = range(args.batch_size - 1, 0, -1) if other.words == FEWER else [None]
        for n in sizes:
            one = Knob(other.flags | ({"batch_size": n} if n else {}), other.words)
            if plans.state(args) < budget and plans.peak(one.change(args)) <= budget:
                fitting.append(one)
    if fitting:
        assert knob == fitting[0]
    elif knob:
        then = knob.change(args)
        assert (shards if knob.trainer else plans).peak(then) <= budget
        assert knob.trainer or knob.flags.keys() & STATE and plans.state(then) < plans.state(args)
        assert (
            not (knob.trainer and then.compress_gradients)
            and "/3" not in then.use_activation_checkpoint
        )


def test_the_planner_is_asked():
    """How many sequences fit, one by one; and what is told in the end is the fastest then."""
    args, plans = parse(SHAPE + " --loss-chunks 1 --batch-size 4"), Plans(61, GPU, torch.float32)
    full = Knob({"loss_chunks": 0, "use_activation_checkpoint": "full"}, "").change(args)
    peaks = [plans.peak(argparse.Namespace(**vars(full) | {"batch_size": n})) for n in range(1, 5)]
    for fitting, budget in enumerate((peaks[0] - 1, peaks[0], peaks[1], peaks[3] - 1)):
        assert plans.most(full, budget) == fitting
    why, told = plans.way_out(args, budget)
    then = told.change(args)
    assert why == "" and plans.pick(then, budget).peak == plans.peak(then) <= budget


def test_a_state_that_is_too_large_asks_for_a_smaller_model_at_once():
    """The largest of those that fit; a planner is asked about no model that cannot."""
    asked = []

    def most(flags: argparse.Namespace, budget: int) -> int:
        asked.append(flags.n_layers)
        return (budget - 6 * GIB * flags.n_layers // 24) * 4 // GIB

    real = Plans(50257, GPU, torch.bfloat16)
    plans = SimpleNamespace(state=real.state, most=most)
    args = parse("--model gpt2-xl --batch-size 8")
    knob = nearest(args, "cuda", 7 * GIB, plans)
    full = {"use_activation_checkpoint": "full"}
    assert knob.flags == {"model": "gpt2-medium"} | full | {"batch_size": 4, "grad_accum_steps": 2}
    assert set(asked) == {24}

    plans.most = lambda flags, budget: flags.batch_size
    typed = parse("--n-layers 48 --d-model 1600 --n-heads 25 --d-ff 6400 --seq-len 64")
    knob = nearest(typed, "cuda", 3 * GIB, plans)
    assert knob.command(typed) == "--n-layers 12 --n-heads 12 --d-model 768 --d-ff 3072"
    assert nearest(typed, "cuda", GIB, plans) is None


def test_a_smaller_state_before_a_smaller_model():
    """By how much they change the training; and a run that is half done keeps its optimizer."""
    state = Plans(50257, GPU, torch.bfloat16).state
    plans = SimpleNamespace(state=state, most=lambda args, budget: args.batch_size)

    def told(flags: str, budget: float) -> str:
        args = parse(f"--model gpt2-xl --batch-size 1 --use-activation-checkpoint {flags}")
        return nearest(args, "cuda", int(budget * GIB), plans).command(args)

    muon, half = "--optimizer muon", "--moments-dtype bfloat16"
    assert told("", 20) == told("--resume", 20) == half
    assert told("", 17) == f"{muon} {half}"
    assert told(half, 15) == muon and told(muon, 15) == half
    assert told("", 14) == told("--resume", 15) == "--model gpt2-large"


def test_a_shorter_sequence_needs_fewer_positions():
    for flags, positions in (("", 2048), ("--max-position-embeddings 5000", 5000)):
        args = parse(f"--seq-len 4096 {flags}")
        assert Knob({"seq_len": 2048}, "").change(args).max_position_embeddings == positions
    muon, adamw = (parse(f"--seq-len 8 --optimizer {name}").lr for name in ("muon", "adamw"))
    assert muon == 2 * adamw  # another flag that stands for more than itself


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


@pytest.mark.parametrize(
    ("processes", "snapshot", "own", "total", "free", "says"),
    [  # total and free: bytes beyond the peaks of all processes
        (1, 0, 0, 0, 0, ""),
        (1, 0, 0, None, 0, ""),
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
    machine(None if total is None else peaks + total, peaks + free, own=own)
    if says:
        with pytest.raises(TooLarge, match=says):
            words(processes=processes, snapshot=snapshot)
    else:
        assert "\n" not in words(processes=processes, snapshot=snapshot)  # no warning


def test_too_little_is_one_line_with_the_knob(machine):
    """A warning where it is too little just now; the end where there is no more in all."""
    mix = "--use-activation-checkpoint cheap:1"  # the least that fits
    way_out = f"; try {mix} (same results, some more time)"
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


def test_a_mix_is_planned_as_what_it_is(machine):
    mlp = "--use-activation-checkpoint mlp"
    mix = f"{mlp}:1,cheap"
    assert peak("--use-activation-checkpoint") < peak(mix) < peak(mlp)
    machine(2 * peak(), peak(mix))
    (line,) = words(mix).splitlines()
    assert line.startswith("mlp:1,cheap: peak ")
    assert f"; without recompute: peak {format_bytes(peak())}, " in line
    machine(2 * peak(), peak(mix) - 1)
    knob = "--use-activation-checkpoint sdpa:1,cheap"
    assert f"; try {knob} (same results, some more time), which fits" in words(mix)


def test_auto_has_what_a_snapshot_takes_and_is_checked_as_well(machine):
    full, auto = peak("--use-activation-checkpoint"), "--use-activation-checkpoint auto"
    machine(10 * full, 9 * full // 10)
    with pytest.raises(UsageError, match="free, less a margin"):
        words(auto)
    assert "auto takes" in words(auto, snapshot=full // 4)
    machine(full // 2, full // 2)
    with pytest.raises(TooLarge, match="recompute auto; try .*--batch-size"):
        words(f"{auto} --memory-budget {2 * full}b")


def test_how_much_a_snapshot_holds():
    state = {"model": {"w": torch.zeros(3, 4)}, "optimizer": {"state": [torch.zeros(5)]}, "step": 1}
    resumed = Resumed(state, Path("x.pt"))
    assert held(resumed) == 4 * (12 + 5) and held(None) == 0


def test_what_the_state_settles_is_not_simulated(machine, monkeypatch):
    monkeypatch.setattr(Planner, "step", lambda *_, **__: pytest.fail("planned"))
    machine(1000, 1000)
    with pytest.raises(TooLarge, match="AdamW's state alone take .*: try a smaller --d-model"):
        words()
