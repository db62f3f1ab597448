"""What offload takes: of a CPU's memory as the planner predicts it, at sizes as they are."""

from dataclasses import replace

import pytest
import torch
from cases.shapes import CONFIG, PRECISIONS
from harness.answers import SHAPE, ask
from harness.marks import rest_slow
from harness.planned import measured_peak, planner
from harness.runs import parse
from hypothesis import given
from hypothesis import strategies as st

from memory import POLICY_NAMES, offload
from planner import Layout
from trainer.device import MemoryBudget
from trainer.metrics import format_bytes
from trainer.plan import plan_memory_command, plan_run
from trainer.process import OneProcess


@pytest.mark.parametrize("precision", rest_slow(PRECISIONS, "bf16".__eq__))
@pytest.mark.parametrize("policy", rest_slow(POLICY_NAMES[1:], ["sdpa", "full"].__contains__))
def test_predicted_peak_is_that_of_a_real_offloaded_step(policy, precision):
    """Some of its tensors are large enough to travel. A GPU's step pins as much."""
    config = replace(CONFIG, n_layers=3, d_model=192, d_ff=384, recompute=f"{policy}+offload")
    step, gpu = (planner(config, precision, device_type=kind).step(48) for kind in ("cpu", "cuda"))
    assert step.peak == measured_peak(config, 48, precision)
    assert step.offloaded_sizes and (gpu.offloaded_sizes, gpu.host_bytes) == (
        step.offloaded_sizes,
        step.host_bytes,
    )
    moved = sum(size for size, _ in step.offloaded_sizes)
    assert moved <= step.host_bytes <= 1.05 * moved


# ---- pinned memory


@given(st.integers(2**10, 2**40))
def test_blocks_are_few_powers_of_two_and_hardly_larger_in_all(size):
    """torch rounds up to powers of two: c10's CachingHostAllocator."""
    blocks = offload.split_into_buffer_sizes(size)
    assert all(block.bit_count() == 1 for block in blocks) and len(blocks) <= 6
    assert size <= sum(blocks) <= size * 33 / 32


# ---- does it fit

FULL = {"recompute": "full+offload"}
FLAGS = "--n-layers 4 --batch-size 8 --use-activation-checkpoint full+offload"
X = 8 * 32 * 16 * 4  # bytes of the residual stream: of four blocks, three are moved


@pytest.mark.slow
def test_the_memory_of_a_cpu_is_part_of_the_room(monkeypatch, everything_travels):
    process = OneProcess(torch.device("cuda"), Layout(local_world_size=3))
    monkeypatch.setattr(MemoryBudget, "margin", 0)
    monkeypatch.setattr("trainer.plan.choose_card", lambda *_: None)
    known = {"cpu": (9 * X - 3, 9 * X - 3), "cuda": (2**26, 2**26)}
    for file in ("plan", "device"):
        monkeypatch.setattr(f"trainer.{file}.free_and_total_memory", lambda d: known[d.type])
    *_, words = plan_run(parse(f"{SHAPE} {FLAGS}"), 61, process, torch.float32)
    (line,) = words.splitlines()[1:]
    assert line.startswith(f"warning  each process needs {3 * X / 1024:.1f} KiB of CPU memory")
    assert line.endswith(f"; {plan_memory_command(parse(f'{SHAPE} {FLAGS}'), process.layout)}")


def test_plan_memory_says_what_offload_takes_of_a_cpu():
    answer = ask(f"{FLAGS} --device cuda --memory-budget 64MiB --nproc-per-node=2")
    row = answer.json["rows"][-1]
    assert row["host_bytes"] == 3 * X and row["fits"]
    assert f"\noffload  pins {format_bytes(6 * X)} of CPU memory\n" in answer.out
