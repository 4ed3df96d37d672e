# SPDX-License-Identifier: Apache-2.0
"""Plot accuracy against memory and against speed, with the Pareto frontier of presses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvpress_eval.report.labels import Label, Segment, place_labels
from kvpress_eval.report.plotting import ACCENT, FORMATS, GRID, INK, MUTED, is_narrow, to_files, to_svg
from kvpress_eval.results.stats import ScoreInterval
from kvpress_eval.results.summary import PressSummary

_NARROW_TICKS = 4
"""Most intervals between numbers of an axis, on a phone."""
_SHORT = 24
"""Characters in a line of a label, on a phone."""


@dataclass(frozen=True)
class Point:
    """A press in one plot, in the units of the axes."""

    label: str
    """Spec of the press."""
    cost: float
    """Memory or time; smaller is better."""
    accuracy: float
    """Accuracy in per cent."""
    low: float
    """Lower bound of the accuracy's confidence interval."""
    high: float
    """Upper bound."""


@dataclass(frozen=True)
class PlotAxis:
    """Horizontal axis of a plot."""

    title: str
    """Title below the axis."""
    unit: str
    """Unit behind each number."""
    log: bool
    """Logarithmic to base 2."""


MEMORY = PlotAxis("Cache size, % of the uncompressed cache", "%", log=True)
SPEED = PlotAxis("Time per generated token, ms", " ms", log=False)


def memory_points(summaries: Sequence[PressSummary]) -> list[Point]:
    """Return the presses with their measured bytes in per cent of an uncompressed cache."""
    return [_point(s, s.accuracy, 100 / s.factor) for s in summaries if s.accuracy and s.factor]


def speed_points(summaries: Sequence[PressSummary]) -> list[Point]:
    """Return the presses with their measured milliseconds per generated token."""
    return [
        _point(s, s.accuracy, s.milliseconds_per_token) for s in summaries if s.accuracy and s.milliseconds_per_token
    ]


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto frontier, cheapest first: points with a higher accuracy than every cheaper point."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.cost, -point.accuracy)):
        if not best or point.accuracy > best[-1].accuracy:
            best.append(point)
    return best


def frontier_svg(points: Sequence[Point], axis: PlotAxis) -> Markup:
    """Return one plot as SVG for a page."""
    return to_svg(
        lambda figure: draw(figure.add_subplot(), points, axis, _SHORT if is_narrow(figure) else None),
        f"Accuracy against: {axis.title}",
    )


def frontier_files(summaries: Sequence[PressSummary], formats: Sequence[str] = FORMATS) -> dict[str, bytes]:
    """Return both plots side by side, as a file of each format by its name."""

    def both(figure: Figure) -> None:
        memory_axes, speed_axes = figure.subplots(1, 2)
        draw(memory_axes, memory_points(summaries), MEMORY)
        draw(speed_axes, speed_points(summaries), SPEED)

    return to_files(both, "frontier", (13, 5), formats)


def draw(axes: Axes, points: Sequence[Point], axis: PlotAxis, width: int | None = None) -> None:
    """Draw the presses of one plot, the frontier in colour and all others in grey; `width` limits the lines of labels."""
    accuracy_axes(axes, axis.title)
    if not points:
        axes.text(0.5, 0.5, "no complete results", transform=axes.transAxes, ha="center", color=MUTED)
        return
    best = frontier(points)
    _set_range(axes, [point.cost for point in points], axis)
    if width is not None and not axis.log:
        axes.locator_params(axis="x", nbins=_NARROW_TICKS)
    steps = _steps(best)
    bars = [(point.cost, point.low, point.cost, point.high) for point in points]
    for x0, y0, x1, y1 in steps:
        axes.plot([x0, x1], [y0, y1], color=ACCENT, alpha=0.5, linewidth=1.2)
    for point, (x0, y0, x1, y1) in zip(points, bars, strict=True):
        colour = ACCENT if point in best else MUTED
        axes.plot([x0, x1], [y0, y1], color=colour, alpha=0.3, linewidth=2)
        axes.plot(point.cost, point.accuracy, "o", color=colour, markersize=6, markeredgecolor="white")
    beaten = [point for point in points if point not in best]
    labels = [Label(point.label, point.cost, point.accuracy, INK) for point in best]
    labels += [Label(point.label, point.cost, point.accuracy, MUTED) for point in beaten]
    place_labels(axes, labels, [*steps, *bars], width)


def accuracy_axes(axes: Axes, title: str) -> None:
    """Set the titles and the grid of axes; the vertical axis is the accuracy in per cent."""
    axes.set_xlabel(title)
    axes.set_ylabel("Accuracy, %")
    axes.set_ylim(-4, 108)
    axes.set_yticks(range(0, 101, 20))
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0)


def _steps(best: Sequence[Point]) -> list[Segment]:
    """Return the staircase of the frontier: from each point right, then up to the next."""
    steps: list[Segment] = []
    for point, following in pairwise(best):
        steps.append((point.cost, point.accuracy, following.cost, point.accuracy))
        steps.append((following.cost, point.accuracy, following.cost, following.accuracy))
    return steps


def _point(summary: PressSummary, accuracy: ScoreInterval, cost: float) -> Point:
    return Point(summary.press, cost, 100 * accuracy.mean, 100 * accuracy.low, 100 * accuracy.high)


def _set_range(axes: Axes, costs: Sequence[float], axis: PlotAxis) -> None:
    low, high = min(costs), max(costs)
    if axis.log:
        axes.set_xscale("log", base=2)
        axes.set_xlim(low / 1.25, high * 1.7)
        axes.xaxis.set_major_locator(FixedLocator([100 * 2.0**power for power in range(-10, 3)]))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(max(0.0, low - (high - low) * 0.15 - 0.1), high + (high - low) * 0.45 + 0.2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{axis.unit}"))
