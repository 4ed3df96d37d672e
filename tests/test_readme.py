"""The Python examples of the README and the pages about methods run as they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpress
from kvpress.core.registry import _entries

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture
def registered() -> Iterator[None]:
    """Forget what the examples register."""
    kvpress.list_presses()
    known = dict(_entries)
    yield
    _entries.clear()
    _entries.update(known)


@pytest.mark.usefixtures("registered")
def test_examples(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 3
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec", dont_inherit=True), namespace)  # noqa: S102 - our own text
    assert isinstance(kvpress.get_press("value_norm:0.5"), kvpress.ScorerPress)
    assert "bits per value" in capsys.readouterr().out


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    "page",
    [
        "conversations.md", "design.md", "eviction.md", "files.md", "frontier.md", "parallel.md", "prefill.md",
        "quantisation.md", "rollback.md", "selection.md",
    ],
)  # fmt: skip
def test_examples_of_the_pages(page: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (README.parent / "docs" / page).read_text(), flags=re.DOTALL)
    assert blocks
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page, "exec", dont_inherit=True), namespace)  # noqa: S102 - our own text
    assert "bits per value" in capsys.readouterr().out


def test_every_press_is_listed() -> None:
    text = README.read_text()
    for entry in kvpress.list_presses():
        if entry.name != "composed":
            assert f"`{entry.name}" in text, entry.name
        assert entry.press.__doc__
        assert "Differs from the paper:" in entry.press.__doc__
