# SPDX-License-Identifier: Apache-2.0
"""What methods may know of a model, as data: its attention layers, their shapes and rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

GROWING = ("full_attention", "hybrid")
"""Kinds of cache layers that hold a pair for every token; `hybrid` ones hold a state of another kind beside them."""

VISION = ("image", "video")
"""What tokens may stand for beside text."""


@dataclass(frozen=True)
class LayerFacts:
    """One attention layer.

    `index` counts attention layers, `cache_index` is its place in the cache. `kind` is that of its cache, such as
    `full_attention`; `declared` says that the configuration names its kv heads itself. `head_dim` is the size of a key in the
    cache and `value_dim` that of a value, None for the same; where latents are cached (MLA), they are the key. `module`,
    `rotate` and `angles` are known of a loaded model only: `rotate` applies the model's rotary function to
    `(vectors, cos, sin)`, and `angles` maps `(like, positions)` to `(cos, sin)`; None where the model has none.
    """

    index: int
    cache_index: int
    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    declared: bool = True
    value_dim: int | None = None
    module: nn.Module | None = None
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    angles: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    @property
    def pair_dim(self) -> int:
        """Numbers in a pair of its cache."""
        return self.head_dim + (self.head_dim if self.value_dim is None else self.value_dim)

    @property
    def grows(self) -> bool:
        """Whether its cache grows with the context."""
        return self.kind in GROWING

    @property
    def rotates(self) -> bool:
        """Whether it turns keys and queries by their positions; some models have layers that do not."""
        return bool(getattr(self.module, "use_rope", True))


@dataclass(frozen=True)
class ModelFacts:
    """A model as methods see it: `layers` are its attention layers, of `depth` layers in all.

    `dtype` is that of its cache, `window` the length of sliding layers. `tokenizer` loads the one beside the model, `weights`
    returns a digest of the weights that decide keys and values; None where a configuration alone is known. `vision` are the
    ids that stand for images and videos in a prompt, by kind; empty where a model reads text only. `positions` are those that
    it was made for; None without a limit.
    """

    name: str
    layers: tuple[LayerFacts, ...]
    dtype: torch.dtype
    depth: int = 0
    window: int = 0
    source: str = ""
    revision: str | None = None
    tokenizer: Callable[[], Any] | None = None
    weights: Callable[[], str] | None = None
    vision: dict[str, int] = field(default_factory=dict)
    positions: int | None = None

    @property
    def loaded(self) -> bool:
        """Whether the model has weights, and not a configuration alone."""
        return self.weights is not None

    @property
    def growing(self) -> tuple[LayerFacts, ...]:
        """Layers whose cache grows with the context: those that this library stores."""
        return tuple(layer for layer in self.layers if layer.grows)

    @property
    def sliding(self) -> tuple[LayerFacts, ...]:
        """Layers that stop growing at `window` tokens."""
        return tuple(layer for layer in self.layers if "sliding" in layer.kind or "chunked" in layer.kind)
