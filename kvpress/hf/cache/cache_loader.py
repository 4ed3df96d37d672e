# SPDX-License-Identifier: Apache-2.0
"""Rebuild a cache of transformers from its serialised layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_utils import PreTrainedModel

from kvpress.cache.container import Tensors
from kvpress.cache.files import Unpacker, check_names
from kvpress.cache.header import Header, is_length
from kvpress.cache.storage import moved
from kvpress.cache.validation import check_store
from kvpress.core.registry import entries
from kvpress.hf.cache.layer import HybridPressLayer, PressLayer
from kvpress.hf.models import attention_modules, cache_place, facts_of, new_cache

OURS: dict[str, type[PressLayer]] = {kind.__name__: kind for kind in (PressLayer, HybridPressLayer)}
_STOCK = (
    "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer", "DummyLayer",
)  # fmt: skip
STOCK: dict[str, type[CacheLayerMixin]] = {
    name: getattr(cache_utils, name) for name in _STOCK if hasattr(cache_utils, name)
}
"""Layers of transformers that can be serialised."""
FIXED = ("sliding_window", "number_of_states")
"""Attributes of such layers that the model determines."""
STATES = ("conv_states", "recurrent_states")
"""Attributes of such layers with dictionaries of state tensors."""


_DAMAGE = (
    KeyError, TypeError, AttributeError, IndexError, RuntimeError, OverflowError, AssertionError, StopIteration, MemoryError,
)  # fmt: skip
"""Errors that malformed data can raise."""


@contextmanager
def readable(part: str) -> Iterator[None]:
    """Convert errors from damaged data to a ValueError that names the part.

    Raises:
        ValueError: the data are not of the form that this library writes.
    """
    try:
        yield
    except _DAMAGE as error:
        raise ValueError(f"{part} is damaged: {type(error).__name__}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{part} cannot be used: {error}") from error


class Arriving:
    """Cache under construction: `take` fills the layers of `cache` in order."""

    def __init__(self, header: Header, tensors: Tensors, model: PreTrainedModel) -> None:
        entries()  # presses define the classes that their caches hold
        self.about, self.model = header.about, model
        self.cache = new_cache(model)
        self._template = list(self.cache.layers)
        self.cache.layers = [None] * len(self.about["layers"])
        self._places = _devices(model)
        self._facts = {layer.cache_index: layer for layer in facts_of(model).layers}
        self._unpacker = Unpacker(tensors, model.device)
        self._memo: dict[int, Any] = {}
        with readable("what all layers of the cache have in common"):
            shared = self._unpacker.unpack(self.about["shared"])
            if not isinstance(shared, dict):
                raise ValueError(f"it is a {type(shared).__name__}")
            if shared:
                self.cache.__dict__["_kvpress_shared"] = self._on(model.device, shared)

    def kind(self, index: int) -> Any:
        """Return the class of a layer.

        Raises:
            ValueError: this version does not support the class.
        """
        name = self.about["layers"][index]["kind"]
        kind = OURS.get(name) or STOCK.get(name)
        if kind is None:
            raise ValueError(f"layer {index} of the cache is a {name}, which is not known here: upgrade kvpress")
        return kind

    def take(self, index: int) -> None:
        """Add a layer to the cache, or fill the layer that is there. All data up to this layer must have arrived."""
        kind, device = self.kind(index), self._places.get(index, self.model.device)
        self._unpacker.device = device
        with readable(f"layer {index} of the cache"):
            state = self._unpacker.unpack(self.about["layers"][index]["state"])
            template = self._template[index] if index < len(self._template) else None
            self._check(index, kind, state, template)
            if kind in OURS.values():
                state["call"] = None
                if state["store"] is not None and device.type != "cpu":
                    state["store"].to(device, self._memo)
            else:
                state = {**(vars(template) if type(template) is kind else {}), **self._on(device, state)}
        layer: Any = self.cache.layers[index]
        layer = object.__new__(kind) if layer is None else layer
        vars(layer).update({name: value for name, value in state.items() if name not in vars(layer)})
        if isinstance(layer, PressLayer):
            layer.belong_to(self.cache)
        layer.__class__ = kind
        self.cache.layers[index] = layer

    def _check(self, index: int, kind: type[Any], state: Any, template: Any) -> None:
        """Check the state of a layer against the description of the cache and the layer that the model would make.

        Raises:
            ValueError: it does not fit them.
        """
        about, description = self.about, self.about["layers"][index]
        if not isinstance(state, dict):
            raise ValueError(f"its state is a {type(state).__name__}")
        check_names(kind, state)
        if kind in OURS.values():
            for name, value in (("merged_heads", 1), ("rows_chosen", False)):  # files of earlier versions lack them
                state.setdefault(name, value)
            if unknown := set(vars(PressLayer())) - {"call", "_cache"} - set(state):
                raise ValueError(f"its state lacks {', '.join(sorted(unknown))}")
            flags = ("static", "padded", "rows_chosen", "columns", "latent", "record_past", "is_initialized")
            if wrong := [name for name in flags if not isinstance(state[name], bool)]:
                raise ValueError(f"its {', '.join(wrong)} cannot be used")
            merged_heads = state["merged_heads"]
            expected_heads = self._facts[index].merged_heads if index in self._facts else 1
            if type(merged_heads) is not int or merged_heads != expected_heads:
                raise ValueError(f"it stores {merged_heads!r} KV heads as one, and this model {expected_heads}")
            if state["assigned"] != {} or state["interrupted"] is not None:
                raise ValueError("it is from an interrupted pass")
            if (store := state["store"]) is None:
                return
            if (state["batch_size"], state["dtype"]) != (about["batch"], store.dtype):
                raise ValueError(f"it is not one of {about['batch']} rows of {store.dtype}")
            check_store(store, about["length"])
            if (store.batch, store.seen, max(store.stored())) != (
                about["batch"],
                description["seen"],
                description["stored"],
            ):
                raise ValueError("its number of pairs differs from the description")
            if facts := self._facts.get(index):
                shape = (store.heads, store.window.keys.shape[3])
                if facts.declared and not state["columns"] and shape != (facts.held_heads, facts.head_dim):
                    raise ValueError(
                        f"it has {shape[0]} kv heads of {shape[1]}, not {facts.held_heads} of {facts.head_dim}"
                    )
            return
        if "store" in state:
            raise ValueError(f"a {kind.__name__} has no store")
        defaults = vars(template) if type(template) is kind else {}
        if lacking := [
            name for name in ("is_initialized", "cumulative_length") if name in defaults and name not in state
        ]:
            raise ValueError(f"its state lacks {', '.join(lacking)}")
        for name, value in state.items():
            default = defaults.get(name)
            if isinstance(default, dict) and not _is_like(value, default):
                raise ValueError(f"its {name} has not an entry for each of {list(default)}")
            if name in STATES and not all(_has_rows(states, about["batch"]) for states in value.values()):
                raise ValueError(f"its {name} are not those of {about['batch']} rows")
            if name in FIXED and default is not None and value != default:
                raise ValueError(f"its {name} is {value!r}, not {default!r}")
            if isinstance(default, int) and type(value) is not type(default):
                raise ValueError(f"its {name} is {value!r}, not {type(default).__name__}")
        if not is_length(seen := state.get("cumulative_length", 0)) or seen > about["length"]:
            raise ValueError(f"it has seen {seen!r} of {about['length']} tokens")
        pairs = [state.get(name) for name in ("keys", "values")]
        if any(pair is not None for pair in pairs):
            shapes = [tuple(pair.shape[:3]) for pair in pairs if isinstance(pair, Tensor) and pair.dim() == 4]
            if len(shapes) != 2 or shapes[0] != shapes[1] or shapes[0][0] != about["batch"]:
                raise ValueError(f"its keys and values are not those of {about['batch']} rows")

    def _on(self, device: torch.device, state: Any) -> Any:
        """Move state to a device; objects shared by several layers stay shared."""
        return state if device.type == "cpu" else moved(state, device, self._memo)


def _has_rows(states: Any, batch: int) -> bool:
    return states is None or (isinstance(states, Tensor) and states.shape[:1] == (batch,))


def _is_like(value: Any, known: dict[Any, Any]) -> bool:
    """Whether a value is a dict with the keys of `known`, and booleans where `known` has booleans."""
    return (
        isinstance(value, dict)
        and value.keys() == known.keys()
        and all(isinstance(value[key], bool) for key in known if isinstance(known[key], bool))
    )


def _devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Return the device of every attention layer by its cache index."""
    return {cache_place(module): next(_parameters(module, model)).device for module in attention_modules(model)}


def _parameters(module: Any, model: PreTrainedModel) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from model.parameters()
