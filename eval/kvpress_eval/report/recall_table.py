# SPDX-License-Identifier: Apache-2.0
"""Table of `kvpress recall` for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from kvpress_eval.common.terminal import MISSING, Name, number, plain_table


def to_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the rows of presses at one length, the full cache first, as a table."""
    headings = ["smaller", "KiB", "exact\n%", "vs none\npoints", "95%", "KL\nmean", "KL worst\ncontext", "NLL"]
    table = plain_table(["press"], headings, caption_justify="left")
    for row in rows:
        table.add_row(
            Name(row["press"]),
            f"{row['factor']:.1f}x",
            number(row["bytes"] / 1024, 0),
            number(100 * row["exact"], 1),
            MISSING if row["change"] is None else f"{100 * row['change']:+.1f}",
            MISSING if row["change"] is None else f"{100 * row['change_low']:+.0f} to {100 * row['change_high']:+.0f}",
            number(row["kl_mean"], 4),
            number(row["kl_worst_context"], 4),
            number(row["nll"], 3),
        )
    table.caption = Text("\n".join(_notes(rows)))
    return table


def _notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines below the table: answers of the full cache by kind of value, and presses that do not compress."""
    by_kind = rows[0]["exact_by_kind"]
    kinds = ", ".join(f"{kind} {100 * share:.0f}" for kind, share in by_kind.items())
    notes = [f"exact answers of the full cache by value, %: {kinds}"] if len(by_kind) > 1 else []
    idle = [row["press"] for row in rows if not row["compressed"]]
    return notes + [f"{press}: not compressed, the contexts are held as they are" for press in idle]
