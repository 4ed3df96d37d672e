# SPDX-License-Identifier: Apache-2.0
"""Functions of `kvpress.core.host` for transformers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from kvpress.core.press import BasePress
from kvpress.hf.attention.attention_override import attending
from kvpress.hf.generation.replay import graph_recorder
from kvpress.hf.models import facts_of
from kvpress.hf.session.session import Session, session

__all__ = ["attending", "facts_of", "open_press"]


def open_press(press: BasePress, model: Any, capture: bool) -> AbstractContextManager[Session]:
    """Return a context manager that compresses the caches of `model`."""
    return session(press, model, recorder=graph_recorder(model) if capture else None)
