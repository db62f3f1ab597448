"""The pictures show what the planner says, and the planner says what the allocator does. And they
can be read, for any model: at the width of a page, no words lie on others, on a line, on a colour
or outside of the picture. The curves of runs, too."""

import json
import math
import sys
from dataclasses import replace
from itertools import combinations
from unittest.mock import Mock, patch

import numpy as np
import pytest
from harness.answers import room_for
from harness.planned import CARD
from harness.runs import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from memory import POLICIES as ENTRIES
from memory import RECOMPUTE_POLICIES, expand
from planner.formulas import count_parameters
from planner.timeline import KINDS
from scripts import plot_metrics
from scripts.style import COLORS, FORMATS, POLICIES, Unit, relative_flops, save_picture
from studies import block_picture
from studies import memory_timeline as study
from studies.memory_timeline import choose, flops_done, step_of
from trainer.flags import changed
from trainer.plan import Question

SHAPE = "--n-layers 2 --n-heads 2 --d-model 32 --seq-len 32 --batch-size 8".split()
TINY = [*SHAPE, *"--vocab-size 997 --loss-chunks 2 --device cpu --amp-dtype bfloat16".split()]
MIB = 2**20


def asked_of(*flags: str) -> Question:
    return study.prepare(study.parse([*TINY, *flags]))


def within(asked: Question, tensors: float) -> Question:
    """With a --memory-budget that leaves them so many bytes."""
    room = room_for(tensors)
    return replace(asked, args=changed(asked.args, memory_budget=room.budget), room=room)


@pytest.fixture(scope="module")
def asked():
    asked = asked_of("--use-activation-checkpoint=full")
    assert asked.config.recompute == "none"  # all policies are drawn, whatever is typed
    return asked


@pytest.fixture(autouse=True)
def closed(plt):
    yield
    plt.close("all")


def test_each_phase_is_as_wide_as_its_flops(asked):
    # Per token, multiplied and added: a block's weights, attention's products (half are masked).
    block = 12 * 32**2 + 32 * 32
    for name in POLICIES:
        step = step_of(asked, name)
        at, replayed = flops_done(step), relative_flops(step.config, 32) - 1
        starts = [at[step.phase(phase).start] for phase in study.PHASES]
        forward, head, backward = np.diff(starts)
        assert starts[0] == 0 and at[-1] == pytest.approx(1 + replayed + 1 / 50)
        assert (np.diff(at) >= 0).all()
        assert head / forward == pytest.approx(3 * 997 * 32 / (2 * block))
        assert backward == pytest.approx(2 * forward + replayed)
        policies = expand(step.config.recompute, 2).policies
        assert (replayed > 0) == any(ENTRIES[policy].twice for policy in policies)


def test_timeline_stacks_what_the_planner_counts(plt, asked):
    figure = study.draw_timeline(plt, asked, {})
    panels = dict(zip(study.PANELS, figure.axes, strict=False))  # (the last one: the teeth)
    assert set(COLORS) == set(KINDS)
    for name, axis in panels.items():
        step = step_of(asked, name)
        at, tops = flops_done(step), np.zeros(len(step.timeline))
        for (kind, color), layer in zip(COLORS.items(), axis.collections, strict=False):
            tops += step.timeline[:, KINDS.index(kind)]
            rgba = np.array([plt.matplotlib.colors.to_rgba(color)])
            assert layer.get_facecolor() == pytest.approx(rgba)
            # All its edges are there, at the right time and height (in KiB: MiB are too coarse).
            drawn = {(round(x, 6), round(y * 1024)) for x, y in layer.get_paths()[0].vertices}
            wanted = zip(at, tops / 1024, strict=True)
            assert {(round(x, 6), round(y)) for x, y in wanted} <= drawn
        assert (tops == step.total).all()
        (marker,) = (line for line in axis.lines if line.get_marker() == "v")
        assert marker.get_xydata().tolist() == [[at[step.total.argmax()], step.peak / MIB]]
        title = axis.get_title(loc="left")
        assert title.startswith(f"{name}: ") and f"peak {step.peak / MIB:.1f} MiB" in title
        assert [text.get_text() for text in axis.texts] == list(study.PHASES)
    share = relative_flops(step_of(asked, "full").config, 32) - 1
    assert f"+{100 * share:.0f}% FLOPs" in panels["full"].get_title(loc="left")
    about = "0.06M parameters, batch of 8 x 32 tokens, bfloat16 on a CPU, predicted"
    assert figure.get_suptitle().split("\n")[1] == about


