"""The pictures show what the planner says. And they can be read, for any model: at the width of a
page, no words lie on others, on a line, on a colour or outside of the picture. The curves of runs,
too."""

import json
import math
import sys
from itertools import combinations
from unittest.mock import Mock, patch

import numpy as np
import pytest
from harness.runs import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memory import RECOMPUTE_POLICIES
from planner.timeline import KINDS
from scripts import memory_timeline, plot_metrics
from scripts.memory_page import along_flops
from scripts.style import COLORS, FORMATS, Unit, relative_flops, save_picture
from studies import block_picture

SHAPE = "--n-layers 2 --n-heads 2 --d-model 32 --seq-len 32 --batch-size 8".split()
TINY = [*SHAPE, *"--vocab-size 997 --loss-chunks 2 --device cpu --amp-dtype bfloat16".split()]
MIB = 2**20


@pytest.fixture(autouse=True)
def closed(plt):
    yield
    plt.close("all")


def recorded(words: list[str]):
    return memory_timeline.record_all(memory_timeline.parse(words))


# ---- memory over a step


def test_timeline_stacks_what_the_planner_counts(plt):
    """A panel a policy, whatever policy the flags ask for; each as wide as its FLOPs."""
    asked, records = recorded([*TINY, "--use-activation-checkpoint=full"])
    figure = memory_timeline.draw(plt, asked, records)
    assert [*records] == ["plain", "none", "cheap", "full"] and len(figure.axes) == 5
    outline = records["plain"].step.total[:-1] / MIB
    for (name, record), axis in zip(records.items(), figure.axes, strict=False):
        step, tops = record.step, np.zeros(len(record.step.timeline))
        at = np.interp(range(len(tops)), *along_flops(record))
        for (kind, color), layer in zip(COLORS.items(), axis.collections, strict=False):
            tops += step.timeline[:, KINDS.index(kind)]
            rgba = np.array([plt.matplotlib.colors.to_rgba(color)])
            assert layer.get_facecolor() == pytest.approx(rgba)
            # All its edges are there, at the right place and height (in KiB: MiB are too coarse).
            drawn = {(round(x, 6), round(y * 1024)) for x, y in layer.get_paths()[0].vertices}
            wanted = zip(at, tops / 1024, strict=True)
            assert {(round(x, 6), round(y)) for x, y in wanted} <= drawn
        assert (tops == step.total).all() and {*COLORS} == {*KINDS}
        first, marker = axis.lines
        assert (first.get_ydata() == outline).all()
        assert marker.get_xydata().tolist() == [[at[step.total.argmax()], step.peak / MIB]]
        title = axis.get_title(loc="left")
        assert title.startswith(f"{name}: ") and f"Peak {step.peak / MIB:.1f} MiB" in title
        assert axis.get_xlim() == (0, at[-1]) or name != "full"
        for tick, phase in zip(axis.get_xticks(), axis.get_xticklabels(), strict=True):
            part = at[step.phase(phase.get_text())]
            assert part[0] < tick < part[-1]
        assert {phase.get_text() for phase in axis.get_xticklabels()} >= {"head", "backward"}
    assert title.endswith(f", {relative_flops(step.config, 32) - 1:+.0%} FLOPs")
    about = "0.06M parameters, batch of 8 x 32 tokens, bfloat16 on a CPU, predicted"
    assert figure.get_suptitle().split("\n")[1] == about


def test_teeth_fill_their_panel(plt):
    """However little they are of the memory in use, and each block has one."""
    asked, records = recorded([*TINY, "--seq-len=8", "--policies", "none", "full"])
    _, full, teeth = memory_timeline.draw(plt, asked, records).axes
    step = records["full"].step
    at, total = np.interp(range(len(step.total)), *along_flops(records["full"])), step.total / MIB
    (left, right), (low, high) = teeth.get_xlim(), teeth.get_ylim()
    shown = total[(left <= at) & (at < right)]
    assert low < shown.min() and shown.max() < high
    assert shown.max() - shown.min() > 0.6 * (high - low)
    begins = [at[operator] for operator, phase, _ in step.places if phase == "backward"]
    assert len(begins) >= 2 and all(left <= x < right for x in begins)
    (frame,) = (patch for patch in full.patches if not patch.get_fill())
    assert (frame.get_x(), frame.get_x() + frame.get_width()) == pytest.approx((left, right))


