"""What offload takes: of a CPU's memory as the planner predicts it, at sizes as they are."""

import random
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases.shapes import CONFIG, PRECISIONS
from harness.answers import SHAPE, ask, parse
from harness.planned import measured_peak, planner
from hypothesis import given
from hypothesis import strategies as st

from memory import RECOMPUTE_POLICIES, offload
from model import MiniGPT, MiniGPTConfig
from planner import StepMemory
from planner import step as step_of_planner
from trainer.flags import model_config
from trainer.metrics import format_bytes
from trainer.plan import Question, TooLarge, plan_memory
from trainer.process import OneProcess

POLICIES = RECOMPUTE_POLICIES[1:]
Drawn = tuple[StepMemory, str]  # and its precision


def draw(number: int, policy: str, device_type: str = "cpu", **changes) -> Drawn:
    """A tiny shape, of whose tensors some are large enough to travel; and some shapes have none."""
    choose = random.Random(number).choice
    n_heads, seq_len = choose((1, 2, 4)), choose((8, 31, 64, 96, 128, 200))
    d_model = n_heads * choose((16, 48, 64))
    config = MiniGPTConfig(
        vocab_size=choose((31, 256, 1000)),
        max_position_embeddings=seq_len,
        n_layers=choose((1, 2, 3, 3, 4)),
        n_heads=n_heads,
        d_model=d_model,
        d_ff=choose((2, 3, 4)) * d_model,
        dropout=number % 2 / 10,
        recompute=f"{policy}+offload",
    )
    batch_size = max(1, choose((8, 1000, 1500, 2000)) // seq_len)
    precision, config = [*PRECISIONS][number // 2 % 2], replace(config, **changes)
    plan = planner(config, precision, seq_len=seq_len, device_type=device_type)
    return plan.step(batch_size), precision


SOME = zip((12, 17, 10, 37, 36, 34, 35), POLICIES, strict=True)
MORE = [pytest.param(i, way, marks=pytest.mark.slow) for i in range(4) for way in POLICIES]


@pytest.mark.parametrize(("number", "policy"), [*SOME, *MORE])
def test_predicted_peak_is_that_of_a_real_offloaded_step(number, policy):
    step, precision = draw(number, policy)
    shape = {"batch_size": step.batch_size, "seq_len": step.seq_len}
    measured = measured_peak(step.config, precision=precision, by_ours=True, **shape)
    exact = 1e-3 if measured > 1e6 else 3e-3
    assert step.peak == pytest.approx(measured, rel=exact)


# ---- pinned memory


@pytest.mark.parametrize("number", range(0, 6, 2))
def test_what_is_pinned_is_what_was_predicted(number, monkeypatch):
    """Of a GPU's memory, that is; all else is the same. And hardly more than what travels."""
    monkeypatch.setattr(offload, "SMALL", 2**14)
    way = POLICIES[-number]
    (step, precision), (gpu, _) = (draw(number, way, on, n_layers=3) for on in ("cpu", "cuda"))
    assert step.moved and gpu.moved == step.moved
    model = MiniGPT(step.config).train()
    ids = torch.zeros(step.batch_size, step.seq_len, dtype=torch.int64)
    for _ in range(3):
        with torch.autocast("cpu", PRECISIONS[precision], enabled=precision != "fp32"):
            loss = model(ids, ids)
        loss.backward()
    pinned = sum(block.nbytes for block in model.schedule.host.made)
    assert sum(step.moved) <= pinned == step.host <= 1.05 * sum(step.moved)


@given(st.integers(2**10, 2**40))
def test_blocks_are_few_powers_of_two_and_hardly_larger_in_all(size):
    """torch rounds up to powers of two: c10's CachingHostAllocator."""
    blocks = offload.sizes_of_blocks(size)
    assert all(block.bit_count() == 1 for block in blocks) and len(blocks) <= 6
    assert size <= sum(blocks) <= size * 33 / 32


@pytest.mark.parametrize(
    ("device_type", "bounded", "room"),
    [("cpu", "peak", (2**23, None)), ("cuda", "host", (2**40, 2**23))],
)
def test_largest_batch_in_the_memory_of_a_cpu(device_type, bounded, room, monkeypatch):
    """Where it is the device, blocks are in the peak; beside a GPU they have room of their own."""
    for where in (offload, step_of_planner):
        monkeypatch.setattr(where, "SMALL", 2**14)
    memory, plan = {"recompute": "mlp+offload"}, planner(CONFIG, device_type=device_type)
    most = plan.largest_batch(room[0], 9, room[1], **memory)
    takes, more = (getattr(plan.step(n, **memory), bounded) for n in (most, most + 1))
    assert most > 9 and takes <= 2**23 < more
    too_few = plan.step(1, **memory).host - 1
    assert plan.largest_batch(2**40, 9, host=too_few, **memory) == 0


# ---- does it fit

FULL = {"recompute": "full+offload"}
FLAGS = "--n-layers 4 --batch-size 8 --use-activation-checkpoint full+offload"
X = 8 * 32 * 16 * 4  # bytes of the residual stream: of four blocks, three are moved


@pytest.mark.parametrize(("left", "processes"), [("enough", 3), ("little", 3), ("never", 1)])
def test_the_memory_of_a_cpu_is_part_of_the_room(left, processes, monkeypatch, everything_travels):
    process = OneProcess(torch.device("cuda"))
    process.processes_here = processes
    args = parse(f"{SHAPE} {FLAGS}")
    need = Question(args, 61, process.device, torch.float32).planner.step(8, **FULL).host
    assert need == 3 * X
    free = need - (left != "enough")
    total = processes * (need - (left == "never"))
    monkeypatch.setattr("trainer.device.for_tensors", lambda room, device_type: int(room))
    monkeypatch.setattr("trainer.plan.own_memory", lambda: 0)
    monkeypatch.setattr("trainer.plan.clock_card", lambda args, device: None)
    for room, there in (("plan.total_memory", total), ("device.free_memory", processes * free)):
        monkeypatch.setattr(f"trainer.{room}", lambda d, n=there: n if d.type == "cpu" else 2**40)
    words = partial(plan_memory, args, process, model_config(args, 61), torch.float32)

    fits = "; --batch-size 4 --grad-accum-steps 2 fits (the same sequences)"
    each = "3 processes, each " * (processes > 1)
    said = f"{each}{need / 1024:.1f} KiB of CPU memory for +offload, "
    if left == "never":
        with pytest.raises(TooLarge, match=re.escape(said + "the machine has ")) as raised:
            words()
        assert str(raised.value).endswith(fits)
        return
    _, *warnings = words().words.splitlines()
    assert len(warnings) == (left == "little")
    for line in warnings:
        assert line.startswith(f"warning  {said}but tensors may take ")
        assert line.endswith(fits)


def test_rounded_buffers_cost_no_sequence():
    """How much of a CPU's memory rounds buffers up differs between small and large batches."""
    plan = planner(replace(CONFIG, n_layers=6, d_model=64, d_ff=256))
    budget = 2**27
    most = plan.largest_batch(budget, 2, recompute="full+offload")
    takes, more = (plan.step(n, recompute="full+offload").peak for n in (most, most + 1))
    assert takes <= budget < more


def test_plan_memory_says_what_offload_takes_of_a_cpu():
    answer = ask(f"{FLAGS} --device cuda --memory-budget 64MiB --nproc-per-node=2")
    row = answer.json["rows"][-1]
    assert row["host_bytes"] == 3 * X and row["fits"]
    assert f"\noffload  pins {format_bytes(6 * X)} of CPU memory in 2 processes\n" in answer.out
