# SPDX-License-Identifier: Apache-2.0
"""Plot accuracy over the length of the context, and over the ratio of presses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvpress_eval.common.terminal import Name
from kvpress_eval.report.frontier import accuracy_axes
from kvpress_eval.report.plotting import FORMATS, INK, is_narrow, to_files, to_svg
from kvpress_eval.results.summary import BASELINE, PressSummary

_RATIO = re.compile(
    r"(?<=:)(compression_ratio=)?(0(?:\.\d+)?|\.\d+)(?![\w.])|(?<=,)(compression_ratio=)(0?\.\d+)(?![\w.])"
)
"""Ratio in a spec: the first argument, or the argument `compression_ratio`."""
_MARKERS = "osD^vP*X"
_LEGEND = 46
"""Maximum characters in a line of the legend."""


@dataclass(frozen=True)
class AccuracyLine:
    """Accuracies of one press, or of presses that differ in their ratio only."""

    label: str
    """Name in the legend."""
    points: Mapping[float, float]
    """Accuracy by length or ratio."""


def length_lines(summaries: Sequence[PressSummary]) -> list[AccuracyLine]:
    """Return one line per press with its accuracy at each length; presses with a single length are left out."""
    lines = [
        AccuracyLine(
            s.press, {length: value for length, value in sorted(s.lengths.items()) if length and value is not None}
        )
        for s in summaries
    ]
    return [line for line in lines if len(line.points) > 1]


def ratio_lines(summaries: Sequence[PressSummary]) -> list[AccuracyLine]:
    """Return one line per press that has results at several ratios; the press `none` is their point at ratio 0."""
    families: dict[str, dict[float, float]] = {}
    none = next((s.accuracy.mean for s in summaries if s.press == BASELINE and s.accuracy), None)
    for summary in summaries:
        family, ratio = split_ratio(summary.press)
        if ratio is not None and summary.accuracy:
            families.setdefault(family, {})[ratio] = summary.accuracy.mean
    start = {} if none is None else {0.0: none}
    return [
        AccuracyLine(name, dict(sorted((start | points).items())))
        for name, points in families.items()
        if len(points) > 1
    ]


def split_ratio(press: str) -> tuple[str, float | None]:
    """Return a spec with its ratio replaced by `{ratio}`, and the ratio; None unless there is exactly one."""
    matches = list(_RATIO.finditer(press))
    if len(matches) != 1:
        return press, None
    (match,) = matches
    named, value = (match[1] or "", match[2]) if match[2] else (match[3], match[4])
    return f"{press[: match.start()]}{named}{{ratio}}{press[match.end() :]}", float(value)


def length_svg(lines: Sequence[AccuracyLine]) -> Markup:
    """Return the plot over lengths as SVG for a page."""
    return to_svg(lambda figure: _draw_lengths(figure, lines), "Accuracy against length")


def ratio_svg(lines: Sequence[AccuracyLine]) -> Markup:
    """Return the plot over ratios as SVG for a page."""
    return to_svg(lambda figure: _draw_ratios(figure, lines), "Accuracy against ratio")


def line_files(summaries: Sequence[PressSummary], formats: Sequence[str] = FORMATS) -> dict[str, bytes]:
    """Return the plots that have results, as a file of each format by its name."""
    files: dict[str, bytes] = {}
    if lengths := length_lines(summaries):
        files |= to_files(lambda figure: _draw_lengths(figure, lengths), "lengths", (8, 5), formats)
    if ratios := ratio_lines(summaries):
        files |= to_files(lambda figure: _draw_ratios(figure, ratios), "ratios", (8, 5), formats)
    return files


def _draw_lengths(figure: Figure, lines: Sequence[AccuracyLine]) -> None:
    axes = _draw(figure, lines, "Length of the context, tokens")
    lengths = sorted({length for line in lines for length in line.points})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _draw_ratios(figure: Figure, lines: Sequence[AccuracyLine]) -> None:
    _draw(figure, lines, "Compression ratio that was asked for")


def _draw(figure: Figure, lines: Sequence[AccuracyLine], title: str) -> Axes:
    """Draw the lines with a legend below, the best press first; lines of one colour differ in their markers."""
    axes = figure.add_subplot()
    accuracy_axes(axes, title)
    colours = colormaps["tab10"].colors  # type: ignore[attr-defined]
    order = sorted(lines, key=lambda line: -sum(line.points.values()) / len(line.points))
    for number, line in enumerate(order):
        axes.plot(
            list(line.points),
            [100 * value for value in line.points.values()],
            marker=_MARKERS[number // len(colours) % len(_MARKERS)],
            color=INK if line.label == BASELINE else colours[number % len(colours)],
            linestyle="--" if line.label == BASELINE else "-",
            markersize=5,
            linewidth=1.6,
            label="\n".join(Name(line.label).lines(_LEGEND)),
        )
    columns = 1 if is_narrow(figure) or len(order) < 4 else 2
    figure.legend(loc="outside lower left", ncols=columns, frameon=False, fontsize=8)
    return axes
