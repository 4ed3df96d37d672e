# SPDX-License-Identifier: Apache-2.0
"""What presses ask of the library that runs the model: opening a `with` block, and facts about a loaded model.

Methods know the core only, and the core knows no library: who answers is named here and looked up when it is first asked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor

from kvpress.cache.attention import Logits
from kvpress.core.model import ModelFacts
from kvpress.observe.view import View

HOST = "kvpress.hf.host"


@dataclass(frozen=True)
class Asked:
    """What an attention layer asks of a pass without a cache: `queries [B, Hq, n, D]`, `keys` and `values [B, H, n, D]`.

    `layer` counts attention layers, `sinks [Hq]` are learned ones, and `window` is that of a sliding layer; None where there is
    none.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    logits: Logits
    sinks: Tensor | None = None
    window: int | None = None


class Host(Protocol):
    """Runs presses on models."""

    def open_press(self, press: Any, model: Any, capture: bool) -> AbstractContextManager[Any]:
        """Return a context manager that compresses the caches of `model`."""

    def view_by_hand(self, wants: Any, module: Any, hidden_states: Any, keys: Any, values: Any, kwargs: Any) -> View:
        """Return a view of bare keys and values, with what is wanted observed as far as the other arguments allow."""

    def attending(self, model: Any, attend: Callable[[Asked], Tensor | None]) -> AbstractContextManager[None]:
        """Let `attend` take the place of a model's attention; it returns `[B, Hq, n, Dv]`, or None for the model's own."""

    def facts_of(self, model: Any) -> ModelFacts:
        """Return what methods may know of a loaded model."""


def host() -> Host:
    """Return who runs presses."""
    return cast(Host, importlib.import_module(HOST))
