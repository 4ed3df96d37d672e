# SPDX-License-Identifier: Apache-2.0
"""Facts about a model that methods read: its attention layers, their shapes and rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvpress.observe.shards import UNDIVIDED, Shards

GROWING = ("full_attention", "hybrid")
"""Kinds of cache layers that store a pair for every token; `hybrid` layers also store a state of fixed size."""

NOT_DIFFERENTIABLE = (
    "has cache layers that are updated in place, or that several modules share, so no gradient can pass through them"
)
"""Reason, after the name of a model, why its cache has no gradients."""

VISION = ("image", "video")
"""Kinds of input besides text that tokens can stand for."""


@dataclass(frozen=True)
class LayerFacts:
    """One attention layer."""

    index: int
    """Index among attention layers."""
    cache_index: int
    """Index of its layer in the cache."""
    kind: str
    """Kind of its cache layer, such as `full_attention`."""
    heads: int
    """Query heads."""
    kv_heads: int
    """KV heads."""
    head_dim: int
    """Numbers in a cached key; the latent, where latents are cached (MLA)."""
    declared: bool = True
    """The model's configuration gives the number of KV heads."""
    value_dim: int | None = None
    """Numbers in a cached value; None for `head_dim`."""
    merged_heads: int = 1
    """KV heads of the model that share one choice of pairs and are stored side by side, as one KV head."""
    module: nn.Module | None = None
    """Attention module; None if the model is not loaded."""
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """Rotary function of the model, `(vectors, cos, sin)` to vectors; None without RoPE or a loaded model."""
    angles: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """Maps `(like, positions)` to `(cos, sin)`; None without RoPE or a loaded model."""
    shards: Shards = UNDIVIDED
    """Ranks among which the query and KV heads are divided (tensor parallel)."""

    @property
    def held_heads(self) -> int:
        """KV heads that this rank stores."""
        return self.kv_heads // self.shards.count

    @property
    def part(self) -> LayerFacts:
        """The layer with the heads of this rank only."""
        count = self.shards.count
        return replace(self, heads=self.heads // count, kv_heads=self.held_heads, shards=UNDIVIDED)

    @property
    def pair_dim(self) -> int:
        """Numbers in a cached pair, key and value."""
        return self.head_dim + (self.head_dim if self.value_dim is None else self.value_dim)

    @property
    def grows(self) -> bool:
        """Whether its cache grows with the context."""
        return self.kind in GROWING

    @property
    def rotates(self) -> bool:
        """Whether the layer applies a rotary embedding; some models have layers without one."""
        return bool(getattr(self.module, "use_rope", True))


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that methods read."""

    name: str
    """Architecture."""
    layers: tuple[LayerFacts, ...]
    """Attention layers."""
    dtype: torch.dtype
    """Type of keys and values in the cache."""
    depth: int = 0
    """Number of layers, those without attention included."""
    window: int = 0
    """Length of sliding layers, in tokens."""
    source: str = ""
    """Name or folder that the model was loaded from."""
    revision: str | None = None
    """Revision on the hub; None if unknown."""
    tokenizer: Callable[[], Any] | None = None
    """Loads the tokenizer of the model; None without a loaded model."""
    weights: Callable[[], str] | None = None
    """Returns a digest of the weights that determine keys and values; None without a loaded model."""
    vision: dict[str, int] = field(default_factory=dict)
    """Token ids that stand for images and videos in a prompt, by kind; empty for text models."""
    positions: int | None = None
    """Number of positions that the model supports; None without a limit."""
    differentiable: bool = True
    """Gradients can pass through the cache: no layer is updated in place, and none is shared by several modules."""

    @property
    def loaded(self) -> bool:
        """Whether the model has weights, not a configuration only."""
        return self.weights is not None

    @property
    def shards(self) -> Shards:
        """Ranks among which the heads of every layer are divided."""
        return self.layers[0].shards if self.layers else UNDIVIDED

    @property
    def growing(self) -> tuple[LayerFacts, ...]:
        """Layers whose cache grows with the context; this library stores these."""
        return tuple(layer for layer in self.layers if layer.grows)

    @property
    def sliding(self) -> tuple[LayerFacts, ...]:
        """Layers that stop growing at `window` tokens."""
        return tuple(layer for layer in self.layers if "sliding" in layer.kind or "chunked" in layer.kind)
