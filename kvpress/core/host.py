# SPDX-License-Identifier: Apache-2.0
"""Interface to the library that runs the model: opens `with` blocks and returns facts about a loaded model.

Methods import the core only, and the core imports no model library; `host` imports the implementation at the first call.
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

HOST = "kvpress.hf.host"
"""Module that implements `Host`."""


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of an attention layer in a pass without a cache."""

    layer: int
    """Index among attention layers."""
    queries: Tensor
    """Queries `[B, Hq, n, D]`."""
    keys: Tensor
    """Keys `[B, H, n, D]`."""
    values: Tensor
    """Values `[B, H, n, D]`."""
    logits: Logits
    """Scale and softcap of the logits."""
    sinks: Tensor | None = None
    """Learned sink logits `[Hq]`; None without."""
    window: int | None = None
    """Length of a sliding layer; None without a limit."""


class Host(Protocol):
    """Runs presses on models."""

    def open_press(self, press: Any, model: Any, capture: bool) -> AbstractContextManager[Any]:
        """Return a context manager that compresses the caches of `model`."""

    def attending(self, model: Any, attend: Callable[[AttentionInputs], Tensor | None]) -> AbstractContextManager[None]:
        """Replace the attention of a model by `attend`, which returns `[B, Hq, n, Dv]`, or None to run the original."""

    def facts_of(self, model: Any) -> ModelFacts:
        """Return the facts about a loaded model that methods read."""


def host() -> Host:
    """Return the implementation of `Host`."""
    return cast(Host, importlib.import_module(HOST))
