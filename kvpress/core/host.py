"""What presses ask of the library that runs the model: opening a `with` block, and facts about a loaded model.

Methods know the core only, and the core knows no library: who answers is named here and looked up when it is first asked.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from kvpress.core.model import ModelFacts
from kvpress.observe.view import View

HOST = "kvpress.hf.host"


class Host(Protocol):
    """Runs presses on models."""

    def open_press(self, press: Any, model: Any, capture: bool) -> AbstractContextManager[Any]:
        """Return a context manager that compresses the caches of `model`."""

    def view_by_hand(self, wants: Any, module: Any, hidden_states: Any, keys: Any, values: Any, kwargs: Any) -> View:
        """Return a view of bare keys and values, with what is wanted observed as far as the other arguments allow."""

    def facts_of(self, model: Any) -> ModelFacts:
        """Return what methods may know of a loaded model."""


def host() -> Host:
    """Return who runs presses."""
    return cast(Host, importlib.import_module(HOST))
