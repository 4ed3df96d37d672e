# SPDX-License-Identifier: Apache-2.0
"""Output of commands that run no model: names on narrow lines, and the list of presses."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

import kvpress
import kvpress.cli
from kvpress.core.listing import ListedPress, _read, files_of
from kvpress.core.registry import ORDER, PACKAGES
from kvpress.terminal import Name

LONG = "compactor:0.75 + kivi:bits=4,residual_length=32 + quest:budget=128"


def test_the_list_is_the_registry() -> None:
    read = [line for package in PACKAGES for path in files_of(package) for line in _read(path)]
    shipped = [entry for entry in kvpress.list_presses() if entry.press.__module__.startswith("kvpress.")]
    assert sorted(read, key=lambda line: (ORDER.index(line.role), line.name)) == [
        ListedPress(entry.name, entry.role, entry.paper, entry.summary, entry.status) for entry in shipped
    ]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (80, [LONG]),
        (26, ["compactor:0.75 + kivi:", "bits=4,residual_length=32", "+ quest:budget=128"]),
        (18, ["compactor:0.75 +", "kivi:bits=4,", "residual_length=32", "+ quest:budget=128"]),
        (11, ["compactor:", "0.75 +", "kivi:", "bits=4,", "residual_", "length=32 +", "quest:", "budget=128"]),
    ],
)
def test_lines_of_a_name_end_between_its_parts(width: int, lines: list[str]) -> None:
    assert Name(LONG).lines(width) == lines


def test_only_a_word_without_room_is_broken() -> None:
    assert Name("expected_attention:0.5").lines(6) == ["expect", "ed_", "attent", "ion:", "0.5"]
    assert Name("").lines(4) == [""]


def test_numbers_keep_their_room_beside_a_long_name() -> None:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("press")
    table.add_column("figure", no_wrap=True)
    table.add_row(Name(LONG), "1234567890 KiB")
    console = Console(file=io.StringIO(), width=40)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    first, *remaining = (line.rstrip() for line in console.file.getvalue().splitlines()[1:])
    assert first == "compactor:0.75 + kivi:   1234567890 KiB"
    assert remaining == ["bits=4,", "residual_length=32 +", "quest:budget=128"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_list_fits_the_terminal_without_cutting_a_summary(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(kvpress.cli, "new_console", lambda: console)
    kvpress.cli.list_command(words=None, status="recommended", role=None, as_json=False)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).replace("│", " ").split())
    assert "…" not in text
    assert ("arXiv:2404.14469" in text) == (width > 100)