def test_teeth_fill_their_panel(plt):
    """However little they are of the memory in use, and each block has one."""
    asked = asked_of("--seq-len", "8")
    *_, full, teeth = study.draw_timeline(plt, asked, {}).axes
    step = step_of(asked, "full")
    at, total = flops_done(step), step.total / MIB
    (left, right), (low, high) = teeth.get_xlim(), teeth.get_ylim()
    shown = total[(left <= at) & (at < right)]
    assert low < shown.min() and shown.max() < high
    assert shown.max() - shown.min() > 0.6 * (high - low)
    begins = [at[operator] for operator, phase, _ in step.places if phase == "backward"]
    assert len(begins) >= 2 and all(left <= x < right for x in begins)
    (frame,) = (patch for patch in full.patches if not patch.get_fill())
    assert (frame.get_x(), frame.get_x() + frame.get_width()) == pytest.approx((left, right))


def test_what_is_the_same_says_so(plt):
    asked = asked_of("--vocab-size=300", "--loss-chunks=1")
    shown = [axis.get_title(loc="left") for axis in study.draw_timeline(plt, asked, {}).axes]
    words = "plain: all logits at once", "none: here the same as plain"
    assert [title.split("\n")[0] for title in shown[:2]] == [*words]
    assert study.draw_made_of(plt, asked).axes[0].texts[1].get_text().endswith(" MiB, +0%")


def test_units_that_a_reader_can_tell_apart():
    shown = {900: "0.9 KiB", 40 * MIB: "40.0 MiB", 2**30: "1.00 GiB", 13 * 10**10: "121.07 GiB"}
    assert {count: Unit.of(count).text(count) for count in shown} == shown


@pytest.mark.parametrize(("batch_size", "batches"), [(8, [2, 8]), (1, [1])])
def test_bars_add_up_to_the_peak(plt, asked, batch_size, batches):
    asked = asked.about(changed(asked.args, batch_size=batch_size))
    figure = study.draw_made_of(plt, asked)
    for axis, sequences in zip(figure.axes, batches, strict=True):
        for i, name in enumerate(study.BARS):
            step, parts = step_of(asked, name, sequences), axis.patches[i :: len(study.BARS)]
            widths = [part.get_width() * MIB for part in parts]
            assert widths == pytest.approx([step.at_peak[kind] for kind in COLORS])
            assert parts[-1].get_x() + parts[-1].get_width() == pytest.approx(step.peak / MIB)
            assert axis.texts[i].get_text().startswith(f"{step.peak / MIB:.1f} MiB")
        (state,) = axis.lines
        counters = 4 * len(list(asked.planner.model.parameters()))
        assert state.get_xdata()[0] * MIB == 16 * count_parameters(asked.config) + counters
    full, plain = (step_of(asked, name).peak for name in ("full", "plain"))
    assert axis.texts[-1].get_text().endswith(f", {full / plain - 1:+.0%}")


# ---- the frontier


