# SPDX-License-Identifier: Apache-2.0
"""Python examples of the README and of the pages about methods run as they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

import kvpress
from kvpress.cache.report import format_bytes, parse_bytes
from kvpress.core.registry import _entries
from kvpress.hf.models import parameters_of_config
from kvpress.plan import Geometry, longest_context, plan

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture
def registered() -> Iterator[None]:
    """Remove the presses that the examples register."""
    kvpress.list_presses()
    registry = dict(_entries)
    yield
    _entries.clear()
    _entries.update(registry)


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
        "conversations.md", "diffusion.md", "eviction.md", "files.md", "frontier.md", "parallel.md", "prefill.md",
        "quantisation.md", "rollback.md", "selection.md", "serving.md", "speculation.md", "vision.md", "which.md",
        *(f"extend/{name}.md" for name in ("scorer", "observer", "budget", "codec", "selector", "pattern")),
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


def test_the_table_of_a_real_size_equals_the_plan() -> None:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, dtype="bfloat16",
    )  # fmt: skip
    geometry = Geometry.of(config)
    room = parse_bytes("24GB", "memory") - parameters_of_config(config) * geometry.dtype.itemsize
    rows = re.findall(r"^\| `(\S+)` \| (\S+ GiB) \| (\S+ GiB) \| (\S+) \|$", README.read_text(), flags=re.MULTILINE)
    assert len(rows) == 5
    for spec, total, peak, longest in rows:
        press = kvpress.get_press(spec)
        planned = plan(press, geometry, 131072)
        assert (total, peak) == (format_bytes(planned.total_bytes), format_bytes(planned.peak_bytes)), spec
        assert longest == f"{longest_context(press, geometry, room):,}", spec


def test_every_press_is_listed() -> None:
    text = README.read_text()
    for entry in kvpress.list_presses():
        if entry.name != "composed":
            assert f"`{entry.name}" in text, entry.name
        assert entry.press.__doc__
        assert "Differs from the paper:" in entry.press.__doc__
