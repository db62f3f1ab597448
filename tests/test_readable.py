"""Every picture can be read: at the width of a page, by a colour-blind reader, and no words lie on
other words, on a line, on a point or outside of the picture. For any model."""

from itertools import combinations
from unittest.mock import patch

import numpy as np
import pytest
from harness.runs import ROOT

from model import RECOMPUTE_POLICIES
from scripts import plot_metrics
from scripts.style import COLORS
from studies import block_picture
from studies import memory_timeline as study

PAGE, TEXT = 830, 16  # pixels: how wide a page shows a picture, and how high the text around it is

MODELS = {
    "one block, a large head": "--n-layers 1 --d-model 8 --n-heads 1 --seq-len 8",
    "a small head": "--n-layers 6 --d-model 256 --n-heads 4 --vocab-size 300 --seq-len 64",
}


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def subject(request):
    return study.prepare(study.parse(request.param.split()))


@pytest.fixture(autouse=True)
def closed(plt):
    yield
    plt.close("all")


def drawn(plt, figure) -> dict:
    """Each text that a reader sees -> its box in pixels."""
    text = plt.matplotlib.text.Text
    seen, draw = [], text.draw
    with patch.object(text, "draw", lambda self, *args: (seen.append(self), draw(self, *args))):
        figure.draw_without_rendering()
    shown = [one for one in dict.fromkeys(seen) if one.get_visible() and one.get_text().strip()]
    return {one: text.get_window_extent(one) for one in shown}  # (without an annotation's line)


def lines_of(plt, axis):
    """(path in pixels, radius of its markers) of each line, grid line, band and empty frame."""
    grid = [line for line in axis.get_xgridlines() + axis.get_ygridlines() if line.get_visible()]
    for line in [*axis.lines, *grid]:
        marked = line.get_marker() not in ("None", "", None)
        radius = line.get_markersize() / 2 * axis.figure.dpi / 72 if marked else 0
        yield line.get_path().transformed(line.get_transform()), radius
    for shape in axis.patches:
        if not shape.get_fill() or shape.get_alpha():  # a band
            yield shape.get_path().transformed(shape.get_transform()), 0


def points_of(path) -> tuple[np.ndarray, np.ndarray]:
    """The corners of a path, and points of its lines that are at most a pixel apart."""
    corners = path.vertices[np.isfinite(path.vertices).all(axis=1)]
    if len(corners) < 2:
        return corners, corners[:0]
    along = np.append(0, np.hypot(*np.diff(corners, axis=0).T).cumsum())
    at = np.union1d(along, np.arange(along[-1]))
    return corners, np.stack([np.interp(at, along, x) for x in corners.T], axis=1)


def crosses(corners, points, radius, box) -> bool:
    return bool(radius and box.padded(radius).count_contains(corners)) or bool(
        len(points) and box.count_contains(points)
    )


def faults(plt, figure) -> list[str]:
    """What keeps a reader from reading it."""
    found, boxes = [], drawn(plt, figure)
    for text, box in boxes.items():
        words = repr(text.get_text())
        high = text.get_fontsize() / 72 * PAGE / figure.get_figwidth()
        if high < TEXT:
            found.append(f"{words} is {high:.1f} pixels high")
        whole = figure.bbox.padded(0.5)
        if not (whole.contains(box.x0, box.y0) and whole.contains(box.x1, box.y1)):
            found.append(f"{words} leaves the picture")
    for one, other in combinations(boxes, 2):
        if boxes[one].padded(-0.5).overlaps(boxes[other].padded(-0.5)):
            found.append(f"{one.get_text()!r} lies on {other.get_text()!r}")
    for axis in figure.axes:
        frame = axis.get_window_extent()
        lines = [(*points_of(path), radius) for path, radius in lines_of(plt, axis)]
        for text in set(axis.texts) & set(boxes):
            box, words = boxes[text].padded(-0.5), repr(text.get_text())
            inside = frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1)
            if frame.overlaps(box) and not inside:
                found.append(f"{words} lies on its frame")
            if any(crosses(*line, box) for line in lines):
                found.append(f"{words} lies on a line or a point")
    return found


