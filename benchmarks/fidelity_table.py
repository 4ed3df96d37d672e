# SPDX-License-Identifier: Apache-2.0
"""Table of `kvpress fidelity --out FILE` for a page: divergence, its worst text, and the change of perplexity.

    python -m benchmarks.fidelity_table benchmarks/results/fidelity_smollm2_essays.json [LATER.json ...]

Tables of running text in `docs/real-models.md` are made so. Rows of a later file replace those of the same press.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvpress_eval.report.table import markdown

SETTINGS = ("weights", "dtype", "context", "tokens", "first_tokens", "text", "texts")
"""Fields of a record that figures of several files must share."""
HEADINGS = ("press", "smaller", "KL mean", "KL worst text", "KL first 16", "same top token %", "perplexity %", "95%")


def joined(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of all records, one for each press, the last one where several have it.

    Raises:
        ValueError: the records differ in model, texts or lengths.
    """
    records = list(records)
    settings = [{name: record[name] for name in SETTINGS} for record in records]
    if any(other != settings[0] for other in settings):
        raise ValueError(f"the files differ in {', '.join(SETTINGS)}, so that their presses do not compare: {settings}")
    return list({row["press"]: row for record in records for row in record["rows"]}.values())


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
    print(to_markdown(joined(json.loads(file.read_text()) for file in parser.parse_args().files)))


if __name__ == "__main__":
    main()
