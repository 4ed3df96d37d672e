# SPDX-License-Identifier: Apache-2.0
"""Contexts stored in a folder are not read again by further runs, and answers are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval.common.errors import OutputError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run import generation
from kvpress_eval.run.runner import prepare, run
from rich.console import Console

from tests.eval.content import content

Small = Callable[..., RunConfig]
PRESSES = ("none", "adakv(snapkv:0.5) + kivi:bits=4,residual_length=32", "kvzip:0.5")


def predictions(config: RunConfig) -> set[tuple[str, str, str, float]]:
    return {
        (row["cell"], row["sample"], row["prediction"], row["kept"])
        for rows in content(config).values()
        for row in rows
    }


def test_no_run_reads_a_context_that_another_one_has_read(
    small: Small, quiet: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = small(presses=PRESSES, tasks=("niah_single",), batch_size=2)
    first = plain.model_copy(update={"out": tmp_path / "first", "prefix_store": tmp_path / "store"})
    later = first.model_copy(update={"out": tmp_path / "later"})
    read: list[int] = []
    reader = generation._read_contexts

    def counted(engine: Any, presses: Any, ids: Any, mask: Any) -> Any:
        read.append(len(presses) * len(ids))
        return reader(engine, presses, ids, mask)

    monkeypatch.setattr(generation, "_read_contexts", counted)
    results = [run(config, quiet) for config in (plain, first, later)]
    assert [result.exit_code for result in results] == [0, 0, 0]
    contexts = plain.samples * len(PRESSES) * len(plain.lengths)
    assert sum(read) == 2 * contexts  # once without a store, once into it, never from it
    assert predictions(plain) == predictions(first) == predictions(later)
    assert results[2].savings.stored == contexts
    assert "came from the prefix store" in str(results[2].savings)
    assert results[1].savings.stored == 0
    seconds = [
        {(c.press, row["sample"]): row["measured"]["prefill_seconds"] for c in result.cells for row in c.rows}
        for result in results[1:]
    ]
    assert seconds[0] == seconds[1]
    # A press that is new to the store alone is read.
    del read[:]
    run(later.model_copy(update={"presses": (*PRESSES, "knorm:0.5"), "out": tmp_path / "more"}), quiet)
    assert sum(read) == plain.samples * len(plain.lengths)


def test_a_store_that_cannot_be_written_is_reported_before_the_model_loads(small: Small, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(OutputError, match="cannot write"):
        prepare(small(prefix_store=tmp_path / "taken"))
