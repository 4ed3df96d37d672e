# SPDX-License-Identifier: Apache-2.0
"""A compressed cache whose keys, values and log-weights are trained, and encoded again in the formats of its press."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.decoded import DecodedPairs, decode_pairs, dense_twin
from kvpress.cache.report import format_bytes, memory_report
from kvpress.cache.store import KVStore
from kvpress.core.spec import to_spec
from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.session.rereading import check_appends, logits_behind
from kvpress.hf.session.session import Session
from kvpress.observe.call import LayerCall

_SPARED = 0
"""Slot of the pair that is not trained: an attention sink, whose changes destabilise the training (Cartridges)."""

_CLOSE = 0.01
"""Largest difference in bytes, relative to the cache, of pairs that are encoded again: indexes are laid out anew."""


class TrainableCache:
    """Float copies of the pairs of a cache of one row, as leaves of autograd, beside the layers that they come from.

    Encoded pairs are decoded. `encoded` encodes the trained pairs as the press does after an eviction, so that formats and
    slots stay, and bytes up to 1%.
    """

    def __init__(self, session: Session, cache: DynamicCache, example: Tensor) -> None:
        """Decode the pairs of `cache` inside the block of `session`; `example [1, m]` are ids to read once behind it.

        Raises:
            ValueError: the press has compressed nothing, or decoded pairs would take another size when they are encoded.
            NotImplementedError: the model, its cache or the press has parts that are not trained.
        """
        self.session, self.cache = session, cache
        self.codecs: dict[int, Codec | None] = {}
        self.sealings: dict[int, Sealing] = {}
        check_trainable(session)
        check_appends(session, cache, "compress without --refine")
        with torch.no_grad():
            logits_behind(session, cache, example, self._note)
        self.stores: dict[int, KVStore] = {
            index: layer.store
            for index, layer in enumerate(cache.layers)
            if isinstance(layer, PressLayer) and layer.store is not None
        }
        pairs = {index: decode_pairs(store) for index, store in self.stores.items()}
        self.pairs = {index: _leaves(decoded) for index, decoded in pairs.items()}
        self.scales = {index: (_size(decoded.keys), _size(decoded.values)) for index, decoded in pairs.items()}
        self.errors: dict[int, tuple[Tensor, Tensor]] = {}
        self._check_size()

    def _note(self, call: LayerCall) -> None:
        index = call.layer.cache_index
        self.codecs[index] = self.session.layers[id(call.layer.module)].codec
        self.sealings[index] = replace(call.sealing, shared=dict(call.tokens.shared), generated=False)

    def _check_size(self) -> None:
        spec = to_spec(self.session.press)
        before, after = (memory_report(cache) for cache in (self.cache, self.encoded()))
        if before.total_bytes >= before.uncompressed_bytes or not any(store.sealed for store in self.stores.values()):
            raise ValueError(
                f"{spec} has not compressed the text, so there is nothing to train: take a press that does, such as "
                "frontier:smaller=10"
            )
        if abs(after.total_bytes - before.total_bytes) > _CLOSE * before.total_bytes:
            raise ValueError(
                f"the cache of {spec} cannot be trained: its pairs take {format_bytes(before.total_bytes)}, and "
                f"{format_bytes(after.total_bytes)} when they are decoded and encoded again; take a press whose format does "
                "not depend on the text that was read, such as frontier:smaller=10"
            )

    def groups(self, rate: float) -> list[dict[str, object]]:
        """Return parameter groups for an optimiser, whose learning rates are `rate` times the size of a layer's numbers.

        Log-weights, which are logits, have the rate itself.
        """
        groups: list[dict[str, object]] = []
        for index, pairs in self.pairs.items():
            for tensor, scale in zip((pairs.keys, pairs.values), self.scales[index], strict=True):
                groups.append({"params": [tensor], "lr": rate * scale})
            if pairs.log_weight is not None:
                groups.append({"params": [pairs.log_weight], "lr": rate})
        return groups

    @property
    def parameters(self) -> list[Tensor]:
        """Trained tensors: keys, values and log-weights of every layer, in order."""
        tensors = ((pairs.keys, pairs.values, pairs.log_weight) for pairs in self.pairs.values())
        return [tensor for layer in tensors for tensor in layer if tensor is not None]

    def spare_sinks(self) -> None:
        """Clear the gradients of the first token's pairs."""
        for pairs in self.pairs.values():
            first = pairs.slots == _SPARED
            for tensor in (pairs.keys, pairs.values, pairs.log_weight):
                if tensor is not None and tensor.grad is not None:
                    tensor.grad[first] = 0

    @torch.no_grad()
    def load(self, tensors: Sequence[Tensor]) -> None:
        """Set the trained tensors."""
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.copy_(tensor)

    @torch.no_grad()
    def update_errors(self) -> None:
        """Record the rounding errors of the formats at the present leaves, which `floats` adds to them as constants.

        The gradient passes through rounding unchanged (straight-through estimator).
        """
        for index, layer in enumerate(self.encoded().layers):
            if index in self.pairs:
                stored, pairs = decode_pairs(layer.store), self.pairs[index]
                self.errors[index] = (stored.keys.float() - pairs.keys, stored.values.float() - pairs.values)

    def floats(self) -> DynamicCache:
        """Return a cache for passes under autograd, which holds the leaves with the recorded rounding errors."""
        stores = {}
        for index, store in self.stores.items():
            pairs, errors = self.pairs[index], self.errors.get(index)
            if errors is not None:
                pairs = replace(pairs, keys=pairs.keys + errors[0], values=pairs.values + errors[1])
            stores[index] = dense_twin(store, pairs)
        return self._with(stores)

    @torch.no_grad()
    def encoded(self) -> DynamicCache:
        """Return an ordinary cache of the trained pairs, in the formats and the dtype of the press."""
        stores = {}
        for index, store in self.stores.items():
            pairs, codec = self.pairs[index], self.codecs[index]
            weight = None if pairs.log_weight is None else pairs.log_weight.detach().half()
            keys, values = (tensor.detach().to(store.dtype) for tensor in (pairs.keys, pairs.values))
            twin = dense_twin(store, replace(pairs, keys=keys, values=values, log_weight=weight))
            if codec is not None and store.segments:
                twin.settle(codec, self.sealings[index], turn=True)
            stores[index] = twin
        return self._with(stores)

    def _with(self, stores: dict[int, KVStore]) -> DynamicCache:
        """Return a copy of the cache with other stores."""
        twin = copy.deepcopy(self.cache)
        for index, store in stores.items():
            twin.layers[index].store = store
        return twin


