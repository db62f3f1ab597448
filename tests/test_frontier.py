"""The frontier shows what the planner says, marks the best, and nothing covers anything."""

import json
from itertools import pairwise

import numpy as np
import pytest
from test_choose import CARD

from scripts import memory_timeline as script
from scripts import memory_timeline_frontier as frontier
from scripts import memory_timeline_numbers as numbers
from scripts import memory_timeline_pictures as pictures

TINY = (
    "--n-layers 2 --n-heads 2 --d-model 32 --seq-len 32 --batch-size 8 --vocab-size 997 "
    "--loss-chunks 2 --device cpu --amp-dtype bfloat16"
).split()


@pytest.fixture(scope="module")
def planner():
    return script.prepare(script.parse(TINY))


@pytest.fixture
def best(planner):
    return frontier.Choice.of(planner, 8, None)


@pytest.mark.parametrize("card", [None, CARD], ids=["FLOPs", "seconds"])
def test_frontier_has_a_point_for_each_policy(plt, planner, best, card):
    cost = numbers.Cost(planner, 8, card)
    figure = frontier.draw_frontier(plt, planner, 8, best, None, cost)
    (axis,) = figure.axes
    words = "predicted time of a step, against none (small)", "FLOPs of a step, against none"
    assert axis.get_xlabel() == words[card is None]
    drawn = [line for line in axis.lines if line.get_marker() == "o"]
    points = [tuple(line.get_xydata()[0]) for line in drawn]
    expected = [planner.step(8, **memory) for memory in numbers.POLICIES.values()]
    if card is None:
        costs = [numbers.relative_flops(step) for step in expected]
    else:
        none = planner.step(8, recompute="none").seconds(card)
        costs = [step.seconds(card) / none for step in expected]
        assert costs[2] > 1  # cheap is not free
    wanted = [(c, s.peak / 2**20) for c, s in zip(costs, expected, strict=True)]
    assert points[:-1] == wanted  # and the last one is the ring around the best
    shown = {text.get_text().split(":")[0] for text in axis.texts}
    assert shown == set(numbers.POLICIES)
    hollow = {points[i] for i, line in enumerate(drawn) if line.get_markerfacecolor() == "white"}
    worse = {
        (cost, peak)
        for cost, peak in wanted
        if any(c <= cost and p <= peak and (c, p) != (cost, peak) for c, p in wanted)
    }
    assert hollow == worse
    assert card or points[0] in worse  # plain
    lines = [line.get_xydata() for line in axis.lines if line.get_label() != "_leader"]
    lines = [line for line in lines if len(line) > 1]
    for name, line in zip(numbers.MIXED, lines, strict=True):
        assert tuple(line[0]) == points[list(numbers.POLICIES).index("none")]
        assert tuple(line[-1]) == points[list(numbers.POLICIES).index(name)]
        half = planner.step(8, recompute=name, recompute_layers=1)
        assert line[1:-1].tolist() == [[cost(half), half.peak / 2**20]]
    plt.close(figure)


