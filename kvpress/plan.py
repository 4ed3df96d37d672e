"""How much memory a method will take, from a model's configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpress.core.checks import check_count
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.press import BasePress
from kvpress.hf.models import facts_of_config


class Geometry(ModelFacts):
    """A model's cache as its configuration alone describes it."""

    @classmethod
    def of(cls, config: Any) -> Geometry:
        """Read it from a transformers configuration."""
        if getattr(config.get_text_config(decoder=True), "kv_lora_rank", None) is not None:
            raise NotImplementedError(
                "this model uses multi-head latent attention (MLA); its cache cannot be planned for"
            )
        return cls(**vars(facts_of_config(config)))

    @property
    def full(self) -> tuple[LayerFacts, ...]:
        """Layers that grow with the context."""
        return self.growing

    @property
    def sliding(self) -> tuple[LayerFacts, ...]:
        """Layers that stop growing at `window` tokens."""
        return tuple(layer for layer in self.layers if "sliding" in layer.kind or "chunked" in layer.kind)

    def pair_bytes(self, layer: LayerFacts) -> int:
        """Bytes of one uncompressed pair of a layer."""
        return 2 * layer.head_dim * self.dtype.itemsize


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


def plan(press: BasePress, model: Geometry, context: int, batch: int = 1) -> Plan:
    """Predict the memory of a press; `memory_report` measures the same after a prefill."""
    check_count("context", context)
    check_count("batch", batch)
    recipe = press.recipe(model)
    recipe.check_length(context)
    pairs = recipe.kept(context)
    positions = 4 * pairs if pairs < context else 0
    total, uncompressed = 0.0, 0
    for layer in model.growing:
        codec, encoded, per_head = recipe.codec_at(layer.index), 0.0, 0.0
        if codec is not None:
            free = pairs - codec.residual - codec.sinks
            encoded = max(0, free // codec.group * codec.group)
            if recipe.ragged and encoded:
                # Heads of all lengths leave, on average, half a tile over.
                encoded = max(0.0, free - (codec.group - 1) / 2)
            if encoded:
                per_head += encoded * codec.pair_bytes(layer.head_dim, model.dtype)
                per_head += codec.fixed_bytes(layer.head_dim)
                total += codec.table_bytes(layer.head_dim)
        per_head += (pairs - encoded) * model.pair_bytes(layer) + positions
        selector = recipe.selector_at(layer.index)
        if selector is not None:
            per_head += selector.index_bytes(int(encoded), layer.head_dim, model.dtype)
        total += layer.kv_heads * batch * per_head
        uncompressed += layer.kv_heads * batch * context * model.pair_bytes(layer)
    tokens = batch * min(context, model.window)
    rest = sum(layer.kv_heads * tokens * model.pair_bytes(layer) for layer in model.sliding)
    return Plan(round(total) + rest, uncompressed + rest, pairs)
