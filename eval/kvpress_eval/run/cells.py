# SPDX-License-Identifier: Apache-2.0
"""The cells of a run: a press on a task at a length, named by the hash of all that decides the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import kvpress
from kvpress.core.spec import own_code
from kvpress_eval.common.files import hash_json
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.store import CODE, SCHEMA
from kvpress_eval.tasks.source import Source


@dataclass(frozen=True)
class Cell:
    """A press on a task; `spec` is everything that decides the result, `id` its hash."""

    press: str
    source: Source
    spec: Mapping[str, Any]
    id: str

    @property
    def label(self) -> str:
        """How progress lines and error messages call the cell."""
        return f"{self.press} on {self.place}"

    @property
    def place(self) -> str:
        """Task, length and depth in words."""
        length = f" at {self.source.length}" if self.source.length else ""
        return f"{self.source.task}{length}{self.where}"

    @property
    def weight(self) -> int:
        """How much work a sample is, beside those of other cells: its tokens."""
        return max(1, self.source.length)

    @property
    def depth(self) -> float | None:
        """Where the answer is hidden, if the run says so."""
        return self.spec.get("depth")

    @property
    def where(self) -> str:
        """The depth in words."""
        return "" if self.depth is None else f", depth {self.depth:g}"


def make_cells(config: RunConfig, sources: Sequence[Source], fingerprint: str, device: str, dtype: str) -> list[Cell]:
    """Return the cells of a run, press by press; the last three arguments say which weights ran how."""
    shared = {
        "schema": SCHEMA,
        "kvpress": kvpress.__version__,
        "model": config.model,
        "weights": fingerprint,
        "device": device,
        "dtype": dtype,
        "question_aware": config.question_aware,
        "batch_size": config.batch_size,
        "max_seconds_per_sample": config.max_seconds_per_sample,
    }
    cells = []
    for press in config.presses:
        code = own_code(kvpress.get_press(press))
        for source in sources:
            own = {**source.identity, "max_new_tokens": source.max_new_tokens, **({CODE: code} if code else {})}
            spec = {**shared, **own, "press": press, "task": source.task, "length": source.length}
            cells.append(Cell(press, source, spec, hash_json(spec)[:16]))
    return cells
