"""Accuracy against memory and against speed: which presses are beaten by none on both."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvpress_eval.report.labels import Label, Segment, place_labels
from kvpress_eval.results.stats import Estimate
from kvpress_eval.results.summary import PressSummary

INK, MUTED, GRID, ACCENT = "#1f2933", "#9aa5b1", "#e4e7eb", "#0b69a3"
_THEMED = {
    INK: "var(--ink)",
    MUTED: "var(--faint)",
    GRID: "var(--line)",
    ACCENT: "var(--accent)",
    "#ffffff": "var(--page)",
}
"""The page, light or dark, says what a colour is."""
_STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
}


_UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""The same results are the same files."""


@dataclass(frozen=True)
class Point:
    """A press in one plot; smaller `cost` and larger `accuracy` are better, both in the units of the axes."""

    label: str
    cost: float
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class Axis:
    """What a plot has on its horizontal axis."""

    title: str
    unit: str
    log: bool


MEMORY = Axis("Cache size, % of the uncompressed cache", "%", log=True)
SPEED = Axis("Time per generated token, ms", " ms", log=False)


def memory_points(summaries: Sequence[PressSummary]) -> list[Point]:
    """Return the presses with their measured bytes relative to an uncompressed cache."""
    return [_point(s, s.accuracy, 100 / s.factor) for s in summaries if s.accuracy and s.factor]


def speed_points(summaries: Sequence[PressSummary]) -> list[Point]:
    """Return the presses with their measured time per generated token."""
    return [
        _point(s, s.accuracy, s.milliseconds_per_token) for s in summaries if s.accuracy and s.milliseconds_per_token
    ]


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other one beats on cost without losing accuracy, cheapest first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.cost, -point.accuracy)):
        if not best or point.accuracy > best[-1].accuracy:
            best.append(point)
    return best


def frontier_svg(points: Sequence[Point], axis: Axis) -> str:
    """Return one plot as an `<svg>` element in the colours of the page around it."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": axis.title}):
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.add_subplot(), points, axis)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    text = out.getvalue()
    # A page has several plots: only names that are unique, by their hash, may stay.
    text = re.sub(r' id="[A-Za-z][\w.]*_\d+"', "", text[text.index("<svg") :])
    for colour, themed in _THEMED.items():
        text = text.replace(colour, themed)
    return text.replace("<svg", f'<svg role="img" aria-label="Accuracy against: {axis.title}"', 1)


def frontier_files(
    summaries: Sequence[PressSummary], formats: Sequence[str] = ("png", "svg", "pdf")
) -> dict[str, bytes]:
    """Return both plots side by side, as a file of each format by its name."""
    files = {}
    with mpl.rc_context({**_STYLE, "svg.hashsalt": "frontier"}):
        figure = Figure(figsize=(13, 5), dpi=150, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        draw(left, memory_points(summaries), MEMORY)
        draw(right, speed_points(summaries), SPEED)
        for name in formats:
            out = io.BytesIO()
            figure.savefig(out, format=name, metadata=_UNDATED.get(name))
            files[f"frontier.{name}"] = out.getvalue()
    return files


def draw(axes: Axes, points: Sequence[Point], axis: Axis) -> None:
    """Draw the presses of one plot: the frontier in colour, what it beats in grey."""
    axes.set_xlabel(axis.title)
    axes.set_ylabel("Accuracy, %")
    axes.set_ylim(-4, 108)
    axes.set_yticks(range(0, 101, 20))
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0)
    if not points:
        axes.text(0.5, 0.5, "no complete results", transform=axes.transAxes, ha="center", color=MUTED)
        return
    best = frontier(points)
    _set_range(axes, [point.cost for point in points], axis)
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
    place_labels(axes, labels, [*steps, *bars])


def _steps(best: Sequence[Point]) -> list[Segment]:
    """Return the line under which a press is beaten: from each point right, then up to the next."""
    steps: list[Segment] = []
    for point, following in pairwise(best):
        steps.append((point.cost, point.accuracy, following.cost, point.accuracy))
        steps.append((following.cost, point.accuracy, following.cost, following.accuracy))
    return steps


def _point(summary: PressSummary, accuracy: Estimate, cost: float) -> Point:
    return Point(summary.press, cost, 100 * accuracy.mean, 100 * accuracy.low, 100 * accuracy.high)


def _set_range(axes: Axes, costs: Sequence[float], axis: Axis) -> None:
    low, high = min(costs), max(costs)
    if axis.log:
        axes.set_xscale("log", base=2)
        axes.set_xlim(low / 1.25, high * 1.7)
        axes.xaxis.set_major_locator(FixedLocator([100 * 2.0**power for power in range(-10, 3)]))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(max(0.0, low - (high - low) * 0.15 - 0.1), high + (high - low) * 0.45 + 0.2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{axis.unit}"))
