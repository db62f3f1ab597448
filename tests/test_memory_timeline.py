"""The pictures show what the planner says, and the planner says what the allocator does."""

import json
import sys

import numpy as np
import pytest

from planner.step import KINDS
from scripts import memory_timeline as script
from scripts import memory_timeline_numbers as numbers
from scripts import memory_timeline_pictures as pictures

TINY = (
    "--n-layers 2 --n-heads 2 --d-model 32 --seq-len 32 --batch-size 8 --vocab-size 997 "
    "--loss-chunks 2 --device cpu"
).split()


@pytest.fixture(scope="module")
def plt():
    pytest.importorskip("matplotlib")
    return pictures.load_pyplot()


@pytest.fixture(scope="module")
def planner():
    return script.prepare(script.parse(TINY))


def steps(planner):
    return {name: planner.step(8, **numbers.POLICIES[name]) for name in numbers.PANELS}


def titles(figure):
    return figure.get_suptitle().split("\n")


@pytest.mark.parametrize("name", numbers.POLICIES)
def test_each_phase_is_as_wide_as_its_flops(planner, name):
    step = planner.step(8, **numbers.POLICIES[name])
    at, replayed = numbers.flops_done(step), numbers.relative_flops(step) - 1
    starts = [at[step.phase(phase).start] for phase in numbers.PHASES]
    forward, head, backward = np.diff(starts)
    assert starts[0] == 0 and at[-1] == pytest.approx(1 + replayed + 1 / 50)
    assert (np.diff(at) >= 0).all()
    config = planner.config
    # Per token, multiplied and added: a block's weights, attention's products (half are masked).
    block = 12 * config.d_model**2 + planner.seq_len * config.d_model
    assert head / forward == pytest.approx(3 * 997 * config.d_model / (config.n_layers * block))
    assert backward == pytest.approx(2 * forward + replayed)
    assert (replayed > 0) == (name not in ("plain", "none", "cheap", "selective"))


def test_timeline_stacks_what_the_planner_counts(plt, planner):
    figure = pictures.draw_timeline(plt, planner, 8, {})
    panels = dict(zip(numbers.PANELS, figure.axes, strict=False))  # (the last one is enlarged)
    assert set(pictures.COLORS) == set(KINDS)
    for name, step in steps(planner).items():
        tops = np.zeros(len(step.timeline))
        layers = panels[name].collections[: len(KINDS)]
        for kind, layer in zip(pictures.COLORS, layers, strict=True):
            tops += step.timeline[:, KINDS.index(kind)]
            outline = layer.get_paths()[0].vertices
            assert layer.get_facecolor() == pytest.approx(
                np.array([plt.matplotlib.colors.to_rgba(pictures.COLORS[kind])])
            )
            # All its edges are there, at the right time and height (in KiB: GiB are too coarse).
            drawn = {(round(x, 6), round(y * 2**20)) for x, y in outline}
            wanted = zip(numbers.flops_done(step), tops / 2**10, strict=True)
            assert {(round(x, 6), round(y)) for x, y in wanted} <= drawn
        assert (tops == step.total).all()
        (marker,) = (line for line in panels[name].lines if line.get_marker() == "v")
        at = numbers.flops_done(step)[step.total.argmax()]
        assert marker.get_xydata().tolist() == [[at, step.peak / 2**30]]
        texts = [text.get_text() for text in panels[name].texts]
        assert f"peak {step.peak / 2**30:.2f} GiB" in texts
        assert {text.strip() for text in texts} >= set(numbers.PHASES)
        assert f"{name}: " in panels[name].get_title(loc="left")
    share = numbers.relative_flops(steps(planner)["full"]) - 1
    assert f"+{100 * share:.0f}% FLOPs" in panels["full"].get_title(loc="left")
    assert titles(figure)[1] == "0.06M parameters, batch of 8 x 32 tokens, bfloat16, predicted"
    plt.close(figure)


def test_frontier_has_a_point_for_each_policy(plt, planner):
    figure = pictures.draw_frontier(plt, planner, 8, None)
    (axis,) = figure.axes
    points = [tuple(line.get_xydata()[0]) for line in axis.lines if line.get_marker() == "o"]
    expected = [planner.step(8, **memory) for memory in numbers.POLICIES.values()]
    assert points == [(numbers.relative_flops(s), s.peak / 2**30) for s in expected]
    shown = {text.get_text().split(":")[0] for text in axis.texts if text.get_visible()}
    assert shown >= set(numbers.POLICIES)
    lines = [line.get_xydata() for line in axis.lines if line.get_marker() != "o"]
    for name, line in zip(pictures.MIXED, lines, strict=True):
        assert tuple(line[0]) == points[list(numbers.POLICIES).index("none")]
        assert tuple(line[-1]) == points[list(numbers.POLICIES).index(name)]
        half = planner.step(8, recompute=name, recompute_layers=1)
        assert line[1:-1].tolist() == [[numbers.relative_flops(half), half.peak / 2**30]]
    plt.close(figure)


def test_bars_add_up_to_the_peak(plt, planner):
    figure = pictures.draw_made_of(plt, planner)
    for axis, batch_size in zip(figure.axes, pictures.BATCHES, strict=True):
        bars = axis.patches
        for i, name in enumerate(pictures.BARS):
            step = planner.step(batch_size, **numbers.POLICIES[name])
            parts = bars[i * len(KINDS) : (i + 1) * len(KINDS)]
            widths = [part.get_width() * 2**30 for part in parts]
            assert widths == pytest.approx([step.at_peak[kind] for kind in pictures.COLORS])
            assert parts[-1].get_x() + parts[-1].get_width() == pytest.approx(step.peak / 2**30)
            assert axis.texts[i].get_text().startswith(f"{step.peak / 2**30:.2f} GiB")
        (state,) = axis.lines
        assert state.get_xdata()[0] * 2**30 == 16 * pictures.n_parameters(planner)
    full, plain = (planner.step(12, **numbers.POLICIES[name]).peak for name in ("full", "plain"))
    assert axis.texts[-1].get_text().endswith(f", {full / plain - 1:+.0%}")
    plt.close(figure)


