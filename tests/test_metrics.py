"""What a record of the log says of memory, and what the clock of a run says of time."""

import gc
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from harness.runs import Crash, train_here

import train_minimal
from trainer import start
from trainer.metrics import StepClock
from trainer.report import measure

STATS = {
    "allocated_bytes.all.peak": 100,
    "active_bytes.all.peak": 150,
    "active_bytes.all.current": 7,
    "reserved_bytes.all.peak": 200,
}


def record_on(device: str) -> dict:
    """What is logged after one step there."""
    clock = StepClock()
    clock.end_step()
    run = SimpleNamespace(
        args=SimpleNamespace(batch_size=1, seq_len=8, num_steps=2),
        process=SimpleNamespace(device=torch.device(device), sum=lambda numbers: numbers),
        clock=clock,
        step=1,
        micro_batches=1,
        optimizer=SimpleNamespace(param_groups=[defaultdict(float)]),
        train_batches=SimpleNamespace(epoch=lambda n: 0.5),
    )
    return measure(run, torch.ones(1), torch.ones(()))  # type: ignore[arg-type]


@pytest.mark.parametrize("stats", [STATS, {}])  # {}: nothing ran there yet
def test_a_gpu_tells_what_its_allocator_took(stats, monkeypatch):
    for module in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(module, "memory_stats", lambda device: stats)
    record = record_on("cuda")
    memory = {key: value for key, value in record.items() if key.startswith("peak")}
    assert memory == {
        "peak_memory_bytes": stats.get("allocated_bytes.all.peak", 0),
        "peak_memory_kind": "cuda",
        "peak_active_bytes": stats.get("active_bytes.all.peak", 0),
        "peak_reserved_bytes": stats.get("reserved_bytes.all.peak", 0),
    }


def test_a_cpu_has_no_such_allocator():
    memory = [key for key in record_on("cpu") if key.startswith("peak")]
    assert memory == ["peak_memory_bytes", "peak_memory_kind"]


def clock_with_a_hand(monkeypatch) -> tuple[StepClock, SimpleNamespace]:
    """A clock whose time is what the test says it is: `now.s` seconds."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr("trainer.metrics.time.perf_counter", lambda: now.s)
    return StepClock(), now


def test_a_clock_books_to_the_phase_that_began(monkeypatch):
    clock, now = clock_with_a_hand(monkeypatch)
    now.s = 100  # setting up does not count
    for phase, seconds in [("data", 1), ("forward", 2), ("backward", 4), ("optimizer", 8)]:
        clock.begin(phase)
        now.s += seconds
    clock.end_step()
    now.s += 1
    assert clock.end_interval() == 16 == 1 / clock.steps_per_second()
    assert clock.overhead() == 1 - 14 / 16
    now.s += 4  # of the same log
    for _ in range(2):
        clock.begin("data")
        now.s += 2
        clock.end_step()
    assert clock.end_interval() == 4  # a step, of two


def test_a_run_without_a_step_has_no_speed():
    clock = StepClock()
    assert clock.steps_per_second() == 0 and clock.overhead() == 1


def test_what_is_done_in_a_pause_does_not_count(monkeypatch):
    clock, now = clock_with_a_hand(monkeypatch)
    with clock:
        clock.begin("data")
        now.s += 1
        with clock.paused("save"):
            now.s += 50
        now.s += 1
        clock.end_step()
        now.s += 2
    now.s += 7  # nor does what comes after training
    assert clock.phase == "end" and clock.total["save"] == 50
    assert clock.end_interval() == 4


def test_python_looks_for_garbage_again_when_training_begins(tmp_path, monkeypatch):
    def train_step(run):
        raise Crash(gc.get_threshold())

    monkeypatch.setattr(train_minimal, "train_step", train_step)
    usual = gc.get_threshold()
    monkeypatch.setattr(start, "BEFORE", (321, 7, 7))
    try:
        with pytest.raises(Crash, match="321, 7, 7"):
            train_here(tmp_path / "run.pt")
    finally:
        gc.set_threshold(*usual)
