# SPDX-License-Identifier: Apache-2.0
"""What the parts of a session ask of the session that they belong to."""

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
        """Whether something happens at the end of passes."""

    @property
    def replaces_forward(self) -> bool:
        """Whether something stands in for the model's own `forward`."""

    def replace_forward(self, forward: Callable[..., Any]) -> None:
        """Stand in for the model's own `forward`."""

    def run(self, forward: Any, decode: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the decoder as a pass of this session, or as several where candidates have to be read in parts."""

    def run_whole(self, forward: Any, decode: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the decoder as one pass."""

    def check(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a pass that this session cannot run."""

    def before(self, forward: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prepare an attention module's part of a pass."""

    def after(self, forward: Any, module: nn.Module, output: Any) -> Any:
        """End an attention module's part of a pass, and return its output."""

    def prepare_reading(self, module: nn.Module, store: Any) -> None:
        """Let the selector of a layer look at what it stores."""

    def observe(self, call: LayerCall) -> None:
        """Let observers see a pass."""

    def follow(self, call: LayerCall) -> None:
        """Evict and encode, once a layer's pass is over."""

    def finish(self, cache: Any, calls: list[LayerCall], ids: Tensor | None, positions: Tensor | None) -> None:
        """Act on all layers of a pass."""
