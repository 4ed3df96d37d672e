# SPDX-License-Identifier: Apache-2.0
"""Print the figures of `kvpress recall --out FILE` as a Markdown table, one for each length.

    python benchmarks/recall_table.py benchmarks/results/recall_smollm2_1024.json

`docs/real-models.md` holds such a table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvpress_eval.report.recall_table import to_markdown


def main() -> None:
    """Print the tables of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    for cell in json.loads(parser.parse_args().file.read_text())["cells"]:
        print(f"{cell['length']} tokens\n\n{to_markdown(cell['rows'])}")


if __name__ == "__main__":
    main()
