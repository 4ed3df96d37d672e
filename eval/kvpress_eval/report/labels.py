# SPDX-License-Identifier: Apache-2.0
"""Place labels beside the points of a plot, so that they cover neither each other nor a point.

`adjustText` moves labels by forces until a time limit, one second by default: the same results could give another file on a
slower machine, and the cost of covering a point cannot be set. Here each label takes the best of eighty positions, the most
important label first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from kvpress_eval.common.terminal import Name

FONT_SIZE = 8.0
_RADII = (6, 12, 20, 30, 42, 56, 72, 90)
_ANGLES = (0, 30, -30, 60, -60, 90, -90, 150, -150, 180)
Segment = tuple[float, float, float, float]
"""Line from (x, y) to (x, y)."""
_COVERS_LABEL, _COVERS_POINT, _COVERS_LINE, _OUTSIDE = 1000, 400, 15, 2000


@dataclass(frozen=True)
class Label:
    """Text for the point (x, y), in data coordinates."""

    text: str
    x: float
    y: float
    colour: str


@dataclass(frozen=True, order=True)
class _Box:
    """Rectangle in typographic points."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, box: _Box) -> bool:
        return self.left < box.right and box.left < self.right and self.bottom < box.top and box.bottom < self.top

    def inside(self, box: _Box) -> bool:
        return self.left >= box.left and self.right <= box.right and self.bottom >= box.bottom and self.top <= box.top


def place_labels(axes: Axes, labels: Sequence[Label], lines: Sequence[Segment], width: int | None = None) -> None:
    """Write each label at the best position near its point; earlier labels are placed first.

    `lines` are horizontal or vertical segments that labels should not cover. `width` limits the characters of a line; without
    it a line ends before each `+` of a composition.
    """
    figure = axes.get_figure(root=True)
    if figure is None:
        raise ValueError("the axes belong to no figure")
    figure.draw_without_rendering()
    scale = 72 / figure.dpi

    def to_points(x: float, y: float) -> tuple[float, float]:
        at = axes.transData.transform((x, y)) * scale
        return float(at[0]), float(at[1])

    frame = axes.get_window_extent()
    room = _Box(frame.x0 * scale, frame.y0 * scale, frame.x1 * scale, frame.y1 * scale)
    points, line_boxes = [], []
    for label in labels:
        x, y = to_points(label.x, label.y)
        points.append(_Box(x - 4, y - 4, x + 4, y + 4))
    for x0, y0, x1, y1 in lines:
        (left, bottom), (right, top) = to_points(x0, y0), to_points(x1, y1)
        line_boxes.append(_Box(left - 1, bottom - 1, right + 1, top + 1))
    label_boxes: list[_Box] = []
    for label in labels:
        text = label.text.replace(" + ", "\n+ ") if width is None else "\n".join(Name(label.text).lines(width))
        x, y = to_points(label.x, label.y)
        _, dx, dy, box = min(
            (_cost(box, room, label_boxes, points, line_boxes) + radius, dx, dy, box)
            for radius, dx, dy, box in _places(text, x, y)
        )
        label_boxes.append(box)
        needs_arrow = math.hypot(dx, dy) > _RADII[1]
        axes.annotate(
            text,
            (label.x, label.y),
            (dx, dy),
            textcoords="offset points",
            ha=_anchor(dx),
            va="center",
            fontsize=FONT_SIZE,
            linespacing=1.2,
            color=label.colour,
            arrowprops={"arrowstyle": "-", "color": label.colour, "lw": 0.5, "alpha": 0.6} if needs_arrow else None,
        )


def _places(text: str, x: float, y: float) -> Iterator[tuple[int, float, float, _Box]]:
    lines = text.split("\n")
    width, height = 0.56 * FONT_SIZE * max(map(len, lines)), 1.25 * FONT_SIZE * len(lines)
    for radius in _RADII:
        for angle in _ANGLES:
            dx = round(radius * math.cos(math.radians(angle)), 3)
            dy = math.sin(math.radians(angle)) * (radius + height / 2 - FONT_SIZE / 2)
            left = x + dx - {"left": 0.0, "center": width / 2, "right": width}[_anchor(dx)]
            yield radius, dx, dy, _Box(left, y + dy - height / 2, left + width, y + dy + height / 2)


def _anchor(dx: float) -> str:
    return "center" if dx == 0 else "left" if dx > 0 else "right"


def _cost(box: _Box, room: _Box, label_boxes: Sequence[_Box], points: Sequence[_Box], lines: Sequence[_Box]) -> int:
    cost = 0 if box.inside(room) else _OUTSIDE
    cost += _COVERS_LABEL * sum(map(box.overlaps, label_boxes))
    cost += _COVERS_POINT * sum(map(box.overlaps, points))
    return cost + _COVERS_LINE * sum(map(box.overlaps, lines))
