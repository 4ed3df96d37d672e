# SPDX-License-Identifier: Apache-2.0
"""Table of `kvpress fidelity --out FILE` for a page: divergence, its worst text, and the change of perplexity.

    python -m benchmarks.fidelity_table benchmarks/results/fidelity_smollm2_essays.json

Tables of running text in `docs/real-models.md` are made so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvpress_eval.report.table import markdown

HEADINGS = ("press", "smaller", "KL mean", "KL worst text", "KL first 16", "same top token %", "perplexity %", "95%")


def to_markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows of a record as a Markdown table; `smaller` is 16 bits over those held for each value after the prompt."""
    aligned = ["---", *("---:" for _ in HEADINGS[1:])]
    return markdown(HEADINGS, aligned, [_cells(row) for row in rows], "")


def _cells(row: Mapping[str, Any]) -> list[str]:
    low, high = row["perplexity_change_low"], row["perplexity_change_high"]
    return [
        row["press"],
        f"{16 / row['prompt_bits_per_value']:.1f}x",
        f"{row['kl_mean']:.4f}",
        f"{row['kl_worst']:.4f}",
        f"{row['kl_first']:.4f}",
        f"{100 * row['top1_agreement']:.1f}",
        f"{100 * row['perplexity_change']:+.1f}",
        "-" if low is None or high is None else f"{100 * low:+.1f} to {100 * high:+.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    for file in parser.parse_args().files:
        print(to_markdown(json.loads(file.read_text())["rows"]))


if __name__ == "__main__":
    main()
