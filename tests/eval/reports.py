# SPDX-License-Identifier: Apache-2.0
"""Reports of finished runs, and the contents of their pages."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

from kvpress_eval.report.write import to_html
from kvpress_eval.results.leaderboards import make_boards
from kvpress_eval.results.read import Results

ATTACK = "<script>alert('x')</script> & \ud800 \u202e"


class Tags(HTMLParser):
    """Tags, links and ids of a page, in their order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.names: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.names += [value or "" for name, value in attrs if name == "id"]


def page(results: Results) -> str:
    """The report of some results, as HTML."""
    return to_html(results, make_boards(results), ["here"])


def folder_of(out: Path, press: str, task: str) -> Path:
    """The folder of one cell of a run."""
    specs = {path.parent: json.loads(path.read_text()) for path in out.glob("cells/*/cell.json")}
    return next(folder for folder, spec in specs.items() if (spec["press"], spec["task"]) == (press, task))
