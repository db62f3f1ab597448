"""Curves of a run, or of several: visible, averaged, and with ticks that can be read.

(That a trainer's own file is drawn: test_scripts.py.)
"""

import json
import math

import pytest
from harness.runs import ROOT

from scripts import plot_metrics


@pytest.fixture
def figure(plt):
    """Draws runs of so many log lines; closed afterwards."""

    def draw(*lines: int, smooth: int | None = None, **more):
        runs = {f"run {n}": [record(step, **more) for step in range(1, n + 1)] for n in lines}
        return plot_metrics.draw(plt, runs, smooth)

    yield draw
    plt.close("all")


def record(step: int, **more) -> dict:
    loss = 4 + (-1) ** step  # noise alone: 3, 5, 3, 5, ...
    values = {"train_loss": loss, "train_ppl": math.exp(loss), "lr": 1e-3, "tokens_per_s": 1e4}
    peak = {"peak_memory_bytes": 2**30 * step, "peak_memory_kind": "cuda"}
    return {"step": step, **values, **peak, **more}


@pytest.fixture
def metrics(tmp_path) -> str:
    """The file of a run, as a trainer leaves it."""
    file = tmp_path / "run.metrics.jsonl"
    file.write_text("".join(json.dumps(record(step)) + "\n" for step in (1, 2, 3)))
    return str(file)


def test_writes_where_git_does_not_look(plt, metrics, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert plot_metrics.main([metrics]) == 0
    assert plot_metrics.main([metrics, "--format", "svg"]) == 0
    assert plot_metrics.main([metrics, "--format", "pdf", "--output", "curves"]) == 0
    made = {"out/metrics.png": b"\x89PNG", "out/metrics.svg": b"<?xml", "curves.pdf": b"%PDF"}
    assert capsys.readouterr().out.splitlines() == [f"wrote {name}" for name in made]
    assert all((tmp_path / name).read_bytes().startswith(made[name]) for name in made)
    assert "out/" in (ROOT / ".gitignore").read_text().splitlines()
    assert plot_metrics.main([metrics, "--format", "svg", "--output", "curves.png"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: --format svg and --output curves.png contradict each other"


def test_of_one_line_shows_a_point(figure):
    for axis in figure(1, 2).axes[:5]:
        point, line = axis.lines
        assert len(point.get_xdata()) == 1 and point.get_marker() == "."
        assert len(line.get_xdata()) == 2 and line.get_linestyle() == "-"


@pytest.mark.parametrize(("last", "shown"), [(3, {"1", "2", "3"}), (400_000, {"0", "200k"})])
def test_has_ticks_of_whole_steps(plt, last, shown):
    runs = {"run": [record(1), record(last)]}
    for axis in plot_metrics.draw(plt, runs, None).axes[:5]:
        low, high = axis.get_xlim()
        ticks = [tick for tick in axis.get_xticks() if low <= tick <= high]
        assert all(tick == round(tick) for tick in ticks) and len(ticks) <= 6
        assert {axis.xaxis.get_major_formatter()(tick, 0) for tick in ticks} >= shown
    plt.close("all")


@pytest.mark.parametrize("low", [2.0, 39.3, 20000.0])
@pytest.mark.parametrize("times", [1.01, 2.5, 4, 1000])
def test_has_ticks_of_perplexity(figure, low, times):
    drawn = figure(2, train_ppl=low, val_ppl=low * times)
    axis = drawn.axes[1]
    low, high = axis.get_ylim()
    ticks = [tick for tick in axis.get_yticks() if low <= tick <= high]
    assert 2 <= len(ticks) <= 12 and not len(axis.get_yticks(minor=True))
    assert all("e" not in axis.yaxis.get_major_formatter()(tick, 0) for tick in ticks)


def test_averages_what_is_noisy(figure):
    loss, perplexity, lr, *_ = figure(80).axes
    thin, thick = loss.lines
    assert thin.get_linewidth() < thick.get_linewidth()
    assert set(thin.get_ydata()) == {3, 5} and set(thick.get_ydata()) == {4}  # four at a time
    assert len(lr.lines) == 1  # never noisy
    assert perplexity.lines[1].get_ydata() == pytest.approx(math.exp(4))  # of the losses' average
    assert thick.get_xdata()[[0, -1]].tolist() == [2, 78]  # nothing where a window is cut off
    assert len(figure(29).axes[0].lines) == len(figure(80, smooth=1).axes[0].lines) == 1
    assert len(figure(4, smooth=100).axes[0].lines[1].get_ydata()) == 1  # all of a short run


def test_says_what_was_not_recorded_and_in_which_unit(figure):
    drawn = figure(3, tokens_per_s=None, peak_memory_bytes=40 * 2**20, peak_memory_kind="rss")
    *_, speed, memory, legend = drawn.axes
    assert [text.get_text() for text in speed.texts] == ["not recorded"] and not speed.lines
    assert memory.get_ylabel() == "MiB, rss" and set(memory.lines[0].get_ydata()) == {40}
    assert figure(3).axes[4].get_ylabel() == "GiB, cuda"
    words = [text.get_text() for text in legend.get_legend().get_texts()]
    assert words == ["run 3", "training"]


def test_marks_where_a_run_was_resumed(plt):
    runs = {"run": [record(3), record(6, resumed_from=4), record(9), record(12, resumed_from=11)]}
    *axes, legend = plot_metrics.draw(plt, runs, None).axes
    for axis in axes:
        line, *marks = axis.lines
        assert [mark.get_xdata() for mark in marks] == [[4, 4], [11, 11]]
        assert {mark.get_color() for mark in marks} == {line.get_color()}
    words = [text.get_text() for text in legend.get_legend().get_texts()]
    assert words == ["run", "training", "resumed"]
    runs = {"run": [record(3, lr=None), record(6, lr=None, resumed_from=4)]}
    assert not plot_metrics.draw(plt, runs, None).axes[2].lines  # nothing was recorded there
    plt.close("all")


def test_can_be_stopped(plt, metrics, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(plot_metrics, "draw", interrupted)
    assert plot_metrics.main([metrics]) == 130
    assert capsys.readouterr().err.strip() == "stopped"
