# SPDX-License-Identifier: Apache-2.0
"""Table of `kvpress recall`, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from kvpress_eval.common.terminal import MISSING, Name, number, plain_table
from kvpress_eval.report.table import markdown
from kvpress_eval.results.summary import BASELINE

HEADINGS = ("smaller", "KiB", "exact\n%", "vs none\npoints", "95%", "KL\nmean", "KL worst\ncontext", "NLL")
"""Headings of the columns of figures."""


def to_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the rows of presses at one length, the full cache first, as a table."""
    table = plain_table(["press"], HEADINGS, caption_justify="left")
    for row in rows:
        table.add_row(Name(row["press"]), *(text for text, _ in cells(row)))
    table.caption = Text("\n".join(notes(rows)))
    return table


def to_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of presses at one length as a Markdown table, with the notes below it."""
    headings = ["press", *(heading.replace("\n", " ") for heading in HEADINGS)]
    aligned = ["---", *("---:" for _ in HEADINGS)]
    return markdown(
        headings, aligned, [[row["press"], *(text for text, _ in cells(row))] for row in rows], "\n".join(notes(rows))
    )


def cells(row: Mapping[str, Any]) -> list[tuple[str, float | None]]:
    """Return the figures of a press, each as text and as the number to sort by, one for each of `HEADINGS`."""
    compared = row["change"] is not None
    change = f"{100 * row['change']:+.1f}" if compared else MISSING
    interval = f"{100 * row['change_low']:+.0f} to {100 * row['change_high']:+.0f}" if compared else MISSING
    return [
        (f"{row['factor']:.1f}x", row["factor"]),
        (number(row["bytes"] / 1024, 0), row["bytes"]),
        (number(100 * row["exact"], 1), row["exact"]),
        (change, row["change"]),
        (interval, row["change_low"]),
        (number(row["kl_mean"], 4), row["kl_mean"]),
        (number(row["kl_worst_context"], 4), row["kl_worst_context"]),
        (number(row["nll"], 3), row["nll"]),
    ]


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines below the table: answers of the full cache by kind of value, and presses that do not compress."""
    by_kind: Mapping[str, float] = next((row["exact_by_kind"] for row in rows if row["press"] == BASELINE), {})
    kinds = ", ".join(f"{kind} {100 * share:.0f}" for kind, share in by_kind.items())
    lines = [f"exact answers of the full cache by value, %: {kinds}"] if len(by_kind) > 1 else []
    idle = [row["press"] for row in rows if not row["compressed"]]
    return lines + [f"{press}: not compressed, the contexts are held as they are" for press in idle]
