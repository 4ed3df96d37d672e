# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of `quality.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from kvpress_eval.report.frontier import GRID, INK, MUTED
from kvpress_eval.report.labels import Label, Segment, place_labels
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

# Okabe and Ito's colours, which colour-blind readers can distinguish, and markers for black and white.
COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#000000")
MARKERS = "osD^vPX"
LINES = ("-", (0, (4, 1)), (0, (1, 1)))
STYLE = {"font.family": "sans-serif", "font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID}


def bits_table(study: dict[str, Any]) -> str:
    """Return the first study as Markdown."""
    names = list(study["full"]["tasks"])
    titles = ["press", "bits/value", "KL mean", "KL 99%", "same top token %", "accuracy %", "vs full", *names]
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    for row in study["rows"]:
        tasks = " | ".join(f"{100 * row['tasks'][task]:.0f}" for task in names)
        lines.append(
            f"| {row['press']} | {row['prompt_bits_per_value']:.2f} | {row['kl_mean']:.5f} | {row['kl_p99']:.4f} | "
            f"{100 * row['top1_agreement']:.1f} | {_percent(row)} | {tasks} |"
        )
    return "\n".join(lines)


def composition_table(study: dict[str, Any]) -> str:
    """Return the second study as Markdown."""
    lines = [
        "| press | kept % | smaller by | mean accuracy % | vs full | worst task |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in study["rows"]:
        cells = f"{100 * row['kept']:.0f} | {row['smaller_by']:.2f}"
        task, worst = row["worst"]
        lines.append(f"| {row['press']} | {cells} | {_percent(row)} | {task} {100 * worst:.0f} |")
    return "\n".join(lines)


def _percent(row: dict[str, Any]) -> str:
    """Return the accuracy with its interval, and the difference from the full cache with a star where it is significant."""
    mean, low, high = (100 * row["accuracy"][name] for name in ("mean", "low", "high"))
    delta = row["difference"]
    star = "*" if delta["low"] > 0 or delta["high"] < 0 else ""
    return f"{mean:.1f} ({low:.0f}-{high:.0f}) | {100 * delta['mean']:+.1f}{star}"


def draw_bits(study: dict[str, Any], figure: Figure) -> None:
    """Draw divergence and accuracy over measured bits; open markers leave out tables that all sequences share."""
    divergence_axes, accuracy_axes = figure.subplots(1, 2)
    divergence_axes.set_yscale("log")
    divergence_axes.set_ylabel("KL(full || compressed) per token, nats")
    accuracy_axes.set_ylabel("Accuracy, %, on " + ", ".join(study["full"]["tasks"]))
    lengths = " and ".join(map(str, study["sizes"]["lengths"]))
    divergence_axes.set_title(f"Along {study['sizes']['tokens']} tokens after {study['sizes']['context']}", loc="left")
    accuracy_axes.set_title(f"Contexts of {lengths} tokens, question unseen; dotted: full cache", loc="left")
    labelled = len({row["method"] for row in study["rows"]}) <= len(COLOURS)
    _series(divergence_axes, study["rows"], lambda row: row["kl_mean"], labelled)
    _series(accuracy_axes, study["rows"], lambda row: 100 * row["accuracy"]["mean"], labelled)
    if not labelled:
        figure.legend(
            *divergence_axes.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower center", ncols=8
        )
    accuracy_axes.axhline(100 * study["full"]["accuracy"]["mean"], color=MUTED, linewidth=1, linestyle=":")


def _series(
    axes: Axes, rows: Sequence[dict[str, Any]], height: Callable[[dict[str, Any]], float], labelled: bool
) -> None:
    """Draw a line for each method, with its name next to it if `labelled`; repeated colours are dashed."""
    _prepare(axes)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("Bits per value, all bytes held when the context was read")
    axes.xaxis.set_major_locator(FixedLocator([2, 3, 4, 5, 6, 8, 10]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    labels = []
    for number, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        again, place = divmod(number, len(COLOURS))
        colour, marker, line = COLOURS[place], MARKERS[(place + again) % len(MARKERS)], LINES[again % len(LINES)]
        mine = sorted((row for row in rows if row["method"] == method), key=lambda row: row["prompt_bits_per_value"])
        x, y = [row["prompt_bits_per_value"] for row in mine], [height(row) for row in mine]
        look = {"color": colour, "marker": marker, "linestyle": line}
        axes.plot(x, y, **look, markersize=5.5, markeredgecolor="white", linewidth=1.4, label=method)
        shared = [row["prompt_bits_per_value"] - row["shared_bits_per_value"] for row in mine]
        if shared != x:
            axes.plot(shared, y, color=colour, marker=marker, markerfacecolor="white", linestyle="--", linewidth=0.8)
            labels.append(Label(f"{method} without shared tables", shared[0], y[0], colour))
        labels.append(Label(method, x[0], y[0], colour))
    if labelled:
        place_labels(axes, labels, [dot for line in axes.lines for dot in _dots(axes, line)])


def _dots(axes: Axes, line: Line2D) -> Iterator[Segment]:
    """Yield points along a line that labels should not cover."""
    axes.autoscale_view()
    corners = axes.transData.transform(line.get_xydata())
    at = np.linspace(0, len(corners) - 1, 20 * len(corners))
    dots = np.column_stack([np.interp(at, np.arange(len(corners)), column) for column in corners.T])
    for x, y in axes.transData.inverted().transform(dots):
        yield x, y, x, y


def draw_composition(study: dict[str, Any], figure: Figure) -> None:
    """Draw mean and worst accuracy over the bits of the kept pairs."""
    axes = figure.add_subplot()
    _prepare(axes)
    rows = study["rows"]
    widths = list(dict.fromkeys(row["bits"] for row in rows))
    labels = []
    for scorer, colour, marker in zip(
        dict.fromkeys(row["scorer"] for row in rows), COLOURS[::3], MARKERS, strict=False
    ):
        mine = [row for row in rows if row["scorer"] == scorer]
        x = [widths.index(row["bits"]) for row in mine]
        mean, worst = [100 * row["accuracy"]["mean"] for row in mine], [100 * row["worst"][1] for row in mine]
        bounds = [[100 * row["accuracy"][end] for row in mine] for end in ("low", "high")]
        axes.fill_between(x, *bounds, color=colour, alpha=0.12, linewidth=0)
        axes.plot(x, mean, color=colour, marker=marker, markeredgecolor="white")
        axes.plot(x, worst, color=colour, marker=marker, markerfacecolor="white", linestyle="--", linewidth=1)
        labels += [
            Label(f"{scorer}, mean", x[-1], mean[-1], colour),
            Label(f"{scorer}, worst task", x[-1], worst[-1], colour),
        ]
    axes.set_xticks(range(len(widths)), [f"{bits} bits\n{_kept(rows, bits)} kept" for bits in widths])
    axes.set_xlim(-0.3, 1.35 * len(widths) - 0.9)
    axes.set_ylim(-4, 104)
    axes.set_ylabel("Accuracy, %, question unseen")
    axes.set_title(
        f"A tenth of the bytes of {study['sizes']['lengths'][-1]} tokens, held in different ways", loc="left"
    )
    place_labels(axes, labels, [dot for line in axes.lines for dot in _dots(axes, line)])


def _kept(rows: Sequence[dict[str, Any]], bits: int) -> str:
    shares = sorted({round(100 * row["kept"]) for row in rows if row["bits"] == bits})
    return "-".join(map(str, shares)) + "%"


def _prepare(axes: Axes) -> None:
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, which="both")


def write_figure(
    path: Path, draw: Callable[[dict[str, Any], Figure], None], study: dict[str, Any], width: float
) -> None:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, 5), dpi=150, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        draw(study, figure)
        figure.savefig(path)
