# SPDX-License-Identifier: Apache-2.0
"""A dry run estimates time and memory of a run by formulas; the run itself confirms them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval.common.errors import ConfigError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run import estimate as module
from kvpress_eval.run.estimate import Machine, estimate, planned, shape_of
from kvpress_eval.run.models import load_engine, read_settings
from kvpress_eval.run.runner import run
from rich.console import Console

from tests.eval.jsonl import write_lines

Small = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a device that multiplies 1e9 numbers and reads 1e8 bytes a second."""
    monkeypatch.setattr(module, "measure_machine", lambda config, dtype: Machine(1e9, 1e8))


def test_the_shape_is_that_of_the_loaded_model() -> None:
    config = RunConfig()
    shape, engine = shape_of(config, read_settings(config)), load_engine(config)
    assert shape.parameters == sum(parameter.numel() for parameter in engine.model.parameters())
    assert shape.weight_bytes == sum(
        parameter.numel() * parameter.element_size() for parameter in engine.model.parameters()
    )
    assert str(shape.geometry.dtype) == f"torch.{engine.dtype}"
    single = RunConfig(dtype="float32")
    assert shape_of(single, read_settings(single)).weight_bytes == 4 * shape.parameters


def test_time_without_results_is_work_over_speed(small: Small) -> None:
    config = small(presses=("none", "knorm:0.5", "kvzip:0.5"), lengths=(512,), samples=10, max_new_tokens=20)
    estimated, shape = estimate(config), shape_of(config, read_settings(config))
    read = (2 * shape.parameters * 512 + 2 * 4 * 256 * 512**2) / 1e9
    answers = [20 * (shape.weight_bytes + press_estimate.cache_bytes) / 1e8 for press_estimate in estimated.presses]
    assert not estimated.measured
    assert [press_estimate.seconds for press_estimate in estimated.presses] == pytest.approx(
        [10 * (read + answer) for answer in answers]
    )
    # `kvzip` does not share the reading of the others.
    assert estimated.seconds == pytest.approx(10 * (2 * read + sum(answers)))


def test_estimated_memory_equals_the_bytes_of_the_run(small: Small, quiet: Console) -> None:
    config = small(
        presses=("none", "knorm:0.5", "kivi:bits=4,group_size=16,residual_length=16"), lengths=(256,), samples=1
    )
    shape = shape_of(config, read_settings(config))
    for press, cell in zip(config.presses, run(config, quiet).cells, strict=True):
        (row,) = cell.rows
        assert planned(config, press, row["context_tokens"], shape).total_bytes == pytest.approx(row["bytes"], rel=0.03)
        assert row["peak_bytes"] == pytest.approx(
            planned(config, press, row["context_tokens"], shape).peak_bytes, rel=0.03
        )
    estimated = estimate(config)
    none, evicting, _ = (press_estimate.peak_bytes for press_estimate in estimated.presses)
    assert none == estimated.presses[0].cache_bytes
    assert none > evicting > estimated.presses[1].cache_bytes
    added = max(item.peak_bytes - item.cache_bytes for item in estimated.presses)
    assert estimated.peak_bytes == estimated.cache_bytes + added > estimated.cache_bytes
    assert [press_estimate.cache_bytes for press_estimate in estimated.presses] == [
        planned(config, press, 256, shape).total_bytes for press in config.presses
    ]


def test_earlier_samples_are_counted_and_timed(small: Small, quiet: Console) -> None:
    config = small(samples=2, lengths=(64, 128))
    cells = run(config, quiet).cells
    more = config.model_copy(update={"samples": 5})
    estimated = estimate(more)
    assert estimated.measured
    assert [(press_estimate.samples, press_estimate.done) for press_estimate in estimated.presses] == [(10, 4), (10, 4)]
    slowest = max(row["measured"]["prefill_seconds"] for cell in cells for row in cell.rows)
    steps = [row["measured"]["seconds_per_token"] or 0 for cell in cells for row in cell.rows]
    assert 0 < estimated.seconds <= 12 * slowest + 12 * more.max_new_tokens * max(steps)  # type: ignore[operator]
    assert estimate(config).seconds == 0


def test_a_press_that_does_not_suit_the_prompt_is_refused(small: Small) -> None:
    with pytest.raises(ConfigError, match=r"press 'protect.*' at 64 tokens: .* past a prompt of 64 tokens"):
        estimate(small(presses=("protect(knorm:0.5):tokens=0:900",)))


def test_the_printed_estimate(small: Small, quiet: Console) -> None:
    estimated: Any = estimate(small(presses=("none", "knorm:0.5")))
    console = Console(file=io.StringIO(), width=120)
    estimated.show(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "knorm:0.5" in text
    assert "at least" in text
    assert "weights 5." in text


def test_tasks_without_a_length_have_no_cache_to_plan(small: Small, tmp_path: Path) -> None:
    write_lines(tmp_path / "test.jsonl", {"question": "How much is 1 + 1?", "answer": "#### 2"})
    estimated = estimate(small(tasks=("gsm8k",), data_dir=tmp_path, samples=1, max_new_tokens=10))
    assert [press_estimate.cache_bytes for press_estimate in estimated.presses] == [None, None]
    assert estimated.cache_bytes == 0
    assert estimated.seconds > 0