@pytest.mark.parametrize("card", [None, CARD], ids=["FLOPs", "seconds"])
def test_frontier_has_a_point_for_each_policy(plt, asked, card):
    asked = replace(asked, card=card)
    (axis,) = study.draw_frontier(plt, asked).axes
    words = "predicted time of a step, against none (small)", "FLOPs of a step, against none"
    assert axis.get_xlabel() == words[card is None]
    points, ring = (line.get_xydata() for line in axis.lines if line.get_marker() == "o")
    steps = [step_of(asked, name) for name in POLICIES]
    if card is None:
        costs = [relative_flops(step.config, 32) for step in steps]
    else:
        costs = [step.seconds(card) / steps[1].seconds(card) for step in steps]
        assert costs[2] > 1  # cheap is not free
    wanted = [(c, step.peak / MIB) for c, step in zip(costs, steps, strict=True)]
    assert [tuple(point) for point in points] == wanted and tuple(ring[0]) in wanted
    named = {text.get_text(): text.xy for text in axis.texts}
    assert named == dict(zip(POLICIES, wanted, strict=True))
    (mixes,) = (line.get_xydata() for line in axis.lines if line.get_marker() == "None")
    assert tuple(mixes[0]) == named["none"] and (np.diff(mixes, axis=0) * [1, -1] >= 0).all()
    for cost, peak in wanted:  # none is better than all mixes
        assert any(c <= cost * 1.001 and p <= peak * 1.001 for c, p in mixes)


