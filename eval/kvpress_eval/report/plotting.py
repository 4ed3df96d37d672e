# SPDX-License-Identifier: Apache-2.0
"""Style and colours of all plots, and their conversion to SVG and files."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, MUTED, GRID, ACCENT = "#1f2933", "#9aa5b1", "#e4e7eb", "#0b69a3"
FORMATS = ("png", "svg", "pdf")
_WIDE, _NARROW = (7.2, 4.6), (4.0, 4.6)
"""Size of a plot in inches, for screens and for phones."""
_THEMED = {
    INK: "var(--ink)",
    MUTED: "var(--faint)",
    GRID: "var(--line)",
    ACCENT: "var(--accent)",
    "#ffffff": "var(--page)",
}
"""CSS variables in place of colours, so that plots follow the light or dark theme of the page."""
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
"""Metadata without a date, so that the same results give the same files."""

Draw = Callable[[Figure], None]
"""Function that draws into an empty figure."""


def to_svg(draw: Draw, title: str) -> Markup:
    """Return a plot as two `<svg>` elements in the colours of the page: one for screens, one for phones."""
    return Markup("\n".join(_element(draw, title, size, name) for size, name in ((_WIDE, "wide"), (_NARROW, "narrow"))))  # noqa: S704


def to_files(draw: Draw, name: str, size: tuple[float, float], formats: Sequence[str] = FORMATS) -> dict[str, bytes]:
    """Return a plot as a file of each format by its name; `size` in inches."""
    files = {}
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, dpi=150, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        draw(figure)
        for kind in formats:
            out = io.BytesIO()
            figure.savefig(out, format=kind, metadata=_UNDATED.get(kind))
            files[f"{name}.{kind}"] = out.getvalue()
    return files


def is_narrow(figure: Figure) -> bool:
    """Return whether a plot is for a phone, so that its texts must be short."""
    return bool(figure.get_figwidth() <= _NARROW[0])


def _element(draw: Draw, title: str, size: tuple[float, float], name: str) -> str:
    with mpl.rc_context({**_STYLE, "svg.hashsalt": f"{title} {name}"}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata=_UNDATED["svg"], transparent=True)
    text = out.getvalue()
    # A page has several plots, so an id must be unique: only ids with a hash stay.
    text = re.sub(r' id="[A-Za-z][\w.]*_\d+"', "", text[text.index("<svg") :])
    for colour, themed in _THEMED.items():
        text = text.replace(colour, themed)
    return text.replace("<svg", f'<svg class="{name}" role="img" aria-label="{title}"', 1)
