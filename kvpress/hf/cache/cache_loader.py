# SPDX-License-Identifier: Apache-2.0
"""A cache of transformers that is put together from what was written of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_utils import PreTrainedModel

from kvpress.cache.container import Header, Tensors
from kvpress.cache.files import Unpacker
from kvpress.cache.storage import moved
from kvpress.core.registry import entries
from kvpress.hf.cache.layer import HybridPressLayer, PressLayer
from kvpress.hf.models import attention_modules, cache_place, new_cache

OURS: dict[str, type[PressLayer]] = {kind.__name__: kind for kind in (PressLayer, HybridPressLayer)}
_STOCK = (
    "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer", "DummyLayer",
)  # fmt: skip
STOCK: dict[str, type[CacheLayerMixin]] = {
    name: getattr(cache_utils, name) for name in _STOCK if hasattr(cache_utils, name)
}
"""Layers of transformers whose state is written; others store what is not known here."""


class Arriving:
    """A cache that is put together layer by layer: `cache` has its place for each, which `take` fills, in their order."""

    def __init__(self, header: Header, tensors: Tensors, model: PreTrainedModel) -> None:
        entries()  # presses define the classes that their caches hold
        self.about, self.model = header.about, model
        self.cache = new_cache(model)
        self._template = list(self.cache.layers)
        self.cache.layers = [None] * len(self.about["layers"])
        self._places = _devices(model)
        self._unpacker = Unpacker(tensors, model.device)
        self._memo: dict[int, Any] = {}
        shared = self._unpacker.unpack(self.about["shared"])
        if shared:
            self.cache.__dict__["_kvpress_shared"] = self._on(model.device, shared)

    def kind(self, index: int) -> Any:
        """Return the class of a layer.

        Raises:
            ValueError: it is not known here.
        """
        name = self.about["layers"][index]["kind"]
        kind = OURS.get(name) or STOCK.get(name)
        if kind is None:
            raise ValueError(f"layer {index} of the cache is a {name}, which is not known here: upgrade kvpress")
        return kind

    def take(self, index: int) -> None:
        """Put a layer into the cache, or its state into the one that stands there; all data up to its own are there."""
        kind, device = self.kind(index), self._places.get(index, self.model.device)
        self._unpacker.device = device
        state = self._unpacker.unpack(self.about["layers"][index]["state"])
        if kind in OURS.values():
            state["call"] = None
            if state["store"] is not None and device.type != "cpu":
                state["store"].to(device, self._memo)
        else:
            known = self._template[index] if index < len(self._template) else None
            state = {**(vars(known) if type(known) is kind else {}), **self._on(device, state)}
        layer: Any = self.cache.layers[index]
        layer = object.__new__(kind) if layer is None else layer
        vars(layer).update({name: value for name, value in state.items() if name not in vars(layer)})
        if isinstance(layer, PressLayer):
            layer.belong_to(self.cache)
        layer.__class__ = kind
        self.cache.layers[index] = layer

    def _on(self, device: torch.device, state: Any) -> Any:
        """Bring what was read to a device; what is common to several layers stays so."""
        return state if device.type == "cpu" else moved(state, device, self._memo)


def _devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Device of every attention layer, by its place in the cache; they may differ."""
    return {cache_place(module): next(_parameters(module, model)).device for module in attention_modules(model)}


def _parameters(module: Any, model: PreTrainedModel) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from model.parameters()
