"""The loop: what is asked for is what is done, printed and written.

Precision and rounding follow the hardware; the lines and the log say the same, and who reads a log
hears of the run; time is booked where it belongs; the step that is measured takes what was
predicted. How a run goes on: test_resume.py.
"""

import math
import re
import sys
from dataclasses import replace
from functools import partialmethod
from types import SimpleNamespace

import pytest
import torch
from harness.faults import raising, undisturbed
from harness.marks import rest_slow
from harness.runs import TINY, metrics, parse, ready, run, same, snapshot, train_here
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import _get_current_dispatch_mode

import train_minimal
from memory.head import target_log_prob_
from trainer.clocks import MEASURED_STEP, StepClock, measuring_peak
from trainer.device import choose_precision, set_matmul_precision
from trainer.metrics import format_line, peak_memory_fields
from trainer.process import OneProcess
from trainer.report import describe_run, sample_text

FP32, BF16, FULL = "--no-amp", "--amp-dtype=bfloat16", "--use-activation-checkpoint"
CUDA, CPU, MPS = torch.device("cuda", 1), torch.device("cpu"), torch.device("mps")
predicted = pytest.mark.usefixtures("plans_memory")


def test_clipping_sees_true_gradients(path):
    """float16 gradients are scaled by thousands; the norm that is clipped and logged is not."""
    assert train_here(path, "--amp-dtype=float16", "--num-steps=2") == 0
    plain = metrics(undisturbed(FP32, "--num-steps=2"))
    for scaled, exact in zip(metrics(path), plain, strict=True):
        assert scaled["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.02)


@pytest.mark.parametrize("has", [True, False])
def test_precision_follows_the_hardware(has, monkeypatch):
    monkeypatch.setattr("trainer.device.cpu_has_bfloat16", lambda: has)
    found = [choose_precision(parse(flags), CPU) for flags in ("", BF16, FP32)]
    assert found == [torch.bfloat16 if has else torch.float32, torch.bfloat16, torch.float32]


# ---- What is printed and written

LINE = re.compile(
    r"step +(\d+)/20 \| epoch (\S+) \| lr (\S+) \| loss (\S+) ppl (\S+) \| "
    r"(?:val (\S+) ppl (\S+) \| )?(\S+) ms/step \| (\S+) tok/s \| eta (\S+) \| "
    r"peak (\S+) [MG]iB rss"
)
LAST = re.compile(r"train +loss (\S+) ppl (\S+), mean of the last (\d+) steps")


def test_lines_and_metrics_say_the_same(path, capsys):
    assert train_here(path, "--eval-interval=10") == 0
    said, records = capsys.readouterr().out, metrics(path)
    lines = [m for m in map(LINE.fullmatch, said.splitlines()) if m]
    assert [r["step"] for r in records] == [*range(1, 21)] == [int(m[1]) for m in lines]
    for match, record in zip(lines, records, strict=True):
        assert float(match[4]) == pytest.approx(record["train_loss"], abs=1e-4)
        assert record["train_ppl"] == pytest.approx(math.exp(record["train_loss"]))
        assert record["tokens_per_s"] == pytest.approx(2 * 16 * 1000 / record["step_ms"])
        assert record["eta_s"] == pytest.approx((20 - record["step"]) * record["step_ms"] / 1000)
        assert record["epoch"] == pytest.approx(record["step"] * 2 / 12)
        assert ("val_loss" in record) == (match[6] is not None) == (record["step"] % 10 == 0)
        assert record["peak_memory_kind"] == "rss" and record["peak_memory_bytes"] > 50e6
    # One loss says little: the last line has their mean.
    loss, perplexity, steps = LAST.search(said).groups()
    mean = sum(record["train_loss"] for record in records) / 20
    assert float(loss) == pytest.approx(mean, abs=1e-4) and steps == "20"
    assert float(perplexity) == pytest.approx(math.exp(mean), abs=1e-2)


@pytest.mark.parametrize(
    ("seconds", "flags", "logged"),
    [
        (1, "", [20]),
        (9, "", [4, 8, 12, 16, 20]),  # 36 s
        (9, "--log-interval=5", [4, 5, 9, 10, 14, 15, 19, 20]),
        (200, "--log-interval=10", list(range(1, 21))),
        (200, "--log-interval=0", [20]),  # who asks for silence has it
        (200, "a bar is enough", [20]),
    ],
)
def test_a_line_comes_once_half_a_minute_is_over(seconds, flags, logged, tmp_path, monkeypatch):
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


LARGER = ("--n-layers=3", "--d-model=32", "--num-steps=3", "--max-tokens=900")
RUNS = ["", f"{FULL} --grad-accum-steps=2", f"{FULL} cheap --no-amp --loss-chunks=1"]
RUNS += [f"{FULL} selective --optimizer=muon", f"{FULL} full+offload"]
SIZE = r"([\d.]+ \w+)"
MEASURED = rf"^measured peak {SIZE} of tensors; predicted {SIZE}(?:, without recompute {SIZE})?$"
PLAN = rf"^memory .*?peak {SIZE}, .*?(?:recompute: peak {SIZE}|$)"


@predicted
@pytest.mark.parametrize("flags", rest_slow(RUNS, RUNS[1:3].__contains__))
def test_a_step_takes_what_was_predicted_and_measuring_changes_no_bit(
    flags, tmp_path, monkeypatch, capsys
):
    """One step is looked at, no other."""
    measured_run, plain_run, looking = tmp_path / "measured.pt", tmp_path / "not.pt", []
    flags = (*LARGER, "--seq-len=64", "--num-steps=6", "--dropout=0.1", *flags.split())

    def count(losses: torch.Tensor) -> torch.Tensor:
        looking.append(_get_current_dispatch_mode() is not None)
        return losses

    monkeypatch.setattr(train_minimal, "nan_grads_if_infinite", count)
    assert train_here(measured_run, *flags) == 0
    n = len(looking) // 6  # micro-batches
    assert looking == [i // n + 1 == MEASURED_STEP for i in range(6 * n)]
    out = capsys.readouterr().out
    ((measured, expected, plain),) = re.findall(MEASURED, out, re.M)
    assert measured == expected
    planned = re.search(PLAN, out, re.M)
    assert planned and planned[1] == expected and (planned[2] or "") == plain
    monkeypatch.setattr("trainer.build.make_clock", lambda *_: StepClock())
    assert train_here(plain_run, *flags) == 0
    for part in ("model", "optimizer"):
        assert same(snapshot(measured_run)[part], snapshot(plain_run)[part])


def test_a_measured_peak_has_the_gradients_that_stay(capsys):
    """Those of DDP, in its buckets. The peak of two attempts, of which the second has another
    prediction, is not printed."""
    model = torch.nn.Linear(512, 512, bias=False)  # 1 MiB, as its gradient and the tensor below
    model.weight.grad = torch.zeros(512, 512)
    for second in (3 * 2**20, 2**20):
        with measuring_peak(
            clock := StepClock(predicted=(3 * 2**20, 0)),
            OneProcess(torch.device("cpu")),
            model,
            torch.optim.SGD(model.parameters()),
        ):
            torch.ones(512, 512)
            clock.predicted = second, 0
    assert re.findall(MEASURED, capsys.readouterr().out, re.M) == [("3.0 MiB", "3.0 MiB", "0 B")]


# ---- What is compiled


def test_the_sample_compiles_nothing(path, monkeypatch):
    """Each of its lengths would be compiled anew; training compiles."""

    def sample(run):
        before = counters["stats"]["unique_graphs"]
        text = sample_text(run)
        assert counters["stats"]["unique_graphs"] == before > 0
        return text

    torch._dynamo.reset()
    counters.clear()
    for place, replacement in {
        "torch.nn.Module.compile": partialmethod(torch.nn.Module.compile, backend="eager"),
        "memory.head.compile_target_log_prob": lambda: target_log_prob_,  # without g++
        "trainer.build.check_compiler": lambda device: None,
        "trainer.build.sample_text": sample,
    }.items():
        monkeypatch.setattr(place, replacement)
    assert train_here(path, "--compile", "--no-amp", "--num-steps=2", "--sample-tokens=5") == 0
    assert not any("_orig_mod" in name for name in snapshot(path)["model"])
    torch._dynamo.reset()


def test_a_compiler_that_fails_is_told_before_anything_is_written(path, monkeypatch, capsys):
    error = RuntimeError("CppCompileError: C++ compile error\n\nCommand:\ng++ /sp ace/x.cpp")
    monkeypatch.setattr(torch, "compile", lambda function: raising(error))
    assert train_here(path, "--compile", "--no-amp") == 2 and not [*path.parent.iterdir()]
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    assert re.search("^error: --compile: .* C[+][+] compile error; .* --no-compile$", said.err)


# ---- What a device says


def test_a_gpu_tells_what_its_allocator_took(monkeypatch):
    """Tensors in the record, and as a share of the card in the line."""
    card = SimpleNamespace(total_memory=2**32)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: card)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 2**30)
    found = peak_memory_fields(CUDA)
    record = dict(step=1, epoch=0, lr=1, train_loss=1, step_ms=1, tokens_per_s=1, eta_s=3700)
    assert format_line(record | found, 20).endswith(
        "eta 1:01:40 | peak 1.0 GiB cuda (25.0% of the card)"
    )


