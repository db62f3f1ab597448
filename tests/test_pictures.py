"""The pictures show what the planner says, and the curves of runs what their logs say."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from planner.timeline import KINDS
from scripts import memory_timeline, plot_metrics
from scripts.memory_page import op_positions_by_flops
from scripts.style import COLORS

TINY = "--n-layers 2 --n-heads 2 --d-model 32 --seq-len 32 --batch-size 8 --vocab-size 997"
MODEL = f"{TINY} --device cpu --loss-chunks 2 --amp-dtype bfloat16 --use-activation-checkpoint=full"
MIB = 2**20


@pytest.fixture(autouse=True)
def closed(plt):
    yield
    plt.close("all")


def recorded(words: str):
    return memory_timeline.record_all(memory_timeline.parse(words.split()))


# ---- memory over a step


@pytest.mark.slow
def test_timeline_shows_what_the_planner_counts(plt):
    """A panel a policy, whatever policy the flags ask for; each as wide as its FLOPs."""
    asked, records = recorded(MODEL)
    figure = memory_timeline.draw(plt, asked, records)
    assert [*records] == ["plain", "none", "cheap", "full"] and {*COLORS} == {*KINDS}
    for (name, record), axis in zip(records.items(), figure.axes, strict=True):
        step = record.step_memory
        at = np.interp(range(len(step.timeline)), *op_positions_by_flops(record))
        tops = step.timeline[:, [KINDS.index(kind) for kind in COLORS]].cumsum(axis=1)
        for top, layer in zip(tops.T, axis.collections, strict=True):
            # All its edges are there, at the right place and height (in KiB: MiB are too coarse).
            drawn = {(round(x, 6), round(y * 1024)) for x, y in layer.get_paths()[0].vertices}
            assert {(round(x, 6), round(y / 1024)) for x, y in zip(at, top, strict=True)} <= drawn
        (marker,) = axis.lines
        assert marker.get_xydata().tolist() == [
            [at[step.bytes_after_each_op.argmax()], step.peak / MIB]
        ]
        title = axis.get_title(loc="left")
        assert title.startswith(f"{name}: ") and f"Peak {step.peak / MIB:.1f} MiB" in title
        for words, x in zip(axis.get_xticklabels(), axis.get_xticks(), strict=True):
            phase = step.phase_slice(words.get_text())
            assert x == pytest.approx((at[phase.start] + at[phase.stop]) / 2)
    about = "0.06M parameters, batch of 8 x 32 tokens, bfloat16 on a CPU, predicted"
    assert figure.get_suptitle().split("\n")[1] == about


def test_commands_write_where_git_does_not_look(plt, tmp_path, monkeypatch, capsys):
    """By default; the same numbers make the same file; a PNG of plans carries its peaks."""
    monkeypatch.chdir(tmp_path)
    metrics = Path("run.metrics.jsonl")  # as a trainer leaves it
    metrics.write_text("".join(json.dumps(one) + "\n" for one in run(3)))
    planned = f"{TINY} --policies mlp:1 full/2"
    commands = {plot_metrics: str(metrics), memory_timeline: planned}
    for command, words in commands.items():
        assert command.main(words.split()) == 0
        picture = Path(capsys.readouterr().out.removeprefix("wrote ").strip())
        written = picture.read_bytes()
        assert picture.parent == Path("out") and command.main(words.split()) == 0
        assert capsys.readouterr().out == f"wrote {picture}\n"
        assert picture.read_bytes() == written
    for name, record in recorded(planned)[1].items():
        assert f"{name}: {record.step_memory.peak:,} bytes".encode() in written


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--out one.xyz", "error: --out one.xyz: Format 'xyz' is not supported"),
        ("--policies mlp:9", "error: --policies: recompute must be POLICY"),
        ("", "error: memory_timeline needs matplotlib: pip install matplotlib"),
    ],
)
def test_what_ends_it_is_one_line_and_leaves_nothing(monkeypatch, capsys, tmp_path, flags, said):
    monkeypatch.chdir(tmp_path)
    if not flags:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert memory_timeline.main([*TINY.split(), *flags.split()]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line and not list(tmp_path.rglob("*.*"))


# ---- curves of runs (that a trainer's own file is drawn: test_scripts.py)


def line(step: int, **more) -> dict:
    loss = 4 + (-1) ** step  # noise alone: 3, 5, 3, 5, ...
    peak = {"peak_memory_bytes": MIB * step, "peak_memory_kind": "cuda"}
    return {"step": step, "train_loss": loss, "tokens_per_s": 1e4, **peak, **more}


def run(n: int, **more) -> list[dict]:
    return [line(step, **more) for step in range(1, n + 1)]


def panels(plt, *runs: list[dict], smooth: int | None = None) -> list:
    """Their axes: loss, speed."""
    return plot_metrics.draw(plt, {f"run {i}": run for i, run in enumerate(runs)}, smooth).axes


def legend(axis) -> list[str]:
    return [words.get_text() for words in axis.figure.legends[0].get_texts()]


def test_loss_and_speed_of_each_run(plt):
    loss, speed = panels(plt, run(1), [line(3), line(6, val_loss=3.5), line(9, val_loss=3.2)])
    point, _, curve, validation = loss.lines
    assert len(point.get_xdata()) == 1 and point.get_marker() == curve.get_marker() == "."
    assert validation.get_marker() == "o" and "circles: validation" in loss.get_title(loc="left")
    assert curve.get_xydata().tolist() == [[3, 3], [6, 5], [9, 3]]
    assert validation.get_xydata().tolist() == [[6, 3.5], [9, 3.2]]
    assert validation.get_color() == curve.get_color() != point.get_color()
    assert [set(one.get_ydata()) for one in speed.lines[::2]] == [{1e4}, {1e4}]
    assert legend(loss) == ["run 0: peak 1.0 MiB (cuda)", "run 1: peak 9.0 MiB (cuda)"]
    loss, _ = panels(plt, run(3, peak_memory_bytes=math.nan))
    assert legend(loss) == ["run 0"]


def test_what_is_noisy_is_averaged(plt):
    thin, thick, _ = panels(plt, run(80))[0].lines
    assert set(thin.get_ydata()) == {3, 5} and set(thick.get_ydata()) == {4}  # four at a time
    assert thick.get_xdata()[[0, -1]].tolist() == [2, 78]  # nothing where a window is cut off
    assert set(panels(plt, run(80), smooth=1)[0].lines[0].get_ydata()) == {3, 5}


def test_marks_of_a_run(plt):
    """Where it took another policy."""
    policies = [None, "none", "none", "cheap:7", "full"]
    records = [line(10 * i, recompute=policy) for i, policy in enumerate(policies)]
    for axis in panels(plt, records):
        upright = [one for one in axis.lines if len({*one.get_xdata()}) == 1 < len(one.get_xdata())]
        assert [one.get_xdata()[0] for one in upright] == [30, 40]
    assert legend(panels(plt, records)[0])[1:] == ["cheap:7 by step 30", "full by step 40"]