@pytest.mark.parametrize("precision", [[], ["--no-amp"], ["--grad-accum-steps", "2"]], ids=str)
def test_a_real_step_is_as_predicted(precision):
    args = script.parse([*TINY, *precision])
    planner = script.prepare(args)
    for step in steps(planner).values():
        at, total = numbers.record_step(planner, step, args)
        assert total.max() == pytest.approx(step.peak, rel=0.02)
        assert total[-1] == pytest.approx(step.total[-1], rel=0.001)  # nothing forgotten
        assert (np.diff(at) >= 0).all() and at[-1] == numbers.flops_done(step)[-1]
        # Stretched to stand over the prediction: like it wherever a part of the step begins.
        for operator, phase, block in step.places[1:]:
            begins = numbers.flops_done(step)[operator]
            recorded = total[max(np.searchsorted(at, begins) - 1, 0)]
            low, high = sorted(step.total[[operator - 1, operator]])
            assert 0.9 * low < recorded < 1.1 * high, (phase, block)


def test_pictures_and_numbers(plt, planner, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "prepare", lambda args: planner)  # which remembers its steps
    file = tmp_path / "numbers.json"
    flags = [*TINY, "--out", str(tmp_path), "--json", str(file), "--measure"]
    assert script.main(flags) == 0
    said = capsys.readouterr().out
    for name in ("timeline", "frontier", "made_of"):
        picture = tmp_path / f"memory_{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG") and f"wrote {picture}" in said
    content = json.loads(file.read_text())
    assert content["command"] == f"python -m scripts.memory_timeline {' '.join(flags)}"
    rows = content["rows"]
    assert {row["policy"] for row in rows} >= {"none", "cheap", "mlp", "full"}
    assert {row["batch_size"] for row in rows} == {8, *pictures.BATCHES}
    assert len({(row["name"], row["loss_chunks"], row["batch_size"]) for row in rows}) == len(rows)
    for row in rows:
        assert sum(row["at_peak"].values()) == row["predicted_bytes"]
    for name, recorded in content["recorded_bytes"].items():
        memory = {"loss_chunks": 2} | numbers.POLICIES[name]
        (predicted,) = (
            row["predicted_bytes"]
            for row in rows
            if (row["policy"], row["loss_chunks"]) == (memory["recompute"], memory["loss_chunks"])
            and (row["batch_size"], row["group"], row["layers"]) == (8, 1, None)
        )
        assert recorded == pytest.approx(predicted, rel=0.02)
    assert list(content["recorded_bytes"]) == list(numbers.PANELS)


MEASURED = {
    "rows": [
        {"policy": "none", "step_s": 0.5, "peak_bytes": 2**30, "batch_size": 8},
        {"policy": "full", "name": "full!", "step_s": 0.6, "peak_bytes": 2**29, "batch_size": 8},
        {"policy": "full", "peer": "other", "step_s": 1, "peak_bytes": 2**28, "batch_size": 8},
        {"policy": "full", "step_s": 0.6, "peak_bytes": None, "batch_size": 8},
        {"policy": "full", "step_s": 0.9, "peak_bytes": 2**31, "batch_size": 12},
    ],
    "device": "a card",
    "torch": "2.x",
    "date": "today",
}


def test_frontier_of_a_benchmark(plt, planner, tmp_path):
    file = tmp_path / "benchmark.json"
    file.write_text(json.dumps(MEASURED))
    measured = numbers.load_measured(script.parse([*TINY, "--measured", str(file)]))
    assert measured[0] == {
        "none": (0.5, 2**30),
        "full!": (0.6, 2**29),
        "other full": (1.0, 2**28),
    }
    figure = pictures.draw_frontier(plt, planner, 8, measured)
    (axis,) = figure.axes
    assert [tuple(line.get_xydata()[0]) for line in axis.lines] == [(0.5, 1), (0.6, 0.5), (1, 0.25)]
    assert axis.get_xlabel() == "time of a step (s)"
    assert titles(figure)[1].endswith("measured on a card, torch 2.x, today")
    plt.close(figure)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "nowhere"], "--out: there is no folder nowhere"),
        (["--json", "nowhere/x.json"], "--json: there is no folder nowhere"),
        (["--n-heads", "3"], "--n-heads"),
        (["--batch-size", "0"], "--batch-size: must be"),
        (["--seq-len", "64", "--max-position-embeddings", "32"], "--seq-len 64"),
        (["--measured", "nowhere.json"], "--measured nowhere.json: No such file"),
        (["--measured", "words.json"], "--measured words.json is not"),
        (["--measured", "list.json"], "--measured list.json is not"),
        (["--measured", "good.json", "--batch-size", "5"], "no row with --batch-size 5"),
    ],
)
def test_mistakes(plt, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    files = {"words.json": "words", "list.json": "[1]", "good.json": json.dumps(MEASURED)}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    try:
        code = script.main([*TINY, *flags])
    except SystemExit as stop:
        code = stop.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and line.startswith("error: ") and message in line
    assert {path.name for path in tmp_path.iterdir()} == set(files)


def test_without_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert script.main([*TINY, "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: memory_timeline needs matplotlib: pip install matplotlib"
    assert not list(tmp_path.iterdir())