# ---- Time


def test_a_clock_counts_the_seconds_of_training(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr("trainer.clocks.time.perf_counter", lambda: now.s)
    clock = StepClock()
    now.s = 100  # setting up does not count
    with clock:
        with clock.step():
            for phase, seconds in [("data", 1), ("forward", 2), ("backward", 4)]:
                clock.begin_phase(phase)
                now.s += seconds
        with clock.paused("save"):  # does not count
            now.s += 50
        now.s += 1
        assert clock.pop_mean_step_seconds() == 8 == clock.training_seconds()


# ---- How matmuls round, and how fast they can be then


def test_tf32_is_a_setting_of_a_gpu_that_the_trainer_asks_for(path, monkeypatch):
    before, asked = torch.get_float32_matmul_precision(), []
    for tf32 in (False, True, False):  # TORCH_ALLOW_TF32_CUBLAS_OVERRIDE may have set it
        set_matmul_precision(CUDA, tf32)
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    torch.set_float32_matmul_precision(before)
    monkeypatch.setattr("trainer.build.set_matmul_precision", lambda *how: asked.append(how))
    assert train_here(path, "--no-amp", "--num-steps=1", "--tf32") == 0 and asked == [(CPU, True)]


@pytest.mark.parametrize(
    ("flags", "n_ids", "says"),
    [
        ("--device=auto", 31, "note     PyTorch, built for CUDA 13.0, finds no GPU"),
        ("--device=cpu", 50257, "note     GPT-2's vocabulary makes"),
        ("--device=cpu --tokenizer-name=gpt2", 50257, ""),  # who asks for it knows
    ],
)
def test_the_first_lines_note_what_was_not_asked_for(flags, n_ids, says, tmp_path, monkeypatch):
    run = ready(tmp_path)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    run.settings = parse(*TINY, flags)
    run.model.config = replace(run.model.config, vocab_size=n_ids)
    said = describe_run(run, "", None)
    assert says in said and said.count("note     ") == bool(says)


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
    result = run([sys.executable, "-c", ALONE, *TINY, "--num-steps=1", f"--checkpoint-path={path}"])
    assert (result.returncode, result.stderr) == (0, "") and snapshot(path)["step"] == 1
