# SPDX-License-Identifier: Apache-2.0
"""The cells of a run: a press on a task at a length, named by the hash of all that decides the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import kvpress
from kvpress.core.spec import own_digest
from kvpress_eval.common.files import hash_json
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.store import CODE, SCHEMA
from kvpress_eval.tasks.source import Source


@dataclass(frozen=True)
class Cell:
    """A press on a task at a length."""

    press: str
    source: Source
    spec: Mapping[str, Any]
    """Everything that decides the result."""
    id: str
    """Hash of `spec`."""

    @property
    def label(self) -> str:
        """Name of the cell in progress lines and error messages."""
        return f"{self.press} on {self.place}"

    @property
    def place(self) -> str:
        """Task, length and depth in words."""
        length = f" at {self.source.length}" if self.source.length else ""
        return f"{self.source.task}{length}{self.where}"

    @property
    def weight(self) -> int:
        """Relative work of a sample: its tokens."""
        return max(1, self.source.length)

    @property
    def depth(self) -> float | None:
        """Position of the answer as a fraction of the context, if configured."""
        return self.spec.get("depth")

    @property
    def where(self) -> str:
        """The depth in words."""
        return "" if self.depth is None else f", depth {self.depth:g}"


def make_cells(config: RunConfig, sources: Sequence[Source], fingerprint: str, device: str, dtype: str) -> list[Cell]:
    """Return the cells of a run, press by press; `fingerprint` identifies the weights."""
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
        # Results from before these settings existed keep their names.
        **({"max_context_length": config.max_context_length} if config.max_context_length else {}),
        **({"model_kwargs": config.model_kwargs} if config.model_kwargs else {}),
    }
    cells = []
    for press in config.presses:
        code = own_digest(kvpress.get_press(press))
        for source in sources:
            parameters = {**source.identity, "max_new_tokens": source.max_new_tokens, **({CODE: code} if code else {})}
            spec = {**shared, **parameters, "press": press, "task": source.task, "length": source.length}
            cells.append(Cell(press, source, spec, hash_json(spec)[:16]))
    return cells