@pytest.mark.parametrize("recorded", [False, True], ids=["predicted", "recorded"])
def test_timeline(plt, subject, recorded):
    steps = {name: subject.step(name) for name in study.PANELS}
    records = {name: (study.flops_done(step), 1.1 * step.total) for name, step in steps.items()}
    figure = study.draw_timeline(plt, subject, records if recorded else {})
    assert faults(plt, figure) == []
    for axis in figure.axes:  # no line leaves its panel
        (left, right), top = axis.get_xlim(), axis.get_ylim()[1]
        for line in axis.lines:
            x, y = line.get_data()
            assert y[(left <= x) & (x <= right)].max(initial=0) < top


def test_made_of(plt, subject):
    figure = study.draw_made_of(plt, subject)
    assert faults(plt, figure) == []
    for axis in figure.axes:
        bars = [bar.get_window_extent() for bar in axis.patches]
        for text in axis.texts:
            assert not any(text.get_window_extent().overlaps(bar) for bar in bars if bar.width)


@pytest.mark.parametrize("budget", [None, 0.6, 0.01], ids=["free", "budget", "nothing fits"])
def test_frontier(plt, subject, budget):
    choice = study.choose(subject, budget and int(budget * subject.step("none").peak))
    figure = study.draw_frontier(plt, subject, choice)
    assert faults(plt, figure) == []
    names_stand_in_order(figure)


def names_stand_in_order(figure):
    """From the highest point down; so no line to a name crosses all others."""
    texts = figure.axes[0].texts
    heights = [text.get_window_extent().y0 for text in texts]
    assert heights == sorted(heights)
    assert [text.xy[1] for text in texts] == sorted(text.xy[1] for text in texts)


def test_frontier_that_was_measured(plt, subject):
    points = {"none": (0.5, 2**30), "full": (0.6, 2**29), "transformers full": (1.0, 2**28)}
    measured = points, "\nmeasured on NVIDIA H100 80GB HBM3, torch 2.11.0+cu128, 2026-01-01"
    figure = study.draw_frontier(plt, subject, None, measured)
    assert faults(plt, figure) == []
    names_stand_in_order(figure)


def test_block(plt):
    blocks = dict.fromkeys(RECOMPUTE_POLICIES, block_picture.look("full"))
    assert faults(plt, block_picture.draw(plt, blocks)) == []


@pytest.mark.parametrize("runs", [1, 8, 22])
def test_metrics(plt, runs):
    line = {"train_loss": 3.0, "train_ppl": 20.0, "lr": 2.5e-4, "tokens_per_s": 123456.0}
    line |= {"val_loss": 3.2, "val_ppl": 24.5}
    memory = {"peak_memory_bytes": 2**32, "peak_memory_kind": "cuda"}
    lines = [{"step": step, **line, **memory} for step in range(1, 6001, 60)]
    lines[0] |= {"train_loss": 10.8, "train_ppl": 49000.0}
    figure = plot_metrics.draw(plt, {f"minigpt_run_{i}": lines for i in range(runs)}, None)
    assert faults(plt, figure) == []


# Machado, Oliveira and Fernandes (2009): what a colour looks like to a person without the cones
# for red (protanopia) or green (deuteranopia) light, of linear RGB.
BLIND = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "neither": np.eye(3).tolist(),
}
XYZ = [[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0178, 0.1095, 0.8727]]  # D65 = 1


def linear(plt, color) -> np.ndarray:
    rgb = np.array(plt.matplotlib.colors.to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b*, in which distances are about what eyes see; 2 is just noticed side by side."""
    x, y, z = np.cbrt(np.clip(np.array(XYZ) @ rgb, 0.0089, None))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eyes", BLIND)
def test_kinds_can_be_told_apart(plt, eyes):
    seen = {
        kind: lab(np.clip(np.array(BLIND[eyes]) @ linear(plt, color), 0, 1))
        for kind, color in [*COLORS.items(), ("the page", "white")]
    }
    for one, other in combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 20, (one, other)


def test_committed_pictures_are_small():
    for picture in (ROOT / "studies/results").glob("*.png"):
        assert picture.stat().st_size < 150_000, picture.name
