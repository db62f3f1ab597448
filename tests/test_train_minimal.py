"""The loop: what is asked for is what is done, printed and written.

Precision and rounding follow the hardware; the lines and the log say the same, and who reads a log
hears of the run; time is booked where it belongs; the step that is measured takes what was
predicted. How a run goes on: test_resume.py.
"""

import importlib
import itertools
import math
import re
import sys
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from harness.runs import TINY, metrics, parse, ready, run, same, snapshot, train_here
from torch.utils._python_dispatch import _get_current_dispatch_mode

import train_minimal
from memory.head import softmax_in_place
from trainer import clocks
from trainer.bootstrap import ALLOCATOR
from trainer.clocks import MEASURED_STEP, PeakMemoryClock, StepClock
from trainer.device import choose_precision, cpu_has_bfloat16, set_matmul_precision
from trainer.metrics import format_line, memory_used
from trainer.process import OneProcess
from trainer.report import describe_run, sample_text

FP32, BF16, FULL = "--no-amp", "--amp-dtype=bfloat16", "--use-activation-checkpoint"
CUDA, CPU, MPS = torch.device("cuda", 1), torch.device("cpu"), torch.device("mps")
predicted = pytest.mark.usefixtures("plans_memory")


def test_clipping_sees_true_gradients(tmp_path):
    """float16 gradients are scaled by thousands; the norm that is clipped and logged is not."""
    scaled, plain = tmp_path / "scaled.pt", tmp_path / "plain.pt"
    assert train_here(scaled, "--amp-dtype=float16", "--num-steps=2") == 0
    assert train_here(plain, FP32, "--num-steps=2") == 0
    for a, b in zip(metrics(scaled), metrics(plain), strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0.02)


def test_precision_follows_the_hardware(monkeypatch):
    cpu = torch.device("cpu")
    assert isinstance(cpu_has_bfloat16(), bool)
    for has, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("trainer.device.cpu_has_bfloat16", lambda has=has: has)
        assert choose_precision(parse(), cpu) == dtype
        assert choose_precision(parse(BF16), cpu) == torch.bfloat16
        assert choose_precision(parse(FP32), cpu) == torch.float32


# ---- What is printed and written

LINE = re.compile(
    r"step +(\d+)/20 \| epoch (\S+) \| lr (\S+) \| loss (\S+) ppl (\S+) \| "
    r"(?:val (\S+) ppl (\S+) \| )?(\S+) ms/step \| (\S+) tok/s \| eta (\S+) \| "
    r"peak (\S+) [MG]iB rss"
)
LAST = re.compile(r"train +loss (\S+) ppl (\S+), mean of the last (\d+) steps")


def test_lines_and_metrics_say_the_same(tmp_path, capsys):
    path, each = tmp_path / "run.pt", tmp_path / "each.pt"
    assert train_here(path, "--log-interval=5", "--eval-interval=10") == 0
    said = capsys.readouterr().out
    lines = [m for m in map(LINE.fullmatch, said.splitlines()) if m]
    records = metrics(path)
    assert [r["step"] for r in records] == [5, 10, 15, 20] == [int(m[1]) for m in lines]
    for match, record in zip(lines, records, strict=True):
        assert float(match[4]) == pytest.approx(record["train_loss"], abs=1e-4)
        assert record["train_ppl"] == pytest.approx(math.exp(record["train_loss"]))
        assert record["tokens_per_s"] == pytest.approx(2 * 16 * 1000 / record["step_ms"])
        assert record["eta_s"] == pytest.approx((20 - record["step"]) * record["step_ms"] / 1000)
        assert record["epoch"] == pytest.approx(record["step"] * 2 / 12)
        assert ("val_loss" in record) == (match[6] is not None) == (record["step"] % 10 == 0)
        assert record["peak_memory_kind"] == "rss" and record["peak_memory_bytes"] > 50e6
    # One loss says little: the last line has their mean.
    assert train_here(each, "--eval-interval=10") == 0
    losses = [record["train_loss"] for record in metrics(each)]
    loss, perplexity, steps = LAST.search(said).groups()
    mean = sum(losses) / len(losses)
    assert float(loss) == pytest.approx(mean, abs=1e-4) and steps == "20"
    assert float(perplexity) == pytest.approx(math.exp(mean), abs=1e-2)
    assert abs(mean - losses[-1]) > 1e-2


