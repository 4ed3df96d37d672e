# SPDX-License-Identifier: Apache-2.0
"""Tables of benchmarks in the pages of `docs`, between two marks that name them."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def put(page: Path, name: str, text: str) -> None:
    """Write a text between the marks `<!-- name -->` and `<!-- end of name -->` of a page, in place of what is there."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{page.name} must hold {begin} and, behind it, {end}")
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")
