"""The pictures show what the planner says. And they can be read, for any model: at the width of a
page, no words lie on others, on a line, on a colour or outside of the picture. The curves of runs,
too."""

import json
import math
import sys
from itertools import combinations
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from planner.timeline import KINDS
from scripts import memory_timeline, plot_metrics
from scripts.memory_page import along_flops
from scripts.style import COLORS

TINY = "--n-layers 2 --n-heads 2 --d-model 32 --seq-len 32 --batch-size 8 --vocab-size 997"
MODELS = {  # flags -> what the picture says of the step. (No flag for a policy has an effect.)
    f"{TINY} --device cpu --loss-chunks 2 --amp-dtype bfloat16 --use-activation-checkpoint=full": (
        "0.06M parameters, batch of 8 x 32 tokens, bfloat16 on a CPU, predicted"
    ),
    "--n-layers 1 --d-model 8 --n-heads 1 --seq-len 8 --device cuda": (  # a large head
        "0.01M parameters, batch of 12 x 8 tokens, bfloat16 on a GPU, predicted"
    ),
    "--n-layers 6 --d-model 256 --n-heads 4 --vocab-size 300 --seq-len 64 --no-amp": (
        "4.83M parameters, batch of 12 x 64 tokens, float32 on a CPU, predicted"
    ),
}
MIB = 2**20


@pytest.fixture(autouse=True)
def closed(plt):
    yield
    plt.close("all")


def recorded(words: str):
    return memory_timeline.record_all(memory_timeline.parse(words.split()))


def faults(plt, figure) -> list[str]:
    """What keeps a reader from reading it. Under the words the picture is white, or nearly so."""
    text, seen = plt.matplotlib.text.Text, []
    with patch.object(text, "draw", lambda self, *args: seen.append(self)):
        figure.canvas.draw()
    brightness = np.asarray(figure.canvas.buffer_rgba())[::-1, :, :3].mean(axis=2)
    words = [one for one in dict.fromkeys(seen) if one.get_visible() and one.get_text().strip()]
    boxes = {one: text.get_window_extent(one) for one in words}  # (without an annotation's line)
    found, whole = [], figure.bbox.padded(0.5)
    for one, box in boxes.items():
        if not (whole.contains(box.x0, box.y0) and whole.contains(box.x1, box.y1)):
            found.append(f"{one.get_text()!r} leaves the picture")
        x, y = (slice(int(low) + 1, int(high)) for low, high in (box.intervalx, box.intervaly))
        if brightness[y, x].min() < 220:
            found.append(f"{one.get_text()!r} lies on a line, a point or a colour")
    for one, other in combinations(boxes, 2):
        if boxes[one].padded(-0.5).overlaps(boxes[other].padded(-0.5)):
            found.append(f"{one.get_text()!r} lies on {other.get_text()!r}")
    return found


# ---- memory over a step


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "about"), MODELS.items())
def test_timeline_shows_what_the_planner_counts_and_can_be_read(plt, flags, about):
    """A panel a policy, whatever policy the flags ask for; each as wide as its FLOPs."""
    asked, records = recorded(flags)
    figure = memory_timeline.draw(plt, asked, records)
    assert [*records] == ["plain", "none", "cheap", "full"] and {*COLORS} == {*KINDS}
    for (name, record), axis in zip(records.items(), figure.axes, strict=True):
        step = record.step_memory
        at = np.interp(range(len(step.timeline)), *along_flops(record))
        tops = step.timeline[:, [KINDS.index(kind) for kind in COLORS]].cumsum(axis=1)
        for top, layer in zip(tops.T, axis.collections, strict=True):
            # All its edges are there, at the right place and height (in KiB: MiB are too coarse).
            drawn = {(round(x, 6), round(y * 1024)) for x, y in layer.get_paths()[0].vertices}
            assert {(round(x, 6), round(y / 1024)) for x, y in zip(at, top, strict=True)} <= drawn
        (marker,) = axis.lines
        assert marker.get_xydata().tolist() == [[at[step.bytes_by_op.argmax()], step.peak / MIB]]
        title = axis.get_title(loc="left")
        assert title.startswith(f"{name}: ") and f"Peak {step.peak / MIB:.1f} MiB" in title
        assert len(axis.get_xticks()) > 0
        for words, x in zip(axis.get_xticklabels(), axis.get_xticks(), strict=True):
            phase = step.phase_slice(words.get_text())
            assert x == pytest.approx((at[phase.start] + at[phase.stop]) / 2)
    assert figure.get_suptitle().split("\n")[1] == about
    assert faults(plt, figure) == []


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
    loss, speed = panels(plt, run(3, tokens_per_s=None, peak_memory_bytes=math.nan))
    assert not len(speed.lines[0].get_xdata()) and legend(loss) == ["run 0"]


def test_what_is_noisy_is_averaged(plt):
    thin, thick, _ = panels(plt, run(80))[0].lines
    assert thin.get_linewidth() < thick.get_linewidth() and thick.get_marker() == ""
    assert set(thin.get_ydata()) == {3, 5} and set(thick.get_ydata()) == {4}  # four at a time
    assert thick.get_xdata()[[0, -1]].tolist() == [2, 78]  # nothing where a window is cut off
    assert set(panels(plt, run(80), smooth=1)[0].lines[0].get_ydata()) == {3, 5}
    assert len(panels(plt, run(4), smooth=100)[0].lines[1].get_ydata()) == 1  # all of a short run


def test_marks_of_a_run(plt):
    """Where it took another policy."""
    policies = [None, "none", "none", "cheap:7", "full"]
    records = [line(10 * i, recompute=policy) for i, policy in enumerate(policies)]
    for axis in panels(plt, records):
        upright = [one for one in axis.lines if len({*one.get_xdata()}) == 1 < len(one.get_xdata())]
        assert [one.get_xdata()[0] for one in upright] == [30, 40]
    assert legend(panels(plt, records)[0])[1:] == ["cheap:7 by step 30", "full by step 40"]


@pytest.mark.parametrize("runs", [1, 22])
def test_curves_can_be_read(plt, runs):
    lines = [line(step, val_loss=3.2, tokens_per_s=123456.0) for step in range(1, 6001, 60)]
    lines[0]["train_loss"] = 10.8
    for i, one in enumerate(lines):
        one["recompute"] = f"selective:{20 + min(i, 3)},cheap+offload"
    figure = plot_metrics.draw(plt, {f"minigpt_run_{i}": lines for i in range(runs)}, None)
    assert faults(plt, figure) == []
