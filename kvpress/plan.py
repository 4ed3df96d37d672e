"""How much memory a method will take, from a model's configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvpress.checks import check_count
from kvpress.presses.base import BasePress


@dataclass(frozen=True)
class Geometry:
    """The shape of a model's cache. `full_layers` grow with the context; `sliding_layers` stop at `sliding_window`."""

    full_layers: int
    sliding_layers: int
    sliding_window: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any) -> Geometry:
        """Read the shape from a transformers configuration."""
        from kvpress.hf import layer_types

        text = config.get_text_config(decoder=True)
        if getattr(text, "kv_lora_rank", None) is not None:
            raise NotImplementedError(
                "this model uses multi-head latent attention (MLA); its cache cannot be planned for"
            )
        kinds = layer_types(text)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.bfloat16
        return cls(
            full_layers=kinds.count("full_attention"),
            sliding_layers=sum("sliding" in kind or "chunked" in kind for kind in kinds),
            sliding_window=getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None) or 0,
            kv_heads=heads,
            head_dim=dim,
            dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        )

    @property
    def pair_bytes(self) -> int:
        """Bytes of one uncompressed pair."""
        return 2 * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """Predicted bytes of a cache right after a prompt of `context` tokens in each of `batch` rows."""

    total_bytes: int
    uncompressed_bytes: int
    pairs_per_head: int

    @property
    def factor(self) -> float:
        """How many times smaller than uncompressed."""
        return self.uncompressed_bytes / self.total_bytes


def plan(press: BasePress, geometry: Geometry, context: int, batch: int = 1) -> Plan:
    """Predict the memory of a press; `memory_report` measures the same after a prefill."""
    check_count("context", context)
    check_count("batch", batch)
    press.check_length(context)
    pairs = press.planned_pairs(context)
    positions = 4 * pairs if pairs < context else 0
    per_head = 0.0
    for layer in range(geometry.full_layers):
        codec, encoded = press.codec_for(layer), 0.0
        if codec is not None:
            encoded = max(0, (pairs - codec.residual) // codec.group * codec.group)
            if press.is_head_wise and encoded:
                # Heads of all lengths leave, on average, half a tile over.
                encoded = max(0.0, pairs - codec.residual - (codec.group - 1) / 2)
            per_head += encoded * codec.pair_bytes(geometry.head_dim, geometry.dtype)
        per_head += (pairs - encoded) * geometry.pair_bytes + positions
        if press.selector is not None and press.selector.reads(layer):
            per_head += press.selector.index_bytes(int(encoded), geometry.head_dim, geometry.dtype)
    sliding = geometry.sliding_layers * geometry.kv_heads * batch * min(context, geometry.sliding_window)
    rest = sliding * geometry.pair_bytes
    streams = geometry.kv_heads * batch
    uncompressed = streams * geometry.full_layers * context * geometry.pair_bytes
    return Plan(round(streams * per_head) + rest, uncompressed + rest, pairs)
