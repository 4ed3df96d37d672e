# SPDX-License-Identifier: Apache-2.0
"""A press that does any action a test sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import kvpress
from kvpress.core import registry


@dataclass
class SabotagedPress(kvpress.ScorerPress):
    """Press that runs a test's action on every scoring, with the number of rows of the batch."""

    act: ClassVar[Callable[[int], None]]

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        type(self).act(kwargs["kvpress"].call.store.batch)
        return values.norm(dim=-1)


@pytest.fixture
def sabotage() -> Iterator[Callable[[Callable[[int], None]], None]]:
    """Return a function that sets the action of the press `sabotaged`; the press exists for one test."""
    kvpress.list_presses()
    kvpress.register("sabotaged", "evict")(SabotagedPress)

    def during(act: Callable[[int], None]) -> None:
        SabotagedPress.act = staticmethod(act)  # type: ignore[assignment]

    during(lambda rows: None)
    yield during
    del registry._entries["sabotaged"]
