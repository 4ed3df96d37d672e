# SPDX-License-Identifier: Apache-2.0
"""Write tables of benchmarks into the pages of `docs`, between two marks with their name."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def put(page: Path, name: str, text: str) -> None:
    """Replace the text between the marks `<!-- name -->` and `<!-- end of name -->` of a page."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, remainder = page.read_text().partition(begin)
    _, end_mark, after = remainder.partition(end)
    if not end_mark:
        raise ValueError(f"{page.name} must have the mark {begin}, followed by {end}")
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")
