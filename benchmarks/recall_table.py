# SPDX-License-Identifier: Apache-2.0
"""Tables and a figure of `kvpress recall --out FILE`.

    python benchmarks/recall_table.py benchmarks/results/recall_smollm2_1024.json
    python benchmarks/recall_table.py FILE ... --figure docs/recall_sizes.png
    python benchmarks/recall_table.py FILE --codecs --figure docs/codecs_smollm2.png
    python benchmarks/recall_table.py half.json more.json --by-size [--page docs/accuracy.md]
    python benchmarks/recall_table.py half.json fourth.json tenth.json --by-ratio [--page docs/accuracy.md]

Without a figure, each length of each file is printed as a Markdown table, as in `docs/real-models.md`. With `--by-size`, the
presses of all files are printed in tables of about equal size, closest to the full cache first, or put into a page; with
`--by-ratio`, the presses with a ratio are rows of one table, with the figures of each file side by side. The figure shows the
divergence from the full cache against the size. All of these take the first length of all files, which must have the same
contexts.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from kvpress_eval.report.plotting import GRID
from kvpress_eval.report.recall_plot import draw_sizes
from kvpress_eval.report.recall_table import to_markdown
from kvpress_eval.results.summary import BASELINE
from matplotlib.figure import Figure

from benchmarks.pages import put
from benchmarks.quality_figures import COLOURS, write_figure

BANDS = (
    (4.5, "More than 4.5 times smaller"),
    (3.5, "3.5 to 4.5 times smaller"),
    (2.5, "2.5 to 3.5 times smaller"),
    (1.75, "1.75 to 2.5 times smaller"),
    (1.05, "1.05 to 1.75 times smaller"),
    (0.0, "All pairs in 16 bits"),
)
"""Least times smaller of the presses in a table, and its heading."""

RATIO = re.compile(r":(0\.\d+)")
"""Ratio of a spec."""
CODEC = re.compile(r"(kivi|rotated|turboquant):bits=\d")
"""Spec of a codec alone, whose name is the first group."""
LABELLED = (
    "kvzip:0.5", "kvzip:0.75", "kivi:bits=4", "kivi:bits=2", "rotated:bits=4", "turboquant:bits=3", "snapkv:0.5", "keydiff:0.5",
    "expected_attention:0.5,epsilon=0.02", "quest:budget=128,page_size=4", "budgeted(compactor):smaller=10",
)  # fmt: skip
"""Presses whose points have names; more names would overlap at the width of a page."""


def main() -> None:
    """Print the tables of files, or draw their figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--figure", type=Path, help="PNG to write")
    parser.add_argument("--codecs", action="store_true", help="draw codecs alone, against held bits for each value")
    parser.add_argument("--by-size", action="store_true", help="print tables of presses of about equal size")
    parser.add_argument("--by-ratio", action="store_true", help="print a table of presses with the ratios of all files")
    parser.add_argument("--page", type=Path, help="page in which these tables between two marks are replaced")
    options = parser.parse_args()
    records = [json.loads(path.read_text()) for path in options.files]
    if options.figure is not None:
        write_figure(options.figure, draw_codecs if options.codecs else draw, joined(records), 9.0)
        return
    if options.by_size or options.by_ratio:
        rows = joined(records)["rows"]
        name, text = ("recall", by_size(rows)) if options.by_size else ("ratios", by_ratio(rows))
        if options.page is None:
            print(text)
        else:
            put(options.page, name, text)
        return
    for record in records:
        for cell in record["cells"]:
            print(f"{cell['length']} tokens\n\n{to_markdown(cell['rows'])}")


def joined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows of the first length of all records, one for each press.

    Raises:
        ValueError: the records differ in model, contexts or filler.
    """
    names = ("model", "weights", "seed", "filler", "question_aware", "facts", "values", "contexts")
    first = records[0]
    for record in records[1:]:
        differ = [name for name in names if record[name] != first[name]]
        if differ or record["cells"][0]["length"] != first["cells"][0]["length"]:
            raise ValueError(
                f"the files differ in {', '.join(differ) or 'length'}, so that their presses do not compare"
            )
    rows = {row["press"]: row for record in records for row in record["cells"][0]["rows"]}
    return {"rows": list(rows.values()), "model": first["model"], "length": first["cells"][0]["length"]}


def by_size(rows: list[dict[str, Any]]) -> str:
    """Return the rows as one table for each of `BANDS`, in the order of their mean KL, with the full cache first."""
    full = next(row for row in rows if row["press"] == BASELINE)
    above, tables = float("inf"), []
    for least, heading in BANDS:
        band = [row for row in rows if least <= row["factor"] < above and row["press"] != BASELINE]
        above = least
        if band:
            ordered = sorted(band, key=lambda row: row["kl_mean"])
            tables.append(f"### {heading}\n\n{to_markdown([full, *ordered]).strip()}\n")
    return "\n".join(tables)


def by_ratio(rows: list[dict[str, Any]]) -> str:
    """Return one table of the presses with a ratio: exact answers and KL for each ratio, closest at the largest one first."""
    presses: dict[str, dict[float, dict[str, Any]]] = {}
    for row in rows:
        if match := RATIO.search(row["press"]):
            presses.setdefault(RATIO.sub(":R", row["press"], count=1), {})[float(match[1])] = row
    ratios = sorted({ratio for measured in presses.values() for ratio in measured})
    presses = {press: measured for press, measured in presses.items() if len(measured) == len(ratios)}
    headings = [f"R = {ratio:g}: {name}" for ratio in ratios for name in ("exact %", "KL")]
    lines = [f"| press | {' | '.join(headings)} |", "| --- |" + " ---: |" * len(headings)]
    for press, measured in sorted(presses.items(), key=lambda item: item[1][ratios[-1]]["kl_mean"]):
        figures = [f"{100 * measured[r]['exact']:.0f} | {measured[r]['kl_mean']:.4f}" for r in ratios]
        lines.append(f"| {press} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def draw(study: dict[str, Any], figure: Figure) -> None:
    """Draw one point for each press, and a line through the sizes of `frontier`."""
    axes = figure.subplots()
    rows = [row for row in study["rows"] if row["press"] != BASELINE]
    ours = [row["press"] for row in rows if row["press"].startswith("frontier")]
    draw_sizes(axes, rows, ours, (*ours, *LABELLED))
    axes.set_title(
        f"{study['model']}, {study['length']} tokens, question unseen. Blue: frontier; grey: other presses. "
        "Dot: mean; dash: worst context",
        fontsize=10,
    )


def draw_codecs(study: dict[str, Any], figure: Figure) -> None:
    """Draw one line for each codec that was measured alone, its divergence against the held bits for each value."""
    axes = figure.subplots()
    axes.set(yscale="log", xlabel="held bits for each value (full cache: 16)", ylabel="KL to the full cache, nats")
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in study["rows"]:
        if match := CODEC.fullmatch(row["press"]):
            lines.setdefault(match[1], []).append(row)
    for colour, (name, rows) in zip(COLOURS, sorted(lines.items()), strict=False):
        points = sorted((16 / row["factor"], row["kl_mean"], row["press"]) for row in rows)
        axes.plot([bits for bits, *_ in points], [mean for _, mean, _ in points], "o-", color=colour, label=name)
        for bits, mean, press in points:
            axes.annotate(press, (bits, mean), (7, 5), textcoords="offset points", fontsize=10, color=colour)
    axes.margins(x=0.25)
    axes.grid(color=GRID, linewidth=0.5)
    axes.set_title(f"{study['model']}, {study['length']} tokens, question unseen, every pair kept", fontsize=10)


if __name__ == "__main__":
    main()
