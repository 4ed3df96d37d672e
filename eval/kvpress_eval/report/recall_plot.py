# SPDX-License-Identifier: Apache-2.0
"""Plot the divergence of answers from the full cache against the size of the cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvpress_eval.report.labels import Label, Segment, place_labels
from kvpress_eval.report.plotting import ACCENT, GRID, INK, MUTED, is_narrow, to_svg
from kvpress_eval.results.summary import BASELINE

LEAST = 5e-4
"""Smallest divergence of the axis, in nats."""
MOST_LABELS = 14
"""With more presses than this, only those on the frontier have names."""
_TICKS = (0.5, 1, 2, 3, 5, 10, 20, 50, 100)
_PIECES = 24
"""Pieces of a line between two points, each of which a label avoids."""
_SHORT = 24
"""Characters in a line of a label, on a phone."""

RecallRow = Mapping[str, Any]
"""Row of a press in a record of `kvpress recall`."""


def sizes_svg(rows: Sequence[RecallRow], title: str) -> Markup | None:
    """Return the plot as SVG for a page; None if there is no press besides the full cache."""
    presses = [row for row in rows if row["press"] != BASELINE]
    if not presses:
        return None
    best = frontier(presses)
    named = [row["press"] for row in (presses if len(presses) <= MOST_LABELS else best)]

    def draw(figure: Figure) -> None:
        draw_sizes(
            figure.add_subplot(), presses, [row["press"] for row in best], named, _SHORT if is_narrow(figure) else None
        )

    return to_svg(draw, title)


def frontier(rows: Sequence[RecallRow]) -> list[RecallRow]:
    """Return the Pareto frontier, smallest cache first: rows with less divergence than every smaller cache."""
    best: list[RecallRow] = []
    for row in sorted(rows, key=lambda row: (-row["factor"], row["kl_mean"])):
        if not best or row["kl_mean"] < best[-1]["kl_mean"]:
            best.append(row)
    return best


def draw_sizes(
    axes: Axes, rows: Sequence[RecallRow], coloured: Collection[str], named: Collection[str], width: int | None = None
) -> None:
    """Draw one point for each press, with a dash at its worst context, and a line through the `coloured` ones.

    Only presses of `named` have names; `width` limits the characters of their lines.
    """
    axes.set(xscale="log", yscale="log", xlabel="times smaller", ylabel="KL to the full cache, nats")
    factors = [row["factor"] for row in rows]
    axes.set_xlim(min(factors) / 1.2, 1.8 * max(factors))
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(color=GRID, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    line = sorted((row for row in rows if row["press"] in coloured), key=lambda row: row["factor"])
    axes.plot([row["factor"] for row in line], [_shown(row["kl_mean"]) for row in line], color=ACCENT, zorder=3)
    labels: list[Label] = []
    lines = [piece for start, end in pairwise(line) for piece in _pieces(start, end)]
    for row in rows:
        is_coloured = row["press"] in coloured
        colour = ACCENT if is_coloured else MUTED
        mean, worst = _shown(row["kl_mean"]), _shown(row["kl_worst_context"])
        axes.plot([row["factor"]] * 2, [mean, worst], color=colour, linewidth=0.8, alpha=0.6)
        axes.plot(row["factor"], mean, "o", color=colour, markersize=6 if is_coloured else 4, zorder=4)
        axes.plot(row["factor"], worst, "_", color=colour)
        lines.append((row["factor"], mean, row["factor"], worst))
        if row["press"] in named:
            labels.append(Label(row["press"], row["factor"], mean, INK if is_coloured else MUTED))
    place_labels(axes, sorted(labels, key=lambda label: label.colour != INK), lines, width)


def _pieces(start: RecallRow, end: RecallRow) -> Iterator[Segment]:
    """Yield the corners of short pieces of the line between two points, lower left first, for labels to avoid."""
    factors = np.geomspace(start["factor"], end["factor"], _PIECES + 1).tolist()
    means = np.geomspace(_shown(start["kl_mean"]), _shown(end["kl_mean"]), _PIECES + 1).tolist()
    for (left, right), (first, second) in zip(pairwise(factors), pairwise(means), strict=True):
        yield left, min(first, second), right, max(first, second)


def _shown(divergence: float) -> float:
    return max(LEAST, divergence)
