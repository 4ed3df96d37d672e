"""Head counts and dimensions of every layer, from a model's configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer writes into the cache; `declared` if the configuration names its kv heads itself."""

    kv_heads: int
    head_dim: int
    declared: bool = True


def layer_shapes(text_config: Any) -> list[LayerShape]:
    """Shape of each layer of a decoder; layers may differ, as in Gemma 4."""
    found = []
    for layer in text_config.per_layer_config:
        own = getattr(layer, "num_key_value_heads", None)
        dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        found.append(LayerShape(own or layer.num_attention_heads, dim, declared=own is not None))
    return found