def test_the_best_choice_is_marked(plt, planner):
    """With a budget the planner's pick, else the least memory that costs nothing."""
    none, cheap, full = (planner.step(8, recompute=name) for name in ("none", "cheap", "full"))
    flops = numbers.Cost(planner, 8)
    selective = planner.step(8, recompute="selective")
    free, words, _ = frontier.Choice.of(planner, 8, None)
    assert free.config.recompute in ("cheap", "selective") and words.startswith(
        f"{free.config.recompute}: the least memory with no matmul twice"
    )
    assert free.peak <= 1.01 * min(cheap.peak, selective.peak)
    budgets = {none.peak * 3: "none", (none.peak + cheap.peak) // 2: "in 1 of 2 blocks"}
    for budget, name in budgets.items():
        choice = frontier.Choice.of(planner, 8, budget)
        assert choice.step.peak <= budget and name in choice.words.split(":")[0]
        figure = frontier.draw_frontier(plt, planner, 8, choice, None, flops)
        (axis,) = figure.axes
        ring = flops(choice.step), choice.step.peak / 2**20
        (marked,) = (line for line in axis.lines if line.get_label() == choice.words)
        assert tuple(marked.get_xydata()[0]) == ring
        (bold,) = (text.get_text() for text in axis.texts if text.get_weight() == "bold")
        assert bold.split(":")[0] == choice.words.split(":")[0]
        dashed = [line.get_ydata()[0] for line in axis.lines if line.get_linestyle() == "--"]
        assert dashed == ([budget / 2**20] if budget < none.peak else [])  # above it: not in view
        plt.close(figure)
    nothing = frontier.Choice.of(planner, 8, full.peak // 4)
    assert nothing.step is None and nothing.words.startswith("nothing fits in the ")
    plt.close(frontier.draw_frontier(plt, planner, 8, nothing, None, flops))


# (FLOPs, peak) of the policies in the order of POLICIES, as five models have them.
PLACES = {
    "0.73M": "1 29.55, 1 29.55, 1 25.11, 1 25.02, 1.088 23.72, 1.077 26.31, 1.176 19.96, 1.187 "
    "19.36, 1.216 18.98",
    "7M": "1 587.2, 1 587.2, 1 418.1, 1 446.2, 1.099 344.7, 1.096 445.9, 1.199 227.4, 1.22 203.5, "
    "1.27 271.7",
    "124M": "1 8.79, 1 4.48, 1 3.49, 1 3.46, 1.071 3.1, 1.077 3.72, 1.142 2.24, 1.166 2.14, 1.201 "
    "2.33",
    "355M": "1 10.33, 1 8.36, 1 6.72, 1 6.67, 1.089 6.3, 1.089 7.23, 1.177 5.46, 1.199 5.46, 1.244 "
    "5.58",
    "774M": "1 18.76, 1 16.87, 1 13.55, 1 13.43, 1.096 12.83, 1.091 14.66, 1.192 11.75, 1.211 "
    "11.75, 1.259 11.89",
}


@pytest.mark.parametrize("words", PLACES.values(), ids=PLACES)
def test_labels_stand_free(plt, words):
    """Inside of the frame, on no other label, no point and no line."""
    numbers_of = (tuple(map(float, pair.split())) for pair in words.split(", "))
    places = dict(zip(numbers.POLICIES, numbers_of, strict=True))
    curves = [np.array([places["none"], places[name]]) for name in numbers.MIXED]
    figure, axis = plt.subplots(figsize=(pictures.WIDTH, 5))
    for line in [*curves, *(np.array([place]) for place in places.values())]:
        axis.plot(*line.T)
    axis.set(xlim=(0.95, 1.3), ylim=(0, 1.12 * max(peak for _, peak in places.values())))
    figure.draw_without_rendering()
    frontier.label_points(axis, places, curves, places["cheap"])
    figure.draw_without_rendering()
    frame, boxes = axis.get_window_extent(), [text.get_window_extent() for text in axis.texts]
    assert len(boxes) == len(places)
    lines = [axis.transData.transform(line.get_xydata()) for line in axis.lines]
    for i, box in enumerate(boxes):
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1
        assert frame.y0 <= box.y0 and box.y1 <= frame.y1
        assert not any(box.overlaps(other) for other in boxes[:i])
        for line in lines:
            between = [np.linspace(*ends, 500) for ends in pairwise(line)]
            assert not box.count_contains(np.concatenate([line, *between]))
    plt.close(figure)


@pytest.fixture
def benchmark(tmp_path):
    """What scripts.benchmark writes."""
    rows = [
        {"policy": "none", "step_s": 0.5, "peak_bytes": 2**30, "batch_size": 8},
        {"policy": "full", "name": "full!", "step_s": 0.6, "peak_bytes": 2**29, "batch_size": 8},
        {"policy": "full", "peer": "other", "step_s": 1, "peak_bytes": 2**28, "batch_size": 8},
        {"policy": "full", "step_s": 0.6, "peak_bytes": None, "batch_size": 8},
        {"policy": "full", "step_s": 0.9, "peak_bytes": 2**31, "batch_size": 12},
    ]
    file = tmp_path / "benchmark.json"
    about = {"device": "a card", "torch": "2.x", "date": "today"}
    file.write_text(json.dumps({"rows": rows, **about}))
    return file


def test_frontier_of_a_benchmark(plt, planner, best, benchmark):
    measured = numbers.load_measured(script.parse([*TINY, "--measured", str(benchmark)]))
    assert measured[0] == {
        "none": (0.5, 2**30),
        "full!": (0.6, 2**29),
        "other full": (1.0, 2**28),
    }
    figure = frontier.draw_frontier(plt, planner, 8, best, measured, numbers.Cost(planner, 8))
    (axis,) = figure.axes
    points = [tuple(line.get_xydata()[0]) for line in axis.lines if line.get_marker() == "o"]
    assert points == [(0.5, 1), (0.6, 0.5), (1, 0.25)]
    assert axis.get_xlabel() == "time of a step (s)"
    assert figure.get_suptitle().endswith("measured on a card, torch 2.x, today")
    plt.close(figure)
