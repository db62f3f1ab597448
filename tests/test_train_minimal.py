"""The loop: what is asked for is what is done, printed and written.

Precision follows the hardware; the lines and the log say the same, and who reads a log hears of the
run; `auto` takes the least that fits its budget. How a run goes on: test_resume.py.
"""

import math
import re

import pytest
import torch
from harness.runs import metrics, parse, snapshot, train_here

import train_minimal
from memory.head import softmax_in_place
from trainer.device import choose_precision, cpu_has_bfloat16
from trainer.metrics import format_line
from trainer.report import sample_text

FP32, BF16, FULL = "--no-amp", "--amp-dtype=bfloat16", "--use-activation-checkpoint"


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
LAST = re.compile(r"train +loss (\S+), perplexity (\S+), on average over the last (\d+) steps")


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


def test_line_shows_the_share_of_the_card():
    record = dict(step=1, epoch=0, lr=1, train_loss=1, train_ppl=1, step_ms=1, tokens_per_s=1)
    record |= dict(eta_s=3700, peak_memory_bytes=2**30, peak_memory_kind="cuda")
    assert format_line(record, 20, card_bytes=2**32).endswith(
        "eta 1:01:40 | peak 1.0 GiB cuda (25.0% of the card)"
    )


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

    monkeypatch.setattr("trainer.metrics.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(train_minimal, "train_step", train_step)
    monkeypatch.setattr("sys.stderr.isatty", lambda: bar)
    words = ["--log-interval=50", *flags.split() * (not bar)]
    assert train_here(tmp_path / "run.pt", *words) == 0
    assert [record["step"] for record in metrics(tmp_path / "run.pt")] == logged


# ---- What is planned


def test_a_prediction_that_fails_does_not_cost_the_run(plans_memory, tmp_path, capsys, monkeypatch):
    def fail(*args):
        raise NotImplementedError("no such device")

    monkeypatch.setattr("trainer.plan.describe_plan", fail)
    assert train_here(tmp_path / "run.pt", "--num-steps=1") == 0
    assert "could not be predicted (NotImplementedError)" in capsys.readouterr().out


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
