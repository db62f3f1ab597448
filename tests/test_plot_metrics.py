"""Curves of a run, or of several: visible, averaged, and with ticks that can be read.

(That a trainer's own file is drawn: test_scripts.py.)
"""

import json
import math

import pytest
from harness.runs import ROOT

from scripts import plot_metrics


@pytest.fixture
def panels(plt):
    """Draws runs, those with a number as its name of so many log lines; returns their axes."""

    def draw(*lines: int, smooth: int | None = None, runs: dict | None = None, **more):
        runs = runs or {f"run {n}": [record(i, **more) for i in range(1, n + 1)] for n in lines}
        return plot_metrics.draw(plt, runs, smooth).axes

    yield draw
    plt.close("all")


def record(step: int, **more) -> dict:
    loss = 4 + (-1) ** step  # noise alone: 3, 5, 3, 5, ...
    values = {"train_loss": loss, "train_ppl": math.exp(loss), "lr": 1e-3, "tokens_per_s": 1e4}
    peak = {"peak_memory_bytes": 2**30 * step, "peak_memory_kind": "cuda"}
    return {"step": step, **values, **peak, **more}


def test_writes_where_git_does_not_look(plt, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    metrics = "run.metrics.jsonl"  # as a trainer leaves it
    (tmp_path / metrics).write_text("".join(json.dumps(record(n)) + "\n" for n in (1, 2, 3)))
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


def test_of_one_line_shows_a_point(panels):
    for axis in panels(1, 2)[:5]:
        point, line = axis.lines
        assert len(point.get_xdata()) == 1 and point.get_marker() == "."
        assert len(line.get_xdata()) == 2 and line.get_linestyle() == "-"


@pytest.mark.parametrize(("last", "shown"), [(3, {"1", "2", "3"}), (400_000, {"0", "200k"})])
def test_has_ticks_of_whole_steps(panels, last, shown):
    for axis in panels(runs={"run": [record(1), record(last)]})[:5]:
        low, high = axis.get_xlim()
        ticks = [tick for tick in axis.get_xticks() if low <= tick <= high]
        assert all(tick == round(tick) for tick in ticks) and len(ticks) <= 6
        assert {axis.xaxis.get_major_formatter()(tick, 0) for tick in ticks} >= shown


@pytest.mark.parametrize("times", [1.01, 2.5, 4, 1000])
def test_has_ticks_of_perplexity(panels, times):
    for lowest in (2.0, 39.3, 20000.0):
        axis = panels(2, train_ppl=lowest, val_ppl=lowest * times)[1]
        low, high = axis.get_ylim()
        ticks = [tick for tick in axis.get_yticks() if low <= tick <= high]
        assert 2 <= len(ticks) <= 12 and not len(axis.get_yticks(minor=True)), lowest
        assert all("e" not in axis.yaxis.get_major_formatter()(tick, 0) for tick in ticks)


def test_averages_what_is_noisy(panels):
    loss, perplexity, lr, *_ = panels(80)
    thin, thick = loss.lines
    assert thin.get_linewidth() < thick.get_linewidth()
    assert set(thin.get_ydata()) == {3, 5} and set(thick.get_ydata()) == {4}  # four at a time
    assert len(lr.lines) == 1  # never noisy
    assert perplexity.lines[1].get_ydata() == pytest.approx(math.exp(4))  # of the losses' average
    assert thick.get_xdata()[[0, -1]].tolist() == [2, 78]  # nothing where a window is cut off
    assert len(panels(29)[0].lines) == len(panels(80, smooth=1)[0].lines) == 1
    assert len(panels(4, smooth=100)[0].lines[1].get_ydata()) == 1  # all of a short run


def test_says_what_was_not_recorded_and_in_which_unit(panels):
    more = {"tokens_per_s": None, "peak_memory_bytes": 40 * 2**20, "peak_memory_kind": "rss"}
    *_, speed, memory, legend = panels(3, **more)
    assert [text.get_text() for text in speed.texts] == ["not recorded"] and not speed.lines
    assert memory.get_ylabel() == "MiB, rss" and set(memory.lines[0].get_ydata()) == {40}
    assert panels(3)[4].get_ylabel() == "GiB, cuda"
    assert words_of(legend) == ["run 3", "training"]


def words_of(legend) -> list[str]:
    return [text.get_text() for text in legend.get_legend().get_texts()]


def test_marks_where_a_run_was_resumed(panels):
    resumed = [record(3), record(6, resumed_from=4), record(9), record(12, resumed_from=11)]
    *axes, legend = panels(runs={"run": resumed})
    for axis in axes:
        line, *marks = axis.lines
        assert [mark.get_xdata() for mark in marks] == [[4, 4], [11, 11]]
        assert {mark.get_color() for mark in marks} == {line.get_color()}
    assert words_of(legend) == ["run", "training", "resumed"]
    assert not panels(3, lr=None, resumed_from=4)[2].lines  # nothing was recorded there