# (The first step's line is not a record.)
@pytest.mark.parametrize(
    ("seconds", "flags", "logged"),
    [
        (1, "", [20]),
        (9, "", [4, 7, 10, 13, 16, 19, 20]),  # a fourth step would make it 36 s
        (9, "--log-interval=5", [4, 5, 8, 10, 13, 15, 18, 20]),
        (200, "--log-interval=10", list(range(2, 21))),
        (200, "--log-interval=0", [20]),  # who asks for silence has it
        (200, "a bar is enough", [20]),
    ],
)
def test_a_line_comes_at_least_every_half_minute(seconds, flags, logged, tmp_path, monkeypatch):
    """Each step takes as long, by a clock that stands still in between."""
    now, real, bar = [1000.0], train_minimal.train_step, "bar" in flags

    def train_step(run):
        now[0] += seconds
        return real(run)

    monkeypatch.setattr("trainer.clocks.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(train_minimal, "train_step", train_step)
    monkeypatch.setattr("sys.stderr.isatty", lambda: bar)
    words = ["--log-interval=50", *flags.split() * (not bar)]
    assert train_here(tmp_path / "run.pt", *words) == 0
    assert [record["step"] for record in metrics(tmp_path / "run.pt")] == logged


# ---- What is planned, and measured


@predicted
def test_a_prediction_that_fails_does_not_cost_the_run(tmp_path, capsys, monkeypatch):
    def fail(*args):
        raise NotImplementedError("no such device")

    monkeypatch.setattr("trainer.plan.describe_plan", fail)
    assert train_here(tmp_path / "run.pt", "--num-steps=1") == 0
    assert "could not be predicted (NotImplementedError at tests/" in capsys.readouterr().out


LARGER = ("--n-layers=3", "--d-model=32", "--num-steps=3", "--max-tokens=900")
RUNS = ["", f"{FULL} --grad-accum-steps=2", f"{FULL} cheap --no-amp --loss-chunks=1"]
RUNS += [f"{FULL} selective --optimizer=muon", f"{FULL} full+offload"]
SIZE = r"([\d.]+ \w+)"
MEASURED = rf"^measured peak {SIZE} of tensors; predicted {SIZE}(?:, without recompute {SIZE})?$"
PLAN = rf"^memory .*?peak {SIZE}, .*?(?:recompute: peak {SIZE}|$)"


@predicted
@pytest.mark.parametrize("flags", RUNS)
def test_a_step_takes_what_was_predicted_and_measuring_changes_no_bit(
    flags, tmp_path, monkeypatch, capsys
):
    measured_run, plain_run = tmp_path / "measured.pt", tmp_path / "not.pt"
    flags = (*LARGER, "--seq-len=64", "--num-steps=6", "--dropout=0.1", *flags.split())
    assert train_here(measured_run, *flags) == 0
    out = capsys.readouterr().out
    ((measured, expected, plain),) = re.findall(MEASURED, out, re.M)
    assert measured == expected
    planned = re.search(PLAN, out, re.M)
    assert planned and planned[1] == expected and (planned[2] or "") == plain
    monkeypatch.setattr(clocks, "PeakMemoryClock", lambda *_: StepClock())
    assert train_here(plain_run, *flags) == 0
    for part in ("model", "optimizer"):
        assert same(snapshot(measured_run)[part], snapshot(plain_run)[part])


@predicted
def test_one_step_is_looked_at_and_it_ends_with_the_step_or_the_run(tmp_path, monkeypatch):
    looking = []

    def count(losses: torch.Tensor) -> torch.Tensor:
        looking.append(_get_current_dispatch_mode() is not None)
        if len(looking) == fails_in:
            raise FloatingPointError
        return losses

    monkeypatch.setattr(train_minimal, "nan_if_infinite", count)
    fails_in = 0
    assert train_here(tmp_path / "run.pt", *LARGER, "--num-steps=5") == 0
    assert looking == [step == MEASURED_STEP for step in range(1, 6)]
    looking.clear()
    fails_in = MEASURED_STEP
    with pytest.raises(FloatingPointError):
        train_here(tmp_path / "other.pt", *LARGER)
    assert looking[-1] and _get_current_dispatch_mode() is None


# ---- What is compiled


def test_the_sample_compiles_nothing(tmp_path, monkeypatch):
    """Each of its lengths would be compiled anew; training compiles."""
    compiled: list[int] = []

    def backend(graph, inputs):
        compiled.append(1)
        return graph.forward

    def sample(run):
        before = len(compiled)
        text = sample_text(run)
        assert len(compiled) == before > 0
        return text

    torch._dynamo.reset()
    real = torch.nn.Module.compile
    compile_module = lambda module: real(module, backend=backend, dynamic=False)  # noqa: E731
    monkeypatch.setattr(torch.nn.Module, "compile", compile_module)
    monkeypatch.setattr("memory.head.compiled_softmax", lambda: softmax_in_place)  # without g++
    monkeypatch.setattr("trainer.endings.sample_text", sample)
    flags = ("--compile", "--no-amp", "--num-steps=2", "--sample-tokens=5")
    assert train_here(tmp_path / "run.pt", *flags) == 0
    assert not any("_orig_mod" in name for name in snapshot(tmp_path / "run.pt")["model"])
    torch._dynamo.reset()


# ---- What a device says


def test_a_gpu_tells_what_its_allocator_took(monkeypatch):
    """Tensors, and more: in the record, as a share of the card in the line, and what was asked for
    beside the prediction (an allocator's blocks are some percent larger)."""
    stats = {"allocated_bytes.all.peak": 2**30, "active_bytes.all.peak": 2**31}
    stats |= {"requested_bytes.all.peak": 100 * 2**20, "active_bytes.all.current": 7}
    card = SimpleNamespace(total_memory=2**32)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    process, said = OneProcess(CUDA), []
    monkeypatch.setattr(process, "say", said.append)
    record = dict(step=1, epoch=0, lr=1, train_loss=1, step_ms=1, tokens_per_s=1, eta_s=3700)
    for told in (stats, {}):  # {}: nothing ran there yet, or another allocator counts nothing
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device, told=told: told)
        clock = PeakMemoryClock(process, None, None, (100 * 2**20, 200 * 2**20))
        for _ in range(MEASURED_STEP + 1):
            clock.begin("forward")
            clock.end_step()
        found = memory_used(CUDA)
        peaks = [found[f"peak_{name}_bytes"] for name in ("memory", "active", "reserved")]
        assert peaks == ([2**30, 2**31, 0] if told else [0, 0, 0])
        if told:
            line = format_line(record | found, 20)
            assert line.endswith("eta 1:01:40 | peak 1.0 GiB cuda (25.0% of the card)")
    tail = "predicted 100.0 MiB, without recompute 200.0 MiB"
    assert said == [f"measured peak 100.0 MiB of tensors; {tail}"]


