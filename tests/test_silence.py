"""Who reads a log hears of the run: when steps are slow, of the compiler, of the last loss."""

import math
import re

import pytest
from harness.runs import metrics, train_here

import train_minimal


def slow_steps(monkeypatch, seconds: float) -> None:
    """Each step takes as long, by a clock that stands still in between."""
    now, real = [1000.0], train_minimal.train_step

    def train_step(run):
        now[0] += seconds
        return real(run)

    monkeypatch.setattr("trainer.metrics.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(train_minimal, "train_step", train_step)


# (The first step's line is not a record.)
@pytest.mark.parametrize(
    ("seconds", "flags", "logged"),
    [
        (1, "", [20]),
        (9, "", [4, 7, 10, 13, 16, 19, 20]),  # a fourth step would make it 36 s
        (9, "--log-interval=5", [4, 5, 8, 10, 13, 15, 18, 20]),
        (200, "--log-interval=10", list(range(2, 21))),
        (200, "--log-interval=0", [20]),  # who asks for silence has it
    ],
)
def test_a_line_comes_at_least_every_half_minute(seconds, flags, logged, tmp_path, monkeypatch):
    slow_steps(monkeypatch, seconds)
    assert train_here(tmp_path / "run.pt", "--log-interval=50", *flags.split()) == 0
    assert [record["step"] for record in metrics(tmp_path / "run.pt")] == logged


def test_a_bar_is_enough(tmp_path, monkeypatch):
    slow_steps(monkeypatch, 200)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert train_here(tmp_path / "run.pt", "--log-interval=50") == 0
    assert [record["step"] for record in metrics(tmp_path / "run.pt")] == [20]


def test_the_last_loss_is_an_average(tmp_path, capsys):
    path = tmp_path / "run.pt"
    assert train_here(path, "--grad-accum-steps=2") == 0
    losses = [record["train_loss"] for record in metrics(path)]
    line = r"train +loss (\S+), perplexity (\S+), on average over the last (\d+) steps"
    (found,) = re.findall(line, capsys.readouterr().out)
    mean = sum(losses) / len(losses)
    assert float(found[0]) == pytest.approx(mean, abs=1e-4) and found[2] == "20"
    assert float(found[1]) == pytest.approx(math.exp(mean), abs=1e-2)
    assert abs(mean - losses[-1]) > 1e-2


@pytest.mark.parametrize("flags", ["--compile", ""])
def test_what_the_silence_is_about(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("model.MiniGPT.compile_blocks", lambda model: None)
    assert train_here(tmp_path / "run.pt", "--num-steps=1", *flags.split()) == 0
    before, _ = capsys.readouterr().out.split("step 1/1")
    assert ("\ncompile  the first step waits for the compiler" in before) == bool(flags)
