# SPDX-License-Identifier: Apache-2.0
"""Tables of `kvpress fidelity` for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from kvpress_eval.common.terminal import Name, number, plain_table


@dataclass(frozen=True)
class Figure:
    """Column of a table."""

    heading: str
    """Heading, with line breaks."""
    key: str
    """Key of the value in a row of a record."""
    digits: int
    """Decimals."""
    factor: float = 1.0
    """Factor that the value is multiplied by, such as 100 for per cent."""

    def text(self, row: Mapping[str, Any]) -> str:
        """Return the figure of a row as text; a dash if it was not measured."""
        value = row.get(self.key)
        return number(None if value is None else self.factor * value, self.digits)


FIGURES = (
    Figure("KL\nmean", "kl_mean", 5),
    Figure("KL\n99%", "kl_p99", 4),
    Figure("same top\ntoken %", "top1_agreement", 1, 100),
    Figure("perplexity", "perplexity", 3),
    Figure("bits/value\nprompt", "prompt_bits_per_value", 2),
    Figure("bits/value\nend", "end_bits_per_value", 2),
    Figure("kept\n%", "kept", 0, 100),
)
LAYER_FIGURES = (
    Figure("output error", "output_error", 4),
    Figure("isolated error", "isolated_error", 4),
    Figure("attention recall %", "attention_recall", 1, 100),
)


def to_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Return the rows as a table for the terminal."""
    table = plain_table(["press"], [figure.heading for figure in FIGURES], caption_justify="left")
    notes: list[str] = []
    for row in rows:
        if not notes:
            notes.append(f"perplexity of the full cache: {row['full_perplexity']:.3f}")
        if not row.get("compressed", True):
            notes.append(f"{row['press']}: not compressed, the prompts are held as they are")
        table.add_row(Name(row["press"]), *(figure.text(row) for figure in FIGURES))
    table.caption = Text("\n".join(notes))
    return table


def to_layer_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Return the figures of every layer as a table for the terminal, one section per press."""
    table = plain_table(["press"], ["layer", "output error\nrunning", "output error\nisolated", "attention\nrecall %"])
    for row in rows:
        layers = [
            {figure.key: row[f"{figure.key}_by_layer"][i] for figure in LAYER_FIGURES}
            for i in range(len(row["layers"]))
        ]
        names = [row["press"], *("" for _ in layers)]
        for name, layer, figures in zip(names, [*row["layers"], "mean"], [*layers, row], strict=True):
            table.add_row(Name(name), str(layer), *(figure.text(figures) for figure in LAYER_FIGURES))
    return table
