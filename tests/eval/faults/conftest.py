# SPDX-License-Identifier: Apache-2.0
"""A press does what a test tells it to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import kvpress
from kvpress.core import registry


@dataclass
class SabotagedPress(kvpress.ScorerPress):
    """Does what a test tells it to do while it scores; it is told how many rows the batch has."""

    act: ClassVar[Callable[[int], None]]

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        type(self).act(kwargs["kvpress"].call.store.batch)
        return values.norm(dim=-1)


@pytest.fixture
def sabotage() -> Iterator[Callable[[Callable[[int], None]], None]]:
    """Makes the press `sabotaged` do something; it exists for one test."""
    kvpress.list_presses()
    kvpress.register("sabotaged", "evict")(SabotagedPress)

    def during(act: Callable[[int], None]) -> None:
        SabotagedPress.act = staticmethod(act)  # type: ignore[assignment]

    during(lambda rows: None)
    yield during
    del registry._entries["sabotaged"]
