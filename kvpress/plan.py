"""How much memory a method will take, from a model's configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvpress.checks import check_count
from kvpress.presses.base import BasePress
from kvpress.shapes import LayerShape, layer_shapes


@dataclass(frozen=True)
class Geometry:
    """The shape of a model's cache. `full` layers grow with the context; `sliding` ones stop at `window` tokens."""

    full: tuple[LayerShape, ...]
    sliding: tuple[LayerShape, ...]
    window: int
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
        layers = list(zip(layer_types(text), layer_shapes(text), strict=True))
        dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.bfloat16
        return cls(
            full=tuple(shape for kind, shape in layers if kind == "full_attention"),
            sliding=tuple(shape for kind, shape in layers if "sliding" in kind or "chunked" in kind),
            window=getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None) or 0,
            dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        )

    def pair_bytes(self, shape: LayerShape) -> int:
        """Bytes of one uncompressed pair of a layer."""
        return 2 * shape.head_dim * self.dtype.itemsize


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
    total, uncompressed = 0.0, 0
    for layer, shape in enumerate(geometry.full):
        codec, encoded, per_head = press.codec_for(layer), 0.0, 0.0
        if codec is not None:
            free = pairs - codec.residual - codec.sinks
            encoded = max(0, free // codec.group * codec.group)
            if press.is_head_wise and encoded:
                # Heads of all lengths leave, on average, half a tile over.
                encoded = max(0.0, free - (codec.group - 1) / 2)
            if encoded:
                per_head += encoded * codec.pair_bytes(shape.head_dim, geometry.dtype)
                per_head += codec.fixed_bytes(shape.head_dim)
                total += codec.table_bytes()
        per_head += (pairs - encoded) * geometry.pair_bytes(shape) + positions
        selector = press.selector_at(layer)
        if selector is not None:
            per_head += selector.index_bytes(int(encoded), shape.head_dim, geometry.dtype)
        total += shape.kv_heads * batch * per_head
        uncompressed += shape.kv_heads * batch * context * geometry.pair_bytes(shape)
    tokens = batch * min(context, geometry.window)
    rest = sum(shape.kv_heads * tokens * geometry.pair_bytes(shape) for shape in geometry.sliding)
    return Plan(round(total) + rest, uncompressed + rest, pairs)
