"""The frontier of scripts/memory_timeline.py: what each policy saves, and what it costs."""

from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from planner import Card
from planner.choose import describe_recompute, pick_recompute
from planner.step import Planner
from planner.timeline import StepMemory
from scripts.memory_timeline_numbers import (
    MIXED,
    PANELS,
    POLICIES,
    Cost,
    Points,
    mixes,
    n_parameters,
    n_state_bytes,
    relative_flops,
)
from scripts.memory_timeline_pictures import COLORS, GRAY, WIDTH, Unit, describe

POINT, BEST = "#D55E00", "#007A59"


class Choice(NamedTuple):
    """The policy that is marked."""

    step: StepMemory | None  # None: nothing fits
    words: str
    budget: int | None = None

    @classmethod
    def of(
        cls,
        planner: Planner,
        batch_size: int,
        budget: int | None,
        card: Card | None = None,
        compiled: bool = False,
    ) -> "Choice":
        """With a budget what `auto` takes. Without one nobody can say what memory is worth; so the
        policy that takes the least of it among those that do no FLOPs twice (give or take a
        hundredth: then the one that replays less)."""
        if budget is None:
            steps = [planner.step(batch_size, **memory) for memory in POLICIES.values()]
            free = [step for step in steps if relative_flops(step) == 1]
            least = min(step.peak for step in free)
            step = next(step for step in free if step.peak <= 1.01 * least)
            words = "the least memory with no matmul twice (or ask with --memory-budget)"
            return cls(step, f"{describe_recompute(step.config)}: {words}")
        limit = Unit.of(budget).text(budget)
        if n_state_bytes(planner) < budget:  # else no recompute helps
            step = pick_recompute(planner, batch_size, budget, card, compiled)
            if step.peak <= budget:
                words = f"what auto takes in the {limit} that --memory-budget leaves tensors"
                return cls(step, f"{describe_recompute(step.config)}:\n{words}", budget)
        return cls(None, f"nothing fits in the {limit} that --memory-budget leaves tensors", budget)


def predicted(planner: Planner, batch_size: int, choice: Choice, cost: Cost) -> Points:
    """Each policy, and the choice if it is none of them. Policies that are the same share a name:
    plain and none, if the head is at once anyway (`--loss-chunks 1`)."""
    points: Points = {}
    steps = {name: planner.step(batch_size, **memory) for name, memory in POLICIES.items()}
    if choice.step and choice.step not in steps.values():
        steps[describe_recompute(choice.step.config)] = choice.step
    names: dict[tuple[float, int], list[str]] = {}
    for name, step in steps.items():
        names.setdefault((cost(step), step.peak), []).append(name)
    for place, same in names.items():
        alone = len(same) == 1 and same[0] in ("plain", "none")
        points[f"{same[0]}: {PANELS[same[0]]}" if alone else " = ".join(same)] = place
    return points


def draw_frontier(
    plt: Any,
    planner: Planner,
    batch_size: int,
    choice: Choice,
    measured: tuple[Points, str] | None,
    cost: Cost,
) -> Any:
    """Peak memory against what a step costs: FLOPs, predicted time, or time that was measured."""
    figure, axis = plt.subplots(figsize=(WIDTH, 5.3))
    points, source = measured or (predicted(planner, batch_size, choice, cost), "predicted")
    unit = Unit.of(max(peak for _, peak in points.values()))
    state = n_state_bytes(planner) / unit.size
    each = f"{n_state_bytes(planner) / n_parameters(planner):.3g} bytes a parameter"
    words = f"parameters, moments, gradients: {each}, which no policy frees"
    axis.axhspan(0, state, color=COLORS["optimizer"], alpha=0.3, linewidth=0, label=words)
    curves = [] if measured else draw_mixes(axis, planner, batch_size, unit, cost)
    beaten = f"hollow: another needs no more memory and no more {'time' if measured else cost.unit}"
    for place in points.values():
        hollow = any(is_better(other, place) for other in points.values())
        fill = {"markerfacecolor": "white", "label": beaten} if hollow else {}
        axis.plot(place[0], place[1] / unit.size, "o", color=POINT, **fill)
    best = None if measured else mark(axis, choice, unit, cost)
    axis.set_xlabel(cost.words if measured is None else "time of a step (s)")
    axis.set_ylabel(f"peak memory of a step ({unit.name})")
    axis.margins(x=0.2)
    axis.set_xlim(axis.get_xlim())  # and no wider for what is drawn from now on
    top = 1.12 * max(peak for _, peak in points.values()) / unit.size
    axis.set_ylim(0, top)
    levels = [state]
    if choice.budget and measured is None and choice.budget / unit.size < top:
        levels.append(choice.budget / unit.size)
        axis.axhline(levels[-1], color="black", linewidth=1, linestyle="--", label="the budget")
    if measured is None:
        axis.xaxis.set_major_formatter(lambda x, _: f"{100 * (x - 1):+.3g}%" if x != 1 else "0")
    low, high = axis.get_xlim()
    near = 0.05 * (high - low)  # at the frame's ends: a tick's words would leave it
    axis.set_xticks([x for x in axis.get_xticks() if low + near < x < high - near])
    about = describe(planner, f"batch of {batch_size} x ")
    about += f"\n{source}" if measured else f", {source}"
    figure.suptitle(f"What each policy saves, and what it costs (best: lower left)\n{about}")
    handles, labels = axis.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    figure.legend(once.values(), once, loc="outside lower center", frameon=False)
    figure.draw_without_rendering()  # now places are known
    places = {name: (x, peak / unit.size) for name, (x, peak) in points.items()}
    curves += [np.array([(low, level), (high, level)]) for level in levels]
    label_points(axis, places, curves, best)
    return figure