def check_trainable(session: Session) -> None:
    """Refuse models and presses whose caches are not trained; called before the text is read.

    Raises:
        NotImplementedError: the press selects, offloads or drops, or the model reads its cache by itself.
    """
    spec, name = to_spec(session.press), type(session.model).__name__
    recipe = session.recipe
    if any(plan.selector is not None for plan in session.layers.values()):
        raise NotImplementedError(
            f"the cache of {spec} cannot be trained: each token reads other pairs of it; leave out the selector, and select "
            "when you ask"
        )
    if recipe.joint:
        raise NotImplementedError(
            f"the cache of {spec} cannot be trained: pairs of several layers share their numbers; take a press that encodes "
            "each layer by itself, such as frontier:smaller=10"
        )
    if recipe.offloads or recipe.dropping is not None:
        raise NotImplementedError(
            f"the cache of {spec} cannot be trained: its pairs are outside the device's memory, or later layers have not "
            "read the whole text; take a press that evicts or encodes, such as frontier:smaller=10"
        )
    if session.reads_itself:
        raise NotImplementedError(f"the cache of {name} cannot be trained: the model reads it by itself")


def _leaves(decoded: DecodedPairs) -> DecodedPairs:
    keys, values = (tensor.float().clone().requires_grad_() for tensor in (decoded.keys, decoded.values))
    weight = None if decoded.log_weight is None else decoded.log_weight.float().clone().requires_grad_()
    return replace(decoded, keys=keys, values=values, log_weight=weight)


def _size(tensor: Tensor) -> float:
    """Return the root mean square of a tensor's numbers."""
    return float(tensor.float().square().mean().sqrt()) if tensor.numel() else 0.0
