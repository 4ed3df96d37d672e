# SPDX-License-Identifier: Apache-2.0
"""Tables and a figure of `kvpress recall --out FILE`.

    python benchmarks/recall_table.py benchmarks/results/recall_smollm2_1024.json
    python benchmarks/recall_table.py FILE ... --figure docs/recall_sizes.png

Without a figure, each length of each file is printed as a Markdown table, as in `docs/real-models.md`. The figure shows the
divergence from the full cache against the size, for the first length of all files; the files must have the same contexts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvpress_eval.report.frontier import GRID, MUTED
from kvpress_eval.report.recall_table import to_markdown
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from benchmarks.quality_figures import COLOURS, write_figure

LEAST = 5e-4
"""Smallest divergence of the axis, nats."""


def main() -> None:
    """Print the tables of files, or draw their figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--figure", type=Path, help="PNG to write")
    options = parser.parse_args()
    records = [json.loads(path.read_text()) for path in options.files]
    if options.figure is not None:
        write_figure(options.figure, draw, joined(records), 9.0)
        return
    for record in records:
        for cell in record["cells"]:
            print(f"{cell['length']} tokens\n\n{to_markdown(cell['rows'])}")


def joined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows of the first length of all records, one for each press.

    Raises:
        ValueError: the records differ in model, contexts or filler.
    """
    names = ("model", "weights", "seed", "filler", "question_aware", "facts", "values")
    first = records[0]
    for record in records[1:]:
        differ = [name for name in names if record[name] != first[name]]
        if differ or record["cells"][0]["length"] != first["cells"][0]["length"]:
            raise ValueError(
                f"the files differ in {', '.join(differ) or 'length'}, so that their presses do not compare"
            )
    rows = {row["press"]: row for record in records for row in record["cells"][0]["rows"]}
    return {"rows": list(rows.values()), "model": first["model"], "length": first["cells"][0]["length"]}


def draw(study: dict[str, Any], figure: Figure) -> None:
    """Draw one point for each press, and a line through the sizes of `frontier`."""
    axes = figure.subplots()
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="times smaller",
        ylabel="KL to the full cache, nats (dot: mean, dash: worst context)",
    )
    rows = [row for row in study["rows"] if row["press"] != "none"]
    ours = sorted((row for row in rows if row["press"].startswith("frontier")), key=lambda row: row["factor"])
    axes.plot([row["factor"] for row in ours], [max(LEAST, row["kl_mean"]) for row in ours], color=COLOURS[0], zorder=3)
    for row in rows:
        colour = COLOURS[0] if row in ours else MUTED
        mean, worst = max(LEAST, row["kl_mean"]), max(LEAST, row["kl_worst_context"])
        axes.plot([row["factor"]] * 2, [mean, worst], color=colour, linewidth=0.8, alpha=0.6)
        axes.plot(row["factor"], mean, "o", color=colour, markersize=7 if row in ours else 4, zorder=4)
        axes.plot(row["factor"], worst, "_", color=colour)
        name = row["press"] if len(row["press"]) <= 42 else f"{row['press'][:39]}..."
        axes.annotate(name, (row["factor"], mean), (5, 3), textcoords="offset points", fontsize=6.5, color=colour)
    axes.set_xlim(right=1.8 * max(row["factor"] for row in rows))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks([1, 2, 5, 10, 20, 50])
    axes.grid(color=GRID, linewidth=0.5)
    axes.set_title(f"{study['model']}, {study['length']} tokens, question unseen", fontsize=9)


if __name__ == "__main__":
    main()
