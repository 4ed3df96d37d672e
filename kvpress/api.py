"""Entry points that are not presses: reading a compressed cache, and the bundled reference model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpress.presses.base import BasePress


@contextmanager
def reading(model: Any, press: BasePress | None = None, capture: bool = False) -> Iterator[Any]:
    """Read compressed caches inside the block without evicting from the tokens that are read.

    With `press`, its codec still encodes older tokens, its selector still chooses what decoding reads and a decoding
    schedule still runs; only the eviction after a prompt is left out. This is how questions are asked about a context
    that was compressed before they were known. `capture` is that of `press(model, capture=True)`: decode steps are replayed.
    """
    from kvpress.hf import graph_recorder, session
    from kvpress.presses.none import NonePress

    recorder = graph_recorder(model) if capture else None
    with session(press if press is not None else NonePress(), model, evict=False, recorder=recorder) as current:
        yield current


def reference_path() -> str:
    """Return the folder of the bundled reference model, a 2.6 M parameter model that retrieves from its context."""
    return str(Path(__file__).parent / "data" / "reference")


def load_model(name: str, **kwargs: Any) -> tuple[Any, Any]:
    """Return `(model, tokenizer)` of `reference`, a local folder or a hub name; keyword arguments go to the model."""
    from kvpress.hf import load
    from kvpress.pipeline import register_pipeline

    register_pipeline()
    return load(reference_path() if name == "reference" else name, **kwargs)
