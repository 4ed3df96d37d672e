# SPDX-License-Identifier: Apache-2.0
"""Protocol of a session, for the modules that a session uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvpress.core.executor import Executor
from kvpress.core.recipe import Recipe
from kvpress.observe.call import LayerCall


class Running(Protocol):
    """A `with press(model)` block (`kvpress.hf.session.session.Session`)."""

    press: Any
    given: Any
    model: Any
    decoder: Any
    evict: bool
    block: Any
    shares_caches: bool
    recorder: Any
    captured: Any
    chunked: Any
    recipe: Recipe
    executor: Executor
    cache: Cache | None
    modules: list[nn.Module]
    kinds: list[str]
    reads_itself: bool
    layers: dict[int, Any]
    lends: set[int]

    @property
    def follows(self) -> bool:
        """Whether the press acts on all layers together at the end of a pass."""

    @property
    def replaces_forward(self) -> bool:
        """Whether the model's `forward` is replaced, for capture or chunked prefill."""

    def replace_forward(self, forward: Callable[..., Any]) -> None:
        """Wrap the model's `forward`."""

    def run(self, forward: Any, decode: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the decoder as one pass, or as several where draft tokens must be read in parts."""

    def run_whole(self, forward: Any, decode: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the decoder as one pass."""

    def check(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a pass that this session cannot run."""

    def before(self, forward: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adopt the cache layer of an attention module, and set up its call."""

    def after(self, forward: Any, module: nn.Module, output: Any) -> Any:
        """Finish the call of an attention module, and return its output."""

    def prepare_reading(self, module: nn.Module, store: Any) -> None:
        """Build the selector's index of the pairs that a layer stores."""

    def observe(self, call: LayerCall) -> None:
        """Run the observers on the call of a layer."""

    def follow(self, call: LayerCall) -> None:
        """Evict and encode after the attention of a layer."""

    def finish(self, cache: Any, calls: list[LayerCall], ids: Tensor | None, positions: Tensor | None) -> None:
        """Act on all layers of a pass."""