def is_better(one: tuple[float, int], other: tuple[float, int]) -> bool:
    """In one of cost and memory, and no worse in the other one."""
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def draw_mixes(
    axis: Any, planner: Planner, batch_size: int, unit: Unit, cost: Cost
) -> list[np.ndarray]:
    """Policies in only a part of the blocks. What was drawn: (points, 2) each."""
    curves = []
    for name in MIXED:
        steps = [planner.step(batch_size, **memory) for memory in mixes(planner, name)]
        curves.append(np.array([(cost(step), step.peak / unit.size) for step in steps]))
        axis.plot(*curves[-1].T, color="#999999", linewidth=1.2, zorder=1)
    axis.lines[0].set_label("a policy in only a part of the blocks")
    return curves


def mark(axis: Any, choice: Choice, unit: Unit, cost: Cost) -> tuple[float, float] | None:
    """A ring around the choice, which the legend explains; where it is."""
    ring = {"color": BEST, "markerfacecolor": "none", "markersize": 13, "markeredgewidth": 2.5}
    if choice.step is None:
        axis.plot([], [], linestyle="none", label=choice.words)
        return None
    place = cost(choice.step), choice.step.peak / unit.size
    axis.plot(*place, "o", **ring, label=choice.words)
    return place


# Where a label may stand around its point, the best first: to the right, then to the left.
AROUND = ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))
DISTANCES = (10, 18, 28, 40, 54, 70, 90, 120)  # in points of 1/72 inch


def label_points(
    axis: Any,
    places: dict[str, tuple[float, float]],
    curves: list[np.ndarray],
    best: tuple[float, float] | None,
) -> None:
    """Each point's name at the nearest free place around it: inside of the frame, on no other
    name, no point and no line. If that is not beside it, a thin line leads there."""
    to_pixels, point = axis.transData.transform, axis.figure.dpi / 72
    # What a name must not cover, as points (n, 2) in pixels.
    points = to_pixels(list(places.values()))
    corners = np.array([*product((-1, 0, 1), repeat=2)]) * 7 * point
    taken = [(points[:, None] + corners).reshape(-1, 2)]
    taken += [between(*pair) for curve in curves for pair in pairwise(to_pixels(curve))]
    boxes: list[Any] = []
    for (name, place), pixel in zip(places.items(), points, strict=True):
        others = points[np.hypot(*(points - pixel).T) > 4 * point]
        for distance, (dx, dy) in product(DISTANCES, AROUND):
            text = write(axis, name, place, (dx * distance, dy * distance), place == best)
            box = text.get_window_extent().padded(2)
            end = pixel + np.array([dx, dy]) * (distance - 2) * point
            leader = between(pixel, end) if distance > DISTANCES[0] else None
            if is_free(axis, box, boxes, taken) and is_clear(box, pixel, others, leader, boxes):
                break
            text.remove()
        else:  # nowhere: then where it is looked for
            box = write(axis, name, place, (DISTANCES[0], 0), place == best).get_window_extent()
            leader = None
        boxes.append(box)
        if leader is not None:
            taken.append(leader)
            back = axis.transData.inverted().transform([pixel, end])
            axis.plot(*back.T, color=GRAY, linewidth=0.7, zorder=0.5, label="_leader")


def is_free(axis: Any, box: Any, boxes: list[Any], taken: list[np.ndarray]) -> bool:
    """Inside of the frame, on no other name, no point and no line."""
    frame = axis.get_window_extent()
    inside = frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1)
    alone = not any(box.overlaps(other) for other in boxes)
    return inside and alone and not any(box.count_contains(covered) for covered in taken)


def is_clear(
    box: Any, pixel: np.ndarray, others: np.ndarray, leader: np.ndarray | None, boxes: list[Any]
) -> bool:
    """Nobody takes the name for another point's: it is nearest to its own, or a line leads there,
    past all other points and names."""
    if leader is None:
        return distance_to(box, pixel[None]).min() <= distance_to(box, others).min(initial=np.inf)
    near = np.hypot(*(leader[:, None] - others).T) < 0.7 * box.height
    return not near.any() and not any(other.count_contains(leader) for other in boxes)


def distance_to(box: Any, points: np.ndarray) -> np.ndarray:
    """(n, 2) -> (n,) pixels."""
    low, high = np.array([box.x0, box.y0]), np.array([box.x1, box.y1])
    return np.hypot(*np.maximum(0, np.maximum(low - points, points - high)).T)


def between(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """(n, 2) points of the straight line, a pixel apart."""
    n = int(np.hypot(*(end - start))) + 2
    return np.linspace(start, end, n)


def write(
    axis: Any, name: str, place: tuple[float, float], offset: tuple[int, int], bold: bool
) -> Any:
    dx, dy = np.sign(offset)
    return axis.annotate(
        name,
        place,
        offset,
        textcoords="offset points",
        ha={1: "left", 0: "center", -1: "right"}[dx],
        va={1: "bottom", 0: "center", -1: "top"}[dy] if dx == 0 else "center",
        weight="bold" if bold else "normal",
        in_layout=False,  # the frame stays as it is
        zorder=4,
    )
