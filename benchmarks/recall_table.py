# SPDX-License-Identifier: Apache-2.0
"""Print the figures of `kvpress recall --out FILE` as a Markdown table, one for each length.

    python benchmarks/recall_table.py benchmarks/results/recall_smollm2_1024.json

`docs/real-models.md` holds such a table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COLUMNS = ("press", "smaller", "KiB", "exact %", "vs none", "95%", "KL", "KL, worst context")


def line(row: dict[str, Any]) -> str:
    """Return the row of a press."""
    change, interval = "-", "-"
    if row["change"] is not None:
        change = f"{100 * row['change']:+.1f}"
        interval = f"{100 * row['change_low']:+.0f} to {100 * row['change_high']:+.0f}"
    cells = (
        f"`{row['press']}`", f"{row['factor']:.1f}x", f"{row['bytes'] / 1024:.0f}", f"{100 * row['exact']:.1f}", change,
        interval, f"{row['kl_mean']:.3f}", f"{row['kl_worst_context']:.3f}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of one length."""
    head = ["| " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    return "\n".join([*head, *map(line, rows)])


def main() -> None:
    """Print the tables of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    for cell in json.loads(parser.parse_args().file.read_text())["cells"]:
        print(f"{cell['length']} tokens\n\n{table(cell['rows'])}\n")


if __name__ == "__main__":
    main()
