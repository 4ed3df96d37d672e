# SPDX-License-Identifier: Apache-2.0
"""Fields of a session, and the steps of a pass that its hooks call."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel

from kvpress.core.executor import Executor
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.hf.generation.capture import Recorder
from kvpress.hf.session.layer_plan import LayerPlan
from kvpress.observe.call import LayerCall

_entered: ContextVar[tuple[int, ...]] = ContextVar("entered", default=())
"""Numbers of the blocks that this thread, or asynchronous task, has entered."""
_numbers = itertools.count()


class OpenBlock:
    """Identity of a `with` block."""

    def __init__(self, private: bool) -> None:
        self.number = self.group = next(_numbers)
        """Number of the block, and of the group of blocks with equal effect on a cache."""
        self.private = private
        """Whether only the thread that entered the block is served."""

    def enter(self) -> None:
        """Add the block to those that this thread has entered."""
        _entered.set((*_entered.get(), self.number))

    def leave(self) -> None:
        """Remove the block from this thread, which may not be the one that entered it."""
        _entered.set(tuple(number for number in _entered.get() if number != self.number))

    @property
    def is_ours(self) -> bool:
        """Whether this thread has entered the block."""
        return self.number in _entered.get()


class BaseSession(ABC):
    """Base class of `kvpress.hf.session.session.Session`, for the modules that a session uses."""

    press: BasePress
    """Press of the block."""
    given: PreTrainedModel
    """Model as the caller passed it, compiled or not."""
    model: PreTrainedModel
    """Model without the wrapper of `torch.compile`."""
    decoder: PreTrainedModel
    """Part of the model that reads tokens through the attention modules."""
    evict: bool
    """Whether the press evicts after a prompt; False only reads compressed caches."""
    block: OpenBlock
    """Identity of the block."""
    shares_caches: bool
    """Whether a call from a thread without a block was served, so that `cache` may belong to another block."""
    recorder: Recorder | None
    """Recorder of decode steps; None without capture."""
    captured: Any
    """Forward of the model that replays decode steps; None without capture."""
    chunked: Callable[..., Any] | None
    """Forward of the model that reads prompts in chunks; None without chunks."""
    recipe: Recipe
    """Recipe of the press for the model."""
    executor: Executor
    """Executor of the recipe."""
    modules: list[nn.Module]
    """Attention modules, by layer."""
    kinds: list[str]
    """Kind of each layer, such as `full_attention`."""
    layers: dict[int, LayerPlan]
    """Plan of each layer, by the id of its attention module."""
    reads_itself: bool
    """Whether the attention modules read the cache without the attention interface of transformers."""
    lends: set[int]
    """Cache indexes of the layers whose pairs other layers read too."""

    @property
    @abstractmethod
    def cache(self) -> Cache | None:
        """Cache last used inside the block."""

    @cache.setter
    @abstractmethod
    def cache(self, cache: Cache | None) -> None: ...

    @property
    @abstractmethod
    def follows(self) -> bool:
        """Whether the press acts on all layers together at the end of a pass."""

    @property
    @abstractmethod
    def replaces_forward(self) -> bool:
        """Whether the model's `forward` is replaced, for capture or chunked prefill."""

    @abstractmethod
    def replace_forward(self, forward: Callable[..., Any]) -> None:
        """Wrap the model's `forward`."""

    @abstractmethod
    def run(self, forward: Any, decode: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the decoder as one pass, or as several where draft tokens must be read in parts."""

    @abstractmethod
    def run_whole(self, forward: Any, decode: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the decoder as one pass."""

    @abstractmethod
    def check(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a pass that this session cannot run."""

    @abstractmethod
    def before(self, forward: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adopt the cache layer of an attention module, and set up its call."""

    @abstractmethod
    def after(self, forward: Any, module: nn.Module, output: Any) -> Any:
        """Finish the call of an attention module, and return its output."""

    @abstractmethod
    def prepare_reading(self, module: nn.Module, store: Any) -> None:
        """Build the selector's index of the pairs that a layer stores."""

    @abstractmethod
    def observe(self, call: LayerCall) -> None:
        """Run the observers on the call of a layer."""

    @abstractmethod
    def follow(self, call: LayerCall) -> None:
        """Evict and encode after the attention of a layer."""

    @abstractmethod
    def finish(self, cache: Any, calls: list[LayerCall], ids: Tensor | None, positions: Tensor | None) -> None:
        """Act on all layers of a pass."""
