"""What the parts of a session ask of the session that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from kvpress.core.executor import Executor
from kvpress.core.recipe import Recipe
from kvpress.observe.call import LayerCall
from kvpress.observe.passes import Watch


class Running(Protocol):
    """A `with press(model)` block (`kvpress.hf.session.Session`)."""

    press: Any
    model: Any
    decoder: Any
    recipe: Recipe
    executor: Executor
    native_name: str
    modules: list[nn.Module]
    kinds: list[str]
    layers: dict[int, Any]
    watch: Watch | None
    prefill_until: int

    @property
    def static(self) -> Any:
        """The static pass under way, if any."""

    @property
    def follows(self) -> bool:
        """Whether something happens at the end of passes."""

    def native_attention(self, module: nn.Module) -> Callable[..., Any]:
        """Return the attention function that the model used before the session."""

    def observe(self, call: LayerCall) -> None:
        """Let observers see a pass."""

    def follow(self, call: LayerCall) -> None:
        """Evict and encode, once a layer's pass is over."""

    def finish(self, calls: list[LayerCall], ids: Tensor | None, positions: Tensor | None) -> None:
        """Act on all layers of a pass."""
