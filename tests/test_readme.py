# SPDX-License-Identifier: Apache-2.0
"""Examples and tables of the README and of the pages are those of the code and of the measured figures."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from kvpress_eval.console import app
from transformers import LlamaConfig

import kvpress
from kvpress.cache.report import format_bytes, parse_bytes
from kvpress.core.registry import _entries
from kvpress.hf.models import parameters_of_config
from kvpress.plan import Geometry, longest_context, plan

README = Path(__file__).parent.parent / "README.md"
DOCS = README.parent / "docs"


@pytest.fixture
def registered() -> Iterator[None]:
    """Remove the presses that the examples register."""
    kvpress.list_presses()
    registry = dict(_entries)
    yield
    _entries.clear()
    _entries.update(registry)


MOST_WORDS = 1000


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= MOST_WORDS


@pytest.mark.usefixtures("registered")
def test_examples(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples run, and print the text that follows them."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```\s*(?:```text\n(.*?)```)?", README.read_text(), flags=re.DOTALL)
    assert [bool(output) for _, output in blocks] == [True, False]
    namespace: dict[str, Any] = {}
    for block, output in blocks:
        exec(compile(block, str(README), "exec", dont_inherit=True), namespace)  # noqa: S102 - our own text
        assert capsys.readouterr().out == output
    assert isinstance(kvpress.get_press("value_norm:0.5"), kvpress.ScorerPress)


def test_composed_specs_and_commands_parse() -> None:
    text = README.read_text()
    composed = text[text.index("## Compose") : text.index("## Your own press")]
    specs = [*re.findall(r"--press (\w+:?[\w=.]*)", text), *re.findall(r"`([a-z_]+[(:][^`]+)`", composed)]
    assert len(specs) == 6
    for spec in specs:
        if spec != "value_norm:0.5":
            kvpress.get_press(spec)
    commands = getattr(typer.main.get_command(app), "commands")  # noqa: B009
    for line in re.findall(r"^kvpress (.*?)(?:\s+#.*)?$", text, flags=re.MULTILINE):
        name, *arguments = shlex.split(line)
        commands[name].make_context(name, arguments)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    "page",
    [
        "agents.md", "calibration.md", "conversations.md", "diffusion.md", "eviction.md", "files.md", "frontier.md",
        "generate.md", "parallel.md", "prefill.md", "quantisation.md", "rollback.md", "selection.md", "serving.md",
        "speculation.md", "streaming.md", "vision.md", "which.md", "lab/codecs-fitted.md",
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


def geometry_of_8b() -> tuple[Geometry, int]:
    """Return the cache of a model of 8 billion parameters, and the bytes beside its weights in 24 GB."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, dtype="bfloat16",
    )  # fmt: skip
    geometry = Geometry.of(config)
    return geometry, parse_bytes("24GB", "memory") - parameters_of_config(config) * geometry.dtype.itemsize


def test_sizes_by_goal_equal_the_plan() -> None:
    geometry, _ = geometry_of_8b()
    rows = re.findall(r"^\| [^|`]+ \| `(\S+)` \| (\S+ GiB) \| (\S+ GiB) \|$", README.read_text(), flags=re.MULTILINE)
    assert len(rows) == 6
    for spec, held, peak in rows:
        planned = plan(kvpress.get_press(spec), geometry, 131072)
        assert (held, peak) == (format_bytes(planned.total_bytes), format_bytes(planned.peak_bytes)), spec
    assert format_bytes(plan(kvpress.get_press("none"), geometry, 131072).total_bytes) == "16.0 GiB"


def test_the_table_of_a_real_size_equals_the_plan() -> None:
    geometry, room = geometry_of_8b()
    text = (DOCS / "memory.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)` \| (\S+ GiB) \| (\S+ GiB) \| (\S+) \|$", text, flags=re.MULTILINE)
    assert len(rows) == 6
    for spec, total, peak, longest in rows:
        press = kvpress.get_press(spec)
        planned = plan(press, geometry, 131072)
        assert (total, peak) == (format_bytes(planned.total_bytes), format_bytes(planned.peak_bytes)), spec
        assert longest == f"{longest_context(press, geometry, room):,}", spec


def measured() -> dict[str, dict[str, Any]]:
    """Return the rows of the pretrained model by press."""
    results = DOCS.parent / "benchmarks" / "results"
    records = [json.loads((results / f"recall_smollm2_1024_{name}.json").read_text()) for name in ("unseen", "narrow")]
    return {row["press"]: row for record in records for row in record["cells"][0]["rows"]}


def test_accuracy_of_the_readme_is_measured() -> None:
    rows = re.findall(r"^\| `(\S+)` \| (\S+)x \| (\S+) \| (\S+) \|$", README.read_text(), flags=re.MULTILINE)
    assert len(rows) == 9
    figures = measured()
    widths = []
    for spec, smaller, exact, divergence in rows:
        row = figures[spec]
        assert (smaller, exact, divergence) == (
            f"{row['factor']:.1f}", f"{100 * row['exact']:.1f}", f"{row['kl_mean']:.4f}"
        ), spec  # fmt: skip
        if spec != "none":
            widths.append(100 * (row["change_high"] - row["change_low"]))
    assert f"{min(widths):.0f} to {max(widths):.0f} points wide" in README.read_text()


def test_accuracy_of_codecs_is_measured() -> None:
    text = (DOCS / "quantisation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)` \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", text, flags=re.MULTILINE)
    assert len(rows) == 5
    figures = measured()
    for spec, bits, exact, *divergences in rows:
        row = figures[spec]
        assert bits == f"{16 / row['factor']:.2f}", spec
        assert exact == f"{100 * row['exact']:.1f}", spec
        assert divergences == [f"{row[name]:.4f}" for name in ("kl_mean", "kl_worst_context")], spec


def test_every_docstring_ends_with_the_differences() -> None:
    for entry in kvpress.list_presses():
        assert entry.press.__doc__
        assert "Differs from the paper:" in entry.press.__doc__
