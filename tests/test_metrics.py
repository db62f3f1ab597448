"""What a run asks of its device and says of it: memory, time, rounding, the first lines."""

import gc
import itertools
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.faults import Injected
from harness.runs import ready, train_here

import train_minimal
from trainer import start
from trainer.device import set_matmul_precision
from trainer.metrics import StepClock, memory_used
from trainer.report import describe_run

BF16, FP32 = torch.bfloat16, torch.float32
CUDA, CPU, MPS = torch.device("cuda", 1), torch.device("cpu"), torch.device("mps")


def test_a_gpu_tells_what_its_allocator_took(monkeypatch):
    found = {"memory": 100, "active": 150, "reserved": 200}
    names = zip(("allocated", "active", "reserved"), found.values(), strict=True)
    stats = {f"{name}_bytes.all.peak": peak for name, peak in names}
    stats["active_bytes.all.current"] = 7
    for told, peaks in ((stats, found), ({}, dict.fromkeys(found, 0))):  # nothing ran there yet
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device, told=told: told)
        expected: dict[str, Any] = {f"peak_{name}_bytes": peak for name, peak in peaks.items()}
        assert memory_used(CUDA) == expected | {"peak_memory_kind": "cuda"}


# ---- Time


@pytest.fixture
def now(monkeypatch):
    """The time is what the test says it is: `now.s` seconds."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr("trainer.metrics.time.perf_counter", lambda: now.s)
    return now


def test_a_clock_books_to_the_phase_that_began(now):
    clock = StepClock()
    assert clock.steps_per_second() == 0 and clock.overhead() == 1  # without a step
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


def test_what_is_done_in_a_pause_does_not_count(now):
    clock = StepClock()
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
        raise Injected(gc.get_threshold())

    monkeypatch.setattr(train_minimal, "train_step", train_step)
    usual = gc.get_threshold()
    monkeypatch.setattr(start, "BEFORE", (321, 7, 7))
    try:
        with pytest.raises(Injected, match="321, 7, 7"):
            train_here(tmp_path / "run.pt")
    finally:
        gc.set_threshold(*usual)


# ---- How matmuls round, and how fast they can be then


def test_tf32_is_a_setting_of_a_gpu_that_the_trainer_asks_for(tmp_path, monkeypatch, capsys):
    cublas, before = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    sums = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"
    asked: list[tuple] = []
    try:
        for name in sums:
            setattr(cublas, name, True)
        for tf32 in (False, True, False):  # TORCH_ALLOW_TF32_CUBLAS_OVERRIDE may have set it
            for device in (CPU, MPS):
                there = torch.get_float32_matmul_precision(), cublas.allow_tf32
                set_matmul_precision(device, tf32=True)
                assert there == (torch.get_float32_matmul_precision(), cublas.allow_tf32)
            set_matmul_precision(CUDA, tf32)
            assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
            assert cublas.allow_tf32 == tf32 and not any(getattr(cublas, name) for name in sums)
    finally:
        torch.set_float32_matmul_precision(before)
        for name in sums:
            setattr(cublas, name, True)
    monkeypatch.setattr("trainer.setup.set_matmul_precision", lambda *how: asked.append(how))
    assert train_here(tmp_path / "run.pt", "--no-amp", "--num-steps=1", "--tf32") == 0
    assert asked == [(CPU, True)] and "TF32" not in capsys.readouterr().out


def test_what_torch_says_of_the_setting_is_no_users_business(monkeypatch):
    of_torch_2_9 = partial(warnings.warn, "Please use the new API settings to ...", stacklevel=1)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: of_torch_2_9())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_matmul_precision(CUDA, tf32=True)


def test_the_first_lines_say_what_a_gpu_rounds_and_note(tmp_path, monkeypatch):
    """A GPU that is not found, to whoever asked for none in particular and has a PyTorch that is
    for one; GPT-2's vocabulary on a CPU, to whoever did not name it."""
    run = ready(tmp_path)
    args = run.args
    for args.device, cuda in itertools.product(("auto", "cpu"), ("13.0", None)):
        monkeypatch.setattr("torch.version.cuda", cuda)
        noted = "note     PyTorch, built for CUDA 13.0, finds no GPU" in describe_run(run, "", None)
        assert noted == (args.device == "auto" and cuda is not None)
    for size, args.tokenizer_name in ((50257, None), (50257, "gpt2"), (31, None)):
        run.model.config = replace(run.model.config, vocab_size=size)
        noted = "note     GPT-2's vocabulary makes" in describe_run(run, "", None)
        assert noted == (size == 50257 and args.tokenizer_name is None)
    run.process.device = CUDA
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    in_tf32 = {(FP32, False): "", (FP32, True): ", matmuls in TF32", (BF16, True): ""}
    for (run.precision, args.tf32), more in in_tf32.items():
        words = f"{str(run.precision).removeprefix('torch.')}{more}"
        assert f"device   1 x cuda (a card), {words}\n" in describe_run(run, "", None)
    run.held_lock.close()