# ---- Time


@pytest.fixture
def now(monkeypatch):
    """The time is what the test says it is: `now.s` seconds."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr("trainer.clocks.time.perf_counter", lambda: now.s)
    return now


def test_a_clock_books_to_the_phase_that_began(now):
    clock = StepClock()
    assert clock.steps_per_second() == 0  # without a step
    now.s = 100  # setting up does not count
    with clock:
        for phase, seconds in [("data", 1), ("forward", 2), ("backward", 4), ("optimizer", 8)]:
            clock.begin(phase)
            now.s += seconds
        clock.end_step()
        now.s += 1
        assert clock.end_interval() == 16 == 1 / clock.steps_per_second()
        now.s += 4  # of the same log
        for _ in range(2):
            clock.begin("data")
            now.s += 1
            with clock.paused("save"):  # does not count
                now.s += 50
            now.s += 1
            clock.end_step()
    now.s += 7  # nor does what comes after training
    assert clock.phase == "end" and clock.total["save"] == 100
    assert clock.end_interval() == 4  # a step, of two


# ---- How matmuls round, and how fast they can be then


def test_tf32_is_a_setting_of_a_gpu_that_the_trainer_asks_for(tmp_path, monkeypatch, capsys):
    cublas, before = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    sums = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"
    asked: list[tuple] = []
    try:
        for tf32 in (False, True, False):  # TORCH_ALLOW_TF32_CUBLAS_OVERRIDE may have set it
            set_matmul_precision(CUDA, tf32)
            for device in (CPU, MPS):
                set_matmul_precision(device, tf32=not tf32)
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
    """Neither when it is set, nor when the compiler would rather have TF32."""
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    of_torch_2_9 = partial(warnings.warn, "Please use the new API settings to ...", stacklevel=1)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: of_torch_2_9())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_matmul_precision(CUDA, tf32=False)
        compile_fx._warn_tf32_disabled.__wrapped__()  # (once a process)
        with pytest.raises(UserWarning, match="TensorFloat32"):
            warnings.warn("TensorFloat32 tensor cores for float32 are another matter", stacklevel=1)


def test_the_first_lines_say_what_a_gpu_rounds_and_note(tmp_path, monkeypatch):
    """A GPU that is not found, to whoever asked for none in particular and has a PyTorch that is
    for one; GPT-2's vocabulary on a CPU, to whoever did not name it."""
    run = ready(tmp_path)
    run.held_lock.close()
    for run.args.device, cuda in itertools.product(("auto", "cpu"), ("13.0", None)):
        monkeypatch.setattr("torch.version.cuda", cuda)
        noted = "note     PyTorch, built for CUDA 13.0, finds no GPU" in describe_run(run, "", None)
        assert noted == (run.args.device == "auto" and cuda is not None)
    for size, run.args.tokenizer_name in ((50257, None), (50257, "gpt2"), (31, None)):
        run.model.config = replace(run.model.config, vocab_size=size)
        noted = "note     GPT-2's vocabulary makes" in describe_run(run, "", None)
        assert noted == (size == 50257 and run.args.tokenizer_name is None)
    run.process.device = CUDA
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    rounds = {(torch.float32, False): "float32", (torch.bfloat16, True): "bfloat16"}
    rounds[torch.float32, True] = "float32, matmuls in TF32"
    for (run.precision, run.args.tf32), words in rounds.items():
        line = f"device   1 x cuda (a card; PYTORCH_ALLOC_CONF=expandable_segments:True), {words}\n"
        assert line in describe_run(run, "", None)


# ---- A torch that is made for one process

ALONE = """
import sys

class WithoutDistributed:
    # Asked before torch imports torch.distributed: by then only what is in C is there.
    def find_spec(name, path, target=None):
        if name == "torch.distributed":
            for part in ("c10d", "rpc", "dist_autograd"):
                delattr(sys.modules["torch._C"], f"_{part}_init")
            sys.modules["torch._C._distributed_c10d"] = None

sys.meta_path.insert(0, WithoutDistributed)
import train_minimal

assert not hasattr(train_minimal.torch.distributed, "Store")
sys.path.insert(0, "tests")
from harness.runs import plan_nothing

plan_nothing()  # (torch's C++ is not another build's: it looks for DTensors among fake tensors)
sys.exit(train_minimal.main(sys.argv[1:]))
"""


def test_torch_without_distributed(path):
    """As AMD's for Windows is, and some of NVIDIA's for Jetsons."""
    words = [*TINY, "--num-steps=1", f"--checkpoint-path={path}"]
    result = run([sys.executable, "-c", ALONE, *words])
    assert (result.returncode, result.stderr) == (0, "") and snapshot(path)["step"] == 1