def test_units_that_a_reader_can_tell_apart():
    shown = {900: "0.9 KiB", 40 * MIB: "40.0 MiB", 2**30: "1.00 GiB", 13 * 10**10: "121.07 GiB"}
    assert {count: Unit.of(count).text(count) for count in shown} == shown


def test_the_command_draws_any_policies(tmp_path, capsys, monkeypatch):
    """By default where git does not look; a PNG carries its peaks."""
    monkeypatch.chdir(tmp_path)
    policies = ["--policies", "mlp:1", "full/2"]
    _, records = recorded([*TINY, *policies])
    assert memory_timeline.main([*TINY, *policies]) == 0
    assert capsys.readouterr().out == "wrote out/memory_timeline.png\n"
    picture = (tmp_path / "out/memory_timeline.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(records) == 2
    for name, record in records.items():
        assert f"{name}: {record.step.peak:,} bytes".encode() in picture
    assert "out/" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_same_numbers_make_the_same_file(plt, tmp_path):
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    for ending in FORMATS:
        files = tmp_path / f"one.{ending}", tmp_path / f"two.{ending}"
        for file in files:
            figure, axis = plt.subplots()
            axis.plot([1, 2])
            save_picture(figure, file)
        one, two = (file.read_bytes() for file in files)
        assert one == two and one.startswith(starts[ending])


def test_what_ends_it_is_one_line_and_leaves_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def ends(flags: list[str], code: int, said: str) -> None:
        assert memory_timeline.main([*TINY, *flags]) == code
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert said in line and not list(tmp_path.rglob("*.*"))

    ends(["--out", "one.xyz"], 2, "error: --out one.xyz: Format 'xyz' is not supported")
    ends(["--policies", "mlp:9"], 2, "error: --policies: recompute must be POLICY")
    with monkeypatch.context() as while_stopped:
        while_stopped.setattr(memory_timeline, "ask", Mock(side_effect=KeyboardInterrupt))
        ends([], 130, "stopped")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ends([], 2, "error: memory_timeline needs matplotlib: pip install matplotlib")


# ---- curves of runs (that a trainer's own file is drawn: test_scripts.py)


def line(step: int, **more) -> dict:
    loss = 4 + (-1) ** step  # noise alone: 3, 5, 3, 5, ...
    values = {"train_loss": loss, "train_ppl": math.exp(loss), "lr": 1e-3, "tokens_per_s": 1e4}
    peak = {"peak_memory_bytes": 2**30 * step, "peak_memory_kind": "cuda"}
    return {"step": step, **values, **peak, **more}


def run(n: int, **more) -> list[dict]:
    return [line(step, **more) for step in range(1, n + 1)]


def panels(plt, *runs: list[dict], smooth: int | None = None) -> list:
    """Their axes: loss, perplexity, learning rate, speed, memory, and the legend's."""
    return plot_metrics.draw(plt, {f"run {i}": run for i, run in enumerate(runs)}, smooth).axes


def ticks_of(axis) -> list[float]:
    low, high = axis.get_view_interval()
    return [tick for tick in axis.get_majorticklocs() if low <= tick <= high]


def names_in(legend) -> list[str]:
    return [text.get_text() for text in legend.get_legend().get_texts()]


def test_curves_are_written_where_git_does_not_look(plt, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    metrics = "run.metrics.jsonl"  # as a trainer leaves it
    (tmp_path / metrics).write_text("".join(json.dumps(one) + "\n" for one in run(3)))
    made = {"out/metrics.png": [], "out/metrics.svg": ["--format", "svg"]}
    made["curves.pdf"] = ["--format", "pdf", "--out", "curves"]
    for name, flags in made.items():
        assert plot_metrics.main([metrics, *flags]) == 0
        assert capsys.readouterr().out == f"wrote {name}\n" and (tmp_path / name).exists()
    assert "out/" in (ROOT / ".gitignore").read_text().splitlines()


def test_one_line_is_a_point(plt):
    for axis in panels(plt, run(1), run(2))[:5]:
        point, two = axis.lines
        assert len(point.get_xdata()) == 1 and point.get_marker() == "."
        assert len(two.get_xdata()) == 2 and two.get_linestyle() == "-"


@pytest.mark.parametrize(("last", "shown"), [(3, {"1", "2", "3"}), (400_000, {"0", "200k"})])
def test_ticks_of_whole_steps(plt, last, shown):
    for axis in panels(plt, [line(1), line(last)])[:5]:
        ticks = ticks_of(axis.xaxis)
        assert all(tick == round(tick) for tick in ticks) and len(ticks) <= 6
        assert {axis.xaxis.get_major_formatter()(tick, 0) for tick in ticks} >= shown


@settings(deadline=None, derandomize=True, max_examples=12)
@given(st.floats(2, 20_000), st.floats(1.01, 1000))
@example(6.0, 2.0)
def test_ticks_of_perplexity(plt, lowest, times):
    axis = panels(plt, run(2, train_ppl=lowest, val_ppl=lowest * times))[1].yaxis
    ticks = ticks_of(axis)
    assert 2 <= len(ticks) <= 12 and not len(axis.get_minorticklocs())
    assert all("e" not in axis.get_major_formatter()(tick, 0) for tick in ticks)
    plt.close("all")


def test_what_is_noisy_is_averaged(plt):
    loss, perplexity, lr, *_ = panels(plt, run(80))
    thin, thick = loss.lines
    assert thin.get_linewidth() < thick.get_linewidth()
    assert set(thin.get_ydata()) == {3, 5} and set(thick.get_ydata()) == {4}  # four at a time
    assert len(lr.lines) == 1  # never noisy
    assert perplexity.lines[1].get_ydata() == pytest.approx(math.exp(4))  # of the losses' average
    assert thick.get_xdata()[[0, -1]].tolist() == [2, 78]  # nothing where a window is cut off
    for few in (panels(plt, run(29)), panels(plt, run(80), smooth=1)):
        assert len(few[0].lines) == 1
    assert len(panels(plt, run(4), smooth=100)[0].lines[1].get_ydata()) == 1  # all of a short run


def test_what_was_not_recorded_and_where_a_run_was_resumed(plt):
    more = {"tokens_per_s": None, "peak_memory_bytes": 40 * MIB, "peak_memory_kind": "rss"}
    *_, speed, memory, legend = panels(plt, run(3, **more))
    assert [text.get_text() for text in speed.texts] == ["not recorded"] and not speed.lines
    assert memory.get_ylabel() == "MiB, rss" and set(memory.lines[0].get_ydata()) == {40}
    assert names_in(legend) == ["run 0", "training"]

    resumed = [line(3), line(6, resumed_from=4), line(9), line(12, resumed_from=11)]
    *axes, memory, legend = panels(plt, resumed)
    for axis in (*axes, memory):
        curve, *marks = axis.lines
        assert [mark.get_xdata() for mark in marks] == [[4, 4], [11, 11]]
        assert {mark.get_color() for mark in marks} == {curve.get_color()}
    assert memory.get_ylabel() == "GiB, cuda"
    assert names_in(legend) == ["run 0", "training", "resumed"]
    assert not panels(plt, run(3, lr=None, resumed_from=4))[2].lines  # nothing was recorded there


def test_changes_of_policy_are_marked_and_named(plt):
    policies = ["none", "none", "cheap:7", "cheap:7", "full", "full+offload"]
    changed = [line(10 * i, recompute=policy) for i, policy in enumerate(policies, start=1)]
    changed.insert(3, line(35, resumed_from=33))  # an older version knew nothing of it
    for runs, marked in (
        ([changed], [30, 50, 60]),
        ([changed[:2]], []),
        ([run(9), changed[:3]], [30]),
    ):
        *axes, legend = panels(plt, *runs)
        for axis in axes:
            marks = [one for one in axis.lines if not one.get_label().startswith("_")]
            assert [mark.get_xdata() for mark in marks] == [[step, step] for step in marked]
            color = axis.lines[len(runs) - 1].get_color()  # that of the last run's curve
            assert all(mark.get_color() == color for mark in marks)
        named = zip(("cheap:7", "full", "full+offload"), marked, strict=False)
        assert names_in(legend)[-len(marked) :] == [f"{name} by step {n}" for name, n in named] or (
            not marked and names_in(legend) == ["run 0", "training"]
        )


# ---- every picture can be read

PAGE, TEXT = 830, 16  # pixels: how wide a page shows a picture, and how high the text around it is

MODELS = {
    "one block, a large head": "--n-layers 1 --d-model 8 --n-heads 1 --seq-len 8",
    "a small head": "--n-layers 6 --d-model 256 --n-heads 4 --vocab-size 300 --seq-len 64",
}


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
        high = one.get_fontsize() / 72 * PAGE / figure.get_figwidth()
        if high < TEXT:
            found.append(f"{one.get_text()!r} is {high:.1f} pixels high")
        if not (whole.contains(box.x0, box.y0) and whole.contains(box.x1, box.y1)):
            found.append(f"{one.get_text()!r} leaves the picture")
        x, y = (slice(int(low) + 1, int(high)) for low, high in (box.intervalx, box.intervaly))
        if brightness[y, x].min() < 220:
            found.append(f"{one.get_text()!r} lies on a line, a point or a colour")
    for one, other in combinations(boxes, 2):
        if boxes[one].padded(-0.5).overlaps(boxes[other].padded(-0.5)):
            found.append(f"{one.get_text()!r} lies on {other.get_text()!r}")
    return found


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_timeline_can_be_read(plt, model):
    figure = memory_timeline.draw(plt, *recorded(model.split()))
    assert faults(plt, figure) == []
    for axis in figure.axes:  # no line leaves its panel
        (left, right), top = axis.get_xlim(), axis.get_ylim()[1]
        for line in axis.lines:
            x, y = line.get_data()
            assert y[(left <= x) & (x <= right)].max(initial=0) < top


def test_block_can_be_read(plt):
    blocks = dict.fromkeys(RECOMPUTE_POLICIES, block_picture.look("full"))
    assert faults(plt, block_picture.draw(plt, blocks)) == []


@pytest.mark.parametrize("deeper", [0, 3])
@pytest.mark.parametrize("runs", [1, 8, 22])
def test_curves_can_be_read(plt, runs, deeper):
    some = {"train_loss": 3.0, "train_ppl": 20.0, "lr": 2.5e-4, "tokens_per_s": 123456.0}
    some |= {"val_loss": 3.2, "val_ppl": 24.5, "peak_memory_bytes": 2**32}
    lines = [line(step, **some) for step in range(1, 6001, 60)]
    lines[0] |= {"train_loss": 10.8, "train_ppl": 49000.0}
    for i, one in enumerate(lines):
        one["recompute"] = f"selective:{20 + min(i, deeper)},cheap+offload"
    figure = plot_metrics.draw(plt, {f"minigpt_run_{i}": lines for i in range(runs)}, None)
    assert faults(plt, figure) == []


def test_committed_pictures_are_small():
    for picture in (ROOT / "studies/results").glob("*.png"):
        assert picture.stat().st_size < 150_000, picture.name