def test_the_best_choice_is_marked(plt, asked):
    """With a budget the planner's pick, else the least memory that costs nothing."""
    names = ("none", "cheap", "selective", "full")
    none, cheap, selective, full = (step_of(asked, name) for name in names)
    free, words = choose(asked)
    name = free.config.recompute
    assert name in ("cheap", "selective")
    assert words.startswith(f"{name}: the least memory with no matmul twice")
    assert free.peak <= 1.01 * min(cheap.peak, selective.peak)
    for budget, name in {none.peak * 3: "none", (none.peak + cheap.peak) // 2: ":1"}.items():
        question = within(asked, budget)
        step, words = choose(question)
        chosen = step.config.recompute
        assert step.peak <= budget and name in chosen
        (axis,) = study.draw_frontier(plt, question).axes
        (ring,) = (line for line in axis.lines if line.get_label() == words)
        assert words.startswith(f"{chosen}:\nwhat auto takes in the ")
        assert tuple(ring.get_xydata()[0]) == (study.cost(question, step), step.peak / MIB)
        (bold,) = (text.get_text() for text in axis.texts if text.get_weight() == "bold")
        assert bold == chosen
        dashed = [line.get_ydata()[0] for line in axis.lines if line.get_linestyle() == "--"]
        shown = budget < none.peak  # above it: not in view
        assert dashed == ([pytest.approx(budget / MIB)] if shown else [])
    nothing, words = choose(within(asked, full.peak // 4))
    assert nothing is None and words.startswith("nothing fits in the ")


# ---- the command


@pytest.mark.parametrize("more", [[], ["--no-amp", "--amp-dtype=auto", "--grad-accum-steps=2"]])
def test_a_real_step_is_as_predicted(more):
    asked = asked_of(*more)
    for name in study.PANELS:
        step = step_of(asked, name)
        at, total = study.record_step(step, asked.args)
        assert total.max() == pytest.approx(step.peak, rel=0.02)
        assert total[-1] == pytest.approx(step.total[-1], rel=0.01)  # nothing forgotten
        assert (np.diff(at) >= 0).all() and at[-1] == flops_done(step)[-1]
        # Stretched to stand over the prediction: like it wherever a part of the step begins.
        for operator, phase, block in step.places[1:]:
            begins = flops_done(step)[operator]
            recorded = total[max(np.searchsorted(at, begins) - 1, 0)]
            low, high = sorted(step.total[[operator - 1, operator]])
            assert 0.9 * low < recorded < 1.1 * high, (phase, block)


def test_pictures_and_numbers(asked, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(study, "ask", lambda args: replace(asked, args=args))
    asked.planner.steps.clear()
    file, out = tmp_path / "numbers.json", tmp_path / "not" / "there" / "yet"
    flags = [*TINY, "--out", str(out), "--json", str(file), "--measure"]
    assert study.main(flags) == 0
    said = capsys.readouterr().out
    assert "vocabulary 997\ndevice   cpu, bfloat16\n" in said
    for name in ("timeline", "frontier", "made_of"):
        picture = out / f"memory_{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG") and f"wrote {picture}" in said
    content = json.loads(file.read_text())
    assert content["command"] == f"python -m scripts.memory_timeline {' '.join(flags)}"
    rows = content["rows"]
    assert {row["policy"] for row in rows} >= {"none", "cheap", "mlp", "full"}
    assert {row["batch_size"] for row in rows} == {2, 8}
    assert len({(row["name"], row["loss_chunks"], row["batch_size"]) for row in rows}) == len(rows)
    for row in rows:
        assert sum(row["at_peak"].values()) == row["predicted_bytes"]
    for name, recorded in content["recorded_bytes"].items():
        assert recorded == pytest.approx(step_of(asked, name).peak, rel=0.02)
    assert list(content["recorded_bytes"]) == list(study.PANELS)


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
    def ends(flags: list[str], code: int, said: str) -> None:
        assert study.main([*TINY, *flags]) == code
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith(said)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    # It can be planned for, though.
    ends(["--device", "cuda", "--measure"], 2, "error: --device cuda: ")
    full_disk = OSError(28, "No space left on device", "out/x.png")
    for error, *how in (
        (KeyboardInterrupt(), 130, "stopped"),
        (full_disk, 2, "error: out/x.png: No space"),
        (OSError(28, "No space left"), 2, "error: cannot write: No space"),
    ):
        monkeypatch.setattr(study, "prepare", Mock(side_effect=error))
        ends([], *how)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ends([], 2, "error: memory_timeline needs matplotlib: pip install matplotlib")
    assert not list(tmp_path.iterdir())


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
        assert names_in(legend)[-len(marked) :] == [
            f"{name} from step {n}" for name, n in named
        ] or (not marked and names_in(legend) == ["run 0", "training"])


# ---- every picture can be read

PAGE, TEXT = 830, 16  # pixels: how wide a page shows a picture, and how high the text around it is

MODELS = {
    "one block, a large head": "--n-layers 1 --d-model 8 --n-heads 1 --seq-len 8",
    "a small head": "--n-layers 6 --d-model 256 --n-heads 4 --vocab-size 300 --seq-len 64",
}


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def model(request):
    return study.prepare(study.parse(request.param.split()))


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


@pytest.mark.parametrize("recorded", [False, True], ids=["predicted", "recorded"])
def test_timeline_can_be_read(plt, model, recorded):
    steps = {name: step_of(model, name) for name in study.PANELS}
    records = {name: (flops_done(step), 1.1 * step.total) for name, step in steps.items()}
    figure = study.draw_timeline(plt, model, records if recorded else {})
    assert faults(plt, figure) == []
    for axis in figure.axes:  # no line leaves its panel
        (left, right), top = axis.get_xlim(), axis.get_ylim()[1]
        for line in axis.lines:
            x, y = line.get_data()
            assert y[(left <= x) & (x <= right)].max(initial=0) < top


def test_bars_can_be_read(plt, model):
    assert faults(plt, study.draw_made_of(plt, model)) == []


@pytest.mark.parametrize("budget", [None, 0.6, 0.01], ids=["free", "budget", "nothing fits"])
def test_frontier_can_be_read(plt, model, budget):
    peak = step_of(model, "none").peak
    figure = study.draw_frontier(plt, within(model, budget * peak) if budget else model)
    assert faults(plt, figure) == []
    texts = [*figure.axes[0].texts]  # in the order of their points: no line crosses all others
    for height in (lambda text: text.get_window_extent().y0), (lambda text: text.xy[1]):
        assert texts == sorted(texts, key=height)


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
