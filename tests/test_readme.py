"""The Python examples of the README and the pages about methods run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import kvpress
from kvpress.registry import _entries

README = Path(__file__).parent.parent / "README.md"


def test_examples(capsys: Any) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 3
    kvpress.list_presses()
    known = dict(_entries)
    namespace: dict[str, Any] = {}
    try:
        for block in blocks:
            exec(compile(block, str(README), "exec"), namespace)  # noqa: S102 - our own text
        assert isinstance(kvpress.get_press("value_norm:0.5"), kvpress.ScorerPress)
    finally:
        _entries.clear()
        _entries.update(known)
    assert "bits per value" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["eviction.md", "quantisation.md", "selection.md"])
def test_examples_of_the_pages(page: str, capsys: Any) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (README.parent / "docs" / page).read_text(), flags=re.DOTALL)
    assert blocks
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)  # noqa: S102 - our own text
    assert "bits per value" in capsys.readouterr().out


def test_every_press_is_listed() -> None:
    text = README.read_text()
    for entry in kvpress.list_presses():
        if entry.name != "composed":
            assert f"`{entry.name}" in text, entry.name
        assert entry.press.__doc__
        assert "Differs from the paper:" in entry.press.__doc__
